// SPDX-License-Identifier: Apache-2.0
// How the blocks that share a list of keys merge their states: each posts records of four columns of the
// output in global memory, those of the list that started last read them, column by column. The order of
// merging depends on the number of pieces alone.
//
// What is posted at once, in one access, does not begin with +0 (-0 stands for it), and the reader puts +0
// back, so that a place says by itself whether its numbers have come: neither fences nor flags, one trip
// through the second-level cache.
#pragma once

#include "kernels/cuda/attend/tile_loop.cuh"

namespace lode::cuda {

constexpr int kSubs = 8;              // lanes of a warp that share a column; a warp takes four columns
constexpr int kAhead = 9;             // records that a lane asks for at once, at most
constexpr int kFew = 5, kFewest = 4;  // and where there are no more, by fewer instructions with the same bits

/// Unnormalised sums of four columns, with the peak and sum of their head.
struct Record {
  float4 o = {};
  float m = -INFINITY, l = 0.0f;
};

__device__ __forceinline__ void add(Record& to, const Record& x, float factor) {
  to.o.x += factor * x.o.x, to.o.y += factor * x.o.y, to.o.z += factor * x.o.z, to.o.w += factor * x.o.w;
  to.l += factor * x.l;
}
/// Several records together.
template <int kCount>
__device__ __forceinline__ Record together(const Record (&x)[kCount], float peak) {
  Record sum;
  sum.m = peak;
#pragma unroll
  for (int i = 0; i < kCount; ++i) add(sum, x[i], decay(x[i].m, peak));
  return sum;
}
template <int kCount>
__device__ __forceinline__ float peak_of(const Record (&x)[kCount]) {
  float peak = x[0].m;
#pragma unroll
  for (int i = 1; i < kCount; ++i) peak = fmaxf(peak, x[i].m);
  return peak;
}
/// Those of the lanes that share a column, every fourth of a warp: all of them get the sum.
template <int kCount>
__device__ __forceinline__ Record fold(const Record (&x)[kCount]) {
  float peak = peak_of(x);
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, offset));
  Record sum = together(x, peak);
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
    sum.o.x += __shfl_xor_sync(~0u, sum.o.x, offset);
    sum.o.y += __shfl_xor_sync(~0u, sum.o.y, offset);
    sum.o.z += __shfl_xor_sync(~0u, sum.o.z, offset);
    sum.o.w += __shfl_xor_sync(~0u, sum.o.w, offset);
    sum.l += __shfl_xor_sync(~0u, sum.l, offset);
  }
  return sum;
}

__device__ __forceinline__ bool empty(float x) {
  return __float_as_uint(x) == 0;
}
__device__ __forceinline__ float full(float x) {
  return x == 0.0f ? -0.0f : x;
}
/// The four numbers of o come at once, as one of 128 bits.
__device__ __forceinline__ bool has_come(const Record& x) {
  return !(empty(x.o.x) || empty(x.m) || empty(x.l));
}

/// Places in global memory for the records of one list. What four columns of a part need lies together, in
/// whole sectors of the second-level cache (32 bytes), and so is never completed from memory: four times o,
/// then m and l, twice m and l again. They stay in that cache before keys and values do.
struct Posted {
  float4* at;  // [columns / 4, stride, 6]
  int stride;

  __device__ float4* of(int group, int part) const { return at + (std::int64_t{group} * stride + part) * 6; }
  __device__ static std::uint64_t stay() {
    std::uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
  }
  __device__ static void put(float4* to, float4 x, std::uint64_t policy) {
    asm volatile(
        "{\n"
        ".reg .b64 low, high;\n"
        ".reg .b128 all;\n"
        "mov.b64 low, {%1, %2};\n"
        "mov.b64 high, {%3, %4};\n"
        "mov.b128 all, {low, high};\n"
        "st.relaxed.gpu.global.L2::cache_hint.b128 [%0], all, %5;\n"
        "}" ::"l"(to),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "l"(policy)
        : "memory");
  }
  /// Where a lane posts a column of a part; four lanes beside one another post the four of a group.
  struct Place {
    float4* group;
    int column;  // of the group
    std::uint64_t policy;

    __device__ void post(const Record& x) const {
      put(group + column, {full(x.o.x), x.o.y, x.o.z, x.o.w}, policy);
      // Nobody waits for the second of the two, so it holds what a cleared record holds; with it the sector
      // is written whole.
      if (column == 0) put(group + 4, {full(x.m), full(x.l), full(x.m), full(x.l)}, policy);
      if (column == 1) put(group + 5, {0.0f, 0.0f, 0.0f, 0.0f}, policy);
    }
  };
  __device__ Place place(int column, int part) const { return {of(column / 4, part), column % 4, stay()}; }
  /// What is there now, where it is wanted; several may be under way.
  __device__ static void ask(const float4* from, int column, bool wanted, Record& x) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        ".reg .b64 low, high;\n"
        ".reg .b128 all;\n"
        "setp.ne.s32 wanted, %8, 0;\n"
        "mov.b64 low, {%0, %1};\n"
        "mov.b64 high, {%2, %3};\n"
        "mov.b128 all, {low, high};\n"
        "@wanted ld.relaxed.gpu.global.b128 all, [%6];\n"
        "mov.b128 {low, high}, all;\n"
        "mov.b64 {%0, %1}, low;\n"
        "mov.b64 {%2, %3}, high;\n"
        "@wanted ld.relaxed.gpu.global.v2.f32 {%4, %5}, [%7];\n"
        "}"
        : "+f"(x.o.x), "+f"(x.o.y), "+f"(x.o.z), "+f"(x.o.w), "+f"(x.m), "+f"(x.l)
        : "l"(from + column), "l"(from + 4), "r"(static_cast<int>(wanted))
        : "memory");
  }
};

/// A lane's share of the records of a group of columns, kMost at most: parts sub, sub + subs, ... where
/// `subs` count over the lanes that share a column. Lane % 4 is the column.
template <int kMost>
struct Taking {
  float4* first = nullptr;
  int mine = 0, subs = 1;
  unsigned missing = 0;
  Record x[kMost];

  __device__ __forceinline__ void start(float4* at, int parts, int sub, int all_subs) {
    first = at, subs = all_subs;
    mine = sub < parts ? (parts - sub + subs - 1) / subs : 0;
    missing = (1u << mine) - 1;
  }
  __device__ __forceinline__ void ask() {
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      Posted::ask(first + i * subs * 6, threadIdx.x % 4, (missing >> i & 1) != 0, x[i]);
  }
  __device__ __forceinline__ void look() {
#pragma unroll
    for (int i = 0; i < kMost; ++i)
      if (has_come(x[i])) missing &= ~(1u << i);
  }
  /// Once nothing is missing to any lane of the warp: leaves the places empty. Lanes 0 to 3 hold columns 0 to
  /// 3.
  __device__ __forceinline__ Record take() const {
    const int column = threadIdx.x % 4;
    const std::uint64_t policy = Posted::stay();
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i >= mine) continue;
      float4* const at = first + i * subs * 6 + column;
      Posted::put(at, {}, policy);
      if (column < 2) Posted::put(at + 4, {}, policy);
    }
    return fold(x);
  }
};

/// A warp's share, all of it, kMost records a lane at most, of which the lane's first lies there.
template <int kMost>
__device__ __forceinline__ Record take_posted(float4* first, int parts, int sub, int subs) {
  Taking<kMost> taking;
  taking.start(first, parts, sub, subs);
  while (taking.missing != 0) taking.ask(), taking.look();
  __syncwarp();  // all four columns have the m and l
  return taking.take();
}

}  // namespace lode::cuda
