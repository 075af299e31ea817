// SPDX-License-Identifier: Apache-2.0
// Exact nearest keys of many queries, by blocked products with a running top-k.
#pragma once

#include <cstdint>
#include <vector>

#include "lodestone/types.h"

namespace lode {

class ThreadPool;

/// For each query the k keys (at most all) with the largest inner products, best first, equal ones by rising
/// index; a product that is not a number is below all. [queries, min(k, keys)]. Polls check_cancel.
std::vector<std::int32_t> nearest_keys(Matrix<const float> queries /*[q, d], dense*/,
                                       Matrix<const float> keys /*[n, d], dense*/, std::int64_t k,
                                       ThreadPool& pool);

}  // namespace lode
