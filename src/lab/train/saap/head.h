// SPDX-License-Identifier: Apache-2.0
// What training one head of SAAP draws and measures, whoever computes it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "base/rng.h"
#include "lab/train/saap/examples.h"
#include "select/saap/bucket_net.h"

namespace lode {

/// At most `wanted` of the positions at random, a share `late` of them from `late_begin` on, evenly mixed.
std::vector<std::int64_t> draw_positions(std::vector<std::int64_t> positions, std::int64_t wanted,
                                         double late, std::int64_t late_begin, Rng& rng);

/// Whether one of the first `prompts` prompts has two examples, as a batch needs.
bool has_batch(const SaapExamples& examples, std::int64_t prompts);

/// Up to `batch` examples of one of the first `prompts` prompts, which must have a batch.
std::vector<std::int32_t> draw_batch(const SaapExamples& examples, std::int64_t prompts, std::int64_t batch,
                                     Rng& rng);

/// What f_q, centroids or targets choose: of the attention on far keys, and of the keys.
struct SaapChoice {
  double mass = 0, selectivity = 0;
};

/// Shares of the keys at which what a ranking of buckets captures is told.
inline constexpr std::array<double, 3> kSaapShares = {0.02, 0.05, 0.10};
using SaapCaptured = std::array<double, kSaapShares.size()>;

/// Of the attention on far keys, what lies in the buckets of the highest score until these shares of the keys
/// are read, the last bucket in part.
SaapCaptured captured_at_shares(std::span<const float> scores /*[C]*/, std::span<const float> target /*[C]*/,
                                std::span<const std::int64_t> counts /*[C]*/);

/// Means over the examples of held-out prompts.
struct SaapMeasures {
  double loss = 0;  ///< nats
  /// Nats by which f_q lifts attention per key over an even one: sum_c t_c log(p_c n / n_c). Unlike the loss
  /// it can be compared between partitions.
  double gain = 0;
  SaapChoice chosen, kmeans, best;
  /// By p / sqrt(keys), by q . centroid, and by t / keys, which is the most that any ranking captures.
  SaapCaptured captured = {}, kmeans_captured = {}, best_captured = {};
  std::vector<float> selectivity;  ///< at 1, 2, 4, ... probes
};
/// Of the prompts from `first` on; counts[prompt] are its keys by bucket.
SaapMeasures measure_saap(const SaapExamples& examples, std::int64_t first,
                          std::span<const std::vector<std::int64_t>> counts, const BucketNet& net,
                          const BucketNet& keys, std::int64_t probes);

}  // namespace lode
