// SPDX-License-Identifier: Apache-2.0
// Counting select where sixteen blocks hold a list in registers. Work map: a cluster for each list, sixteen
// entries a thread, the best score as level 0.
//
//   scores -> entries of each level, counted in shared memory -> counts to all blocks (cta_cluster_mailbox.cuh) ->
//   one warp of each finds the level where the list ends and what of it is in earlier blocks -> the warps'
//   counts -> rows
//
// There is one exchange, and nobody waits for a barrier of the cluster. Entries stay packed, two a register:
// which of them are chosen is a subtraction and a mask for both.
#include "kernels/cuda/device/cta_cluster_mailbox.cuh"
#include "kernels/cuda/device/load.cuh"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/device/scan.cuh"
#include "kernels/cuda/select/counting_select.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#pragma nv_diag_suppress 177  // the kernel is empty there, and what it uses is not
#endif

namespace lode::cuda {

namespace {

constexpr int kRanks = 16, kThreads = 512, kWarps = kThreads / 32;
constexpr int kOfWarp = 512;  // entries: of each lane eight, and the eight that lie kRun further on
constexpr int kRun = kOfWarp / 2, kOfBlock = kWarps * kOfWarp, kOfCluster = kRanks * kOfBlock;
constexpr int kBlocks = 3;  // of a processor: the next launch's find room beside these

/// Where a list ends: entries below the level are chosen, and those at it but for the first `skipped`.
struct Level {
  int level, better_before, ties_before, skipped;  ///< before: in earlier blocks
};

/// For as many levels as a lane has words of two.
template <int kWords>
class CountingSelect {
 public:
  static constexpr int kLevels = 64 * kWords;
  static constexpr unsigned kNone = kLevels;  ///< of what is no entry
  struct Shared {
    alignas(16) unsigned own[kLevels + 4];
    alignas(16) unsigned counts[kRanks][32 * kWords];  ///< of each block, two levels a word
    alignas(16) Level level;
    unsigned of_warps[kWarps];
    Inbox of_counts;
  };

  __device__ CountingSelect(const CountingJob& job, Shared& shared)
      : job_(job),
        s_(shared),
        rank_(static_cast<int>(blockIdx.x) % kRanks),
        list_(static_cast<int>(blockIdx.x) / kRanks),
        tid_(static_cast<int>(threadIdx.x)),
        lane_(tid_ % 32),
        warp_(tid_ / 32),
        first_((rank_ * kWarps + warp_) * kOfWarp + lane_ * 8),
        fours_((job.levels + 7) / 8) {}

  __device__ void run() {
    if (tid_ == 0) {
      open_inbox(&s_.of_counts);
      publish_inboxes();
      expect(&s_.of_counts, static_cast<unsigned>(kRanks * fours_) * 16);
    }
#pragma unroll 1
    for (int i = tid_; i < kLevels + 4; i += kThreads) s_.own[i] = 0;
    __syncwarp();
    arrive_in_cluster();
    wait_for_cluster();
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    load();
    count();
    send_counts();
    if (warp_ == 0) find_level();
    __syncthreads();
    give_rows();
  }

 private:
  /// Levels of two entries, kRun apart, in each register.
  __device__ void load() {
    const int n = static_cast<int>(job_.n);
    const std::uint16_t* const from = job_.scores + list_ * job_.n + first_;
    uint4 raw[2] = {};
    if (first_ < n) raw[0] = *reinterpret_cast<const uint4*>(from);
    if (first_ + kRun < n) raw[1] = *reinterpret_cast<const uint4*>(from + kRun);
    wanted_ = load_here(job_.k + list_);
    const int length = job_.lengths == nullptr ? n : min(n, load_here(job_.lengths + list_));
    const unsigned a[4] = {raw[0].x, raw[0].y, raw[0].z, raw[0].w},
                   b[4] = {raw[1].x, raw[1].y, raw[1].z, raw[1].w};
    const unsigned most = static_cast<unsigned>(job_.levels - 1) * 0x10001u;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const unsigned both = __byte_perm(a[i / 2], b[i / 2], i % 2 == 0 ? 0x5410 : 0x7632);
      entries_[i] = most - __vminu2(both, most);
    }
    if (first_ - lane_ * 8 + kOfWarp <= length) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (first_ + i >= length) entries_[i] = (entries_[i] & 0xffff0000u) | kNone;
      if (first_ + i + kRun >= length) entries_[i] = (entries_[i] & 0xffffu) | kNone << 16;
    }
  }
  __device__ void count() const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      atomicAdd(&s_.own[entries_[i] & 0xffffu], 1u);
      atomicAdd(&s_.own[entries_[i] >> 16], 1u);
    }
    __syncthreads();
  }
  __device__ void send_counts() const {
#pragma unroll 1
    for (int i = tid_; i < fours_ * kRanks; i += kThreads) {
      const int four = i / kRanks, to = i % kRanks;
      const uint4 a = *reinterpret_cast<const uint4*>(&s_.own[8 * four]),
                  b = *reinterpret_cast<const uint4*>(&s_.own[8 * four + 4]),
                  both = {a.x | a.y << 16, a.z | a.w << 16, b.x | b.y << 16, b.z | b.w << 16};
      send(address_in(&s_.counts[rank_][4 * four], to), both, address_in(&s_.of_counts, to));
    }
  }

  /// By one warp.
  __device__ void find_level() const {
    constexpr int kEach = 2 * kWords, kTogether = 65535 / kOfBlock;  // blocks whose sums fit in 16 bits
    int here[kEach] = {}, earlier[kEach] = {};
    wait_for(&s_.of_counts);
#pragma unroll
    for (int first = 0; first < kRanks; first += kTogether) {
      unsigned sum[kWords] = {}, before[kWords] = {};
#pragma unroll
      for (int r = first; r < min(kRanks, first + kTogether); ++r) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
          const unsigned two = s_.counts[r][lane_ * kWords + i];
          sum[i] += two, before[i] += r < rank_ ? two : 0u;
        }
      }
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        here[2 * i] += static_cast<int>(sum[i] & 0xffffu), here[2 * i + 1] += static_cast<int>(sum[i] >> 16);
        earlier[2 * i] += static_cast<int>(before[i] & 0xffffu);
        earlier[2 * i + 1] += static_cast<int>(before[i] >> 16);
      }
    }
    const int first = lane_ * kEach;
    int mine = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (first + i >= job_.levels) here[i] = earlier[i] = 0;  // nobody sent it
      mine += here[i];
    }
    const int capacity = static_cast<int>(min(job_.capacity, job_.n)), k = max(0, min(wanted_, capacity));
    const int up_to = sum_up_to(mine, lane_);
    const unsigned enough = __ballot_sync(~0u, up_to >= k);
    const int at = enough == 0 ? 31 : __ffs(static_cast<int>(enough)) - 1;
    int better = up_to - mine, ties = here[0], level = first;
#pragma unroll
    for (int i = 1; i < kEach; ++i)
      if (better + ties < k) better += ties, ties = here[i], level = first + i;
    level = __shfl_sync(~0u, level, at), better = __shfl_sync(~0u, better, at);
    ties = __shfl_sync(~0u, ties, at);
    int better_before = 0, ties_before = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (first + i < level) better_before += earlier[i];
      if (first + i == level) ties_before += earlier[i];
    }
    better_before = __reduce_add_sync(~0u, better_before), ties_before = __reduce_add_sync(~0u, ties_before);
    const int taken = min(ties, (job_.all_ties && k > 0 ? capacity : k) - better);
    if (lane_ != 0) return;
    s_.level = {level, better_before, ties_before, ties - taken};
    if (rank_ == 0) job_.counts[list_] = better + taken;
  }

  /// Of a lane's entries those up to a level: bits 0 to 7, and those kRun further on, bits 16 to 23.
  __device__ unsigned up_to(int level) const {
    const unsigned top = 0x80008000u + static_cast<unsigned>(level) * 0x10001u;  // takes any level from -1 on
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) bits |= ((top - entries_[i]) & 0x80008000u) >> (15 - i);
    return bits;
  }
  __device__ void give_rows() const {
    const Level l = s_.level;
    const unsigned better = up_to(l.level - 1);
    unsigned chosen = up_to(l.level);
    const unsigned own =
        __reduce_add_sync(~0u, static_cast<unsigned>(__popc(better) | __popc(chosen ^ better) << 16));
    if (lane_ == 0) s_.of_warps[warp_] = own;
    __syncthreads();
    const unsigned before = __reduce_add_sync(~0u, lane_ < warp_ ? s_.of_warps[lane_] : 0u);
    const int ties_before = l.ties_before + static_cast<int>(before >> 16), skipped = l.skipped - ties_before,
              place = l.better_before + static_cast<int>(before & 0xffffu) + max(0, -skipped);
    if (skipped > 0)
      chosen = skipped < static_cast<int>(own >> 16) ? without_ties(better, chosen, skipped) : better;
    const int first_run = __popc(chosen & 0xffffu);
    const unsigned both = static_cast<unsigned>(first_run | __popc(chosen >> 16) << 16),
                   to = sum_up_to(both, lane_), of_first_run = __shfl_sync(~0u, to, 31) & 0xffffu;
    std::int32_t* const near = job_.rows + list_ * job_.capacity + place + ((to - both) & 0xffffu);
    std::int32_t* const far = near - ((to - both) & 0xffffu) + of_first_run + ((to - both) >> 16) - first_run;
    int given = 0;
#pragma unroll 1
    for (unsigned left = chosen; left != 0; left &= left - 1, ++given) {
      const int bit = __ffs(static_cast<int>(left)) - 1;
      (bit < 16 ? near : far)[given] = first_ + bit + (bit < 16 ? 0 : kRun - 16);
    }
  }
  /// Of the warp's chosen entries without the first `skipped` of those that are not better.
  __device__ unsigned without_ties(unsigned better, unsigned chosen, int skipped) const {
#pragma unroll 1
    for (int shift = 0; shift < 32; shift += 16) {
      unsigned ties = (chosen ^ better) >> shift & 0xffffu;
      const int mine = __popc(ties), to = sum_up_to(mine, lane_);
      const int skips = min(mine, skipped - (to - mine));
#pragma unroll 1
      for (int i = 0; i < skips; ++i, ties &= ties - 1) chosen ^= (ties & (~ties + 1)) << shift;
      skipped -= __shfl_sync(~0u, to, 31);
    }
    return chosen;
  }

  const CountingJob& job_;
  Shared& s_;
  const int rank_, list_, tid_, lane_, warp_, first_, fours_;
  int wanted_ = 0;
  unsigned entries_[8] = {};
};

template <int kWords>
__global__ void __launch_bounds__(kThreads, kBlocks)
    counting_kernel(const __grid_constant__ CountingJob job) {
#if __CUDA_ARCH__ >= 900
  __shared__ typename CountingSelect<kWords>::Shared shared;
  CountingSelect<kWords>(job, shared).run();
#endif
}

template <int kWords>
bool launch(const CountingJob& job, std::int64_t lists, StreamHandle stream) {
  const auto kernel = counting_kernel<kWords>;
  static PerDevice<int> placed;
  const int at_once = placed.get([=] {
    return can_place(kernel, kRanks, kThreads, 0, kBlocks)
               ? EarlyLaunch(dim3(kRanks), kThreads, 0, kRanks, nullptr).clusters_at_once(kernel)
               : 0;
  });
  if (lists > at_once) return false;
  EarlyLaunch(dim3(static_cast<unsigned>(lists * kRanks)), kThreads, 0, kRanks, stream)(kernel, job);
  return true;
}

}  // namespace

bool counting_select_in_cluster(const CountingJob& job, std::int64_t lists, StreamHandle stream) {
  const bool aligned = job.n % 8 == 0 && reinterpret_cast<std::uintptr_t>(job.scores) % 16 == 0;
  if (!has_clusters() || !aligned || job.n > kOfCluster || lists == 0) return false;
  if (job.levels <= CountingSelect<1>::kLevels) return launch<1>(job, lists, stream);
  return job.levels <= CountingSelect<4>::kLevels && launch<4>(job, lists, stream);
}

}  // namespace lode::cuda
