// SPDX-License-Identifier: Apache-2.0
// What `retrieval` makes of the keys that it does not take. A fixed number of keys leaves out most of a flat head's
// attention, and what is left out is missing from the output. Here a query takes the keys whose share of the far
// weight is above its head's threshold, and an even sample of all others stands for them, each with the weight of as
// many as it stands for: an estimate of the whole sum without bias (as in vAttention, Desai et al. 2025). The heavy
// keys are exact, so the sample's variance is small.
//
// A head's threshold is the largest with which the output's error on the text's last queries is within the target. It
// is measured, not derived: the sample's noise and the window's part count.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "lodestone/kv_view.h"
#include "lodestone/selection.h"
#include "lodestone/selector.h"
#include "lodestone/spec.h"

namespace lode {

class ThreadPool;

/// Far keys and their scores q.k / sqrt(d).
struct ScoredKeys {
  std::vector<Position> rows;  // rising
  std::vector<float> scores;   // [rows]
  void clear() { rows.clear(), scores.clear(); }
};

/// One key of each of `count` even stretches of [begin, end), drawn by the seed; all of them where there are no more.
void draw_even(Position begin, Position end, std::int64_t count, std::uint64_t seed,
               std::vector<Position>& rows);

/// How many of n keys a sample has: a count as it is, of a share 64 at least where there are as many.
std::int64_t sample_size(Amount rest, std::int64_t n);

/// Bounds of a choice.
struct ShareRule {
  float floor = 0;                   ///< log of the least share of the far weight that a key must have
  std::int64_t least = 0, most = 0;  ///< keys
};

/// Of n far keys: those of `found` (exact scores) and of `sample` whose share of the weight reaches the floor, at
/// least `least` of found and at most `most` of them; then what is left of the sample, weighted so that it stands for
/// all keys that were not chosen. Shares are of what `found` and `sample` say all keys weigh together. Into the last
/// set of `out`, rising.
void choose_with_rest(const ScoredKeys& found, const ScoredKeys& sample, std::int64_t n,
                      const ShareRule& rule, Selection& out);

/// The same for keys that were chosen otherwise: adds them, and the rest of the sample.
void add_with_rest(std::span<const Position> chosen, std::span<const Position> sample, std::int64_t n,
                   Selection& out);

/// A head's calibration.
struct HeadShare {
  float floor = 0;      ///< ShareRule::floor
  double wanted = 0;    ///< share of the far keys that it chooses, on average
  double error = 0;     ///< |output - full attention's| / |full attention's| that was measured with it
  bool judged = false;  ///< else no query told, and it is a guess
};

/// The query of one head that judges: [d], not scaled, as if it stood at `position`.
struct JudgingQuery {
  const float* q = nullptr;
  Position position = 0;
};

/// What a head is to reach.
struct ShareGoal {
  double error = 0.1;
  Amount rest = {0.01, true};
  Amount most = {0.02, true};  ///< keys that a query may choose
  LocalWindow dense;
  float scale = 1;
  std::uint64_t seed = 0;
};

/// The largest threshold whose mean error over the queries is within the goal, else the smallest that chooses no more
/// keys than the goal allows.
HeadShare calibrate_share(std::span<const JudgingQuery> queries, const KvRows& kv, const ShareGoal& goal,
                          ThreadPool& pool);

}  // namespace lode
