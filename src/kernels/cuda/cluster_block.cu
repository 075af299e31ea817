// SPDX-License-Identifier: Apache-2.0
// Work map: queries (and centroids in 8 bits) become halves; then two passes of products of the same form, of
// 256 rows that a block keeps in shared memory with tiles of 128 that one warpgroup brings while two
// multiply:
//
//   sums     rows are queries, tiles are centroids: log2 sum_j N_j exp(z_j) of each query
//   weights  rows are centroids, tiles are queries: the sum over queries of what each makes of a centroid
//
// Scores are made twice and never stored. Exponentials set the pace (16 a cycle and processor): a warpgroup
// takes those of one product of 64 x 128 while the next is multiplied, and the other warpgroup's fill the
// gap. Sums stay in a thread until the end: rows of a product lie in threads. Two small kernels compare,
// count and write the list.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/cluster_block.h"
#include "kernels/cuda/cluster_tiles.cuh"
#include "kernels/cuda/hopper_matrix.cuh"
#include "kernels/cuda/matrix.cuh"

namespace lode::cuda {

namespace {

constexpr int kRows = 256, kTileRows = 128, kGroupThreads = 128, kStages = 4;
constexpr int kChunk = 256;   // nodes that a block of the small kernels takes
constexpr int kPrepared = 8;  // rows of a block that makes halves
// Where this file is compiled for another architecture, the kernels are empty ones for 32 threads.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kThreads = 3 * kGroupThreads;
#else
constexpr int kThreads = 32;
#endif
constexpr int kHostThreads = 3 * kGroupThreads;

/// A tile lies as panels of 64 columns in the matrix unit's 128-byte swizzle, as in prefill_hopper.cu.
template <int D>
struct Shape {
  static constexpr int kPanel = kTileRows * 128, kTile = D / 64 * kPanel;  // bytes
  static constexpr int kStage = kTile + kTileRows * 8;                     // with two floats a row
  static constexpr int kShared = 2 * kTile + kStages * kStage + 1024 + 128;
};

struct Params {
  ClusterChoiceTask task;
  Queries queries;
  int group = 0, rows = 0;           // of a KV head
  std::int64_t all_rows, all_nodes;  // in whole tiles
  __half* q = nullptr;               // [Hkv, all_rows, d]
  float* log_keys = nullptr;         // [Hkv, all_nodes] log2 N, -inf for what does not count
  float* unscale = nullptr;          // [Hkv, all_rows] from a product to a logit, to the base 2; NaN: no say
  float2* factors = nullptr;         // [Hkv, all_rows] a product's weight is exp2(x product + y)
  float* weights = nullptr;          // [Hkv, all_nodes]
  std::byte* halves = nullptr;       // [Hkv, centroid_bytes(f16)] of centroids in 8 bits
  std::int32_t* kept = nullptr;      // [Hkv, chunks] keys

  __device__ int nodes(int head) const {
    const ClusterTables& t = task.tables;
    return t.nodes[head * (t.most_parts + 1) + task.step->parts];
  }
  __device__ const std::int32_t* first(int head) const {
    return task.tables.first + std::int64_t{head} * (task.tables.most_nodes + 1);
  }
};

/// Two of them are a word: numbers 2 i and 2 i + 1 of eight bytes.
__device__ __forceinline__ unsigned two_halves(unsigned bytes, int i, float scale) {
  const auto one = [&](int byte) {
    return fminf(fmaxf(static_cast<float>(static_cast<signed char>(bytes >> 8 * byte)) * scale, -65504.0f),
                 65504.0f);
  };
  return pack<__half>(one(2 * i), one(2 * i + 1));
}
__device__ __forceinline__ uint4 halves_of(unsigned low, unsigned high, float scale) {
  return make_uint4(two_halves(low, 0, scale), two_halves(low, 1, scale), two_halves(high, 0, scale),
                    two_halves(high, 1, scale));
}

/// A warp for each query: scaled to a peak of 128 to 256. Then the nodes' numbers of keys.
template <int D>
__global__ void prepare_kernel(const Params p) {
  const int head = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % 32;
  const auto row_blocks = static_cast<unsigned>(p.all_rows / kPrepared);
  if (blockIdx.x >= row_blocks) {
    const int node = static_cast<int>((blockIdx.x - row_blocks) * kChunk + threadIdx.x);
    const int keys = node < p.nodes(head) ? p.first(head)[node + 1] - p.first(head)[node] : 0;
    p.log_keys[head * p.all_nodes + node] = keys > 0 ? log2f(static_cast<float>(keys)) : -INFINITY;
    return;
  }
  constexpr int kEach = D / 32;
  const int row = static_cast<int>(blockIdx.x * kPrepared + threadIdx.x / 32);
  float x[kEach] = {};
  unsigned most = 0;  // NaN counts as more than infinity
  if (row < p.rows) {
    const float* const q =
        p.queries.q +
        (std::int64_t{row / p.group} * p.queries.query_heads + head * p.group + row % p.group) * D +
        lane * kEach;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      x[i] = q[i];
      most = max(most, __float_as_uint(fabsf(x[i])));
    }
  }
  const float peak = __uint_as_float(__reduce_max_sync(~0u, most));
  const bool bad = !(peak < INFINITY) || row >= p.rows;
  const float by = bad || peak == 0.0f ? 0.0f : exp2f(static_cast<float>(min(100, 7 - ilogbf(peak))));
  auto* const to = reinterpret_cast<unsigned*>(p.q + (head * p.all_rows + row) * D + lane * kEach);
#pragma unroll
  for (int i = 0; i < kEach / 2; ++i) to[i] = bad ? 0u : pack<__half>(x[2 * i] * by, x[2 * i + 1] * by);
  if (lane == 0)
    p.unscale[head * p.all_rows + row] = bad ? NAN
                                         : by > 0.0f
                                             ? p.queries.scale * kLog2e * p.task.tables.scales[head] / by
                                             : 0.0f;
}

/// Centroids in 8 bits times their scales, as pack_centroids lays halves: a warp for each tile of 16 nodes,
/// whose lanes hold 8 dimensions of nodes i and i + 8.
template <int D>
__global__ void halves_kernel(const Params p) {
  constexpr int kPieces = D / 32;
  const int head = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % 32,
            tiles = (p.task.tables.most_nodes + 15) / 16,
            tile = static_cast<int>(blockIdx.x * kPrepared + threadIdx.x / 32);
  if (tile >= tiles) return;
  constexpr int kBytes = TileLayout(kPieces, CentroidKind::q8).bytes();
  const std::int64_t at = std::int64_t{head} * tiles + tile;
  const std::byte* const from = p.task.tables.centroids + at * kBytes;
  const float2 scales = reinterpret_cast<const float2*>(from + kPieces * 512)[lane / 4];
  auto* const to = reinterpret_cast<uint4*>(p.halves) + at * kPieces * 64 + lane;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const uint4 raw = reinterpret_cast<const uint4*>(from)[piece * 32 + lane];
    to[piece * 64] = halves_of(raw.x, raw.y, scales.x);
    to[piece * 64 + 32] = halves_of(raw.z, raw.w, scales.y);
  }
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// Sums of queries over centroids, or of centroids over queries.
template <int D, bool kOfQueries>
class Pass {
  using S = Shape<D>;

 public:
  __device__ Pass(const Params& p, char* memory)
      : p_(p),
        base_((shared_address(memory) + 1023) / 1024 * 1024),
        memory_(memory + (base_ - shared_address(memory))),
        head_(static_cast<int>(blockIdx.y)),
        first_(static_cast<int>(blockIdx.x) * kRows),
        team_(static_cast<int>(threadIdx.x) / kGroupThreads - 1),
        warp_(static_cast<int>(threadIdx.x) / 32 % 4),
        lane_(static_cast<int>(threadIdx.x) % 32) {
    tiles_ = max(1, ((kOfQueries ? p.nodes(head_) : p.rows) + kTileRows - 1) / kTileRows);
  }

  __device__ void run() {
    if (!kOfQueries && first_ >= p_.nodes(head_)) return;
    if (threadIdx.x == 0) {
      stationary().init(kGroupThreads);
      for (int i = 0; i < kStages; ++i) {
        full(i).init(kGroupThreads);
        empty(i).init(8);  // the warps that multiply
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (team_ < 0) {
      asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
      bring();
    } else {
      asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
      multiply();
    }
  }

 private:
  static constexpr int kTilesAt = 2 * S::kTile, kBarriersAt = kTilesAt + kStages * S::kStage;
  __device__ unsigned tile_at(int slot) const {
    return base_ + kTilesAt + static_cast<unsigned>(slot) * S::kStage;
  }
  __device__ Barrier full(int slot) const { return {base_ + kBarriersAt + 8u * static_cast<unsigned>(slot)}; }
  __device__ Barrier empty(int slot) const { return {full(slot).at + 8u * kStages}; }
  __device__ Barrier stationary() const { return {base_ + kBarriersAt + 16u * kStages}; }

  /// A tile is announced once the next is under way, or earlier where there is no room yet for the next.
  __device__ void bring() const {
    load_rows(first_ / kTileRows, base_);
    load_rows(first_ / kTileRows + 1, base_ + S::kTile);
    commit();
    int waiting = kStages;  // that is the rows
    for (int tile = 0; tile < tiles_; ++tile) {
      const int slot = tile % kStages;
      if (tile >= kStages) {
        const int parity = tile / kStages % 2 ^ 1;
        if (!empty(slot).passed(parity)) {
          announce<0>(waiting);
          waiting = -1;
          empty(slot).wait(parity);
        }
      }
      load_tile(tile, tile_at(slot));
      commit();
      announce<1>(waiting);
      waiting = slot;
    }
    announce<0>(waiting);
  }
  static __device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  template <int Newer>
  __device__ void announce(int slot) const {
    if (slot < 0) return;
    asm volatile("cp.async.wait_group %0;\nfence.proxy.async.shared::cta;" ::"n"(Newer) : "memory");
    (slot == kStages ? stationary() : full(slot)).arrive();
  }
  __device__ void load_rows(int tile, unsigned to) const {
    if constexpr (kOfQueries)
      load_queries(tile, to);
    else
      load_nodes(tile, to);
  }
  /// With what is known of each row: log2 of its keys, or its factors.
  __device__ void load_tile(int tile, unsigned to) const {
    const int row = static_cast<int>(threadIdx.x);
    const std::int64_t at = std::int64_t{tile} * kTileRows + row;
    const unsigned beside = to + S::kTile;
    if constexpr (kOfQueries) {
      load_nodes(tile, to);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(beside + static_cast<unsigned>(row) * 4),
                   "l"(p_.log_keys + head_ * p_.all_nodes + at)
                   : "memory");
    } else {
      load_queries(tile, to);
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(beside + static_cast<unsigned>(row) * 8),
                   "l"(p_.factors + head_ * p_.all_rows + at)
                   : "memory");
    }
  }
  __device__ void load_queries(int tile, unsigned to) const {
    constexpr int kChunks = D / 8, kStep = kGroupThreads / kChunks;
    const int chunk = static_cast<int>(threadIdx.x) % kChunks, row = static_cast<int>(threadIdx.x) / kChunks;
    to += static_cast<unsigned>(chunk / 8 * S::kPanel + row * 128 + ((chunk % 8) ^ (row % 8)) * 16);
    const __half* const from = p_.q + (head_ * p_.all_rows + tile * kTileRows + row) * D + chunk * 8;
#pragma unroll
    for (int i = 0; i < kTileRows / kStep; ++i)
      bring_piece(to + static_cast<unsigned>(i * kStep * 128), from + i * kStep * D, true);
  }
  /// From tiles of 16 nodes in pieces of 32 dimensions, [2 x 8 nodes][4 x 8 dimensions] (pack_centroids): two
  /// pieces a turn.
  __device__ void load_nodes(int tile, unsigned to) const {
    constexpr int kPieces = D / 32, kOfTile = kPieces * 64;  // of 16 bytes
    const int id = static_cast<int>(threadIdx.x), node = id / 32 % 2 * 8 + id % 32 / 4,
              chunk = id / 64 * 4 + id % 4;
    to += static_cast<unsigned>(node * 128 + (chunk ^ (node % 8)) * 16);
    const int tiles = (p_.task.tables.most_nodes + 15) / 16, first = tile * (kTileRows / 16);
    const ClusterTables& tables = p_.task.tables;
    const uint4* const from =
        reinterpret_cast<const uint4*>(tables.kind == CentroidKind::f16 ? tables.centroids : p_.halves) +
        (std::int64_t{head_} * tiles + first) * kOfTile + id;
#pragma unroll
    for (int i = 0; i < kTileRows / 16 * kPieces / 2; ++i) {
      const int of_sixteen = i / (kPieces / 2), panel = i % (kPieces / 2);
      bring_piece(to + static_cast<unsigned>(panel * S::kPanel + of_sixteen * 16 * 128),
                  from + i * kGroupThreads, first + of_sixteen < tiles);
    }
  }
  static __device__ __forceinline__ void bring_piece(unsigned to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(wanted ? from : nullptr),
                 "r"(wanted ? 16 : 0)
                 : "memory");
  }

  __device__ void multiply() {
    float a[64], b[64];
    take_rows();
    stationary().wait(0);
    for (int tile = 0; tile < tiles_; ++tile) {
      const int slot = tile % kStages;
      full(slot).wait(tile / kStages % 2);
      start(slot, 0, a);
      start(slot, 1, b);
      wait_for_products<1>(a);
      add(slot, 0, a);
      wait_for_products<0>(b);
      add(slot, 1, b);
      if (lane_ == 0) empty(slot).arrive();
    }
    finish(0);
    finish(1);
  }
  /// Products of this warpgroup's 64 rows of one of the two tiles that stay.
  __device__ void start(int slot, int which, float (&s)[64]) const {
    fence_products();
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      const auto at = static_cast<unsigned>(k / 4 * S::kPanel + k % 4 * 32);
      Unit<__half>::scores(
          s, descriptor(base_ + static_cast<unsigned>(which * S::kTile + team_ * 64 * 128) + at, 16, 1024),
          descriptor(tile_at(slot) + at, 16, 1024), k > 0);
    }
    commit_products();
  }
  __device__ int row_of(int which, int half) const {
    return first_ + which * kTileRows + team_ * 64 + warp_ * 16 + lane_ / 4 + 8 * half;
  }
  __device__ void take_rows() {
    if constexpr (kOfQueries) {
#pragma unroll
      for (int i = 0; i < 4; ++i) unscale_[i] = p_.unscale[head_ * p_.all_rows + row_of(i / 2, i % 2)];
    }
  }
  template <class T>
  __device__ T beside(int slot, int n) const {  // of columns 8 n + 2 (lane % 4) and the next one
    return reinterpret_cast<const T*>(memory_ + kTilesAt + slot * S::kStage + S::kTile)[n * 4 + lane_ % 4];
  }

  __device__ void add(int slot, int which, float (&s)[64]) {
    if constexpr (kOfQueries)
      add_sums(slot, which, s);
    else
      add_weights(slot, which, s);
  }
  __device__ void add_sums(int slot, int which, float (&s)[64]) {
    float high[2] = {max_[2 * which], max_[2 * which + 1]};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float2 log_keys = beside<float2>(slot, n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float &x = s[4 * n + 2 * half], &y = s[4 * n + 2 * half + 1];
        x = fmaf(x, unscale_[2 * which + half], log_keys.x);
        y = fmaf(y, unscale_[2 * which + half], log_keys.y);
        high[half] = fmaxf(high[half], fmaxf(x, y));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float base = high[half] == -INFINITY ? 0.0f : high[half];
      float sum = sum_[2 * which + half] * exp2_fast(max_[2 * which + half] - base), other = 0.0f;
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        sum += exp2_fast(s[4 * n + 2 * half] - base);
        other += exp2_fast(s[4 * n + 2 * half + 1] - base);
      }
      sum_[2 * which + half] = sum + other;
      max_[2 * which + half] = high[half];
    }
  }
  __device__ void add_weights(int slot, int which, const float (&s)[64]) {
    float sum[4] = {};
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      const float4 factors = beside<float4>(slot, n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[2 * half] += exp2_fast(fmaf(s[4 * n + 2 * half], factors.x, factors.y));
        sum[2 * half + 1] += exp2_fast(fmaf(s[4 * n + 2 * half + 1], factors.z, factors.w));
      }
    }
    sum_[2 * which] += sum[0] + sum[1];
    sum_[2 * which + 1] += sum[2] + sum[3];
  }

  /// The four threads of a row make one sum of theirs.
  __device__ void finish(int which) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(which, half), i = 2 * which + half;
      float high = max_[i], sum = sum_[i];
      if constexpr (kOfQueries) {
        for (int o = 1; o < 4; o *= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, o));
        sum *= exp2_fast(max_[i] - (high == -INFINITY ? 0.0f : high));
      }
      for (int o = 1; o < 4; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
      if (lane_ % 4 != 0) continue;
      if constexpr (kOfQueries)
        p_.factors[head_ * p_.all_rows + row] = factors(high, sum, unscale_[i]);
      else
        p_.weights[head_ * p_.all_nodes + row] = p_.task.squares ? sqrtf(sum) : sum;
    }
  }
  /// Such that sums over queries are means: of K exp(z) / sum_j N_j exp(z_j), or of its square.
  __device__ float2 factors(float high, float sum, float unscale) const {
    if (!(sum > 0.0f && sum < INFINITY && high < INFINITY)) return make_float2(0.0f, -INFINITY);
    const float power = p_.task.squares ? 2.0f : 1.0f,
                keys = static_cast<float>(p_.task.step->end - p_.task.step->begin);
    return make_float2(power * unscale,
                       power * (log2f(keys) - high - log2f(sum)) - log2f(static_cast<float>(p_.rows)));
  }

  const Params& p_;
  const unsigned base_;  // shared memory: rows, tiles with what is beside them, barriers
  char* const memory_;
  const int head_, first_, team_, warp_, lane_;
  int tiles_;
  float unscale_[4] = {}, max_[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, sum_[4] = {};
};

#endif

template <int D, bool kOfQueries>
__global__ __launch_bounds__(kThreads, 1) void pass_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  Pass<D, kOfQueries>(p, memory).run();
#endif
}

/// The keys of a node that is kept, else 0.
__device__ int kept_keys(const Params& p, int head, int node) {
  if (node >= p.nodes(head)) return 0;
  const double threshold = p.task.step->threshold;
  if (threshold != 0.0 && !(static_cast<double>(p.weights[head * p.all_nodes + node]) > threshold)) return 0;
  return p.first(head)[node + 1] - p.first(head)[node];
}

/// The sum of `x` over the threads before this one, and over all.
__device__ int2 sum_before(int x) {
  __shared__ int of_warps[kChunk / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int up_to = x;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int other = __shfl_up_sync(~0u, up_to, o);
    if (lane >= o) up_to += other;
  }
  __syncthreads();  // of an earlier call
  if (lane == 31) of_warps[warp] = up_to;
  __syncthreads();
  int before = up_to - x, all = 0;
  for (int w = 0; w < kChunk / 32; ++w) {
    if (w < warp) before += of_warps[w];
    all += of_warps[w];
  }
  return make_int2(before, all);
}

__global__ void count_kernel(const Params p) {
  const int head = static_cast<int>(blockIdx.y), node = static_cast<int>(blockIdx.x * kChunk + threadIdx.x);
  const int2 sum = sum_before(kept_keys(p, head, node));
  if (threadIdx.x == 0) p.kept[head * gridDim.x + blockIdx.x] = sum.y;
}

/// A chunk's keys behind those of the chunks before it; the last block adds the keys that are in no cluster.
__global__ void list_kernel(const Params p) {
  __shared__ int3 nodes[kChunk];  // where keys come from, where they go, how many
  const int head = static_cast<int>(blockIdx.y), id = static_cast<int>(threadIdx.x),
            node = static_cast<int>(blockIdx.x) * kChunk + id;
  int earlier = 0;
  for (unsigned i = threadIdx.x; i < blockIdx.x; i += kChunk) earlier += p.kept[head * gridDim.x + i];
  const int keys = kept_keys(p, head, node), before = sum_before(earlier).y;
  const int2 sum = sum_before(keys);
  nodes[id] = make_int3(keys > 0 ? p.first(head)[node] : 0, before + sum.x, keys);
  __syncthreads();
  std::int32_t* const to = p.task.rows + head * p.task.capacity;
  const std::int32_t* const from = p.task.tables.rows + head * p.task.tables.most_keys;
  for (int i = id / 32; i < kChunk; i += kChunk / 32) {
    const int3 one = nodes[i];
    for (int key = id % 32; key < one.z; key += 32) to[one.y + key] = __ldg(from + one.x + key);
  }
  if (blockIdx.x + 1 < gridDim.x) return;
  const int end = p.task.step->end, all = before + sum.y;
  const auto window = static_cast<int>(p.queries.tokens[0].position + 1 - p.task.window);
  for (int i = id; i < window - end; i += kChunk) to[all + i] = end + i;
  if (id == 0) p.task.counts[head] = all + max(0, window - end);
}

template <int D, bool kOfQueries>
void launch_pass(const Params& p, std::int64_t rows, StreamHandle stream) {
  const auto kernel = pass_kernel<D, kOfQueries>;
  LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Shape<D>::kShared));
  const dim3 grid(static_cast<unsigned>(rows / kRows), static_cast<unsigned>(p.queries.layout.kv_heads));
  kernel<<<grid, kHostThreads, Shape<D>::kShared, stream>>>(p);
  LODE_LAUNCHED();
}

template <int D>
void launch(const Params& p, StreamHandle stream) {
  const auto heads = static_cast<unsigned>(p.queries.layout.kv_heads),
             chunks = static_cast<unsigned>(p.all_nodes / kChunk);
  const dim3 prepared(static_cast<unsigned>(p.all_rows / kPrepared) + chunks, heads), nodes(chunks, heads);
  prepare_kernel<D><<<prepared, kChunk, 0, stream>>>(p);
  LODE_LAUNCHED();
  if (p.task.tables.kind == CentroidKind::q8) {
    const int tiles = (p.task.tables.most_nodes + 15) / 16;
    const dim3 grid(static_cast<unsigned>((tiles + kPrepared - 1) / kPrepared), heads);
    halves_kernel<D><<<grid, kPrepared * 32, 0, stream>>>(p);
    LODE_LAUNCHED();
  }
  launch_pass<D, true>(p, p.all_rows, stream);
  launch_pass<D, false>(p, p.all_nodes, stream);
  count_kernel<<<nodes, kChunk, 0, stream>>>(p);
  LODE_LAUNCHED();
  list_kernel<<<nodes, kChunk, 0, stream>>>(p);
  LODE_LAUNCHED();
}

static_assert(kChunk == kRows && kPrepared * 32 == kChunk);

}  // namespace

BlockScratch::BlockScratch(int tokens, int query_heads, int kv_heads, int head_dim, std::int64_t most_nodes,
                           CentroidKind kind) {
  const auto whole = [](std::int64_t n) { return (n + kRows - 1) / kRows * kRows; };
  rows = whole(std::int64_t{tokens} * (query_heads / kv_heads));
  nodes = whole(std::max<std::int64_t>(1, most_nodes));
  log_keys = kv_heads * rows * head_dim * 2;
  unscale = log_keys + kv_heads * nodes * 4;
  factors = unscale + kv_heads * rows * 4;
  weights = factors + kv_heads * rows * 8;
  kept = weights + kv_heads * nodes * 4;
  halves = (kept + kv_heads * (nodes / kChunk) * 4 + 15) / 16 * 16;
  const std::int64_t each = centroid_bytes(most_nodes, head_dim, CentroidKind::f16);
  bytes = halves + (kind == CentroidKind::f16 ? 0 : kv_heads * each);
}

bool can_choose_for_block(int head_dim, CentroidKind kind) {
  static const bool built = [] {
    cudaFuncAttributes found{};
    LODE_CUDA(cudaFuncGetAttributes(&found, pass_kernel<128, true>));
    return found.maxThreadsPerBlock >= kHostThreads;
  }();
  return built && kind != CentroidKind::q8_spreads && (head_dim == 64 || head_dim == 128);
}

void choose_clusters_for_block(const ClusterChoiceTask& task, const Queries& queries, void* scratch,
                               StreamHandle stream) {
  if (queries.count == 0) return;
  const int kv_heads = queries.layout.kv_heads, group = queries.query_heads / kv_heads,
            d = queries.layout.head_dim;
  const BlockScratch at(queries.count, queries.query_heads, kv_heads, d, task.tables.most_nodes,
                        task.tables.kind);
  const auto place = [&]<class T>(T* /*type*/, std::int64_t offset) {
    return reinterpret_cast<T*>(static_cast<char*>(scratch) + offset);
  };
  Params p = {.task = task, .queries = queries, .group = group, .rows = queries.count * group};
  p.all_rows = at.rows;
  p.all_nodes = at.nodes;
  p.q = static_cast<__half*>(scratch);
  p.log_keys = place(p.log_keys, at.log_keys);
  p.unscale = place(p.unscale, at.unscale);
  p.factors = place(p.factors, at.factors);
  p.weights = place(p.weights, at.weights);
  p.kept = place(p.kept, at.kept);
  p.halves = place(p.halves, at.halves);
  if (d == 128)
    launch<128>(p, stream);
  else
    launch<64>(p, stream);
}

}  // namespace lode::cuda
