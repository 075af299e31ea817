// SPDX-License-Identifier: Apache-2.0
// The bound of a page is a product: of the positive parts of q with the largest numbers and of the negative
// parts with the least. Work map of score_kernel: grid (blocks, KV heads x chunks of their heads, query
// tokens); a lane owns eight bounds of a page and keeps their weights for all heads in registers; a warp
// takes so many pages that its sums, lanes' parts added up and dealt out at once, are one number a lane. All
// sums of a page are added in the same order, so pages of equal bounds have equal scores.
#include <algorithm>

#include "kernels/cuda/baselines/page_bounds.h"
#include "kernels/cuda/device/eight_numbers.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/sm_count.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kEach = 8;        // bounds of a lane
constexpr int kMostDim = 256;   // channels
constexpr int kBlocksOfSm = 3;  // as registers allow

struct Extreme {
  float least = INFINITY, largest = -INFINITY;
};

/// A warp per page; a lane has every 32nd channel.
template <class T>
__global__ void __launch_bounds__(kThreads)
    bound_kernel(const char* base, const __grid_constant__ KvLayout layout, std::int64_t begin,
                 std::int64_t end, const __grid_constant__ PageBounds to) {
  constexpr int kSlots = kMostDim / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, d = layout.head_dim;
  const int head = static_cast<int>(blockIdx.y), layer = static_cast<int>(blockIdx.z);
  const std::int64_t page = begin + std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (page >= end) return;
  Extreme of[kSlots];
  const std::int64_t first = to.sink + page * to.page;
#pragma unroll 4
  for (std::int64_t key = first; key < first + to.page; ++key) {
    const T* const row =
        reinterpret_cast<const T*>(base + layer * layout.layer_stride + layout.key_offset(head, key));
    float x[kSlots];
    bool finite = true;
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      x[j] = lane + 32 * j < d ? widen(row[lane + 32 * j]) : 0.0f;
      finite = finite && isfinite(x[j]);
    }
    finite = __all_sync(~0u, finite);
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const float value = finite ? x[j] : 0.0f;
      of[j] = {fminf(of[j].least, value), fmaxf(of[j].largest, value)};
    }
  }
  char* const bounds =
      to.bounds + layer * to.layer_bytes(layout) + (head * to.capacity + page) * to.page_bytes(layout);
  const float* const levels = to.levels + (std::int64_t{layer} * layout.kv_heads + head) * 2 * d;
#pragma unroll
  for (int j = 0; j < kSlots; ++j) {
    const int c = lane + 32 * j;
    if (32 * j >= d) break;
    if (!to.coded()) {
      if (c >= d) break;
      narrow(of[j].largest, reinterpret_cast<T*>(bounds) + c);
      narrow(of[j].least, reinterpret_cast<T*>(bounds) + d + c);
      continue;
    }
    const bool there = c < d;
    const float low = there ? levels[c] : 0.0f, step = there ? levels[d + c] : 0.0f;
    put_codes(there ? bounds + c * to.bits / 8 : nullptr,
              code_of(of[j].largest, low, step, to.bits, CodeRounding::up), to.bits);
    put_codes(there ? bounds + (d + c) * to.bits / 8 : nullptr,
              code_of(of[j].least, low, step, to.bits, CodeRounding::down), to.bits);
  }
}

struct Params {
  Queries queries;
  PageBounds bounds;
  bool sum_heads = false;
  int chunks = 1;  ///< of the heads of a KV head
  std::int64_t window = 0;
  float* scores = nullptr;
  std::int64_t stride = 0;
};

/// Eight consecutive numbers.
__device__ __forceinline__ void read_eight(const float* from, float (&x)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

/// What lanes weigh their bounds by: [slots][heads][bounds]. In few instructions, since they run once.
template <int kLanes, int kSlots, int kHeads>
struct Weights {
  float of[kSlots][kHeads][kEach] = {};

  __device__ void take(const Params& p, int query, int kv_head, int first) {
    const int d = p.queries.layout.head_dim, group = p.queries.query_heads / p.queries.layout.kv_heads;
    const float* const heads =
        p.queries.q + (std::int64_t{query} * p.queries.query_heads + kv_head * group + first) * d;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int at = (static_cast<int>(threadIdx.x) % kLanes + s * kLanes) * kEach;
      if (at >= 2 * d) break;
      const bool largest = at < d;
      const int c = largest ? at : at - d;
      const auto add = [&](const float* q, float(&to)[kEach]) {
        float x[kEach];
        read_eight(q + c, x);
#pragma unroll
        for (int i = 0; i < kEach; ++i) to[i] += largest ? fmaxf(x[i], 0.0f) : fminf(x[i], 0.0f);
      };
      if (p.sum_heads) {
#pragma unroll 1
        for (int g = 0; g < group; ++g) add(heads + g * d, of[s][0]);
      } else {
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
          if (first + h < group) add(heads + h * d, of[s][h]);
      }
      if (!p.bounds.coded()) continue;
      float step[kEach];
      read_eight(p.bounds.levels + (2 * kv_head + 1) * d + c, step);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) of[s][h][i] *= step[i];
      }
    }
  }
};

/// From 2 kHalf numbers a lane, each a part of a sum over as many lanes, to the sum of the lane's own number.
template <int kHalf, int kCount>
__device__ __forceinline__ float deal_out(float (&x)[kCount]) {
  const bool upper = (threadIdx.x & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float kept = upper ? x[i + kHalf] : x[i], given = upper ? x[i] : x[i + kHalf];
    x[i] = kept + __shfl_xor_sync(~0u, given, kHalf);
  }
  if constexpr (kHalf > 1) return deal_out<kHalf / 2>(x);
  return x[0];
}

template <class Piece, int kLanes, int kSlots, int kHeads>
__global__ void __launch_bounds__(kThreads) score_kernel(const __grid_constant__ Params p) {
  constexpr int kBeside = 32 / kLanes;               // pages that a warp reads at a time
  constexpr int kBehind = kLanes / kHeads;           // and how often, until there is a sum for each lane
  constexpr int kAhead = kBehind < 8 ? kBehind : 8;  // of these, under way at once
  constexpr int kBatches = kBehind / kAhead, kUnit = kBeside * kBehind;
  const int lane = static_cast<int>(threadIdx.x) % 32, own = lane % kLanes;
  const int query = static_cast<int>(blockIdx.z), kv_head = static_cast<int>(blockIdx.y) / p.chunks,
            first_head = static_cast<int>(blockIdx.y) % p.chunks * kHeads;
  const QueryToken token = p.queries.tokens[query];
  const std::int64_t far = token.position + 1 - p.window - p.bounds.sink;
  const int pages = far <= 0 ? 0 : static_cast<int>(far / p.bounds.page);
  const int warps = static_cast<int>(gridDim.x) * kWarps;
  int unit = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
  const std::int64_t page_bytes = p.bounds.page_bytes(p.queries.layout);
  const char* const bounds = p.bounds.bounds + token.sequence * p.bounds.sequence_stride +
                             kv_head * p.bounds.capacity * page_bytes + own * Piece::kBytes;
  Piece next[kAhead][kSlots];
  const auto page_of = [&](int of_unit, int nth) { return of_unit * kUnit + nth * kBeside + lane / kLanes; };
  const auto load = [&](int of_unit, int batch) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int page = page_of(of_unit, batch * kAhead + a);
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        if (page < pages && (own + s * kLanes) * kEach < 2 * p.queries.layout.head_dim)
          next[a][s].load(bounds + page * page_bytes + s * kLanes * Piece::kBytes);
        else
          next[a][s] = {};
      }
    }
  };
  if (!p.bounds.fresh) load(unit, 0);
  wait_for_predecessor();
  release_successor();
  if (p.bounds.fresh) load(unit, 0);
  Weights<kLanes, kSlots, kHeads> weights;
  weights.take(p, query, kv_head, first_head);
  const int group = p.queries.query_heads / p.queries.layout.kv_heads;
  for (; unit * kUnit < pages; unit += warps) {
    float sums[kLanes] = {};  // [heads][behind]
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      Piece now[kAhead][kSlots];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
#pragma unroll
        for (int s = 0; s < kSlots; ++s) now[a][s] = next[a][s];
      }
      if (batch + 1 < kBatches)
        load(unit, batch + 1);
      else
        load(unit + warps, 0);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
#pragma unroll
        for (int s = 0; s < kSlots; ++s) {
          float x[kEach];
          now[a][s].widened(x);
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            float& sum = sums[h * kBehind + batch * kAhead + a];
#pragma unroll
            for (int i = 0; i < kEach; ++i) sum = fmaf(weights.of[s][h][i], x[i], sum);
          }
        }
      }
    }
    const float score = deal_out<kLanes / 2>(sums);
    const int head = first_head + own / kBehind, page = page_of(unit, own % kBehind);
    const int lists = p.sum_heads ? 1 : group;
    const std::int64_t list = (std::int64_t{query} * p.queries.layout.kv_heads + kv_head) * lists + head;
    if (page < pages && head < lists) p.scores[list * p.stride + page] = score;
  }
}

template <class Piece, int kLanes, int kSlots, int kHeads>
void launch(Params p, std::int64_t most_pages, StreamHandle stream) {
  constexpr std::int64_t kUnit = std::int64_t{32} / kHeads;
  const int group = p.queries.query_heads / p.queries.layout.kv_heads;
  p.chunks = p.sum_heads ? 1 : (group + kHeads - 1) / kHeads;
  const std::int64_t lists = std::int64_t{p.queries.layout.kv_heads} * p.chunks;
  const std::int64_t enough = (most_pages + kUnit * kWarps - 1) / (kUnit * kWarps);
  const std::int64_t fill = std::max<std::int64_t>(1, kBlocksOfSm * processors() / (lists * p.queries.count));
  const dim3 grid(static_cast<unsigned>(std::clamp<std::int64_t>(enough, 1, fill)),
                  static_cast<unsigned>(lists), static_cast<unsigned>(p.queries.count));
  EarlyLaunch(grid, kThreads, 0, 1, stream)(score_kernel<Piece, kLanes, kSlots, kHeads>, p);
}

template <class Piece, int kLanes, int kSlots>
void launch_for_heads(const Params& p, std::int64_t most_pages, StreamHandle stream) {
  const int heads = p.sum_heads ? 1 : p.queries.query_heads / p.queries.layout.kv_heads;
  if (heads == 1) return launch<Piece, kLanes, kSlots, 1>(p, most_pages, stream);
  if (heads <= 4) return launch<Piece, kLanes, kSlots, 4>(p, most_pages, stream);
  launch<Piece, kLanes, kSlots, 8>(p, most_pages, stream);
}

template <class Piece>
void launch_for_dim(const Params& p, std::int64_t most_pages, StreamHandle stream) {
  const int pieces = 2 * p.queries.layout.head_dim / kEach;
  if (pieces <= 16) return launch_for_heads<Piece, 16, 1>(p, most_pages, stream);
  if (pieces <= 32) return launch_for_heads<Piece, 32, 1>(p, most_pages, stream);
  launch_for_heads<Piece, 32, 2>(p, most_pages, stream);
}

}  // namespace

bool can_bound_pages(int head_dim) {
  return head_dim <= kMostDim && head_dim % kEach == 0;
}

void bound_pages(const char* base, const KvLayout& layout, int layers, std::int64_t begin, std::int64_t end,
                 const PageBounds& bounds, StreamHandle stream) {
  if (begin >= end) return;
  const dim3 grid(static_cast<unsigned>((end - begin + kWarps - 1) / kWarps),
                  static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(layers));
  if (layout.type == DType::f32)
    Launch(grid, kThreads, 0, stream)(bound_kernel<float>, base, layout, begin, end, bounds);
  else if (layout.type == DType::f16)
    Launch(grid, kThreads, 0, stream)(bound_kernel<__half>, base, layout, begin, end, bounds);
  else
    Launch(grid, kThreads, 0, stream)(bound_kernel<__nv_bfloat16>, base, layout, begin, end, bounds);
}

void score_pages(const Queries& queries, const PageBounds& bounds, bool sum_heads, std::int64_t window,
                 std::int64_t max_tokens, float* scores, std::int64_t stride, StreamHandle stream) {
  const std::int64_t most_pages = (max_tokens - window - bounds.sink) / bounds.page;
  if (queries.count == 0 || most_pages <= 0) return;
  const Params p = {.queries = queries,
                    .bounds = bounds,
                    .sum_heads = sum_heads,
                    .window = window,
                    .scores = scores,
                    .stride = stride};
  if (bounds.bits == 4) return launch_for_dim<Coded<std::uint32_t>>(p, most_pages, stream);
  if (bounds.bits == 2) return launch_for_dim<Coded<std::uint16_t>>(p, most_pages, stream);
  if (queries.layout.type == DType::f32) return launch_for_dim<Stored<float>>(p, most_pages, stream);
  if (queries.layout.type == DType::f16) return launch_for_dim<Stored<__half>>(p, most_pages, stream);
  launch_for_dim<Stored<__nv_bfloat16>>(p, most_pages, stream);
}

}  // namespace lode::cuda
