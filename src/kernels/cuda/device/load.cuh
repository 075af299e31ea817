// SPDX-License-Identifier: Apache-2.0
// Loads that the compiler may not put off until their first use.
#pragma once

#include <cstdint>

namespace lode::cuda {

/// Zeros where nothing is wanted.
__device__ __forceinline__ float4 load_here(const float* from, bool wanted) {
  float4 x = {};
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.s32 wanted, %5, 0;\n"
      "@wanted ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
      : "l"(from), "r"(static_cast<int>(wanted)));
  return x;
}
/// The same from the second-level cache, whatever the first holds.
__device__ __forceinline__ float4 load_fresh(const float* from, bool wanted) {
  float4 x = {};
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.s32 wanted, %5, 0;\n"
      "@wanted ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];\n"
      "}"
      : "+f"(x.x), "+f"(x.y), "+f"(x.z), "+f"(x.w)
      : "l"(from), "r"(static_cast<int>(wanted)));
  return x;
}
__device__ __forceinline__ float load_one_here(const float* from, bool wanted) {
  float x = 0.0f;
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.s32 wanted, %2, 0;\n"
      "@wanted ld.global.f32 %0, [%1];\n"
      "}"
      : "+f"(x)
      : "l"(from), "r"(static_cast<int>(wanted)));
  return x;
}
__device__ __forceinline__ const char* load_here(const char* const* from) {
  const char* x;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(x) : "l"(from));
  return x;
}
__device__ __forceinline__ int load_here(const std::int32_t* from) {
  int x;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
/// Or the number given, where there is no place.
__device__ __forceinline__ int load_here(const std::int32_t* from, int otherwise) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.s64 wanted, %1, 0;\n"
      "@wanted ld.global.s32 %0, [%1];\n"
      "}"
      : "+r"(otherwise)
      : "l"(from));
  return otherwise;
}

}  // namespace lode::cuda
