// SPDX-License-Identifier: Apache-2.0
// Prefill attention on the matrix unit: FlashAttention-2 (Dao, 2023, arXiv:2307.08691, algorithm 1). A block
// takes consecutive queries of one KV head, its whole group side by side, 16 rows a warp, and walks over
// tiles of 64 keys that start at multiples of 64 (of heads of 512 numbers, 32 keys; and there a block has one half of
// the values' columns, so that sums find room in registers: scores are computed twice); the next tile is on its way to shared memory while one is
// computed. Scores, the softmax and sums are float32; queries (times scale and log2 e), keys, weights and
// values have the store's type. A query's bits depend on its own keys alone, not on how the prompt was cut
// into chunks.
#include "kernels/cuda/attend/prefill.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/matrix.cuh"

namespace lode::cuda {

namespace {

/// A head dimension: sizes that follow from it.
template <int D>
struct Shape {
  static constexpr int kWarps = D <= 128 ? 12 : D <= 256 ? 8 : 7, kThreads = kWarps * 32, kRows = kWarps * 16;
  static constexpr int kKeys = D <= 256 ? 64 : 32;     // of a tile
  static constexpr int kColumns = D <= 256 ? D : 256;  // of values that a block has
  static constexpr int kHalves = D / kColumns;
  // Numbers from row to row: an odd count of 16 bytes, so no bank meets.
  static constexpr int kStride = D + 8, kValueStride = kColumns + 8;
  static constexpr int kKeyTile = kKeys * kStride, kTile = kKeyTile + kKeys * kValueStride;
  static constexpr bool kKeepQueries = D <= 128;  // in registers
  static constexpr int kTiles = 2 * kTile;        // keys and values, two of each
  static constexpr int kQueries = kRows * kStride;
  static constexpr int kShared =
      2 * (kKeepQueries ? (kTiles > kQueries ? kTiles : kQueries) : kTiles + kQueries);
};

template <class T, int D, class Rows>
class Attention {
  using S = Shape<D>;
  static constexpr int kKeys = S::kKeys, kColumns = S::kColumns;

 public:
  __device__ Attention(const Queries& in, const Rows& stored, int position, const PrefillKeys& keys,
                       T* shared)
      : in_(in),
        stored_(stored),
        keys_(keys),
        position_(position),
        memory_(shared),
        queries_(S::kKeepQueries ? shared : shared + S::kTiles),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        group_(in.query_heads / in.layout.kv_heads),
        kv_head_(static_cast<int>(blockIdx.y)),
        // The last queries have the most keys: they start first.
        first_(static_cast<int>(gridDim.x - 1 - blockIdx.x) * S::kRows),
        rows_(in.count * group_) {
    const int part = static_cast<int>(blockIdx.z) / S::kHalves;
    places_ = keys.places(kv_head_, part);
    list_tiles_ = (places_.y - places_.x + kKeys - 1) / kKeys;
    const int2 near = keys.near_keys(part, position + first_ / group_,
                                     position + (min(first_ + S::kRows, rows_) - 1) / group_);
    near_ = near.x, end_ = near.y;
    near_first_ = near_ / kKeys * kKeys;
    tiles_ = list_tiles_ + (end_ > near_ ? (end_ - near_first_ + kKeys - 1) / kKeys : 0);
    output_ = std::int64_t{part} * in.count * in.query_heads;
  }

  __device__ void run() {
    stage_queries();
    if (tiles_ > 0) load_tile(0, 0);
    for (int tile = 0, buffer = 0; tile < tiles_; ++tile, buffer ^= 1) {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      __syncthreads();
      if (tile + 1 < tiles_) load_tile(tile + 1, buffer ^ 1);
      // A warp whose queries all stand before this tile has nothing to do.
      if (tile < list_tiles_ || first_key(tile) <= position_of(warp_ * 16 + 15)) add_tile(tile, buffer);
    }
    store();
  }

 private:
  /// Of the values that this block has.
  __device__ static int first_column() { return static_cast<int>(blockIdx.z) % S::kHalves * kColumns; }
  /// Of a tile behind those of the list.
  __device__ int first_key(int tile) const { return near_first_ + (tile - list_tiles_) * kKeys; }
  __device__ int position_of(int row) const {
    return keys_.all > 0 ? end_ - 1 : position_ + min(first_ + row, rows_ - 1) / group_;
  }
  /// Row of the matrix of queries [count * Hq] of a row of this block.
  __device__ std::int64_t query_row(int row) const {
    const int at = first_ + row;
    return std::int64_t{at / group_} * in_.query_heads + kv_head_ * group_ + at % group_;
  }

  __device__ void stage_queries() {
    const float factor = in_.scale * 1.4426950408889634f;
    for (int i = static_cast<int>(threadIdx.x); i < S::kRows * D / 2; i += S::kThreads) {
      const int row = i / (D / 2), c = i % (D / 2) * 2;
      float2 q = {};
      if (first_ + row < rows_) q = *reinterpret_cast<const float2*>(in_.q + query_row(row) * D + c);
      *reinterpret_cast<unsigned*>(queries_ + row * S::kStride + c) = pack<T>(q.x * factor, q.y * factor);
    }
    if constexpr (S::kKeepQueries) {
      __syncthreads();
#pragma unroll
      for (int k = 0; k < D / 16; ++k) load_matrices(query_address(k), q_[k]);
      __syncthreads();
    }
  }
  __device__ const T* query_address(int k) const {
    return queries_ + (warp_ * 16 + lane_ % 16) * S::kStride + k * 16 + lane_ / 16 * 8;
  }

  /// The store's row of a row of a tile, -1 for none.
  __device__ int row_at(int tile, int row) const {
    if (tile < list_tiles_) {
      const int place = places_.x + tile * kKeys + row;
      return place < places_.y ? keys_.row(kv_head_, place) : -1;
    }
    const int at = first_key(tile) + row;
    return at < end_ && at >= near_ ? at : -1;
  }
  /// Keys, then values, zeros for those that no query of the block may see.
  __device__ void load_tile(int tile, int buffer) {
    T* to = memory_ + buffer * S::kTile;
    constexpr int kOfKey = D / 8, kOfValue = kColumns / 8;  // chunks of 16 bytes
    for (int i = static_cast<int>(threadIdx.x); i < kKeys * (kOfKey + kOfValue); i += S::kThreads) {
      const int which = i / (kKeys * kOfKey), chunks = which == 0 ? kOfKey : kOfValue,
                place = i - which * kKeys * kOfKey, row = place / chunks, chunk = place % chunks;
      const int at = row_at(tile, row), bytes = at < 0 ? 0 : 16;
      const char* from = stored_.at(kv_head_, at, which) + (which * first_column() + chunk * 8) * 2;
      T* const there = which == 0 ? to + row * S::kStride : to + S::kKeyTile + row * S::kValueStride;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(there + chunk * 8)),
                   "l"(bytes > 0 ? from : nullptr), "r"(bytes)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  __device__ void add_tile(int tile, int buffer) {
    const T* keys = memory_ + buffer * S::kTile;
    float s[kKeys / 8][4] = {};
    scores(keys, s);
    mask_where_needed(tile, s);
    unsigned p[kKeys / 16][4];
    softmax(s, p);
    add_values(keys + S::kKeyTile, p);
  }

  __device__ void scores(const T* keys, float (&s)[kKeys / 8][4]) const {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      unsigned q[4];
      if constexpr (S::kKeepQueries) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q[i] = q_[k][i];
      } else {
        load_matrices(query_address(k), q);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        unsigned b[4];
        load_matrices(keys + (n * 16 + lane_ / 16 * 8 + lane_ % 8) * S::kStride + k * 16 + lane_ / 8 % 2 * 8,
                      b);
        multiply<T>(s[2 * n], q, b[0], b[1]);
        multiply<T>(s[2 * n + 1], q, b[2], b[3]);
      }
    }
  }

  __device__ void mask_where_needed(int tile, float (&s)[kKeys / 8][4]) const {
    const int row = warp_ * 16;
    if (tile < list_tiles_) {
      const int left = places_.y - places_.x - tile * kKeys;
      if (left < kKeys) mask({0, left - 1}, {0, left - 1}, s);
      return;
    }
    const int first = first_key(tile);
    if (first + kKeys - 1 > position_of(row) || first < keys_.near_of(position_of(row + 15)))
      mask(seen_by(row + lane_ / 4, first), seen_by(row + lane_ / 4 + 8, first), s);
  }
  /// First and last key that a row sees, counted from `first`.
  __device__ int2 seen_by(int row, int first) const {
    const int position = position_of(row);
    return {keys_.near_of(position) - first, position - first};
  }
  /// Of each half only columns from its first to its last one stay.
  __device__ void mask(int2 of_first, int2 of_second, float (&s)[kKeys / 8][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = n * 8 + lane_ % 4 * 2 + i;
          const int2 seen = half == 0 ? of_first : of_second;
          if (column < seen.x || column > seen.y) s[n][2 * half + i] = -INFINITY;
        }
      }
    }
  }

  /// Weights of the tile, rounded, as the left operand of the values; earlier sums are scaled to the new
  /// maximum.
  __device__ void softmax(float (&s)[kKeys / 8][4], unsigned (&p)[kKeys / 16][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float high = max_[half];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) high = fmaxf(high, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      const float base = high == -INFINITY ? 0.0f : high;
      const float keep = exp2_fast(max_[half] - base);
      max_[half] = high;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) sum += s[n][2 * half + i] = exp2_fast(s[n][2 * half + i] - base);
      }
      sum_[half] = fmaf(sum_[half], keep, sum);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        out_[n][2 * half] *= keep;
        out_[n][2 * half + 1] *= keep;
      }
    }
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        p[k][i] = pack<T>(s[2 * k + i / 2][i % 2 * 2], s[2 * k + i / 2][i % 2 * 2 + 1]);
    }
  }

  __device__ void add_values(const T* values, const unsigned (&p)[kKeys / 16][4]) {
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kColumns / 16; ++n) {
        unsigned b[4];
        load_transposed(values + (k * 16 + lane_ % 16) * S::kValueStride + n * 16 + lane_ / 16 * 8, b);
        multiply<T>(out_[2 * n], p[k], b[0], b[1]);
        multiply<T>(out_[2 * n + 1], p[k], b[2], b[3]);
      }
    }
  }

  __device__ void store() const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int row = warp_ * 16 + lane_ / 4 + 8 * half;
      if (first_ + row >= rows_) continue;
      float* to = in_.o + (output_ + query_row(row)) * D + first_column() + lane_ % 4 * 2;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n)
        *reinterpret_cast<float2*>(to + n * 8) = {out_[n][2 * half] / sum, out_[n][2 * half + 1] / sum};
      if (in_.lse != nullptr && lane_ % 4 == 0 && first_column() == 0)
        in_.lse[output_ + query_row(row)] = 0.69314718055994531f * (max_[half] + log2f(sum));
    }
  }

  const Queries& in_;
  const Rows stored_;
  const PrefillKeys& keys_;
  const int position_;
  T *memory_, *queries_;  // two tiles of keys and values; where queries lie
  const int warp_, lane_, group_, kv_head_, first_, rows_;
  int end_, tiles_;                     // keys that some query of the block sees
  int2 places_;                         // of the head's list
  int list_tiles_, near_, near_first_;  // tiles of the list come first, then those from near_first_ on
  std::int64_t output_;                 // first row of this part's plane
  unsigned q_[S::kKeepQueries ? D / 16 : 1][4];
  float out_[kColumns / 8][4] = {}, max_[2] = {-INFINITY, -INFINITY}, sum_[2] = {};
};

template <class T, int D, class Place>
__global__ __launch_bounds__(Shape<D>::kThreads, 1) void prefill_kernel(const Queries in, int position,
                                                                        const PrefillKeys keys,
                                                                        const Place place) {
  extern __shared__ __align__(16) char memory[];
  const auto rows = place.rows(in);
  Attention<T, D, decltype(place.rows(in))>(in, rows, position, keys, reinterpret_cast<T*>(memory)).run();
}

template <class T, int D, class Place>
bool launch(const Queries& in, int position, const PrefillKeys& keys, const Place& place,
            StreamHandle stream) {
  using S = Shape<D>;
  int device = 0, shared = 0;
  LODE_CUDA(cudaGetDevice(&device));
  LODE_CUDA(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if (S::kShared > shared) return false;
  const std::int64_t rows = std::int64_t{in.count} * (in.query_heads / in.layout.kv_heads);
  const dim3 grid(static_cast<unsigned>((rows + S::kRows - 1) / S::kRows),
                  static_cast<unsigned>(in.layout.kv_heads), static_cast<unsigned>(keys.parts * S::kHalves));
  const auto kernel = prefill_kernel<T, D, Place>;
  allow_shared_bytes(reinterpret_cast<const void*>(kernel), S::kShared);
  Launch(grid, S::kThreads, S::kShared, stream)(kernel, in, position, keys, place);
  return true;
}

template <class T, class Place>
bool launch_for(const Queries& in, int position, const PrefillKeys& keys, const Place& place,
                StreamHandle stream) {
  switch (in.layout.head_dim) {
    case 64:
      return launch<T, 64>(in, position, keys, place, stream);
    case 80:
      return launch<T, 80>(in, position, keys, place, stream);
    case 96:
      return launch<T, 96>(in, position, keys, place, stream);
    case 128:
      return launch<T, 128>(in, position, keys, place, stream);
    case 256:
      return launch<T, 256>(in, position, keys, place, stream);
    case 512:
      return launch<T, 512>(in, position, keys, place, stream);
    default:
      return false;
  }
}

template <class Place>
bool launch_for_type(const Queries& in, int position, const PrefillKeys& keys, const Place& place,
                     StreamHandle stream) {
  if (in.layout.type == DType::bf16) return launch_for<__nv_bfloat16>(in, position, keys, place, stream);
  if (in.layout.type == DType::f16) return launch_for<__half>(in, position, keys, place, stream);
  return false;
}

}  // namespace

bool attend_prefill_mma(const Queries& queries, std::int32_t position, const PrefillKeys& keys,
                        StreamHandle stream, const StridedKv* kv) {
  if (kv != nullptr) return launch_for_type(queries, position, keys, InCallersArrays{*kv}, stream);
  return launch_for_type(queries, position, keys, InLayer{}, stream);
}

}  // namespace lode::cuda
