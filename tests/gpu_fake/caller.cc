// SPDX-License-Identifier: Apache-2.0
// What the played GPU does in streams of a caller's.
#include "kernels/cuda/device/caller.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "gpu_fake/play.h"
#include "kernels/cuda/device/event.h"
#include "kernels/cuda/device/take_rows.h"
#include "lodestone/error.h"

namespace lode::cuda {

OnDevice::OnDevice(int device) {
  if (device != 0) throw RunError("expected the one GPU that is played");
}
OnDevice::~OnDevice() = default;

void check_not_captured(const CallerStream&) {}

struct Workspace::Piece {
  Buffer buffer;
  std::mutex mutex;
};
Workspace::Workspace(std::int64_t bytes, const CallerStream&) : piece_(std::make_shared<Piece>()) {
  piece_->buffer = Buffer(bytes, "the workspace of a stream");
  lock_ = std::unique_lock(piece_->mutex);
}
void* Workspace::data() const {
  return piece_->buffer.as<void>();
}

void upload(void* to, const void* from, std::int64_t bytes, const CallerStream& stream) {
  std::vector<std::byte> now(static_cast<std::size_t>(bytes));
  std::memcpy(now.data(), from, now.size());
  enqueue(stream.stream, [to, now = std::move(now)] { std::memcpy(to, now.data(), now.size()); });
}
void copy_and_wait(void* to, const void* from, std::int64_t bytes, const CallerStream& stream) {
  enqueue(stream.stream, [=] { std::memcpy(to, from, static_cast<std::size_t>(bytes)); });
  Event done;
  done.record(stream.stream);
  done.wait();
}

void take_rows(const StridedKv& from, const KvLayout& layout, char* layer, std::int64_t begin,
               std::int64_t end, StreamHandle stream) {
  enqueue(stream, [=] {
    const auto bytes = static_cast<std::size_t>(layout.row_bytes());
    for (int head = 0; head < layout.kv_heads; ++head)
      for (std::int64_t row = begin; row < end; ++row) {
        char* const to = layer + layout.key_offset(head, row);
        std::memcpy(to, from.key(head, row), bytes);
        std::memcpy(to + layout.value_offset(), from.value(head, row), bytes);
      }
  });
}

void unrotate_rows(const TurnedVectors& from, float* to, StreamHandle stream) {
  enqueue(stream, [=] {
    const std::int64_t half = from.d / 2;
    for (std::int64_t row = 0; row < from.tokens * from.heads; ++row)
      for (std::int64_t i = 0; i < half; ++i) {
        const float a = from.x[row * from.d + i], b = from.x[row * from.d + i + half],
                    angle = -static_cast<float>(from.begin + row / from.heads) * from.frequencies[i],
                    cosine = std::cos(angle) / from.attention_scaling,
                    sine = std::sin(angle) / from.attention_scaling;
        const bool turns = i < from.turning;
        to[row * from.d + i] = turns ? a * cosine - b * sine : a;
        to[row * from.d + i + half] = turns ? b * cosine + a * sine : b;
      }
  });
}

}  // namespace lode::cuda
