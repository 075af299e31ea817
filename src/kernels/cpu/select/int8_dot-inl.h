// SPDX-License-Identifier: Apache-2.0
// Coded products in plain loops, which compilers turn into vectors of whatever the including file is built
// for.
#pragma once

#include <cstring>

#include "kernels/select/int8_dot.h"

namespace lode {
namespace {

void score_coded(const CodedQuery& q, const CodedRows& keys, const Position* rows, std::int64_t count,
                 float* scores) noexcept {
  const auto* const codes = reinterpret_cast<const std::int8_t*>(keys.data);
  const int stride = keys.stride, d = stride - CodedRows::kScaleBytes;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int8_t* const key = codes + std::int64_t{rows[i]} * stride;
    std::int32_t sum = 0;
    for (int c = 0; c < d; ++c) sum += std::int32_t{q.whole[c]} * key[c];
    float scale;
    std::memcpy(&scale, key + d, sizeof scale);
    scores[i] = static_cast<float>(sum) * scale;
  }
}

}  // namespace
}  // namespace lode
