// SPDX-License-Identifier: Apache-2.0
// Read-only views of cached keys and values.
#pragma once

#include <cstddef>

#include "lodestone/types.h"

namespace lode {

/// Keys and values of one sequence, layer and KV head: contiguous rows, keys after RoPE. Position = row.
struct KvRows {
  DType type = DType::f32;
  const std::byte* k = nullptr;    // [rows, d] of `type`
  const std::byte* v = nullptr;    // [rows, d] of `type`
  const float* k_scale = nullptr;  // [rows], q8 only: value = int8 * scale
  const float* v_scale = nullptr;  // [rows], q8 only
  std::int64_t rows = 0;
  int d = 0;

  std::int64_t row_bytes() const { return row_bytes_of(type, d); }
  /// Bytes of one token's K and V, scales included.
  std::int64_t token_bytes() const { return 2 * (row_bytes() + (type == DType::q8 ? 4 : 0)); }
};

/// All KV heads of one sequence in one layer.
struct KvLayer {
  std::span<const KvRows> heads;  // [Hkv]
  std::int64_t tokens = 0;        ///< rows of each head
};

}  // namespace lode
