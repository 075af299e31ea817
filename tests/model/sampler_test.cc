// SPDX-License-Identifier: Apache-2.0
// What a sampler draws from, and that its seed decides what is drawn.
#include "model/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

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

TEST(Sampler, CutsAndDrawsAmongManyCandidates) {
  const std::vector<float> equal(1000, 0.0f);
  const TokenProbabilities half = Sampler({.temperature = 1.0, .top_p = 0.5}).probabilities(equal);
  ASSERT_EQ(half.size(), 500U);  // of equal ones those with the lowest ids
  for (std::size_t i = 0; i < half.size(); ++i) EXPECT_EQ(half[i].token, static_cast<TokenId>(i));
  EXPECT_EQ(Sampler({.temperature = 1.0, .top_k = 300}).probabilities(equal).back().token, 299);
  std::vector<float> mixed(1000);
  for (std::size_t i = 0; i < mixed.size(); ++i) mixed[i * 379 % 1000] = -0.001f * static_cast<float>(i);
  const TokenProbabilities likeliest = Sampler({.temperature = 1.0, .top_p = 0.5}).probabilities(mixed);
  for (const TokenProbability& p : likeliest)
    EXPECT_GT(mixed[static_cast<std::size_t>(p.token)],
              -0.001f * (static_cast<float>(likeliest.size()) - 0.5f));
  Sampler sampler({.temperature = 1.0, .seed = 3});
  std::vector<int> drawn(1000);
  for (int i = 0; i < 20'000; ++i) ++drawn[static_cast<std::size_t>(sampler.next(equal))];
  for (const int times : drawn) EXPECT_NEAR(times, 20, 25);  // more than five standard deviations
}

TEST(Sampler, NeverDrawsWhatIsRuledOut) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  std::vector<float> logits(200, kNever);
  logits[150] = logits[7] = 1.0f;
  Sampler sampler({.temperature = 2.0, .seed = 5});
  for (int i = 0; i < 1000; ++i) {
    const TokenId token = sampler.next(logits);
    EXPECT_TRUE(token == 7 || token == 150);
  }
  EXPECT_EQ(sampler.probabilities(logits).size(), 2U);
  logits[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_LT(sampler.next(logits), 200);
  EXPECT_EQ(sampler.next(std::vector<float>(200, kNever)), 0);
}

TEST(Sampler, OfEqualLogitsTheLowestIdIsTheLargest) {
  EXPECT_EQ(Sampler({.temperature = 0}).next(std::vector<float>{1.0f, 3.0f, 3.0f, 2.0f}), 1);
}

}  // namespace
}  // namespace lode
