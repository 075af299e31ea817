// SPDX-License-Identifier: Apache-2.0
// Work map: a cluster of blocks for each (KV head, query token). Each block owns a share of the rows of both
// layers: it reads those weights, and what it needs of the tables, before it waits for the queries, which the
// launch before this one makes (their places must be older). Blocks exchange no more than each must know:
//
//   x (16-bit integers) -> W1 -> relu -> all blocks have h -> W2 -> each has the scores of its buckets
//   -> all have each other's softmax sums -> all have the keys by which buckets are ranked, and rank them
//   -> each copies its share of their rows; the last one adds the keys that are not in lists yet
//
// They wait for messages (cluster_link.cuh), never for one another.
//
// Products are of integers (mma.m16n8k32.s8), so sums are exact in any order: the two bytes of an input are
// two columns of the matrix, the two bytes of a weight two planes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/classifier_parts.cuh"
#include "kernels/cuda/cluster_link.cuh"

namespace lode::cuda {

namespace {

constexpr int kFewClusters = 8;         // up to so many times 16 blocks run at once, two on a processor
constexpr int kBytesOfTwo = 112 << 10;  // shared memory of one of the two

struct Params {
  BucketChoiceTask task;
  Queries queries;
  int group = 0, heads = 0;  ///< query heads of a KV head; inputs of the network: as many, or 1
};

template <int kPlanes, int kTiles, int kRanks>
class Chooser {
 public:
  __device__ Chooser(const Params& params, char* memory)
      : p_(params),
        plan_(params.task.net, params.heads, params.task.probes, kRanks),
        memory_(memory),
        rank_(static_cast<int>(blockIdx.x)),
        kv_head_(static_cast<int>(blockIdx.y)),
        query_(static_cast<int>(blockIdx.z)),
        tid_(static_cast<int>(threadIdx.x)),
        lane_(tid_ % 32),
        warp_(tid_ / 32) {}

  __device__ void run() {
    const NetLayout& net = p_.task.net;
    token_ = p_.queries.tokens[query_];
    int network = 0;  // of one there is no need to wait for the token
    if (p_.task.stretches.networks > 1) network = p_.task.stretches.network_for(token_.position);
    const std::byte* const mine =
        p_.task.nets + (std::int64_t{network} * p_.queries.layout.kv_heads + kv_head_) * net.bytes();
    const std::byte* const output = mine + net.output_offset();
    const int in = NetLayout::padded_columns(net.inputs),
              mid = NetLayout::padded_columns(net.columns_of_output());
    const int rows1 = NetLayout::padded_rows(net.hidden), rows2 = NetLayout::padded_rows(net.buckets);
    const bool deep = net.hidden > 0;
    // A hidden layer's share of one of sixteen blocks is small, and two blocks have the registers of one.
    constexpr int kMostHeld = 8 / kPlanes;
    Share<kPlanes, kRanks == 16 ? 2 : kMostHeld> first(mine, rows1, in, rank_, plan_.hidden_rows);
    Share<kPlanes, kMostHeld> second(output, rows2, mid, rank_, plan_.bucket_rows);
    if (tid_ == 0) open_inboxes(deep);
    __syncwarp();
    if (net.residual) factor_ = __ldg(reinterpret_cast<const float*>(mine + net.factor_offset()));
    if (deep) take_tails(mine + net.weight_bytes(net.hidden, net.inputs), rows1, plan_.hidden_rows, 0);
    take_tails(output + net.weight_bytes(net.buckets, net.columns_of_output()), rows2, plan_.bucket_rows,
               plan_.hidden_rows);
    take_tables();
    // Behind the few bytes above, which would wait for these many.
    if (deep) first.fetch(first.begin);
    second.fetch(second.begin);
    clear(kTiles * 8 * plan_.stride / 4, plan_.bytes8);
    clear_sums();
    __syncwarp();
    arrive_in_cluster();  // others write here after that
    wait_for_previous();
    let_next_begin();
    __syncthreads();
    take_queries(in);
    count_unlisted();
    if (deep) {
      first.template multiply_into<kTiles>(at<signed char>(plan_.bytes8), plan_.stride, plan_.hidden_rows,
                                           at<int>(plan_.sums));
      __syncthreads();
      finish_layer(0, plan_.hidden_rows, true);
    }
    wait_for_cluster();
    if (deep) {
      share_hidden();
      clear_sums();
      wait_for(&inboxes().hidden);
      quantise_hidden(mid);
    }
    second.template multiply_into<kTiles>(at<signed char>(plan_.bytes8), plan_.stride, plan_.bucket_rows,
                                          at<int>(plan_.sums));
    __syncthreads();
    finish_layer(plan_.hidden_rows, plan_.bucket_rows, false);
    if (p_.task.softmax) {
      share_stats();
      wait_for(&inboxes().stats);
    }
    share_keys();
    wait_for(&inboxes().keys);
    find_candidates();
    __syncthreads();
    rank_candidates();
    __syncthreads();
    list_rows();
  }

 private:
  static constexpr int kMostHeads = 4 * kTiles, kHeldLabels = 8;
  struct Peaks {
    float of_query[kMostHeads];                      ///< largest number of the input
    float of_input[kMostHeads];                      ///< largest number of what was quantised last
    unsigned hidden[kMostHeads];                     ///< of this block's hidden units
    float highest[kMostHeads], inverse[kMostHeads];  ///< of the softmax: highest score, 1 / sum
    int candidates;
  };
  __device__ static Peaks& peaks() {
    __shared__ Peaks peaks;
    return peaks;
  }

  struct Inboxes {
    Inbox hidden, stats, keys;
  };
  __device__ static Inboxes& inboxes() {
    __shared__ Inboxes inboxes;
    return inboxes;
  }
  __device__ void open_inboxes(bool deep) const {
    Inboxes& in = inboxes();
    open_inbox(&in.hidden), open_inbox(&in.stats), open_inbox(&in.keys);
    publish_inboxes();
    if (deep) expect(&in.hidden, static_cast<unsigned>(kRanks * p_.heads * (plan_.hidden_rows + 1) * 4));
    if (p_.task.softmax) expect(&in.stats, static_cast<unsigned>(kRanks * p_.heads * 8));
    expect(&in.keys, static_cast<unsigned>(kRanks * plan_.bucket_rows * 4));
  }

  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  __device__ void clear(int words, int offset) const {
    for (int i = tid_; i < words; i += kThreads) at<int>(offset)[i] = 0;
  }
  __device__ void clear_sums() const {
    clear(kPlanes * max(plan_.hidden_rows, plan_.bucket_rows) * kTiles * 8, plan_.sums);
  }
  __device__ int most() const { return min(p_.task.probes, p_.task.net.buckets); }

  /// Scales and biases of this block's rows of a layer, [rows][2] from `place` on; 0 beyond the last row.
  __device__ void take_tails(const std::byte* from, int rows, int rows_of_rank, int place) const {
    const float* const tail = reinterpret_cast<const float*>(from);
    for (int row = tid_; row < rows_of_rank; row += kThreads) {
      const int all = rank_ * rows_of_rank + row;
      at<float2>(plan_.tails)[place + row] =
          all < rows ? make_float2(__ldg(tail + all), __ldg(tail + rows + all)) : make_float2(0.0f, 0.0f);
    }
  }

  __device__ void take_tables() {
    const BucketTables& tables = p_.task.tables;
    const int buckets = p_.task.net.buckets;
    place_ = std::int64_t{token_.sequence} * p_.queries.layout.kv_heads + kv_head_;
    listed_ = tables.listed[token_.sequence];
#pragma unroll 4
    for (int i = tid_; i <= buckets; i += kThreads)
      at<int>(plan_.offsets)[i] = tables.offsets[place_ * (buckets + 1) + i];
    for (int row = tid_; row < plan_.bucket_rows; row += kThreads) {
      const int bucket = rank_ * plan_.bucket_rows + row;
      const std::int32_t* const from = tables.offsets + place_ * (buckets + 1) + bucket;
      at<int>(plan_.sizes)[row] = bucket < buckets ? from[1] - from[0] : 0;
    }
#pragma unroll
    for (int i = 0; i < kHeldLabels; ++i) {
      const std::int64_t key = listed_ + i * kThreads + tid_;
      held_labels_[i] = key < far_end() ? labels()[key] : -1;
    }
    for (int i = tid_; i < most(); i += kThreads) at<int>(plan_.chosen)[i] = -1;
    for (int i = tid_; i < (buckets + 31) / 32; i += kThreads) at<unsigned>(plan_.map)[i] = 0;
    if (tid_ < kMostHeads) peaks().hidden[tid_] = 0;
  }
  __device__ const std::uint16_t* labels() const {
    return p_.task.tables.labels + place_ * p_.task.tables.max_tokens;
  }
  /// Adds the far keys behind the lists to the sizes of this block's buckets.
  __device__ void count_unlisted() const {
    const auto add = [&](int label) {
      const auto row = static_cast<unsigned>(label - rank_ * plan_.bucket_rows);
      if (row < static_cast<unsigned>(plan_.bucket_rows)) atomicAdd(at<int>(plan_.sizes) + row, 1);
    };
#pragma unroll
    for (int i = 0; i < kHeldLabels; ++i) add(held_labels_[i]);
    for (std::int64_t key = listed_ + kHeldLabels * kThreads + tid_; key < far_end(); key += kThreads)
      add(labels()[key]);
  }
  __device__ std::int64_t far_end() const {
    return max(p_.task.sink, std::int64_t{token_.position} + 1 - p_.task.window);
  }

  /// Four numbers of a head to two bytes each.
  __device__ void put(int head, int column, float4 x, float inverse) const {
    const float values[4] = {x.x, x.y, x.z, x.w};
    unsigned high = 0, low = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int whole = inverse == 0.0f ? 0 : __float2int_rn(values[e] * inverse);
      const int upper = (whole + 128) >> 8;
      high |= static_cast<unsigned>(upper & 255) << 8 * e;
      low |= static_cast<unsigned>((whole - upper * 256) & 255) << 8 * e;
    }
    *at<unsigned>(plan_.bytes8 + 2 * head * plan_.stride + column) = high;
    *at<unsigned>(plan_.bytes8 + (2 * head + 1) * plan_.stride + column) = low;
  }
  /// 0 for a head with a number that is not finite: it has no say.
  __device__ static float inverse_of(float peak) {
    return peak > 0.0f && peak < INFINITY ? kMost / peak : 0.0f;
  }
  __device__ static unsigned size_of(float4 x) {  // NaN counts as more than infinity
    return max(max(__float_as_uint(fabsf(x.x)), __float_as_uint(fabsf(x.y))),
               max(__float_as_uint(fabsf(x.z)), __float_as_uint(fabsf(x.w))));
  }

  /// A warp for each input of the network: a query head, or the sum of the group.
  __device__ void take_queries(int in) {
    const int d = p_.task.net.inputs;
    const float* const q =
        p_.task.q + (std::int64_t{query_} * p_.queries.query_heads + kv_head_ * p_.group) * d;
    for (int head = warp_; head < p_.heads; head += kWarps) {
      float* const x = at<float>(plan_.q) + head * in;
      unsigned peak = 0;
      for (int c = 4 * lane_; c < in; c += 128) {
        float4 sum = {};
        const int group = p_.heads == p_.group ? 1 : p_.group;
        for (int g = 0; g < group && c < d; ++g) {  // d is a multiple of 4
          const float4 one = *reinterpret_cast<const float4*>(q + (head + g) * d + c);
          sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
        }
        *reinterpret_cast<float4*>(x + c) = sum;
        peak = max(peak, size_of(sum));
      }
      peak = __reduce_max_sync(~0u, peak);
      const float most = __uint_as_float(peak), inverse = inverse_of(most);
      for (int c = 4 * lane_; c < in; c += 128)
        put(head, c, *reinterpret_cast<const float4*>(x + c), inverse);
      if (lane_ == 0) peaks().of_input[head] = peaks().of_query[head] = most;
    }
    __syncthreads();
  }

  /// h of all blocks and, for W3, the input, against the largest of each head.
  __device__ void quantise_hidden(int columns) {
    const int parts = max(1, kWarps / p_.heads);  // warps of a head
    const bool residual = p_.task.net.residual;
    const int end = residual ? p_.task.net.residual_column() : columns,  // of h
        in = NetLayout::padded_columns(p_.task.net.inputs);
    for (int unit = warp_; unit < p_.heads * parts; unit += kWarps) {
      const int head = unit / parts, part = unit - head * parts;
      const unsigned mine = lane_ < kRanks ? at<unsigned>(plan_.hidden_peaks)[lane_ * p_.heads + head] : 0;
      unsigned peak = __reduce_max_sync(~0u, mine);
      if (residual) peak = max(peak, __float_as_uint(fabsf(peaks().of_query[head] * factor_)));
      const float most = __uint_as_float(peak), inverse = inverse_of(most);
      const float* const x = at<float>(plan_.hidden) + head * plan_.hidden_stride;
      const float* const q = at<float>(plan_.q) + head * in;
#pragma unroll 4
      for (int c = (part * 32 + lane_) * 4; c < columns; c += parts * 128) {
        float4 some = {};
        if (c < end) {
          some = *reinterpret_cast<const float4*>(x + c);
        } else if (c - end < in) {
          some = *reinterpret_cast<const float4*>(q + c - end);
          some.x *= factor_, some.y *= factor_, some.z *= factor_, some.w *= factor_;
        }
        put(head, c, some, inverse);
      }
      if (part == 0 && lane_ == 0) peaks().of_input[head] = most;
    }
    __syncthreads();
  }

  /// Integer sums to own [heads][rows]: scaled, biased, and cut at 0 in the hidden layer.
  __device__ void finish_layer(int tails, int rows, bool hidden) {
    const int* const sums = at<int>(plan_.sums);
    for (int i = tid_; i < rows * p_.heads; i += kThreads) {
      const int head = i / rows, row = i - head * rows;
      const float peak = peaks().of_input[head];
      const auto sum = [&](int plane) {
        const int2 both = *reinterpret_cast<const int2*>(sums + (plane * rows + row) * kTiles * 8 + 2 * head);
        return static_cast<float>(both.x) * 256.0f + static_cast<float>(both.y);
      };
      float whole = sum(0);
      if constexpr (kPlanes == 2) whole = whole * 256.0f + sum(1);
      const float2 tail = at<float2>(plan_.tails)[tails + row];
      float y = whole * (tail.x * (peak < INFINITY ? peak / kMost : NAN)) + tail.y;
      if (hidden) {
        y = y < 0.0f ? 0.0f : y;
        const unsigned size = __float_as_uint(fabsf(y));
        if (rows % 32 == 0) {  // a warp is within one head
          const unsigned most = __reduce_max_sync(~0u, size);
          if (lane_ == 0) atomicMax(&peaks().hidden[head], most);
        } else {
          atomicMax(&peaks().hidden[head], size);
        }
      }
      at<float>(plan_.own)[i] = y;
    }
    __syncthreads();
  }

  /// own [heads][rows] and the largest of each head, to all blocks.
  __device__ void share_hidden() const {
    const int other = tid_ % kRanks, rows = plan_.hidden_rows;
    const unsigned target = address_in(at<float>(plan_.hidden), other),
                   all_peaks = address_in(at<unsigned>(plan_.hidden_peaks), other),
                   inbox = address_in(&inboxes().hidden, other);
    for (int head = 0; head < p_.heads; ++head) {
      for (int row = tid_ / kRanks * 4; row < rows; row += kThreads / kRanks * 4)
        send(target + static_cast<unsigned>(head * plan_.hidden_stride + rank_ * rows + row) * 4,
             *reinterpret_cast<const uint4*>(at<float>(plan_.own) + head * rows + row), inbox);
      if (tid_ / kRanks == head % (kThreads / kRanks))
        send(all_peaks + static_cast<unsigned>(rank_ * p_.heads + head) * 4, peaks().hidden[head], inbox);
    }
  }

  /// Highest score and sum of exponentials of each head over this block's buckets, to all blocks.
  __device__ void share_stats() const {
    const int rows = plan_.bucket_rows;
    const int valid = min(rows, p_.task.net.buckets - rank_ * rows);
    for (int head = warp_; head < p_.heads; head += kWarps) {
      const float* const scores = at<float>(plan_.own) + head * rows;
      float highest = -INFINITY, sum = 0.0f;
      for (int row = lane_; row < valid; row += 32) highest = fmaxf(highest, scores[row]);
      for (int o = 16; o > 0; o /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
      for (int row = lane_; row < valid; row += 32) sum += __expf(scores[row] - highest);
      for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
      if (lane_ < kRanks)
        send(address_in(at<float2>(plan_.stats) + rank_ * p_.heads + head, lane_), make_float2(highest, sum),
             address_in(&inboxes().stats, lane_));
    }
  }

  /// Keys by which buckets are ranked; 0 for those that may not be chosen.
  __device__ void share_keys() {
    const int rows = plan_.bucket_rows;
    const float* const scores = at<float>(plan_.own);
    if (p_.task.softmax) {
      for (int head = warp_; head < p_.heads; head += kWarps) {
        const float2 mine =
            lane_ < kRanks ? at<float2>(plan_.stats)[lane_ * p_.heads + head] : make_float2(-INFINITY, 0.0f);
        float highest = mine.x;
        for (int o = 16; o > 0; o /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
        float sum = mine.x == -INFINITY && !isnan(mine.y) ? 0.0f : mine.y * __expf(mine.x - highest);
        for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
        if (lane_ == 0) {
          peaks().highest[head] = highest;
          peaks().inverse[head] = isfinite(highest) && sum > 0.0f ? 1.0f / sum : 0.0f;
        }
      }
      __syncthreads();
    }
    for (int row = tid_; row < rows; row += kThreads) {
      float x = p_.task.softmax ? 0.0f : scores[row];
      for (int head = 0; p_.task.softmax && head < p_.heads; ++head) {
        const float inverse = peaks().inverse[head];
        if (inverse > 0.0f) x += __expf(scores[head * rows + row] - peaks().highest[head]) * inverse;
      }
      const int keys = at<int>(plan_.sizes)[row];
      if (p_.task.rank != BucketRank::mass) {
        const auto size = static_cast<float>(max(keys, 1));
        x = __fdiv_rn(x, p_.task.rank == BucketRank::per_key ? size : __fsqrt_rn(size));
      }
      const unsigned bits = __float_as_uint(x + 0.0f);  // one zero
      at<unsigned>(plan_.own_keys)[row] = keys == 0 || isnan(x) ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
    }
    __syncthreads();
    const int other = tid_ % kRanks;
    const unsigned target = address_in(at<unsigned>(plan_.keys) + rank_ * rows, other),
                   inbox = address_in(&inboxes().keys, other);
    for (int row = tid_ / kRanks * 4; row < rows; row += kThreads / kRanks * 4)
      send(target + static_cast<unsigned>(row) * 4,
           *reinterpret_cast<const uint4*>(at<unsigned>(plan_.own_keys) + row), inbox);
  }

  /// Buckets that may be among the best: in every warp's share of the keys as many threads as its part of
  /// the wanted ones hold a key that is no less than some number, so that no key below the least of these
  /// numbers is among the best. The order of the candidates does not matter.
  __device__ void find_candidates() const {
    __shared__ unsigned least[kWarps];
    __shared__ int count;
    const uint4* const keys = at<uint4>(plan_.keys);
    const int fours = kRanks * plan_.bucket_rows / 4, wanted = (most() + kWarps - 1) / kWarps;
    unsigned highest = 0;
    for (int i = tid_; i < fours; i += kThreads)
      highest = max(max(highest, max(keys[i].x, keys[i].y)), max(keys[i].z, keys[i].w));
    unsigned nth = 0;
    for (int i = 0; i < wanted && wanted <= 32; ++i) {
      nth = __reduce_max_sync(~0u, highest);
      const unsigned holders = __ballot_sync(~0u, highest == nth);
      if (lane_ == __ffs(static_cast<int>(holders)) - 1) highest = 0;
    }
    if (lane_ == 0) least[warp_] = nth;
    if (tid_ == 0) count = 0;
    __syncthreads();
    unsigned bar = least[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) bar = min(bar, least[w]);
    bar = max(bar, 1u);  // 0 is no candidate
    std::uint16_t* const found = at<std::uint16_t>(plan_.found);
    for (int i = tid_; i < fours; i += kThreads) {
      const unsigned some[4] = {keys[i].x, keys[i].y, keys[i].z, keys[i].w};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (some[e] >= bar) found[atomicAdd(&count, 1)] = static_cast<std::uint16_t>(i * 4 + e);
    }
    __syncthreads();
    if (tid_ == 0) peaks().candidates = count;
  }
  /// Of equal keys the higher bucket goes first.
  __device__ void rank_candidates() const {
    constexpr int kSharers = 4;  // threads that rank one bucket
    const std::uint16_t* const found = at<std::uint16_t>(plan_.found);
    const unsigned* const keys = at<unsigned>(plan_.keys);
    const int count = peaks().candidates, part = tid_ % kSharers;
    for (int first = 0; first < count; first += kThreads / kSharers) {
      const int own = first + tid_ / kSharers;
      const int bucket = own < count ? found[own] : 0;
      const unsigned key = keys[bucket];
      int above = 0;
#pragma unroll 4
      for (int i = part; i < count; i += kSharers) {
        const int other = found[i];
        above += keys[other] > key - (other > bucket ? 1 : 0) ? 1 : 0;
      }
      above += __shfl_xor_sync(~0u, above, 1);
      above += __shfl_xor_sync(~0u, above, 2);
      if (part == 0 && own < count && above < most()) at<int>(plan_.chosen)[above] = bucket;
    }
  }

  /// Where each chosen bucket's rows begin in the list, and where all end; by one warp.
  __device__ void find_starts() const {
    const int *const offsets = at<int>(plan_.offsets), *const chosen = at<int>(plan_.chosen);
    int* const starts = at<int>(plan_.starts);
    int total = 0;
    for (int from = 0; from < most(); from += 32) {
      const int bucket = from + lane_ < most() ? chosen[from + lane_] : -1;
      const int size = bucket < 0 ? 0 : offsets[bucket + 1] - offsets[bucket];
      int up_to = size;
#pragma unroll
      for (int o = 1; o < 32; o *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, o);
        if (lane_ >= o) up_to += other;
      }
      if (from + lane_ < most()) starts[from + lane_] = total + up_to - size;
      total += __shfl_sync(~0u, up_to, 31);
    }
    if (lane_ == 0) starts[most()] = total;
  }

  __device__ void list_rows() {
    const BucketTables& tables = p_.task.tables;
    const int *const offsets = at<int>(plan_.offsets), *const chosen = at<int>(plan_.chosen);
    const int* const starts = at<int>(plan_.starts);
    if (warp_ == 0) find_starts();
    __syncthreads();
    const std::int64_t list = std::int64_t{query_} * p_.queries.layout.kv_heads + kv_head_;
    std::int32_t* const to = p_.task.rows + list * p_.task.capacity;
    const std::int32_t* const from = tables.rows + place_ * tables.max_tokens;
    const int end = static_cast<int>(min(std::int64_t{starts[most()]}, p_.task.capacity));
#pragma unroll 4
    for (int i = rank_ * kThreads + tid_; i < end; i += kRanks * kThreads) {
      int low = 0, high = most();  // the last bucket that starts at or before i
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (starts[middle] <= i) {
          low = middle;
        } else {
          high = middle;
        }
      }
      to[i] = from[offsets[chosen[low]] + i - starts[low]];
    }
    if (rank_ == kRanks - 1) add_unlisted(starts[most()], to, list);
  }

  /// Keys [listed, far_end) in chosen buckets, by their labels: a warp takes 32 neighbours, eight times in a
  /// stretch.
  __device__ void add_unlisted(int count, std::int32_t* to, std::int64_t list) const {
    __shared__ int sums[kHeldLabels * kWarps];
    const std::int64_t end = far_end();
    unsigned* const map = at<unsigned>(plan_.map);
    for (int i = tid_; listed_ < end && i < most(); i += kThreads) {
      const int bucket = at<int>(plan_.chosen)[i];
      if (bucket >= 0) atomicOr(&map[bucket / 32], 1u << bucket % 32);
    }
    __syncthreads();
    for (std::int64_t from = listed_; from < end; from += kThreads * kHeldLabels) {
      unsigned in[kHeldLabels];
#pragma unroll
      for (int i = 0; i < kHeldLabels; ++i) {
        const std::int64_t key = from + i * kThreads + tid_;
        const int label = from == listed_ ? held_labels_[i] : key < end ? labels()[key] : -1;
        in[i] = __ballot_sync(~0u, label >= 0 && (map[label / 32] >> label % 32 & 1u) != 0);
        if (lane_ == 0) sums[i * kWarps + warp_] = __popc(in[i]);
      }
      __syncthreads();
      int total = 0;
      for (int i = 0; i < kHeldLabels; ++i) {
        int place = count + total;
        for (int w = 0; w < kWarps; ++w) {
          if (w < warp_) place += sums[i * kWarps + w];
          total += sums[i * kWarps + w];
        }
        place += __popc(in[i] & ((1u << lane_) - 1));
        if ((in[i] >> lane_ & 1) != 0 && place < p_.task.capacity)
          to[place] = static_cast<std::int32_t>(from) + i * kThreads + tid_;
      }
      count += total;
      __syncthreads();
    }
    if (tid_ == 0) p_.task.counts[list] = static_cast<int>(min(std::int64_t{count}, p_.task.capacity));
  }

  const Params& p_;
  const Plan plan_;
  char* const memory_;
  const int rank_, kv_head_, query_, tid_, lane_, warp_;
  QueryToken token_;
  std::int64_t place_ = 0;  ///< of this sequence and KV head in the tables
  std::int32_t listed_ = 0;
  int held_labels_[kHeldLabels];  ///< of this thread's keys behind the lists, -1: no far key
  float factor_ = 0.0f;           ///< of the input beside h
};

template <int kPlanes, int kTiles, int kRanks>
__global__ void __launch_bounds__(kThreads, kRanks == 16 ? 2 : 1)
    choose_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  Chooser<kPlanes, kTiles, kRanks>(p, memory).run();
#endif
}

template <int kPlanes, int kTiles, int kRanks>
void launch(const Params& p, StreamHandle stream) {
  const int shared = Plan(p.task.net, p.heads, p.task.probes, kRanks).total;
  const auto kernel = choose_kernel<kPlanes, kTiles, kRanks>;
  prepare_clusters(kernel, shared);
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(kRanks, static_cast<unsigned>(p.queries.layout.kv_heads), static_cast<unsigned>(p.queries.count));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kRanks, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 2;
  LODE_CUDA(cudaLaunchKernelEx(&config, kernel, p));
}

/// By the KV heads and the GPU alone: sums of another cut differ in their last bits, and a choice must not
/// depend on how many queries come together.
template <int kPlanes, int kTiles>
void launch_for_kv_heads(const Params& p, StreamHandle stream) {
  static const bool sixteen = can_place(choose_kernel<kPlanes, kTiles, 16>, 16, kThreads, kBytesOfTwo - 1024);
  if (sixteen && p.queries.layout.kv_heads <= kFewClusters &&
      Plan(p.task.net, p.heads, p.task.probes, 16).total + 1024 <= kBytesOfTwo)
    return launch<kPlanes, kTiles, 16>(p, stream);
  launch<kPlanes, kTiles, 8>(p, stream);
}

template <int kPlanes>
void launch_for_heads(const Params& p, StreamHandle stream) {
  if (p.heads <= 4) return launch_for_kv_heads<kPlanes, 1>(p, stream);
  if (p.heads <= 8) return launch_for_kv_heads<kPlanes, 2>(p, stream);
  launch_for_kv_heads<kPlanes, 4>(p, stream);
}

Params params_of(const BucketChoiceTask& task, const Queries& queries) {
  const int group = queries.query_heads / queries.layout.kv_heads;
  return {.task = task, .queries = queries, .group = group, .heads = task.softmax ? group : 1};
}

/// One matrix [rows, columns] to its layout at `to`; its scales and biases behind it.
void pack(const NetLayout& layout, std::span<const float> weight, std::span<const float> bias, int rows,
          int columns, std::byte* to) {
  const int all = NetLayout::padded_rows(rows), chunks = NetLayout::padded_columns(columns) / kChunk;
  auto* const scales = reinterpret_cast<float*>(to + layout.weight_bytes(rows, columns));
  for (int r = 0; r < rows; ++r) {
    const std::span<const float> row = weight.subspan(static_cast<std::size_t>(r) * columns, columns);
    float most = 0.0f;
    for (const float x : row) most = std::max(most, std::abs(x));
    const float limit = layout.planes == 2 ? kMost : 127.0f, inverse = most > 0.0f ? limit / most : 0.0f;
    scales[r] = most / limit;
    scales[all + r] = bias.empty() ? 0.0f : bias[static_cast<std::size_t>(r)];
    for (int c = 0; c < columns; ++c) {
      const int whole = static_cast<int>(std::lrint(row[static_cast<std::size_t>(c)] * inverse));
      const int upper = layout.planes == 2 ? (whole + 128) >> 8 : whole, lower = whole - upper * 256;
      const int lane = r % 8 * 4 + c % kChunk / 16;
      const std::int64_t piece = (std::int64_t{r / 16} * chunks + c / kChunk) * layout.planes;
      for (int plane = 0; plane < layout.planes; ++plane) {
        const std::int64_t place = (((piece + plane) * 2 + r % 16 / 8) * 32 + lane) * 16 + c % 16;
        to[place] = static_cast<std::byte>(static_cast<signed char>(plane == 0 ? upper : lower));
      }
    }
  }
}

/// Mean over the rows of their largest number.
double mean_peak(std::span<const float> weight, int rows) {
  const std::size_t columns = weight.size() / static_cast<std::size_t>(rows);
  double sum = 0.0;
  for (int r = 0; r < rows; ++r) {
    float most = 0.0f;
    for (const float x : weight.subspan(static_cast<std::size_t>(r) * columns, columns))
      most = std::max(most, std::abs(x));
    sum += most;
  }
  return sum / rows;
}

/// By which W3 is larger than W2.
float factor_between(const NetLayout& layout, std::span<const float> output,
                     std::span<const float> residual) {
  const double of_output = mean_peak(output, layout.buckets),
               of_residual = mean_peak(residual, layout.buckets);
  return of_output > 0.0 && of_residual > 0.0 ? static_cast<float>(of_residual / of_output) : 1.0f;
}

/// [W2, W3 / factor], W3 where the layout has it.
std::vector<float> side_by_side(const NetLayout& layout, std::span<const float> output,
                                std::span<const float> residual, float factor) {
  const auto columns = static_cast<std::size_t>(layout.columns_of_output()),
             h = static_cast<std::size_t>(layout.hidden), d = static_cast<std::size_t>(layout.inputs);
  std::vector<float> both(static_cast<std::size_t>(layout.buckets) * columns);
  for (std::size_t r = 0; r < static_cast<std::size_t>(layout.buckets); ++r) {
    std::copy_n(output.begin() + static_cast<std::ptrdiff_t>(r * h), h, both.data() + r * columns);
    for (std::size_t c = 0; c < d; ++c)
      both[r * columns + static_cast<std::size_t>(layout.residual_column()) + c] =
          residual[r * d + c] / factor;
  }
  return both;
}

}  // namespace

bool can_choose_buckets() {
  static const bool can = [] {
    int device = 0, major = 0;
    LODE_CUDA(cudaGetDevice(&device));
    LODE_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    return major >= 9;
  }();
  return can;
}

std::vector<std::byte> pack_net(const NetLayout& layout, std::span<const float> hidden_weight,
                                std::span<const float> hidden_bias, std::span<const float> output_weight,
                                std::span<const float> residual_weight, std::span<const float> bias) {
  std::vector<std::byte> packed(static_cast<std::size_t>(layout.bytes()));
  if (layout.hidden > 0)
    pack(layout, hidden_weight, hidden_bias, layout.hidden, layout.inputs, packed.data());
  std::vector<float> both;
  if (layout.residual) {
    const float factor = factor_between(layout, output_weight, residual_weight);
    std::memcpy(packed.data() + layout.factor_offset(), &factor, sizeof factor);
    both = side_by_side(layout, output_weight, residual_weight, factor);
  }
  pack(layout, layout.residual ? both : output_weight, bias, layout.buckets, layout.columns_of_output(),
       packed.data() + layout.output_offset());
  return packed;
}

std::int64_t bucket_choice_shared_bytes(const BucketChoiceTask& task, int group) {
  const int heads = task.softmax ? group : 1;
  return std::max(Plan(task.net, heads, task.probes, 8).total, Plan(task.net, heads, task.probes, 16).total);
}

bool fits_bucket_choice(const BucketChoiceTask& task, int group) {
  int device = 0, most = 0;
  LODE_CUDA(cudaGetDevice(&device));
  LODE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bucket_choice_shared_bytes(task, group) + 4096 <= most;
}

void choose_buckets(const BucketChoiceTask& task, const Queries& queries, StreamHandle stream) {
  if (queries.count == 0) return;
  const Params p = params_of(task, queries);
  return task.net.planes == 2 ? launch_for_heads<2>(p, stream) : launch_for_heads<1>(p, stream);
}

}  // namespace lode::cuda
