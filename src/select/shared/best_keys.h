// SPDX-License-Identifier: Apache-2.0
// The best of many scored keys, by count or by softmax weight.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/types.h"

namespace lode {

/// exp(score - peak) of a score up to the peak, 0 for NaN. Keys with an infinite score have all the weight.
double weight_below(float score, float peak);

/// top_k(), fast for few keys out of very many.
void top_count(std::span<const float> scores, std::int64_t k, Position offset, std::vector<Position>& out);

/// The fewest keys whose weights exp(scores) reach the share `mass` of all, ties to the newer key; rising.
void top_mass(std::span<const float> scores, double mass, Position offset, std::vector<Position>& out);

/// Of keys that a search found, the fewest whose weights exp(score - peak) reach the share `mass` of theirs
/// and of `unseen` together: their numbers, rising. False when all of them do not reach it.
bool take_mass(std::span<const float> scores, double mass, float peak, double unseen,
               std::vector<Position>& out);

}  // namespace lode
