// SPDX-License-Identifier: Apache-2.0
// Offsets that make a partition by inner products more even.
#pragma once

#include <vector>

#include "lodestone/types.h"

namespace lode {

class ThreadPool;

/// Offsets b [C] for which the labels argmax_c (x . c + b_c) fill the clusters evenly, times `strength` (0:
/// no change, 1: as even as they get). Clusters that are too full are made less attractive by the logarithm
/// of their excess, over and over (ascent on the dual of a balanced assignment); a step that makes them less
/// even is taken back and halved, so that the points at hand are never left less evenly spread than they
/// were. The same for any number of threads. Polls check_cancel.
std::vector<float> balanced_offsets(Matrix<const float> x /*[n, d], dense*/,
                                    std::span<const float> centroids /*[C, d]*/, double strength,
                                    ThreadPool& pool);

}  // namespace lode
