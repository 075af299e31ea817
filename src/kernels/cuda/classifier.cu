// SPDX-License-Identifier: Apache-2.0
// Work map: a cluster of kRanks blocks for each (KV head, query token). Each block owns a share of the rows
// of both layers: it reads those weights before it waits for the queries, which the launch before this one
// makes.
//
//   x (16-bit integers) -> W1 -> relu -> all blocks have h -> W2 -> all blocks have the scores
//   -> every block: softmax over the buckets of each head, summed over heads
//   -> each block ranks its own buckets against all -> all blocks have the chosen ones
//   -> each block copies its share of their rows; the last one adds the keys that are not in lists yet
//
// Products are of integers (mma.m16n8k32.s8), so sums are exact in any order: the two bytes of an input are
// two columns of the matrix, the two bytes of a weight two planes.
#include <cooperative_groups.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/classifier.h"

namespace lode::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kRanks = 16;
constexpr int kChunk = 64;         // columns of a piece of weights
constexpr float kMost = 32639.0f;  // 127 * 256 + 127: what two signed bytes hold

struct Params {
  BucketChoiceTask task;
  Queries queries;
  int group = 0, heads = 0;  ///< query heads of a KV head; inputs of the network: as many, or 1
};

/// Parts of a block's shared memory, in bytes from its start.
struct Plan {
  int q = 0, hidden = 0, scores = 0, bytes8 = 0, sums = 0, own = 0, keys = 0, offsets = 0, chosen = 0,
      starts = 0, map = 0, total = 0;
  int stride = 0;                        // of a column of bytes8
  int hidden_rows = 0, bucket_rows = 0;  // of one block

  __host__ __device__ Plan(const NetLayout& net, int heads, int probes) {
    const int columns = heads <= 4 ? 8 : heads <= 8 ? 16 : 32;
    const int in = NetLayout::padded_columns(net.inputs), mid = NetLayout::padded_columns(net.hidden);
    const int buckets = NetLayout::padded_rows(net.buckets);
    hidden_rows = (NetLayout::padded_rows(net.hidden) / 16 + kRanks - 1) / kRanks * 16;
    bucket_rows = (buckets / 16 + kRanks - 1) / kRanks * 16;
    const int most_rows = hidden_rows > bucket_rows ? hidden_rows : bucket_rows;
    stride = (in > mid ? in : mid) + 64;
    const int room = kRanks * bucket_rows;
    int at = 0;
    const auto take = [&](int bytes) {
      const int from = at;
      at += (bytes + 127) / 128 * 128;
      return from;
    };
    q = take(heads * in * 4);
    hidden = take(heads * (mid > kRanks * hidden_rows ? mid : kRanks * hidden_rows) * 4);
    scores = take(heads * room * 4);
    bytes8 = take(columns * stride);
    sums = take(net.planes * most_rows * columns * 4);
    own = take(most_rows * heads * 4);
    keys = take(room * 4);
    offsets = take((net.buckets + 1) * 4);
    const int most = probes < net.buckets ? probes : net.buckets;
    chosen = take(most * 4);
    starts = take((most + 1) * 4);
    map = take((net.buckets + 31) / 32 * 4);
    total = at;
  }
};

__device__ __forceinline__ void multiply(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                         unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// A block's share of one layer: whole tiles of 16 rows, cut into pieces of kChunk columns that the warps
/// take in stretches.
template <int kPlanes>
struct Share {
  static constexpr int kHeld = 8 / kPlanes;        // pieces whose weights a warp has on the way at once
  const uint4* weights = nullptr;                  // of this block's first tile
  int chunks = 0, pieces = 0, begin = 0, end = 0;  // of a tile; of the block; of this warp
  uint4 held[kHeld][kPlanes][2];

  __device__ Share(const std::byte* from, int rows, int columns, int rank, int rows_of_rank) {
    chunks = columns / kChunk;
    const int first = rank * rows_of_rank / 16, last = min(rows / 16, first + rows_of_rank / 16);
    weights = reinterpret_cast<const uint4*>(from) + std::int64_t{first} * chunks * kPlanes * 64;
    pieces = max(0, last - first) * chunks;
    const int warp = static_cast<int>(threadIdx.x) / 32, each = (pieces + kWarps - 1) / kWarps;
    begin = min(pieces, warp * each);
    end = min(pieces, begin + each);
  }
  __device__ void fetch(int from) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (from + i >= end) continue;
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
          held[i][plane][half] =
              __ldg(weights + (std::int64_t{from + i} * kPlanes + plane) * 64 + half * 32 + lane);
      }
    }
  }
  /// Adds the products with the columns in `x` to `sums` [planes][rows][columns].
  template <int kTiles>
  __device__ void multiply_into(const signed char* x, int stride, int rows, int* sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
    int c[kPlanes][kTiles][4] = {};
    for (int from = begin; from < end; from += kHeld) {
      if (from > begin) fetch(from);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int piece = from + i;
        if (piece >= end) break;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4 b =
              *reinterpret_cast<const uint4*>(x + (n * 8 + g) * stride + piece % chunks * kChunk + t * 16);
#pragma unroll
          for (int plane = 0; plane < kPlanes; ++plane) {
            const uint4 low = held[i][plane][0], high = held[i][plane][1];
            multiply(c[plane][n], low.x, high.x, low.y, high.y, b.x, b.y);
            multiply(c[plane][n], low.z, high.z, low.w, high.w, b.z, b.w);
          }
        }
        if (piece + 1 < end && (piece + 1) % chunks != 0) continue;
        const int row = piece / chunks * 16 + g;
#pragma unroll
        for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              atomicAdd(sums + ((plane * rows + row + e / 2 * 8) * kTiles + n) * 8 + 2 * t + e % 2,
                        c[plane][n][e]);
              c[plane][n][e] = 0;
            }
          }
        }
      }
    }
  }
};

template <int kPlanes, int kTiles>
class Chooser {
 public:
  __device__ Chooser(const Params& params, char* memory)
      : p_(params),
        plan_(params.task.net, params.heads, params.task.probes),
        memory_(memory),
        cluster_(cooperative_groups::this_cluster()),
        rank_(static_cast<int>(blockIdx.x)),
        kv_head_(static_cast<int>(blockIdx.y)),
        query_(static_cast<int>(blockIdx.z)) {}

  __device__ void run() {
    const NetLayout& net = p_.task.net;
    const std::byte* const mine = p_.task.nets + kv_head_ * net.bytes();
    const int tid = static_cast<int>(threadIdx.x);
    const int in = NetLayout::padded_columns(net.inputs), mid = NetLayout::padded_columns(net.hidden);
    const int rows1 = NetLayout::padded_rows(net.hidden), rows2 = NetLayout::padded_rows(net.buckets);
    const std::byte* const output = mine + net.output_offset();
    Share<kPlanes> first(mine, net.hidden > 0 ? rows1 : 0, in, rank_, plan_.hidden_rows);
    Share<kPlanes> second(output, rows2, net.hidden > 0 ? mid : in, rank_, plan_.bucket_rows);
    first.fetch(first.begin);
    second.fetch(second.begin);
    auto all_have_begun = cluster_.barrier_arrive();  // others write here after that
    const int* const offsets = p_.task.tables.offsets;
    clear(bytes8_words(), reinterpret_cast<int*>(memory_ + plan_.bytes8));
    clear_sums();
    const int most = min(p_.task.probes, net.buckets);
    for (int i = tid; i < most; i += kThreads) at<int>(plan_.chosen)[i] = -1;
    for (int i = tid; i < (net.buckets + 31) / 32; i += kThreads) at<unsigned>(plan_.map)[i] = 0;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    token_ = p_.queries.tokens[query_];
    place_ = std::int64_t{token_.sequence} * p_.queries.layout.kv_heads + kv_head_;
    for (int i = tid; i <= net.buckets; i += kThreads)
      at<int>(plan_.offsets)[i] = offsets[place_ * (net.buckets + 1) + i];
    for (int i = tid; i < net.buckets; i += kThreads)  // until the same thread puts the bucket's key there
      at<int>(plan_.keys)[i] = p_.task.tables.firsts[place_ * net.buckets + i];
    take_queries(in);
    quantise(at<float>(plan_.q), in);
    if (net.hidden > 0) {
      first.template multiply_into<kTiles>(at<signed char>(plan_.bytes8), plan_.stride, plan_.hidden_rows,
                                           at<int>(plan_.sums));
      __syncthreads();
      finish_layer(mine + net.weight_bytes(net.hidden, net.inputs), rows1, plan_.hidden_rows, true);
    }
    cluster_.barrier_wait(std::move(all_have_begun));
    if (net.hidden > 0) {
      share(plan_.hidden, max(mid, kRanks * plan_.hidden_rows), plan_.hidden_rows);
      clear_sums();
      cluster_.sync();
      quantise(at<float>(plan_.hidden), mid, max(mid, kRanks * plan_.hidden_rows));
    }
    second.template multiply_into<kTiles>(at<signed char>(plan_.bytes8), plan_.stride, plan_.bucket_rows,
                                          at<int>(plan_.sums));
    __syncthreads();
    finish_layer(output + net.weight_bytes(net.buckets, net.columns_of_output()), rows2, plan_.bucket_rows,
                 false);
    share(plan_.scores, kRanks * plan_.bucket_rows, plan_.bucket_rows);
    cluster_.sync();
    rank_buckets();
    cluster_.sync();
    list_rows(most);
  }

 private:
  template <class T>
  __device__ T* at(int offset) const {
    return reinterpret_cast<T*>(memory_ + offset);
  }
  __device__ int bytes8_words() const { return kTiles * 8 * plan_.stride / 4; }
  __device__ static void clear(int words, int* from) {
    for (int i = static_cast<int>(threadIdx.x); i < words; i += kThreads) from[i] = 0;
  }
  __device__ void clear_sums() {
    const int rows = max(plan_.hidden_rows, plan_.bucket_rows);
    clear(kPlanes * rows * kTiles * 8, at<int>(plan_.sums));
  }

  __device__ void take_queries(int in) {
    const int d = p_.task.net.inputs;
    const float* const q =
        p_.task.q + (std::int64_t{query_} * p_.queries.query_heads + kv_head_ * p_.group) * d;
    for (int i = static_cast<int>(threadIdx.x); i < p_.heads * in; i += kThreads) {
      const int head = i / in, c = i % in;
      float x = 0.0f;
      if (c < d) {
        if (p_.heads == p_.group) {
          x = q[head * d + c];
        } else {
          for (int g = 0; g < p_.group; ++g) x += q[g * d + c];
        }
      }
      at<float>(plan_.q)[i] = x;
    }
    if (threadIdx.x < kMostHeads) peaks_()[threadIdx.x] = 0;
    __syncthreads();
  }

  static constexpr int kMostHeads = 4 * kTiles;
  __device__ static unsigned* peaks_() {
    __shared__ unsigned peaks[kMostHeads];
    return peaks;
  }

  /// x [heads][columns] to two bytes each, against the largest of its head. A head with a number that is not
  /// finite has no say: its scale is 0.
  __device__ void quantise(const float* x, int columns, int row_stride = 0) {
    if (row_stride == 0) row_stride = columns;
    unsigned* const peaks = peaks_();
    const int quads = columns / 4;  // a multiple of 32: a warp is within one head
    for (int i = static_cast<int>(threadIdx.x); i < p_.heads * quads; i += kThreads) {
      const float4 f = *reinterpret_cast<const float4*>(x + i / quads * row_stride + i % quads * 4);
      const unsigned most = max(max(__float_as_uint(fabsf(f.x)), __float_as_uint(fabsf(f.y))),
                                max(__float_as_uint(fabsf(f.z)), __float_as_uint(fabsf(f.w))));
      const unsigned all = __reduce_max_sync(~0u, most);
      if (threadIdx.x % 32 == 0) atomicMax(&peaks[i / quads], all);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < p_.heads * quads; i += kThreads) {
      const int head = i / quads, c = i % quads * 4;
      const float peak = __uint_as_float(peaks[head]);
      const float inverse = peak > 0.0f && peak < INFINITY ? kMost / peak : 0.0f;
      const float4 f = *reinterpret_cast<const float4*>(x + head * row_stride + c);
      const float values[4] = {f.x, f.y, f.z, f.w};
      unsigned high = 0, low = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int whole = inverse == 0.0f ? 0 : __float2int_rn(values[e] * inverse);
        const int upper = (whole + 128) >> 8;
        high |= static_cast<unsigned>(upper & 255) << 8 * e;
        low |= static_cast<unsigned>((whole - upper * 256) & 255) << 8 * e;
      }
      *reinterpret_cast<unsigned*>(memory_ + plan_.bytes8 + 2 * head * plan_.stride + c) = high;
      *reinterpret_cast<unsigned*>(memory_ + plan_.bytes8 + (2 * head + 1) * plan_.stride + c) = low;
    }
    __syncthreads();
  }

  /// Integer sums to own [heads][rows]: scaled, biased, and cut at 0 in the hidden layer. `tail` holds the
  /// scales, then the biases, of all rows. Clears the peaks for the next layer.
  __device__ void finish_layer(const std::byte* tail, int rows, int rows_of_rank, bool hidden) {
    const float* const scales = reinterpret_cast<const float*>(tail);
    unsigned* const peaks = peaks_();
    const int* const sums = at<int>(plan_.sums);
    for (int i = static_cast<int>(threadIdx.x); i < rows_of_rank * p_.heads; i += kThreads) {
      const int head = i / rows_of_rank, row = i % rows_of_rank, all = rank_ * rows_of_rank + row;
      const float peak = __uint_as_float(peaks[head]);
      float y = 0.0f;
      if (all < rows) {
        const auto sum = [&](int plane, int part) {
          return static_cast<float>(sums[(plane * rows_of_rank + row) * kTiles * 8 + 2 * head + part]);
        };
        float whole = sum(0, 0) * 256.0f + sum(0, 1);
        if constexpr (kPlanes == 2) whole = whole * 256.0f + (sum(1, 0) * 256.0f + sum(1, 1));
        const float scale = peak < INFINITY ? peak / kMost : NAN;
        y = whole * (scales[all] * scale) + scales[rows + all];
        if (hidden) y = y < 0.0f ? 0.0f : y;
      }
      at<float>(plan_.own)[i] = y;
    }
    __syncthreads();
    if (threadIdx.x < kMostHeads) peaks[threadIdx.x] = 0;
  }

  /// own [heads][rows] of this block to [heads][stride] of all blocks.
  __device__ void share(int to, int stride, int rows_of_rank) {
    const int quads = rows_of_rank / 4, each = p_.heads * quads;
    for (int i = static_cast<int>(threadIdx.x); i < each * kRanks; i += kThreads) {
      const int other = i / each, head = i % each / quads, quad = i % quads;
      float* const target = cluster_.map_shared_rank(at<float>(to), static_cast<unsigned>(other));
      *reinterpret_cast<float4*>(target + head * stride + rank_ * rows_of_rank + quad * 4) =
          *reinterpret_cast<const float4*>(at<float>(plan_.own) + head * rows_of_rank + quad * 4);
    }
  }

  __device__ std::int64_t far_end() const {
    return max(p_.task.sink, std::int64_t{token_.position} + 1 - p_.task.window);
  }

  /// Keys by which buckets are ranked: unique, the bucket's number in the low bits; 0 for those that may not
  /// be chosen. Then each block finds the places of its own buckets and tells all.
  __device__ void rank_buckets() {
    const int buckets = p_.task.net.buckets, stride = kRanks * plan_.bucket_rows;
    const float* const scores = at<float>(plan_.scores);
    const int tid = static_cast<int>(threadIdx.x), lane = tid % 32, warp = tid / 32;
    __shared__ float peaks[kWarps][kMostHeads], totals[kWarps][kMostHeads];
    float peak[kMostHeads], total[kMostHeads];
    if (p_.task.softmax) {
#pragma unroll
      for (int h = 0; h < kMostHeads; ++h) {
        if (h >= p_.heads) break;
        float most = -INFINITY;
        for (int c = tid; c < buckets; c += kThreads) most = fmaxf(most, scores[h * stride + c]);
        for (int o = 16; o > 0; o /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, o));
        if (lane == 0) peaks[warp][h] = most;
      }
      __syncthreads();
#pragma unroll
      for (int h = 0; h < kMostHeads; ++h) {
        if (h >= p_.heads) break;
        float most = peaks[0][h], sum = 0.0f;
        for (int w = 1; w < kWarps; ++w) most = fmaxf(most, peaks[w][h]);
        peak[h] = most;
        for (int c = tid; c < buckets; c += kThreads) sum += __expf(scores[h * stride + c] - most);
        for (int o = 16; o > 0; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
        if (lane == 0) totals[warp][h] = sum;
      }
      __syncthreads();
#pragma unroll
      for (int h = 0; h < kMostHeads; ++h) {
        if (h >= p_.heads) break;
        float sum = totals[0][h];
        for (int w = 1; w < kWarps; ++w) sum += totals[w][h];
        total[h] = isfinite(peak[h]) && sum > 0.0f ? 1.0f / sum : 0.0f;
      }
    }
    unsigned low = 1;  // bits that hold a bucket's number
    while (low < static_cast<unsigned>(buckets)) low *= 2;
    unsigned* const keys = at<unsigned>(plan_.keys);
    for (int c = tid; c < stride; c += kThreads) {
      unsigned key = 0;
      if (c < buckets && static_cast<int>(keys[c]) < far_end()) {
        float x = 0.0f;
        if (p_.task.softmax) {
#pragma unroll
          for (int h = 0; h < kMostHeads; ++h) {
            if (h >= p_.heads) break;
            if (total[h] > 0.0f) x += __expf(scores[h * stride + c] - peak[h]) * total[h];
          }
        } else {
          x = scores[c];
        }
        const unsigned bits = __float_as_uint(x);
        key = isnan(x) ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
        key = max(key & ~(low - 1), low) | static_cast<unsigned>(c);
      }
      keys[c] = key;
    }
    __syncthreads();
    constexpr int kSharers = 4;  // threads that rank one bucket
    const int most = min(p_.task.probes, buckets), rows = plan_.bucket_rows;
    for (int i = tid; i < (rows * kSharers + 31) / 32 * 32; i += kThreads) {
      const int c = rank_ * rows + i / kSharers;
      const unsigned key = i < rows * kSharers ? keys[c] : 0;
      int above = 0;
      for (int j = i % kSharers * 4; j < stride; j += kSharers * 4) {
        const uint4 others = *reinterpret_cast<const uint4*>(keys + j);
        above += (others.x > key) + (others.y > key) + (others.z > key) + (others.w > key);
      }
      above += __shfl_xor_sync(~0u, above, 1);
      above += __shfl_xor_sync(~0u, above, 2);
      if (key == 0 || above >= most) continue;
      for (int other = i % kSharers; other < kRanks; other += kSharers)
        cluster_.map_shared_rank(at<int>(plan_.chosen), static_cast<unsigned>(other))[above] = c;
    }
  }

  /// Sum over the threads before this one; `total` over all.
  __device__ int before(int mine, int* total) {
    __shared__ int sums[kWarps];
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    int up_to = mine;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const int other = __shfl_up_sync(~0u, up_to, o);
      if (lane >= o) up_to += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
    int earlier = 0, all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) earlier += sums[w];
      all += sums[w];
    }
    *total = all;
    return earlier + up_to - mine;
  }

  __device__ void list_rows(int most) {
    const BucketTables& tables = p_.task.tables;
    const int* const offsets = at<int>(plan_.offsets);
    const int* const chosen = at<int>(plan_.chosen);
    int* const starts = at<int>(plan_.starts);
    const int tid = static_cast<int>(threadIdx.x);
    int listed = 0;
    for (int from = 0; from < most; from += kThreads) {
      const int bucket = from + tid < most ? chosen[from + tid] : -1;
      int total;
      const int start = before(bucket < 0 ? 0 : offsets[bucket + 1] - offsets[bucket], &total);
      if (from + tid < most) starts[from + tid] = listed + start;
      listed += total;
    }
    if (tid == 0) starts[most] = listed;
    __syncthreads();
    const std::int64_t list = std::int64_t{query_} * p_.queries.layout.kv_heads + kv_head_;
    std::int32_t* const to = p_.task.rows + list * p_.task.capacity;
    const std::int32_t* const from = tables.rows + place_ * tables.max_tokens;
    const int end = static_cast<int>(min(std::int64_t{listed}, p_.task.capacity));
    for (int i = rank_ * kThreads + tid; i < end; i += kRanks * kThreads) {
      int low = 0, high = most;  // the last bucket that starts at or before i
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
    if (rank_ == kRanks - 1) add_unlisted(most, listed, to, list);
  }

  /// Keys [listed, far_end) in chosen buckets, by their labels: eight a thread.
  __device__ void add_unlisted(int most, int count, std::int32_t* to, std::int64_t list) {
    const BucketTables& tables = p_.task.tables;
    const int tid = static_cast<int>(threadIdx.x);
    unsigned* const map = at<unsigned>(plan_.map);
    for (int i = tid; i < most; i += kThreads) {
      const int bucket = at<int>(plan_.chosen)[i];
      if (bucket >= 0) atomicOr(&map[bucket / 32], 1u << bucket % 32);
    }
    __syncthreads();
    const std::uint16_t* const labels = tables.labels + place_ * tables.max_tokens;
    const std::int64_t end = far_end();
    constexpr int kEach = 8;
    for (std::int64_t at = tables.listed[token_.sequence]; at < end; at += kThreads * kEach) {
      const std::int64_t mine = at + tid * kEach;
      unsigned in = 0;
      for (int e = 0; e < kEach; ++e) {
        if (mine + e >= end) break;
        const unsigned label = labels[mine + e];
        in |= (map[label / 32] >> label % 32 & 1u) << e;
      }
      int total, place = count + before(__popc(in), &total);
      for (; in != 0; in &= in - 1, ++place)
        if (place < p_.task.capacity) to[place] = static_cast<std::int32_t>(mine) + __ffs(in) - 1;
      count += total;
    }
    if (tid == 0) p_.task.counts[list] = static_cast<int>(min(std::int64_t{count}, p_.task.capacity));
  }

  const Params& p_;
  const Plan plan_;
  char* const memory_;
  const cooperative_groups::cluster_group cluster_;
  const int rank_, kv_head_, query_;
  QueryToken token_;
  std::int64_t place_ = 0;  ///< of this sequence and KV head in the tables
};

template <int kPlanes, int kTiles>
__global__ void __launch_bounds__(kThreads) choose_kernel(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  Chooser<kPlanes, kTiles>(p, memory).run();
#endif
}

template <int kPlanes, int kTiles>
void launch(const Params& p, StreamHandle stream) {
  const int shared = Plan(p.task.net, p.heads, p.task.probes).total;
  const auto kernel = choose_kernel<kPlanes, kTiles>;
  LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
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

template <int kPlanes>
void launch_for_heads(const Params& p, StreamHandle stream) {
  if (p.heads <= 4) return launch<kPlanes, 1>(p, stream);
  if (p.heads <= 8) return launch<kPlanes, 2>(p, stream);
  launch<kPlanes, 4>(p, stream);
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
                                std::span<const float> bias) {
  std::vector<std::byte> packed(static_cast<std::size_t>(layout.bytes()));
  if (layout.hidden > 0)
    pack(layout, hidden_weight, hidden_bias, layout.hidden, layout.inputs, packed.data());
  pack(layout, output_weight, bias, layout.buckets, layout.columns_of_output(),
       packed.data() + layout.output_offset());
  return packed;
}

std::int64_t bucket_choice_shared_bytes(const BucketChoiceTask& task, int group) {
  return Plan(task.net, task.softmax ? group : 1, task.probes).total;
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
