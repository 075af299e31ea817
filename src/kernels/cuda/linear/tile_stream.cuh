// SPDX-License-Identifier: Apache-2.0
// Matrix-vector products for weights in tiles, at the speed of memory. A block takes twins of tiles (rows a
// and b of 8 pairs); its warps share the groups of 256 columns. Every warp keeps a ring of twins under way from
// memory to shared memory and multiplies them on the matrix unit, 8-bit integers with 32-bit sums.
//
// An input row is quantised to whole numbers of up to 32,512 under one scale for each 256 columns, and split:
// number = 256 high + low, each of 8 bits. Weights' codes are whole numbers as well, so the products of a block
// (16 or 32 columns) are exact; scales multiply them in float32. What rounds is the input alone, at 2^-16 of
// the largest number among 256.
//
// A product takes 8 columns of each of four blocks; its input has high and low parts of block t in columns 2 t
// and 2 t + 1 and zeros elsewhere. So sums of four blocks come apart, two of them in each lane, which multiplies
// them by the scales that lie beside its own codes: no lane does another's work. Each input row is a product of
// its own, so its bits do not depend on how many there are.
//
// Long steps request their first weights while the predecessor still runs, but never for all that the rings hold: the
// loads of the input would queue behind them.
#pragma once

#include <algorithm>

#include "kernels/cuda/device/barrier.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/matrix.cuh"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/tile_steps.cuh"

namespace lode::cuda::tiles {

/// Group g of the columns is added to sum g % kSums; these are added in their order. A kernel has as many warps that
/// multiply, or half as many or fewer with two sums each, and one warp more that finishes rows. The bits are the same.
inline constexpr int kSums = 16;
inline constexpr int kBuffers = 4;                     // twins whose sums may wait to be finished
inline constexpr int kMostDepth = 4, kLeastDepth = 2;  // twins in a warp's ring
inline constexpr int kBatch = 4;                       // groups of inputs that a warp has under way
inline constexpr float kLargest = 32512.0f;            // 127 * 256
inline constexpr int kOfSystem = 1024;  // bytes that a multiprocessor keeps for itself, of every block's

/// 16 bytes to an address of shared memory.
__device__ __forceinline__ void copy_async(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int Newer>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Newer) : "memory");
}

/// What a group of an input row is worth: its scale, the sum of squares before it, and the sums of blocks t and
/// 4 + t.
struct Group {
  float scale, squares;
  int2 sums[4];
};
inline constexpr int kZeroBytes = 512;  // what lanes read whose columns of an input are zeros

/// How a launch lies in shared memory.
struct Plan {
  int warps = 0;   ///< that multiply
  int groups = 0;  ///< of 256 columns
  int turns = 0;   ///< groups that a warp takes of one twin
  int depth = 0;
  int early = 0;  ///< slots of a ring that are requested before the predecessor has ended
  /// Slots that are requested once the input's loads are issued, `early` among them. The others follow when the input
  /// is quantised.
  int beside = 0;
};

template <int N>
struct Shared {
  float partial[kBuffers][kSums][N][16];
  SharedBarrier full[kBuffers], empty[kBuffers];
  alignas(16) char zeros[kZeroBytes];
  // then, at multiples of 32 bytes: rings [warps, depth, 2 tiles]; inputs [groups, N][4: part, i / 2][2: high,
  // low][4 lanes t][16 bytes]; Group [groups, N]
};
template <int N>
inline constexpr int kHeadBytes = (static_cast<int>(sizeof(Shared<N>)) + 127) / 128 * 128;

inline int shared_bytes(int head_bytes, int tile_bytes, int n, const Plan& plan) {
  return head_bytes + plan.warps * plan.depth * 2 * tile_bytes +
         plan.groups * n * (2 * kTileColumns + static_cast<int>(sizeof(Group)));
}

/// c += a b of 16 x 32 and 32 x 8 bytes, b signed.
template <bool Signed>
__device__ __forceinline__ void multiply(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (Signed) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// The products of one input row with a group: sums[rows a, rows b] of this lane's two blocks.
template <class C>
__device__ __forceinline__ void multiply_row(const C (&scales)[2], const typename C::Codes (&codes)[2][2],
                                             const char* input, const Group& group, int lane,
                                             float (&sums)[2]) {
  constexpr int kScales = C::kColumns == 16 ? 2 : 1;  // of a block of 32
  constexpr int kBias = C::Codes::kBias;
  static_assert(kBias == 0 || kScales == 1);
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    int c[kScales][4] = {};
    if constexpr (kBias != 0) {
      const int2 all = group.sums[lane % 4];
      c[0][1] = c[0][3] = -kBias * (part == 0 ? all.x : all.y);
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint4 x = *reinterpret_cast<const uint4*>(input + (2 * part + u) * 128);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const unsigned w[4] = {codes[0][u].bytes(i, part, 0), codes[1][u].bytes(i, part, 0),
                               codes[0][u].bytes(i, part, 1), codes[1][u].bytes(i, part, 1)};
        multiply<C::Codes::kSigned>(c[kScales == 2 ? u : 0], w, i == 0 ? x.x : x.z, i == 0 ? x.y : x.w);
      }
    }
#pragma unroll
    for (int k = 0; k < kScales; ++k) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        sums[h] = fmaf(static_cast<float>(c[k][2 * h] * 256 + c[k][2 * h + 1]),
                       scales[h].scale(kScales * part + k, C::Codes::factor(part)), sums[h]);
    }
  }
}

/// The product of a group of 256 columns, added to what the lane has of its rows.
template <class C, int N>
__device__ __forceinline__ void multiply_group(const char* twin, const char* inputs, int step, int rows,
                                               const Group* groups, int lane, float (&total)[N][2]) {
  C scales[2];
  typename C::Codes codes[2][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int u = 0; u < 2; ++u) codes[h][u].load(twin + h * C::kBytes, lane, u);
    scales[h].load(twin + h * C::kBytes, lane);
  }
#pragma unroll
  for (int r = 0; r < N; ++r) {
    if (N > 1 && r >= rows) break;
    float sums[2] = {};
    const Group& x = groups[r];
    multiply_row<C>(scales, codes, inputs + r * step, x, lane, sums);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = scales[h].common() * sums[h];
      if constexpr (C::kMinima) sum -= scales[h].minima(x.sums[lane % 4]);
      total[r][h] = fmaf(x.scale, sum, total[r][h]);
    }
  }
}

/// kExperts: a block multiplies rows of one expert's matrix by the rows that chose it. A warp has
/// kSums / Warps sums; where that is two, plan.warps may be less than Warps.
template <class C, int N, int Warps, bool kExperts>
class Streamer {
 public:
  __device__ Streamer(const TileStep& step, const StepInput& in, const Plan& plan, char* memory)
      : step_(step),
        in_(in),
        plan_(plan),
        shared_(*reinterpret_cast<Shared<N>*>(memory)),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warps_(Warps == kSums ? Warps : plan.warps),
        ring_(memory + kHeadBytes<N> + warp_ * plan.depth * kSlotBytes),
        ring_address_(shared_address(ring_) + static_cast<unsigned>(lane_) * 16),
        ring_bytes_(plan.depth * kSlotBytes),
        own_turns_((plan.groups - warp_ + warps_ - 1) / warps_),
        inputs_(memory + kHeadBytes<N> + warps_ * plan.depth * kSlotBytes),
        groups_(reinterpret_cast<Group*>(inputs_ + plan.groups * N * 2 * kTileColumns)) {
    if constexpr (!kExperts) count_twins();
  }

  __device__ void run() {
    Gains gains;
    if constexpr (kExperts) {
      if (warp_ < warps_) read_gains(gains);
      if (!step_.experts.known) wait_for_predecessor();
      if (!take_expert()) return;
    }
    if (threadIdx.x == 0) {
      for (int i = 0; i < kBuffers; ++i) {
        shared_.full[i].init(warps_);
        shared_.empty[i].init(1);
      }
    }
    for (unsigned i = threadIdx.x; i < kZeroBytes / 4; i += blockDim.x)
      reinterpret_cast<unsigned*>(shared_.zeros)[i] = 0;
    if (warp_ == warps_) {
      release_successor();
      __syncthreads();
      wait_for_predecessor();
      finish();
      return;
    }
    point_at_twin();
    for (int i = 0; i < plan_.early; ++i) load(i * kSlotBytes);
    if constexpr (!kExperts) read_gains(gains);
    release_successor();
    __syncthreads();
    wait_for_predecessor();
    stage(gains);
    __syncthreads();
    // Column g of a product is the high or low part of block g / 2, whose columns lane t = g / 2 has.
    const bool active = lane_ / 8 == lane_ % 4;
    const char* const first =
        active ? inputs_ + warp_ * N * kRowBytes + lane_ / 4 % 2 * 64 + lane_ % 4 * 16 : shared_.zeros;
    const int row_step = active ? kRowBytes : 0, turn_step = warps_ * N * row_step;
    int slot = 0;
    for (int i = 0; i < mine_; ++i) {
      const char* input = first;
      const Group* group = groups_ + warp_ * N;
#pragma unroll 1
      for (int turn = 0; turn < plan_.turns; ++turn) {
        wait_for_slot();
        if (turn < own_turns_)
          multiply_group<C, N>(ring_ + slot, input, row_step, rows(), group, lane_, total_[0]);
        exchange_sums();
        __syncwarp();
        load(slot);
        slot += kSlotBytes;
        if (slot == ring_bytes_) slot = 0;
        input += turn_step;
        group += warps_ * N;
      }
      leave_sums(i);
    }
  }

 private:
  static constexpr int kSlotBytes = 2 * C::kBytes, kRowBytes = 2 * kTileColumns;  // a group of an input row
  static_assert(kSlotBytes % 32 == 0);  // inputs lie behind any number of them

  /// Twins are dealt to the blocks in turn: all blocks, or those of one expert.
  __device__ int first() const {
    if constexpr (kExperts) return first_;
    return static_cast<int>(blockIdx.x);
  }
  __device__ int stride() const {
    if constexpr (kExperts) return stride_;
    return static_cast<int>(gridDim.x);
  }
  __device__ void count_twins() {
    mine_ = step_.count > first() ? (step_.count - first() - 1) / stride() + 1 : 0;
  }
  __device__ int rows() const {
    if constexpr (kExperts) return rows_;
    return static_cast<int>(in_.n);
  }
  /// Blocks are dealt to the experts that somebody chose, as many to each. False: there is none for this one. A single
  /// row chose as many as it could, each once. Before the wait the first-level cache may hold what another layer's chose.
  __device__ bool take_expert() {
    const ExpertTiles& e = step_.experts;
    const int experts = N == 1 ? e.most_groups : __ldcg(e.routing.groups);
    stride_ = static_cast<int>(gridDim.x) / max(experts, 1);
    const int group = static_cast<int>(blockIdx.x) / max(stride_, 1);
    if (group >= experts) return false;
    first_ = static_cast<int>(blockIdx.x) % stride_;
    expert_ = __ldcg(e.routing.expert + group);
    const int begin = N == 1 ? group : __ldcg(e.routing.begin + group);
    rows_ = N == 1 ? 1 : __ldcg(e.routing.begin + group + 1) - begin;
    slots_ = e.routing.order + begin;
    count_twins();
    return mine_ > 0;
  }
  __device__ int twin(int i) const {
    return step_.first + first() + i * stride();
  }
  /// Where row r of this block comes from, and where it goes.
  __device__ int input_row(int r) const {
    if constexpr (!kExperts) return r;
    if (step_.experts.by_slot) return slots_[r];
    return N == 1 ? 0 : slots_[r] / step_.experts.routing.used;
  }
  __device__ int output_row(int r) const {
    if constexpr (!kExperts) return r;
    return slots_[r];
  }
  /// Where this lane reads.
  __device__ void point_at_twin() {
    if (load_twin_ >= mine_) return;
    step_.tiles(twin(load_twin_), a_, b_);
    std::int64_t ahead = warp_ * C::kBytes + lane_ * 16;
    if constexpr (kExperts) ahead += expert_ * step_.experts.stride;
    a_ += ahead;
    b_ += ahead;
  }
  /// The next group of this warp, both tiles, to a place of the ring, in bytes.
  __device__ __forceinline__ void load(int slot) {
    if (load_twin_ < mine_ && load_turn_ < own_turns_) {
      const unsigned to = ring_address_ + static_cast<unsigned>(slot);
#pragma unroll
      for (int at = 0; at < C::kBytes; at += 512) {
        if (at + 512 > C::kBytes && at + lane_ * 16 >= C::kBytes) break;
        copy_async(to + at, a_ + at);
        copy_async(to + C::kBytes + at, b_ + at);
      }
      a_ += warps_ * C::kBytes;
      b_ += warps_ * C::kBytes;
    }
    commit_copies();
    if (++load_turn_ == plan_.turns) {
      load_turn_ = 0;
      ++load_twin_;
      point_at_twin();
    }
  }
  __device__ void wait_for_slot() const {
    if (plan_.depth == 4)
      wait_for_copies<3>();
    else if (plan_.depth == 3)
      wait_for_copies<2>();
    else
      wait_for_copies<1>();
    __syncwarp();
  }

  /// A group of an input row; of `warps`, a warp takes every so many-th, rows one after the other.
  struct Item {
    int row, group;
    __device__ __forceinline__ void advance(int warps, int groups) {
      for (group += warps; group >= groups; group -= groups) ++row;
    }
  };
  /// What multiplies a group's columns of a row.
  __device__ __forceinline__ void read_gain(int group, float (&gain)[8]) const {
    const std::int64_t at = std::int64_t{group} * kTileColumns + lane_ * 8;
#pragma unroll
    for (int k = 0; k < 8; ++k) gain[k] = 1.0f;
    if (in_.gain.data == nullptr || at >= in_.cols) return;
    const float4 a = in_.gain.four(at), b = in_.gain.four(at + 4);
    gain[0] = a.x, gain[1] = a.y, gain[2] = a.z, gain[3] = a.w;
    gain[4] = b.x, gain[5] = b.y, gain[6] = b.z, gain[7] = b.w;
  }

  /// Of the groups of this warp's first two items; it does not wait for the predecessor.
  using Gains = float[2][8];
  __device__ __forceinline__ void read_gains(Gains& gains) const {
    read_gain(first_item().group, gains[0]);
    read_gain(second_item().group, gains[1]);
  }

  /// Quantises the inputs, a warp a group at a time, and requests the rest of the ring. The loop over a batch is not
  /// unrolled: code that runs for the first time misses the instruction cache, which costs more than moving registers.
  __device__ __forceinline__ void stage(Gains& gains) {
    int held = first_item().group, asked = plan_.early;  // held: the group of gains[0]
    const int second = second_item().group;              // that of gains[1]
    for (Item next = first_item(), at = next; at.row < rows();) {
      float x[kBatch][8];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (next.row < rows()) read_eight(next.row, next.group, x[i]);
        next.advance(warps_, plan_.groups);
      }
      for (; asked < plan_.beside; ++asked) load(asked * kSlotBytes);
#pragma unroll 1
      for (int i = 0; i < kBatch && at.row < rows(); ++i) {
        if (at.group != held) {
          held = at.group;
          if (held != second) read_gain(held, gains[0]);
#pragma unroll
          for (int k = 0; k < 8; ++k) gains[0][k] = held == second ? gains[1][k] : gains[0][k];
        }
        stage_eight(at.row, at.group, x[0], gains[0]);
        at.advance(warps_, plan_.groups);
#pragma unroll
        for (int behind = 1; behind < kBatch; ++behind) {
#pragma unroll
          for (int k = 0; k < 8; ++k) x[behind - 1][k] = x[behind][k];
        }
      }
    }
    for (; asked < plan_.depth; ++asked) load(asked * kSlotBytes);
  }
  __device__ __forceinline__ Item first_item() const {
    Item at = {0, warp_};
    for (; at.group >= plan_.groups; at.group -= plan_.groups) ++at.row;
    return at;
  }
  __device__ __forceinline__ Item second_item() const {
    Item at = first_item();
    at.advance(warps_, plan_.groups);
    return at;
  }
  /// Columns 8 lane to 8 lane + 7 of a group; zeros behind the row's end.
  __device__ __forceinline__ void read_eight(int r, int group, float (&x)[8]) const {
    const std::int64_t at = std::int64_t{group} * kTileColumns + lane_ * 8;
    float4 a = {}, b = {};
    if (at < in_.cols) {
      const auto* from = reinterpret_cast<const float4*>(in_.x + input_row(r) * in_.cols + at);
      a = from[0], b = from[1];
    }
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  }
  __device__ __forceinline__ void stage_eight(int r, int group, float (&x)[8], const float (&gain)[8]) {
    float squares = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      squares = fmaf(x[k], x[k], squares);
      x[k] *= gain[k];
    }
    unsigned largest = 0;  // of the bits of |x|, which order as the numbers do, NaN above all
#pragma unroll
    for (int k = 0; k < 8; ++k) largest = max(largest, __float_as_uint(x[k]) & 0x7fffffffu);
    largest = __reduce_max_sync(~0u, largest);
    const float most = __uint_as_float(largest);
    const float factor = most > 1e-30f && largest < 0x7f800000u ? kLargest / most : 0.0f;
    // x factor + 1.5 x 2^23 has the rounded number in its lowest bits, in two's complement: its lowest byte is
    // the low part, the next one of 128 more the high part.
    constexpr unsigned kMagic = 0x4b400000u;
    unsigned q[8], sum = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      q[k] = __float_as_uint(fmaf(x[k], factor, __uint_as_float(kMagic)));
      sum += q[k];
    }
    put(r, group, q);
    int whole = static_cast<int>(sum - 8 * kMagic);
    whole += __shfl_xor_sync(~0u, whole, 1);
    whole += __shfl_xor_sync(~0u, whole, 2);
    Group& g = groups_[group * N + r];
    if (lane_ % 4 == 0) reinterpret_cast<int*>(&g.sums[lane_ % 16 / 4])[lane_ / 16] = whole;
    if (in_.gain.data != nullptr) {
      for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(~0u, squares, offset);
    }
    if (lane_ == 0) {
      g.scale = largest >= 0x7f800000u ? __int_as_float(0x7fffffff) : factor > 0.0f ? most / kLargest : 0.0f;
      g.squares = squares;
    }
  }
  /// This lane's eight columns are the two words of product lane % 4 of a block's part.
  __device__ __forceinline__ void put(int r, int group, const unsigned (&q)[8]) {
    const int part = lane_ / 16, t = lane_ % 16 / 4, i = lane_ % 4;
    char* const to = inputs_ + (group * N + r) * kRowBytes + (part * 2 + i / 2) * 128 + t * 16 + i % 2 * 8;
    uint2 low, high;
    const auto pack = [](unsigned a, unsigned b, unsigned c, unsigned d, unsigned byte) {
      return __byte_perm(__byte_perm(a, b, byte | (byte + 4) << 4), __byte_perm(c, d, byte | (byte + 4) << 4),
                         0x5410u);
    };
    low = {pack(q[0], q[1], q[2], q[3], 0), pack(q[4], q[5], q[6], q[7], 0)};
    high = {pack(q[0] + 128, q[1] + 128, q[2] + 128, q[3] + 128, 1),
            pack(q[4] + 128, q[5] + 128, q[6] + 128, q[7] + 128, 1)};
    *reinterpret_cast<uint2*>(to) = high;
    *reinterpret_cast<uint2*>(to + 64) = low;
  }

  /// Where a warp has two sums, groups go to them in turns.
  __device__ __forceinline__ void exchange_sums() {
    if constexpr (Warps < kSums) {
#pragma unroll
      for (int r = 0; r < N; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float other = total_[1][r][h];
          total_[1][r][h] = total_[0][r][h];
          total_[0][r][h] = other;
        }
      }
    }
  }
  /// Leaves this warp's sums of a twin to the finishing warp.
  __device__ void leave_sums(int i) {
    if (plan_.turns % 2 == 1) exchange_sums();
    const int g = lane_ / 4, buffer = i % kBuffers;
    shared_.empty[buffer].wait(i / kBuffers % 2 ^ 1);  // the phase before the first counts as over
#pragma unroll
    for (int k = 0; k < kSums / Warps; ++k) {
#pragma unroll
      for (int r = 0; r < N; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float sum = total_[k][r][h];
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          if (lane_ % 4 == 0) shared_.partial[buffer][k * warps_ + warp_][r][g + 8 * h] = sum;
          total_[k][r][h] = 0.0f;
        }
      }
    }
    __syncwarp();
    if (lane_ == 0) shared_.full[buffer].arrive();
  }

  static constexpr int kEach = (kTileRows * N + 31) / 32;  // pairs of a twin that a lane finishes
  using Known = TileStep::Before[kEach];

  /// The finishing warp. What a step needs besides is fetched while the twin in front is finished.
  __device__ void finish() {
    Known now, next;
    fetch(0, now);
    __syncthreads();  // the inputs are there
    find_norms();
    for (int i = 0; i < mine_; ++i) {
      fetch(i + 1, next);
      finish_twin(i, now);
#pragma unroll
      for (int k = 0; k < kEach; ++k) now[k] = next[k];
    }
  }
  /// 1 / rms of each row.
  __device__ void find_norms() {
    if (in_.gain.data == nullptr) return;
    for (int r = 0; r < rows(); ++r) {
      double sum = 0;
      for (int g = lane_; g < plan_.groups; g += 32) sum += static_cast<double>(groups_[g * N + r].squares);
      for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
      if (lane_ % N == r)
        inverse_ = static_cast<float>(
            1.0 / sqrt(sum / static_cast<double>(in_.cols) + static_cast<double>(in_.eps)));
    }
  }
  __device__ __forceinline__ void fetch(int i, Known& known) const {
    if (i >= mine_) return;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int which = lane_ + 32 * k;
      if (which / kTileRows < rows() && step_.inside(twin(i), which % kTileRows))
        known[k] = step_.before(twin(i), which % kTileRows, output_row(which / kTileRows), expert_);
    }
  }
  /// Adds the warps' sums in their order and finishes the rows.
  __device__ __forceinline__ void finish_twin(int i, const Known& known) {
    const int buffer = i % kBuffers, at = twin(i);
    shared_.full[buffer].wait(i / kBuffers % 2);
    float inverse[kEach], a[kEach] = {}, b[kEach] = {};
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int row = (lane_ + 32 * k) / kTileRows, g = lane_ % kTileRows;
      inverse[k] = __shfl_sync(~0u, inverse_, row % N);
      if (row >= N) continue;
#pragma unroll
      for (int w = 0; w < kSums; ++w) {
        if (Warps < kSums && w >= 2 * warps_) break;
        a[k] += shared_.partial[buffer][w][row][g];
        b[k] += shared_.partial[buffer][w][row][g + 8];
      }
    }
    __syncwarp();
    if (lane_ == 0) shared_.empty[buffer].arrive();
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int which = lane_ + 32 * k, row = which / kTileRows;
      if (row >= rows() || !step_.inside(at, which % kTileRows)) continue;
      const float scale = in_.gain.data != nullptr ? inverse[k] : 1.0f;
      step_.finish(at, which % kTileRows, output_row(row), a[k] * scale, b[k] * scale, known[k]);
    }
  }

  const TileStep& step_;
  const StepInput& in_;
  const Plan& plan_;
  Shared<N>& shared_;
  const int warp_, lane_, warps_;
  char* const ring_;
  const unsigned ring_address_;
  const int ring_bytes_;
  const int own_turns_;  // turns in which this warp has a group
  char* const inputs_;
  Group* const groups_;
  // With experts: what this block's is, its inputs, and which of its expert's twins are this block's.
  int expert_ = 0, rows_ = 0, first_ = 0, stride_ = 0;
  const int* slots_ = nullptr;         // [rows_]
  int mine_ = 0;                       // twins of this block
  int load_twin_ = 0, load_turn_ = 0;  // what is loaded next
  const char *a_ = nullptr, *b_ = nullptr;
  float total_[kSums / Warps][N][2] = {};
  float inverse_ = 1.0f;  // in lane r of the finishing warp: of row r's norm
};

template <TileFormat F, int N, int Warps, bool kExperts>
__global__ __launch_bounds__(Warps * 32 + 32,
                             16 / Warps) void stream_kernel(const __grid_constant__ TileStep step,
                                                            const __grid_constant__ StepInput in,
                                                            const __grid_constant__ Plan plan) {
  extern __shared__ __align__(128) char memory[];
  Streamer<Codec<F>, N, Warps, kExperts>(step, in, plan, memory).run();
}

/// As many warps as share `groups` evenly, up to `most`: a warp that has no group of a twin waits for those that have.
/// More groups than sums need `most`, so that each comes to its sum.
inline int warps_for(int groups, int most) {
  if (most == kSums || groups > kSums) return most;
  const int turns = (groups + most - 1) / most;
  return (groups + turns - 1) / turns;
}

/// The deepest ring that leaves room for the inputs, and with few warps for a block of the kernel behind, which
/// requests its own first slots meanwhile; depth 0 where there is no room even for the least.
inline Plan plan_for(std::int64_t cols, int head_bytes, int tile_bytes, int n, int most_warps) {
  const int whole = device_shape().shared_bytes, half = (whole + kOfSystem) / 2 - kOfSystem;
  Plan plan;
  plan.groups = static_cast<int>((cols + kTileColumns - 1) / kTileColumns);
  plan.warps = warps_for(plan.groups, most_warps);
  plan.turns = (plan.groups + plan.warps - 1) / plan.warps;
  for (const int room : {most_warps < kSums ? half : 0, whole}) {
    for (plan.depth = kMostDepth; plan.depth >= kLeastDepth; --plan.depth) {
      if (shared_bytes(head_bytes, tile_bytes, n, plan) <= room) return plan;
    }
  }
  plan.depth = 0;
  return plan;
}

/// As many blocks as fit where much is read: more of it is under way, and that hides what the kernel behind waits for.
/// Experts' weights are known late besides. Else half as many, and the kernel behind has room for its own.
template <bool kExperts, class Kernel>
int blocks_for(const TileStep& step, const Plan& plan, int bytes, Kernel kernel) {
  int fit = 0;
  LODE_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, plan.warps * 32 + 32,
                                                          static_cast<std::size_t>(bytes)));
  const int units = device_shape().multiprocessors;
  if constexpr (kExperts) return std::max(step.experts.most_groups, fit * units);
  constexpr int kMany = 16;  // twins of a block
  const bool much = plan.turns > 1 || step.count / units >= kMany;
  return std::min(step.count, std::max(1, much ? fit : fit / 2) * units);
}

/// Chooses how many slots of its ring a warp requests before the input and right behind it, from the groups that it will
/// take. Measured with one row of Q4_K: the shorter a step, the more it waits for its input.
inline void order_requests(Plan& plan, const TileStep& step, int blocks) {
  const int experts = std::max(1, step.experts.most_groups),
            each = (step.count * experts + blocks - 1) / blocks * plan.turns;
  plan.early = std::min(2, each / 4);
  plan.beside = std::min(plan.depth, std::max(1, 2 * plan.early));
}

template <TileFormat F, int N, int Warps, bool kExperts = false>
void launch_plan(const TileStep& step, const StepInput& input, Plan plan, StreamHandle stream) {
  LODE_ASSERT(plan.depth > 0 && input.n <= N);
  const auto kernel = stream_kernel<F, N, Warps, kExperts>;
  static PerDevice<bool> prepared;
  prepared.get([=] {  // once, for the widest input
    LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(device_shape().shared_bytes)));
    // One split of shared memory and cache for all, so that a block can follow another kernel's without a
    // wait.
    LODE_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                   cudaSharedmemCarveoutMaxShared));
    return true;
  });
  const int bytes = shared_bytes(kHeadBytes<N>, Codec<F>::kBytes, N, plan),
            blocks = blocks_for<kExperts>(step, plan, bytes, kernel);
  order_requests(plan, step, blocks);
  EarlyLaunch(dim3(static_cast<unsigned>(blocks)), plan.warps * 32 + 32, bytes, 1, stream)(kernel, step,
                                                                                           input, plan);
}

template <TileFormat F, int N>
void launch(const TileStep& step, const StepInput& input, StreamHandle stream) {
  // Beyond so many columns twice as many warps quantise a row: with the 14,336 of an 8B's down, a token takes 1.47 ms
  // without attention, against 1.50.
  constexpr std::int64_t kWide = 8192;
  if (N > 1 || input.cols > kWide) {
    const Plan plan = plan_for(input.cols, kHeadBytes<N>, Codec<F>::kBytes, N, kSums);
    if (plan.depth > 0) return launch_plan<F, N, kSums>(step, input, plan, stream);
  }
  const Plan plan = plan_for(input.cols, kHeadBytes<N>, Codec<F>::kBytes, N, kSums / 2);
  launch_plan<F, N, kSums / 2>(step, input, plan, stream);
}

/// Kernels for one token and for several.
template <TileFormat F, int N>
void launch_experts(const TileStep& step, const StepInput& input, StreamHandle stream) {
  const Plan plan = plan_for(input.cols, kHeadBytes<N>, Codec<F>::kBytes, N, kSums / 2);
  launch_plan<F, N, kSums / 2, true>(step, input, plan, stream);
}

template <TileFormat F>
void launch_rows(const TileStep& step, const StepInput& input, StreamHandle stream) {
  if (step.experts.most_groups > 0 && input.n == 1) return launch_experts<F, 1>(step, input, stream);
  if (step.experts.most_groups > 0) return launch_experts<F, 8>(step, input, stream);
  if (input.n == 1) return launch<F, 1>(step, input, stream);
  if (input.n == 2) return launch<F, 2>(step, input, stream);
  if (input.n <= 4) return launch<F, 4>(step, input, stream);
  launch<F, 8>(step, input, stream);
}

}  // namespace lode::cuda::tiles
