// SPDX-License-Identifier: Apache-2.0
// Double Sparsity: heavy channels and choices follow from their definitions, computed here in float64; labels
// are exact where they are not coded; budgets are exact; an index that grows equals one that was built.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "ann/packed_codes.h"
#include "support/budgets.h"
#include "support/refusal.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

constexpr std::int64_t kContext = 150;

/// Channels of the largest mean |q k| over all told tokens (or |k|), and scores over them.
class Oracle {
 public:
  Oracle(World& world, const LayerGeometry& geometry, bool told)
      : world_(world), geometry_(geometry), told_(told) {
    if (!told) return;
    const QueryBlock context = world.block(0, kContext);
    q_.assign(context.q.begin(), context.q.end());
  }

  std::vector<int> channels(int kv_head, int count) const {
    const int d = geometry_.head_dim, group = geometry_.group();
    std::vector<std::pair<double, int>> order;
    for (int c = 0; c < d; ++c) {
      double sum = 0;
      for (Position t = 0; t < kContext; ++t) {
        const double k = std::abs(key(t, kv_head)[static_cast<std::size_t>(c)]);
        double q = told_ ? 0.0 : 1.0;
        for (int g = 0; g < group && told_; ++g)
          q += std::abs(
              q_[static_cast<std::size_t>((t * geometry_.query_heads + kv_head * group + g) * d + c)]);
        sum += q * k;
      }
      order.emplace_back(-sum, c);
    }
    std::sort(order.begin(), order.end());
    std::vector<int> best;
    for (int i = 0; i < count; ++i) best.push_back(order[static_cast<std::size_t>(i)].second);
    std::sort(best.begin(), best.end());
    return best;
  }

  double label(int kv_head, int c, Position row, int bits) const {
    const auto at = static_cast<std::size_t>(c);
    const float x = key(row, kv_head)[at];
    if (bits == 16) return x;
    float least = std::numeric_limits<float>::infinity(), largest = -least;
    for (Position p = 1; p < kContext; ++p) {
      least = std::min(least, key(p, kv_head)[at]);
      largest = std::max(largest, key(p, kv_head)[at]);
    }
    const ChannelLevels levels(bits, {&least, 1}, {&largest, 1});
    return levels.value(0, levels.code(0, x, ChannelLevels::Rounding::nearest));
  }

  /// [far keys]
  std::vector<double> scores(const QueryBlock& block, std::int64_t t, int query_head, int count,
                             int bits) const {
    const int kv_head = query_head / geometry_.group();
    const std::vector<int> heavy = channels(kv_head, count);
    std::vector<double> scores;
    for (Position p = block.far_begin; p < block.far_end(t, geometry_.dense); ++p) {
      double sum = 0;
      for (const int c : heavy)
        sum += static_cast<double>(block.q[static_cast<std::size_t>(
                   (t * geometry_.query_heads + query_head) * geometry_.head_dim + c)]) *
               label(kv_head, c, p, bits);
      scores.push_back(sum * geometry_.scale);
    }
    return scores;
  }

  static FarSet best(const std::vector<double>& scores, Position begin, std::int64_t budget) {
    std::vector<Position> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](Position a, Position b) {
      const double x = scores[static_cast<std::size_t>(a)], y = scores[static_cast<std::size_t>(b)];
      return x > y || (x == y && a > b);
    });
    FarSet rows;
    for (std::int64_t i = 0; i < std::min(budget, std::ssize(order)); ++i)
      rows.emplace(begin + order[static_cast<std::size_t>(i)], 0.0f);
    return rows;
  }

 private:
  const std::vector<float>& key(Position row, int kv_head) const {
    std::vector<float>& known = keys_[{row, kv_head}];
    if (known.empty()) known = world_.key(row, kv_head);
    return known;
  }
  mutable std::map<std::pair<Position, int>, std::vector<float>> keys_;
  const World& world_;
  const LayerGeometry& geometry_;
  bool told_;
  std::vector<float> q_;  // [kContext, Hq, d]
};

TEST(DoubleSparsity, AttendsTheBestByHeavyChannels) {
  ThreadPool pool(2);
  for (const bool told : {false, true}) {
    for (const int bits : {4, 2, 16}) {
      World world({.kv_heads = 2, .group = 2, .d = 64, .type = DType::bf16, .dense = {1, 16}});
      // Channels of very different size, other ones in each head.
      world.shape_key = [](Position, int head, int i, float x) {
        return x * (1.0f + static_cast<float>((i * 7 + head * 13) % 32));
      };
      const LayerGeometry geometry = world.geometry(pool);
      world.write(kContext);
      const auto selector =
          make("double-sparsity:channels=6,budget=9,bits=" + std::to_string(bits), geometry);
      if (told) tell(*selector, world, kContext, 37);
      selector->build(0, world.store().layer(0));
      const Oracle oracle(world, geometry, told);
      world.write(20);
      const QueryBlock block = world.block(167, 3);
      const std::vector<FarSet> found = select(*selector, block, geometry);
      for (std::int64_t t = 0; t < 3; ++t) {
        for (int h = 0; h < 4; ++h) {
          const FarSet& own = found[static_cast<std::size_t>(t * 4 + h)];
          const std::vector<double> scores = oracle.scores(block, t, h, 6, bits);
          EXPECT_EQ(std::ssize(own), 9);
          // Few levels tie: every key taken scores at least what every key left out does.
          const FarSet expected = Oracle::best(scores, block.far_begin, 9);
          double least = std::numeric_limits<double>::infinity(), least_expected = least;
          for (const auto& [row, weight] : own)
            least = std::min(least, scores[static_cast<std::size_t>(row - block.far_begin)]);
          for (const auto& [row, weight] : expected)
            least_expected =
                std::min(least_expected, scores[static_cast<std::size_t>(row - block.far_begin)]);
          EXPECT_NEAR(least, least_expected, 1e-3 * std::abs(least_expected)) << bits << " bits";
        }
      }
    }
  }
}

TEST(DoubleSparsity, GroupsChooseByTheSumOfTheirWeights) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 3, .d = 64, .dense = {1, 16}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(kContext);
  const auto selector = make("double-sparsity:channels=10,bits=16,budget=12,per=kv-head", geometry);
  selector->build(0, world.store().layer(0));
  const QueryBlock block = world.block(kContext - 1, 1);
  const Oracle oracle(world, geometry, false);
  std::vector<double> sums;
  for (int h = 0; h < 3; ++h) {
    const std::vector<double> scores = oracle.scores(block, 0, h, 10, 16);
    double total = 0;
    for (const double s : scores) total += std::exp(s);
    sums.resize(scores.size());
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += std::exp(scores[i]) / total;
  }
  EXPECT_EQ(select(*selector, block, geometry)[2], Oracle::best(sums, 1, 12));
}

TEST(DoubleSparsity, BudgetsAreExactAndTiesGoToTheNewest) {
  expect_exact_budgets("double-sparsity", 1, {1, 2, 127, 128, 282, 283, 284, 100000});
}

TEST(DoubleSparsity, GrownEqualsRebuiltAndBytesAreCounted) {
  ThreadPool pool(2);
  for (const auto& [bits, label_bytes] : {std::pair{"4", 4}, {"2", 2}, {"16", 16}}) {
    World world({.kv_heads = 2, .group = 2, .d = 64, .type = DType::f16, .dense = {1, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    const std::string spec = std::string("double-sparsity:budget=9,bits=") + bits;  // 8 channels
    const auto grown = make(spec, geometry), rebuilt = make(spec, geometry);
    world.write(500);
    for (Selector* selector : {grown.get(), rebuilt.get()}) {
      tell(*selector, world, 500);
      selector->build(0, world.store().layer(0));
    }
    grow_and_roll_back(world, *grown);
    const QueryBlock block = world.block(static_cast<Position>(world.tokens() - 1), 1);
    SelectWork work;
    EXPECT_EQ(select(*grown, block, geometry), select(*rebuilt, block, geometry, &work));
    const std::int64_t far = world.tokens() - 1 - 16;
    EXPECT_EQ(work.bytes, 2 * far * label_bytes);
    EXPECT_EQ(work.keys_scored, 2 * far);
    const auto foretold = [&](std::int64_t tokens) {
      return find_method("double-sparsity").index_bytes(parse_spec(spec), geometry, tokens);
    };
    EXPECT_EQ(foretold(2000) - foretold(1000), 2 * 1000 * label_bytes);  // as many queries are kept of both
  }
}

TEST(DoubleSparsity, SpecsOutOfRangeAreRefused) {
  for (const char* spec : {"double-sparsity:channels=0", "double-sparsity:bits=8", "double-sparsity:budget=0",
                           "double-sparsity:per=page", "double-sparsity:page_size=16"})
    expect_refused("double-sparsity", [&] { parse_spec(spec); });
  ThreadPool pool(1);
  World world({.d = 64});
  expect_refused("64 channels", [&] { make("double-sparsity:channels=65", world.geometry(pool)); });
}

}  // namespace
}  // namespace lode::test
