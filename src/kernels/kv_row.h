// SPDX-License-Identifier: Apache-2.0
// One stored row of keys or values as numbers, whatever its type.
#pragma once

#include "lodestone/kv_view.h"

namespace lode {

/// Row `row` of a head's keys or values, with its scale, after RoPE as it is stored.
void read_key_row(const KvRows& kv, std::int64_t row, float* to /*[d]*/) noexcept;
void read_value_row(const KvRows& kv, std::int64_t row, float* to /*[d]*/) noexcept;

}  // namespace lode
