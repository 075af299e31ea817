// SPDX-License-Identifier: Apache-2.0
#include "gpu/host_tier.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "kernels/q4_rows.h"
#include "kv/placement.h"

namespace lode {

void copy_rows(const KvStore& store, int layer, int head, bool values, std::int64_t begin, std::int64_t end,
               DType type, std::byte* to) {
  const KvShape& shape = store.shape();
  const std::int64_t d = shape.head_dim, row = row_bytes_of(shape.type, d);
  const std::byte* from =
      store.rows(layer, head, values ? KvStore::Part::v : KvStore::Part::k).data() + begin * row;
  if (lies_on_gpu(shape.type)) {
    std::memcpy(to, from, static_cast<std::size_t>((end - begin) * row));
    return;
  }
  const float* scales = nullptr;
  if (shape.type == DType::q8)
    scales = reinterpret_cast<const float*>(
        store.rows(layer, head, values ? KvStore::Part::v_scale : KvStore::Part::k_scale).data());
  std::vector<float> wide(static_cast<std::size_t>(d));
  for (std::int64_t i = begin; i < end; ++i, from += row, to += bytes_of(type) * d) {
    if (scales == nullptr) {
      widen_q4(from, shape.head_dim, wide.data());
    } else {
      kernels().widen(from, DType::q8, d, wide.data());
      for (float& x : wide) x *= scales[i];
    }
    kernels().narrow(wide.data(), d, type, to);
  }
}

HostTier::HostTier(const KvShape& shape, ThreadPool& pool, cuda::StreamHandle stream)
    : shape_(shape),
      pool_(pool),
      stage_({shape.kv_heads, shape.head_dim, shape.type, 0, shape.shared_rows}, 1, shape.max_tokens),
      bases_(sizeof(const char*), "a layer's keys and values") {
  for (Bounce& bounce : bounce_) bounce.memory = cuda::PinnedBuffer(kBounceBytes);
  const char* const base = stage_.base();
  cuda::copy(bases_.as<void>(), &base, sizeof base, stream);
}

/// Copies rows of all heads by way of pinned memory, which the host fills while the GPU reads the other half:
/// from memory that is not pinned the driver copies at a fraction of the speed.
void HostTier::move(cuda::KvRange& to, int to_layer, const KvStore& store, int layer, std::int64_t begin,
                    std::int64_t end, cuda::StreamHandle stream) {
  constexpr cuda::KvRange::Part kTo[] = {cuda::KvRange::Part::k, cuda::KvRange::Part::v};
  const std::int64_t row = to.layout().row_bytes(), parts = shape_.shared_rows ? 1 : 2 * shape_.kv_heads;
  const std::int64_t most =
      std::max<std::int64_t>(1, kBounceBytes / (row * parts) / cuda::kBlockTokens) * cuda::kBlockTokens;
  for (std::int64_t at = begin; at < end;) {
    check_cancel();
    const std::int64_t some = std::min(end - at, most - at % cuda::kBlockTokens), bytes = some * row;
    Bounce& bounce = bounce_[next_bounce_];
    next_bounce_ = 1 - next_bounce_;
    bounce.sent.wait();
    if (bounce.memory.bytes() < bytes * parts) bounce.memory = cuda::PinnedBuffer(bytes * parts);
    auto* const memory = bounce.memory.as<std::byte>();
    pool_.for_each(parts, [&](std::int64_t part, int) {
      copy_rows(store, layer, static_cast<int>(part / 2), part % 2 == 1, at, at + some, shape_.type,
                memory + part * bytes);
    });
    for (std::int64_t part = 0; part < parts; ++part)
      to.to_device(to_layer, static_cast<int>(part / 2), kTo[part % 2], at, at + some, memory + part * bytes,
                   stream);
    bounce.sent.record(stream);
    moved_ += bytes * parts;
    at += some;
  }
}

void HostTier::bring(const KvStore& store, int layer, std::int64_t more, cuda::StreamHandle stream) {
  stage_.back(store.tokens() + more);
  move(stage_, 0, store, layer, 0, store.tokens(), stream);
}

void HostTier::hold(cuda::KvRange& held, const KvStore& store, std::int64_t sink, std::int64_t tail,
                    std::int64_t more, cuda::StreamHandle stream) {
  const std::int64_t tokens = store.tokens();
  sink = std::min(sink, tokens);
  tail = std::min(tail, tokens);
  const bool apart = held_end_ <= tail || held_begin_ >= held_end_;
  if (apart || tail - held_begin_ > kHeldTokens) {
    held.let_go(std::max(sink, held_sink_), tail);
    held_begin_ = tail;
    if (apart) held_end_ = tail;
  }
  held.let_go(tokens + more + kHeldTokens, shape_.max_tokens);
  held.hold(0, std::max<std::int64_t>(sink, 1));  // kernels may look at row 0 whatever the sink
  held.hold(std::min(tail, held_begin_), tokens + more);
  for (int layer = 0; layer < shape_.layers; ++layer) {
    move(held, layer, store, layer, std::min(held_sink_, sink), sink, stream);
    move(held, layer, store, layer, tail, held_begin_, stream);
    move(held, layer, store, layer, held_end_, tokens, stream);
  }
  held_sink_ = std::max(held_sink_, sink);
  held_begin_ = std::min(held_begin_, tail);
  held_end_ = tokens;
}

void HostTier::roll_back(std::int64_t tokens) {
  held_sink_ = std::min(held_sink_, tokens);
  held_end_ = std::min(held_end_, tokens);
  held_begin_ = std::min(held_begin_, held_end_);
}

}  // namespace lode
