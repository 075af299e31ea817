// SPDX-License-Identifier: Apache-2.0
// An order of points in which near ones stand close together.
#pragma once

#include <cstdint>
#include <vector>

#include "ann/kmeans.h"
#include "ann/partition.h"
#include "lodestone/types.h"

namespace lode {

/// A permutation of [0, n): about sqrt(n) cells of points that are near each other, one behind the other, and
/// inside each, as between their centres, from a point to the nearest that is left. Costs about n sqrt(n)
/// products. The same for any number of threads.
std::vector<std::int32_t> neighbour_order(Matrix<const float> x /*[n, d], dense*/, Nearness nearness,
                                          std::uint64_t seed, ThreadPool& pool);
/// The same in given cells.
std::vector<std::int32_t> neighbour_order(Matrix<const float> x, const Partition& cells);

}  // namespace lode
