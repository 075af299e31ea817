// SPDX-License-Identifier: Apache-2.0
// Selection by signatures in one launch, and attention over what it chose where lists are short: the way of
// hamming_topk.cu for the widths that `train hash` has (128 inputs, hidden layers of 128, 32 bits).
//
// Work map: a cluster for each list, of sixteen blocks or, where there are many lists, fewer, a query head's
// networks spread over kOfHead of them. Blocks send each other what they need to know (cta_cluster_mailbox.cuh) and
// nobody waits for anything else:
//
//   weights and signatures on their way before the queries are there -> each layer's outputs to the head's
//   blocks -> the heads' bits to all -> distances, counted by level -> counts to all -> the level where the
//   list ends -> rows, to memory or to the block that will attend them (cluster_attend.cuh)
//
// A warp owns a stretch of keys until the level is known; rows are given by turns. Distances are small
// integers and rows stand in rising order, so nothing depends on timing. Clusters of sixteen leave some
// processors idle and double others' work, so long lists are attended by a launch of their own, which begins
// while rows are still written (attend_arriving.cu).
#include <cuda_fp16.h>

#include <algorithm>

#include "kernels/cuda/attend/arriving.cuh"
#include "kernels/cuda/attend/cluster_attend.cuh"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/device/scan.cuh"
#include "kernels/cuda/device/sm_count.h"
#include "kernels/cuda/hash/signatures.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma nv_diag_suppress 177  // the kernel is empty there, and what it uses is not
#endif

namespace lode::cuda {

namespace {

constexpr int kSigning = 8;  // warps of a block that sign a head
constexpr int kDim = 128, kBits = 32, kHidden = 128;
constexpr int kUnit = static_cast<int>(kSignatureUnit);  // keys that a warp measures at once, 8 a lane
constexpr int kUnitBytes = kUnit * 4;                    // of their signatures
constexpr int kLeastAhead = 2;                           // units whose signatures a warp has on the way
constexpr int kMostAttended = 6144;                      // keys of a list that its cluster attends,
constexpr int kMostOfHead = 2048;                        // and of one that is of one query head
constexpr int kUnitsAtOnce = 4;                          // that a warp turns into rows
constexpr int kMostStretches = 224;  // of so many units: distances that a block has room for

struct NearParams {
  Params attend;
  const float* q = nullptr;
  SignNets nets;
  Signatures signatures;
  const std::int32_t* budget = nullptr;
  std::int32_t *rows = nullptr, *counts = nullptr;  ///< no rows where the cluster attends them
  std::int64_t sink = 0, window = 0, capacity = 0, net_weights = 0, net_biases = 0;
  int rows_bytes = 0;  ///< of a block's part of the list
  int ahead = 0;       ///< units whose signatures a warp has on the way: kAhead, or half of it and so on
};

/// A cluster of kClusterRanks blocks of kOfBlock warps for a list of so many heads.
template <int kOfHeads, int kClusterRanks, int kOfBlock>
struct Shape {
  static constexpr int kHeads = kOfHeads, kRanks = kClusterRanks, kBlockWarps = kOfBlock,
                       kBlock = kOfBlock * 32;
  static constexpr int kBlocks = 16 / kOfBlock;                          // of a processor
  static constexpr int kPieces = kHeads >= 4 ? 16 : 4;                   // of a list that is attended here
  static constexpr int kAtOnce = kOfBlock / 8;                           // of them, by a block
  static constexpr int kOfHead = kRanks > kHeads ? kRanks / kHeads : 1;  // blocks that sign a head
  static constexpr int kHeadsOfBlock = kHeads > kRanks ? kHeads / kRanks : 1;  // that it signs
  static constexpr int kOutputs = kHidden / kOfHead / kSigning;                // of a warp
  static constexpr int kLastOutputs = kBits / kOfHead / kSigning;
  static constexpr int kAhead = kHeads == 1 ? 8 : 4;     // units on the way, where there is room for them
  static constexpr int kStep = kHeads % 2 == 0 ? 2 : 1;  // mismatches of one level
  static constexpr int kLevels = kBits * kHeads / kStep + 1;
  static constexpr int kPlanes = kHeads <= 2 ? 1 : kHeads <= 4 ? 2 : 3;
  static constexpr int kFours = (kLevels + 3) / 4;  // of levels
  static constexpr int kFoursOfLane = (kFours + 31) / 32;
  static_assert(kFours * 4 > kLevels);  // a place for what is no far key
  static_assert(kLastOutputs >= 1 && kOutputs <= 32 / kOfHead && kHeadsOfBlock * kSigning <= kOfBlock);
};

/// Sums over the warp: lane i gets that of x[i / (32 / kCount)].
template <int kCount>
__device__ __forceinline__ float transposed_sum(float (&x)[kCount]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int offset = 16;
#pragma unroll
  for (int n = kCount; n > 1; n /= 2, offset /= 2) {
    const bool upper = (lane & offset) != 0;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float given = upper ? x[i] : x[i + n / 2], kept = upper ? x[i + n / 2] : x[i];
      x[i] = kept + __shfl_xor_sync(~0u, given, offset);
    }
  }
#pragma unroll
  for (int o = 16 / kCount; o > 0; o /= 2) x[0] += __shfl_xor_sync(~0u, x[0], o);
  return x[0];
}

/// Adds bits that rows and columns of 256 have in common: to c[i] of row lane / 4 + i / 2 * 8, column
/// lane % 4 * 2 + i % 2. A lane's a are words lane % 4 + i / 2 * 4 of rows lane / 4 + i % 2 * 8, its b words
/// lane % 4 and that + 4 of column lane / 4.
__device__ __forceinline__ void add_common_bits(unsigned (&c)[4], const unsigned (&a)[4], unsigned b0,
                                                unsigned b1) {
  asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// What blocks of a cluster write into each other, and what the warps of a block share.
template <class Attend, class S, int kHiddenLayers>
struct Fixed {
  typename Attend::Received received;
  alignas(16) int counts[S::kRanks][S::kFours * 4];
  int warp_counts[S::kBlockWarps][S::kFours * 4];  ///< keys of each level
  unsigned chosen[kMostStretches];  ///< of each: keys nearer than the level, and, 16 bits higher, at it
  float activations[kHiddenLayers > 0 ? kHiddenLayers : 1][S::kHeadsOfBlock][kHidden];
  unsigned bits[S::kHeads][kBits];
  Inbox of_layer[kHiddenLayers > 0 ? kHiddenLayers : 1][S::kHeadsOfBlock], of_bits, of_counts, of_rows;
};

__device__ __forceinline__ void fetch_ahead(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
/// All but the newest `kNewer` groups of this thread's fetches have come.
template <int kNewer>
__device__ __forceinline__ void wait_for_fetched() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewer) : "memory");
}

/// Memory: Fixed, rows, then signatures on the way and distances, whose place the rings of attention take.
template <class T, class S, int kHiddenLayers, bool kAttend>
class Near {
 public:
  static constexpr int kHeads = S::kHeads, kRanks = S::kRanks, kBlock = S::kBlock,
                       kBlockWarps = S::kBlockWarps;
  using Attend = ClusterAttend<T, kDim, kHeads, kRanks, S::kPieces, S::kAtOnce>;
  using Shared = Fixed<Attend, S, kHiddenLayers>;

  __device__ Near(const NearParams& params, char* memory)
      : p_(params),
        work_(memory + sizeof(Shared) + params.rows_bytes),
        s_(*reinterpret_cast<Shared*>(memory)),
        rows_(reinterpret_cast<int*>(memory + sizeof(Shared))),
        rank_(static_cast<int>(blockIdx.x) % kRanks),
        list_of_query_(static_cast<int>(blockIdx.x) / kRanks),
        query_(static_cast<int>(blockIdx.y)),
        tid_(static_cast<int>(threadIdx.x)),
        lane_(tid_ % 32),
        warp_(tid_ / 32),
        fetched_(shared_address(work_) + warp_ * params.ahead * kUnitBytes + lane_ * 16) {}

  __device__ void run() {
    if (tid_ == 0) open_inboxes();
    __syncwarp();  // for racecheck, to which a barrier's opening is the warp's
    if (tid_ == 0) expect_messages();
    __syncwarp();
    find_keys();
    if (signs()) fetch_weights();
#pragma unroll 1
    for (int i = 0; i < p_.ahead; ++i)
      fetch_unit(fetched_ + i * kUnitBytes, codes_of(from_ + i), from_ + i < to_);
    for (int i = lane_; i < S::kFours; i += 32) reinterpret_cast<uint4*>(s_.warp_counts[warp_])[i] = {};
    end_last_stretch();
    __syncwarp();
    arrive_in_cluster();
    wait_for_predecessor();
    release_successor();
    const std::int64_t head = std::int64_t{query_} * p_.attend.queries.query_heads + list_of_query_ * kHeads;
    const float4 x = *reinterpret_cast<const float4*>(p_.q + (head + own_head()) * kDim + lane_ * 4);
    wait_for_cluster();
    if (signs()) sign(x);
    measure();
    share_counts();
    find_level();
    give_rows();
    if constexpr (kAttend) attend(head);
  }

 private:
  __device__ bool signs() const {
    return warp_ < kSigning * S::kHeadsOfBlock;
  }
  /// Of the list's heads, the one that this warp signs.
  __device__ int own_head() const {
    const int head = rank_ / S::kOfHead * S::kHeadsOfBlock + warp_ / kSigning;
    return signs() ? head : 0;
  }
  __device__ void open_inboxes() const {
    open_inbox(&s_.of_bits), open_inbox(&s_.of_counts), open_inbox(&s_.received.inbox);
#pragma unroll
    for (int i = 0; i < kHiddenLayers * S::kHeadsOfBlock; ++i) open_inbox(&s_.of_layer[0][i]);
    open_inbox(&s_.of_rows);
    publish_inboxes();
  }
  __device__ void expect_messages() const {
    expect(&s_.of_bits, kHeads * kBits * 4);
    expect(&s_.of_counts, kRanks * S::kFours * 16);
    expect(&s_.received.inbox, Attend::kMergeBytes);
#pragma unroll
    for (int i = 0; i < kHiddenLayers * S::kHeadsOfBlock; ++i) expect(&s_.of_layer[0][i], kHidden * 4);
  }

  /// This block's keys [first_, last_) and this warp's units of them.
  __device__ void find_keys() {
    token_ = p_.attend.queries.tokens[query_];
    all_ = token_.position + 1;
    begin_ = static_cast<int>(p_.sink);
    end_ = max(begin_, all_ - static_cast<int>(min(p_.window, std::int64_t{all_})));
    sink_ = min(begin_, all_);
    window_begin_ = max(sink_, all_ - static_cast<int>(min(p_.window, std::int64_t{all_})));
    const int from = begin_ / kUnit * kUnit;
    const int share = ((end_ - from + kRanks - 1) / kRanks + kUnit - 1) / kUnit * kUnit;
    first_ = min(end_, from + rank_ * share), last_ = min(end_, first_ + share);
    // Without far keys nothing is read: the sink may lie beyond what the set has room for.
    units_ = end_ > begin_ ? (last_ - first_ + kUnit - 1) / kUnit : 0;
    const int each = (units_ + kBlockWarps - 1) / kBlockWarps;
    from_ = min(units_, warp_ * each), to_ = min(units_, from_ + each);
    const int first_head = list_of_query_ * kHeads;
    const int set = p_.signatures.per_query_head ? first_head : first_head / p_.attend.group;
    const SignatureSets sets = p_.signatures.of(token_.sequence);
    codes_ = sets.codes + set * sets.capacity + first_;
  }
  __device__ unsigned char* scores_at(int key) const {
    return reinterpret_cast<unsigned char*>(work_) + kBlockWarps * p_.ahead * kUnitBytes + key;
  }
  /// Of a unit's signatures, this lane's 16 bytes of the first half.
  __device__ const std::uint32_t* codes_of(int unit) const {
    return codes_ + std::int64_t{unit} * kUnit + lane_ * 4;
  }
  /// Each lane what it will measure. Reads stay inside the set: its capacity is a multiple of the unit.
  __device__ static void fetch_unit(unsigned to, const std::uint32_t* from, bool wanted) {
    if (wanted) fetch_ahead(to, from), fetch_ahead(to + kUnitBytes / 2, from + kUnit / 2);
    asm volatile("cp.async.commit_group;");
  }

  /// Stretches are whole: behind the block's last unit nothing is near.
  __device__ void end_last_stretch() const {
    constexpr int kMost = (kUnitsAtOnce - 1) * kUnit / 4;
    static_assert(kMost <= kBlock);
    if (tid_ < kMost) reinterpret_cast<unsigned*>(scores_at(units_ * kUnit))[tid_] = S::kLevels * 0x01010101u;
  }

  /// Of a ring of so many units, or half as many and so on.
  template <int kUnits>
  __device__ void wait_for_oldest() const {
    if constexpr (kUnits > kLeastAhead) {
      if (p_.ahead != kUnits) return wait_for_oldest<kUnits / 2>();
    }
    wait_for_fetched<kUnits - 1>();
  }

  /// This warp's rows of each layer: four inputs a lane.
  __device__ void fetch_weights() {
    const int net = list_of_query_ * kHeads + own_head(), sub = rank_ % S::kOfHead;
    const __half* weights = static_cast<const __half*>(p_.nets.weights) + net * p_.net_weights;
    const float* biases = p_.nets.biases + net * p_.net_biases;
#pragma unroll
    for (int layer = 0; layer < kHiddenLayers; ++layer) {
      const int first = (sub * kSigning + warp_ % kSigning) * S::kOutputs;
#pragma unroll
      for (int o = 0; o < S::kOutputs; ++o)
        weights_[layer][o] = __ldg(reinterpret_cast<const uint2*>(weights + (first + o) * kDim) + lane_);
      biases_[layer] = __ldg(biases + first + lane_ / (32 / S::kOutputs));
      weights += kHidden * kDim, biases += kHidden;
    }
    const int first = (sub * kSigning + warp_ % kSigning) * S::kLastOutputs;
#pragma unroll
    for (int o = 0; o < S::kLastOutputs; ++o)
      last_weights_[o] = __ldg(reinterpret_cast<const uint2*>(weights + (first + o) * kDim) + lane_);
    last_bias_ = __ldg(biases + first + lane_ / (32 / S::kLastOutputs));
  }
  __device__ static float product(uint2 weights, float4 x) {
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&weights.x)),
                 b = __half22float2(*reinterpret_cast<const __half2*>(&weights.y));
    return fmaf(a.x, x.x, fmaf(a.y, x.y, fmaf(b.x, x.z, b.y * x.w)));
  }

  /// The heads' signatures to `bits`, from this block's head's input.
  __device__ void sign(float4 x) {
    const int first_rank = rank_ / S::kOfHead * S::kOfHead, sub = rank_ % S::kOfHead,
              of_block = warp_ / kSigning;
#pragma unroll
    for (int layer = 0; layer < kHiddenLayers; ++layer) {
      float sum[S::kOutputs];
#pragma unroll
      for (int o = 0; o < S::kOutputs; ++o) sum[o] = product(weights_[layer][o], x);
      float y = transposed_sum(sum) + biases_[layer];
      y = p_.nets.relu ? (y < 0.0f ? 0.0f : y) : y / (1.0f + expf(-y));
      constexpr int kLanes = 32 / S::kOutputs;  // with the same output
      const int output = (sub * kSigning + warp_ % kSigning) * S::kOutputs + lane_ / kLanes,
                to = lane_ % kLanes;
      if (to < S::kOfHead)
        send(address_in(&s_.activations[layer][of_block][output], first_rank + to), __float_as_uint(y),
             address_in(&s_.of_layer[layer][of_block], first_rank + to));
      wait_for(&s_.of_layer[layer][of_block]);
      x = *reinterpret_cast<const float4*>(&s_.activations[layer][of_block][lane_ * 4]);
    }
    float sum[S::kLastOutputs];
#pragma unroll
    for (int o = 0; o < S::kLastOutputs; ++o) sum[o] = product(last_weights_[o], x);
    const float y = transposed_sum(sum) + last_bias_;
    constexpr int kLanes = 32 / S::kLastOutputs;
    const int bit = (sub * kSigning + warp_ % kSigning) * S::kLastOutputs + lane_ / kLanes;
    for (int to = lane_ % kLanes; to < kRanks; to += kLanes)
      send(address_in(&s_.bits[own_head()][bit], to), y > 0.0f ? 1u : 0u, address_in(&s_.of_bits, to));
  }

  /// Distances of this warp's keys: kept, and counted by level.
  __device__ void measure() {
    wait_for(&s_.of_bits);
    int set = 0;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) set += static_cast<int>(s_.bits[head][lane_]);
    const int more = abs(kHeads - 2 * set) / S::kStep;
    const unsigned majority = __ballot_sync(~0u, 2 * set > kHeads);
    unsigned planes[S::kPlanes];
#pragma unroll
    for (int plane = 0; plane < S::kPlanes; ++plane) planes[plane] = __ballot_sync(~0u, more >> plane & 1);
    const Columns product = columns(majority, planes);
    const unsigned last = static_cast<unsigned>(p_.ahead - 1) * kUnitBytes;  // place of the ring
    const std::uint32_t* from = codes_of(from_ + p_.ahead);
    unsigned char* to = scores_at(from_ * kUnit + lane_ * 4);
    unsigned at = 0;  // the next unit's
    int first = first_ + from_ * kUnit;
#pragma unroll 1
    for (int left = to_ - from_; left > 0; --left) {
      wait_for_oldest<S::kAhead>();
      const uint4 raw[2] = {Attend::W::piece(fetched_ + at),
                            Attend::W::piece(fetched_ + at + kUnitBytes / 2)};
      fetch_unit(fetched_ + at, from, left > p_.ahead);
      const bool ragged = first < begin_ || first + kUnit > last_;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        measure_four(to + half * (kUnit / 2), first + half * (kUnit / 2) + lane_ * 4, raw[half], ragged,
                     product);
      at = (at + kUnitBytes) & last, from += kUnit, to += kUnit, first += kUnit;
    }
    __syncwarp();
    if (lane_ == 0) s_.warp_counts[warp_][S::kLevels] = 0;
  }
  /// What keys are compared with: the bits that most heads have, and of each plane those that count. For the
  /// matrix unit the latter are a column's word that is the lane's, and its other one.
  struct Columns {
    unsigned majority, low[S::kPlanes], high[S::kPlanes];
  };
  /// Column 2 t of the product is the first word of lane t's pair in each row, column 2 t + 1 the second: a
  /// lane gets what its own four words give.
  __device__ static Columns columns(unsigned majority, const unsigned (&planes)[S::kPlanes]) {
    Columns columns = {.majority = majority};
    const int lane = static_cast<int>(threadIdx.x) % 32, column = lane / 4;
    const bool has_own = kAttend || column / 2 == lane % 4;
#pragma unroll
    for (int plane = 0; plane < S::kPlanes; ++plane) {
      columns.low[plane] = has_own && (kAttend || column % 2 == 0) ? planes[plane] : 0u;
      columns.high[plane] = has_own && column % 2 != 0 ? planes[plane] : 0u;
    }
    return columns;
  }
  /// By the matrix unit, but where the cluster attends its list: there counting bits one by one is faster.
  __device__ static void compare_four(uint4 raw, const Columns& columns, unsigned (&distance)[4]) {
    if constexpr (kAttend) {
      const unsigned codes[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        distance[i] = 0;
#pragma unroll
        for (int plane = 0; plane < S::kPlanes; ++plane)
          distance[i] +=
              static_cast<unsigned>(__popc(differing(codes[i], columns.majority, columns.low[plane])))
              << plane;
      }
    } else {
      const unsigned codes[4] = {raw.x ^ columns.majority, raw.z ^ columns.majority, raw.y ^ columns.majority,
                                 raw.w ^ columns.majority};
#pragma unroll
      for (int i = 0; i < 4; ++i) distance[i] = 0;
#pragma unroll
      for (int plane = 0; plane < S::kPlanes; ++plane) {
#pragma unroll
        for (int times = 0; times < 1 << plane; ++times)  // nothing left to shift and add
          add_common_bits(distance, codes, columns.low[plane], columns.high[plane]);
      }
    }
  }
  /// (a ^ b) & mask, in one instruction: the compiler shares a ^ b among the masks, in three for two.
  __device__ static unsigned differing(unsigned a, unsigned b, unsigned mask) {
    unsigned x;
    asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(x) : "r"(a), "r"(b), "r"(mask));
    return x;
  }
  /// Of four keys, from `key` on, of a unit of which some are no far keys where it is `ragged`.
  __device__ void measure_four(unsigned char* to, int key, uint4 raw, bool ragged,
                               const Columns& columns) const {
    unsigned distance[4];
    compare_four(raw, columns, distance);
    if (ragged) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (key + i < begin_ || key + i >= last_) distance[i] = S::kLevels;
    }
    *reinterpret_cast<unsigned*>(to) =
        ((distance[3] * 256 + distance[2]) * 256 + distance[1]) * 256 + distance[0];
#pragma unroll
    for (int i = 0; i < 4; ++i) atomicAdd(&s_.warp_counts[warp_][distance[i]], 1);
  }
  __device__ void share_counts() const {
    __syncthreads();
#pragma unroll 1
    for (int i = tid_; i < S::kFours * kRanks; i += kBlock) {
      const int four = i / kRanks, to = i % kRanks;
      uint4 sum = {};
#pragma unroll
      for (int w = 0; w < kBlockWarps; ++w) {
        const uint4 some = *reinterpret_cast<const uint4*>(&s_.warp_counts[w][four * 4]);
        sum.x += some.x, sum.y += some.y, sum.z += some.z, sum.w += some.w;
      }
      send(address_in(&s_.counts[rank_][four * 4], to), sum, address_in(&s_.of_counts, to));
    }
  }

  /// The level where the list ends, and what of it lies before this warp's keys.
  __device__ void find_level() {
    constexpr int kEach = 4 * S::kFoursOfLane;
    const int n = end_ - begin_;
    const int budget = max(0, static_cast<int>(min(std::int64_t{min(p_.budget[query_], n)}, p_.capacity)));
    int here[kEach] = {}, earlier[kEach] = {};
    const auto add = [](int* to, const int* from) {
      const int4 some = *reinterpret_cast<const int4*>(from);
      to[0] += some.x, to[1] += some.y, to[2] += some.z, to[3] += some.w;
    };
    wait_for(&s_.of_counts);
#pragma unroll
    for (int j = 0; j < S::kFoursOfLane; ++j) {
      const int four = lane_ * S::kFoursOfLane + j;
      if (four >= S::kFours) continue;
#pragma unroll 4
      for (int r = 0; r < kRanks; ++r) {
        add(here + 4 * j, &s_.counts[r][four * 4]);
        if (r < rank_) add(earlier + 4 * j, &s_.counts[r][four * 4]);
      }
    }
    int mine = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) mine += here[i];
    const int up_to = sum_up_to(mine, lane_);
    const unsigned enough = __ballot_sync(~0u, up_to >= budget);
    const int at = enough == 0 ? 31 : __ffs(static_cast<int>(enough)) - 1;
    int nearer = up_to - mine, level = lane_ * kEach, ties = 0;
    bool found = false;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!found && (nearer + here[i] >= budget || i + 1 == kEach)) {
        found = true, level += i, ties = here[i];
      }
      if (!found) nearer += here[i];
    }
    level_ = __shfl_sync(~0u, level, at);
    const int nearer_in_all = __shfl_sync(~0u, nearer, at), ties_in_all = __shfl_sync(~0u, ties, at);
    int before_nearer = 0, before_ties = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int own = lane_ * kEach + i;
      if (own < level_) before_nearer += earlier[i];
      if (own == level_) before_ties += earlier[i];
    }
    nearer_before_ = __reduce_add_sync(~0u, before_nearer);
    ties_before_ = __reduce_add_sync(~0u, before_ties);
    chosen_ = budget;
    skipped_ = ties_in_all - (budget - nearer_in_all);  // the newest of the last level stay
    if constexpr (kAttend) {
      piece_ = Attend::piece_of(sink_ + chosen_ + (all_ - window_begin_));
      own_ = Attend::kOwnPieces * piece_;
      const int begin = rank_ * own_;
      const int listed = max(0, min(sink_ + chosen_, begin + own_) - max(sink_, begin));
      if (tid_ == 0) expect(&s_.of_rows, static_cast<unsigned>(listed) * 4);
    }
    if (rank_ == 0 && tid_ == 0) p_.counts[list()] = chosen_;
  }
  __device__ std::int64_t list() const {
    return std::int64_t{query_} * (gridDim.x / kRanks) + list_of_query_;
  }

  /// Which of four distances are at or below a level: the highest bit of each byte, others are any.
  __device__ static unsigned at_most(unsigned four, unsigned levels) {
    // Where 128 levels or fewer leave a bit of each byte no difference borrows from the byte above.
    return S::kLevels <= 128 ? 0x80808080u + levels - four : __vcmpleu4(four, levels);
  }
  /// Of eight: the highest eight bits.
  __device__ static unsigned at_most(uint2 x, unsigned levels) {
    const unsigned signs = (at_most(x.x, levels) >> 4 & 0x08080808u) | (at_most(x.y, levels) & 0x80808080u);
    return signs * 0x00204081u;  // no two of its bits meet, so nothing is carried
  }
  /// Of 8 or 32.
  template <int kEights>
  __device__ static unsigned at_most(const uint2 (&x)[kEights], int level) {
    const unsigned levels = static_cast<unsigned>(level) * 0x01010101u;
    if constexpr (kEights == 1) return at_most(x[0], levels) >> 24;
    return __byte_perm(__byte_perm(at_most(x[0], levels), at_most(x[1], levels), 0x0073),
                       __byte_perm(at_most(x[2], levels), at_most(x[3], levels), 0x7300), 0x7610);
  }

  /// Chosen rows of this block's keys, a stretch of some units at a time.
  __device__ void give_rows() const {
    units_of_stretch() == 1 ? give_stretches<1>() : give_stretches<kUnitsAtOnce>();
  }
  __device__ int units_of_stretch() const {
    return units_ <= 2 * kBlockWarps ? 1 : kUnitsAtOnce;
  }
  /// Warps that are neighbours take neighbouring stretches by turns: rows of each quarter come in their
  /// order, for who attends them already.
  template <int kUnits>
  __device__ void give_stretches() const {
    constexpr int kTakers = kBlockWarps / 4, kKeys = kUnits * kUnit;
    const int stretches = (units_ + kUnits - 1) / kUnits, quarter = (stretches + 3) / 4,
              from = warp_ / kTakers * quarter + warp_ % kTakers,
              end = min(stretches, (warp_ / kTakers + 1) * quarter);
#pragma unroll 1
    for (int stretch = from; stretch < end; stretch += kTakers) mark_chosen<kUnits>(stretch);
    __syncthreads();
    RowsTo to(*this);
    int nearer = nearer_before_, ties = ties_before_, summed = 0;
#pragma unroll 1
    for (int stretch = from; stretch < end; stretch += kTakers) {
#pragma unroll 1
      for (; summed < stretch; summed += 32) {
        const int at = summed + lane_;
        const unsigned sum = __reduce_add_sync(~0u, at < stretch ? s_.chosen[at] : 0u);
        nearer += static_cast<int>(sum & 0xffff), ties += static_cast<int>(sum >> 16);
      }
      summed = stretch;
      const auto [near, some_ties] = *reinterpret_cast<const uint2*>(scores_at(stretch * kKeys + lane_ * 8));
      unsigned tie = some_ties;
      const unsigned own = static_cast<unsigned>(__popc(near) | __popc(tie) << 16);
      const unsigned before = sum_up_to(own, lane_) - own;
      int tie_at = ties + static_cast<int>(before >> 16);
      const int place = nearer + static_cast<int>(before & 0xffff) + max(0, tie_at - skipped_);
      if (tie_at + static_cast<int>(own >> 16) <= skipped_) tie = 0;
      for (; tie != 0 && tie_at < skipped_; ++tie_at) tie &= tie - 1;
      unsigned left = near | tie;
      if (left != 0) to.begin(place + __popc(left) - 1);
      const int first = first_ + stretch * kKeys + lane_ * 8 * kUnits;
#pragma unroll 1
      for (; left != 0; to.step_back()) {  // the highest first: one instruction finds it
        const int bit = 31 - __clz(static_cast<int>(left));
        left ^= 1u << bit;
        to.give(first + bit);
      }
    }
  }
  /// Which of a lane's keys are nearer than the level and which at it, to the beginning of the stretch; how
  /// many the warp has to `chosen`.
  template <int kUnits>
  __device__ void mark_chosen(int stretch) const {
    const int begin = stretch * kUnits * kUnit;
    uint2 x[kUnits];
    if constexpr (kUnits == 1) {
      x[0] = *reinterpret_cast<const uint2*>(scores_at(begin + lane_ * 8));
    } else {
      static_assert(kUnits == 4);
      const unsigned at = shared_address(scores_at(begin + lane_ * 32));
      const uint4 low = Attend::W::piece(at), high = Attend::W::piece(at + 16);
      x[0] = {low.x, low.y}, x[1] = {low.z, low.w}, x[2] = {high.x, high.y}, x[3] = {high.z, high.w};
    }
    const unsigned near = level_ == 0 ? 0u : at_most(x, level_ - 1), tie = at_most(x, level_) ^ near;
    const unsigned sum = __reduce_add_sync(~0u, static_cast<unsigned>(__popc(near) | __popc(tie) << 16));
    *reinterpret_cast<uint2*>(scores_at(begin + lane_ * 8)) = {near, tie};  // all lanes have read theirs
    if (lane_ == 0) s_.chosen[stretch] = sum;
  }

  /// Where rows go, place by place: to the list, or to the block whose part of it the place is in.
  class RowsTo {
   public:
    __device__ explicit RowsTo(const Near& near) : n_(near) {
      if constexpr (!kAttend) {
        list_ = n_.p_.rows + n_.list() * n_.p_.capacity;
        asm volatile("" : "+l"(list_));  // once: the compiler would do it for each row
      }
    }
    __device__ void begin(int place) {
      place_ = place;
      if constexpr (kAttend) {
        place_ += n_.sink_;
        block_ = divided(place_, n_.own_);
        place_ -= block_ * n_.own_;
      }
    }
    __device__ void step_back() {
      --place_;
      if constexpr (kAttend) {
        if (place_ < 0) place_ += n_.own_, --block_;
      }
    }
    __device__ void give(int row) const {
      if constexpr (kAttend)
        send(address_in(n_.rows_ + place_, block_), static_cast<unsigned>(row),
             address_in(&n_.s_.of_rows, block_));
      else
        give_row(list_ + place_, row);
    }

   private:
    __device__ static int divided(int a, int b) {  // both small: the quotient is off by one at most
      int q = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
      q += a >= (q + 1) * b ? 1 : 0;
      return q - (a < q * b ? 1 : 0);
    }
    const Near& n_;
    std::int32_t* list_ = nullptr;
    int place_ = 0, block_ = 0;
  };

  __device__ void attend(std::int64_t head) const {
    __syncthreads();  // distances are read, their place is free
    const Queries& queries = p_.attend.queries;
    Keys keys;
    keys.sink = sink_, keys.listed = chosen_, keys.window_begin = window_begin_;
    keys.count = sink_ + chosen_ + (all_ - window_begin_);
    keys.rows = rows_ - rank_ * own_;
    const int kv_head = list_of_query_ * kHeads / p_.attend.group;
    const char* const base =
        queries.bases[token_.sequence] + queries.layer_offset + kv_head * queries.layout.head_stride();
    Attend::run(p_.attend, keys, piece_, base, queries.q + head * kDim, work_, s_.received, rank_,
                queries.o + head * kDim, [&] { wait_for(&s_.of_rows); });
  }

  const NearParams& p_;
  char* const work_;  ///< counters and distances; then the rings of attention
  Shared& s_;
  int* const rows_;  // those that this block attends
  const int rank_, list_of_query_, query_, tid_, lane_, warp_;
  const unsigned fetched_;  ///< shared address of this lane's part of the signatures on the way
  QueryToken token_;
  int all_ = 0, begin_ = 0, end_ = 0, sink_ = 0, window_begin_ = 0;
  int first_ = 0, last_ = 0, units_ = 0, from_ = 0, to_ = 0;
  const std::uint32_t* codes_ = nullptr;  ///< of first_
  uint2 weights_[kHiddenLayers > 0 ? kHiddenLayers : 1][S::kOutputs], last_weights_[S::kLastOutputs];
  float biases_[kHiddenLayers > 0 ? kHiddenLayers : 1], last_bias_ = 0.0f;
  int level_ = 0, nearer_before_ = 0, ties_before_ = 0, chosen_ = 0, skipped_ = 0;
  int piece_ = 0, own_ = 0;  ///< keys of a piece that is attended here, and of all pieces of this block
};

template <class T, class S, int kHiddenLayers, bool kAttend>
__global__ void __launch_bounds__(S::kBlock, S::kBlocks) near_kernel(const __grid_constant__ NearParams p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char memory[];
  Near<T, S, kHiddenLayers, kAttend>(p, memory).run();
#endif
}

/// False where the work does not fit in a block, the blocks not on this GPU, or, where that is asked, all
/// lists not at once.
template <class T, class S, int kHiddenLayers, bool kAttend>
bool launch(NearParams p, std::int64_t max_tokens, bool all_at_once, StreamHandle stream) {
  using N = Near<T, S, kHiddenLayers, kAttend>;
  constexpr int kHeads = S::kHeads, kRanks = S::kRanks, kBlock = S::kBlock, kBlockWarps = S::kBlockWarps,
                kMostBytes = (228 << 10) / S::kBlocks - 1024;  // of shared memory
  static_assert(2 * N::Attend::kWalkers == kBlockWarps);
  const std::int64_t share = (max_tokens / kRanks + kUnit) / kUnit * kUnit + kUnitsAtOnce * kUnit,
                     most_rows =
                         (p.sink + p.capacity + p.window) / kRanks + (N::Attend::kOwnPieces + 1) * kTile;
  p.rows_bytes = kAttend ? static_cast<int>((most_rows * 4 + 127) / 128 * 128) : 0;
  const auto bytes_with = [&](int ahead) {
    const std::int64_t work = kBlockWarps * ahead * kUnitBytes + share;
    return static_cast<std::int64_t>(sizeof(typename N::Shared)) + p.rows_bytes +
           (kAttend ? std::max<std::int64_t>(work, N::Attend::kBytes) : work);
  };
  for (p.ahead = S::kAhead; p.ahead > kLeastAhead && bytes_with(p.ahead) > kMostBytes;) p.ahead /= 2;
  const std::int64_t bytes = bytes_with(p.ahead);
  if (bytes > kMostBytes) return false;
  const auto kernel = near_kernel<T, S, kHiddenLayers, kAttend>;
  const Queries& queries = p.attend.queries;
  static PerDevice<int> placed;
  const int at_once = placed.get([=] {
    return can_place(kernel, kRanks, kBlock, kMostBytes, S::kBlocks)
               ? EarlyLaunch(dim3(kRanks), kBlock, kMostBytes, kRanks, stream).clusters_at_once(kernel)
               : 0;
  });
  if (at_once == 0 || (all_at_once && queries.query_heads / kHeads * queries.count > at_once)) return false;
  prepare_clusters(kernel, bytes, S::kBlocks);
  const dim3 grid(static_cast<unsigned>(queries.query_heads / kHeads * kRanks),
                  static_cast<unsigned>(queries.count));
  EarlyLaunch(grid, kBlock, static_cast<int>(bytes), kRanks, stream, !p.signatures.fresh)(kernel, p);
  return true;
}

template <class T, class S, bool kAttend>
bool launch_for_layers(const NearParams& p, std::int64_t max_tokens, bool at_once, StreamHandle stream) {
  switch (p.nets.depth) {
    case 1:
      return launch<T, S, 0, kAttend>(p, max_tokens, at_once, stream);
    case 3:
      return launch<T, S, 2, kAttend>(p, max_tokens, at_once, stream);
    default:
      return false;
  }
}
/// The fewer blocks a list the more lists there are, as far as keys have room in so few; the bits are the
/// same. What was fastest on an H200, where 14, 30 and 66 clusters of 16, 8 and 2 such blocks run at once.
template <class T, int kHeads, bool kAttend>
bool launch_for_lists(const NearParams& p, std::int64_t max_tokens, StreamHandle stream) {
  [[maybe_unused]] const auto with = [&]<int kRanks, int kOfBlock>(bool at_once) {
    return launch_for_layers<T, Shape<kHeads, kRanks, kOfBlock>, kAttend>(p, max_tokens, at_once, stream);
  };
  if constexpr (kHeads == 1) {
    return with.template operator()<4, 8>(false);
  } else if constexpr (kHeads == 8) {
    return with.template operator()<16, 8>(false);
  } else {
    const int lists = p.attend.queries.query_heads / kHeads * p.attend.queries.count;
    // Sixteen warps on each of eight processors leave room for the attention behind them.
    if (!kAttend && lists > 4 && with.template operator()<8, 16>(true)) return true;
    return with.template operator()<16, 8>(true) ||
           (lists * 8 <= 2 * processors() && with.template operator()<8, 8>(false)) ||
           with.template operator()<2, 16>(true) || with.template operator()<4, 8>(false) ||
           with.template operator()<16, 8>(false);
  }
}

template <class T, bool kAttend>
bool launch_for_heads(const NearParams& p, int heads, std::int64_t max_tokens, StreamHandle stream) {
  switch (heads) {
    case 1:
      return launch_for_lists<T, 1, kAttend>(p, max_tokens, stream);
    case 4:
      return launch_for_lists<T, 4, kAttend>(p, max_tokens, stream);
    case 8:
      return launch_for_lists<T, 8, kAttend>(p, max_tokens, stream);
    default:
      return false;
  }
}

int heads_of_list(const Queries& queries, const SignatureRule& rule) {
  return rule.per_query_head ? 1 : queries.query_heads / queries.layout.kv_heads;
}

bool is_for(const Queries& queries, const SignNets& nets, const Signatures& signatures,
            const SignatureRule& rule) {
  // Clusters of sixteen, and what was measured.
  bool fits = capability_major() == 9 && queries.layout.head_dim == kDim && nets.type == DType::f16 &&
              signatures.words == 1 && rule.mode == SignatureRule::Mode::count && !rule.all_ties &&
              rule.budget != nullptr && nets.bits() == kBits &&
              !(signatures.per_query_head && heads_of_list(queries, rule) > 1);
  for (int i = 0; i < nets.depth; ++i) fits = fits && nets.widths[i] == (i == 0 ? kDim : kHidden);
  return fits;
}

/// Where one launch is faster than two. Not by how many queries there are: bits depend on it.
bool in_one_launch(const Queries& queries, const SignatureRule& rule, std::int64_t capacity) {
  const int most = heads_of_list(queries, rule) == 1 ? kMostOfHead : kMostAttended;
  return queries.layout.kv_heads > 1 && rule.sink + rule.window + capacity <= most;
}

NearParams params_of(const Queries& queries, const float* q, const SignNets& nets,
                     const Signatures& signatures, const SignatureRule& rule, std::int64_t capacity,
                     std::int32_t* counts) {
  NearParams p = {.q = q,
                  .nets = nets,
                  .signatures = signatures,
                  .budget = rule.budget,
                  .counts = counts,
                  .sink = rule.sink,
                  .window = rule.window,
                  .capacity = capacity,
                  .net_weights = nets.weights_of_net(),
                  .net_biases = nets.biases_of_net()};
  p.attend.queries = queries;
  p.attend.group = queries.query_heads / queries.layout.kv_heads;
  return p;
}

}  // namespace

bool select_in_cluster(const Queries& queries, const float* q, const SignNets& nets,
                       const Signatures& signatures, const SignatureRule& rule, std::int64_t max_tokens,
                       std::int32_t* rows, std::int64_t capacity, std::int32_t* counts, StreamHandle stream) {
  if (!is_for(queries, nets, signatures, rule)) return false;
  NearParams p = params_of(queries, q, nets, signatures, rule, capacity, counts);
  p.rows = rows;
  return launch_for_heads<__half, false>(p, heads_of_list(queries, rule), max_tokens, stream);
}

bool arrives_by_signature(const Queries& queries, const SignNets& nets, const Signatures& signatures,
                          const SignatureRule& rule, const ArrivingRows& arriving) {
  return is_for(queries, nets, signatures, rule) && !in_one_launch(queries, rule, arriving.capacity) &&
         heads_of_list(queries, rule) == queries.query_heads / queries.layout.kv_heads &&
         can_attend_arriving(queries);
}

bool can_attend_by_signature(const Queries& queries, const SignNets& nets, const Signatures& signatures,
                             const SignatureRule& rule, const ArrivingRows& arriving) {
  const DType type = queries.layout.type;
  if (!is_for(queries, nets, signatures, rule) || queries.layout.shared_rows || queries.lse != nullptr)
    return false;
  return in_one_launch(queries, rule, arriving.capacity)
             ? type == DType::bf16 || type == DType::f16
             : arrives_by_signature(queries, nets, signatures, rule, arriving);
}

bool attend_by_signature(const Queries& queries, const float* q, const SignNets& nets,
                         const Signatures& signatures, const SignatureRule& rule, std::int64_t max_tokens,
                         const ArrivingRows& arriving, std::int32_t* counts, void* workspace,
                         StreamHandle stream) {
  if (!can_attend_by_signature(queries, nets, signatures, rule, arriving)) return false;
  if (queries.count == 0) return true;
  NearParams p = params_of(queries, q, nets, signatures, rule, arriving.capacity, counts);
  const int heads = heads_of_list(queries, rule);
  if (in_one_launch(queries, rule, arriving.capacity))
    return queries.layout.type == DType::bf16
               ? launch_for_heads<__nv_bfloat16, true>(p, heads, max_tokens, stream)
               : launch_for_heads<__half, true>(p, heads, max_tokens, stream);
  p.rows = arriving.rows;
  if (!launch_for_heads<__half, false>(p, heads, max_tokens, stream)) return false;
  attend_arriving_decode(queries, arriving, max_tokens, workspace, stream);
  return true;
}

}  // namespace lode::cuda
