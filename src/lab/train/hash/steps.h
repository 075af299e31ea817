// SPDX-License-Identifier: Apache-2.0
// What a training step of HashAttention's functions sees, as the host draws it: the same for every device.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "base/rng.h"
#include "lab/train/hash/settings.h"

namespace lode {

class Rope;

/// Some of [begin, end), rising, all of them when they are no more than `count`.
std::vector<Position> sample(Position begin, Position end, std::int64_t count, Rng& rng);

/// Queries of the tokens that one step takes, of one layer.
struct StepQueries {
  std::vector<Position> positions;       // [tokens], rising
  std::vector<float> roped, as_trained;  // [tokens, Hq, d]
};

/// What one head's step draws.
struct HashDraw {
  std::int64_t further = 0;      ///< positions by which its queries alone are turned
  std::int64_t shifted = 0;      ///< positions by which queries and keys are turned as functions see them
  std::vector<Position> others;  ///< keys beside the pivotal ones, rising
};
HashDraw draw_step(const HashSettings& settings, Position keys_end, Rng& rng);

/// The first position that is not among the far keys of a query.
inline Position far_end(const HashSettings& settings, Position query, Position keys_end) {
  return static_cast<Position>(std::min<std::int64_t>(keys_end, query + 1 - settings.dense.window));
}

/// [d/2] radians by which RoPE turns pairs in so many positions.
std::vector<float> angles_of(const Rope& rope, std::int64_t positions);
/// [d] the angles' cosines, then their sines.
std::vector<float> cosines_and_sines(std::span<const float> angles);
/// Turns the first d numbers of each row.
void turn(std::span<float> rows /*[n, stride]*/, std::int64_t stride, std::span<const float> angles);

}  // namespace lode
