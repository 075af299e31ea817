// SPDX-License-Identifier: Apache-2.0
// What the choice of clusters does alike for one level (clusters.cu) and for several (cluster_levels.cu):
// queries come to shared memory four at a time, the blocks of a cluster exchange the sums of the softmax,
// scores become weights, kept nodes are counted, and their keys go to the lists of a stretch of query tokens.
#pragma once

#include <cstdint>

#include "kernels/cuda/device/cta_cluster_mailbox.cuh"
#include "kernels/cuda/device/load.cuh"
#include "kernels/cuda/squeezed/cluster_tiles.cuh"

namespace lode::cuda {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kTile = kTileNodes;
constexpr int kQueries = 4;             // of one pass
constexpr float kLargestLogit = 1e30f;  // infinities would leave no weight to compare
constexpr int kMostRanks = 16, kMostPieces = 8;

/// One block of a cluster that chooses for a KV head and a stretch of query tokens.
class ClusterPasses {
 protected:
  /// Where a block's shared memory has what all passes need; the packed queries come first.
  struct Places {
    int stride =
        0;  ///< floats from one query's scores to the next's, so that a tile is free of bank conflicts
    int scores = 0, weights = 0;  ///< bytes
  };
  struct Shared {
    QueryUnits units[kQueries];
    int bad[kQueries];  ///< a query that has no say
    float2 warp_sums[kWarps][kQueries];
    float2 sums[2][kMostRanks][kQueries];  ///< of each block: highest logit, sum of exponentials
    float highest[kQueries], factor[kQueries];
    int2 warp_kept[kWarps];     ///< nodes, and keys or children
    Inbox of_sums[2], of_keys;  ///< sums of passes by turns; what each block keeps
  };

  __device__ ClusterPasses(const ClusterChoiceTask& choice, const Queries& queries, int group,
                           const Places& places, int ranks, char* memory)
      : choice_(choice),
        queries_(queries),
        group_(group),
        places_(places),
        memory_(memory),
        ranks_(ranks),
        rank_(static_cast<int>(blockIdx.x)),
        kv_head_(static_cast<int>(blockIdx.y)),
        first_token_(static_cast<int>(blockIdx.z) * choice.stretch),
        tokens_(min(choice.stretch, queries.count - first_token_)),
        tid_(static_cast<int>(threadIdx.x)),
        lane_(tid_ % 32),
        warp_(tid_ / 32) {}

  __device__ static Shared& shared() {
    __shared__ Shared shared;
    return shared;
  }
  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  __device__ int query_rows() const { return tokens_ * group_; }
  /// To the second-level cache.
  __device__ static void ask_for(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

  // Messages between the blocks ----------------------------------------------------------------------------

  __device__ unsigned sum_bytes() const { return static_cast<unsigned>(ranks_) * kQueries * 8; }
  __device__ static void open_inboxes() {
    Shared& s = shared();
    open_inbox(&s.of_sums[0]), open_inbox(&s.of_sums[1]), open_inbox(&s.of_keys);
    publish_inboxes();
  }
  /// `bytes` that each block says of what it keeps.
  __device__ void expect_messages(unsigned bytes) const {
    Shared& s = shared();
    expect(&s.of_sums[0], sum_bytes()), expect(&s.of_sums[1], sum_bytes());
    expect(&s.of_keys, static_cast<unsigned>(ranks_) * bytes);
  }

  // Scores -------------------------------------------------------------------------------------------------

  /// What all keys count in one query, once the step is known.
  __device__ void take_weight() {
    const float share = static_cast<float>(step_.end - step_.begin), rows = static_cast<float>(query_rows());
    weight_ = share / (choice_.squares ? sqrtf(rows) : rows);
    asm volatile("" : "+f"(weight_));  // as in expect_queries
  }

  /// Where the query of this warp lies that is the stretch's `row` + the warp's number.
  __device__ const float* query_at(int row) const {
    const int own = row + warp_, token = first_token_ + own / group_;
    return queries_.q + (std::int64_t{token} * queries_.query_heads + kv_head_ * group_ + own % group_) *
                            queries_.layout.head_dim;
  }
  /// What is known of the first queries before they are there, worked out where this is called: once a kernel
  /// waits no longer every instruction counts.
  __device__ void expect_queries() {
    first_query_ = query_at(0);
    scale_ = kLog2e * choice_.tables.scales[kv_head_];
    asm volatile("" : "+l"(first_query_), "+f"(scale_));
  }
  /// A warp for each of up to four queries from `row` on.
  template <class Own, int kPieces>
  __device__ void take_queries(int row, int rows) const {
    const int d = queries_.layout.head_dim, planes = (d + 1) / 2;
    if (warp_ < kQueries) {
      const float* const q = (row == 0 ? first_query_ : query_at(row)) + lane_;
      const bool wanted = row + warp_ < rows;
      float x[kPieces], partner[kPieces];
      unsigned most = 0;  // NaN counts as more than infinity
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int c = i * kPieceDims + lane_;
        x[i] = load_one_here(q + i * kPieceDims, wanted && c < d);
        partner[i] = Own::kHasSpreads && 2 * i < kPieces
                         ? load_one_here(q + planes + i * kPieceDims, wanted && c < planes && c + planes < d)
                         : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) most = max(most, __float_as_uint(fabsf(x[i])));
      const float peak = __uint_as_float(__reduce_max_sync(~0u, most));
      const bool bad = !(peak < INFINITY);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) x[i] = bad ? 0.0f : x[i], partner[i] = bad ? 0.0f : partner[i];
      const float by = Own::put(memory_, warp_, lane_, x, partner, bad ? 0.0f : peak);
      if (lane_ == 0) {
        const float unit = by > 0.0f ? queries_.scale / by : 0.0f;
        shared().bad[warp_] = bad || !wanted;
        shared().units[warp_] = {.logit = unit * scale_,
                                 .deviation = step_.spreads != 0 ? unit * Own::kRootOfSquares : 0.0f};
      }
    }
    __syncthreads();
  }

  __device__ float bounded(float z, int node) const {
    return node < nodes_ ? fminf(fmaxf(z, -kLargestLogit), kLargestLogit) : -kLargestLogit;
  }
  /// Of two highest logits with their sums; the order does not matter.
  __device__ static float2 together(float2 a, float2 b) {
    const float highest = fmaxf(a.x, b.x);
    return make_float2(highest, a.y * exp2_fast(a.x - highest) + b.y * exp2_fast(b.x - highest));
  }
  /// Adds two nodes' logits and numbers of keys.
  __device__ static void add_to(float2& sum, float2 z, float2 keys) {
    const float highest = fmaxf(sum.x, fmaxf(z.x, z.y));
    sum.y = sum.y * exp2_fast(sum.x - highest) + keys.x * exp2_fast(z.x - highest) +
            keys.y * exp2_fast(z.y - highest);
    sum.x = highest;
  }
  /// The sums of lanes of query lane % 4 become the warp's.
  __device__ void post_sum(float2 sum) const {
    for (int o = 4; o < 32; o *= 2)
      sum = together(sum, make_float2(__shfl_xor_sync(~0u, sum.x, o), __shfl_xor_sync(~0u, sum.y, o)));
    if (lane_ < 4) shared().warp_sums[warp_][lane_] = sum;
    __syncwarp();
    __syncthreads();
  }

  /// Pass by pass, the sums of all blocks: what makes weights of this block's scores.
  __device__ void exchange_sums(int pass) const {
    const int turn = pass % 2;
    share_sums(turn);
    if (pass > 1 && tid_ == 0) expect(&shared().of_sums[turn], sum_bytes());
    wait_for(&shared().of_sums[turn], static_cast<unsigned>(pass / 2 % 2));
    take_sums(turn);
  }

  /// What four queries make of a node: the sum of K / (queries of the stretch) exp(z) / sum_j N_j exp(z_j),
  /// or of the squares of K exp(z) / sum_j N_j exp(z_j) over their number; added to what others made of it.
  __device__ float weight_of(int node, bool others) const {
    const Shared& s = shared();
    const float* const z = at<float>(places_.scores) + node;
    float sum = others ? at<float>(places_.weights)[node] : 0.0f;
#pragma unroll
    for (int r = 0; r < kQueries; ++r) {
      const float one = s.factor[r] * exp2_fast(z[r * places_.stride] - s.highest[r]);
      sum += choice_.squares ? one * one : one;
    }
    return sum;
  }
  __device__ void add_weights(bool others) const {
    for (int node = tid_; node < nodes_; node += kThreads)
      at<float>(places_.weights)[node] = weight_of(node, others);
    __syncthreads();
  }

  // What is kept -------------------------------------------------------------------------------------------

  /// Of what a thread keeps, the sums over the threads before it, and over all.
  __device__ int2 sum_before(int2 mine, int2& all) const {
    Shared& s = shared();
    int2 up_to = mine;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const int x = __shfl_up_sync(~0u, up_to.x, o), y = __shfl_up_sync(~0u, up_to.y, o);
      if (lane_ >= o) up_to.x += x, up_to.y += y;
    }
    if (lane_ == 31) s.warp_kept[warp_] = up_to;
    __syncthreads();
    int2 before = make_int2(up_to.x - mine.x, up_to.y - mine.y);
    all = {};
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp_) before.x += s.warp_kept[w].x, before.y += s.warp_kept[w].y;
      all.x += s.warp_kept[w].x, all.y += s.warp_kept[w].y;
    }
    return before;
  }

  __device__ const std::int32_t* keys_of_head() const {
    return choice_.tables.rows + kv_head_ * choice_.tables.most_keys;
  }
  __device__ int listed() const {
    return min(tokens_, choice_.listed);
  }
  __device__ std::int64_t list_of(int token) const {
    return std::int64_t{first_token_ + token} * queries_.layout.kv_heads + kv_head_;
  }
  __device__ std::int32_t* list_rows(int token) const {
    return choice_.rows + list_of(token) * choice_.capacity;
  }
  /// Keys first, first + kThreads, ... of `keys` to all lists, behind what is before them.
  template <int kAtOnce>
  __device__ void write_rows(const int (&row)[kAtOnce], int before, int first, int keys) const {
    for (int token = 0; token < listed(); ++token) {
      std::int32_t* const to = list_rows(token) + before;
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
        if (first + u * kThreads < keys) to[first + u * kThreads] = row[u];
    }
  }
  /// Keys [end, window) behind `count` others: not in clusters yet, or behind the context. `note` is called
  /// for each list.
  template <class Note>
  __device__ void add_others(int count, const Note& note) const {
    for (int token = 0; token < listed(); ++token) {
      const std::int64_t window = queries_.tokens[first_token_ + token].position + 1 - choice_.window;
      const int others = static_cast<int>(max(std::int64_t{0}, window - step_.end));
      std::int32_t* const to = list_rows(token) + count;
      for (int i = tid_; i < others; i += kThreads) to[i] = step_.end + i;
      if (tid_ > 0) continue;
      choice_.counts[list_of(token)] = count + others;
      note(list_of(token));
    }
  }

  const ClusterChoiceTask& choice_;
  const Queries& queries_;
  const int group_;
  const Places places_;
  char* const memory_;
  const int ranks_, rank_, kv_head_, first_token_, tokens_, tid_, lane_, warp_;
  ClusterStep step_;
  float weight_ = 0.0f;                 ///< what all keys count in one query
  float scale_ = 0.0f;                  ///< from a product to a logit to the base 2, beside a query's own
  const float* first_query_ = nullptr;  ///< of this warp
  int nodes_ = 0;                       ///< that this block compares

 private:
  /// This block's highest logit and sum of exponentials of each query, to all blocks.
  __device__ void share_sums(int turn) const {
    Shared& s = shared();
    if (tid_ >= kQueries * ranks_) return;
    const int r = tid_ % kQueries, to = tid_ / kQueries;
    float2 of_warps[kWarps], mine = make_float2(-kLargestLogit, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) of_warps[w] = s.warp_sums[w][r], mine.x = fmaxf(mine.x, of_warps[w].x);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) mine.y += of_warps[w].y * exp2_fast(of_warps[w].x - mine.x);
    send(address_in(&s.sums[turn][rank_][r], to), mine, address_in(&s.of_sums[turn], to));
  }

  /// From all blocks' sums what makes weights of scores.
  __device__ void take_sums(int turn) const {
    Shared& s = shared();
    if (warp_ < kQueries) {
      const float2 one = lane_ < ranks_ ? s.sums[turn][lane_][warp_] : make_float2(-kLargestLogit, 0.0f);
      float highest = one.x;
      for (int o = kMostRanks / 2; o > 0; o /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
      float total = one.y * exp2_fast(one.x - highest);
      for (int o = kMostRanks / 2; o > 0; o /= 2) total += __shfl_xor_sync(~0u, total, o);
      if (lane_ == 0) {
        s.highest[warp_] = highest;
        s.factor[warp_] = s.bad[warp_] || !(total > 0.0f) ? 0.0f : weight_ / total;
      }
    }
    __syncthreads();
  }
};

}  // namespace lode::cuda
