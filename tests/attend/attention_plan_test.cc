// SPDX-License-Identifier: Apache-2.0
// Planned key lists against attention over each list, and against the rules for lists. Float64 is the oracle of
// python/tests/test_plan.py.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/rng.h"
#include "lodestone/attend.h"
#include "lodestone/error.h"

namespace lode::test {
namespace {

constexpr int kHeads = 8, kKvHeads = 2, kD = 64;
constexpr std::int64_t kRows = 300;

std::vector<float> normals(std::int64_t count, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& value : x) value = static_cast<float>(rng.normal());
  return x;
}

/// Keys and values of a layer.
struct Layer {
  std::vector<float> k = normals(kKvHeads * kRows * kD, 1), v = normals(kKvHeads * kRows * kD, 2);
  std::vector<KvRows> heads() const {
    std::vector<KvRows> all;
    for (int h = 0; h < kKvHeads; ++h)
      all.push_back({.k = reinterpret_cast<const std::byte*>(k.data() + h * kRows * kD),
                     .v = reinterpret_cast<const std::byte*>(v.data() + h * kRows * kD),
                     .rows = kRows,
                     .d = kD});
    return all;
  }
};

TEST(AttentionPlan, EachTokenAttendsToItsLists) {
  const Layer layer;
  const std::vector<KvRows> kv = layer.heads();
  const auto threads = make_threads(2);
  const std::vector<std::int32_t> indptr = {0, 3, 3, 5};
  const std::vector<Position> pages = {9, 2, 30, 0, 31}, last = {3, 1, 8};
  const AttentionPlan plan({.indptr = indptr, .pages = pages, .page_size = 8, .last_page_rows = last}, kHeads,
                           kKvHeads);
  EXPECT_EQ(plan.tokens(), 3);
  EXPECT_EQ(plan.rows(), 256);
  const PlannedRows planned = plan.planned_rows();
  EXPECT_EQ(planned.begins, (std::vector<std::int64_t>{0, 19, 19, 35}));
  EXPECT_EQ(std::count(planned.rows.begin(), planned.rows.end(), 255), 1);
  EXPECT_TRUE(planned.log_weights.empty());
  const std::vector<float> q = normals(3 * kHeads * kD, 3);
  std::vector<float> output(q.size()), lse(3 * kHeads), one(kHeads * kD), one_lse(kHeads);
  plan.run(q, kv, 0.125f, {output.data(), lse.data(), 3 * kHeads, kD}, *threads);

  const std::vector<std::vector<lode::Run>> runs = {
      {{16, 24}, {72, 80}, {240, 243}}, {}, {{0, 8}, {248, 256}}};
  for (std::size_t t = 0; t < 3; ++t) {
    const std::vector<KeyChoice> choices(kKvHeads, KeyChoice{.runs = runs[t], .rows = {}, .log_weights = {}});
    attend(std::span(q).subspan(t * one.size(), one.size()), kv, choices, 0.125f,
           {one.data(), one_lse.data(), kHeads, kD}, *threads);
    for (std::size_t h = 0; h < kHeads; ++h) {
      const float found = lse[t * kHeads + h];
      EXPECT_TRUE(t == 1 ? std::isinf(found) : std::abs(found - one_lse[h]) < 2e-5) << t << " " << found;
    }
    for (std::size_t i = 0; i < one.size(); ++i) ASSERT_NEAR(output[t * one.size() + i], one[i], 2e-5);
  }
}

TEST(AttentionPlan, WrongListsAndShapesAreRefused) {
  const Layer layer;
  const auto threads = make_threads(1);
  const std::vector<std::int32_t> indptr = {0, 2}, longer = {0, 3};
  const std::vector<Position> rows = {5, 4}, twice = {5, 5};
  const std::vector<lode::Run> runs = {{0, 4}, {3, 5}};
  const std::vector<KvRows> kv = layer.heads();
  std::vector<float> output(kHeads * kD), lse(kHeads);
  const AttentionState state = {output.data(), lse.data(), kHeads, kD};
  const AttentionPlan plan({.indptr = indptr, .pages = rows}, kHeads, kKvHeads);
  const std::vector<float> q = normals(kHeads * kD, 3);
  plan.run(q, kv, 1.0f, state, *threads);
  EXPECT_TRUE(std::isfinite(lse[0]));

  EXPECT_THROW(AttentionPlan({.indptr = longer, .pages = rows}, kHeads, kKvHeads), InputError);
  EXPECT_THROW(AttentionPlan({.indptr = indptr, .pages = twice}, kHeads, kKvHeads), InputError);
  EXPECT_THROW(AttentionPlan({.indptr = indptr, .runs = runs}, kHeads, kKvHeads), InputError);
  EXPECT_THROW(AttentionPlan({.indptr = indptr, .pages = rows}, 7, kKvHeads), InputError);
  EXPECT_THROW(plan.run(std::span(q).first(kD), kv, 1.0f, state, *threads), InputError);
  EXPECT_THROW(plan.run(q, std::span(kv).first(1), 1.0f, state, *threads), InputError);
  auto shorter = layer.heads();
  for (KvRows& head : shorter) head.rows = 5;
  EXPECT_THROW(plan.run(q, shorter, 1.0f, state, *threads), InputError);
}

}  // namespace
}  // namespace lode::test
