// SPDX-License-Identifier: Apache-2.0
// What the chooser says of its plan, on made-up measurements.
#include "lab/studies/tune.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "eval/tiny_model.h"
#include "lodestone/error.h"

namespace lode {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

/// Rows as tune has them: full, the plan, streaming, then single methods.
TuneReport report_of(const std::string& target, const std::string& spec, std::vector<TunedRow> singles) {
  TuneReport report = {.model = "m",
                       .target = TuneTarget::parse(target),
                       .plan = {},
                       .rows = {},
                       .timings = {},
                       .counted = 500};
  report.plan.heads = {{spec, spec}, {spec, spec}};
  report.rows = {
      {.attention = "full", .met = true}, {.attention = "plan", .met = true}, {.attention = "streaming"}};
  report.rows.insert(report.rows.end(), singles.begin(), singles.end());
  return report;
}

TEST(Verdict, AllFullSaysWhatComesNearestAndWhichTargetItKeeps) {
  TuneReport report = report_of("agreement=0.99", "full",
                                {{.attention = "kmeans:probes=8", .measured = 0.91, .density = 0.1},
                                 {.attention = "kmeans:probes=64", .measured = 0.957, .density = 0.3}});
  EXPECT_THAT(report.verdict(),
              AllOf(HasSubstr("full attention in every head"), HasSubstr("kmeans:probes=64"),
                    HasSubstr("--target agreement=0.94,"), HasSubstr("30.0 %")));
  report = report_of("loss=0.001", "full",
                     {{.attention = "topk:k=4", .measured = 0.05, .density = 0.1},
                      {.attention = "topk:k=8", .measured = 0.02, .density = 0.2}});
  EXPECT_THAT(report.verdict(), AllOf(HasSubstr("topk:k=8"), HasSubstr("--target loss=0.024,")));
}

TEST(Verdict, AllFullWithoutMethodsOrWithOneThatKeepsTheTargetByChance) {
  EXPECT_THAT(report_of("error=0.1", "full", {}).verdict(), HasSubstr("name some with -a"));
  const TuneReport lucky =
      report_of("error=0.1", "full", {{.attention = "topk", .measured = 0.09, .met = true, .density = 0.4}});
  EXPECT_THAT(lucky.verdict(), AllOf(HasSubstr("more or longer texts"), Not(HasSubstr("--target"))));
}

TEST(Verdict, APlanIsComparedWithTheBestSingleMethod) {
  TuneReport report = report_of("error=0.1", "topk:k=8",
                                {{.attention = "topk", .measured = 0.05, .met = true, .density = 0.4}});
  report.rows[1].density = 0.25;
  EXPECT_THAT(report.verdict(), AllOf(HasSubstr("25.0 %"), HasSubstr("topk, reads 40.0 %")));
  report.rows[1].density = 0.5;
  EXPECT_THAT(report.verdict(),
              AllOf(HasSubstr("topk, which meets"), HasSubstr("(40.0 %): attend by it instead")));
}

TEST(Verdict, APlanThatMissesNamesTheSingleMethodThatDoesNot) {
  TuneReport report =
      report_of("kept=0.98", "topk:k=8",
                {{.attention = "hash:budget=1/8", .measured = 0.99, .met = true, .density = 0.3}});
  report.rows[1].met = false;
  report.rows[1].density = 0.4;
  EXPECT_THAT(report.verdict(), AllOf(HasSubstr("misses the target on other text (it reads 40.0 %"),
                                      HasSubstr("hash:budget=1/8, which meets it there and reads 30.0 %"),
                                      Not(HasSubstr("full attention is the better choice"))));
  report.rows[3].met = false;
  EXPECT_THAT(report.verdict(), HasSubstr("full attention is the better choice"));
}

TEST(Verdict, SinglesAreComparedAtThePlansOwnLoss) {
  TuneReport report = report_of("error=0.1", "topk:k=8",
                                {{.attention = "hash:budget=64", .measured = 0.04, .density = 0.4},
                                 {.attention = "hash:budget=16", .measured = 0.16, .density = 0.1},
                                 {.attention = "kmeans:probes=1", .measured = 0.05, .density = 0.3},
                                 {.attention = "saap:probes=1", .measured = 0.2, .density = 0.2}});
  report.rows[1].measured = 0.10;
  std::vector<TuneReport::AtEqualLoss> at = report.at_equal_loss();
  ASSERT_EQ(at.size(), 3u);
  EXPECT_EQ(at[0].method, "hash");
  EXPECT_NEAR(*at[0].density, 0.2, 1e-12) << "half way between two budgets, in the logarithm of the bytes";
  EXPECT_NEAR(*at[1].density, 0.3, 1e-12) << "its cheapest parameters come nearer than the plan";
  EXPECT_FALSE(at[2].density.has_value()) << "never as near";
  for (std::size_t i = 1; i < report.rows.size(); ++i) report.rows[i].step_ms = 10 * report.rows[i].density;
  report.rows[4].step_ms = 9;  // the nearer budget of hash; the cheaper one is the slower of the two
  report.rows[3].step_ms = 2;
  EXPECT_NEAR(*report.at_equal_loss()[0].ms, 2.0, 1e-12) << "what comes nearer need not take longer";
  EXPECT_NEAR(*report.at_equal_loss()[1].ms, 3.0, 1e-12);
  EXPECT_FALSE(report.at_equal_loss()[2].ms.has_value());
  report.target = TuneTarget::parse("agreement=0.9");
  report.rows[1].measured = 0.05;
  at = report.at_equal_loss();
  EXPECT_NEAR(*at[0].density, 0.1, 1e-12) << "more agreement is nearer";
}

TEST(Target, RecoveredIsOfTokensThatNeedThePast) {
  const TuneTarget target = TuneTarget::parse("recovered=0.9");
  EXPECT_EQ(target.measure({.recovered = 0.95}, {}), 0.95);
  EXPECT_TRUE(target.met_by(0.95));
  EXPECT_FALSE(target.met_by(0.85));
  EXPECT_EQ(target.divergence({.divergence = 1, .gap_divergence = 2}), 2);
  EXPECT_EQ(TuneTarget::parse("agreement=0.9").divergence({.divergence = 1, .gap_divergence = 2}), 1);
  EXPECT_THROW(TuneTarget::parse("recovered=1.1"), InputError);
  const TuneTarget kept = TuneTarget::parse("kept=0.9");
  EXPECT_EQ(kept.measure({.agreement = 0.5, .kept = 0.95}, {}), 0.95);
  EXPECT_EQ(kept.divergence({.divergence = 1, .gap_divergence = 2}), 2);
  EXPECT_FALSE(kept.met_by(0.85));
}

TEST(Verdict, SaysWhenTimesCouldNotBeToldApart) {
  TuneReport report = report_of("error=0.1", "topk:k=8", {});
  EXPECT_THAT(report.verdict(), Not(HasSubstr("--time-at")));
  report.times_told = false;
  EXPECT_THAT(report.verdict(), HasSubstr("chosen by its bytes; --time-at"));
}

TEST(Tune, LengthsThatTheModelDoesNotReachAreRefused) {
  TuneOptions options;
  const auto error = [&]() -> std::string {
    try {
      tune(tiny_model(), {"one text"}, {"another"}, {}, options);
    } catch (const InputError& refused) {
      return refused.what();
    }
    return "no error";
  };
  options.time_at = 4096;
  EXPECT_THAT(error(), HasSubstr("--time-at: expected at most 1984 tokens"));
  options.time_at = 1984;
  EXPECT_THAT(error(), Not(HasSubstr("--time-at"))) << "what is wrong then are the texts";
  options.lengths = {1024, 2048};
  EXPECT_THAT(error(), HasSubstr("--lengths: expected at most 1984"));
}

TEST(Tune, TextsThatNeedNothingOfTheirFarPastAreRefusedFirst) {
  TuneOptions options;
  options.target = TuneTarget::parse("recovered=0.9");
  options.probe.last = 16;
  options.probe.dense = {.sink = 1, .window = 15};
  options.probe.progress = Progress::Mode::quiet;
  std::string text;
  for (int i = 0; i < 60; ++i) text += "one word and ";
  try {
    tune(tiny_model(), {text}, {text}, {}, options);
    FAIL() << "expected an error";
  } catch (const InputError& refused) {
    EXPECT_THAT(refused.what(),
                HasSubstr("--target recovered: text 1 to choose on: expected at least 8 of the last 16"));
  }
}

TEST(Target, ALooserOneIsKeptWithItsMargin) {
  for (const char* text : {"agreement=0.9", "loss=0.1", "error=0.1", "kept=0.9", "recovered=0.9"}) {
    TuneTarget target = TuneTarget::parse(text);
    const double measured = target.bound;
    for (const std::int64_t counted : {24, 180, 4096}) {
      target.bound = target.looser_than(measured, counted);
      EXPECT_TRUE(target.with_margin(counted).met_by(measured)) << text << ", " << counted;
    }
  }
}

}  // namespace
}  // namespace lode
