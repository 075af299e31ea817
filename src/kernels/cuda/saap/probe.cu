// SPDX-License-Identifier: Apache-2.0
// Work map: a cluster of blocks for each (KV head, query token). Each block owns hidden units, with their
// rows of W1 and their columns of W2, and buckets. It asks for those weights, and for what it needs of the
// tables, before it waits for the queries, which the launch before this one makes (their places must be
// older). Blocks exchange no more than each must know:
//
//   x -> own rows of W1 -> relu -> own columns of W2 -> what own units make of each bucket, to its block
//   -> summed there, W3 x added: scores -> all have each other's softmax sums
//   -> all have the keys by which buckets are ranked; each ranks its own, says where the lists of the chosen
//      ones lie, and lists what keys of them are not in lists yet
//
// They wait for messages (cta_cluster_mailbox.cuh), never for one another.
//
// Products are of integers (mma.m16n8k32.s8): inputs of 16 bits, against the largest that the block has, as
// two columns of bytes; weights of one byte or two. A block's part of a sum is exact, parts are added in the
// order of the blocks. Everything here runs once, so that what it costs is fetching instructions, some seven
// clocks each: what the host can work out it does, and loops are unrolled only where latency asks for it. One
// file, because the phases share what a block holds.
#include <algorithm>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/cta_cluster_mailbox.cuh"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/device/scan.cuh"
#include "kernels/cuda/saap/probe_parts.cuh"

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

/// Four bytes of memory to the block's, without waiting.
__device__ __forceinline__ void fetch_word(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_fetches() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/// `kMany`: for more than 1,024 buckets and no hidden layer; a kernel of its own, so that the others' code stays short.
template <int kPlanes, int kTiles, int kRanks, bool kMany>
class BucketProbe {
 public:
  __device__ BucketProbe(const Params& params, char* memory)
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
    if constexpr (kMany) {
      fetch_more_own();
    } else {
      columns_ == 1 ? fetch_columns<true>(0) : fetch_columns<false>(0);
    }
    if (!deep) prefetch_own();
    if (tid_ == 0) open_inboxes();
    __syncwarp();
    arrive_in_cluster();  // others write here after that
    clear_memory();
    fetch_offsets();
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    take_queries();
    multiply_own();
    fetch_labels();
    wait_for_cluster();
    if (deep) {
      __syncthreads();
      quantise_hidden();
      __syncthreads();
      columns_ == 1 ? multiply_columns<true>() : multiply_columns<false>();
      send_made();
    }
    if (!deep) __syncthreads();  // what the input made of buckets is read by other warps
    count_unlisted();
    wait_for_fetches();
    if (deep) wait_for(&small().partial);
    finish_scores();
    __syncthreads();
    if (p_.task.softmax) {
      share_stats();
      wait_for(&small().stats);
    }
    share_keys();
    wait_for(&small().keys);
    find_bar();
    __syncthreads();
    rank_own();
    __syncthreads();
    list_unlisted();
  }

 private:
  using Weights = Piece<kPlanes>;
  static constexpr int kHeads = 4 * kTiles, kHeldColumns = 8 / kPlanes;
  struct Small {
    float of_query[kHeads];   ///< largest number of the input
    unsigned hidden[kHeads];  ///< of this block's hidden units
    float4 units[kTiles];     ///< by which sums of their bytes are multiplied
    unsigned least[kWarps];
    int chosen_unlisted;             ///< keys of own chosen buckets
    int best_count, own_best_count;  ///< buckets that may be among the best; own ones
    Inbox scales, partial, stats, keys;
  };
  __device__ static Small& small() {
    __shared__ Small small;
    return small;
  }

  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  __device__ const float* factor() const { return reinterpret_cast<const float*>(net_ + p_.cut.factor); }
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
  /// And asks for scales and biases.
  __device__ void open_inboxes() const {
    Small& in = small();
    open_inbox(&in.scales), open_inbox(&in.partial), open_inbox(&in.stats), open_inbox(&in.keys);
    publish_inboxes();
    const int rows_1 = own_hidden_ * kTile, rows_2 = own_buckets_ * kTile;
    expect(&in.scales, static_cast<unsigned>(rows_1 + rows_2) * 8);
    expect(&in.partial, static_cast<unsigned>(p_.cut.senders * own_buckets_ * kTiles * 256));
    expect(&in.stats, static_cast<unsigned>(kRanks * kHeads * 8));
    expect(&in.keys, static_cast<unsigned>(kRanks * p_.cut.bucket_rows * 4));
    const auto take = [&](int place, std::int64_t tails, int rows, int each, int tiles) {
      if (rows == 0) return;
      const auto* const from = reinterpret_cast<const float*>(net_ + tails) + rank_ * each;
      send_from_memory(at<float>(place), from, static_cast<unsigned>(rows) * 4, &small().scales);
      send_from_memory(at<float>(place) + each, from + tiles * kTile, static_cast<unsigned>(rows) * 4,
                       &small().scales);
    };
    take(p_.plan.scales_1, p_.cut.tails_1, rows_1, p_.cut.hidden_rows, p_.cut.hidden_tiles);
    take(p_.plan.scales_2, p_.cut.tails_2, rows_2, p_.cut.bucket_rows, p_.cut.bucket_tiles);
    small().chosen_unlisted = small().best_count = small().own_best_count = 0;
  }

  /// Tiles of rows that this block multiplies with the input: those of W1, then those of W3.
  __device__ int own_tiles() const { return own_hidden_ + (p_.cut.direct ? own_buckets_ : 0); }
  /// Two chunks of one of them.
  __device__ void fetch_own(int unit, int chunk) {
    if (unit >= own_tiles()) return;
    const bool hidden = unit < own_hidden_;
    const int tile = hidden ? rank_ * (p_.cut.hidden_rows / kTile) + unit
                            : rank_ * (p_.cut.bucket_rows / kTile) + unit - own_hidden_;
    const auto* const from =
        reinterpret_cast<const uint4*>(net_ + (hidden ? 0 : p_.cut.output)) + lane_ +
        (hidden ? tile * p_.cut.stride_1 : tile * p_.cut.stride_2 + p_.cut.direct_chunk) * Weights::kFours;
    own_[0].fetch(from + chunk * Weights::kFours);
    if (chunk + 1 < p_.cut.input_chunks) own_[1].fetch(from + (chunk + 1) * Weights::kFours);
  }
  /// Whether warps hold more than one tile of own buckets in registers, where columns would be.
  __device__ bool holds_more() const { return kMany && p_.cut.input_chunks == 2; }
  /// The tiles behind the first.
  __device__ void fetch_more_own() {
    if (!holds_more()) return;
    const auto* const from = reinterpret_cast<const uint4*>(net_ + p_.cut.output) + lane_;
#pragma unroll
    for (int i = 0; i < kHeldColumns / 2; ++i) {
      const int unit = warp_ + (i + 1) * kWarps, tile = rank_ * (p_.cut.bucket_rows / kTile) + unit;
      if (unit >= own_buckets_) break;
      held_[2 * i].fetch(from + tile * p_.cut.stride_2 * Weights::kFours);
      held_[2 * i + 1].fetch(from + (tile * p_.cut.stride_2 + 1) * Weights::kFours);
    }
  }
  /// Rows of own buckets, towards the second-level cache: all, or those that no warp holds in registers.
  __device__ void prefetch_own() const {
    const std::int64_t tile = std::int64_t{p_.cut.stride_2} * Weights::kFours * 16;
    const std::byte* const from = net_ + p_.cut.output + rank_ * (p_.cut.bucket_rows / kTile) * tile;
    constexpr int kLine = 128;
    const int held = holds_more() ? kWarps * (1 + kHeldColumns / 2) : 0;
    const int lines = static_cast<int>(own_buckets_ * tile / kLine);
#pragma unroll 1
    for (int i = static_cast<int>(held * tile / kLine) + tid_; i < lines; i += kThreads)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + std::int64_t{i} * kLine));
  }
  /// Of this warp's tiles of all buckets, the columns of own hidden units: the next pieces, from one on.
  template <bool kOneChunk>
  __device__ void fetch_columns(int from) {
    if (from == 0) {
      const int chunk = rank_ * (p_.cut.hidden_rows / kChunk);
      next_ = reinterpret_cast<const uint4*>(net_ + p_.cut.output) + lane_ +
              (first_tile_ * p_.cut.stride_2 + chunk) * Weights::kFours;
    }
    const int step = kOneChunk ? p_.cut.stride_2 * Weights::kFours : Weights::kFours,
              over = (p_.cut.stride_2 - columns_) * Weights::kFours;  // from a tile's last to the next one's
#pragma unroll
    for (int i = 0; i < kHeldColumns; ++i) {
      if (from + i >= pieces_) break;
      held_[i].fetch(next_);
      next_ += step;
      if (!kOneChunk && ++next_column_ == columns_) next_column_ = 0, next_ += over;
    }
  }
  __device__ void fetch_offsets() {
    const BucketTables& tables = p_.task.tables;
    const int buckets = p_.task.net.buckets;
    place_ = std::int64_t{token_.sequence} * p_.queries.layout.kv_heads + kv_head_;
    listed_ = tables.listed[token_.sequence];
    const int first = rank_ * p_.cut.bucket_rows, rows = min(p_.cut.bucket_rows, buckets - first);
    const std::int32_t* const from = tables.offsets + place_ * (buckets + 1) + first;
#pragma unroll 1
    for (int i = tid_; i <= rows; i += kThreads) fetch_word(at<int>(p_.plan.offsets) + i, from + i);
  }
  __device__ void clear_memory() const {
#pragma unroll 1
    for (int i = tid_; i < p_.plan.zeros / 16; i += kThreads) at<uint4>(0)[i] = {};
    if (tid_ < kHeads) small().hidden[tid_] = 0;
  }

  __device__ std::int64_t far_end() const {
    return max(p_.task.sink, std::int64_t{token_.position} + 1 - p_.task.window);
  }
  __device__ const std::uint16_t* labels() const {
    return p_.task.tables.labels + place_ * p_.task.tables.max_tokens;
  }
  __device__ void fetch_labels() {
    const int unlisted = static_cast<int>(far_end() - listed_) - tid_;
    const std::uint16_t* const from = labels() + listed_ + tid_;
#pragma unroll
    for (int i = 0; i < kHeldLabels; ++i) held_labels_[i] = i * kThreads < unlisted ? from[i * kThreads] : -1;
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
        if (c >= d) return sum;  // d is a multiple of 4
#pragma unroll 4
        for (int g = 0; g < summed; ++g) {
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
    wait_for(&small().scales);
    __syncthreads();
  }

  /// Place of a number [tiles][kTiles][2 x 8 rows][8 rows x 4 heads].
  __device__ static int place_of(int tile, int n, int half) {
    return ((tile * kTiles + n) * 2 + half) * 32;
  }
  /// Own hidden units, and what the input itself makes of own buckets.
  __device__ void multiply_own() {
    int unit = warp_;
    if (holds_more()) {
      Columns<kTiles> low, high;
      low.take(memory_ + p_.plan.x, p_.plan.x_stride);
      high.take(memory_ + p_.plan.x + kChunk, p_.plan.x_stride);
      const auto multiply_tile = [&](const Weights& first, const Weights& second) {
        Sums<kPlanes, kTiles> sums;
        sums.add(first, low), sums.add(second, high);
        keep_direct(unit, sums);
      };
      if (unit < own_buckets_) multiply_tile(own_[0], own_[1]);
#pragma unroll
      for (int i = 0; i < kHeldColumns / 2; ++i) {
        unit += kWarps;
        if (unit >= own_buckets_) break;
        multiply_tile(held_[2 * i], held_[2 * i + 1]);
      }
      unit = warp_ + (1 + kHeldColumns / 2) * kWarps;
    }
#pragma unroll 1
    for (; unit < own_tiles(); unit += kWarps) {
      Sums<kPlanes, kTiles> sums;
#pragma unroll 1
      for (int chunk = 0; chunk < p_.cut.input_chunks; chunk += 2) {
        if (unit != warp_ || chunk > 0) fetch_own(unit, chunk);
        Columns<kTiles> x;
        x.take(memory_ + p_.plan.x + chunk * kChunk, p_.plan.x_stride);
        sums.add(own_[0], x);
        if (chunk + 1 == p_.cut.input_chunks) break;
        x.take(memory_ + p_.plan.x + (chunk + 1) * kChunk, p_.plan.x_stride);
        sums.add(own_[1], x);
      }
      if (unit < own_hidden_) {
        keep_hidden(unit, sums);
      } else {
        keep_direct(unit - own_hidden_, sums);
      }
    }
  }
  __device__ void keep_hidden(int tile, const Sums<kPlanes, kTiles>& sums) const {
    const float* const scales = at<float>(p_.plan.scales_1) + tile * kTile + lane_ / 4;
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
    if (tid_ < kHeads) (&small().units[0].x)[tid_] = unit_of(__uint_as_float(small().hidden[tid_]));
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

  /// What own hidden units make of every bucket, to the blocks that own those: by way of shared memory, so
  /// that what is unrolled is short and messages are long.
  template <bool kOneChunk>
  __device__ void multiply_columns() {
    float* to = at<float>(p_.plan.made) + place_of(first_tile_, 0, 0) + lane_;
    Sums<kPlanes, kTiles> sums;
    Columns<kTiles> x;
    x.take(memory_ + p_.plan.h8, p_.plan.h_stride);
    int column = 0;
#pragma unroll 1
    for (int from = 0; from < pieces_; from += kHeldColumns) {
      if (from > 0) fetch_columns<kOneChunk>(from);
#pragma unroll
      for (int i = 0; i < kHeldColumns; ++i) {
        if (from + i >= pieces_) break;
        sums.add(held_[i], x);
        if constexpr (!kOneChunk) {
          if (++column == columns_) column = 0;
          x.take(memory_ + p_.plan.h8 + column * kChunk, p_.plan.h_stride);
          if (column != 0) continue;
        }
#pragma unroll
        for (int n = 0; n < kTiles; ++n) to[n * 64] = sums.whole(n, 0), to[n * 64 + 32] = sums.whole(n, 1);
        sums = {}, to += kTiles * 64;
      }
    }
  }
  __device__ void send_made() const {
    __syncwarp();
    constexpr int kFours = 16 * kTiles;  // of a tile: one for each row and four heads
    if (columns_ == 0) return;
    const int tiles = p_.cut.bucket_rows / kTile, all = pieces_ / columns_ * kFours;
#pragma unroll 1
    for (int i = lane_; i < all; i += 32) {
      const int tile = first_tile_ + i / kFours, four = i % kFours,
                owner = tiles == 1
                            ? tile
                            : static_cast<int>(__umulhi(static_cast<unsigned>(tile), p_.cut.reciprocal));
      const float4 x = at<float4>(p_.plan.made)[tile * kFours + four], unit = small().units[four / 16];
      const uint4 bits = {__float_as_uint(x.x * unit.x), __float_as_uint(x.y * unit.y),
                          __float_as_uint(x.z * unit.z), __float_as_uint(x.w * unit.w)};
      const float4* const to =
          at<float4>(p_.plan.partial) + (rank_ * tiles + tile - owner * tiles) * kFours + four;
      send(address_in(to, owner), bits, address_in(&small().partial, owner));
    }
  }

  /// Scores of own buckets; with a softmax, the highest and the sum of exponentials of each eight.
  __device__ void finish_scores() const {
    const int groups = own_buckets_ * 2, all = p_.cut.senders, next = p_.cut.bucket_rows * kHeads;
    const float* const scales = at<float>(p_.plan.scales_2) + lane_ / 4;
#pragma unroll 1
    for (int group = warp_; group < groups; group += kWarps) {
      const float scale = scales[group * 8], bias = scales[p_.cut.bucket_rows + group * 8];
      const bool exists = rank_ * p_.cut.bucket_rows + group * 8 + lane_ / 4 < p_.task.net.buckets;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int place = place_of(group / 2, n, group % 2) + lane_;
        float* const score = at<float>(p_.plan.scores) + place;
        const float* part = at<float>(p_.plan.partial) + place;
        float sum = p_.cut.direct ? *score : 0.0f;
#pragma unroll 4
        for (int r = 0; r < all; ++r, part += next) sum += *part;
        sum = sum * scale + bias;
        *score = sum;
        if (!p_.task.softmax) continue;
        const float2 stats = together(exists ? make_float2(sum, 1.0f) : make_float2(-INFINITY, 0.0f));
        if (lane_ < 4) at<float2>(p_.plan.group_stats)[(group * kTiles + n) * 4 + lane_] = stats;
      }
    }
  }
  /// Highest score and sum of exponentials beside it, of all lanes with the same head. A number that is none
  /// makes a sum that is none.
  __device__ static float2 together(float2 mine) {
    float highest = mine.x;
#pragma unroll
    for (int o = 4; o < 32; o *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, o));
    float sum = mine.y == 0.0f ? 0.0f : mine.y * __expf(mine.x - highest);
#pragma unroll
    for (int o = 4; o < 32; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
    return make_float2(highest, sum);
  }
  /// The same of several units [units][kTiles][4], of four heads.
  __device__ static float2 together(const float2* stats, int units, int n) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float2 own = make_float2(-INFINITY, 0.0f);
#pragma unroll 1
    for (int unit = lane / 4; unit < units; unit += 8) {
      const float2 some = stats[(unit * kTiles + n) * 4 + lane % 4];
      const float highest = fmaxf(own.x, some.x);
      own.y = (own.y == 0.0f ? 0.0f : own.y * __expf(own.x - highest)) +
              (some.y == 0.0f ? 0.0f : some.y * __expf(some.x - highest));
      own.x = highest;
    }
    return together(own);
  }
  /// Those of this block to all.
  __device__ void share_stats() const {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float2 own = together(at<float2>(p_.plan.group_stats), own_buckets_ * 2, n);
      const int other = warp_ + lane_ / 4 * kWarps;
      if (other < kRanks)
        send(address_in(at<float2>(p_.plan.stats) + (rank_ * kTiles + n) * 4 + lane_ % 4, other), own,
             address_in(&small().stats, other));
    }
    __syncwarp();
  }
  /// Of head lane % 4 of a four, over all buckets: the highest score and one over the sum, 0 for no say.
  __device__ float2 softmax_of(int n) const {
    const float2 all = together(at<float2>(p_.plan.stats), kRanks, n);
    const bool says = n * 4 + lane_ % 4 < p_.heads && isfinite(all.x) && all.y > 0.0f;
    return make_float2(all.x, says ? 1.0f / all.y : 0.0f);
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
        const int* const offset = at<int>(p_.plan.offsets) + row;
        keys = offset[1] - offset[0] + at<int>(p_.plan.unlisted)[row];
      }
      if (p_.task.rank != BucketRank::mass) {
        const auto size = static_cast<float>(max(keys, 1));
        x = __fdiv_rn(x, p_.task.rank == BucketRank::per_key ? size : __fsqrt_rn(size));
      }
      const unsigned bits = __float_as_uint(x + 0.0f);  // one zero
      const unsigned key = keys == 0 || isnan(x) ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
      // A lane has a block to tell of half of the rows.
      const int half = lane_ / 16, other = lane_ % 16;
      const auto of_row = [&](int i) { return __shfl_sync(~0u, key, half * 16 + i * 4); };
      const uint4 four = {of_row(0), of_row(1), of_row(2), of_row(3)};
      const int place = (rank_ * p_.cut.bucket_rows + group * 8) / 4 + half;
      if (other < kRanks)
        send(address_in(at<uint4>(p_.plan.keys) + place, other), four, address_in(&small().keys, other));
    }
    __syncwarp();
  }

  /// A number that no key of the best is below: in every warp's share of the keys its part of the wanted ones is no less
  /// than the warp's number, and this is the least of those. A thread keeps the highest of four parts of its keys. Of few
  /// the last is found by taking one after the other; of many, the first twelve bits of a number are enough.
  __device__ void find_bar() const {
    constexpr int kFew = 16;
    const uint4* const keys = at<uint4>(p_.plan.keys);
    const int fours = kRanks * p_.cut.bucket_rows / 4, wanted = (p_.most + kWarps - 1) / kWarps;
    uint4 highest = {};
#pragma unroll 1
    for (int i = tid_; i < fours; i += kThreads) {
      const uint4 some = keys[i];
      highest = {max(highest.x, some.x), max(highest.y, some.y), max(highest.z, some.z),
                 max(highest.w, some.w)};
    }
    unsigned bar = 0;
    if (wanted <= kFew) {
      unsigned own = max(max(highest.x, highest.y), max(highest.z, highest.w));
#pragma unroll 1
      for (int i = 0; i < wanted; ++i) {
        bar = __reduce_max_sync(~0u, own);
        const unsigned holders = __ballot_sync(~0u, own == bar);
        if (lane_ == __ffs(static_cast<int>(holders)) - 1) own = 0;
      }
    } else {
#pragma unroll 1
      for (unsigned bit = 1u << 31; bit >= 1u << 20; bit /= 2) {
        const unsigned next = bar | bit;
        const int count =
            (highest.x >= next) + (highest.y >= next) + (highest.z >= next) + (highest.w >= next);
        if (__reduce_add_sync(~0u, count) >= wanted) bar = next;
      }
    }
    if (lane_ == 0) small().least[warp_] = bar;
  }
  /// Where the lists of own buckets lie that are among the best. Where there are fewer than wanted, buckets without keys
  /// come behind those that have some.
  __device__ void rank_own() const {
    const unsigned bar = __reduce_min_sync(~0u, small().least[lane_ % kWarps]);
    if constexpr (kMany) {
      gather_best(bar);
      __syncthreads();
      if (small().best_count <= room_of_best()) return rank_among_best();
    }
    rank_among_all(bar);
  }
  /// Own buckets, spread over the warps, each beside all keys.
  __device__ void rank_among_all(unsigned bar) const {
    const unsigned* const keys = at<unsigned>(p_.plan.keys) + rank_ * p_.cut.bucket_rows;
#pragma unroll 1
    for (int first = warp_; first < p_.cut.bucket_rows; first += 32 * kWarps) {
      const int row = first + lane_ * kWarps;
      const bool may_be = row < p_.cut.bucket_rows && keys[row] >= bar;
#pragma unroll 1
      for (unsigned rest = __ballot_sync(~0u, may_be); rest != 0; rest &= rest - 1) {
        const int own = first + (__ffs(static_cast<int>(rest)) - 1) * kWarps;
        const int above = above_of_all(keys[own], rank_ * p_.cut.bucket_rows + own);
        if (lane_ == 0 && above < p_.most) place_own(own, keys[own], above);
      }
    }
  }
  /// By the whole warp: how many buckets go before one. Of equal keys the higher bucket goes first.
  __device__ int above_of_all(unsigned mine, int bucket) const {
    const uint4* const fours = at<uint4>(p_.plan.keys);
    int above = 0;
#pragma unroll 4
    for (int i = lane_; i < kRanks * p_.cut.bucket_rows / 4; i += 32) {
      const uint4 some = fours[i];
      const unsigned key[4] = {some.x, some.y, some.z, some.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) above += key[e] >= mine + (4 * i + e > bucket ? 0 : 1);
    }
    return __reduce_add_sync(~0u, above);
  }

  /// Buckets whose keys are not below the bar, each behind its key, in any order: where scores, scales and biases were (up to
  /// `partial`), which all have been read.
  __device__ uint2* best() const {
    return at<uint2>(p_.plan.scores);
  }
  __device__ int room_of_best() const {
    return (p_.plan.partial - p_.plan.scores) / 8;
  }
  /// Rows of own ones: where statistics of scores were.
  __device__ int* own_best() const {
    return at<int>(p_.plan.group_stats);
  }
  __device__ void gather_best(unsigned bar) const {
    const uint4* const fours = at<uint4>(p_.plan.keys);
    int mine = 0;
#pragma unroll 1
    for (int i = tid_; i < kRanks * p_.cut.bucket_rows / 4; i += kThreads) {
      const uint4 some = fours[i];
      mine += (some.x >= bar) + (some.y >= bar) + (some.z >= bar) + (some.w >= bar);
    }
    const int up_to = sum_up_to(mine, lane_);
    int place = lane_ == 31 ? atomicAdd(&small().best_count, up_to) : 0;
    place = __shfl_sync(~0u, place, 31) + up_to - mine;
    const int end = min(place + mine, room_of_best());
#pragma unroll 1
    for (int i = tid_; place < end; i += kThreads) {
      const uint4 some = fours[i];
      const auto put = [&](unsigned key, int bucket) {
        if (key >= bar && place < end) best()[place++] = make_uint2(key, static_cast<unsigned>(bucket));
      };
      put(some.x, 4 * i), put(some.y, 4 * i + 1), put(some.z, 4 * i + 2), put(some.w, 4 * i + 3);
    }
    const unsigned* const own = at<unsigned>(p_.plan.keys) + rank_ * p_.cut.bucket_rows;
#pragma unroll 1
    for (int row = tid_; row < p_.cut.bucket_rows; row += kThreads)
      if (own[row] >= bar) own_best()[atomicAdd(&small().own_best_count, 1)] = row;
  }
  /// Eight lanes for each own bucket that may be among the best.
  __device__ void rank_among_best() const {
    constexpr int kLanes = 8;
    const int all = small().best_count, count = small().own_best_count;
#pragma unroll 1
    for (int first = warp_ * (32 / kLanes); first < count; first += kThreads / kLanes) {
      const int at_row = first + lane_ / kLanes, row = at_row < count ? own_best()[at_row] : 0;
      const int bucket = rank_ * p_.cut.bucket_rows + row;
      const unsigned mine = at<unsigned>(p_.plan.keys)[bucket];
      int above = 0;
#pragma unroll 4
      for (int i = lane_ % kLanes; i < all; i += kLanes) {
        const uint2 one = best()[i];
        above += one.x >= mine + (static_cast<int>(one.y) > bucket ? 0 : 1);
      }
#pragma unroll
      for (int o = 1; o < kLanes; o *= 2) above += __shfl_xor_sync(~0u, above, o);
      if (lane_ % kLanes == 0 && at_row < count && above < p_.most) place_own(row, mine, above);
    }
  }
  /// The list of an own bucket to its place among all.
  __device__ void place_own(int row, unsigned key, int place) const {
    RowRun run = {};
    if (key != 0) {  // else there is no such bucket, or none with keys
      const int* const offset = at<int>(p_.plan.offsets) + row;
      run = {offset[0], offset[1] - offset[0]};
      const int unlisted = at<int>(p_.plan.unlisted)[row];
      if (unlisted > 0) {
        atomicOr(at<unsigned>(p_.plan.map) + row / 32, 1u << row % 32);
        atomicAdd(&small().chosen_unlisted, unlisted);
      }
    }
    runs()[place] = run;
  }
  __device__ RowRun* runs() const {
    return p_.task.runs + list() * (p_.most + kShares);
  }
  __device__ std::int64_t list() const {
    return std::int64_t{query_} * p_.queries.layout.kv_heads + kv_head_;
  }

  /// Keys [listed, far_end) in own chosen buckets, by their labels: stretches of so many for each thread.
  __device__ void list_unlisted() const {
    const int room = static_cast<int>(p_.task.share), first_place = rank_ * room;
    if (tid_ < kShares / kRanks) {
      const int count = tid_ == 0 ? min(small().chosen_unlisted, room) : 0;
      runs()[p_.most + tid_ * kRanks + rank_] = {first_place, count};
    }
    if (small().chosen_unlisted == 0) return;
    __shared__ int of_warps[kWarps];
    std::int32_t* const to = p_.task.more + list() * kShares * p_.task.share + first_place;
    const int unlisted = static_cast<int>(far_end() - listed_);
    int count = 0;
#pragma unroll 1
    for (int first = 0; first < unlisted; first += kThreads * kHeldLabels) {
      unsigned in = 0;
      if (first == 0) {
#pragma unroll
        for (int i = 0; i < kHeldLabels; ++i) in |= is_chosen(held_labels_[i]) << i;
      } else {
#pragma unroll 1
        for (int i = 0; i < kHeldLabels; ++i) {
          const int key = first + i * kThreads + tid_;
          in |= is_chosen(key < unlisted ? labels()[listed_ + key] : -1) << i;
        }
      }
      const int up_to = sum_up_to(__popc(in), lane_);
      if (lane_ == 31) of_warps[warp_] = up_to;
      __syncthreads();
      int place = count + up_to - __popc(in);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const int some = of_warps[w];
        place += w < warp_ ? some : 0, count += some;
      }
#pragma unroll 1
      for (unsigned rest = in; rest != 0; rest &= rest - 1, ++place) {
        const int key = first + (__ffs(static_cast<int>(rest)) - 1) * kThreads + tid_;
        if (place < room) to[place] = listed_ + key;
      }
      __syncthreads();
    }
  }
  /// 1 for a label of an own bucket that is chosen.
  __device__ unsigned is_chosen(int label) const {
    const auto row = static_cast<unsigned>(label - rank_ * p_.cut.bucket_rows);
    if (label < 0 || row >= static_cast<unsigned>(p_.cut.bucket_rows)) return 0;
    return at<unsigned>(p_.plan.map)[row / 32] >> row % 32 & 1u;
  }

  const Params& p_;
  char* const memory_;
  const int rank_, kv_head_, query_, tid_, lane_, warp_;
  const std::byte* net_ = nullptr;  ///< the network of this head
  QueryToken token_;
  int own_hidden_ = 0, own_buckets_ = 0;           ///< tiles of this block
  int columns_ = 0, first_tile_ = 0, pieces_ = 0;  ///< chunks of own hidden units; of this warp
  const uint4* next_ = nullptr;                    ///< of its pieces: the one to fetch
  int next_column_ = 0;
  Weights own_[2], held_[kHeldColumns];
  std::int64_t place_ = 0;  ///< of this sequence and KV head in the tables
  std::int32_t listed_ = 0;
  int held_labels_[kHeldLabels];  ///< of this thread's keys behind the lists, -1: no far key
};

template <int kPlanes, int kTiles, int kRanks, bool kMany>
__global__ void __launch_bounds__(kThreads, kRanks == 16 ? 2 : 1)
    choose_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  BucketProbe<kPlanes, kTiles, kRanks, kMany>(p, memory).run();
#endif
}

Params params_of(const BucketChoiceTask& task, const Queries& queries, int group, int ranks) {
  const int heads = task.softmax ? group : 1;
  const Cut cut(task.net, ranks);
  return {.task = task,
          .queries = queries,
          .cut = cut,
          .plan = Plan(task.net, cut, heads, ranks),
          .group = group,
          .heads = heads,
          .most = tabled_runs(task.probes, task.net.buckets)};
}

template <int kPlanes, int kTiles, int kRanks, bool kMany>
void launch_kernel(const Params& p, StreamHandle stream) {
  const auto kernel = choose_kernel<kPlanes, kTiles, kRanks, kMany>;
  prepare_clusters(kernel, p.plan.total);
  const dim3 grid(kRanks, static_cast<unsigned>(p.queries.layout.kv_heads),
                  static_cast<unsigned>(p.queries.count));
  EarlyLaunch(grid, kThreads, p.plan.total, kRanks, stream)(kernel, p);
}

template <int kPlanes, int kTiles, int kRanks>
void launch(const Params& p, StreamHandle stream) {
  constexpr int kFew = 1024;  // of so few, gathering the best costs more than it saves
  if constexpr (kTiles == 1) {
    if (p.task.net.hidden == 0 && p.task.net.buckets > kFew)
      return launch_kernel<kPlanes, kTiles, kRanks, true>(p, stream);
  }
  launch_kernel<kPlanes, kTiles, kRanks, false>(p, stream);
}

/// By the KV heads and the GPU alone: sums of another cut differ in their last bits, and a choice must not
/// depend on how many queries come together.
template <int kPlanes, int kTiles>
void launch_for_kv_heads(const BucketChoiceTask& task, const Queries& queries, int group,
                         StreamHandle stream) {
  static PerDevice<bool> placed;
  const bool sixteen = placed.get(
      [] { return can_place(choose_kernel<kPlanes, kTiles, 16, false>, 16, kThreads, kBytesOfTwo - 1024); });
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

RowRuns runs_of(const BucketChoiceTask& task, std::int32_t* counts, std::int64_t capacity) {
  return {.runs = task.runs,
          .count = runs_of_choice(task.probes, task.net.buckets),
          .tabled = tabled_runs(task.probes, task.net.buckets),
          .rows = task.tables.rows,
          .row_stride = task.tables.max_tokens,
          .more = task.more,
          .more_stride = kShares * task.share,
          .counts = counts,
          .capacity = capacity,
          .sink = task.sink,
          .window = task.window};
}

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
  const bool sums_fit = std::max(task.net.inputs, Cut(task.net, 8).hidden_rows) <= kMostChunks * kChunk;
  return sums_fit && bucket_choice_shared_bytes(task, group) + 4096 <= most;
}

void choose_buckets(const BucketChoiceTask& task, const Queries& queries, StreamHandle stream) {
  if (queries.count == 0) return;
  return task.net.planes == 2 ? launch_for_heads<2>(task, queries, stream)
                              : launch_for_heads<1>(task, queries, stream);
}

}  // namespace lode::cuda
