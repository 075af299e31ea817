// SPDX-License-Identifier: Apache-2.0
// What kernels on Hopper's own matrix instructions share: barriers between warps that bring and warps that
// multiply, addresses of matrices, and the product of 64 x 16 and 16 x 128 numbers by a warpgroup.
#pragma once

#include "kernels/cuda/device/element.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

namespace lode::cuda {

struct Barrier {
  unsigned at;  // in shared memory
  __device__ void init(int arrivals) const {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
  }
  __device__ void arrive() const {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(at) : "memory");
  }
  /// Is the phase of this parity over?
  __device__ bool passed(int parity) const {
    unsigned done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(at), "r"(parity)
        : "memory");
    return done != 0;
  }
  __device__ void wait(int parity) const {
    while (!passed(parity)) {
    }
  }
};

/// The address of a matrix as the matrix unit wants it: 128-byte swizzle, `leading` and `stride` in bytes.
__device__ __forceinline__ unsigned long long descriptor(unsigned address, unsigned leading,
                                                         unsigned stride) {
  return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
         static_cast<unsigned long long>(leading >> 4) << 16 |
         static_cast<unsigned long long>(stride >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ void fence_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Newer, int N>
__device__ __forceinline__ void wait_for_products(float (&c)[N]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Newer) : "memory");
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

#define LODE_SUMS                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define LODE_SUM_OPERANDS(c)                                                                                \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),           \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), \
      "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]),            \
      "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]),            \
      "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]),            \
      "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43]),            \
      "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]), "+f"(c[50]),            \
      "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), "+f"(c[57]),            \
      "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])

// Half as many.
#define LODE_FEW_SUMS                                                       \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define LODE_FEW_SUM_OPERANDS(c)                                                                            \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),           \
      "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), \
      "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]),            \
      "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]),            \
      "+f"(c[30]), "+f"(c[31])

// c (+)= a b, 64 x 128 x 16, or 64 x 64 x 16. Both from shared memory, columns of a product contiguous; or a
// from registers and b with its rows contiguous.
#define LODE_PRODUCTS(type)                                                                                \
  static __device__ __forceinline__ void scores(float(&c)[64], unsigned long long a, unsigned long long b, \
                                                int add) {                                                 \
    asm volatile(                                                                                          \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." type      \
        "." type " " LODE_SUMS ", %64, %65, p, 1, 1, 0, 0;\n}"                                             \
        : LODE_SUM_OPERANDS(c)                                                                             \
        : "l"(a), "l"(b), "r"(add));                                                                       \
  }                                                                                                        \
  static __device__ __forceinline__ void scores(float(&c)[32], unsigned long long a, unsigned long long b, \
                                                int add) {                                                 \
    asm volatile(                                                                                          \
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type       \
        "." type " " LODE_FEW_SUMS ", %32, %33, p, 1, 1, 0, 0;\n}"                                         \
        : LODE_FEW_SUM_OPERANDS(c)                                                                         \
        : "l"(a), "l"(b), "r"(add));                                                                       \
  }                                                                                                        \
  static __device__ __forceinline__ void outputs(float(&c)[64], const unsigned(&a)[4],                     \
                                                 unsigned long long b) {                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " " LODE_SUMS                \
                 ", {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"                                                \
                 : LODE_SUM_OPERANDS(c)                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                    \
  }

template <class T>
struct Unit;
template <>
struct Unit<__nv_bfloat16> {
  LODE_PRODUCTS("bf16")
};
template <>
struct Unit<__half> {
  LODE_PRODUCTS("f16")
};

}  // namespace lode::cuda

#endif
