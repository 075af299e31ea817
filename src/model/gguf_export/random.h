// SPDX-License-Identifier: Apache-2.0
// Random weights of any type, for trials at real size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/weight_type.h"

namespace lode {

class ThreadPool;

/// Numbers of about 1 / sqrt(cols); of blocks the codes are random and the scales follow.
void fill_random(WeightType type, std::int64_t rows, std::int64_t cols, std::uint64_t seed,
                 std::span<std::byte> to, ThreadPool& pool);

}  // namespace lode
