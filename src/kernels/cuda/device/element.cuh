// SPDX-License-Identifier: Apache-2.0
// Numbers of a file's or store's type on the device: widened to float32 when read, rounded to nearest even
// when written.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "lodestone/types.h"

namespace lode::cuda {

__device__ __forceinline__ float widen(float x) {
  return x;
}
__device__ __forceinline__ float widen(__nv_bfloat16 x) {
  return __bfloat162float(x);
}
__device__ __forceinline__ float widen(__half x) {
  return __half2float(x);
}

__device__ __forceinline__ void narrow(float x, float* to) {
  *to = x;
}
__device__ __forceinline__ void narrow(float x, __nv_bfloat16* to) {
  *to = __float2bfloat16_rn(x);
}
__device__ __forceinline__ void narrow(float x, __half* to) {
  *to = __float2half_rn(x);
}

/// Sixteen bytes of T, widened.
template <class T>
inline constexpr int kPack = 16 / static_cast<int>(sizeof(T));
template <class T>
__device__ __forceinline__ void widen_pack(uint4 raw, float (&out)[kPack<T>]) {
  const T* elements = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) out[i] = widen(elements[i]);
}

/// A vector whose type is known when the kernel runs; `data` null when there is none.
struct Vector {
  const void* data = nullptr;
  DType type = DType::f32;

  __device__ __forceinline__ float operator[](std::int64_t i) const {
    if (type == DType::bf16) return widen(static_cast<const __nv_bfloat16*>(data)[i]);
    if (type == DType::f16) return widen(static_cast<const __half*>(data)[i]);
    return static_cast<const float*>(data)[i];
  }
  /// Four numbers from a multiple of four on; `data` lies at a 16-byte bound.
  __device__ __forceinline__ float4 four(std::int64_t i) const {
    if (type == DType::f32) return *reinterpret_cast<const float4*>(static_cast<const float*>(data) + i);
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const std::uint16_t*>(data) + i);
    if (type == DType::bf16)
      return {__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
              __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u)};
    const __half2 low = *reinterpret_cast<const __half2*>(&raw.x),
                  high = *reinterpret_cast<const __half2*>(&raw.y);
    return {__low2float(low), __high2float(low), __low2float(high), __high2float(high)};
  }
  /// Zero where there is no vector.
  __device__ __forceinline__ float or_zero(std::int64_t i) const { return data ? (*this)[i] : 0.0f; }
};

__device__ __forceinline__ void store_as(void* to, DType type, std::int64_t i, float x) {
  if (type == DType::bf16)
    narrow(x, static_cast<__nv_bfloat16*>(to) + i);
  else if (type == DType::f16)
    narrow(x, static_cast<__half*>(to) + i);
  else
    static_cast<float*>(to)[i] = x;
}

}  // namespace lode::cuda
