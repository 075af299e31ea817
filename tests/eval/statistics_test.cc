// SPDX-License-Identifier: Apache-2.0
// Statistics against values computed by hand and from printed tables.
#include "lab/eval/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "base/rng.h"

namespace lode {
namespace {

TEST(StudentT, MatchesPrintedTables) {
  EXPECT_NEAR(student_t_quantile(0.975, 1), 12.7062, 1e-4);
  EXPECT_NEAR(student_t_quantile(0.975, 2), 4.30265, 1e-5);
  EXPECT_NEAR(student_t_quantile(0.975, 10), 2.22814, 1e-5);
  EXPECT_NEAR(student_t_quantile(0.975, 1e6), 1.95997, 1e-5);
  EXPECT_NEAR(student_t_quantile(0.95, 5), 2.01505, 1e-5);
  EXPECT_NEAR(student_t_quantile(0.5, 3), 0.0, 1e-7);
  EXPECT_NEAR(student_t_quantile(0.025, 7), -student_t_quantile(0.975, 7), 1e-9);
}

TEST(MeanByDocument, OneSampleADocumentIsTheUsualTInterval) {
  const std::vector<double> values = {1, 2, 3, 4};  // mean 2.5, standard error 0.645497, t(3) = 3.182446
  const Interval i = mean_by_document(values, std::vector<std::int64_t>{0, 1, 2, 3});
  EXPECT_DOUBLE_EQ(i.mean, 2.5);
  EXPECT_NEAR(*i.high - i.mean, 3.182446 * 0.645497, 1e-5);
  EXPECT_NEAR(i.mean - *i.low, 3.182446 * 0.645497, 1e-5);
  EXPECT_EQ(i.documents, 4);
}

TEST(MeanByDocument, SamplesOfOneDocumentCountOnce) {
  // Documents (1, 0), (1, 1) and (0, 0): deviations of the sums are 0, 1 and -1, the error
  // sqrt(3 / 2 * 2) / 6 = 0.288675, t(2) = 4.30265.
  const Interval i =
      mean_by_document(std::vector<double>{1, 0, 1, 1, 0, 0}, std::vector<std::int64_t>{7, 7, 9, 9, 5, 5});
  EXPECT_DOUBLE_EQ(i.mean, 0.5);
  EXPECT_NEAR(*i.high - i.mean, 4.30265 * 0.288675, 1e-4);
  // Twenty copies of each document's answer are no more evidence than one.
  std::vector<double> copies, singles = {0.2, 0.9, 0.4};
  std::vector<std::int64_t> of;
  for (std::int64_t d = 0; d < 3; ++d) {
    copies.insert(copies.end(), 20, singles[static_cast<std::size_t>(d)]);
    of.insert(of.end(), 20, d);
  }
  const Interval many = mean_by_document(copies, of);
  const Interval few = mean_by_document(singles, std::vector<std::int64_t>{0, 1, 2});
  EXPECT_NEAR(*many.low, *few.low, 1e-12);
}

TEST(MeanByDocument, FewDocumentsHaveNoInterval) {
  EXPECT_EQ(mean_by_document({}, {}).mean, 0.0);
  const Interval one = mean_by_document(std::vector<double>{3, 5}, std::vector<std::int64_t>{0, 0});
  EXPECT_EQ(one.mean, 4.0);
  EXPECT_FALSE(one.low.has_value());
  const Interval two = mean_by_document(std::vector<double>{3, 3, 3}, std::vector<std::int64_t>{0, 1, 1});
  EXPECT_EQ(two.documents, 2);
  EXPECT_FALSE(two.low.has_value()) << "whose interval would be a point";
}

TEST(MeanByDocument, CoversTheTruthNineteenTimesOfTwenty) {
  Rng rng(3);
  int covered = 0;
  constexpr int kTrials = 1000;
  for (int trial = 0; trial < kTrials; ++trial) {
    std::vector<double> values;
    std::vector<std::int64_t> of;
    for (std::int64_t d = 0; d < 20; ++d) {
      const double shared = rng.normal();  // what the samples of a document have in common
      for (int s = 0; s < 5; ++s) {
        values.push_back(0.7 + shared + 0.5 * rng.normal());
        of.push_back(d);
      }
    }
    const Interval i = mean_by_document(values, of);
    covered += *i.low <= 0.7 && 0.7 <= *i.high;
  }
  EXPECT_NEAR(covered / static_cast<double>(kTrials), 0.95, 0.025);
}

}  // namespace
}  // namespace lode
