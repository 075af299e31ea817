// SPDX-License-Identifier: Apache-2.0
// Work map: one block per (query token, query head), kWarps warps. Warp w takes keys w, w + kWarps, ... of
// the query's keys in rising order and keeps a running softmax, lanes sharing the dimensions; the warps'
// states are merged in order.
#include "kernels/cuda/attend/attend_generic.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/launch.cuh"

namespace lode::cuda {

namespace {

constexpr int kWarps = 8, kLanes = 32, kPerLane = kMaxGenericDim / kLanes;

/// Keys of one query: three stretches, of which the middle one is listed or plain.
struct Keys {
  std::int64_t sink = 0, listed = 0, window_begin = 0, count = 0;
  const std::int32_t* rows = nullptr;
  const float* log_weights = nullptr;

  __device__ explicit Keys(const StridedList& list)
      : count(list.count), rows(list.rows), log_weights(list.log_weights) {
    (rows != nullptr ? listed : sink) = count;
  }
  __device__ Keys(const RowLists& lists, bool has_lists, std::int64_t position, std::int64_t list) {
    const std::int64_t all = position + 1;
    if (!has_lists) {
      count = sink = all;
      return;
    }
    sink = min(lists.sink, all);
    listed = lists.counts[list];
    window_begin = max(sink, all - lists.window);
    count = sink + listed + (all - window_begin);
    rows = lists.rows + list * lists.capacity;
    if (lists.log_weights != nullptr) log_weights = lists.log_weights + list * lists.capacity;
  }
  __device__ std::int64_t row(std::int64_t i) const {
    return i < sink ? i : i < sink + listed ? rows[i - sink] : window_begin + (i - sink - listed);
  }
  __device__ float weight(std::int64_t i) const {
    return log_weights != nullptr && i >= sink && i < sink + listed ? log_weights[i - sink] : 0.0f;
  }
};

/// o := merge of (o, m, l) with another state over disjoint keys; an empty side changes nothing.
__device__ void merge_state(float* o, float& m, float& l, const float* other_o, float other_m, float other_l,
                            int stride, int d, int lane) {
  if (other_m == -INFINITY && !(other_l != other_l)) return;
  const float peak = m > other_m || other_m != other_m ? m : other_m;
  const float mine = m == -INFINITY ? 0.0f : __expf(m - peak), theirs = __expf(other_m - peak);
  for (int j = 0, i = lane; i < d; ++j, i += stride) o[j] = o[j] * mine + other_o[i] * theirs;
  l = l * mine + other_l * theirs;
  m = peak;
}

/// The keys of a head in a layer of the engine's ranges.
struct BlockSource {
  RowLists lists;
  bool has_lists = false;

  struct Head {
    const char* base;
    KvLayout layout;
    int kv_head;
    Keys keys;

    __device__ const char* key(std::int64_t row) const { return base + layout.key_offset(kv_head, row); }
    __device__ const char* value(std::int64_t row) const { return key(row) + layout.value_offset(); }
  };
  __device__ Head head(const Queries& queries, int query, int head) const {
    const int group = queries.query_heads / queries.layout.kv_heads, kv_head = head / group;
    const QueryToken token = queries.tokens[query];
    const std::int64_t list =
        has_lists ? (std::int64_t{query} * queries.layout.kv_heads + kv_head) * lists.lists_per_head +
                        (lists.lists_per_head > 1 ? head % group : 0)
                  : 0;
    return {queries.bases[token.sequence] + queries.layer_offset, queries.layout, kv_head,
            Keys(lists, has_lists, token.position, list)};
  }
};

/// In arrays of a caller's.
struct ArraySource {
  StridedKv kv;
  StridedLists given;
  RowLists lists;  // none

  struct Head {
    StridedKv kv;
    int kv_head;
    Keys keys;

    __device__ const char* key(std::int64_t row) const { return kv.key(kv_head, row); }
    __device__ const char* value(std::int64_t row) const { return kv.value(kv_head, row); }
  };
  __device__ Head head(const Queries& queries, int query, int head) const {
    const int kv_heads = queries.layout.kv_heads;
    const StridedList list = given.list(query, head, queries.query_heads, kv.rows - queries.count + 1);
    return {kv, head / (queries.query_heads / kv_heads), Keys(list)};
  }
};

template <class T, class Source>
__global__ void attend_kernel(Queries queries, const Source source) {
  __shared__ float state_o[kWarps][kMaxGenericDim];
  __shared__ float state_m[kWarps], state_l[kWarps];
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, d = queries.layout.head_dim;
  const int query = blockIdx.x / queries.query_heads, head = blockIdx.x % queries.query_heads;
  const auto of_head = source.head(queries, query, head);
  const Keys& keys = of_head.keys;
  const float* const q = queries.q + (std::int64_t{query} * queries.query_heads + head) * d;

  float o[kPerLane] = {}, m = -INFINITY, l = 0.0f;
  for (std::int64_t i = warp; i < keys.count; i += kWarps) {
    const std::int64_t row = keys.row(i);
    const T* const k = reinterpret_cast<const T*>(of_head.key(row));
    const T* const v = reinterpret_cast<const T*>(of_head.value(row));
    float s = 0.0f;
    for (int c = lane; c < d; c += kLanes) s += q[c] * widen(k[c]);
    for (int offset = kLanes / 2; offset > 0; offset /= 2) s += __shfl_xor_sync(0xffffffffu, s, offset);
    s = s * queries.scale + keys.weight(i);
    if (s == -INFINITY) continue;      // weight 0, and exp(-inf + inf) must not occur
    const float peak = s > m ? s : m;  // a NaN stays out of the peak and enters through the weight
    const float keep = m == -INFINITY ? 0.0f : __expf(m - peak),
                p = expf(s - (peak == -INFINITY ? 0.0f : peak));
    for (int j = 0, c = lane; c < d; ++j, c += kLanes) o[j] = o[j] * keep + p * widen(v[c]);
    l = l * keep + p;
    m = peak;
    if (s != s && m == -INFINITY) m = 0.0f;
  }
  for (int j = 0, c = lane; c < d; ++j, c += kLanes) state_o[warp][c] = o[j];
  if (lane == 0) state_m[warp] = m, state_l[warp] = l;
  __syncthreads();
  if (warp != 0) return;
  for (int w = 1; w < kWarps; ++w) merge_state(o, m, l, state_o[w], state_m[w], state_l[w], kLanes, d, lane);

  const std::int64_t out = std::int64_t{query} * queries.query_heads + head;
  float lse = l > 0.0f || l != l ? m + logf(l) : -INFINITY;
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
  for (int j = 0, c = lane; c < d; ++j, c += kLanes) o[j] *= inverse;
  const RowLists& lists = source.lists;
  if (lists.tail_lse != nullptr && lists.tail_lse[out] != -INFINITY) {
    const float tail = lists.tail_lse[out], peak = lse > tail ? lse : tail;
    const float mine = lse == -INFINITY ? 0.0f : expf(lse - peak), theirs = expf(tail - peak),
                sum = mine + theirs;
    for (int j = 0, c = lane; c < d; ++j, c += kLanes)
      o[j] = (o[j] * mine + lists.tail_output[out * d + c] * theirs) / sum;
    lse = peak + logf(sum);
  }
  for (int j = 0, c = lane; c < d; ++j, c += kLanes) queries.o[out * d + c] = o[j];
  if (queries.lse != nullptr && lane == 0) queries.lse[out] = lse;
}

template <class Source>
void launch(const Queries& queries, const Source& source, StreamHandle stream) {
  if (queries.count == 0) return;
  if (queries.layout.head_dim > kMaxGenericDim)
    throw RunError("expected a head dimension of at most " + std::to_string(kMaxGenericDim) +
                   " on the GPU, found " + std::to_string(queries.layout.head_dim));
  const int blocks = queries.count * queries.query_heads;
  const auto launch_for = [&](auto type) {
    Launch(blocks, kWarps * kLanes, 0, stream)(attend_kernel<decltype(type), Source>, queries, source);
  };
  if (queries.layout.type == DType::f32)
    launch_for(float{});
  else if (queries.layout.type == DType::f16)
    launch_for(__half{});
  else
    launch_for(__nv_bfloat16{});
}

}  // namespace

void attend_generic(const Queries& queries, const RowLists* lists, StreamHandle stream) {
  launch(queries, BlockSource{lists != nullptr ? *lists : RowLists{}, lists != nullptr}, stream);
}

void attend_generic(const Queries& queries, const StridedKv& kv, const StridedLists& lists,
                    StreamHandle stream) {
  launch(queries, ArraySource{kv, lists, {}}, stream);
}

}  // namespace lode::cuda
