// SPDX-License-Identifier: Apache-2.0
// The growth bench counts what selectors say they read, with as many keys kept at every length.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/threads.h"
#include "lab/bench/growth.h"
#include "lodestone/error.h"

namespace lode {
namespace {

GrowthBenchOptions small() {
  GrowthBenchOptions options;
  options.shape = named_shape("L1q2kv1d16");
  options.contexts = {1000, 4000};
  options.kept = 100;
  options.seconds = 0.01;
  return options;
}

const auto kSilent = [](std::string_view) {};

TEST(BenchGrowth, KeepsAsManyKeysAndCountsWhatIsRead) {
  ThreadPool pool(2);
  const std::vector<std::string> specs = {"ideal:sink=0,window=100", "squeezed:clusters=10%",
                                          "squeezed:levels=2"};
  const auto rows = bench_growth(small(), specs, pool, kSilent);
  ASSERT_EQ(rows.size(), 6u);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const GrowthBenchRow& row = rows[i];
    SCOPED_TRACE(row.attention + " at " + std::to_string(row.context));
    EXPECT_EQ(row.attention, specs[i % 3]);
    EXPECT_EQ(row.context, i < 3 ? 1000 : 4000);
    EXPECT_GT(row.kept, 30.0);
    EXPECT_LT(row.kept, 300.0);
    EXPECT_GT(row.median_us, 0.0);
    EXPECT_LE(row.scored, row.context);
  }
  // ideal: every far key's 16 halves, of all but the window.
  EXPECT_EQ(rows[3].bytes - rows[0].bytes, 3000 * 32);
  EXPECT_EQ(rows[3].scored - rows[0].scored, 3000);
  // One level: 10 % of what lies before the last 100 tokens.
  EXPECT_EQ(rows[1].scored, 90);
  EXPECT_EQ(rows[4].scored, 390);
  EXPECT_LT(rows[5].scored, rows[2].scored + 200);
}

TEST(BenchGrowth, TrainedMethodsGetMadeUpArtefacts) {
  ThreadPool pool(2);
  const std::vector<std::string> specs = {"hash:budget=1/8", "saap:probes=4,window=64"};
  for (const GrowthBenchRow& row : bench_growth(small(), specs, pool, kSilent)) {
    EXPECT_GT(row.kept, 0.0) << row.attention;
    EXPECT_LT(row.kept, static_cast<double>(row.context)) << row.attention;
  }
}

TEST(BenchGrowth, WhatCannotGrowIsRefused) {
  ThreadPool pool(1);
  GrowthBenchOptions options = small();
  const std::vector<std::string> full = {"full"}, squeezed = {"squeezed"};
  EXPECT_THROW(bench_growth(options, full, pool, kSilent), InputError);
  const std::vector<std::string> own_share = {"squeezed:sparsity=0.9"};
  try {
    bench_growth(options, own_share, pool, kSilent);
    ADD_FAILURE() << "--kept says the sparsity";
  } catch (const InputError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("--kept"));
  }
  options.contexts = {100};
  EXPECT_THROW(bench_growth(options, squeezed, pool, kSilent), InputError);
}

}  // namespace
}  // namespace lode
