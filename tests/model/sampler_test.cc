// SPDX-License-Identifier: Apache-2.0
// What a sampler draws from, and that its seed decides what is drawn.
#include "model/sampler.h"

#include <gtest/gtest.h>

#include <cmath>

namespace lode {
namespace {

/// Logits of tokens with these probabilities at temperature 1, up to what is the same for all.
std::vector<float> logits_of(const std::vector<double>& probabilities, double shift = 0) {
  std::vector<float> logits;
  for (const double p : probabilities) logits.push_back(static_cast<float>(std::log(p) + shift));
  return logits;
}

void expect_near(const TokenProbabilities& found, const std::vector<std::pair<TokenId, double>>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    EXPECT_EQ(found[i].token, expected[i].first);
    EXPECT_NEAR(found[i].probability, expected[i].second, 1e-5);
  }
}

TEST(Sampler, EachCutLeavesWhatItSays) {
  const std::vector<double> p = {0.10, 0.25, 0.15, 0.50};
  for (const double shift : {0.0, 30.0, -30.0}) {  // logits say nothing but their differences
    const std::vector<float> logits = logits_of(p, shift);
    const auto left = [&](const Sampling& options) { return Sampler(options).probabilities(logits); };
    expect_near(left({.temperature = 1.0}), {{0, 0.10}, {1, 0.25}, {2, 0.15}, {3, 0.50}});
    expect_near(left({.temperature = 1.0, .top_k = 2}), {{1, 1.0 / 3}, {3, 2.0 / 3}});
    // The smallest set that holds the share: a token too many would hold 0.9, one too few 0.5.
    expect_near(left({.temperature = 1.0, .top_p = 0.70}), {{1, 1.0 / 3}, {3, 2.0 / 3}});
    expect_near(left({.temperature = 1.0, .top_p = 0.80}),
                {{1, 0.25 / 0.9}, {2, 0.15 / 0.9}, {3, 0.5 / 0.9}});
    // Of the likeliest one's probability.
    expect_near(left({.temperature = 1.0, .min_p = 0.4}), {{1, 1.0 / 3}, {3, 2.0 / 3}});
    // A temperature of 0.5 squares the odds.
    expect_near(left({.temperature = 0.5, .top_k = 2}), {{1, 0.2}, {3, 0.8}});
    expect_near(left({.temperature = 0.0}), {{3, 1.0}});
  }
}

TEST(Sampler, TheSeedDecidesWhatIsDrawn) {
  const std::vector<float> logits(1000, 0.0f);
  const auto drawn = [&](std::uint64_t seed) {
    Sampler sampler({.temperature = 1.0, .seed = seed});
    std::vector<TokenId> tokens;
    for (int i = 0; i < 20; ++i) tokens.push_back(sampler.next(logits));
    return tokens;
  };
  EXPECT_EQ(drawn(1), drawn(1));
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{2}, (std::uint64_t{1} << 32) + 1})
    EXPECT_NE(drawn(1), drawn(seed));
}

TEST(Sampler, OfEqualLogitsTheLowestIdIsTheLargest) {
  EXPECT_EQ(Sampler({.temperature = 0}).next(std::vector<float>{1.0f, 3.0f, 3.0f, 2.0f}), 1);
}

}  // namespace
}  // namespace lode
