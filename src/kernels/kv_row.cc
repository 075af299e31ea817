// SPDX-License-Identifier: Apache-2.0
#include "kernels/kv_row.h"

#include "kernels/kernels.h"
#include "kernels/q4_rows.h"

namespace lode {

namespace {

void read_row(const KvRows& kv, const std::byte* rows, const float* scales, std::int64_t row, float* to) {
  const std::byte* const from = rows + row * kv.row_bytes();
  if (kv.type == DType::q4) return widen_q4(from, kv.d, to);
  kernels().widen(from, kv.type, kv.d, to);
  if (kv.type == DType::q8)
    for (int c = 0; c < kv.d; ++c) to[c] *= scales[row];
}

}  // namespace

void read_key_row(const KvRows& kv, std::int64_t row, float* to) noexcept {
  read_row(kv, kv.k, kv.k_scale, row, to);
}

void read_value_row(const KvRows& kv, std::int64_t row, float* to) noexcept {
  read_row(kv, kv.v, kv.v_scale, row, to);
}

}  // namespace lode
