// SPDX-License-Identifier: Apache-2.0
// What the played GPU does in streams of a caller's.
#include "kernels/cuda/device/caller.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gpu_fake/play.h"
#include "kernels/cuda/device/arrivals.h"
#include "kernels/cuda/device/event.h"
#include "kernels/cuda/device/launch_chain.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode::cuda {

OnDevice::OnDevice(int device) {
  if (device != 0) throw RunError("expected the one GPU that is played");
}
OnDevice::~OnDevice() = default;

void check_not_captured(const CallerStream&) {}

// Streams are lists already: nothing is held back.
struct LaunchGraphs::Parts {
  bool lost = false;
};
namespace {
thread_local LaunchChain* chain_here = nullptr;
bool flush_fails = false;
}  // namespace
void fail_next_flush() {
  flush_fails = true;
}
LaunchGraphs::LaunchGraphs() : parts_(std::make_unique<Parts>()) {}
LaunchGraphs::~LaunchGraphs() = default;
bool LaunchGraphs::has_lost() const {
  return parts_->lost;
}
LaunchChain::LaunchChain(LaunchGraphs& graphs, StreamHandle stream) : graphs_(graphs), stream_(stream) {
  chain_here = this;
}
LaunchChain::~LaunchChain() {
  chain_here = nullptr;
}
void flush_launches() {
  if (chain_here == nullptr || !std::exchange(flush_fails, false)) return;
  chain_here->parts().lost = true;
  throw RunError("the GPU failed: it is played");
}
bool holds_back(StreamHandle) {
  return false;
}

struct Workspace::Piece {
  Buffer buffer;
  std::mutex mutex;
};
Workspace::Workspace(std::int64_t bytes, const CallerStream&) : piece_(std::make_shared<Piece>()) {
  piece_->buffer = Buffer(bytes, "the workspace of a stream");
  lock_ = std::unique_lock(piece_->mutex);
}
Workspace::~Workspace() = default;
void* Workspace::data() const {
  return piece_->buffer.as<void>();
}

namespace {
std::map<void*, std::shared_ptr<Buffer>>& stream_memory() {
  static std::map<void*, std::shared_ptr<Buffer>> all;
  return all;
}
std::mutex stream_memory_mutex;
}  // namespace
StreamMemory::StreamMemory(std::int64_t bytes, const CallerStream& stream) : stream_(stream) {
  if (bytes == 0) return;
  auto buffer = std::make_shared<Buffer>(bytes, "memory of a stream");
  data_ = buffer->as<void>();
  const std::lock_guard guard(stream_memory_mutex);
  stream_memory()[data_] = std::move(buffer);
}
StreamMemory::~StreamMemory() {
  if (data_ == nullptr) return;
  const std::lock_guard guard(stream_memory_mutex);
  // Freed when the stream comes to it.
  enqueue(stream_.stream, [buffer = stream_memory().extract(data_).mapped()] {});
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

namespace {

void copy_rows(const TakenRows& rows) {
  const KvLayout& layout = rows.layout;
  const auto bytes = static_cast<std::size_t>(layout.row_bytes());
  for (int head = 0; head < layout.kv_heads; ++head)
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      char* const to = rows.layer + layout.key_offset(head, row);
      std::memcpy(to, rows.from.key(head, row - rows.first), bytes);
      std::memcpy(to + layout.value_offset(), rows.from.value(head, row - rows.first), bytes);
    }
}

void unrotate(const TurnedQueries& from, const float* q) {
  const std::int64_t half = from.d / 2;
  for (std::int64_t row = 0; row < from.tokens * from.heads; ++row)
    for (std::int64_t i = 0; i < half; ++i) {
      const float a = q[row * from.d + i], b = q[row * from.d + i + half],
                  angle = -static_cast<float>(from.begin + row / from.heads) * from.frequencies[i],
                  cosine = std::cos(angle) / from.attention_scaling,
                  sine = std::sin(angle) / from.attention_scaling;
      const bool turns = i < from.turning;
      from.plain[row * from.d + i] = turns ? a * cosine - b * sine : a;
      from.plain[row * from.d + i + half] = turns ? b * cosine + a * sine : b;
    }
}

}  // namespace

void arrive(const TakenRows& rows, const TurnedQueries& queries, StreamHandle stream) {
  enqueue(stream, [=] {
    copy_rows(rows);
    if (queries.widened != nullptr || queries.plain != nullptr) {
      std::vector<float> q(static_cast<std::size_t>(queries.tokens * queries.heads * queries.d));
      kernels().widen(queries.q, queries.type, std::ssize(q), q.data());
      if (queries.widened != nullptr) std::copy(q.begin(), q.end(), queries.widened);
      if (queries.plain != nullptr) unrotate(queries, q.data());
    }
    for (std::int64_t t = 0; queries.places != nullptr && t < queries.tokens; ++t)
      queries.places[t] = {0, static_cast<std::int32_t>(queries.begin + t)};
  });
}

void depart(const float* from, std::int64_t count, void* to, DType type, StreamHandle stream) {
  enqueue(stream, [=] { kernels().narrow(from, count, type, to); });
}

}  // namespace lode::cuda
