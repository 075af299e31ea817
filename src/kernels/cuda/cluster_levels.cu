// SPDX-License-Identifier: Apache-2.0
// Work map: a cluster of blocks for each (KV head, stretch of query tokens), as for one level (clusters.cu).
// Block r owns the coarsest nodes r, r + ranks, ... and all that is below them, so that neighbours, which
// questions keep together, are spread over the blocks, and no block tells another what it keeps. Level by
// level it scores its nodes, four queries a pass, exchanges the sums of the softmax, and makes the next
// level's list of the children of what it keeps. Nodes are rows of whole sectors, read one by one, sixteen to
// a product; rows of few children are asked for as soon as their parent is kept.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/cluster_levels.h"
#include "kernels/cuda/cluster_link.cuh"
#include "kernels/cuda/cluster_tiles.cuh"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTile = kTileNodes;
constexpr int kQueries = 4;        // of one pass
constexpr int kHeld = 2;           // tiles that a warp has on the way at once
constexpr int kFewEntries = 1024;  // more keep memory busy without being asked for early
constexpr int kMostRanks = 16, kMostPieces = 8;
constexpr float kLargestLogit = 1e30f;  // infinities would leave no weight to compare

/// Compiled for these.
int pieces_compiled(int head_dim) {
  const int pieces = (head_dim + kPieceDims - 1) / kPieceDims;
  return pieces <= 2 ? 2 : pieces <= 4 ? 4 : kMostPieces;
}

/// Bytes of a node's row.
__host__ __device__ constexpr int row_bytes_of(int pieces, CentroidKind kind) {
  return kind == CentroidKind::f16  ? pieces * 64
         : kind == CentroidKind::q8 ? pieces * 32
                                    : (pieces + TileLayout::of_spreads(pieces)) * 32;
}

/// A block's shared memory, in bytes from its start.
struct Plan {
  int stride = 0;  // floats from one query's scores to the next's, so that a tile is free of bank conflicts
  int ids = 0, nodes = 0, scores = 0, weights = 0, total = 0;

  __host__ __device__ Plan(int most_entries, int query_bytes) {
    const int entries = (most_entries + kTile - 1) / kTile * kTile;
    stride = (entries + 31) / 32 * 32 + 8;
    nodes = query_bytes;
    scores = nodes + entries * 8;
    weights = scores + kQueries * stride * 4;
    ids = weights + entries * 4;
    total = ids + entries * 4;
  }
};

struct Params {
  ClusterLevelsTask task;
  Queries queries;
  int group = 0;
};

template <int kPieces, CentroidKind kKind>
class Chooser {
 public:
  using Own = Tiles<kPieces, kKind>;
  static constexpr int kRowBytes = row_bytes_of(kPieces, kKind);

  __device__ Chooser(const Params& params, char* memory)
      : p_(params),
        plan_(params.task.most_entries, Own::kQueryBytes),
        memory_(memory),
        ranks_(static_cast<int>(gridDim.x)),
        rank_(static_cast<int>(blockIdx.x)),
        kv_head_(static_cast<int>(blockIdx.y)),
        first_token_(static_cast<int>(blockIdx.z) * params.task.choice.stretch),
        tokens_(min(params.task.choice.stretch, params.queries.count - first_token_)),
        tid_(static_cast<int>(threadIdx.x)),
        lane_(tid_ % 32),
        warp_(tid_ / 32) {}

  __device__ void run() {
    if (tid_ == 0) open_inboxes();
    __syncwarp();  // for racecheck, to which a barrier's opening is the warp's
    if (tid_ == 0) expect_messages();
    __syncwarp();
    take_top();
    fetch_first();
    __syncwarp();
    arrive_in_cluster();  // others write here after that
    wait_for_predecessor();
    release_successor();
    wait_for_cluster();
    int2 mine = {};  // nodes that are kept, and what is directly below them
    for (;; ++level_) {
      compared_ += entries_;
      mine = keep(score_level());
      if (level_ + 1 == p_.task.levels) break;
      descend(mine);
    }
    if (tid_ < ranks_)
      send(address_in(shared().found + rank_, tid_),
           make_float2(__int_as_float(mine.y), __int_as_float(compared_)),
           address_in(&shared().of_keys, tid_));
    __syncthreads();  // the list, which all threads have written and will read
    wait_for(&shared().of_keys);
    write_lists(mine);
  }

 private:
  struct Shared {
    QueryUnits units[kQueries];
    int bad[kQueries];  ///< a query that has no say
    float2 warp_sums[kWarps][kQueries];
    float2 sums[2][kMostRanks][kQueries];  ///< of each block: highest logit, sum of exponentials
    float highest[kQueries], factor[kQueries];
    int2 warp_kept[kWarps];     ///< nodes, children
    int2 found[kMostRanks];     ///< of each block: keys that it keeps, nodes that it has compared
    Inbox of_sums[2], of_keys;  ///< sums of passes by turns
  };
  __device__ static Shared& shared() {
    __shared__ Shared shared;
    return shared;
  }
  __device__ static void open_inboxes() {
    Shared& s = shared();
    open_inbox(&s.of_sums[0]), open_inbox(&s.of_sums[1]), open_inbox(&s.of_keys);
    publish_inboxes();
  }
  __device__ unsigned sum_bytes() const { return static_cast<unsigned>(ranks_) * kQueries * 8; }
  __device__ void expect_messages() const {
    Shared& s = shared();
    expect(&s.of_sums[0], sum_bytes()), expect(&s.of_sums[1], sum_bytes());
    expect(&s.of_keys, static_cast<unsigned>(ranks_) * 8);
  }
  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  __device__ const ClusterChoiceTask& choice() const { return p_.task.choice; }
  __device__ const ClusterLevelTable& table() const { return p_.task.level[level_]; }
  __device__ const char* rows() const {
    return reinterpret_cast<const char*>(table().rows) +
           std::int64_t{kv_head_} * table().most_nodes * kRowBytes;
  }
  __device__ const ClusterNode* nodes() const {
    return table().nodes + std::int64_t{kv_head_} * (table().most_nodes + 1);
  }

  __device__ void take_top() {
    step_ = *choice().step;
    const ClusterTables& tables = choice().tables;
    const int all = tables.nodes[kv_head_ * (tables.most_parts + 1) + step_.parts];
    entries_ = max(0, (all - rank_ + ranks_ - 1) / ranks_);
  }
  __device__ int id_of(int entry) const {
    return level_ == 0 ? rank_ + entry * ranks_ : at<int>(plan_.ids)[entry];
  }

  // What is on the way ------------------------------------------------------------------------------------

  struct Coming {
    typename Own::Held held;
    ClusterNode node[2];  ///< lane / 4 and lane / 4 + 8
    int end[2];           ///< of their children
  };

  __device__ void fetch(int slot, int tile) {
    Coming& to = coming_[slot];
    if (tile * kTile >= entries_) return;
    const int entry = tile * kTile + lane_ / 4;
    const char* row[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = entry + 8 * half < entries_;
      // Behind the last entry it is read again, and not used.
      const int id = id_of(min(entry + 8 * half, entries_ - 1));
      row[half] = rows() + std::int64_t{id} * kRowBytes;
      const int4 raw = __ldg(reinterpret_cast<const int4*>(nodes() + id));
      to.node[half] = {__int_as_float(raw.x), __int_as_float(raw.y), there ? raw.z : 0, raw.w};
      to.end[half] = __ldg(&nodes()[id + 1].first);
    }
    fetch_rows(row, to.held);
  }
  __device__ void fetch_rows(const char* const (&row)[2], typename Own::Held& to) const {
    const int t = lane_ % 4;
    const auto load = [&](int half, int quad) {
      return __ldg(reinterpret_cast<const uint4*>(row[half]) + quad * 4 + t);
    };
    if constexpr (kKind == CentroidKind::f16) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) to.rows[2 * i] = load(0, i), to.rows[2 * i + 1] = load(1, i);
    } else {
      constexpr int kAll = Own::kLayout.fours;  // pieces
#pragma unroll
      for (int i = 0; i + 1 < kAll; i += 2) {
        const uint4 low = load(0, i / 2), high = load(1, i / 2);
        to.rows[i] = make_uint4(low.x, low.y, high.x, high.y);
        to.rows[i + 1] = make_uint4(low.z, low.w, high.z, high.w);
      }
      if constexpr (kAll % 2 == 1) {
        const auto one = [&](int half) {
          return __ldg(reinterpret_cast<const uint2*>(row[half] + (kAll - 1) * kPieceDims) + t);
        };
        const uint2 low = one(0), high = one(1);
        to.rows[kAll - 1] = make_uint4(low.x, low.y, high.x, high.y);
      }
    }
  }
  __device__ void fetch_first() {
#pragma unroll
    for (int slot = 0; slot < kHeld; ++slot) fetch(slot, warp_ + slot * kWarps);
  }

  // Scores ------------------------------------------------------------------------------------------------

  /// Scores of the level's nodes for all queries; whether all but the last pass are among the weights.
  __device__ bool score_level() {
    const int rows = tokens_ * p_.group;
    const float share = static_cast<float>(step_.end - step_.begin);
    weight_ = share / (choice().squares ? sqrtf(static_cast<float>(rows)) : static_cast<float>(rows));
    for (int row = 0;; row += kQueries, ++pass_) {
      if (row > 0 || level_ > 0) fetch_first();
      if (level_ == 0 || rows > kQueries) take_queries(row, rows);
      score();
      const int turn = pass_ % 2;
      share_sums(turn);
      if (pass_ > 1 && tid_ == 0) expect(&shared().of_sums[turn], sum_bytes());
      wait_for(&shared().of_sums[turn], static_cast<unsigned>(pass_ / 2 % 2));
      take_sums(turn);
      if (row + kQueries >= rows) break;
      add_weights(row > 0);
    }
    ++pass_;
    return rows > kQueries;
  }

  /// A warp for each of up to four queries from `row` on.
  __device__ void take_queries(int row, int rows) {
    const int d = p_.queries.layout.head_dim, planes = (d + 1) / 2;
    if (warp_ < kQueries) {
      const int own = row + warp_, token = first_token_ + own / p_.group;
      const float* const q =
          p_.queries.q +
          (std::int64_t{token} * p_.queries.query_heads + kv_head_ * p_.group + own % p_.group) * d;
      float x[kPieces], partner[kPieces];
      unsigned most = 0;  // NaN counts as more than infinity
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int c = i * kPieceDims + lane_;
        x[i] = own < rows && c < d ? q[c] : 0.0f;
        partner[i] = Own::kHasSpreads && own < rows && c < planes && c + planes < d ? q[c + planes] : 0.0f;
        most = max(most, __float_as_uint(fabsf(x[i])));
      }
      const float peak = __uint_as_float(__reduce_max_sync(~0u, most));
      const bool bad = !(peak < INFINITY);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) x[i] = bad ? 0.0f : x[i], partner[i] = bad ? 0.0f : partner[i];
      const float by = Own::put(memory_, warp_, lane_, x, partner, bad ? 0.0f : peak);
      if (lane_ == 0) {
        const float unit = by > 0.0f ? p_.queries.scale / by : 0.0f;
        shared().bad[warp_] = bad || own >= rows;
        shared().units[warp_] = {.logit = unit * kLog2e * choice().tables.scales[kv_head_],
                                 .deviation = unit * Own::kRootOfSquares};
      }
    }
    __syncthreads();
  }

  /// Logits of this block's nodes; of each warp the highest and the sum of exponentials.
  __device__ void score() {
    const int g = lane_ / 4, t = lane_ % 4;
    const auto asked = Own::ask(memory_, lane_);
    const QueryUnits units = shared().units[t];
    float* const to = at<float>(plan_.scores) + t * plan_.stride;
    float2 sum = make_float2(-kLargestLogit, 0.0f);
    for (int from = warp_; from * kTile < entries_; from += kHeld * kWarps) {
#pragma unroll
      for (int slot = 0; slot < kHeld; ++slot) {
        const int tile = from + slot * kWarps, low = tile * kTile + g, high = low + 8;
        if (tile * kTile >= entries_) break;
        Coming& own = coming_[slot];
        if constexpr (Own::kLayout.scales > 0) own.held.scales[0] = {own.node[0].scale, own.node[1].scale};
        if constexpr (Own::kHasSpreads) own.held.scales[1] = {own.node[0].root, own.node[1].root};
        const float2 keys =
            make_float2(static_cast<float>(own.node[0].keys), static_cast<float>(own.node[1].keys));
        const float2 raw = Own::logits(own.held, asked, units, keys);
        if (t < 2)
          at<int2>(plan_.nodes)[low + 8 * t] =
              t == 0 ? make_int2(own.node[0].first, own.end[0]) : make_int2(own.node[1].first, own.end[1]);
        fetch(slot, tile + kHeld * kWarps);
        const float2 z = make_float2(bounded(raw.x, low), bounded(raw.y, high));
        to[low] = z.x, to[high] = z.y;
        const float highest = fmaxf(sum.x, fmaxf(z.x, z.y));
        sum.y = sum.y * exp2_fast(sum.x - highest) + keys.x * exp2_fast(z.x - highest) +
                keys.y * exp2_fast(z.y - highest);
        sum.x = highest;
      }
    }
    for (int o = 4; o < 32; o *= 2)
      sum = together(sum, make_float2(__shfl_xor_sync(~0u, sum.x, o), __shfl_xor_sync(~0u, sum.y, o)));
    if (g == 0) shared().warp_sums[warp_][t] = sum;
    __syncwarp();
    __syncthreads();
  }
  __device__ float bounded(float z, int entry) const {
    return entry < entries_ ? fminf(fmaxf(z, -kLargestLogit), kLargestLogit) : -kLargestLogit;
  }
  /// Of two highest logits with their sums; the order does not matter.
  __device__ static float2 together(float2 a, float2 b) {
    const float highest = fmaxf(a.x, b.x);
    return make_float2(highest, a.y * exp2_fast(a.x - highest) + b.y * exp2_fast(b.x - highest));
  }

  /// This block's highest logit and sum of exponentials of each query, to all blocks.
  __device__ void share_sums(int turn) const {
    Shared& s = shared();
    if (tid_ >= kQueries * ranks_) return;
    const int r = tid_ % kQueries, to = tid_ / kQueries;
    float2 mine = s.warp_sums[0][r];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) mine = together(mine, s.warp_sums[w][r]);
    send(address_in(&s.sums[turn][rank_][r], to), mine, address_in(&s.of_sums[turn], to));
  }

  /// From all blocks' sums what makes weights of scores.
  __device__ void take_sums(int turn) const {
    Shared& s = shared();
    if (warp_ < kQueries) {
      const float2 one = lane_ < ranks_ ? s.sums[turn][lane_][warp_] : make_float2(-kLargestLogit, 0.0f);
      float highest = one.x;
      for (int o = 16; o > 0; o /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
      float total = one.y * exp2_fast(one.x - highest);
      for (int o = 16; o > 0; o /= 2) total += __shfl_xor_sync(~0u, total, o);
      if (lane_ == 0) {
        s.highest[warp_] = highest;
        s.factor[warp_] = s.bad[warp_] || !(total > 0.0f) ? 0.0f : weight_ / total;
      }
    }
    __syncthreads();
  }

  /// What four queries make of a node: the sum of K / (queries of the stretch) exp(z) / sum_j N_j exp(z_j),
  /// or of the squares of K exp(z) / sum_j N_j exp(z_j) over their number; added to what others made of it.
  __device__ float weight_of(int entry, bool others) const {
    const Shared& s = shared();
    const float* const z = at<float>(plan_.scores) + entry;
    float sum = others ? at<float>(plan_.weights)[entry] : 0.0f;
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
      const float one = s.factor[r] * exp2_fast(z[r * plan_.stride] - s.highest[r]);
      sum += choice().squares ? one * one : one;
    }
    return sum;
  }
  __device__ void add_weights(bool others) const {
    for (int entry = tid_; entry < entries_; entry += kThreads)
      at<float>(plan_.weights)[entry] = weight_of(entry, others);
    __syncthreads();
  }

  // What is kept ------------------------------------------------------------------------------------------

  /// The nodes above the level's threshold, closed up, in the place of the scores: where each one's children
  /// (or keys) begin, and its place among those that this block keeps. Returns how many of both. A thread has
  /// neighbours, an odd number of them, so that reading is free of bank conflicts.
  __device__ int2 keep(bool others) const {
    Shared& s = shared();
    const double threshold = choice().step[level_].threshold;
    // Numbers that are above the one are above the other.
    const float least = __double2float_rd(choice().squares ? threshold * threshold : threshold);
    const int run = (entries_ + kThreads - 1) / kThreads | 1, begin = min(entries_, tid_ * run),
              end = min(entries_, begin + run);
    const int2* const node = at<int2>(plan_.nodes);
    unsigned kept = 0;  // a block has room for fewer than 32 nodes a thread
    int2 mine = {};
    for (int i = begin; i < end; ++i) {
      if (threshold == 0.0 || weight_of(i, others) > least)
        kept |= 1u << (i - begin), ++mine.x, mine.y += node[i].y - node[i].x;
    }
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
    const bool last = level_ + 1 == p_.task.levels;
    for (; kept != 0; kept &= kept - 1) {
      const int2 children = node[begin + __ffs(static_cast<int>(kept)) - 1];
      at<int2>(plan_.scores)[before.x++] = make_int2(children.x, before.y);
      before.y += children.y - children.x;
      if (last) ask_for(keys_of_head() + children.x), ask_for(keys_of_head() + children.y - 1);
    }
    return all;
  }
  /// To the second-level cache.
  __device__ static void ask_for(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
  }
  __device__ const std::int32_t* keys_of_head() const {
    return choice().tables.rows + kv_head_ * choice().tables.most_keys;
  }

  /// Children first, first + kThreads, ... of the kept nodes: kAtOnce of them, what is beyond the last is
  /// not asked for.
  template <int kAtOnce>
  __device__ void find(int2 kept, int first, int (&child)[kAtOnce]) const {
    const int2* const list = at<int2>(plan_.scores);
    int low[kAtOnce] = {}, steps = 0;
    while (1 << steps < kept.x) ++steps;
    for (int step = steps - 1; step >= 0; --step) {  // the last node that begins at or before the child
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int next = low[u] + (1 << step);
        if (next < kept.x && list[next].y <= first + u * kThreads) low[u] = next;
      }
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) child[u] = list[low[u]].x + first + u * kThreads - list[low[u]].y;
  }

  /// The children of what is kept become what is compared next.
  __device__ void descend(int2 kept) {
    constexpr int kAtOnce = 4;
    __syncthreads();  // the list
    const ClusterLevelTable& below = p_.task.level[level_ + 1];
    const char* const rows =
        reinterpret_cast<const char*>(below.rows) + std::int64_t{kv_head_} * below.most_nodes * kRowBytes;
    for (int first = tid_; first < kept.y; first += kAtOnce * kThreads) {
      int child[kAtOnce];
      find(kept, first, child);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (first + u * kThreads >= kept.y) continue;
        at<int>(plan_.ids)[first + u * kThreads] = child[u];
        if (kept.y > kFewEntries) continue;
        const char* const row = rows + std::int64_t{child[u]} * kRowBytes;
        ask_for(row);
        if (kRowBytes > 128) ask_for(row + 128);
      }
    }
    entries_ = kept.y;
    __syncthreads();
  }

  /// The keys of this block's kept nodes to the lists of all tokens of the stretch, behind those of the
  /// blocks before it; the last block adds the keys that are in no cluster.
  __device__ void write_lists(int2 kept) const {
    constexpr int kAtOnce = 8;
    int before = 0;
    int2 all = {};  // keys, nodes
    for (int r = 0; r < ranks_; ++r) {
      if (r < rank_) before += shared().found[r].x;
      all.x += shared().found[r].x, all.y += shared().found[r].y;
    }
    const std::int32_t* const from = keys_of_head();
    for (int first = tid_; first < kept.y; first += kAtOnce * kThreads) {
      int at[kAtOnce], row[kAtOnce];
      find(kept, first, at);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
        if (first + u * kThreads < kept.y) row[u] = __ldg(from + at[u]);
      for (int token = 0; token < listed(); ++token) {
        std::int32_t* const to = rows_of(token) + before;
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u)
          if (first + u * kThreads < kept.y) to[first + u * kThreads] = row[u];
      }
    }
    if (rank_ == ranks_ - 1) add_others(all);
  }
  __device__ int listed() const {
    return min(tokens_, choice().listed);
  }
  __device__ std::int64_t list_of(int token) const {
    return std::int64_t{first_token_ + token} * p_.queries.layout.kv_heads + kv_head_;
  }
  __device__ std::int32_t* rows_of(int token) const {
    return choice().rows + list_of(token) * choice().capacity;
  }
  /// Keys [end, window): not in clusters yet, or behind the context.
  __device__ void add_others(int2 all) const {
    for (int token = 0; token < listed(); ++token) {
      const std::int64_t window = p_.queries.tokens[first_token_ + token].position + 1 - choice().window;
      const int others = static_cast<int>(max(std::int64_t{0}, window - step_.end));
      std::int32_t* const to = rows_of(token) + all.x;
      for (int i = tid_; i < others; i += kThreads) to[i] = step_.end + i;
      if (tid_ > 0) continue;
      choice().counts[list_of(token)] = all.x + others;
      if (p_.task.compared != nullptr) p_.task.compared[list_of(token)] = all.y;
    }
  }

  const Params& p_;
  const Plan plan_;
  char* const memory_;
  const int ranks_, rank_, kv_head_, first_token_, tokens_, tid_, lane_, warp_;
  ClusterStep step_;
  float weight_ = 0.0f;          ///< what all keys count in one query
  int level_ = 0, entries_ = 0;  ///< nodes of the level that this block compares
  int pass_ = 0, compared_ = 0;
  Coming coming_[kHeld];
};

template <int kPieces, CentroidKind kKind>
__global__ void __launch_bounds__(kThreads, kPieces <= 4 ? 2 : 1)
    choose_levels_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  Chooser<kPieces, kKind>(p, memory).run();
#endif
}

template <int kPieces, CentroidKind kKind>
void launch(const Params& p, StreamHandle stream) {
  const int shared = Plan(p.task.most_entries, Tiles<kPieces, kKind>::kQueryBytes).total;
  const auto kernel = choose_levels_kernel<kPieces, kKind>;
  prepare_clusters(kernel, shared);
  const int stretch = p.task.choice.stretch, stretches = (p.queries.count + stretch - 1) / stretch;
  const dim3 grid(static_cast<unsigned>(p.task.ranks), static_cast<unsigned>(p.queries.layout.kv_heads),
                  static_cast<unsigned>(stretches));
  EarlyLaunch(grid, kThreads, shared, p.task.ranks, stream)(kernel, p);
}

template <int kPieces>
void launch_for_kind(const Params& p, StreamHandle stream) {
  switch (p.task.choice.tables.kind) {
    case CentroidKind::f16:
      return launch<kPieces, CentroidKind::f16>(p, stream);
    case CentroidKind::q8:
      return launch<kPieces, CentroidKind::q8>(p, stream);
    case CentroidKind::q8_spreads:
      return launch<kPieces, CentroidKind::q8_spreads>(p, stream);
  }
}

}  // namespace

std::int64_t cluster_row_bytes(int head_dim, CentroidKind kind) {
  return row_bytes_of(pieces_compiled(head_dim), kind);
}

void pack_cluster_rows(std::span<const std::uint16_t> halves, int head_dim, std::byte* to) {
  const std::int64_t row = cluster_row_bytes(head_dim, CentroidKind::f16);
  for (std::int64_t i = 0; i < std::ssize(halves) / head_dim; ++i)
    std::memcpy(to + i * row, halves.data() + i * head_dim, static_cast<std::size_t>(head_dim) * 2);
}

void pack_cluster_rows(const ByteCentroids& nodes, int head_dim, std::byte* to) {
  const int pieces = pieces_compiled(head_dim);
  const std::int64_t row =
      row_bytes_of(pieces, nodes.spreads.empty() ? CentroidKind::q8 : CentroidKind::q8_spreads);
  const std::int64_t count = std::ssize(nodes.scales);
  const auto put = [&](std::span<const std::byte> from, int width, int first_piece) {
    for (std::int64_t i = 0; i < count; ++i) {
      for (int c = 0; c < width; c += 8) {
        const int piece = first_piece + c / kPieceDims, t = c % kPieceDims / 8,
                  alone = piece + 1 == row / kPieceDims && piece % 2 == 0 ? 1 : 0;
        const int at = piece / 2 * 2 * kPieceDims + (alone != 0 ? t * 8 : t * 16 + piece % 2 * 8);
        std::memcpy(to + i * row + at, from.data() + i * width + c,
                    static_cast<std::size_t>(std::min(8, width - c)));
      }
    }
  };
  put(nodes.centroids, head_dim, 0);
  if (!nodes.spreads.empty()) put(nodes.spreads, (head_dim + 1) / 2, pieces);
}

std::span<const int> cluster_level_ranks(int kv_heads) {
  static constexpr int kAll[] = {4, 8, 16};
  return std::span(kAll).subspan(kv_heads <= 8 ? 2 : kv_heads <= 16 ? 1 : 0);
}

bool fits_cluster_levels(std::int64_t most_entries, int head_dim) {
  constexpr int kRoom = 200 << 10;
  return head_dim <= kMostPieces * kPieceDims && most_entries <= kRoom &&
         Plan(static_cast<int>(most_entries), kMostPieces * 512).total <= kRoom;
}

void choose_clusters_of_levels(const ClusterLevelsTask& task, const Queries& queries, StreamHandle stream) {
  if (queries.count == 0) return;
  const Params p = {.task = task, .queries = queries, .group = queries.query_heads / queries.layout.kv_heads};
  switch (pieces_compiled(queries.layout.head_dim)) {
    case 2:
      return launch_for_kind<2>(p, stream);
    case 4:
      return launch_for_kind<4>(p, stream);
    default:
      return launch_for_kind<kMostPieces>(p, stream);
  }
}

}  // namespace lode::cuda
