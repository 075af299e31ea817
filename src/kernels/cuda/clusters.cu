// SPDX-License-Identifier: Apache-2.0
// Work map: a cluster of blocks for each (KV head, stretch of query tokens). Each block owns a share of the
// nodes: it streams their centroids once for four queries at a time, keeps the scores in shared memory, and
// the blocks exchange no more than the sums of the softmax and how many keys each keeps. The first centroids
// are fetched before the queries are waited for.
//
//   S[16 nodes, 8] = C q^T   mma.m16n8k16: the eight columns are four queries, each as the sum of two halves,
//   so that products are exact to 22 bits whatever the type of the store; a lane has both halves of a sum
//
// Work of a decode step is reading the centroids; passes over them repeat for each four queries of a stretch.
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/cluster_link.cuh"
#include "kernels/cuda/clusters.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTile = 16, kDepth = 32;  // nodes and dimensions of a piece
constexpr int kPieceBytes = kTile * kDepth * 2;
constexpr int kQueries = 4;  // of one pass
constexpr float kLog2e = 1.44269504f;
constexpr float kLargestLogit = 1e30f;  // infinities would leave no weight to compare
constexpr int kMostPieces = 8;

int pieces_of(int head_dim) {
  return (head_dim + kDepth - 1) / kDepth;
}
/// Compiled for these.
int pieces_compiled(int head_dim) {
  const int pieces = pieces_of(head_dim);
  return pieces <= 2 ? 2 : pieces <= 4 ? pieces : kMostPieces;
}
/// Shared memory of a block over so many ranks, at most.
std::int64_t room_for(std::int64_t most_nodes, int ranks) {
  constexpr std::int64_t kNodeBytes = 32, kBesides = 8 << 10;
  return (most_nodes / ranks + kTile) * kNodeBytes + kBesides;
}
/// Such that all blocks run at once. By the index alone: sums of another cut differ in their last bits, and a
/// choice must not depend on how many queries come together.
int ranks_of(int kv_heads, std::int64_t most_nodes) {
  constexpr std::int64_t kRoom = 200 << 10;
  if (kv_heads <= 8) return 16;
  return kv_heads <= 16 || room_for(most_nodes, 4) > kRoom ? 8 : 4;
}

/// A block's shared memory, in bytes from its start.
struct Plan {
  int tiles = 0;   // most of one block
  int stride = 0;  // floats from one query's scores to the next's, so that a tile is free of bank conflicts
  int queries = 0, scores = 0, starts = 0, weights = 0, total = 0;

  __host__ __device__ Plan(std::int64_t nodes, int pieces, int ranks) {
    tiles = static_cast<int>(((nodes + kTile - 1) / kTile + ranks - 1) / ranks);
    stride = (tiles * kTile + 31) / 32 * 32 + 8;
    scores = pieces * 32 * 16;
    starts = scores + kQueries * stride * 4;
    weights = starts + (tiles * kTile + 4) * 4;
    total = weights + tiles * kTile * 4;
  }
};

struct Params {
  ClusterChoiceTask task;
  Queries queries;
  int group = 0;
};

__device__ __forceinline__ void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                         unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int kPieces, int kRanks>
class Chooser {
 public:
  __device__ Chooser(const Params& params, char* memory)
      : p_(params),
        plan_(params.task.tables.most_nodes, kPieces, kRanks),
        memory_(memory),
        rank_(static_cast<int>(blockIdx.x)),
        kv_head_(static_cast<int>(blockIdx.y)),
        first_token_(static_cast<int>(blockIdx.z) * params.task.stretch),
        tokens_(min(params.task.stretch, params.queries.count - first_token_)),
        tid_(static_cast<int>(threadIdx.x)),
        lane_(tid_ % 32),
        warp_(tid_ / 32) {}

  __device__ void run() {
    if (tid_ == 0) open_inboxes();
    __syncwarp();
    take_tables();
    fetch_first();
    __syncwarp();
    arrive_in_cluster();  // others write here after that
    wait_for_predecessor();
    release_successor();
    wait_for_cluster();
    const int rows = tokens_ * p_.group;
    for (int row = 0; row < rows; row += kQueries) {
      if (row > 0) fetch_first();
      take_queries(row, rows);
      score();
      const int pass = row / kQueries;
      share_sums(pass % 2);
      if (pass > 1 && tid_ == 0) expect(&shared().of_sums[pass % 2], kSumBytes);
      wait_for(&shared().of_sums[pass % 2], static_cast<unsigned>(pass / 2 % 2));
      add_weights(row, rows);
    }
    __syncthreads();
    const int2 mine = keep();
    if (tid_ < kRanks)
      send(address_in(shared().kept_keys + rank_, tid_), static_cast<unsigned>(mine.y),
           address_in(&shared().of_keys, tid_));
    wait_for(&shared().of_keys);
    write_lists(mine.x, mine.y);
  }

 private:
  static constexpr int kHeld = kPieces <= 4 ? 2 : 1;  // tiles whose centroids a warp has on the way at once
  struct Shared {
    float unscale[kQueries];  ///< from a product to a logit, to the base 2
    int bad[kQueries];        ///< a query that has no say
    float warp_highest[kWarps][kQueries], warp_sums[kWarps][kQueries];
    float2 sums[2][kRanks][kQueries];  ///< of each block: highest logit, sum of exponentials
    float highest[kQueries], factor[kQueries];
    int2 warp_kept[kWarps];  ///< nodes, keys
    int kept_keys[kRanks];
    Inbox of_sums[2], of_keys;  ///< sums of passes by turns
  };
  static constexpr unsigned kSumBytes = kRanks * kQueries * 8;
  __device__ static Shared& shared() {
    __shared__ Shared shared;
    return shared;
  }
  __device__ static void open_inboxes() {
    Shared& s = shared();
    open_inbox(&s.of_sums[0]), open_inbox(&s.of_sums[1]), open_inbox(&s.of_keys);
    publish_inboxes();
    expect(&s.of_sums[0], kSumBytes), expect(&s.of_sums[1], kSumBytes), expect(&s.of_keys, kRanks * 4);
  }
  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }

  /// This block's share of the nodes, and where their keys begin.
  __device__ void take_tables() {
    const ClusterTables& tables = p_.task.tables;
    step_ = *p_.task.step;
    const std::int32_t* const of_parts = tables.nodes + kv_head_ * (tables.most_parts + 1);
    int nodes = of_parts[tables.most_parts];  // beside the step: all parts count but after a roll back
    if (step_.parts != tables.most_parts) nodes = of_parts[step_.parts];
    const int tiles = (nodes + kTile - 1) / kTile, each = (tiles + kRanks - 1) / kRanks;
    const int first_tile = min(tiles, rank_ * each);
    tiles_ = min(tiles, first_tile + each) - first_tile;
    nodes_ = max(0, min(nodes - first_tile * kTile, tiles_ * kTile));
    centroids_ =
        reinterpret_cast<const uint4*>(tables.centroids) +
        (std::int64_t{kv_head_} * ((tables.most_nodes + kTile - 1) / kTile) + first_tile) * kPieces * 64;
    const std::int32_t* const first =
        tables.first + std::int64_t{kv_head_} * (tables.most_nodes + 1) + first_tile * kTile;
    for (int i = tid_; nodes_ > 0 && i <= nodes_; i += kThreads) at<int>(plan_.starts)[i] = first[i];
  }
  __device__ int keys_of(int node) const {
    return at<int>(plan_.starts)[node + 1] - at<int>(plan_.starts)[node];
  }

  __device__ void fetch(int slot, int tile) {
    if (tile >= tiles_) return;
#pragma unroll
    for (int i = 0; i < 2 * kPieces; ++i)
      held_[slot][i] = __ldg(centroids_ + (std::int64_t{tile} * kPieces * 2 + i) * 32 + lane_);
  }
  __device__ void fetch_first() {
#pragma unroll
    for (int slot = 0; slot < kHeld; ++slot) fetch(slot, warp_ + slot * kWarps);
  }

  /// A warp for each of up to four queries from `row` on: scaled to a peak of 128 to 256, as two halves.
  __device__ void take_queries(int row, int rows) {
    const int d = p_.queries.layout.head_dim;
    __half* const to = at<__half>(plan_.queries);
    if (warp_ < kQueries) {
      const int own = row + warp_, token = first_token_ + own / p_.group;
      const float* const q =
          p_.queries.q +
          (std::int64_t{token} * p_.queries.query_heads + kv_head_ * p_.group + own % p_.group) * d;
      constexpr int kEach = kPieces;
      float x[kEach];
      unsigned most = 0;  // NaN counts as more than infinity
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int c = i * 32 + lane_;
        x[i] = own < rows && c < d ? q[c] : 0.0f;
        most = max(most, __float_as_uint(fabsf(x[i])));
      }
      const float peak = __uint_as_float(__reduce_max_sync(~0u, most));
      const bool bad = !(peak < INFINITY);
      const float by = bad || peak == 0.0f ? 0.0f : exp2f(static_cast<float>(min(100, 7 - ilogbf(peak))));
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int c = i * 32 + lane_;
        const float scaled = bad ? 0.0f : x[i] * by;
        const __half high = __float2half_rn(scaled);
        const int place = (i * 32 + 2 * warp_ * 4 + c % kDepth / 8) * 8 + c % 8;
        to[place] = high;
        to[place + 32] = __float2half_rn(scaled - __half2float(high));
      }
      if (lane_ == 0) {
        shared().bad[warp_] = bad || own >= rows;
        shared().unscale[warp_] =
            by > 0.0f ? p_.queries.scale * kLog2e * p_.task.tables.scales[kv_head_] / by : 0.0f;
      }
    }
    __syncthreads();
  }

  /// Logits of this block's nodes; the highest of each warp.
  __device__ void score() {
    const int g = lane_ / 4, t = lane_ % 4;
    const uint4* const q = at<uint4>(plan_.queries) + lane_;
    float* const to = at<float>(plan_.scores) + t * plan_.stride;
    const float unscale = shared().unscale[t];
    float highest = -kLargestLogit;
    for (int from = warp_; from < tiles_; from += kHeld * kWarps) {
#pragma unroll
      for (int slot = 0; slot < kHeld; ++slot) {
        const int tile = from + slot * kWarps;
        if (tile >= tiles_) break;
        float c[4] = {};
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const uint4 low = held_[slot][2 * i], high = held_[slot][2 * i + 1], b = q[i * 32];
          multiply(c, low.x, high.x, low.y, high.y, b.x, b.y);
          multiply(c, low.z, high.z, low.w, high.w, b.z, b.w);
        }
        fetch(slot, tile + kHeld * kWarps);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int node = tile * kTile + g + 8 * half;
          const float z =
              fminf(fmaxf((c[2 * half] + c[2 * half + 1]) * unscale, -kLargestLogit), kLargestLogit);
          if (node >= nodes_) continue;
          to[node] = z;
          highest = fmaxf(highest, z);
        }
      }
    }
    for (int o = 4; o < 32; o *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
    if (g == 0) shared().warp_highest[warp_][t] = highest;
    __syncwarp();
    __syncthreads();
  }

  /// This block's highest logit and sum of exponentials of each query, to all blocks.
  __device__ void share_sums(int turn) {
    Shared& s = shared();
    float highest[kQueries], sum[kQueries] = {};
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
      highest[r] = s.warp_highest[0][r];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) highest[r] = fmaxf(highest[r], s.warp_highest[w][r]);
    }
    const float* const z = at<float>(plan_.scores);
    for (int node = tid_; node < nodes_; node += kThreads) {
      const auto keys = static_cast<float>(keys_of(node));
#pragma unroll
      for (int r = 0; r < kQueries; ++r) sum[r] += keys * exp2f(z[r * plan_.stride + node] - highest[r]);
    }
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
      for (int o = 16; o > 0; o /= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], o);
      if (lane_ == 0) s.warp_sums[warp_][r] = sum[r];
    }
    __syncthreads();
    if (tid_ >= kQueries * kRanks) return;
    const int r = tid_ % kQueries;
    float2 mine = make_float2(s.warp_highest[0][r], 0.0f);
    for (int w = 0; w < kWarps; ++w) {
      mine.x = fmaxf(mine.x, s.warp_highest[w][r]);
      mine.y += s.warp_sums[w][r];
    }
    const int to = tid_ / kQueries;
    send(address_in(&s.sums[turn][rank_][r], to), mine, address_in(&s.of_sums[turn], to));
  }

  /// Adds what each query makes of each node: K / (queries of the stretch) exp(z) / sum_j N_j exp(z_j), or
  /// the square of K exp(z) / sum_j N_j exp(z_j) over their number; after the last ones the root of the sum.
  __device__ void add_weights(int row, int rows) {
    Shared& s = shared();
    if (warp_ < kQueries) {
      const float2 one =
          lane_ < kRanks ? s.sums[row / kQueries % 2][lane_][warp_] : make_float2(-kLargestLogit, 0.0f);
      float highest = one.x;
      for (int o = 16; o > 0; o /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
      float total = one.y * exp2f(one.x - highest);
      for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(~0u, total, o);
      if (lane_ == 0) {
        const double share = 1.0 / rows, weight = static_cast<double>(step_.end - step_.begin) *
                                                  (p_.task.squares ? sqrt(share) : share);
        s.highest[warp_] = highest;
        s.factor[warp_] = s.bad[warp_] || !(total > 0.0f) ? 0.0f : static_cast<float>(weight / total);
      }
    }
    __syncthreads();
    const float* const z = at<float>(plan_.scores);
    float* const weights = at<float>(plan_.weights);
    for (int node = tid_; node < nodes_; node += kThreads) {
      float sum = row > 0 ? weights[node] : 0.0f;
#pragma unroll
      for (int r = 0; r < kQueries; ++r) {
        const float one = s.factor[r] * exp2f(z[r * plan_.stride + node] - s.highest[r]);
        sum += p_.task.squares ? one * one : one;
      }
      weights[node] = p_.task.squares && row + kQueries >= rows ? sqrtf(sum) : sum;
    }
    __syncthreads();
  }

  /// The nodes above the threshold, closed up, in the place of the scores: where each one's keys begin, and
  /// its place among the keys that this block keeps. Returns how many nodes and keys.
  __device__ int2 keep() {
    Shared& s = shared();
    const int run = (nodes_ + kThreads - 1) / kThreads, begin = min(nodes_, tid_ * run),
              end = min(nodes_, begin + run);
    const float* const weights = at<float>(plan_.weights);
    const auto kept = [&](int node) {
      return step_.threshold == 0.0 || static_cast<double>(weights[node]) > step_.threshold;
    };
    int2 mine = {};
    for (int node = begin; node < end; ++node)
      if (kept(node)) ++mine.x, mine.y += keys_of(node);
    int2 up_to = mine;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const int x = __shfl_up_sync(~0u, up_to.x, o), y = __shfl_up_sync(~0u, up_to.y, o);
      if (lane_ >= o) up_to.x += x, up_to.y += y;
    }
    if (lane_ == 31) s.warp_kept[warp_] = up_to;
    __syncthreads();
    int2 before = make_int2(up_to.x - mine.x, up_to.y - mine.y), all = {};
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp_) before.x += s.warp_kept[w].x, before.y += s.warp_kept[w].y;
      all.x += s.warp_kept[w].x, all.y += s.warp_kept[w].y;
    }
    int2* const list = at<int2>(plan_.scores);
    for (int node = begin; node < end; ++node) {
      if (!kept(node)) continue;
      list[before.x++] = make_int2(at<int>(plan_.starts)[node], before.y);
      before.y += keys_of(node);
    }
    return all;
  }

  /// The keys of this block's kept nodes to the lists of all tokens of the stretch, behind those of the
  /// blocks before it; the last block adds the keys that are in no cluster.
  __device__ void write_lists(int kept, int keys) const {
    constexpr int kAtOnce = 4;
    int before = 0, all = 0;
    for (int r = 0; r < kRanks; ++r) {
      if (r < rank_) before += shared().kept_keys[r];
      all += shared().kept_keys[r];
    }
    const int2* const list = at<int2>(plan_.scores);
    const std::int32_t* const from = p_.task.tables.rows + kv_head_ * p_.task.tables.most_keys;
    int steps = 0;
    while (1 << steps < kept) ++steps;
    for (int first = tid_; first < keys; first += kAtOnce * kThreads) {
      int low[kAtOnce] = {}, row[kAtOnce];
      for (int step = steps - 1; step >= 0; --step) {  // the last node that begins at or before the key
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const int next = low[u] + (1 << step);
          if (next < kept && list[next].y <= first + u * kThreads) low[u] = next;
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int i = first + u * kThreads;
        if (i < keys) row[u] = __ldg(from + list[low[u]].x + i - list[low[u]].y);
      }
      for (int token = 0; token < listed(); ++token) {
        std::int32_t* const to = rows_of(token) + before;
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u)
          if (first + u * kThreads < keys) to[first + u * kThreads] = row[u];
      }
    }
    if (rank_ == kRanks - 1) add_others(all);
  }
  __device__ int listed() const {
    return min(tokens_, p_.task.listed);
  }
  __device__ std::int64_t list_of(int token) const {
    return std::int64_t{first_token_ + token} * p_.queries.layout.kv_heads + kv_head_;
  }
  __device__ std::int32_t* rows_of(int token) const {
    return p_.task.rows + list_of(token) * p_.task.capacity;
  }

  /// Keys [end, window): not in clusters yet, or behind the context.
  __device__ void add_others(int count) const {
    for (int token = 0; token < listed(); ++token) {
      const std::int64_t window = p_.queries.tokens[first_token_ + token].position + 1 - p_.task.window;
      const int others = static_cast<int>(max(std::int64_t{0}, window - step_.end));
      std::int32_t* const to = rows_of(token) + count;
      for (int i = tid_; i < others; i += kThreads) to[i] = step_.end + i;
      if (tid_ == 0) p_.task.counts[list_of(token)] = count + others;
    }
  }

  const Params& p_;
  const Plan plan_;
  char* const memory_;
  const int rank_, kv_head_, first_token_, tokens_, tid_, lane_, warp_;
  ClusterStep step_;
  const uint4* centroids_ = nullptr;  ///< of this block's first tile
  int tiles_ = 0, nodes_ = 0;         ///< of this block
  uint4 held_[kHeld][2 * kPieces];
};

template <int kPieces, int kRanks>
__global__ void __launch_bounds__(kThreads, kPieces <= 4 ? 2 : 1)
    choose_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  Chooser<kPieces, kRanks>(p, memory).run();
#endif
}

__global__ void spread_kernel(SpreadTask task, const QueryToken* first, const QueryToken* tokens) {
  const int head = static_cast<int>(blockIdx.y), heads = static_cast<int>(gridDim.y),
            token = static_cast<int>(blockIdx.z);
  const std::int32_t count = task.counts[head];
  const std::int64_t from = max(task.sink, first->position + 1 - task.window),
                     to = max(from, tokens[token].position + 1 - task.window);
  const std::int32_t* const rows = task.rows + head * task.capacity;
  const std::int64_t list = std::int64_t{token} * heads + head, all = count + to - from;
  std::int32_t* const out = task.rows_out + list * task.capacity;
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < all; i += threads)
    out[i] = i < count ? rows[i] : static_cast<std::int32_t>(from + i - count);
  if (blockIdx.x == 0 && threadIdx.x == 0) task.counts_out[list] = static_cast<std::int32_t>(all);
}

template <int kPieces, int kRanks>
void launch(const Params& p, StreamHandle stream) {
  const int shared = Plan(p.task.tables.most_nodes, kPieces, kRanks).total;
  const auto kernel = choose_kernel<kPieces, kRanks>;
  prepare_clusters(kernel, shared);
  const int stretches = (p.queries.count + p.task.stretch - 1) / p.task.stretch;
  const dim3 grid(kRanks, static_cast<unsigned>(p.queries.layout.kv_heads), static_cast<unsigned>(stretches));
  EarlyLaunch(grid, kThreads, shared, kRanks, stream)(kernel, p);
}

template <int kPieces>
void launch_for_kv_heads(const Params& p, StreamHandle stream) {
  switch (ranks_of(p.queries.layout.kv_heads, p.task.tables.most_nodes)) {
    case 16:
      return launch<kPieces, 16>(p, stream);
    case 8:
      return launch<kPieces, 8>(p, stream);
    default:
      return launch<kPieces, 4>(p, stream);
  }
}

}  // namespace

std::int64_t centroid_bytes(std::int64_t nodes, int head_dim) {
  return (nodes + kTile - 1) / kTile * pieces_compiled(head_dim) * kPieceBytes;
}

void pack_centroids(std::span<const std::uint16_t> halves, int head_dim, std::int64_t first_node,
                    std::byte* to) {
  const int pieces = pieces_compiled(head_dim);
  const std::int64_t nodes = std::ssize(halves) / head_dim;
  for (std::int64_t i = 0; i < nodes; ++i) {
    const std::int64_t node = first_node + i;
    std::byte* const tile = to + node / kTile * pieces * kPieceBytes;
    for (int c = 0; c < head_dim; c += 8) {
      const std::int64_t place =
          ((c / kDepth * 2 + node % kTile / 8) * 32 + node % 8 * 4 + c % kDepth / 8) * std::int64_t{16};
      std::memcpy(tile + place, halves.data() + i * head_dim + c,
                  static_cast<std::size_t>(std::min(8, head_dim - c)) * 2);
    }
  }
}

bool fits_cluster_choice(std::int64_t most_nodes, int head_dim, int kv_heads) {
  if (pieces_of(head_dim) > kMostPieces) return false;
  int device = 0, most = 0;
  LODE_CUDA(cudaGetDevice(&device));
  LODE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return room_for(most_nodes, ranks_of(kv_heads, most_nodes)) <= most;
}

void spread_list(const SpreadTask& task, const Queries& step, const Queries& queries, StreamHandle stream) {
  if (queries.count == 0) return;
  constexpr unsigned kBlocks = 16;  // of a list
  const dim3 grid(kBlocks, static_cast<unsigned>(queries.layout.kv_heads),
                  static_cast<unsigned>(queries.count));
  spread_kernel<<<grid, kThreads, 0, stream>>>(task, step.tokens, queries.tokens);
  LODE_LAUNCHED();
}

void choose_clusters(const ClusterChoiceTask& task, const Queries& queries, StreamHandle stream) {
  if (queries.count == 0) return;
  const Params p = {.task = task, .queries = queries, .group = queries.query_heads / queries.layout.kv_heads};
  switch (pieces_compiled(queries.layout.head_dim)) {
    case 2:
      return launch_for_kv_heads<2>(p, stream);
    case 3:
      return launch_for_kv_heads<3>(p, stream);
    case 4:
      return launch_for_kv_heads<4>(p, stream);
    default:
      return launch_for_kv_heads<kMostPieces>(p, stream);
  }
}

}  // namespace lode::cuda
