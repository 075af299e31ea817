// SPDX-License-Identifier: Apache-2.0
// Work map: a cluster of blocks for each (KV head, query token). Each block owns hidden units, with their
// rows of W1 and their columns of W2, and buckets. It asks for those weights, and for what it needs of the
// tables, before it waits for the queries, which the launch before this one makes (their places must be
// older). Blocks exchange no more than each must know:
//
//   x -> own rows of W1 -> relu -> own columns of W2 -> what own units make of each bucket, to its block
//   -> summed there, W3 x added: scores -> all have each other's softmax sums
//   -> all have the keys by which buckets are ranked, and rank them
//   -> each copies its share of their rows; the last one adds the keys that are not in lists yet
//
// They wait for messages (cluster_link.cuh), never for one another.
//
// Products are of integers (mma.m16n8k32.s8): inputs of 16 bits, against the largest that the block has, as
// two columns of bytes; weights of one byte or two. A block's part of a sum is exact, parts are added in the
// order of the blocks. Everything here runs once, so that fetching instructions is what it costs: loops that
// turn once or twice are not unrolled. One file, because its phases share what a block holds.
#include <algorithm>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/classifier_parts.cuh"
#include "kernels/cuda/cluster_link.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma nv_diag_suppress 177  // the kernel is empty there, and what it uses is not
#endif

namespace lode::cuda {

namespace {

constexpr int kFewClusters = 8;         // up to so many times 16 blocks run at once, two on a processor
constexpr int kBytesOfTwo = 112 << 10;  // shared memory of one of the two
constexpr int kHeldLabels = 8;          // of a thread, of keys behind the lists

struct Params {
  BucketChoiceTask task;
  Queries queries;
  Cut cut;
  Plan plan;
  int group = 0, heads = 0;  ///< query heads of a KV head; inputs of the network: as many, or 1
  int most = 0;              ///< buckets to choose
};

/// Four bytes of memory to the block's, without waiting; 0 where there are none.
__device__ __forceinline__ void fetch_word(void* to, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(exists ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void close_fetches() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLater>
__device__ __forceinline__ void wait_for_fetches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}

template <int kPlanes, int kTiles, int kRanks>
class Chooser {
 public:
  __device__ Chooser(const Params& params, char* memory)
      : p_(params),
        memory_(memory),
        rank_(static_cast<int>(blockIdx.x)),
        kv_head_(static_cast<int>(blockIdx.y)),
        query_(static_cast<int>(blockIdx.z)),
        tid_(static_cast<int>(threadIdx.x)),
        lane_(tid_ % 32),
        warp_(tid_ / 32) {}

  __device__ void run() {
    token_ = p_.queries.tokens[query_];
    int network = 0;  // of one there is no need to wait for the token
    if (p_.task.stretches.networks > 1) network = p_.task.stretches.network_for(token_.position);
    net_ = p_.task.nets + (network * p_.queries.layout.kv_heads + kv_head_) * p_.cut.net_bytes;
    const bool deep = p_.cut.hidden_tiles > 0;
    find_tiles();
    fetch_own(warp_, 0);
    fetch_tails();
    fetch_columns(0);
    if (tid_ == 0) open_inboxes();
    __syncwarp();
    prepare_memory();
    fetch_offsets();
    __syncthreads();
    arrive_in_cluster();  // others write here after that
    wait_for_predecessor();
    release_successor();
    take_queries();
    fetch_labels();
    multiply_own();
    wait_for_cluster();
    if (deep) {
      __syncthreads();
      quantise_hidden();
      __syncthreads();
      multiply_columns();
    }
    count_unlisted();
    wait_for_fetches<0>();
    __syncthreads();
    if (deep) wait_for(&inboxes().partial);
    finish_scores();
    if (p_.task.softmax) wait_for(&inboxes().stats);
    share_keys();
    wait_for(&inboxes().keys);
    find_candidates();
    __syncthreads();
    rank_candidates();
    __syncthreads();
    list_rows();
  }

 private:
  static constexpr int kHeads = 4 * kTiles, kHeldColumns = 8 / kPlanes;
  struct Small {
    float of_query[kHeads];   ///< largest number of the input
    unsigned hidden[kHeads];  ///< of this block's hidden units
    unsigned least[kWarps];
    int candidates, rows;
    Inbox partial, stats, keys;
  };
  __device__ static Small& small() {
    __shared__ Small small;
    return small;
  }
  __device__ static Small& inboxes() { return small(); }

  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  __device__ const float* tails(bool hidden) const {  // scales, then biases
    return at<float>(p_.plan.tails) + (hidden ? 0 : 2 * p_.cut.hidden_rows);
  }
  __device__ const float* factor() const { return reinterpret_cast<const float*>(net_ + p_.cut.factor); }
  /// Blocks that have hidden units.
  __device__ int senders() const {
    return p_.cut.hidden_tiles == 0 ? 0 : (p_.task.net.hidden + p_.cut.hidden_rows - 1) / p_.cut.hidden_rows;
  }

  __device__ void find_tiles() {
    own_hidden_ =
        max(0, min(p_.cut.hidden_rows / kTile, p_.cut.hidden_tiles - rank_ * p_.cut.hidden_rows / kTile));
    own_buckets_ =
        max(0, min(p_.cut.bucket_rows / kTile, p_.cut.bucket_tiles - rank_ * p_.cut.bucket_rows / kTile));
    const int oc = p_.cut.hidden_rows / kChunk;
    columns_ = max(0, min(oc, p_.cut.hidden_chunks - rank_ * oc));
    const int each = (p_.cut.bucket_tiles + kWarps - 1) / kWarps;
    first_tile_ = min(p_.cut.bucket_tiles, warp_ * each);
    pieces_ = (min(p_.cut.bucket_tiles, first_tile_ + each) - first_tile_) * columns_;
  }
  __device__ void open_inboxes() const {
    Small& in = inboxes();
    open_inbox(&in.partial), open_inbox(&in.stats), open_inbox(&in.keys);
    publish_inboxes();
    expect(&in.partial, static_cast<unsigned>(senders() * own_buckets_ * kTiles * 256));
    expect(&in.stats, static_cast<unsigned>(kRanks * p_.cut.bucket_rows / 8 * kTiles * 32));
    expect(&in.keys, static_cast<unsigned>(kRanks * p_.cut.bucket_rows * 4));
  }

  /// Tiles of rows that this block multiplies with the input: those of W1, then those of W3.
  __device__ int own_tiles() const { return own_hidden_ + (p_.cut.direct ? own_buckets_ : 0); }
  /// Two chunks of one of them.
  __device__ void fetch_own(int unit, int chunk) {
    if (unit >= own_tiles()) return;
    const bool hidden = unit < own_hidden_;
    const int tile = hidden ? rank_ * (p_.cut.hidden_rows / kTile) + unit
                            : rank_ * (p_.cut.bucket_rows / kTile) + unit - own_hidden_;
    const auto* const pieces = reinterpret_cast<const uint4*>(net_ + (hidden ? 0 : p_.cut.output));
    const int first =
        (hidden ? tile * p_.cut.stride_1 : tile * p_.cut.stride_2 + p_.cut.direct_chunk) + chunk;
    own_[0].fetch(pieces, first);
    if (chunk + 1 < p_.cut.input_chunks) own_[1].fetch(pieces, first + 1);
  }
  /// Of this warp's tiles of all buckets, the columns of own hidden units: so many pieces from one on.
  __device__ void fetch_columns(int from) {
    const auto* const pieces = reinterpret_cast<const uint4*>(net_ + p_.cut.output);
    const int chunk = rank_ * (p_.cut.hidden_rows / kChunk);
#pragma unroll
    for (int i = 0; i < kHeldColumns; ++i) {
      const int piece = from + i, tile = columns_ == 1 ? piece : piece / max(1, columns_);
      if (piece < pieces_)
        held_[i].fetch(pieces, (first_tile_ + tile) * p_.cut.stride_2 + chunk + piece - tile * columns_);
    }
  }
  __device__ void fetch_tails() const {
    const auto take = [&](bool hidden, std::int64_t place, int rows, int all) {
      auto* const to = const_cast<float*>(tails(hidden));
      const float* const from = reinterpret_cast<const float*>(net_ + place);
#pragma unroll 1
      for (int i = tid_; i < 2 * rows; i += kThreads) {
        const int row = rank_ * rows + (i < rows ? i : i - rows);
        fetch_word(to + i, from + (i < rows ? row : all + row), row < all);
      }
    };
    take(true, p_.cut.tails_1, p_.cut.hidden_rows, p_.cut.hidden_tiles * kTile);
    take(false, p_.cut.tails_2, p_.cut.bucket_rows, p_.cut.bucket_tiles * kTile);
    close_fetches();
  }
  __device__ void fetch_offsets() {
    const BucketTables& tables = p_.task.tables;
    const int buckets = p_.task.net.buckets;
    place_ = std::int64_t{token_.sequence} * p_.queries.layout.kv_heads + kv_head_;
    listed_ = tables.listed[token_.sequence];
    const std::int32_t* const from = tables.offsets + place_ * (buckets + 1);
#pragma unroll 1
    for (int i = tid_; i <= buckets; i += kThreads) fetch_word(at<int>(p_.plan.offsets) + i, from + i, true);
    close_fetches();
  }
  __device__ void prepare_memory() const {
    const auto fill = [&](int offset, int words, int with) {
#pragma unroll 1
      for (int i = tid_; i < words; i += kThreads) at<int>(offset)[i] = with;
    };
    fill(p_.plan.x, (p_.plan.h - p_.plan.x) / 4, 0);
    fill(p_.plan.unlisted, p_.cut.bucket_rows, 0);
    fill(p_.plan.starts, p_.most, 0x7fffffff);
    fill(p_.plan.map, (p_.task.net.buckets + 31) / 32, 0);
    if (tid_ < kHeads) small().hidden[tid_] = 0;
    if (tid_ == 0) small().candidates = small().rows = 0;
  }

  __device__ std::int64_t far_end() const {
    return max(p_.task.sink, std::int64_t{token_.position} + 1 - p_.task.window);
  }
  __device__ const std::uint16_t* labels() const {
    return p_.task.tables.labels + place_ * p_.task.tables.max_tokens;
  }
  __device__ void fetch_labels() {
    const std::int64_t end = far_end();
#pragma unroll
    for (int i = 0; i < kHeldLabels; ++i) {
      const std::int64_t key = listed_ + i * kThreads + tid_;
      held_labels_[i] = key < end ? labels()[key] : -1;
    }
  }
  /// How many far keys behind the lists each of this block's buckets has.
  __device__ void count_unlisted() const {
    const auto add = [&](int label) {
      const auto row = static_cast<unsigned>(label - rank_ * p_.cut.bucket_rows);
      if (row < static_cast<unsigned>(p_.cut.bucket_rows)) atomicAdd(at<int>(p_.plan.unlisted) + row, 1);
    };
#pragma unroll
    for (int i = 0; i < kHeldLabels; ++i) add(held_labels_[i]);
#pragma unroll 1
    for (std::int64_t key = listed_ + kHeldLabels * kThreads + tid_; key < far_end(); key += kThreads)
      add(labels()[key]);
  }

  /// 0 for a head with a number that is not finite: it has no say.
  __device__ static float inverse_of(float peak) {
    return peak > 0.0f && peak < INFINITY ? kMost / peak : 0.0f;
  }
  /// By which sums are multiplied; not a number for such a head.
  __device__ static float unit_of(float peak) {
    return peak < INFINITY ? peak * (1.0f / kMost) : NAN;
  }
  __device__ static unsigned size_of(float4 x) {  // NaN counts as more than infinity
    return max(max(__float_as_uint(fabsf(x.x)), __float_as_uint(fabsf(x.y))),
               max(__float_as_uint(fabsf(x.z)), __float_as_uint(fabsf(x.w))));
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
      low |= static_cast<unsigned>(whole & 255) << 8 * e;
    }
    *at<unsigned>(p_.plan.x + 2 * head * p_.plan.x_stride + column) = high;
    *at<unsigned>(p_.plan.x + (2 * head + 1) * p_.plan.x_stride + column) = low;
  }
  /// A warp for each input of the network: a query head, or the sum of the group.
  __device__ void take_queries() {
    const int d = p_.task.net.inputs, summed = p_.heads == p_.group ? 1 : p_.group;
    const float* const q =
        p_.task.q + (std::int64_t{query_} * p_.queries.query_heads + kv_head_ * p_.group) * d;
#pragma unroll 1
    for (int head = warp_; head < p_.heads; head += kWarps) {
      const auto input = [&](int c) {
        float4 sum = {};
#pragma unroll 4
        for (int g = 0; g < summed && c < d; ++g) {  // d is a multiple of 4
          const float4 one = *reinterpret_cast<const float4*>(q + (head + g) * d + c);
          sum.x += one.x, sum.y += one.y, sum.z += one.z, sum.w += one.w;
        }
        return sum;
      };
      const float4 first = input(4 * lane_);
      unsigned peak = size_of(first);
#pragma unroll 1
      for (int c = 4 * lane_ + 128; c < d; c += 128) peak = max(peak, size_of(input(c)));
      const float most = __uint_as_float(__reduce_max_sync(~0u, peak)), inverse = inverse_of(most);
      if (4 * lane_ < d) put(head, 4 * lane_, first, inverse);
#pragma unroll 1
      for (int c = 4 * lane_ + 128; c < d; c += 128) put(head, c, input(c), inverse);
      if (lane_ == 0) small().of_query[head] = most;
    }
    wait_for_fetches<1>();
    __syncthreads();
  }

  /// Place of a number [tiles][kTiles][2 x 8 rows][8 rows x 4 heads].
  __device__ static int place_of(int tile, int n, int half) {
    return ((tile * kTiles + n) * 2 + half) * 32;
  }
  /// Own hidden units, and what the input itself makes of own buckets.
  __device__ void multiply_own() {
#pragma unroll 1
    for (int unit = warp_; unit < own_tiles(); unit += kWarps) {
      Sums<kPlanes, kTiles> sums;
#pragma unroll 1
      for (int chunk = 0; chunk < p_.cut.input_chunks; chunk += 2) {
        if (unit != warp_ || chunk > 0) fetch_own(unit, chunk);
        const char* const x = memory_ + p_.plan.x + chunk * kChunk;
        sums.add(own_[0], x, p_.plan.x_stride);
        if (chunk + 1 < p_.cut.input_chunks) sums.add(own_[1], x + kChunk, p_.plan.x_stride);
      }
      if (unit < own_hidden_) {
        keep_hidden(unit, sums);
      } else {
        keep_direct(unit - own_hidden_, sums);
      }
    }
  }
  __device__ void keep_hidden(int tile, const Sums<kPlanes, kTiles>& sums) const {
    const float* const scales = tails(true) + tile * kTile + lane_ / 4;
    const float* const biases = scales + p_.cut.hidden_rows;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int head = n * 4 + lane_ % 4;
      const float unit = head < p_.heads ? unit_of(small().of_query[head]) : 0.0f;
      unsigned peak = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float y = sums.whole(n, half) * (scales[8 * half] * unit) + biases[8 * half];
        const float h = y < 0.0f ? 0.0f : y;
        at<float>(p_.plan.h)[place_of(tile, n, half) + lane_] = h;
        peak = max(peak, __float_as_uint(fabsf(h)));
      }
#pragma unroll
      for (int o = 4; o < 32; o *= 2) peak = max(peak, __shfl_xor_sync(~0u, peak, o));
      if (lane_ < 4) atomicMax(&small().hidden[head], peak);
    }
  }
  __device__ void keep_direct(int tile, const Sums<kPlanes, kTiles>& sums) const {
    const float by = p_.task.net.residual ? __ldg(factor()) : 1.0f;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int head = n * 4 + lane_ % 4;
      const float unit = head < p_.heads ? unit_of(small().of_query[head]) * by : 0.0f;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        at<float>(p_.plan.scores)[place_of(tile, n, half) + lane_] = sums.whole(n, half) * unit;
    }
  }

  /// Own hidden units to bytes, against the largest of each head.
  __device__ void quantise_hidden() const {
#pragma unroll 1
    for (int i = tid_; i < own_hidden_ * kTiles * 64; i += kThreads) {
      const int group = i / 32, half = group % 2, n = group / 2 % kTiles, tile = group / 2 / kTiles;
      const int head = n * 4 + lane_ % 4, row = tile * kTile + half * 8 + lane_ / 4;
      if (head >= p_.heads) continue;
      const float inverse = inverse_of(__uint_as_float(small().hidden[head]));
      const int whole = inverse == 0.0f ? 0 : __float2int_rn(at<float>(p_.plan.h)[i] * inverse);
      signed char* const to = at<signed char>(p_.plan.h8 + 2 * head * p_.plan.h_stride + row);
      to[0] = static_cast<signed char>((whole + 128) >> 8);
      to[p_.plan.h_stride] = static_cast<signed char>(whole);
    }
  }

  /// What own hidden units make of every bucket, to the blocks that own those.
  __device__ void multiply_columns() {
    float units[kTiles];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) units[n] = unit_of(__uint_as_float(small().hidden[n * 4 + lane_ % 4]));
    Sums<kPlanes, kTiles> sums;
    int tile = first_tile_, column = 0;
#pragma unroll 1
    for (int from = 0; from < pieces_; from += kHeldColumns) {
      if (from > 0) fetch_columns(from);
#pragma unroll
      for (int i = 0; i < kHeldColumns; ++i) {
        if (from + i >= pieces_) break;
        sums.add(held_[i], memory_ + p_.plan.h8 + column * kChunk, p_.plan.h_stride);
        if (++column < columns_) continue;
        send_partial(tile, sums, units);
        sums = {}, column = 0, ++tile;
      }
    }
  }
  /// Two lanes swap a number each, so that each has two that lie side by side.
  __device__ void send_partial(int tile, const Sums<kPlanes, kTiles>& sums,
                               const float (&units)[kTiles]) const {
    const int tiles = p_.cut.bucket_rows / kTile, owner = tile / tiles, odd = lane_ % 2;
    const unsigned inbox = address_in(&inboxes().partial, owner);
    float* const to =
        at<float>(p_.plan.partial) + place_of(rank_ * tiles + tile - owner * tiles, 0, odd) + lane_ - odd;
    const unsigned target = address_in(to, owner);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float upper = sums.whole(n, 0) * units[n], lower = sums.whole(n, 1) * units[n];
      const float got = __shfl_xor_sync(~0u, odd ? upper : lower, 1);
      send(target + n * 256, odd ? make_float2(got, lower) : make_float2(upper, got), inbox);
    }
  }

  /// Scores of own buckets; with a softmax, the highest and the sum of exponentials of each eight to all
  /// blocks.
  __device__ void finish_scores() const {
    const int groups = p_.cut.bucket_rows / 8, all = senders(), next = p_.cut.bucket_rows * kHeads;
    const float* const scales = tails(false) + lane_ / 4;
#pragma unroll 1
    for (int group = warp_; group < groups; group += kWarps) {
      const float scale = scales[group * 8], bias = scales[p_.cut.bucket_rows + group * 8];
      const bool exists = rank_ * p_.cut.bucket_rows + group * 8 + lane_ / 4 < p_.task.net.buckets;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int place = place_of(group / 2, n, group % 2) + lane_;
        float* const score = at<float>(p_.plan.scores) + place;
        const float* const parts = at<float>(p_.plan.partial) + place;
        float sum = p_.cut.direct ? *score : 0.0f;
#pragma unroll 8
        for (int r = 0; r < all; ++r) sum += parts[r * next];
        sum = sum * scale + bias;
        *score = sum;
        if (!p_.task.softmax) continue;
        float highest = exists ? sum : -INFINITY;
#pragma unroll
        for (int o = 4; o < 32; o *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
        float total = exists ? __expf(sum - highest) : 0.0f;
#pragma unroll
        for (int o = 4; o < 32; o *= 2) total += __shfl_xor_sync(~0u, total, o);
        const float2* const to =
            at<float2>(p_.plan.stats) + ((rank_ * groups + group) * kTiles + n) * 4 + lane_ % 4;
#pragma unroll
        for (int other = lane_ / 4; other < kRanks; other += 8)
          send(address_in(to, other), make_float2(highest, total), address_in(&inboxes().stats, other));
      }
    }
    __syncwarp();
  }
  /// Of head lane % 4 of a four, over all buckets: the highest score and one over the sum, 0 for no say.
  __device__ float2 softmax_of(int n) const {
    const int units = kRanks * p_.cut.bucket_rows / 8;
    const float2* const stats = at<float2>(p_.plan.stats) + n * 4 + lane_ % 4;
    float highest = -INFINITY, sum = 0.0f;
#pragma unroll 8
    for (int i = lane_ / 4; i < units; i += 8) highest = fmaxf(highest, stats[i * kHeads].x);
#pragma unroll
    for (int o = 4; o < 32; o *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
#pragma unroll 8
    for (int i = lane_ / 4; i < units; i += 8) {
      const float2 one = stats[i * kHeads];
      sum += one.x == -INFINITY && !isnan(one.y) ? 0.0f : one.y * __expf(one.x - highest);
    }
#pragma unroll
    for (int o = 4; o < 32; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
    const bool says = n * 4 + lane_ % 4 < p_.heads && isfinite(highest) && sum > 0.0f;
    return make_float2(highest, says ? 1.0f / sum : 0.0f);
  }

  /// Keys by which buckets are ranked, to all blocks; 0 for those that may not be chosen.
  __device__ void share_keys() const {
    float2 softmax[kTiles] = {};
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      if (p_.task.softmax) softmax[n] = softmax_of(n);
#pragma unroll 1
    for (int group = warp_; group < p_.cut.bucket_rows / 8; group += kWarps) {
      const float* const scores = at<float>(p_.plan.scores);
      const int row = group * 8 + lane_ / 4, bucket = rank_ * p_.cut.bucket_rows + row;
      float x = 0.0f;
      if (p_.task.softmax) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const float score = scores[place_of(group / 2, n, group % 2) + lane_];
          if (softmax[n].y > 0.0f) x += __expf(score - softmax[n].x) * softmax[n].y;
        }
        x += __shfl_xor_sync(~0u, x, 1);
        x += __shfl_xor_sync(~0u, x, 2);
      } else {
        x = scores[place_of(group / 2, 0, group % 2) + lane_ / 4 * 4];
      }
      int keys = 0;
      if (bucket < p_.task.net.buckets) {
        const int* const offset = at<int>(p_.plan.offsets) + bucket;
        keys = offset[1] - offset[0] + at<int>(p_.plan.unlisted)[row];
      }
      if (p_.task.rank != BucketRank::mass) {
        const auto size = static_cast<float>(max(keys, 1));
        x = __fdiv_rn(x, p_.task.rank == BucketRank::per_key ? size : __fsqrt_rn(size));
      }
      const unsigned bits = __float_as_uint(x + 0.0f);  // one zero
      const unsigned key = keys == 0 || isnan(x) ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
#pragma unroll
      for (int other = lane_ % 4; other < kRanks; other += 4)
        send(address_in(at<unsigned>(p_.plan.keys) + bucket, other), key, address_in(&inboxes().keys, other));
    }
    __syncwarp();
  }

  /// Buckets that may be among the best: in every warp's share of the keys as many threads as its part of
  /// the wanted ones hold a key that is no less than some number, so that no key below the least of these
  /// numbers is among the best. The order of the candidates does not matter.
  __device__ void find_candidates() const {
    const uint4* const keys = at<uint4>(p_.plan.keys);
    const int fours = kRanks * p_.cut.bucket_rows / 4, wanted = (p_.most + kWarps - 1) / kWarps;
    unsigned highest = 0;
#pragma unroll 1
    for (int i = tid_; i < fours; i += kThreads) {
      const uint4 some = keys[i];
      highest = max(max(highest, max(some.x, some.y)), max(some.z, some.w));
    }
    unsigned nth = 0;
#pragma unroll 1
    for (int i = 0; i < wanted && wanted <= 32; ++i) {
      nth = __reduce_max_sync(~0u, highest);
      const unsigned holders = __ballot_sync(~0u, highest == nth);
      if (lane_ == __ffs(static_cast<int>(holders)) - 1) highest = 0;
    }
    if (lane_ == 0) small().least[warp_] = nth;
    __syncthreads();
    const unsigned bar = max(__reduce_min_sync(~0u, small().least[lane_ % kWarps]), 1u);  // 0 is no candidate
    const int* const offsets = at<int>(p_.plan.offsets);
#pragma unroll 1
    for (int first = warp_ * 32; first < fours; first += kThreads) {
      const int four = first + lane_;
      const uint4 some = four < fours ? keys[four] : uint4{};
      const unsigned key[4] = {some.x, some.y, some.z, some.w};
      int own = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) own += key[e] >= bar ? 1 : 0;
      int place = own == 0 ? 0 : atomicAdd(&small().candidates, own);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (key[e] < bar) continue;
        const int bucket = four * 4 + e, from = offsets[bucket];
        at<uint4>(p_.plan.found)[place++] =
            make_uint4(key[e], static_cast<unsigned>(bucket),
                       static_cast<unsigned>(offsets[bucket + 1] - from), static_cast<unsigned>(from));
      }
    }
  }
  /// Where the rows of each of the best begin in the list: behind those of all that go before it. Of equal
  /// keys the higher bucket goes first.
  __device__ void rank_candidates() const {
    constexpr int kSharers = 2;  // threads that rank one bucket
    const uint4* const found = at<uint4>(p_.plan.found);
    const int count = small().candidates, part = tid_ % kSharers;
#pragma unroll 1
    for (int first = 0; first < count; first += kThreads / kSharers) {
      const int own = first + tid_ / kSharers;
      const uint4 mine = own < count ? found[own] : uint4{};
      int above = 0, before = 0;
#pragma unroll 4
      for (int i = part; i < count; i += kSharers) {
        const uint4 other = found[i];
        const bool is = other.x > mine.x || (other.x == mine.x && other.y > mine.y);
        above += is ? 1 : 0, before += is ? static_cast<int>(other.z) : 0;
      }
      above += __shfl_xor_sync(~0u, above, 1);
      before += __shfl_xor_sync(~0u, before, 1);
      if (part != 0 || own >= count || above >= p_.most) continue;
      at<int>(p_.plan.starts)[above] = before;
      at<int>(p_.plan.shifts)[above] = static_cast<int>(mine.w) - before;
      if (above == min(count, p_.most) - 1) small().rows = before + static_cast<int>(mine.z);
      atomicOr(at<unsigned>(p_.plan.map) + mine.y / 32, 1u << mine.y % 32);
    }
  }

  __device__ void list_rows() const {
    const BucketTables& tables = p_.task.tables;
    const int* const starts = at<int>(p_.plan.starts);
    const std::int64_t list = std::int64_t{query_} * p_.queries.layout.kv_heads + kv_head_;
    std::int32_t* const to = p_.task.rows + list * p_.task.capacity;
    const std::int32_t* const from = tables.rows + place_ * tables.max_tokens;
    const int rows = small().rows, end = static_cast<int>(min(std::int64_t{rows}, p_.task.capacity));
    // The last block has more to do where keys are behind the lists.
    const int sharers = far_end() > listed_ ? kRanks - 1 : kRanks;
    if (rank_ < sharers) {
      const int top = 1 << (31 - __clz(p_.most));
      copy_rows(starts, from, to, top, end, sharers);
    }
    if (rank_ == kRanks - 1) add_unlisted(rows, to, list);
  }
  __device__ void copy_rows(const int* starts, const std::int32_t* from, std::int32_t* to, int top, int end,
                            int sharers) const {
    constexpr int kAtOnce = 2;
    const int step = sharers * kThreads;
#pragma unroll 1
    for (int first = rank_ * kThreads + tid_; first < end; first += kAtOnce * step) {
      int low[kAtOnce] = {}, row[kAtOnce];
#pragma unroll 1
      for (int s = top; s > 0; s /= 2) {  // the last bucket that starts at or before the place
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          const int next = low[u] + s;
          if (next < p_.most && starts[next] <= first + u * step) low[u] = next;
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int i = first + u * step;
        if (i < end) row[u] = __ldg(from + i + at<int>(p_.plan.shifts)[low[u]]);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
        if (first + u * step < end) to[first + u * step] = row[u];
    }
  }

  /// Keys [listed, far_end) in chosen buckets, by their labels: a warp takes 32 neighbours, eight times in a
  /// stretch.
  __device__ void add_unlisted(int count, std::int32_t* to, std::int64_t list) const {
    __shared__ int sums[kHeldLabels * kWarps];
    const std::int64_t end = far_end();
    const unsigned* const map = at<unsigned>(p_.plan.map);
#pragma unroll 1
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
#pragma unroll 1
      for (int i = 0; i < kHeldLabels; ++i) {
        int place = count + total;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          if (w < warp_) place += sums[i * kWarps + w];
          total += sums[i * kWarps + w];
        }
        unsigned own = in[0];
#pragma unroll
        for (int j = 1; j < kHeldLabels; ++j) own = i == j ? in[j] : own;
        place += __popc(own & ((1u << lane_) - 1));
        if ((own >> lane_ & 1) != 0 && place < p_.task.capacity)
          to[place] = static_cast<std::int32_t>(from) + i * kThreads + tid_;
      }
      count += total;
      __syncthreads();
    }
    if (tid_ == 0) p_.task.counts[list] = static_cast<int>(min(std::int64_t{count}, p_.task.capacity));
  }

  const Params& p_;
  char* const memory_;
  const int rank_, kv_head_, query_, tid_, lane_, warp_;
  const std::byte* net_ = nullptr;  ///< the network of this head
  QueryToken token_;
  int own_hidden_ = 0, own_buckets_ = 0;           ///< tiles of this block
  int columns_ = 0, first_tile_ = 0, pieces_ = 0;  ///< chunks of own hidden units; of this warp
  Piece<kPlanes> own_[2], held_[kHeldColumns];
  std::int64_t place_ = 0;  ///< of this sequence and KV head in the tables
  std::int32_t listed_ = 0;
  int held_labels_[kHeldLabels];  ///< of this thread's keys behind the lists, -1: no far key
};

template <int kPlanes, int kTiles, int kRanks>
__global__ void __launch_bounds__(kThreads, kRanks == 16 ? 2 : 1)
    choose_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  Chooser<kPlanes, kTiles, kRanks>(p, memory).run();
#endif
}

Params params_of(const BucketChoiceTask& task, const Queries& queries, int group, int ranks) {
  const int heads = task.softmax ? group : 1;
  const Cut cut(task.net, ranks);
  return {.task = task,
          .queries = queries,
          .cut = cut,
          .plan = Plan(task.net, cut, heads, task.probes, ranks),
          .group = group,
          .heads = heads,
          .most = std::min(task.probes, task.net.buckets)};
}

template <int kPlanes, int kTiles, int kRanks>
void launch(const Params& p, StreamHandle stream) {
  const auto kernel = choose_kernel<kPlanes, kTiles, kRanks>;
  prepare_clusters(kernel, p.plan.total);
  const dim3 grid(kRanks, static_cast<unsigned>(p.queries.layout.kv_heads),
                  static_cast<unsigned>(p.queries.count));
  EarlyLaunch(grid, kThreads, p.plan.total, kRanks, stream)(kernel, p);
}

/// By the KV heads and the GPU alone: sums of another cut differ in their last bits, and a choice must not
/// depend on how many queries come together.
template <int kPlanes, int kTiles>
void launch_for_kv_heads(const BucketChoiceTask& task, const Queries& queries, int group,
                         StreamHandle stream) {
  static const bool sixteen = can_place(choose_kernel<kPlanes, kTiles, 16>, 16, kThreads, kBytesOfTwo - 1024);
  if (sixteen && queries.layout.kv_heads <= kFewClusters) {
    const Params p = params_of(task, queries, group, 16);
    if (p.plan.total + 1024 <= kBytesOfTwo) return launch<kPlanes, kTiles, 16>(p, stream);
  }
  launch<kPlanes, kTiles, 8>(params_of(task, queries, group, 8), stream);
}

template <int kPlanes>
void launch_for_heads(const BucketChoiceTask& task, const Queries& queries, StreamHandle stream) {
  const int group = queries.query_heads / queries.layout.kv_heads, heads = task.softmax ? group : 1;
  if (heads <= 4) return launch_for_kv_heads<kPlanes, 1>(task, queries, group, stream);
  if (heads <= 8) return launch_for_kv_heads<kPlanes, 2>(task, queries, group, stream);
  launch_for_kv_heads<kPlanes, 4>(task, queries, group, stream);
}

}  // namespace

bool can_choose_buckets() {
  return has_clusters();
}

std::int64_t bucket_choice_shared_bytes(const BucketChoiceTask& task, int group) {
  return std::max(params_of(task, {}, group, 8).plan.total, params_of(task, {}, group, 16).plan.total);
}

bool fits_bucket_choice(const BucketChoiceTask& task, int group) {
  int device = 0, most = 0;
  LODE_CUDA(cudaGetDevice(&device));
  LODE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bucket_choice_shared_bytes(task, group) + 4096 <= most;
}

void choose_buckets(const BucketChoiceTask& task, const Queries& queries, StreamHandle stream) {
  if (queries.count == 0) return;
  return task.net.planes == 2 ? launch_for_heads<2>(task, queries, stream)
                              : launch_for_heads<1>(task, queries, stream);
}

}  // namespace lode::cuda
