// SPDX-License-Identifier: Apache-2.0
#include "model/experts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <memory>

#include "base/rng.h"
#include "base/threads.h"
#include "kernels/blocks/quantise.h"
#include "kernels/dequantise.h"

namespace lode {
namespace {

std::vector<int> experts_of(std::span<const Choice> choices) {
  std::vector<int> experts;
  for (const Choice& c : choices) experts.push_back(c.expert);
  return experts;
}

TEST(ChooseExperts, EqualScoresGoToTheLowerNumber) {
  ExpertPlan plan = {.count = 6, .used = 3};
  const std::vector<float> logits = {1, 2, 2, 2, 0, 2};
  EXPECT_EQ(experts_of(choose_experts(plan, logits, {}, 1)), (std::vector{1, 2, 3}));
  plan.used = 6;
  EXPECT_EQ(experts_of(choose_experts(plan, logits, {}, 1)), (std::vector{1, 2, 3, 5, 0, 4}));
}

TEST(ChooseExperts, WeightsAreOfAllOrOfTheChosen) {
  ExpertPlan plan = {.count = 4, .used = 2};
  const std::vector<float> logits = {0, std::log(2.0f), std::log(4.0f), 0};  // shares 1/8, 2/8, 4/8, 1/8
  auto choices = choose_experts(plan, logits, {}, 1);
  EXPECT_NEAR(choices[0].weight, 0.5, 1e-6);
  EXPECT_NEAR(choices[1].weight, 0.25, 1e-6);
  plan.normalise = true;
  plan.scale = 3;
  choices = choose_experts(plan, logits, {}, 1);
  EXPECT_NEAR(choices[0].weight, 2, 1e-6);
  EXPECT_NEAR(choices[1].weight, 1, 1e-6);
  plan = {.count = 4, .used = 2, .score_chosen = true};
  choices = choose_experts(plan, logits, {}, 1);
  EXPECT_NEAR(choices[0].weight, 2.0 / 3, 1e-6);
}

TEST(ChooseExperts, ABiasChoosesAndDoesNotWeigh) {
  const ExpertPlan plan = {.count = 3, .used = 1, .score = ExpertPlan::Score::sigmoid};
  const auto choices = choose_experts(plan, std::vector<float>{3, 0, -3}, std::vector<float>{0, 0, 2}, 1);
  EXPECT_EQ(choices[0].expert, 2);
  EXPECT_NEAR(choices[0].weight, 1 / (1 + std::exp(3.0)), 1e-6);
}

TEST(ChooseExperts, OnlyTheBestGroupsAreChosenFrom) {
  ExpertPlan plan = {.count = 6, .used = 2, .groups = 3, .groups_used = 1};
  const std::vector<float> logits = {5, 0, 4, 4, 3, 3};
  EXPECT_EQ(experts_of(choose_experts(plan, logits, {}, 1)), (std::vector{0, 1})) << "by the best of a group";
  plan.group_best = 2;
  plan.score = ExpertPlan::Score::sigmoid;
  EXPECT_EQ(experts_of(choose_experts(plan, logits, {}, 1)), (std::vector{2, 3})) << "by the two best";
}

TEST(ChooseExperts, NumbersThatAreNoneDoNoHarm) {
  const ExpertPlan plan = {.count = 4, .used = 2, .groups = 2, .groups_used = 1};
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinite = std::numeric_limits<float>::infinity();
  for (const auto& logits : {std::vector<float>{nan, nan, nan, nan}, {infinite, -infinite, nan, 0}})
    for (const Choice& c : choose_experts(plan, logits, {}, 1)) {
      EXPECT_GE(c.expert, 0);
      EXPECT_LT(c.expert, plan.count);
    }
}

/// A layer of experts with random weights, and what one token makes of one expert, plainly.
struct Layer {
  static constexpr std::int64_t kHidden = 64, kWidth = 32;
  static constexpr int kExperts = 5;

  Layer() {
    plan.experts = {.count = kExperts, .used = 2, .width = kWidth, .normalise = true};
    Rng rng(3);
    const auto fill = [&](std::int64_t rows, std::int64_t cols) {
      std::vector<float>& x = numbers.emplace_back(static_cast<std::size_t>(rows * cols));
      for (float& v : x) v = static_cast<float>(rng.normal()) * 0.3f;
      return Weight{reinterpret_cast<const std::byte*>(x.data()), WeightType::f32, rows, cols};
    };
    numbers.reserve(1 + 3 * kExperts);
    weights.router = fill(kExperts, kHidden);
    for (int e = 0; e < kExperts; ++e)
      weights.experts.push_back({.gate = fill(kWidth, kHidden),
                                 .up = fill(kWidth, kHidden),
                                 .down = fill(kHidden, kWidth),
                                 .gate_bias = {},
                                 .up_bias = {},
                                 .down_bias = {}});
    plain_experts = weights.experts;
  }
  /// Experts in blocks and tiles; `numbers` become what the blocks stand for.
  void quantise_experts() {
    const auto arena = std::make_shared<HugeArena>();
    for (ExpertWeights& e : weights.experts)
      for (Weight* w : {&e.gate, &e.up, &e.down}) {
        std::vector<float>& x = *std::find_if(numbers.begin(), numbers.end(), [&](const auto& n) {
          return reinterpret_cast<const std::byte*>(n.data()) == w->data;
        });
        const WeightType type = WeightType::q8_0;
        std::vector<std::byte>& b =
            blocks.emplace_back(static_cast<std::size_t>(bytes_of(type, std::ssize(x))));
        ASSERT_TRUE(quantise(type, x.data(), std::ssize(x), b.data()));
        dequantise(type, b.data(), std::ssize(x), x.data());
        w->data = b.data(), w->type = type, w->tiles = std::make_shared<LazyTiles>(arena);
      }
  }
  bool tiles_made() const {
    return std::all_of(weights.experts.begin(), weights.experts.end(), [](const ExpertWeights& e) {
      return e.gate.tiles->made() && e.up.tiles->made() && e.down.tiles->made();
    });
  }
  const float* row(const Weight& w, std::int64_t r) const {
    return reinterpret_cast<const float*>(w.data) + r * w.cols;
  }
  std::vector<double> plainly(const float* h, const Choice& choice) const {
    const ExpertWeights& e = plain_experts[static_cast<std::size_t>(choice.expert)];
    const auto dot = [](const float* a, const auto* b, std::int64_t n) {
      double sum = 0;
      for (std::int64_t i = 0; i < n; ++i) sum += double{a[i]} * static_cast<double>(b[i]);
      return sum;
    };
    std::vector<double> hidden, out;
    for (std::int64_t i = 0; i < kWidth; ++i)
      hidden.push_back(std::max(0.0, dot(row(e.gate, i), h, kHidden)) * dot(row(e.up, i), h, kHidden));
    for (std::int64_t i = 0; i < kHidden; ++i)
      out.push_back(static_cast<double>(choice.weight) * dot(row(e.down, i), hidden.data(), kWidth));
    return out;
  }
  std::vector<float> run(const std::vector<float>& h, std::int64_t tokens, bool narrow) const {
    ThreadPool pool(2);
    LinearLayers linear(pool);
    linear.add_rows(tokens, narrow, true);
    Experts experts(plan, kHidden, linear, pool);
    std::vector<float> out(h.size());
    experts.add(
        weights, h, h, tokens,
        [](auto& gate, const auto& up, std::int64_t) {
          for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = std::max(0.0f, gate[i]) * up[i];
        },
        out);
    return out;
  }
  ModelPlan plan;
  LayerWeights weights;
  std::vector<ExpertWeights> plain_experts;
  std::vector<std::vector<float>> numbers;
  std::deque<std::vector<std::byte>> blocks;
};

std::vector<float> random_rows(std::int64_t tokens) {
  Rng rng(9);
  std::vector<float> h(static_cast<std::size_t>(tokens * Layer::kHidden));
  for (float& x : h) x = static_cast<float>(rng.normal());
  return h;
}

/// `error` is that of the largest output.
void expect_what_each_token_chose(const Layer& layer, double error) {
  const std::int64_t tokens = 33;
  const std::vector<float> h = random_rows(tokens);
  for (const bool narrow : {true, false}) {
    const std::vector<float> out = layer.run(h, tokens, narrow);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* const row = h.data() + t * Layer::kHidden;
      std::vector<float> logits;
      for (int e = 0; e < Layer::kExperts; ++e) {
        float sum = 0;
        for (std::int64_t i = 0; i < Layer::kHidden; ++i)
          sum += layer.row(layer.weights.router, e)[i] * row[i];
        logits.push_back(sum);
      }
      std::vector<double> want(static_cast<std::size_t>(Layer::kHidden));
      for (const Choice& c : choose_experts(layer.plan.experts, logits, {}, 1)) {
        const auto one = layer.plainly(row, c);
        for (std::size_t i = 0; i < want.size(); ++i) want[i] += one[i];
      }
      double largest = 0;
      for (const double x : want) largest = std::max(largest, std::abs(x));
      for (std::int64_t i = 0; i < Layer::kHidden; ++i)
        ASSERT_NEAR(out[static_cast<std::size_t>(t * Layer::kHidden + i)], want[static_cast<std::size_t>(i)],
                    error * largest);
    }
  }
}

TEST(Experts, AddWhatEachTokenChose) {
  Layer layer;
  expect_what_each_token_chose(layer, 1e-6);
  layer.quantise_experts();
  expect_what_each_token_chose(layer, 1.5e-4);  // inputs have 16 bits
}

void expect_bits_without_company(const Layer& layer) {
  const std::vector<float> h = random_rows(17), together = layer.run(h, 17, true);
  for (std::int64_t t = 0; t < 17; ++t) {
    const std::vector<float> row(h.begin() + t * Layer::kHidden, h.begin() + (t + 1) * Layer::kHidden);
    const std::vector<float> alone = layer.run(row, 1, true);
    EXPECT_TRUE(std::equal(alone.begin(), alone.end(), together.begin() + t * Layer::kHidden)) << t;
  }
}

TEST(Experts, ATokensBitsDoNotDependOnCompany) {
  Layer layer;
  expect_bits_without_company(layer);
  layer.quantise_experts();
  expect_bits_without_company(layer);
}

/// Otherwise a later token would wait for the tiles of an expert that none chose before.
TEST(Experts, TheFirstStepMakesTheTilesOfAll) {
  Layer layer;
  layer.quantise_experts();
  EXPECT_FALSE(layer.tiles_made());
  layer.run(random_rows(1), 1, true);
  EXPECT_TRUE(layer.tiles_made());
}

TEST(Experts, WeightsThatNobodyChoseAreNotRead) {
  Layer layer;
  const std::vector<float> h = random_rows(1), out = layer.run(h, 1, true);
  std::vector<float> logits;
  for (int e = 0; e < Layer::kExperts; ++e) {
    float sum = 0;
    for (std::int64_t i = 0; i < Layer::kHidden; ++i)
      sum += layer.row(layer.weights.router, e)[i] * h[static_cast<std::size_t>(i)];
    logits.push_back(sum);
  }
  const auto chosen = experts_of(choose_experts(layer.plan.experts, logits, {}, 1));
  for (int e = 0; e < Layer::kExperts; ++e)
    if (std::find(chosen.begin(), chosen.end(), e) == chosen.end())
      for (Weight* w : {&layer.weights.experts[static_cast<std::size_t>(e)].gate,
                        &layer.weights.experts[static_cast<std::size_t>(e)].up,
                        &layer.weights.experts[static_cast<std::size_t>(e)].down})
        w->data = reinterpret_cast<const std::byte*>(1);  // to read it ends the test
  EXPECT_EQ(layer.run(h, 1, true), out);
}

}  // namespace
}  // namespace lode
