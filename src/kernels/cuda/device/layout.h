// SPDX-License-Identifier: Apache-2.0
// How keys and values of one sequence lie in device memory.
//
// A sequence has one range of addresses, reserved for its longest length and backed by memory as it grows
// (virtual memory pages of the driver: the store is paged, and kernels still see plain addresses, which never
// change, so that captured graphs stay valid). Inside a layer, tokens come in blocks of kBlockTokens; a block
// holds, for each KV head, its keys, then its values:
//
//   layer l at base + l * layer_stride:   [block][Hkv][K or V][kBlockTokens][d]
//
// Latent rows, which are keys and values of all heads at once, lie there once: [block][kBlockTokens][d].
#pragma once

#include <cstdint>

#include "lodestone/types.h"

#ifdef __CUDACC__
#define LODE_HD __host__ __device__ __forceinline__
#else
#define LODE_HD inline
#endif

namespace lode::cuda {

inline constexpr int kBlockTokens = 128;

struct KvLayout {
  int kv_heads = 0, head_dim = 0;
  DType type = DType::bf16;       ///< f32, f16 or bf16
  std::int64_t layer_stride = 0;  ///< bytes from one layer to the next
  bool shared_rows = false;       ///< all heads have the same rows, and keys are values

  LODE_HD std::int64_t row_bytes() const { return std::int64_t{head_dim} * (type == DType::f32 ? 4 : 2); }
  /// From a key row to its value row.
  LODE_HD std::int64_t value_offset() const { return shared_rows ? 0 : kBlockTokens * row_bytes(); }
  LODE_HD std::int64_t head_stride() const { return 2 * value_offset(); }
  LODE_HD std::int64_t block_stride() const {
    return shared_rows ? kBlockTokens * row_bytes() : kv_heads * head_stride();
  }
  /// Byte offset of a key row from its layer's start.
  LODE_HD std::int64_t key_offset(int kv_head, std::int64_t token) const {
    return token / kBlockTokens * block_stride() + kv_head * head_stride() +
           token % kBlockTokens * row_bytes();
  }
  /// Bytes of one layer of so many tokens, whole blocks.
  LODE_HD std::int64_t layer_bytes(std::int64_t tokens) const {
    return (tokens + kBlockTokens - 1) / kBlockTokens * block_stride();
  }
};

}  // namespace lode::cuda
