// SPDX-License-Identifier: Apache-2.0
// Work map: queries (and what has 8 bits of the nodes) become halves; two passes of products make each
// query's sum over the nodes, then each node's over the queries (cluster_products.cuh), or one and a pass
// over what it stored, some heads at a time (cluster_columns.cuh); two small kernels compare, count and write
// the list.
#include <algorithm>
#include <cmath>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/scan.cuh"
#include "kernels/cuda/device/sm_count.h"
#include "kernels/cuda/squeezed/cluster_block.h"
#include "kernels/cuda/squeezed/cluster_columns.cuh"

namespace lode::cuda {

namespace {

constexpr int kChunk = 256;   // nodes that a block of the small kernels takes
constexpr int kPrepared = 8;  // rows of a block that makes halves
// Where this file is compiled for another architecture, the kernels are empty ones for 32 threads.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kThreads = (1 + kTeams) * kGroupThreads;
#else
constexpr int kThreads = 32;
#endif
constexpr int kHostThreads = (1 + kTeams) * kGroupThreads;

/// Of a query's length in each plane, which two lanes hold; `by` makes a query of it that is scaled. The rest
/// of the panel is 0.
template <int D>
__device__ __forceinline__ void put_squares(const float (&x)[D / 32], float by, unsigned* to) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float squares[D / 32];
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const float other = __shfl_xor_sync(~0u, x[i], 16);
    squares[i] =
        lane < 16 ? fminf(by * x[i] * (by * x[i]) + by * other * (by * other), kLargestFactor) : 0.0f;
  }
  if (lane >= 64 / (D / 32)) return;
#pragma unroll
  for (int i = 0; i < D / 64; ++i) to[i] = pack<__nv_bfloat16>(squares[2 * i], squares[2 * i + 1]);
}

/// Two of them are a word: numbers 2 i and 2 i + 1 of eight bytes.
template <class T>
__device__ __forceinline__ unsigned two_times(unsigned bytes, int i, float scale) {
  constexpr float kMost = std::is_same_v<T, __half> ? 65504.0f : INFINITY;
  const auto one = [&](int byte) {
    return fminf(fmaxf(static_cast<float>(static_cast<signed char>(bytes >> 8 * byte)) * scale, -kMost),
                 kMost);
  };
  return pack<T>(one(2 * i), one(2 * i + 1));
}
template <class T>
__device__ __forceinline__ uint4 times(unsigned low, unsigned high, float scale) {
  return make_uint4(two_times<T>(low, 0, scale), two_times<T>(low, 1, scale), two_times<T>(high, 0, scale),
                    two_times<T>(high, 1, scale));
}

template <bool kSpreads>
__device__ void prepare_node(const BlockParams& p, int head, int node) {
  constexpr float kUnit = kSpreads ? 1.0f / kGainUnit : 1.0f;
  const int keys = node < p.nodes(head) ? p.first(head)[node + 1] - p.first(head)[node] : 0;
  p.log_keys[head * p.all_nodes + node] = kUnit * (keys > 0 ? log2f(static_cast<float>(keys)) : kNoKeys);
}

/// A warp for each query: scaled to a peak of 128 to 256. Then the nodes.
template <int D, bool kSpreads>
__global__ void prepare_kernel(const BlockParams p) {
  const int head = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % 32;
  const auto row_blocks = static_cast<unsigned>(p.all_rows / kPrepared);
  if (blockIdx.x >= row_blocks)
    return prepare_node<kSpreads>(p, head,
                                  static_cast<int>((blockIdx.x - row_blocks) * kChunk + threadIdx.x));
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
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = bad ? 0.0f : x[i] * by;
  const std::int64_t at = head * p.all_rows + row;
  auto* const to = reinterpret_cast<unsigned*>(p.q + at * columns_of(D, kSpreads) + lane * kEach);
#pragma unroll
  for (int i = 0; i < kEach / 2; ++i) to[i] = pack<__half>(x[2 * i], x[2 * i + 1]);
  const float unit = by > 0.0f ? p.queries.scale / by : 0.0f;
  if constexpr (kSpreads) {
    put_squares<D>(x, unit, to + D / 2);
  }
  if (lane == 0) p.unscale[at] = bad ? NAN : unit * kLog2e * p.task.tables.scales[head];
}

/// What makes a product of variances and squares the square of kGainUnit r: none of a key alone.
__device__ float of_variances(float root, float log_keys) {
  return log_keys > 0.0f ? fminf(2.0f * kLog2e * kGainUnit / log_keys * root * root, kLargestFactor) : 0.0f;
}

/// Centroids in 8 bits times their scales, as pack_centroids lays halves, and variances: a warp for each tile
/// of 16 nodes, whose lanes hold 8 dimensions of nodes i and i + 8.
template <int D, bool kSpreads>
__global__ void halves_kernel(const BlockParams p) {
  const TileLayout layout(D / kPieceDims, p.task.tables.kind);  // may have spreads that nobody asks for
  constexpr int kOfCentroids = D / kPieceDims, kPieces = columns_of(D, kSpreads) / kPieceDims;
  const int head = static_cast<int>(blockIdx.y), lane = static_cast<int>(threadIdx.x) % 32,
            tile = static_cast<int>(blockIdx.x * kPrepared + threadIdx.x / 32);
  if (tile >= p.tiles()) return;
  const std::int64_t at = std::int64_t{head} * p.tiles() + tile;
  const std::byte* const from = p.task.tables.centroids + at * layout.bytes();
  const auto* const pieces = reinterpret_cast<const uint4*>(from);
  const auto* const scales = reinterpret_cast<const float2*>(from + layout.fours * 512);
  auto* const to = reinterpret_cast<uint4*>(p.halves) + at * kPieces * 64 + lane;
  const float2 scale = scales[lane / 4];
#pragma unroll
  for (int piece = 0; piece < kOfCentroids; ++piece) {
    const uint4 raw = pieces[piece * 32 + lane];
    to[piece * 64] = times<__half>(raw.x, raw.y, scale.x);
    to[piece * 64 + 32] = times<__half>(raw.z, raw.w, scale.y);
  }
  if constexpr (kSpreads) {
    const float* const log_keys = p.log_keys + head * p.all_nodes + tile * kTileNodes + lane / 4;
    const float2 root = scales[8 + lane / 4];
    const float low = of_variances(root.x, log_keys[0]), high = of_variances(root.y, log_keys[8]);
#pragma unroll
    for (int piece = kOfCentroids; piece < kPieces; ++piece) {
      const uint4 raw = piece < layout.fours ? pieces[piece * 32 + lane] : uint4{};
      to[piece * 64] = times<__nv_bfloat16>(raw.x, raw.y, low);
      to[piece * 64 + 32] = times<__nv_bfloat16>(raw.z, raw.w, high);
    }
  }
}

template <int D, bool kSpreads, Pass kPass>
__global__ __launch_bounds__(kThreads, 1) void pass_kernel(const __grid_constant__ BlockParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  BlockPass<D, kSpreads, kPass>(p, memory).run();
#endif
}

/// The keys of a node that is kept, else 0.
__device__ int kept_keys(const BlockParams& p, int head, int node) {
  if (node >= p.nodes(head)) return 0;
  const double threshold = p.task.step->threshold;
  if (threshold != 0.0 && !(static_cast<double>(p.weights[head * p.all_nodes + node]) > threshold)) return 0;
  return p.first(head)[node + 1] - p.first(head)[node];
}

/// The sum of `x` over the threads before this one, and over all.
__device__ int2 sum_before(int x) {
  __shared__ int of_warps[kChunk / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int up_to = sum_up_to(x, lane);
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

__global__ void count_kernel(const BlockParams p) {
  const int head = static_cast<int>(blockIdx.y), node = static_cast<int>(blockIdx.x * kChunk + threadIdx.x);
  const int2 sum = sum_before(kept_keys(p, head, node));
  if (threadIdx.x == 0) p.kept[head * gridDim.x + blockIdx.x] = sum.y;
}

/// A chunk's keys behind those of the chunks before it; the last block adds the keys that are in no cluster.
__global__ void list_kernel(const BlockParams p) {
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

template <int D, bool kSpreads, Pass kPass>
void launch_pass(const BlockParams& p, std::int64_t rows, int heads, StreamHandle stream) {
  constexpr int kShared = BlockShape<D, kSpreads>::kShared;
  const auto kernel = pass_kernel<D, kSpreads, kPass>;
  allow_shared_bytes(reinterpret_cast<const void*>(kernel), kShared);
  const dim3 grid(static_cast<unsigned>(rows / kRows), static_cast<unsigned>(heads));
  Launch(grid, kHostThreads, kShared, stream)(kernel, p);
}

template <int D, bool kSpreads>
void launch_two_passes(const BlockParams& p, StreamHandle stream) {
  const int heads = p.queries.layout.kv_heads;
  launch_pass<D, kSpreads, Pass::sums>(p, p.all_rows, heads, stream);
  p.task.squares ? launch_pass<D, kSpreads, Pass::squares>(p, p.all_nodes, heads, stream)
                 : launch_pass<D, kSpreads, Pass::weights>(p, p.all_nodes, heads, stream);
}

/// `at_once` heads a turn, whose exponentials there is room for.
template <int D, bool kSpreads>
void launch_stored(BlockParams p, int at_once, StreamHandle stream) {
  const int all = p.queries.layout.kv_heads;
  for (; p.first_head < all; p.first_head += at_once) {
    const int heads = std::min(at_once, all - p.first_head);
    launch_pass<D, kSpreads, Pass::stored_sums>(p, p.all_rows, heads, stream);
    const dim3 grid(static_cast<unsigned>(p.all_nodes / kTileRows), static_cast<unsigned>(heads));
    const auto columns = p.task.squares ? columns_kernel<true> : columns_kernel<false>;
    Launch(grid, kColumnWarps * 32, 0, stream)(columns, p);
  }
}

/// How many heads a turn, of at most `most`: those that leave the fewest processors idle in their last round.
/// 0 if stored exponentials would cost more in idle ones than they spare.
int fastest_turn(std::int64_t row_blocks, int heads, std::int64_t most) {
  const auto rounds = [&](std::int64_t blocks) { return (blocks + processors() - 1) / processors(); };
  std::int64_t best = 0, least = rounds(row_blocks * heads) * 5 / 4;
  for (std::int64_t h = 1; h <= std::min<std::int64_t>(heads, most); ++h)
    if (const std::int64_t all = heads / h * rounds(row_blocks * h) + rounds(row_blocks * (heads % h));
        all <= least)
      best = h, least = all;
  return static_cast<int>(best);
}

/// Of one head.
std::int64_t stored_bytes(std::int64_t rows, std::int64_t nodes) {
  return rows / 16 * (nodes / kTileRows) * kStoredGroup * std::int64_t{sizeof(uint4)};
}
/// A sixty-fourth of the GPU's memory, 2.2 GB of an H200.
std::int64_t most_stored() {
  static const std::int64_t bytes = availability().total_bytes / 64;
  return bytes;
}

template <int D, bool kSpreads>
void launch(const BlockParams& p, int at_once, StreamHandle stream) {
  const auto heads = static_cast<unsigned>(p.queries.layout.kv_heads),
             chunks = static_cast<unsigned>(p.all_nodes / kChunk);
  const dim3 prepared(static_cast<unsigned>(p.all_rows / kPrepared) + chunks, heads), nodes(chunks, heads);
  Launch(prepared, kChunk, 0, stream)(prepare_kernel<D, kSpreads>, p);
  if (p.task.tables.kind != CentroidKind::f16) {
    const dim3 grid(static_cast<unsigned>((p.tiles() + kPrepared - 1) / kPrepared), heads);
    Launch(grid, kPrepared * 32, 0, stream)(halves_kernel<D, kSpreads>, p);
  }
  at_once > 0 ? launch_stored<D, kSpreads>(p, at_once, stream) : launch_two_passes<D, kSpreads>(p, stream);
  Launch(nodes, kChunk, 0, stream)(count_kernel, p);
  Launch(nodes, kChunk, 0, stream)(list_kernel, p);
}

template <int D>
void launch(const BlockParams& p, bool spreads, int at_once, StreamHandle stream) {
  spreads ? launch<D, true>(p, at_once, stream) : launch<D, false>(p, at_once, stream);
}

static_assert(kChunk == kRows && kPrepared * 32 == kChunk);

}  // namespace

BlockScratch::BlockScratch(int tokens, int query_heads, int kv_heads, int head_dim, std::int64_t most_nodes,
                           CentroidKind kind) {
  const auto whole = [](std::int64_t n) { return (n + kRows - 1) / kRows * kRows; };
  const bool spreads = kind == CentroidKind::q8_spreads;
  const std::int64_t columns = columns_of(head_dim, spreads);
  rows = whole(std::int64_t{tokens} * (query_heads / kv_heads));
  nodes = whole(std::max<std::int64_t>(1, most_nodes));
  const auto put = [&](std::int64_t each) {
    const std::int64_t at = bytes;
    bytes += (kv_heads * each + 15) / 16 * 16;
    return at;
  };
  queries = put(rows * columns * 2);
  log_keys = put(nodes * 4);
  unscale = put(rows * 4);
  factors = put(rows * 8);
  weights = put(nodes * 4);
  kept = put(nodes / kChunk * 4);
  halves = put(kind == CentroidKind::f16 ? 0 : nodes * columns * 2);
  stored = bytes;
  bytes += std::min(kv_heads * stored_bytes(rows, nodes), most_stored());
}

bool can_choose_for_block(int head_dim) {
  static const bool built = [] {
    cudaFuncAttributes found{};
    LODE_CUDA(cudaFuncGetAttributes(&found, pass_kernel<128, true, Pass::sums>));
    return found.maxThreadsPerBlock >= kHostThreads;
  }();
  return built && (head_dim == 64 || head_dim == 128);
}

void choose_clusters_for_block(const ClusterChoiceTask& task, const Queries& queries, bool spreads,
                               void* scratch, StreamHandle stream, std::optional<int> heads_a_turn) {
  if (queries.count == 0) return;
  const int kv_heads = queries.layout.kv_heads, group = queries.query_heads / kv_heads,
            d = queries.layout.head_dim;
  const BlockScratch at(queries.count, queries.query_heads, kv_heads, d, task.tables.most_nodes,
                        task.tables.kind);
  const auto place = [&]<class T>(T* /*type*/, std::int64_t offset) {
    return reinterpret_cast<T*>(static_cast<char*>(scratch) + offset);
  };
  BlockParams p = {.task = task, .queries = queries, .group = group, .rows = queries.count * group};
  p.all_rows = at.rows;
  p.all_nodes = at.nodes;
  p.q = place(p.q, at.queries);
  p.log_keys = place(p.log_keys, at.log_keys);
  p.unscale = place(p.unscale, at.unscale);
  p.factors = place(p.factors, at.factors);
  p.weights = place(p.weights, at.weights);
  p.kept = place(p.kept, at.kept);
  p.halves = place(p.halves, at.halves);
  p.stored = place(p.stored, at.stored);
  const bool adds = spreads && task.tables.kind == CentroidKind::q8_spreads;
  const int at_once = heads_a_turn.value_or(
      fastest_turn(p.all_rows / kRows, kv_heads, most_stored() / stored_bytes(p.all_rows, p.all_nodes)));
  d == 128 ? launch<128>(p, adds, at_once, stream) : launch<64>(p, adds, at_once, stream);
}

}  // namespace lode::cuda
