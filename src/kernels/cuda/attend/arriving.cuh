// SPDX-License-Identifier: Apache-2.0
// Rows that are attended while another kernel still writes them: a place of device memory says by itself
// whether its row has come, so nobody waits for the other kernel's end, and no fence is needed. Who takes a
// row leaves its place empty for the next launch; at first all are.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

inline constexpr std::int32_t kNotYet = static_cast<std::int32_t>(kEmptyPlaces * 0x01010101u);

__device__ __forceinline__ void give_row(std::int32_t* to, int row) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(row) : "memory");
}
/// What is there now; not waited for before it is used.
__device__ __forceinline__ int ask_row(const std::int32_t* from) {
  int row;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(row) : "l"(from) : "memory");
  return row;
}

}  // namespace lode::cuda
