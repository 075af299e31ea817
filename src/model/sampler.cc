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

TokenId largest(std::span<const float> logits) {
  return static_cast<TokenId>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double probability_of(TokenId token, const TokenProbabilities& all) {
  const auto found = std::lower_bound(all.begin(), all.end(), token,
                                      [](const TokenProbability& p, TokenId t) { return p.token < t; });
  return found == all.end() || found->token != token ? 0.0 : found->probability;
}

}  // namespace

Sampler::Sampler(const Sampling& options) : options_(options), rng_(hash_seed(options.seed, 0x5a)) {
  require(options.temperature >= 0 && std::isfinite(options.temperature), "a temperature of 0 or more",
          options.temperature);
  require(options.top_k >= 0, "a top-k of 0 (all) or more", options.top_k);
  require(options.top_p > 0 && options.top_p <= 1, "a top-p above 0 and at most 1", options.top_p);
  require(options.min_p >= 0 && options.min_p <= 1, "a min-p from 0 to 1", options.min_p);
}

double Sampler::cut(std::span<const float> logits) {
  const float best = *std::max_element(logits.begin(), logits.end());
  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp((logits[i] - best) / options_.temperature);
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
  candidates_.resize(keep);
  return kept;
}

TokenId Sampler::next(std::span<const float> logits) {
  if (options_.temperature == 0) return largest(logits);
  double draw = rng_.uniform() * cut(logits);
  for (const auto& [p, id] : candidates_) {
    draw -= p;
    if (draw < 0) return id;
  }
  return candidates_.back().second;
}

TokenProbabilities Sampler::probabilities(std::span<const float> logits) {
  if (options_.temperature == 0) return {{largest(logits), 1.0}};
  const double total = cut(logits);
  TokenProbabilities all;
  for (const auto& [p, id] : candidates_) all.push_back({id, p / total});
  std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.token < b.token; });
  return all;
}

TokenId Sampler::draw(const TokenProbabilities& from) {
  double total = 0;
  for (const TokenProbability& p : from) total += p.probability;
  double draw = rng_.uniform() * total;
  TokenId last = from.back().token;
  for (const TokenProbability& p : from) {
    if (p.probability <= 0) continue;
    last = p.token;
    draw -= p.probability;
    if (draw < 0) break;
  }
  return last;
}

TokenId Sampler::correct(TokenId token, const TokenProbabilities& drafted, const TokenProbabilities& wanted) {
  if (rng_.uniform() * probability_of(token, drafted) < probability_of(token, wanted)) return token;
  TokenProbabilities rest;  // what drafting draws too seldom
  for (const TokenProbability& w : wanted)
    if (const double more = w.probability - probability_of(w.token, drafted); more > 0)
      rest.push_back({w.token, more});
  return rest.empty() ? draw(wanted) : draw(rest);  // empty by rounding alone
}

}  // namespace lode
