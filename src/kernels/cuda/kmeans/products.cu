// SPDX-License-Identifier: Apache-2.0
// Products of rows with columns on the matrix unit that never leave it: the nearest centroid of each point, how
// sharp each query's softmax over the keys is, and the keys nearest to each query.
//
// Work map: a block has 8 warps' rows, 16 or 32 each, whose halves stay in registers; tiles of 64 columns come
// through shared memory, two ahead, and every warp multiplies all of them. blockIdx.y is the head, blockIdx.z a
// share of the tiles: one piece of them, or every gridDim.z-th.
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/matrix.cuh"
#include "kernels/cuda/device/ordered.cuh"
#include "kernels/cuda/kmeans/kmeans.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kTile = 64, kStages = 3;
constexpr int kColumnsAtOnce = 16;   // of a tile: two products of eight
constexpr float kNoScore = -1e30f;   // what sharpness counts from before the first key
constexpr std::int64_t kSplits = 8;  // shares of the keys
constexpr int kGroupsOfShare = 16, kMostSplits = 2 * kMostNearest / kGroupsOfShare, kBestThreads = 128;
constexpr std::int64_t kFewestSplits = 4;
constexpr float kLog2E = 1.44269504f;

struct Params {
  HalfRows rows, columns;
  const float* biases = nullptr;   // [H, columns] or null
  std::int32_t* labels = nullptr;  // [H, rows]
  float scale = 1.0f;
  float* partial = nullptr;  // [H, splits, rows, 3]; of GroupMaxima [H, splits, rows, 16]
  KeysAbove above;
};

/// Columns' factor and bias; -inf for those behind the last.
struct Column {
  float factor, bias;
};

template <int kSteps>
struct Tiles {
  static constexpr int kWidth = kSteps * 16, kStride = kWidth + 8;  // halves; the pad spreads rows over banks
  __half rows[kStages][kTile][kStride];
  Column columns[kStages][kTile];
};

__device__ __forceinline__ void copy_16(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void load_four(unsigned (&to)[4], const __half* from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(from)));
}

template <int kSteps>
__device__ __forceinline__ void bring(Tiles<kSteps>& tiles, int stage, std::int64_t tile, const Params& p,
                                      std::int64_t head) {
  constexpr int kPieces = kSteps * 2;  // of 16 bytes a row
  const std::int64_t first = tile * kTile, count = p.columns.count;
  const __half* const from =
      static_cast<const __half*>(p.columns.halves) + head * count * Tiles<kSteps>::kWidth;
#pragma unroll
  for (int i = 0; i < kTile * kPieces / kThreads; ++i) {
    const int at = i * kThreads + static_cast<int>(threadIdx.x), row = at / kPieces, piece = at % kPieces;
    const bool there = first + row < count;
    copy_16(&tiles.rows[stage][row][piece * 8],
            from + (there ? first + row : 0) * Tiles<kSteps>::kWidth + piece * 8, there);
  }
  if (const int row = static_cast<int>(threadIdx.x); row < kTile) {
    const std::int64_t at = first + row;
    Column& to = tiles.columns[stage][row];
    to.factor = at < count ? p.columns.factors[head * count + at] : 0.0f;
    to.bias = at >= count ? -INFINITY : p.biases != nullptr ? p.biases[head * count + at] : 0.0f;
  }
}

/// Where a lane's four columns of sixteen are, behind its first.
__device__ __forceinline__ constexpr int column_of(int i) {
  return 8 * (i / 2) + i % 2;
}

/// A row's scores of a lane's four columns.
__device__ __forceinline__ void scores_of(const float (&sums)[2][4], int half, float factor,
                                          const float4 (&of)[2], float (&scores)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4& column = of[i / 2];
    scores[i] = fmaf(sums[i / 2][2 * half + i % 2] * factor, i % 2 == 0 ? column.x : column.z,
                     i % 2 == 0 ? column.y : column.w);
  }
}

/// What outcomes of whole columns have in common.
struct InPieces {
  static constexpr bool kInterleaved = false;  ///< tiles of a share are neighbours
  __device__ __forceinline__ void begin(const Params&, std::int64_t, std::int64_t, int) {}
};

/// The best column of two rows of a lane, rows r and r + 8 of sixteen.
struct BestColumn : InPieces {
  float high[2] = {-INFINITY, -INFINITY};
  int at[2] = {0, 0};

  __device__ __forceinline__ void take(const float (&sums)[2][4], const float (&factor)[2], int column,
                                       const float4 (&of)[2], const Params&) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float scores[4];
      scores_of(sums, half, factor[half], of, scores);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (scores[i] > high[half]) high[half] = scores[i], at[half] = column + column_of(i);
    }
  }
  __device__ __forceinline__ void post(const Params& p, std::int64_t head, std::int64_t row, int half,
                                       bool first_lane) {
#pragma unroll
    for (int o = 1; o < 4; o *= 2) {
      const float other = __shfl_xor_sync(~0u, high[half], o);
      const int its = __shfl_xor_sync(~0u, at[half], o);
      if (other > high[half] || (other == high[half] && its < at[half])) high[half] = other, at[half] = its;
    }
    if (first_lane && row < p.rows.count) p.labels[head * p.rows.count + row] = at[half];
  }
};

/// The largest score of each of 16 groups of a share's columns. Shares have every so-many-th tile, for keys that a
/// query likes stand together in a text: they are to be spread over the groups.
struct GroupMaxima {
  static constexpr bool kInterleaved = true;
  float most[2][4];

  __device__ __forceinline__ void begin(const Params&, std::int64_t, std::int64_t, int) {
#pragma unroll
    for (int i = 0; i < 8; ++i) most[i / 4][i % 4] = -INFINITY;
  }
  __device__ __forceinline__ void take(const float (&sums)[2][4], const float (&factor)[2], int,
                                       const float4 (&of)[2], const Params&) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float scores[4];
      scores_of(sums, half, factor[half], of, scores);
#pragma unroll
      for (int i = 0; i < 4; ++i) most[half][i] = fmaxf(most[half][i], scores[i]);
    }
  }
  __device__ __forceinline__ void post(const Params& p, std::int64_t head, std::int64_t row, int half, bool) {
    if (row >= p.rows.count) return;
    float* const to = p.partial + ((head * gridDim.z + blockIdx.z) * p.rows.count + row) * kGroupsOfShare;
    reinterpret_cast<float4*>(to)[threadIdx.x % 4] =
        make_float4(most[half][0], most[half][1], most[half][2], most[half][3]);
  }
};

/// Notes the columns whose scores reach the row's least one.
struct Above {
  static constexpr bool kInterleaved = true;
  float least[2];
  std::int64_t row[2];

  __device__ __forceinline__ void begin(const Params& p, std::int64_t head, std::int64_t at, int half) {
    row[half] = head * p.rows.count + at;
    least[half] = at < p.rows.count ? p.above.least[row[half]] : INFINITY;
  }
  __device__ __forceinline__ void take(const float (&sums)[2][4], const float (&factor)[2], int column,
                                       const float4 (&of)[2], const Params& p) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float scores[4];
      scores_of(sums, half, factor[half], of, scores);
      if (!(fmaxf(fmaxf(scores[0], scores[1]), fmaxf(scores[2], scores[3])) >= least[half])) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (scores[i] >= least[half]) note(p, row[half], scores[i], column + column_of(i));
    }
  }
  __device__ __forceinline__ void post(const Params&, std::int64_t, std::int64_t, int, bool) {}

 private:
  static __device__ void note(const Params& p, std::int64_t row, float score, int column) {
    if (score == -INFINITY) return;  // behind the last column
    const int at = atomicAdd(p.above.counts + row, 1);
    if (at < KeysAbove::kRoom)
      p.above.found[row * KeysAbove::kRoom + at] =
          std::uint64_t{ordered(score)} << 32 | static_cast<unsigned>(~column);
  }
};

/// Sums of exp(z - most) and of its square, in units of base 2.
struct Softmax : InPieces {
  float most[2] = {kNoScore, kNoScore}, sum[2] = {}, squares[2] = {};

  __device__ __forceinline__ void count_from(int half, float high) {
    const float by = exp2_fast(most[half] - high);
    sum[half] *= by, squares[half] *= by * by, most[half] = high;
  }
  __device__ __forceinline__ void take(const float (&sums)[2][4], const float (&factor)[2], int,
                                       const float4 (&of)[2], const Params&) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float z[4], high = most[half];
      scores_of(sums, half, factor[half], of, z);
#pragma unroll
      for (int i = 0; i < 4; ++i) high = fmaxf(high, z[i]);
      if (high > most[half]) count_from(half, high);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float weight = exp2_fast(z[i] - most[half]);
        sum[half] += weight, squares[half] = fmaf(weight, weight, squares[half]);
      }
    }
  }
  __device__ __forceinline__ void post(const Params& p, std::int64_t head, std::int64_t row, int half,
                                       bool first_lane) {
#pragma unroll
    for (int o = 1; o < 4; o *= 2) {
      const float high = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], o));
      count_from(half, high);
      sum[half] += __shfl_xor_sync(~0u, sum[half], o);
      squares[half] += __shfl_xor_sync(~0u, squares[half], o);
    }
    if (!first_lane || row >= p.rows.count) return;
    float* const to = p.partial + ((head * gridDim.z + blockIdx.z) * p.rows.count + row) * 3;
    to[0] = most[half], to[1] = sum[half], to[2] = squares[half];
  }
};

constexpr int parts_of(int steps) {
  return steps > 8 ? 1 : 2;
}

template <int kSteps, class Outcome>
__global__ __launch_bounds__(kThreads,
                             kSteps > 8 ? 1 : 2) void products_kernel(const __grid_constant__ Params p) {
  constexpr int kParts = parts_of(kSteps);  // sixteens of rows of a warp
  extern __shared__ __align__(16) char memory[];
  auto& tiles = *reinterpret_cast<Tiles<kSteps>*>(memory);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t head = blockIdx.y;
  const std::int64_t first = (std::int64_t{blockIdx.x} * kWarps + warp) * kParts * 16 + lane / 4;
  const std::int64_t all = (p.columns.count + kTile - 1) / kTile, share = (all + gridDim.z - 1) / gridDim.z;
  constexpr bool kInterleaved = Outcome::kInterleaved;
  const std::int64_t begin = kInterleaved ? blockIdx.z : min(all, blockIdx.z * share);
  const std::int64_t tile_step = kInterleaved ? gridDim.z : 1;
  const std::int64_t count =
      kInterleaved ? (all - begin + tile_step - 1) / tile_step : min(all, begin + share) - begin;

  unsigned a[kParts][kSteps][4];
  float factor[kParts][2];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t row = first + part * 16 + half * 8;
      const bool there = row < p.rows.count;
      const auto* const from = reinterpret_cast<const unsigned*>(static_cast<const __half*>(p.rows.halves) +
                                                                 (head * p.rows.count + (there ? row : 0)) *
                                                                     Tiles<kSteps>::kWidth);
      factor[part][half] = there ? p.rows.factors[head * p.rows.count + row] * p.scale : 0.0f;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        a[part][step][half] = from[step * 8 + lane % 4];
        a[part][step][half + 2] = from[step * 8 + 4 + lane % 4];
      }
    }
  }

  Outcome outcome[kParts];
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int half = 0; half < 2; ++half) outcome[part].begin(p, head, first + part * 16 + half * 8, half);
  }
  const auto bring_tile = [&](std::int64_t i) {
    if (i < count) bring(tiles, static_cast<int>(i % kStages), begin + i * tile_step, p, head);
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
#pragma unroll
  for (int ahead = 0; ahead < kStages - 1; ++ahead) bring_tile(ahead);
  for (std::int64_t i = 0; i < count; ++i) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
    const int stage = static_cast<int>(i % kStages),
              tile_begin = static_cast<int>(begin + i * tile_step) * kTile;
    bring_tile(i + kStages - 1);
#pragma unroll 1
    for (int column = 0; column < kTile; column += kColumnsAtOnce) {
      float sums[kParts][2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; step += 2) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          unsigned b[4];
          load_four(b, &tiles.rows[stage][column + 8 * n + lane % 8][step * 16 + lane / 8 * 8]);
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            multiply<__half>(sums[part][n], a[part][step], b[0], b[1]);
            multiply<__half>(sums[part][n], a[part][step + 1], b[2], b[3]);
          }
        }
      }
      const int own = column + lane % 4 * 2;
      const float4 of[2] = {*reinterpret_cast<const float4*>(&tiles.columns[stage][own]),
                            *reinterpret_cast<const float4*>(&tiles.columns[stage][own + 8])};
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        outcome[part].take(sums[part], factor[part], tile_begin + own, of, p);
    }
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      outcome[part].post(p, head, first + part * 16 + half * 8, half, lane % 4 == 0);
  }
}

template <int kSteps, class Outcome>
void launch(const Params& p, std::int64_t splits, StreamHandle stream) {
  constexpr int kShared = sizeof(Tiles<kSteps>), kRows = kWarps * 16 * parts_of(kSteps);
  static_assert(kTile * kSteps * 2 % kThreads == 0);
  allow_shared_bytes(reinterpret_cast<const void*>(products_kernel<kSteps, Outcome>), kShared);
  const dim3 grid(static_cast<unsigned>((p.rows.count + kRows - 1) / kRows),
                  static_cast<unsigned>(p.rows.heads), static_cast<unsigned>(splits));
  Launch(grid, kThreads, kShared, stream)(products_kernel<kSteps, Outcome>, p);
}

template <class Outcome>
void launch_for_width(const Params& p, std::int64_t splits, StreamHandle stream) {
  switch (half_width(p.rows.width)) {
    case 64:
      return launch<4, Outcome>(p, splits, stream);
    case 96:
      return launch<6, Outcome>(p, splits, stream);
    case 128:
      return launch<8, Outcome>(p, splits, stream);
    default:
      return launch<16, Outcome>(p, splits, stream);
  }
}

/// Shares of the keys together, in their order.
__global__ void sharpness_kernel(const float* partial, int splits, std::int64_t rows, std::int64_t all,
                                 float* out) {
  const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= all) return;
  const float* const first = partial + (i / rows * splits * rows + i % rows) * 3;
  float most = kNoScore, sum = 0.0f, squares = 0.0f;
  for (int s = 0; s < splits; ++s) most = fmaxf(most, first[s * rows * 3]);
  for (int s = 0; s < splits; ++s) {
    const float* const of = first + s * rows * 3;
    const float by = exp2f(of[0] - most);
    sum += of[1] * by, squares += of[2] * by * by;
  }
  const float sharpness = sqrtf(squares) / sum;
  out[i] = sum > 0.0f && isfinite(sharpness) ? sharpness : 0.0f;
}

/// least[row] = the k-th largest of a row's group maxima: k scores or more reach it. One warp a row.
__global__ void least_kernel(const float* partial, int splits, std::int64_t rows, std::int64_t all, int k,
                             float* least, std::int32_t* counts) {
  constexpr int kMostOfLane = kMostSplits * kGroupsOfShare / 32;
  const std::int64_t at = (std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32, values = splits * kGroupsOfShare;
  if (at >= all) return;
  const float* const first = partial + (at / rows * splits * rows + at % rows) * kGroupsOfShare;
  unsigned own[kMostOfLane];
#pragma unroll
  for (int i = 0; i < kMostOfLane; ++i) {
    const int value = i * 32 + lane;
    own[i] = value < values
                 ? ordered(first[value / kGroupsOfShare * rows * kGroupsOfShare + value % kGroupsOfShare])
                 : 0;
  }
  unsigned reached = 0;  // by k of them
  for (unsigned bit = 0x80000000u; bit != 0; bit >>= 1) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kMostOfLane; ++i) count += own[i] >= (reached | bit) ? 1 : 0;
    if (__reduce_add_sync(~0u, count) >= k) reached |= bit;
  }
  if (lane != 0) return;
  least[at] = __uint_as_float((reached & 0x80000000u) != 0 ? reached & 0x7fffffffu : ~reached);
  counts[at] = 0;
}

/// The k largest of what a row found, in their order; -1 in front where it found too few or too many.
__global__ void best_kernel(KeysAbove above, int k, std::int32_t* keys /*[rows, k]*/) {
  constexpr int kRoom = KeysAbove::kRoom;
  __shared__ std::uint64_t found[kRoom];
  const std::int64_t row = blockIdx.x;
  const int count = above.counts[row];
  if (count < k || count > kRoom) {
    if (threadIdx.x == 0) keys[row * k] = -1;
    return;
  }
  int room = 32;  // a power of two
  while (room < count) room *= 2;
  for (int i = static_cast<int>(threadIdx.x); i < room; i += static_cast<int>(blockDim.x))
    found[i] = i < count ? above.found[row * kRoom + i] : 0;
  for (int size = 2; size <= room; size *= 2) {
    for (int gap = size / 2; gap > 0; gap /= 2) {
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < room / 2; i += static_cast<int>(blockDim.x)) {
        const int low = 2 * i - i % gap, high = low + gap;
        const std::uint64_t a = found[low], b = found[high];
        if ((a < b) == ((low & size) == 0)) found[low] = b, found[high] = a;
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < k; i += static_cast<int>(blockDim.x))
    keys[row * k + i] = static_cast<std::int32_t>(~static_cast<unsigned>(found[i]));
}

/// Shares of the keys whose groups suffice for the k-th largest maximum to be near the k-th largest score.
std::int64_t splits_for(int k) {
  return std::max<std::int64_t>(kFewestSplits, (2 * std::int64_t{k} + kGroupsOfShare - 1) / kGroupsOfShare);
}

}  // namespace

int half_width(int width) {
  for (const int some : {64, 96, 128})
    if (width <= some) return some;
  return kMostWidth;
}

void nearest(const HalfRows& points, const Clusters& clusters, std::int32_t* labels, StreamHandle stream) {
  if (points.count == 0) return;
  launch_for_width<BestColumn>(
      {.rows = points, .columns = clusters.centroids, .biases = clusters.biases, .labels = labels}, 1,
      stream);
}

std::int64_t sharpness_floats(int heads, std::int64_t queries) {
  return heads * kSplits * queries * 3;
}

void softmax_sharpness(const HalfRows& queries, const HalfRows& keys, float scale, float* partial,
                       float* sharpness, StreamHandle stream) {
  const std::int64_t all = queries.heads * queries.count;
  if (all == 0) return;
  launch_for_width<Softmax>({.rows = queries, .columns = keys, .scale = scale * kLog2E, .partial = partial},
                            kSplits, stream);
  Launch(static_cast<unsigned>((all + kThreads - 1) / kThreads), kThreads, 0, stream)(
      sharpness_kernel, partial, static_cast<int>(kSplits), queries.count, all, sharpness);
}

std::int64_t nearest_keys_floats(const HalfRows& queries, int k) {
  return queries.heads * queries.count * splits_for(k) * kGroupsOfShare;
}

void nearest_keys(const HalfRows& queries, const HalfRows& keys, int k, const KeysAbove& scratch,
                  float* partial, std::int32_t* found, StreamHandle stream) {
  const std::int64_t rows = queries.heads * queries.count, splits = splits_for(k);
  if (rows == 0) return;
  Params p = {.rows = queries, .columns = keys, .partial = partial, .above = scratch};
  launch_for_width<GroupMaxima>(p, splits, stream);
  Launch(static_cast<unsigned>((rows * 32 + kThreads - 1) / kThreads), kThreads, 0, stream)(
      least_kernel, partial, static_cast<int>(splits), queries.count, rows, k, scratch.least, scratch.counts);
  launch_for_width<Above>(p, splits, stream);
  Launch(static_cast<unsigned>(rows), kBestThreads, 0, stream)(best_kernel, scratch, k, found);
}

}  // namespace lode::cuda
