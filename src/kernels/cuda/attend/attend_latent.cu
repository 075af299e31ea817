// SPDX-License-Identifier: Apache-2.0
// Work map: a block has up to kRows query rows (heads of one token, or of consecutive ones) and walks over tiles of
// kKeys keys, which cp.async brings to shared memory ahead of their use. Of a tile
//
//   S[rows, keys] = Q K^T     a warp has 16 rows and 16 keys
//   P = exp2(S - m)           the warps of the same rows agree on m by way of shared memory
//   O[rows, d] += P V         V is the same tile; a warp has all rows of every kWarps-th 8 columns
//
// Scores, the softmax and sums are float32; queries (times scale and log2 e), rows and weights have the store's type. In
// decode the keys of a list are cut into pieces that depend on their number alone, one a block; a second kernel merges
// the states of the pieces in order.
#include <algorithm>

#include "kernels/cuda/attend/attend_latent.h"
#include "kernels/cuda/attend/tile_loop.cuh"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/matrix.cuh"
#include "kernels/cuda/device/per_device.h"

namespace lode::cuda {

namespace {

/// Sizes that follow from a row's numbers and a block's query rows.
template <int D, int Rows>
struct Shape {
  static constexpr int kRows = Rows, kRowTiles = kRows / 16;
  static constexpr int kWarps = kRows == 16 ? 4 : 8, kThreads = kWarps * 32;
  static constexpr int kKeyGroups = kWarps / kRowTiles,
                       kKeys = kKeyGroups * 16;  // 64 keys, or 32 for 64 rows
  static constexpr int kStages = kRows == 64 ? 3 : 2;
  static constexpr int kStride = D + 8;  // numbers: an odd count of 16 bytes, so no bank meets
  static constexpr int kWeightStride = kKeys + 8;
  static constexpr int kColumnTiles = (D / 8 + kWarps - 1) / kWarps;  // of a warp
  // Bytes of shared memory, in this order:
  static constexpr int kQueryBytes = kRows * kStride * 2, kTileBytes = kKeys * kStride * 2,
                       kWeightBytes = kRows * kWeightStride * 2, kPeakBytes = kKeyGroups * kRows * 4,
                       kShared = kQueryBytes + kStages * kTileBytes + kWeightBytes + kPeakBytes + kRows * 4;
};

/// Attention of a block's rows. Work says which queries and keys those are:
///   tiles()                     how many
///   row_at(tile, key)           the store's row of a key of a tile, -1 for none
///   seen(tile, row)             the first and last key of a tile that a row sees
///   weight(tile, key)           what is added to its score, in units of log2
///   rows(), query_row(row)      how many rows there are, and which of [N, Hq] each is
///   store_row(row)              where its output goes
template <class T, int D, int Rows, class Work>
class LatentAttention {
  using S = Shape<D, Rows>;

 public:
  __device__ LatentAttention(const Queries& in, const Work& work, const char* layer, char* shared)
      : in_(in),
        work_(work),
        layer_(layer),
        queries_(reinterpret_cast<T*>(shared)),
        tiles_(reinterpret_cast<T*>(shared + S::kQueryBytes)),
        weights_(reinterpret_cast<T*>(shared + S::kQueryBytes + S::kStages * S::kTileBytes)),
        peaks_(reinterpret_cast<float*>(reinterpret_cast<char*>(weights_) + S::kWeightBytes)),
        keep_(peaks_ + S::kKeyGroups * S::kRows),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        row_tile_(warp_ / S::kKeyGroups),
        key_group_(warp_ % S::kKeyGroups) {}

  /// `put(row, column, two numbers)` and `put_lse(row, lse)` take what comes out.
  template <class Put, class PutLse>
  __device__ void run(const Put& put, const PutLse& put_lse) {
    const int tiles = work_.tiles();
    for (int tile = 0; tile < S::kStages - 1; ++tile) bring(tile, tiles);
    stage_queries();
    for (int tile = 0; tile < tiles; ++tile) {
      asm volatile("cp.async.wait_group %0;" ::"n"(S::kStages - 2) : "memory");
      __syncthreads();
      bring(tile + S::kStages - 1, tiles);
      const T* const rows = tiles_ + tile % S::kStages * (S::kTileBytes / 2);
      float s[2][4] = {};
      score(rows, s);
      mask(tile, s);
      soften(s);
      add_values(rows);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    finish(put, put_lse);
  }

 private:
  __device__ void stage_queries() {
    const float factor = in_.scale * kLog2e;
    for (int i = static_cast<int>(threadIdx.x); i < S::kRows * D / 2; i += S::kThreads) {
      const int row = i / (D / 2), c = i % (D / 2) * 2;
      float2 q = {};
      if (row < work_.rows()) q = *reinterpret_cast<const float2*>(in_.q + work_.query_row(row) * D + c);
      *reinterpret_cast<unsigned*>(queries_ + row * S::kStride + c) = pack<T>(q.x * factor, q.y * factor);
    }
  }

  /// Starts to fetch a tile, zeros for rows that there are not; a warp brings some of its rows.
  __device__ void bring(int tile, int tiles) {
    constexpr int kMine = S::kKeys / S::kWarps, kChunks = D / 8;
    if (tile < tiles) {
      T* const to = tiles_ + tile % S::kStages * (S::kTileBytes / 2);
      const int row = lane_ < kMine ? work_.row_at(tile, warp_ * kMine + lane_) : -1;
#pragma unroll 4
      for (int i = 0; i < kMine; ++i) {
        const int at = __shfl_sync(~0u, row, i), bytes = at < 0 ? 0 : 16;
        const char* const from = at < 0 ? layer_ : layer_ + in_.layout.key_offset(0, at);
#pragma unroll
        for (int c = lane_; c < kChunks; c += 32)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                           shared_address(to + (warp_ * kMine + i) * S::kStride + c * 8)),
                       "l"(from + (at < 0 ? 0 : c * 16)), "r"(bytes)
                       : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  /// Of rows lane / 4 and 8 more of the warp's row tile; keys lane % 4 * 2 and the next, and 8 more, of its group.
  __device__ void score(const T* rows, float (&s)[2][4]) const {
    const T* const q = queries_ + (row_tile_ * 16 + lane_ % 16) * S::kStride + lane_ / 16 * 8;
    const T* const k = rows + (key_group_ * 16 + lane_ / 16 * 8 + lane_ % 8) * S::kStride + lane_ / 8 % 2 * 8;
    float odd[2][4] = {};
#pragma unroll 6
    for (int c = 0; c < D / 16; c += 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unsigned a[4], b[4];
        load_matrices(q + (c + i) * 16, a);
        load_matrices(k + (c + i) * 16, b);
        auto& sums = i == 0 ? s : odd;
        multiply<T>(sums[0], a, b[0], b[1]);
        multiply<T>(sums[1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[n][i] += odd[n][i];
  }

  __device__ void mask(int tile, float (&s)[2][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int2 seen = work_.seen(tile, row_tile_ * 16 + lane_ / 4 + 8 * half);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = key_group_ * 16 + n * 8 + lane_ % 4 * 2 + i;
          float& x = s[n][2 * half + i];
          x = key < seen.x || key > seen.y ? -INFINITY : x + work_.weight(tile, key);
        }
      }
    }
  }

  /// Weights of the tile, rounded, to shared memory; by which factor earlier sums go down.
  __device__ void soften(float (&s)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float high =
          fmaxf(fmaxf(s[0][2 * half], s[0][2 * half + 1]), fmaxf(s[1][2 * half], s[1][2 * half + 1]));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
      high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
      if (lane_ % 4 == 0) peaks_[key_group_ * S::kRows + row_of(half)] = high;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      float high = peak_[half];
#pragma unroll
      for (int g = 0; g < S::kKeyGroups; ++g) high = fmaxf(high, peaks_[g * S::kRows + row]);
      const float base = high == -INFINITY ? 0.0f : high, keep = exp2_fast(peak_[half] - base);
      peak_[half] = high;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float* const p = &s[n][2 * half];
        p[0] = exp2_fast(p[0] - base), p[1] = exp2_fast(p[1] - base);
        sum += p[0] + p[1];
        *reinterpret_cast<unsigned*>(weights_ + row * S::kWeightStride + key_group_ * 16 + n * 8 +
                                     lane_ % 4 * 2) = pack<T>(p[0], p[1]);
      }
      sum_[half] = fmaf(sum_[half], keep, sum);
      if (key_group_ == 0 && lane_ % 4 == 0) keep_[row] = keep;
    }
    __syncthreads();
  }
  __device__ int row_of(int half) const {
    return row_tile_ * 16 + lane_ / 4 + 8 * half;
  }

  __device__ void add_values(const T* rows) {
#pragma unroll
    for (int m = 0; m < S::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float keep = keep_[m * 16 + lane_ / 4 + 8 * half];
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; ++n)
          out_[m][n][2 * half] *= keep, out_[m][n][2 * half + 1] *= keep;
      }
    }
#pragma unroll
    for (int k = 0; k < S::kKeys; k += 32) {
      unsigned p[S::kRowTiles][2][4];
#pragma unroll
      for (int m = 0; m < S::kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          load_matrices(weights_ + (m * 16 + lane_ % 16) * S::kWeightStride + k + i * 16 + lane_ / 16 * 8,
                        p[m][i]);
#pragma unroll
      for (int n = 0; n < S::kColumnTiles; ++n) {
        const int tile = n * S::kWarps + warp_;
        if (tile >= D / 8) break;
        unsigned v[4];  // 8 columns of 32 keys
        load_transposed(rows + (k + lane_) * S::kStride + tile * 8, v);
#pragma unroll
        for (int m = 0; m < S::kRowTiles; ++m) {
          multiply<T>(out_[m][n], p[m][0], v[0], v[1]);
          multiply<T>(out_[m][n], p[m][1], v[2], v[3]);
        }
      }
    }
  }

  /// The sums of all warps of a row make it whole.
  template <class Put, class PutLse>
  __device__ void finish(const Put& put, const PutLse& put_lse) {
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = sum_[half];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane_ % 4 == 0) peaks_[key_group_ * S::kRows + row_of(half)] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      float sum = 0.0f;
#pragma unroll
      for (int g = 0; g < S::kKeyGroups; ++g) sum += peaks_[g * S::kRows + row];
      if (key_group_ > 0 || lane_ % 4 > 0) continue;
      keep_[row] = sum == 0.0f ? 0.0f : 1.0f / sum;
      const float base = peak_[half] == -INFINITY ? 0.0f : peak_[half];
      if (row < work_.rows()) put_lse(row, sum == 0.0f ? -INFINITY : kLn2 * (base + log2f(sum)));
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < S::kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + lane_ / 4 + 8 * half;
        if (row >= work_.rows()) continue;
        const float inverse = keep_[row];
#pragma unroll
        for (int n = 0; n < S::kColumnTiles; ++n) {
          const int tile = n * S::kWarps + warp_;
          if (tile < D / 8)
            put(row, tile * 8 + lane_ % 4 * 2,
                float2{out_[m][n][2 * half] * inverse, out_[m][n][2 * half + 1] * inverse});
        }
      }
    }
  }

  const Queries& in_;
  const Work& work_;
  const char* const layer_;
  T *const queries_, *const tiles_, *const weights_;
  float *const peaks_, *const keep_;  // [key groups, rows], [rows]
  const int warp_, lane_, row_tile_, key_group_;
  float out_[S::kRowTiles][S::kColumnTiles][4] = {}, peak_[2] = {-INFINITY, -INFINITY}, sum_[2] = {};
};

// ---- Decode.

constexpr int kLeastPiece = 128;  // keys
constexpr int kMostQueries = 4;   // tokens at a time: the workspace has room for their pieces

/// Query rows of a block, and pieces that the keys of a list are cut into at most. They depend on the model alone.
int rows_of_block(int heads) {
  return heads <= 16 ? 16 : heads <= 32 ? 32 : 64;
}
int most_pieces(int query_heads) {
  return std::max(16, 128 / ((query_heads + 63) / 64));
}

struct DecodeParams {
  Params list;  ///< what Keys wants
  int pieces = 1;
  int heads = 0;           ///< that share a list
  float* parts = nullptr;  // [N * Hq, pieces, d] states over pieces
  float* lse = nullptr;    // [N * Hq, pieces]
};

/// The pieces of so many keys.
struct Pieces {
  int each, count;
  __device__ Pieces(int keys, int most)
      : each(max(kLeastPiece, ((keys + most - 1) / most + 63) / 64 * 64)), count((keys + each - 1) / each) {}
};

template <int kKeys>
struct DecodeWork {
  const DecodeParams& p;
  Keys keys;
  int begin, end;          ///< of the piece
  std::int64_t first_row;  ///< of the block's query rows
  int count;

  __device__ int tiles() const { return (end - begin + kKeys - 1) / kKeys; }
  __device__ int row_at(int tile, int key) const {
    const int at = begin + tile * kKeys + key;
    return at < end ? keys.row(at) : -1;
  }
  __device__ int2 seen(int tile, int) const { return {0, end - begin - tile * kKeys - 1}; }
  __device__ float weight(int tile, int key) const {
    return keys.log_weights == nullptr ? 0.0f : keys.weight(begin + tile * kKeys + key) * kLog2e;
  }
  __device__ int rows() const { return count; }
  __device__ std::int64_t query_row(int row) const { return first_row + row; }
};

__device__ Keys keys_of(const DecodeParams& p, int query, std::int64_t list) {
  const int listed = p.list.has_lists ? p.list.lists.counts[list] : 0;
  return {p.list, p.list.queries.tokens[query].position, list, listed};
}

/// Grid: pieces; blocks of heads of every list; tokens.
template <class T, int D, int Rows>
__global__ __launch_bounds__(Shape<D, Rows>::kThreads,
                             1) void decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(16) char shared[];
  using S = Shape<D, Rows>;
  const Queries& in = p.list.queries;
  const int query = static_cast<int>(blockIdx.z), blocks = (p.heads + Rows - 1) / Rows,
            list = static_cast<int>(blockIdx.y) / blocks,
            first = static_cast<int>(blockIdx.y) % blocks * Rows, lists = in.query_heads / p.heads;
  const Keys keys = keys_of(p, query, std::int64_t{query} * lists + list);
  const Pieces pieces(keys.count, p.pieces);
  const std::int64_t first_row = std::int64_t{query} * in.query_heads + list * p.heads + first;
  const char* const layer = in.bases[in.tokens[query].sequence] + in.layer_offset;
  // As many blocks as there are pieces, unless there are more keys than was said.
  for (int piece = static_cast<int>(blockIdx.x); piece < pieces.count; piece += static_cast<int>(gridDim.x)) {
    const int begin = piece * pieces.each;
    const DecodeWork<S::kKeys> work = {
        p, keys, begin, min(keys.count, begin + pieces.each), first_row, min(Rows, p.heads - first)};
    LatentAttention<T, D, Rows, DecodeWork<S::kKeys>>(in, work, layer, shared)
        .run(
            [&](int row, int column, float2 x) {
              *reinterpret_cast<float2*>(p.parts + ((first_row + row) * p.pieces + piece) * D + column) = x;
            },
            [&](int row, float lse) { p.lse[(first_row + row) * p.pieces + piece] = lse; });
    __syncthreads();
  }
}

constexpr int kMergeThreads = 128;

/// One query row a block: the states of its pieces in their order, then the tail.
__global__ __launch_bounds__(kMergeThreads) void merge_kernel(const __grid_constant__ DecodeParams p) {
  __shared__ float weight[128];
  const Queries& in = p.list.queries;
  const std::int64_t row = blockIdx.x;
  const int d = in.layout.head_dim, query = static_cast<int>(row / in.query_heads),
            lists = in.query_heads / p.heads, head = static_cast<int>(row % in.query_heads);
  const Keys keys = keys_of(p, query, std::int64_t{query} * lists + head / p.heads);
  const int pieces = Pieces(keys.count, p.pieces).count;
  const float* const lse = p.lse + row * p.pieces;
  float peak = -INFINITY, sum = 0.0f;
  for (int i = 0; i < pieces; ++i) peak = fmaxf(peak, lse[i]);
  const RowLists& of = p.list.lists;
  const float tail = of.tail_lse != nullptr ? of.tail_lse[row] : -INFINITY;
  peak = fmaxf(peak, tail);
  const float base = peak == -INFINITY ? 0.0f : peak;
  for (int i = 0; i < pieces; ++i) sum += lse[i] == -INFINITY ? 0.0f : expf(lse[i] - base);
  const float of_tail = tail == -INFINITY ? 0.0f : expf(tail - base);
  sum += of_tail;
  for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kMergeThreads)
    weight[i] = lse[i] == -INFINITY ? 0.0f : expf(lse[i] - base);
  __syncthreads();
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int c = static_cast<int>(threadIdx.x); c < d; c += kMergeThreads) {
    float x = 0.0f;
    for (int i = 0; i < pieces; ++i)
      if (weight[i] != 0.0f) x = fmaf(weight[i], p.parts[(row * p.pieces + i) * d + c], x);
    if (of_tail != 0.0f) x = fmaf(of_tail, of.tail_output[row * d + c], x);
    in.o[row * d + c] = x * inverse;
  }
  if (in.lse != nullptr && threadIdx.x == 0) in.lse[row] = sum == 0.0f ? -INFINITY : base + logf(sum);
}

/// Rows that a kernel's shared memory is reserved for, once a device.
template <auto kKernel>
void reserve_shared_once(int bytes) {
  static PerDevice<bool> reserved;
  reserved.get([=] {
    LODE_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return true;
  });
}
int most_shared() {
  static PerDevice<int> most;
  return most.get([] {
    int device = 0, found = 0;
    LODE_CUDA(cudaGetDevice(&device));
    LODE_CUDA(cudaDeviceGetAttribute(&found, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return found;
  });
}

template <class T, int D, int Rows>
bool launch_decode(const DecodeParams& p, std::int64_t most_keys, StreamHandle stream) {
  using S = Shape<D, Rows>;
  if (S::kShared > most_shared()) return false;
  const Queries& in = p.list.queries;
  const std::int64_t pieces =
      std::clamp<std::int64_t>((most_keys + kLeastPiece - 1) / kLeastPiece, 1, p.pieces);
  const int blocks = (p.heads + Rows - 1) / Rows * (in.query_heads / p.heads);
  reserve_shared_once<decode_kernel<T, D, Rows>>(S::kShared);
  const dim3 grid(static_cast<unsigned>(pieces), static_cast<unsigned>(blocks),
                  static_cast<unsigned>(in.count));
  Launch(grid, S::kThreads, S::kShared, stream)(decode_kernel<T, D, Rows>, p);
  Launch(static_cast<unsigned>(in.count * in.query_heads), kMergeThreads, 0, stream)(merge_kernel, p);
  return true;
}

template <class T, int D>
bool launch_decode(const DecodeParams& p, std::int64_t most_keys, StreamHandle stream) {
  switch (rows_of_block(p.heads)) {
    case 16:
      return launch_decode<T, D, 16>(p, most_keys, stream);
    case 32:
      return launch_decode<T, D, 32>(p, most_keys, stream);
    default:
      return launch_decode<T, D, 64>(p, most_keys, stream);
  }
}

// ---- Prefill.

template <int kRows, int kKeys>
struct PrefillWork {
  const Queries& in;
  const PrefillKeys& keys;
  int position, kv_head, group;  ///< query heads of a token that are taken together
  int first, all;                ///< row of the block's first, of [count, group]; how many there are
  int2 places;                   // of the head's list
  int list_tiles, near, near_first, end, count_of_tiles;

  __device__ PrefillWork(const Queries& q, const PrefillKeys& k, int first_position, int heads, int block)
      : in(q),
        keys(k),
        position(first_position),
        kv_head(static_cast<int>(blockIdx.y)),
        group(heads),
        first(block * kRows),
        all(q.count * heads) {
    const int part = static_cast<int>(blockIdx.z);
    places = keys.places(kv_head, part);
    list_tiles = (places.y - places.x + kKeys - 1) / kKeys;
    const int2 behind =
        keys.near_keys(part, position + first / group, position + (min(first + kRows, all) - 1) / group);
    near = behind.x, end = behind.y;
    near_first = near / kKeys * kKeys;
    count_of_tiles = list_tiles + (end > near ? (end - near_first + kKeys - 1) / kKeys : 0);
  }
  __device__ int tiles() const { return count_of_tiles; }
  __device__ int first_key(int tile) const { return near_first + (tile - list_tiles) * kKeys; }
  __device__ int row_at(int tile, int key) const {
    if (tile < list_tiles) {
      const int place = places.x + tile * kKeys + key;
      return place < places.y ? keys.row(kv_head, place) : -1;
    }
    const int at = first_key(tile) + key;
    return at < end && at >= near ? at : -1;
  }
  __device__ int2 seen(int tile, int row) const {
    if (tile < list_tiles) return {0, places.y - places.x - tile * kKeys - 1};
    const int at = keys.all > 0 ? end - 1 : position + min(first + row, all - 1) / group;
    return {keys.near_of(at) - first_key(tile), at - first_key(tile)};
  }
  __device__ float weight(int, int) const { return 0.0f; }
  __device__ int rows() const { return min(kRows, all - first); }
  __device__ std::int64_t query_row(int row) const {
    const int at = first + row;
    return std::int64_t{at / group} * in.query_heads + kv_head * group + at % group;
  }
};

template <class T, int D>
__global__ __launch_bounds__(Shape<D, 64>::kThreads, 1) void prefill_kernel(const Queries in, int position,
                                                                            const PrefillKeys keys,
                                                                            int group) {
  extern __shared__ __align__(16) char shared[];
  using S = Shape<D, 64>;
  using Work = PrefillWork<S::kRows, S::kKeys>;
  // The last queries have the most keys: they start first.
  const Work work(in, keys, position, group, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  const std::int64_t plane = std::int64_t{blockIdx.z} * in.count * in.query_heads;
  LatentAttention<T, D, 64, Work>(in, work, in.bases[in.tokens[0].sequence] + in.layer_offset, shared)
      .run(
          [&](int row, int column, float2 x) {
            *reinterpret_cast<float2*>(in.o + (plane + work.query_row(row)) * D + column) = x;
          },
          [&](int row, float lse) {
            if (in.lse != nullptr) in.lse[plane + work.query_row(row)] = lse;
          });
}

template <class T, int D>
bool launch_prefill(const Queries& in, int position, const PrefillKeys& keys, StreamHandle stream) {
  using S = Shape<D, 64>;
  if (S::kShared > most_shared()) return false;
  // Without lists all heads have the same rows.
  const int group = keys.counts == nullptr ? in.query_heads : in.query_heads / in.layout.kv_heads;
  const std::int64_t rows = std::int64_t{in.count} * group;
  const dim3 grid(static_cast<unsigned>((rows + S::kRows - 1) / S::kRows),
                  static_cast<unsigned>(in.query_heads / group), static_cast<unsigned>(keys.parts));
  reserve_shared_once<prefill_kernel<T, D>>(S::kShared);
  Launch(grid, S::kThreads, S::kShared, stream)(prefill_kernel<T, D>, in, position, keys, group);
  return true;
}

/// launch(type, row's numbers) where the matrix unit has both.
template <class Launch>
bool with_shape(const Queries& in, const Launch& launch) {
  const auto for_type = [&](auto type) {
    if (in.layout.head_dim == 288) return launch(type, std::integral_constant<int, 288>{});
    if (in.layout.head_dim == 576) return launch(type, std::integral_constant<int, 576>{});
    return false;
  };
  if (!in.layout.shared_rows) return false;
  if (in.layout.type == DType::bf16) return for_type(__nv_bfloat16{});
  return in.layout.type == DType::f16 && for_type(__half{});
}

}  // namespace

std::int64_t latent_workspace_bytes(int queries, int query_heads, int head_dim) {
  return std::int64_t{std::min(queries, kMostQueries)} * query_heads * most_pieces(query_heads) *
         (head_dim + 1) * std::int64_t{sizeof(float)};
}

bool attend_latent_decode(const Queries& queries, const RowLists* lists, std::int64_t max_tokens,
                          void* workspace, StreamHandle stream) {
  DecodeParams p;
  p.pieces = most_pieces(queries.query_heads);
  p.heads = lists == nullptr            ? queries.query_heads
            : lists->lists_per_head > 1 ? 1
                                        : queries.query_heads / queries.layout.kv_heads;
  const int per_token = queries.query_heads / p.heads;
  const std::int64_t most_keys =
      lists == nullptr ? max_tokens : std::min(max_tokens, lists->sink + lists->capacity + lists->window);
  for (int first = 0; first < queries.count; first += kMostQueries) {
    const std::int64_t row = std::int64_t{first} * queries.query_heads, d = queries.layout.head_dim;
    Queries& some = p.list.queries = queries;
    some.count = std::min(kMostQueries, queries.count - first);
    some.tokens += first;
    some.q += row * d;
    some.o += row * d;
    if (some.lse != nullptr) some.lse += row;
    if (lists != nullptr) {
      RowLists& of = p.list.lists = *lists;
      p.list.has_lists = true;
      const std::int64_t list = std::int64_t{first} * per_token;
      of.rows += list * of.capacity;
      of.counts += list;
      if (of.log_weights != nullptr) of.log_weights += list * of.capacity;
      if (of.tail_output != nullptr) of.tail_output += row * d, of.tail_lse += row;
    }
    p.parts = static_cast<float*>(workspace);
    p.lse = p.parts + std::int64_t{some.count} * some.query_heads * p.pieces * d;
    const bool launched = with_shape(some, [&](auto type, auto d_of_kernel) {
      return launch_decode<decltype(type), decltype(d_of_kernel)::value>(p, most_keys, stream);
    });
    if (!launched) return false;
  }
  return queries.layout.shared_rows;
}

bool attend_latent_prefill(const Queries& queries, std::int32_t position, const PrefillKeys& keys,
                           StreamHandle stream) {
  return with_shape(queries, [&](auto type, auto d) {
    return launch_prefill<decltype(type), decltype(d)::value>(queries, position, keys, stream);
  });
}

}  // namespace lode::cuda
