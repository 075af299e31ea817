// SPDX-License-Identifier: Apache-2.0
// Work map of score_kernel: grid (blocks of keys, KV heads x chunks of their heads, query tokens); a thread
// has kKeys keys, so that what it reads of the weights in shared memory serves all of them. Bound by what the
// scores take: four bytes a key and head, where a label has eight for all heads.
#include "kernels/cuda/baselines/label_keys.h"
#include "kernels/cuda/device/eight_numbers.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/select/exponential_sum.cuh"

namespace lode::cuda {

namespace {

constexpr int kThreads = 128, kKeys = 4, kWarps = kThreads / 32;
static_assert(kThreads * kKeys == kKeysOfSum);

/// A warp per key; lanes have its channels.
template <class T>
__global__ void __launch_bounds__(kThreads)
    label_kernel(const char* base, const __grid_constant__ KvLayout layout, std::int64_t begin,
                 std::int64_t end, const __grid_constant__ KeyLabels to) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int head = static_cast<int>(blockIdx.y), layer = static_cast<int>(blockIdx.z);
  const std::int64_t key = begin + std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (key >= end) return;
  const T* const row =
      reinterpret_cast<const T*>(base + layer * layout.layer_stride + layout.key_offset(head, key));
  bool finite = true;
  for (int c = lane; c < layout.head_dim; c += 32) finite = finite && isfinite(widen(row[c]));
  finite = __all_sync(~0u, finite);
  const std::int64_t of = std::int64_t{layer} * layout.kv_heads + head;
  const std::int32_t* const channels = to.channels + of * to.count;
  const float* const levels = to.levels + of * 2 * to.count;
  char* const label =
      to.labels + layer * to.layer_bytes(layout.kv_heads) + (head * to.capacity + key) * to.label_bytes();
  const int padded = to.eights() * 8;
  for (int first = 0; first < padded; first += 32) {
    const int c = first + lane;
    const bool there = c < to.count;
    const float x = there && finite ? widen(row[channels[c]]) : 0.0f;
    if (to.coded()) {
      const float low = there ? levels[c] : 0.0f, step = there ? levels[to.count + c] : 0.0f;
      put_codes(c < padded ? label + c * to.bits / 8 : nullptr,
                code_of(x, low, step, to.bits, CodeRounding::nearest), to.bits);
    } else if (c < padded) {
      narrow(x, reinterpret_cast<T*>(label) + c);
    }
  }
}

struct Params {
  Queries queries;
  KeyLabels labels;
  int chunks = 1;  ///< of the heads of a KV head
  std::int64_t sink = 0, window = 0, max_tokens = 0;
  float* scores = nullptr;
  ExponentialSum* of_keys = nullptr;
};

template <class Eight, int kHeads>
__global__ void __launch_bounds__(kThreads) score_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) float weights[];  // [eights][8][kHeads]
  const Queries& in = p.queries;
  const int query = static_cast<int>(blockIdx.z), kv_head = static_cast<int>(blockIdx.y) / p.chunks,
            first_head = static_cast<int>(blockIdx.y) % p.chunks * kHeads;
  const int group = in.query_heads / in.layout.kv_heads, count = p.labels.count;
  const QueryToken token = in.tokens[query];
  const std::int64_t end = token.position + 1 - p.window, first = std::int64_t{blockIdx.x} * kThreads * kKeys;
  wait_for_predecessor();
  release_successor();
  if (first >= end) return;
  const std::int64_t row = std::int64_t{query} * in.query_heads + kv_head * group;
  for (int i = static_cast<int>(threadIdx.x); i < p.labels.eights() * 8 * kHeads; i += kThreads) {
    const int c = i / kHeads, head = first_head + i % kHeads;
    float weight = 0.0f;
    if (c < count && head < group) {
      weight = in.q[(row + head) * in.layout.head_dim + p.labels.channels[kv_head * count + c]] * in.scale;
      if (p.labels.coded()) weight *= p.labels.levels[(2 * kv_head + 1) * count + c];
    }
    weights[i] = weight;
  }
  __syncthreads();
  const char* const labels = p.labels.labels + token.sequence * p.labels.sequence_stride +
                             kv_head * p.labels.capacity * p.labels.label_bytes();
  const std::int64_t key = first + threadIdx.x;
  float sums[kKeys][kHeads] = {};
  for (int eight = 0; eight < p.labels.eights(); ++eight) {
    Eight raw[kKeys];
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const std::int64_t at = key + k * kThreads;
      if (at >= p.sink && at < end)
        raw[k].load(labels + at * p.labels.label_bytes() + eight * Eight::kBytes);
      else
        raw[k] = {};
    }
    float x[kKeys][8];
#pragma unroll
    for (int k = 0; k < kKeys; ++k) raw[k].widened(x[k]);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float* const weight = weights + (eight * 8 + i) * kHeads;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const float w = weight[h];
#pragma unroll
        for (int k = 0; k < kKeys; ++k) sums[k][h] = fmaf(w, x[k][i], sums[k][h]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first_head + h >= group) break;
    float* const scores = p.scores + (row + first_head + h) * p.max_tokens;
#pragma unroll
    for (int k = 0; k < kKeys; ++k) {
      const std::int64_t at = key + k * kThreads;
      if (at < end) scores[at] = at < p.sink ? -INFINITY : sums[k][h];
    }
  }
  if (p.of_keys == nullptr) return;
  const std::int64_t stride = sums_of_keys(p.max_tokens);
  post_block_sums<kThreads>(sums, key, p.sink, end, group - first_head,
                            p.of_keys + (row + first_head) * stride + blockIdx.x, stride);
}

template <class Eight, int kHeads>
void launch(Params p, StreamHandle stream) {
  const int group = p.queries.query_heads / p.queries.layout.kv_heads;
  p.chunks = (group + kHeads - 1) / kHeads;
  const dim3 grid = scorer_grid(p.queries, p.max_tokens - p.window, p.chunks);
  const int shared = p.labels.eights() * 8 * kHeads * 4;
  EarlyLaunch(grid, kThreads, shared, 1, stream)(score_kernel<Eight, kHeads>, p);
}

template <class Eight>
void launch_for_heads(const Params& p, StreamHandle stream) {
  const int group = p.queries.query_heads / p.queries.layout.kv_heads;
  if (group == 1) return launch<Eight, 1>(p, stream);
  if (group <= 4) return launch<Eight, 4>(p, stream);
  launch<Eight, 8>(p, stream);
}

}  // namespace

void label_keys(const char* base, const KvLayout& layout, int layers, std::int64_t begin, std::int64_t end,
                const KeyLabels& labels, StreamHandle stream) {
  if (begin >= end) return;
  const dim3 grid(static_cast<unsigned>((end - begin + kWarps - 1) / kWarps),
                  static_cast<unsigned>(layout.kv_heads), static_cast<unsigned>(layers));
  if (layout.type == DType::f32)
    Launch(grid, kThreads, 0, stream)(label_kernel<float>, base, layout, begin, end, labels);
  else if (layout.type == DType::f16)
    Launch(grid, kThreads, 0, stream)(label_kernel<__half>, base, layout, begin, end, labels);
  else
    Launch(grid, kThreads, 0, stream)(label_kernel<__nv_bfloat16>, base, layout, begin, end, labels);
}

void score_labels(const Queries& queries, const KeyLabels& labels, std::int64_t sink, std::int64_t window,
                  std::int64_t max_tokens, float* scores, ExponentialSum* sums, StreamHandle stream) {
  if (queries.count == 0 || max_tokens <= window) return;
  const Params p = {.queries = queries,
                    .labels = labels,
                    .sink = sink,
                    .window = window,
                    .max_tokens = max_tokens,
                    .scores = scores,
                    .of_keys = sums};
  if (labels.bits == 4) return launch_for_heads<Coded<std::uint32_t>>(p, stream);
  if (labels.bits == 2) return launch_for_heads<Coded<std::uint16_t>>(p, stream);
  if (queries.layout.type == DType::f32) return launch_for_heads<Stored<float>>(p, stream);
  if (queries.layout.type == DType::f16) return launch_for_heads<Stored<__half>>(p, stream);
  launch_for_heads<Stored<__nv_bfloat16>>(p, stream);
}

}  // namespace lode::cuda
