// SPDX-License-Identifier: Apache-2.0
// The end of a block of decode attention: the states of its warps become one, and the blocks of a list that
// started last merge what all have posted and write the output.
#pragma once

#include "kernels/cuda/attend/attend_merge.cuh"

namespace lode::cuda {

/// How many of the list's blocks have started before this one: one thread asks. Not atomicAdd, nor an
/// addition as assembly: of both the compiler makes a vote and a shuffle of the result, which waits for the
/// trip at once.
__device__ __forceinline__ unsigned take_ticket(const Params& p, std::int64_t list) {
  unsigned ticket;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;"
               : "=r"(ticket)
               : "l"(p.tickets + list)
               : "memory");
  return ticket;
}

/// Where four columns of a warp's state lie in shared memory.
template <int D>
struct StateAt {
  const float4* o;
  const float2* ml;

  __device__ __forceinline__ StateAt(const char* state, int heads, int column)
      : o(reinterpret_cast<const float4*>(state) + column),
        ml(reinterpret_cast<const float2*>(state + heads * D * 4) + column * 4 / D) {}
};
/// The states there, so many bytes apart: those of the block's warps, or one of all of them.
template <int kStates = kWarps, int D>
__device__ __forceinline__ Record merge_warps(const StateAt<D>& first, int state_bytes) {
  Record x[kStates];
#pragma unroll
  for (int w = 0; w < kStates; ++w) {
    x[w].o = first.o[w * state_bytes / 16];
    const float2 ml = first.ml[w * state_bytes / 8];
    x[w].m = ml.x, x[w].l = ml.y;
  }
  return together(x, peak_of(x));
}

/// Four merged numbers to their place: normalised, the tail merged last.
template <int D>
__device__ void write_result(const Params& p, std::int64_t first_row, int column, const Record& sum) {
  const int head = column * 4 / D, at = column * 4 % D;
  const std::int64_t row = first_row + head;
  const float inverse = sum.l == 0.0f ? 0.0f : reciprocal(sum.l);
  float4 x = {sum.o.x * inverse, sum.o.y * inverse, sum.o.z * inverse, sum.o.w * inverse};
  const bool has_tail = p.lists.tail_lse != nullptr && p.lists.tail_lse[row] != -INFINITY;
  if (has_tail || p.queries.lse != nullptr) {
    float lse = sum.l == 0.0f ? -INFINITY : (sum.m == -INFINITY ? 0.0f : sum.m) * kLn2 + logf(sum.l);
    if (has_tail) {
      const float tail = p.lists.tail_lse[row], peak = fmaxf(lse, tail);
      const float mine = lse == -INFINITY ? 0.0f : expf(lse - peak), theirs = expf(tail - peak);
      const float keep = mine / (mine + theirs), more = theirs / (mine + theirs);
      const float4 y = *reinterpret_cast<const float4*>(p.lists.tail_output + row * D + at);
      x = {x.x * keep + y.x * more, x.y * keep + y.y * more, x.z * keep + y.z * more,
           x.w * keep + y.w * more};
      lse = peak + logf(mine + theirs);
    }
    if (p.queries.lse != nullptr && at == 0) p.queries.lse[row] = lse;
  }
  *reinterpret_cast<float4*>(p.queries.o + row * D + at) = x;
}

/// Parts that a warp merges by itself: the order of merging depends on this.
constexpr int kMostApart = kSubs * kAhead;

/// The first of the records that a lane takes, where a warp merges by itself and where a block does.
__device__ __forceinline__ int sub_of_warp() {
  return static_cast<int>(threadIdx.x) % 32 / 4;
}
__device__ __forceinline__ int sub_of_block() {
  return static_cast<int>(threadIdx.x) / 32 * kSubs + sub_of_warp();
}
/// A warp merges what was posted of a group of columns, where there are few parts; `first` is the lane's.
template <int D, int kMost>
__device__ __forceinline__ void merge_apart(const Params& p, float4* first, std::int64_t first_row, int group,
                                            int parts) {
  const int lane = threadIdx.x % 32;
  const Record sum = take_posted<kMost>(first, parts, sub_of_warp(), kSubs);
  if (lane < 4) write_result<D>(p, first_row, group * 4 + lane, sum);
}
/// The block does, however many there are.
template <int D, int kMost = kAhead>
__device__ __forceinline__ void merge_jointly(const Params& p, float4* first, std::int64_t first_row,
                                              int group, int parts) {
  __shared__ Record of_warps[kWarps][4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Record sum = take_posted<kMost>(first, parts, sub_of_block(), kWarps * kSubs);
  if (lane < 4) of_warps[warp][lane] = sum;
  __syncthreads();
  if (threadIdx.x < 4) {
    Record x[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x[w] = of_warps[w][threadIdx.x];
    write_result<D>(p, first_row, group * 4 + threadIdx.x, together(x, peak_of(x)));
  }
  __syncthreads();
}

/// What a block does when its warps have walked over their part of a list: it posts their state, and merges
/// groups of columns if it is one of those that started last. List number `list` of all. `kStates`: as merge_warps has
/// them.
template <int D, int kStates = kWarps>
class Ending {
 public:
  /// `states`: of the block's warps, in shared memory.
  __device__ __forceinline__ Ending(const Params& p, std::int64_t list, std::int64_t first_row, int heads,
                                    int part, const char* states)
      : p_(p),
        list_(list),
        first_row_(first_row),
        posted_{p.posted + list * (heads * D / 4) / 4 * p.most_parts * 6, p.most_parts},
        heads_(heads),
        states_(states),
        mine_(states, heads, static_cast<int>(threadIdx.x)),
        place_(posted_.place(static_cast<int>(threadIdx.x), part)) {
    asm volatile("" : "+l"(place_.group), "+l"(place_.policy));  // here, not behind a barrier
  }

  /// All threads meet; `ticket` is that of thread 0, where there are several parts. Where there is time for
  /// the ticket to come, in front of run(): what is worked out from it is not waited for then.
  __device__ __forceinline__ void draw(unsigned ticket, int parts) {
    __shared__ unsigned shared_ticket;
    parts_ = parts;
    if (threadIdx.x == 0) shared_ticket = ticket;
    __syncthreads();
    to_come_ = parts_ - 1 - static_cast<int>(shared_ticket);
    mergers_ = min(p_.most_mergers, parts_);
    const int warp = threadIdx.x / 32;
    group_ = apart() ? to_come_ * kWarps + warp : to_come_;
    first_ = posted_.of(group_, apart() ? sub_of_warp() : sub_of_block());
    asm volatile("" : "+l"(first_), "+r"(group_));
  }

  /// The states are there, so many bytes apart, and all threads have met since.
  template <int kStateBytes>
  __device__ __forceinline__ void run() {
    for (int column = threadIdx.x; column < heads_ * D / 4; column += kThreads) {
      if (column >= kThreads) mine_ = StateAt<D>(states_, heads_, column);
      const Record mine = merge_warps<kStates>(mine_, kStateBytes);
      if (parts_ == 1)
        write_result<D>(p_, first_row_, column, mine);
      else
        place_.post(mine);
      place_.group += std::int64_t{kThreads / 4} * posted_.stride * 6;
    }
    if (parts_ == 1 || to_come_ >= mergers_) return;
    if (to_come_ == 0 && threadIdx.x == 0) p_.tickets[list_] = 0;
    const int lanes = apart() ? kSubs : kWarps * kSubs;  // that share a column
    if (parts_ <= lanes * kFewest)
      merge<kFewest>();
    else if (parts_ <= lanes * kFew)
      merge<kFew>();
    else
      merge<kAhead>();
  }

 private:
  __device__ bool apart() const { return parts_ <= kMostApart; }

  template <int kMost>
  __device__ __forceinline__ void merge() {
    const int at_once = apart() ? kWarps : 1, step = mergers_ * at_once, groups = heads_ * D / 16;
    for (; group_ < groups; group_ += step, first_ += std::int64_t{step} * posted_.stride * 6) {
      if (apart())
        merge_apart<D, kMost>(p_, first_, first_row_, group_, parts_);
      else
        merge_jointly<D, kMost>(p_, first_, first_row_, group_, parts_);
    }
  }

  const Params& p_;
  const std::int64_t list_, first_row_;
  const Posted posted_;
  const int heads_;
  const char* const states_;
  StateAt<D> mine_;      // of the thread's column
  Posted::Place place_;  // of that one
  int parts_ = 1;        // that the list is cut into
  int to_come_ = 0;      // blocks of the list that started later
  int mergers_ = 1;
  int group_ = 0;            // the first group of columns that is merged
  float4* first_ = nullptr;  // and the lane's first record of it
};

}  // namespace lode::cuda
