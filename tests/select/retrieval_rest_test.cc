// SPDX-License-Identifier: Apache-2.0
// What retrieval makes of the keys that it does not take: chosen keys and the sample's weights are all keys together,
// the estimate has no bias and a smaller error than leaving the rest out, thresholds reach their error on other
// queries, and are saved. The oracle is plain loops in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "lodestone/error.h"
#include "select/retrieval/rest.h"
#include "select/shared/best_keys.h"
#include "select/shared/shares_index.h"
#include "support/forged_index.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

double weight_sum(const Selection::Set& set) {
  double sum = 0;
  for (std::size_t i = 0; i < set.rows.size(); ++i)
    sum += std::exp(set.log_weights.empty() ? 0.0 : double{set.log_weights[i]});
  return sum;
}

TEST(EvenDraw, TakesOneOfEveryStretch) {
  std::vector<Position> rows;
  draw_even(10, 110, 20, 5, rows);
  ASSERT_EQ(rows.size(), 20u);
  for (std::size_t i = 0; i < 20; ++i) EXPECT_EQ((rows[i] - 10) / 5, static_cast<Position>(i));
  draw_even(3, 6, 20, 5, rows);
  EXPECT_EQ(rows, (std::vector<Position>{3, 4, 5}));
  draw_even(6, 6, 20, 5, rows);
  EXPECT_TRUE(rows.empty());
}

// Each chosen key counts once, and the sample for all others.
TEST(Rest, ChosenAndSampledStandForAllKeys) {
  for (const std::vector<Position>& chosen :
       {std::vector<Position>{}, {0, 1, 2}, {5, 50, 500, 999}, {999}, {}}) {
    std::vector<Position> sample;
    draw_even(0, 1000, 100, chosen.size(), sample);
    Selection out;
    out.add_set({.heads = 1, .token_end = 1});
    add_with_rest(chosen, sample, 1000, out);
    const Selection::Set set = out.set(0);
    EXPECT_TRUE(std::is_sorted(set.rows.begin(), set.rows.end()));
    EXPECT_EQ(std::adjacent_find(set.rows.begin(), set.rows.end()), set.rows.end());
    EXPECT_TRUE(std::includes(set.rows.begin(), set.rows.end(), chosen.begin(), chosen.end()));
    EXPECT_NEAR(weight_sum(set), 1000.0, 1e-3);
  }
}

/// Scores of n keys: a normal bulk and a few that stand out.
ScoredKeys scored(std::int64_t n, int heavy, std::uint64_t seed) {
  ScoredKeys keys;
  Rng rng(seed);
  for (std::int64_t i = 0; i < n; ++i) {
    keys.rows.push_back(static_cast<Position>(i));
    keys.scores.push_back(static_cast<float>(rng.normal()) + (i % (n / heavy) == 7 ? 9.0f : 0.0f));
  }
  return keys;
}

ScoredKeys sampled(const ScoredKeys& all, std::int64_t count, std::uint64_t seed) {
  ScoredKeys sample;
  draw_even(0, static_cast<Position>(all.rows.size()), count, seed, sample.rows);
  for (const Position row : sample.rows) sample.scores.push_back(all.scores[static_cast<std::size_t>(row)]);
  return sample;
}

double estimated(const ScoredKeys& all, const Selection::Set& set) {
  double sum = 0;
  for (std::size_t i = 0; i < set.rows.size(); ++i)
    sum += std::exp(double{all.scores[static_cast<std::size_t>(set.rows[i])]} +
                    (set.log_weights.empty() ? 0.0 : double{set.log_weights[i]}));
  return sum;
}

TEST(Rest, KeysAboveTheShareAreTakenAndTheSumHasNoBias) {
  constexpr std::int64_t kKeys = 4000, kSample = 200;
  const ScoredKeys all = scored(kKeys, 10, 1);
  double total = 0;
  for (const float s : all.scores) total += std::exp(double{s});
  const float floor = std::log(0.002f);
  std::vector<Position> above;
  for (std::size_t i = 0; i < all.rows.size(); ++i)
    if (std::exp(double{all.scores[i]}) >= 0.002 * total) above.push_back(all.rows[i]);
  ASSERT_GE(above.size(), 8u);
  double mean = 0, spread = 0;
  constexpr int kDraws = 200;
  for (int draw = 0; draw < kDraws; ++draw) {
    Selection out;
    out.add_set({.heads = 1, .token_end = 1});
    choose_with_rest(all, sampled(all, kSample, static_cast<std::uint64_t>(draw)), kKeys, {floor, 0, kKeys},
                     out);
    const Selection::Set set = out.set(0);
    std::vector<Position> exact;
    for (std::size_t i = 0; i < set.rows.size(); ++i)
      if (set.log_weights[i] == 0.0f) exact.push_back(set.rows[i]);
    EXPECT_EQ(exact, above);
    EXPECT_NEAR(weight_sum(set), static_cast<double>(kKeys), 0.1);
    const double ratio = estimated(all, set) / total;
    mean += ratio / kDraws;
    spread += (ratio - 1) * (ratio - 1) / kDraws;
  }
  spread = std::sqrt(spread);
  EXPECT_LT(spread, 0.05);
  EXPECT_NEAR(mean, 1.0, 4 * spread / std::sqrt(double{kDraws}));
}

TEST(Rest, AtLeastAndAtMostSoManyKeysAreTaken) {
  const ScoredKeys all = scored(1000, 10, 2), sample = sampled(all, 64, 3);
  for (const auto& [floor, least, most, wanted] :
       {std::tuple{0.0f, 5, 900, 5}, std::tuple{-50.0f, 0, 7, 7}, std::tuple{0.0f, 0, 900, 0},
        std::tuple{-50.0f, 0, 1000, 1000}}) {
    Selection out;
    out.add_set({.heads = 1, .token_end = 1});
    choose_with_rest(all, sample, 1000, {floor, least, most}, out);
    const Selection::Set set = out.set(0);
    std::int64_t exact = 0;
    for (std::size_t i = 0; i < set.rows.size(); ++i)
      exact += set.log_weights.empty() || set.log_weights[i] == 0.0f ? 1 : 0;
    EXPECT_EQ(exact, wanted) << floor;
    EXPECT_NEAR(weight_sum(set), 1000.0, 0.1);
  }
}

// A search that missed the heaviest key does not make it stand for a hundred others.
TEST(Rest, AHeavyKeyThatOnlyTheSampleHoldsIsTakenOnce) {
  ScoredKeys all = scored(1000, 10, 4);
  const ScoredKeys plain = sampled(all, 50, 9);
  const Position missed = plain.rows[20];
  all.scores[static_cast<std::size_t>(missed)] = 20.0f;
  ScoredKeys found;
  for (std::size_t i = 0; i < all.rows.size(); ++i) {
    if (all.scores[i] > 5.0f && all.rows[i] != missed)
      found.rows.push_back(all.rows[i]), found.scores.push_back(all.scores[i]);
  }
  Selection out;
  out.add_set({.heads = 1, .token_end = 1});
  choose_with_rest(found, sampled(all, 50, 9), 1000, {std::log(0.01f), 0, 100}, out);
  const Selection::Set set = out.set(0);
  const auto place = std::find(set.rows.begin(), set.rows.end(), missed) - set.rows.begin();
  ASSERT_LT(place, std::ssize(set.rows));
  EXPECT_EQ(set.log_weights[static_cast<std::size_t>(place)], 0.0f);
}

TEST(Rest, NumbersThatAreNoneAreLeftOutAndInfiniteOnesHurtNobody) {
  ScoredKeys all = scored(300, 3, 5);
  all.scores[10] = std::nanf("");
  all.scores[20] = std::numeric_limits<float>::infinity();
  Selection out;
  out.add_set({.heads = 1, .token_end = 1});
  choose_with_rest(all, sampled(all, 64, 1), 300, {std::log(0.01f), 4, 30}, out);
  const auto rows = out.set(0).rows;
  EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
  EXPECT_NE(std::find(rows.begin(), rows.end(), 20), rows.end());
  EXPECT_EQ(weight_below(std::nanf(""), 1.0f), 0.0);
}

constexpr WorldShape kShape = {
    .kv_heads = 2, .group = 2, .d = 64, .type = DType::f16, .dense = {4, 32}, .max_tokens = 6000};

struct TopicText : World {
  TopicText() : World(kShape) { plant_topics(*this, 23, 0.6f); }
};

std::unique_ptr<Selector> built(const std::string& spec, World& text, const LayerGeometry& geometry) {
  auto selector = make(spec, geometry);
  tell(*selector, text, text.tokens());
  selector->build(0, text.store().layer(0));
  return selector;
}

/// Mean of |output - full attention's| / |full attention's|, and the share of the far keys that were read.
struct Outcome {
  double error = 0, keys = 0;
};
Outcome outcome(Selector& selector, const QueryBlock& block, const LayerGeometry& geometry) {
  std::vector<float> got(block.q.size()), exact(block.q.size());
  float* const got_at = got.data();
  float* const exact_at = exact.data();
  const AttendWork work =
      attend({&block, 1}, selection_of(selector, block, geometry), geometry, {&got_at, 1});
  attend_full({&block, 1}, geometry, {&exact_at, 1});
  const auto d = static_cast<std::size_t>(geometry.head_dim);
  Outcome mean;
  for (std::size_t row = 0; row < got.size(); row += d) {
    double difference = 0, norm = 0;
    for (std::size_t i = row; i < row + d; ++i) {
      difference += std::pow(double{got[i]} - exact[i], 2);
      norm += double{exact[i]} * exact[i];
    }
    mean.error += std::sqrt(difference / norm) * static_cast<double>(d) / static_cast<double>(got.size());
  }
  mean.keys = static_cast<double>(work.far_keys) / static_cast<double>(work.far_total) / geometry.group();
  return mean;
}

TEST(Retrieval, ThresholdsReachTheirErrorOnOtherQueries) {
  ThreadPool pool(2);
  TopicText world;
  const LayerGeometry geometry = world.geometry(pool);
  world.write(3000);
  double before = 1.0;
  for (const double error : {0.5, 0.25}) {
    const auto selector =
        built("retrieval:warm=off,rest=5%,k=50%,recall=0.98,error=" + std::to_string(error), world, geometry);
    world.write(60);
    const Outcome reached = outcome(*selector, world.block(3000, 60), geometry);
    EXPECT_LT(reached.error, 1.2 * error);
    EXPECT_LT(reached.error, before) << "a smaller error takes more keys";
    before = reached.error;
    world.store().roll_back(3000);
  }
}

// As many keys without a sample leave out what flat queries attend to.
TEST(Retrieval, ASampleForTheRestHelpsAtEqualKeys) {
  ThreadPool pool(2);
  World world(kShape);
  const LayerGeometry geometry = world.geometry(pool);
  constexpr std::int64_t kTokens = 2000, kWidth = std::int64_t{kShape.kv_heads} * kShape.d;
  Rng rng(3);
  std::vector<float> k(kTokens * kWidth), v(k.size());
  for (float& x : k) x = 0.05f * static_cast<float>(rng.normal());
  const std::size_t near = v.size() - static_cast<std::size_t>(100 * kWidth);
  for (std::size_t i = 0; i < v.size(); ++i)  // the window says something else than what is far
    v[i] = static_cast<float>(rng.normal()) + (i < near ? 2.0f : -2.0f);
  world.store().write(0, kTokens, k, v);
  world.store().commit(kTokens);
  const auto without = built("retrieval:k=200,beam=200,warm=off", world, geometry),
             with = built("retrieval:k=100,beam=100,rest=100,warm=off", world, geometry);
  const QueryBlock block = world.block(1980, 20);
  const Outcome plain = outcome(*without, block, geometry), helped = outcome(*with, block, geometry);
  EXPECT_NEAR(helped.keys, plain.keys, 0.01);
  EXPECT_LT(2 * helped.error, plain.error);
}

TEST(Retrieval, ThresholdsAreSavedAndTakenWithTheGraph) {
  ThreadPool pool(2);
  TopicText world;
  const LayerGeometry geometry = world.geometry(pool);
  world.write(3000);
  const std::string spec = "retrieval:error=0.4,rest=2%,k=30%,warm=off";
  const auto live = built(spec, world, geometry);
  const auto chosen = [&](Selector& selector) { return select(selector, world.block(2980, 20), geometry); };
  const auto wanted = chosen(*live);
  const auto loaded = make(spec, geometry);
  load_sections(*loaded, saved_sections(*live), world.store().layer(0));
  EXPECT_TRUE(chosen(*loaded) == wanted);
  const auto other = built("retrieval:k=20", world, geometry), taker = make(spec, geometry);
  tell(*taker, world, world.tokens());
  ASSERT_TRUE(dynamic_cast<SharesIndex&>(*taker).take_index(0, *other, world.store().layer(0)));
  EXPECT_TRUE(chosen(*taker) == wanted);
  // Of a graph that was read from a file the queries of the text's end are gone: others judge.
  const auto late = make(spec, geometry);
  ASSERT_TRUE(dynamic_cast<SharesIndex&>(*late).take_index(0, *other, world.store().layer(0)));
  EXPECT_LT(outcome(*late, world.block(2980, 20), geometry).error, 0.6);
}

TEST(Retrieval, ThresholdsThatCannotBeAreRefused) {
  ThreadPool pool(2);
  TopicText world;
  const LayerGeometry geometry = world.geometry(pool);
  world.write(1500);
  const std::string spec = "retrieval:error=0.4,rest=2%,k=30%";
  const IndexSections good = saved_sections(*built(spec, world, geometry));
  const auto loaded = make(spec, geometry);
  load_sections(*loaded, good, world.store().layer(0));
  for (const double value : {1.0, std::nan(""), -1e9, std::numeric_limits<double>::infinity()}) {
    for (std::size_t place = 0; place < 4; ++place) {
      if (place == 1 && value == 1.0) continue;  // all keys may be wanted
      if (place >= 2 && value == 1.0) continue;  // such an error may be, and 1 says judged
      IndexSections bad = good;
      for (auto& [name, bytes] : bad)
        if (name.ends_with("shares")) std::memcpy(bytes.data() + 8 * place, &value, 8);
      EXPECT_THROW(load_sections(*loaded, bad, world.store().layer(0)), InputError) << value << " " << place;
    }
  }
  for (const char* wrong :
       {"retrieval:error=0.1,mass=0.9", "retrieval:error=0", "retrieval:error=0.1,rest=0"})
    EXPECT_THROW(make(wrong, geometry), InputError) << wrong;
}

}  // namespace
}  // namespace lode::test
