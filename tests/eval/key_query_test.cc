// SPDX-License-Identifier: Apache-2.0
// Studies of keys and queries: known distances, known buckets, and what is told of a real model.
#include "lab/studies/key_query.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "base/rng.h"
#include "eval/tiny_model.h"
#include "lab/studies/bucket_drift.h"
#include "lab/studies/saap_variants.h"
#include "lodestone/error.h"

namespace lode {
namespace {

std::string text_of(int seed, int lines = 140) {
  std::string text;
  for (int i = 0; i < lines; ++i) text += "line " + std::to_string(i * i * (seed + 3)) + "; ";
  return text;
}

double sum_of(const Json& shares) {
  const auto list = shares.get<std::vector<double>>();
  return std::accumulate(list.begin(), list.end(), 0.0);
}

/// Whether as much lies in the bins on one side of `x` as on the other, but for its own bin.
bool splits_in_half(const Json& histogram, const std::string& of, double x) {
  const auto middles = histogram.at("middles").get<std::vector<double>>();
  const double half = 0.5 * (middles[1] - middles[0]);
  double below = 0, above = 0;
  for (std::size_t bin = 0; bin < middles.size(); ++bin) {
    const double share = histogram.at(of).at(bin).get<double>();
    below += middles[bin] < x - half ? share : 0;
    above += middles[bin] > x + half ? share : 0;
  }
  return below <= 0.5 + 1e-9 && above <= 0.5 + 1e-9;
}

TEST(Mahalanobis, CountsInDeviationsAlongEachAxis) {
  // Around (1, 2): +-3 along x, +-1 along y.
  const std::vector<float> base = {4, 2, -2, 2, 1, 3, 1, 1, 4, 2, -2, 2, 1, 3, 1, 1};
  const double sx = std::sqrt(4.5), sy = std::sqrt(0.5);
  const std::vector<double> found = mahalanobis(base, {1, 2, 7, 2, 1, 0, 7, 0}, 2);
  EXPECT_NEAR(found[0], 0.0, 1e-6);
  EXPECT_NEAR(found[1], 6 / sx, 1e-5);
  EXPECT_NEAR(found[2], 2 / sy, 1e-5);
  EXPECT_NEAR(found[3], std::hypot(6 / sx, 2 / sy), 1e-5);
}

TEST(KeyQuery, TellsOfEachLayerWhatItsHeadsDo) {
  KeyQueryOptions options;
  options.shown = 20;
  options.pairs = 200;
  options.recent = 8;
  options.asked = 10;
  options.top = 10;
  const std::vector<Json> studies = key_query_studies(tiny_model(), text_of(0), options);
  ASSERT_EQ(studies.size(), 2u);
  for (const Json& study : studies) {
    EXPECT_EQ(study.at("axes").at("keys").size(), 20u);
    EXPECT_EQ(study.at("axes").at("queries").size(), 20u);
    EXPECT_GT(study.at("axes").at("shown").get<double>(), 0.0);
    EXPECT_LE(study.at("axes").at("shown").get<double>(), 1.0 + 1e-6);
    for (const char* of : {"far", "recent", "first"})
      EXPECT_NEAR(sum_of(study.at("scores").at(of)), 1.0, 1e-9);
    const Json& medians = study.at("scores").at("medians");
    EXPECT_EQ(medians.size(), 3u);
    for (const auto& [of, median] : medians.items())
      EXPECT_TRUE(splits_in_half(study.at("scores"), of, median.get<double>())) << of;
    for (const char* of : {"keys", "queries"}) {
      EXPECT_EQ(std::ssize(study.at("assigned").at(of)), study.at("clusters").get<std::int64_t>());
      EXPECT_NEAR(sum_of(study.at("assigned").at(of)), 1.0, 1e-9);
      EXPECT_NEAR(sum_of(study.at("distance").at(of)), 1.0, 1e-9);
      const Json& search = study.at("search").at(of);
      double scanned = 0, recall = 0;
      for (const Json& point : search) {
        EXPECT_GE(point.at(0).get<double>(), scanned) << "more keys";
        EXPECT_GE(point.at(1).get<double>(), recall) << "find more";
        scanned = point.at(0).get<double>(), recall = point.at(1).get<double>();
      }
      EXPECT_NEAR(scanned, 1.0, 1e-9);
      EXPECT_NEAR(recall, 1.0, 1e-9) << "all keys hold the best ones";
    }
  }
  EXPECT_EQ(studies[0], key_query_studies(tiny_model(), text_of(0), options)[0]) << "the same again";
  EXPECT_THROW(key_query_studies(tiny_model(), "short", options), InputError);
}

TEST(BucketDrift, DeviationIsThatOfTheSizes) {
  EXPECT_NEAR(size_deviation({0, 1, 2, 3}, 4), 0.0, 1e-12);
  EXPECT_NEAR(size_deviation({0, 0, 0, 0}, 2), 1.0, 1e-12) << "sizes 4 and 0 around 2";
}

TEST(BucketDrift, EveryKindOfSampleIsDrawnFromBothSpaces) {
  BucketDriftOptions options;
  options.tokens = 600;
  options.clusters = 8;
  options.keys = 256;
  options.repeats = 3;
  const std::vector<Json> studies =
      bucket_drift(tiny_model(), {text_of(0), text_of(1)}, {text_of(2), text_of(3)}, options);
  ASSERT_EQ(studies.size(), 2u);
  for (const Json& study : studies) {
    ASSERT_EQ(study.at("samples").size(), 10u) << "five kinds, after RoPE and before";
    for (const Json& sample : study.at("samples")) {
      EXPECT_EQ(sample.at("deviations").size(), 3u);
      for (const Json& x : sample.at("deviations")) EXPECT_GE(x.get<double>(), 0.0);
    }
  }
  EXPECT_THROW(bucket_drift(tiny_model(), {text_of(0)}, {text_of(1), text_of(2)}, options), InputError);
  options.tokens = 60000;
  options.context.rope_factor = 64;
  EXPECT_THROW(bucket_drift(tiny_model(), {text_of(0), text_of(1)}, {text_of(2), text_of(3)}, options),
               InputError);
}

TEST(SaapVariants, AreTrainedAndTestedAlike) {
  SaapVariantOptions options;
  options.tokens = 500;
  options.clusters = 8;
  options.hidden = 8;
  options.samples = 50;
  options.batch = 20;
  options.steps = 5;
  options.window = 40;
  options.distance = 20;
  options.progress = Progress::Mode::quiet;
  const std::vector<Json> found = saap_variants(tiny_model(), {text_of(0), text_of(1), text_of(2)},
                                                {"long-range", "residual", "causal"}, options);
  ASSERT_EQ(found.size(), 3u);
  for (const Json& variant : found) {
    ASSERT_EQ(variant.at("captured").size(), 3u);
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_LE(variant.at("captured").at(i).get<double>(), variant.at("best").at(i).get<double>() + 1e-9);
      EXPECT_NEAR(variant.at("best").at(i).get<double>(), found[0].at("best").at(i).get<double>(), 1e-6)
          << "the same queries, the same buckets";
    }
  }
  EXPECT_THROW(check_saap_variant("wide"), InputError);
}

}  // namespace
}  // namespace lode
