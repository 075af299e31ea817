// SPDX-License-Identifier: Apache-2.0
// The end of a block of decode attention: the states of its warps become one, and the blocks of a list that
// started last merge what all have posted and write the output.
#pragma once

#include "kernels/cuda/attend_merge.cuh"

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

/// The states of the block's warps, in shared memory, for four columns.
template <int D>
__device__ Record merge_warps(const char* states, int state_bytes, int heads, int column) {
  Record x[kWarps];
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float* const state = reinterpret_cast<const float*>(states + w * state_bytes);
    x[w].o = *reinterpret_cast<const float4*>(state + column * 4);
    const float2 ml = *reinterpret_cast<const float2*>(state + heads * D + column * 4 / D * 2);
    x[w].m = ml.x, x[w].l = ml.y;
  }
  return together(x, peak_of(x));
}

/// Four merged numbers to their place: normalised, the tail merged last.
template <int D>
__device__ void write_result(const Params& p, std::int64_t first_row, int column, const Record& sum) {
  const int head = column * 4 / D, at = column * 4 % D;
  const std::int64_t row = first_row + head;
  const float inverse = sum.l == 0.0f ? 0.0f : 1.0f / sum.l;
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

/// A warp merges what was posted of a group of columns, where there are few parts.
template <int D, int kMost>
__device__ __forceinline__ void merge_apart(const Params& p, const Posted& posted, std::int64_t first_row,
                                            int group, int parts) {
  const int lane = threadIdx.x % 32;
  const Record sum = take_posted<kMost>(posted, group, parts, lane / 4, kSubs);
  if (lane < 4) write_result<D>(p, first_row, group * 4 + lane, sum);
}
/// The block does, however many there are.
template <int D, int kMost = kAhead>
__device__ __forceinline__ void merge_jointly(const Params& p, const Posted& posted, std::int64_t first_row,
                                              int group, int parts) {
  __shared__ Record of_warps[kWarps][4];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Record sum = take_posted<kMost>(posted, group, parts, warp * kSubs + lane / 4, kWarps * kSubs);
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
/// Parts that a warp merges by itself: the order of merging depends on this.
constexpr int kMostApart = kSubs * kAhead;

/// The records that all blocks of the list posted; `to_come` of its blocks started later than this one.
template <int D, int kMost>
__device__ __forceinline__ void merge_posted(const Params& p, const Posted& posted, std::int64_t first_row,
                                             int columns, int parts, int to_come) {
  const int mergers = min(p.most_mergers, parts), warp = threadIdx.x / 32;
  const bool apart = parts <= kMostApart;
  const int at_once = apart ? kWarps : 1, groups = columns / 4;
  for (int from = to_come * at_once; from < groups; from += mergers * at_once) {
    if (!apart)
      merge_jointly<D, kMost>(p, posted, first_row, from, parts);
    else if (from + warp < groups)
      merge_apart<D, kMost>(p, posted, first_row, from + warp, parts);
  }
}

/// All of it, once the state of each warp is in `shared`. List number `list` of all is cut into `parts`
/// pieces, of which this block has walked over one. `ticket` is that of thread 0, where there are several.
template <int D>
__device__ __forceinline__ void finish_block(const Params& p, const char* shared, int ring_bytes,
                                             std::int64_t list, std::int64_t first_row, int heads,
                                             int columns, int part, int parts, unsigned ticket) {
  __shared__ unsigned shared_ticket;
  if (threadIdx.x == 0) shared_ticket = ticket;
  const Posted posted = {p.posted + list * columns / 4 * p.most_parts * 6, p.most_parts};
  Posted::Place place = posted.place(static_cast<int>(threadIdx.x), part);
  asm volatile("" : "+l"(place.group), "+l"(place.policy));  // in front of the barrier, not behind it
  __syncthreads();
  for (int column = threadIdx.x; column < columns; column += kThreads) {
    const Record mine = merge_warps<D>(shared, ring_bytes, heads, column);
    if (parts == 1)
      write_result<D>(p, first_row, column, mine);
    else
      place.post(mine);
    place.group += std::int64_t{kThreads / 4} * posted.stride * 6;
  }
  if (parts == 1) return;
  const int to_come = parts - 1 - static_cast<int>(shared_ticket);  // blocks that started later
  if (to_come >= min(p.most_mergers, parts)) return;
  if (to_come == 0 && threadIdx.x == 0) p.tickets[list] = 0;
  const int lanes = parts <= kMostApart ? kSubs : kWarps * kSubs;  // that share a column
  if (parts <= lanes * kFew)
    merge_posted<D, kFew>(p, posted, first_row, columns, parts, to_come);
  else
    merge_posted<D, kAhead>(p, posted, first_row, columns, parts, to_come);
}

}  // namespace lode::cuda
