// SPDX-License-Identifier: Apache-2.0
#include "model/sampler.h"

#include <algorithm>
#include <cmath>

#include "lodestone/error.h"

namespace lode {

namespace {

void require(bool holds, const char* expected, double found) {
  if (!holds)
    throw InputError(std::string("sampling: expected ") + expected + ", found " + std::to_string(found));
}

}  // namespace

Sampler::Sampler(const Sampling& options) : options_(options), rng_(hash_seed(options.seed, 0x5a)) {
  require(options.temperature >= 0 && std::isfinite(options.temperature), "a temperature of 0 or more",
          options.temperature);
  require(options.top_k >= 0, "a top-k of 0 (all) or more", options.top_k);
  require(options.top_p > 0 && options.top_p <= 1, "a top-p above 0 and at most 1", options.top_p);
  require(options.min_p >= 0 && options.min_p <= 1, "a min-p from 0 to 1", options.min_p);
}

TokenId Sampler::next(std::span<const float> logits) {
  const auto best = std::max_element(logits.begin(), logits.end());
  if (options_.temperature == 0) return static_cast<TokenId>(best - logits.begin());

  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp((logits[i] - *best) / options_.temperature);
    candidates_.emplace_back(static_cast<float>(p), static_cast<TokenId>(i));
  }
  std::sort(candidates_.begin(), candidates_.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  if (options_.top_k > 0 && candidates_.size() > static_cast<std::size_t>(options_.top_k)) {
    candidates_.resize(static_cast<std::size_t>(options_.top_k));
  }
  double total = 0;
  for (const auto& [p, id] : candidates_) total += p;
  double kept = 0;
  std::size_t keep = 0;
  while (keep < candidates_.size() && kept < options_.top_p * total &&
         candidates_[keep].first >= options_.min_p * candidates_[0].first) {
    kept += candidates_[keep++].first;
  }
  double draw = rng_.uniform() * kept;
  for (std::size_t i = 0; i < keep; ++i) {
    draw -= candidates_[i].first;
    if (draw < 0) return candidates_[i].second;
  }
  return candidates_[keep - 1].second;
}

}  // namespace lode
