// SPDX-License-Identifier: Apache-2.0
// Prefill attention in float32, for parity with the CPU: blocks of 16 queries of one head, tiles of 32 keys
// that start at multiples of 32, an online softmax. A query's bits depend on its own keys alone, not on how
// the prompt was cut into chunks.
#include <algorithm>
#include <string>

#include "kernels/cuda/attend/attend_block.h"
#include "kernels/cuda/attend/attend_latent.h"
#include "kernels/cuda/attend/attend_shared.h"
#include "kernels/cuda/attend/attend_window.h"
#include "kernels/cuda/attend/merge_states.h"
#include "kernels/cuda/attend/prefill.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/launch.cuh"

namespace lode::cuda {

namespace {

// Lists are cut where queries alone would not keep the GPU busy.
constexpr int kMostParted = 132, kMostParts = 16;  // blocks, parts
constexpr int kPartedRows = 128;                   // of a block: one query head of one token each

constexpr int kWarps = 4, kThreads = kWarps * 32, kPerWarp = 4, kQueries = kWarps * kPerWarp, kKeys = 32;

/// Of queries and of a tile's keys, and of its values beside them or in their place.
int shared_bytes(int d, bool beside) {
  return static_cast<int>(sizeof(float)) * (d * kQueries + (beside ? 2 : 1) * kKeys * (d + 1));
}

/// Rows of keys, or with `value` of 1 of values, to shared memory, zeros where `row_at` says -1.
template <class T, class Rows, class RowAt>
__device__ void load_tile(const Rows& stored, int value, int d, int kv_head, const RowAt& row_at,
                          float* to /*[kKeys, d + 1]*/) {
  for (int i = static_cast<int>(threadIdx.x); i < kKeys * d; i += kThreads) {
    const int row = i / d, c = i % d, at = row_at(row);
    to[row * (d + 1) + c] =
        at < 0 ? 0.0f : widen(reinterpret_cast<const T*>(stored.at(kv_head, at, value))[c]);
  }
}

/// What a warp knows of its queries so far.
template <int PerLane>
struct State {
  float max[kPerWarp], sum[kPerWarp], out[kPerWarp][PerLane];
};

/// Lane j takes key j; of a tile each query sees keys from its number in `from` to before that in `mine`. `values`
/// gives its values, once all threads are done with the keys.
template <int PerLane, class Values>
__device__ __forceinline__ void add_tile(const float* q /*[d, kQueries]*/, const float* k,
                                         const Values& values, int d, float scale,
                                         const int (&from)[kPerWarp], const int (&mine)[kPerWarp],
                                         State<PerLane>& state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float s[kPerWarp] = {};
  for (int c = 0; c < d; ++c) {
    const float key = k[lane * (d + 1) + c];
    const float4 query = *reinterpret_cast<const float4*>(q + c * kQueries);
    s[0] = fmaf(query.x, key, s[0]);
    s[1] = fmaf(query.y, key, s[1]);
    s[2] = fmaf(query.z, key, s[2]);
    s[3] = fmaf(query.w, key, s[3]);
  }
#pragma unroll
  for (int r = 0; r < kPerWarp; ++r) {
    const bool seen = lane >= from[r] && lane < mine[r];
    s[r] = seen ? s[r] * scale : -INFINITY;
    float high = s[r], total;
    for (int offset = 16; offset > 0; offset /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, offset));
    high = fmaxf(high, state.max[r]);
    const float base = high == -INFINITY ? 0.0f : high;
    const float keep = expf(state.max[r] - base);
    s[r] = seen ? expf(s[r] - base) : 0.0f;
    total = s[r];
    for (int offset = 16; offset > 0; offset /= 2) total += __shfl_xor_sync(~0u, total, offset);
    state.sum[r] = fmaf(state.sum[r], keep, total);
    state.max[r] = high;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) state.out[r][i] *= keep;
  }
  const float* const v = values();
  for (int j = max(0, from[0]); j < kKeys; ++j) {
    float value[PerLane], p[kPerWarp];
#pragma unroll
    for (int i = 0; i < PerLane; ++i) value[i] = lane + 32 * i < d ? v[j * (d + 1) + lane + 32 * i] : 0.0f;
#pragma unroll
    for (int r = 0; r < kPerWarp; ++r) p[r] = __shfl_sync(~0u, s[r], j);
#pragma unroll
    for (int r = 0; r < kPerWarp; ++r) {
      // A NaN among the values of keys that a query does not see is none of its own.
      if (j < from[r] || j >= mine[r]) continue;
#pragma unroll
      for (int i = 0; i < PerLane; ++i) state.out[r][i] = fmaf(p[r], value[i], state.out[r][i]);
    }
  }
}

template <class T, int PerLane, class Place>
__global__ __launch_bounds__(kThreads) void prefill_kernel(const Queries in, int position,
                                                           const PrefillKeys keys, const Place place,
                                                           const bool beside) {
  extern __shared__ __align__(16) float shared[];
  const int d = in.layout.head_dim, head = static_cast<int>(blockIdx.y);
  const int kv_head = head / (in.query_heads / in.layout.kv_heads);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // The last queries have the most keys: they start first.
  const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kQueries;
  float *q = shared, *k = q + d * kQueries, *v = beside ? k + kKeys * (d + 1) : k;
  for (int i = static_cast<int>(threadIdx.x); i < kQueries * d; i += kThreads) {
    const int row = first + i / d, c = i % d;
    q[c * kQueries + i / d] =
        row < in.count ? in.q[(std::int64_t{row} * in.query_heads + head) * d + c] : 0.0f;
  }
  const auto stored = place.rows(in);
  State<PerLane> state;
#pragma unroll
  for (int r = 0; r < kPerWarp; ++r) {
    state.max[r] = -INFINITY;
    state.sum[r] = 0.0f;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) state.out[r][i] = 0.0f;
  }
  const int part = static_cast<int>(blockIdx.z);
  const int2 places = keys.places(kv_head, part);
  const auto add = [&](const auto& row_at, const int(&from)[kPerWarp], const int(&mine)[kPerWarp]) {
    __syncthreads();
    load_tile<T>(stored, 0, d, kv_head, row_at, k);
    if (beside) load_tile<T>(stored, 1, d, kv_head, row_at, v);
    __syncthreads();
    const auto values = [&] {
      if (!beside && !in.layout.shared_rows) {  // else a row is key and value
        __syncthreads();
        load_tile<T>(stored, 1, d, kv_head, row_at, v);
        __syncthreads();
      }
      return v;
    };
    add_tile<PerLane>(q + warp * kPerWarp, k, values, d, in.scale, from, mine, state);
  };
  for (int tile = places.x; tile < places.y; tile += kKeys) {
    int from[kPerWarp] = {}, mine[kPerWarp];
#pragma unroll
    for (int r = 0; r < kPerWarp; ++r) mine[r] = places.y - tile;
    add([&](int row) { return tile + row < places.y ? keys.row(kv_head, tile + row) : -1; }, from, mine);
  }
  const int2 behind = keys.near_keys(part, position + first, position + min(first + kQueries, in.count) - 1);
  const int near = behind.x, end = behind.y;
  for (int tile = near / kKeys * kKeys; tile < end; tile += kKeys) {
    int from[kPerWarp], mine[kPerWarp];
#pragma unroll
    for (int r = 0; r < kPerWarp; ++r) {
      const int at = keys.all > 0 ? end - 1 : min(position + first + warp * kPerWarp + r, end - 1);
      from[r] = max(keys.near_of(at), near) - tile;  // a part may have no keys
      mine[r] = at + 1 - tile;
    }
    add([&](int row) { return tile + row < end && tile + row >= near ? tile + row : -1; }, from, mine);
  }
#pragma unroll
  for (int r = 0; r < kPerWarp; ++r) {
    const int row = first + warp * kPerWarp + r;
    if (row >= in.count) break;
    const std::int64_t at = (std::int64_t{part} * in.count + row) * in.query_heads + head;
#pragma unroll
    for (int i = 0; i < PerLane; ++i) {
      if (lane + 32 * i < d) in.o[at * d + lane + 32 * i] = state.out[r][i] / state.sum[r];
    }
    if (in.lse != nullptr && lane == 0) in.lse[at] = state.max[r] + logf(state.sum[r]);
  }
}

template <class T, int PerLane, class Place>
void launch(const Queries& queries, int position, const PrefillKeys& keys, const Place& place,
            StreamHandle stream) {
  const int d = queries.layout.head_dim;
  const dim3 grid(static_cast<unsigned>((queries.count + kQueries - 1) / kQueries),
                  static_cast<unsigned>(queries.query_heads), static_cast<unsigned>(keys.parts));
  const auto kernel = prefill_kernel<T, PerLane, Place>;
  int device = 0, most = 0;
  LODE_CUDA(cudaGetDevice(&device));
  LODE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  const bool beside = !queries.layout.shared_rows && shared_bytes(d, true) <= most;
  const int bytes = shared_bytes(d, beside);
  if (bytes > most)
    throw RunError("attention to rows of " + std::to_string(d) + " numbers in float32: expected a GPU with " +
                   std::to_string(bytes) + " bytes of shared memory for a block, found " +
                   std::to_string(most) + ": use --device cpu");
  allow_shared_bytes(reinterpret_cast<const void*>(kernel), bytes);
  Launch(grid, kThreads, static_cast<std::size_t>(bytes), stream)(kernel, queries, position, keys, place,
                                                                  beside);
}

template <class T, class Place>
void launch_for(const Queries& queries, int position, const PrefillKeys& keys, const Place& place,
                StreamHandle stream) {
  const int d = queries.layout.head_dim;
  if (d <= 64)
    launch<T, 2>(queries, position, keys, place, stream);
  else if (d <= 128)
    launch<T, 4>(queries, position, keys, place, stream);
  else if (d <= 256)
    launch<T, 8>(queries, position, keys, place, stream);
  else
    launch<T, 20>(queries, position, keys, place, stream);
}

template <class Place>
void launch_for_type(const Queries& queries, int position, const PrefillKeys& keys, const Place& place,
                     StreamHandle stream) {
  switch (queries.layout.type) {
    case DType::f32:
      return launch_for<float>(queries, position, keys, place, stream);
    case DType::f16:
      return launch_for<__half>(queries, position, keys, place, stream);
    case DType::bf16:
      return launch_for<__nv_bfloat16>(queries, position, keys, place, stream);
    case DType::q8:
    case DType::q4:
      break;
  }
  throw RunError("expected keys of type f32, f16 or bf16, found " +
                 std::string(name_of(queries.layout.type)));
}

}  // namespace

void attend_prefill_f32(const Queries& queries, std::int32_t position, const PrefillKeys& keys,
                        StreamHandle stream, const StridedKv* kv) {
  if (kv != nullptr) return launch_for_type(queries, position, keys, InCallersArrays{*kv}, stream);
  launch_for_type(queries, position, keys, InLayer{}, stream);
}

namespace {

void attend_keys(const Queries& queries, std::int32_t position, const PrefillKeys& keys, StreamHandle stream,
                 Precision precision) {
  const int d = queries.layout.head_dim, most = queries.layout.shared_rows ? 640 : kMostPrefillDim;
  if (d < 2 || d > most || queries.query_heads % queries.layout.kv_heads != 0) {
    throw RunError("expected heads of 2 to " + std::to_string(most) + " numbers and whole groups, found " +
                   std::to_string(d) + " numbers and " + std::to_string(queries.query_heads) + " heads on " +
                   std::to_string(queries.layout.kv_heads));
  }
  if (precision == Precision::fast && attend_latent_prefill(queries, position, keys, stream)) return;
  if (precision == Precision::fast && (attend_prefill_hopper(queries, position, keys, stream) ||
                                       attend_prefill_mma(queries, position, keys, stream)))
    return;
  attend_prefill_f32(queries, position, keys, stream);
}

}  // namespace

void attend_prefill(const Queries& queries, std::int32_t position, StreamHandle stream, Precision precision) {
  if (queries.count > 0) attend_keys(queries, position, {}, stream, precision);
}

void attend_window_prefill(const Queries& queries, std::int32_t position, std::int64_t window,
                           StreamHandle stream, Precision precision) {
  if (queries.count > 0)
    attend_keys(queries, position, {.window = static_cast<int>(window)}, stream, precision);
}

namespace {

constexpr int kLeastShared = 256;  // keys of a part

/// Decided by the document and the model alone.
int shared_parts(std::int64_t keys, int kv_heads) {
  const std::int64_t most = std::clamp(kMostParted / kv_heads, 1, kMostParts);
  return static_cast<int>(std::clamp<std::int64_t>(keys / kLeastShared, 1, most));
}

}  // namespace

std::int64_t shared_workspace_bytes(int queries, int query_heads, int head_dim) {
  return std::int64_t{kMostParts} * queries * query_heads * (head_dim + 1) * std::int64_t{sizeof(float)};
}

StatePlanes attend_shared(const Queries& queries, std::int64_t count, void* workspace, StreamHandle stream,
                          Precision precision) {
  if (queries.count == 0) return {};
  LODE_ASSERT(count > 0);
  const std::int64_t rows = std::int64_t{queries.count} * queries.query_heads;
  PrefillKeys keys = {.all = static_cast<int>(count)};
  keys.parts = shared_parts(count, queries.layout.kv_heads);
  Queries parts = queries;
  parts.o = static_cast<float*>(workspace);
  parts.lse = parts.o + keys.parts * rows * queries.layout.head_dim;
  attend_keys(parts, 0, keys, stream, precision);
  return {parts.o, parts.lse, keys.parts};
}

std::int64_t rows_prefill_workspace_bytes(int head_dim) {
  return std::int64_t{kMostParted} * kPartedRows * (head_dim + 1) * std::int64_t{sizeof(float)};
}

void attend_rows_prefill(const Queries& queries, std::int32_t position, const RowLists& lists,
                         void* workspace, StreamHandle stream, Precision precision) {
  if (lists.lists_per_head != 1 || lists.log_weights != nullptr || lists.tail_output != nullptr)
    throw RunError("expected lists of whole groups without weights or a tail for many query tokens");
  if (queries.count == 0) return;
  const int group = queries.query_heads / queries.layout.kv_heads, d = queries.layout.head_dim;
  const std::int64_t rows = std::int64_t{queries.count} * queries.query_heads,
                     blocks = (std::int64_t{queries.count} * group + kPartedRows - 1) / kPartedRows *
                              queries.layout.kv_heads;
  PrefillKeys keys = {.rows = lists.rows, .counts = lists.counts, .capacity = lists.capacity};
  if (position + 1 - lists.window > lists.sink) {  // else no key is far
    keys.near = static_cast<int>(position + 1 - lists.window);
    keys.sink = static_cast<int>(lists.sink);
  }
  keys.parts = static_cast<int>(std::clamp<std::int64_t>(kMostParted / blocks, 1, kMostParts));
  if (keys.parts == 1) return attend_keys(queries, position, keys, stream, precision);
  Queries parts = queries;
  parts.o = static_cast<float*>(workspace);
  parts.lse = parts.o + keys.parts * rows * d;
  attend_keys(parts, position, keys, stream, precision);
  merge_parts(parts.o, parts.lse, keys.parts, rows, d, queries.o, queries.lse, stream);
}

}  // namespace lode::cuda
