// SPDX-License-Identifier: Apache-2.0
// Samples longer than the model: named and left out, or without their middle.
#include "lab/eval/fit_samples.h"

#include <gtest/gtest.h>

#include "eval/tiny_model.h"
#include "lodestone/error.h"
#include "support/refusal.h"

namespace lode {
namespace {

constexpr std::int64_t kMost = 100;

Sample sample_of(std::string id, const std::shared_ptr<const std::string>& context, std::string question) {
  Sample sample = {.id = std::move(id), .task = "t"};
  sample.context = context;
  sample.question = std::move(question);
  sample.answers = {"a"};
  sample.max_new = 10;
  return sample;
}

std::shared_ptr<const std::string> text_of(std::int64_t letters) {
  std::string text;
  for (std::int64_t i = 0; i < letters; ++i) text += static_cast<char>('a' + i % 26);
  return std::make_shared<const std::string>(text);
}

std::int64_t tokens_of(const Sample& sample) {
  return std::ssize(
      tiny_model()->tokenizer().encode(*sample.context + sample.question, Tokenizer::Bos::as_template));
}

TEST(FitSamples, WhatIsTooLongIsLeftOutByName) {
  const auto shared = text_of(80);
  const std::vector<Sample> samples = {sample_of("short", text_of(20), "?"),
                                       sample_of("long", text_of(5000), "?"), sample_of("fits", shared, "?"),
                                       sample_of("does not", shared, std::string(90, '?'))};
  const FittedSamples fitted = fit_samples(*tiny_model(), samples, kMost, Truncate::none);
  ASSERT_EQ(fitted.samples.size(), 2u);
  EXPECT_EQ(fitted.samples[0].id, "short");
  EXPECT_EQ(fitted.samples[1].id, "fits");
  ASSERT_EQ(fitted.left_out.size(), 2u);
  EXPECT_EQ(fitted.left_out[0].id, "long");
  EXPECT_EQ(fitted.left_out[0].tokens, tokens_of(samples[1]));
  EXPECT_EQ(fitted.left_out[1].id, "does not");
  EXPECT_EQ(fitted.cut, 0);
}

TEST(FitSamples, TheMiddleGoesAndBothEndsAndTheQuestionStay) {
  const auto context = std::make_shared<const std::string>("BEGIN" + *text_of(5000) + "END");
  const std::vector<Sample> samples = {sample_of("one", context, " first?"),
                                       sample_of("two", context, " a longer question?")};
  const FittedSamples fitted = fit_samples(*tiny_model(), samples, kMost, Truncate::middle);
  ASSERT_EQ(fitted.samples.size(), 2u);
  EXPECT_EQ(fitted.cut, 2);
  EXPECT_EQ(fitted.samples[0].context, fitted.samples[1].context) << "one text, prefilled once";
  for (const Sample& sample : fitted.samples) {
    EXPECT_TRUE(sample.context->starts_with("BEGINabc"));
    EXPECT_TRUE(sample.context->ends_with("END"));
    EXPECT_LE(tokens_of(sample) + sample.max_new, kMost) << "with room for the answer";
    EXPECT_GT(tokens_of(sample) + sample.max_new, kMost - 40) << "and not much less";
  }
  EXPECT_EQ(fitted.samples[1].question, " a longer question?");
}

TEST(FitSamples, AQuestionThatIsMostOfThePromptIsNotCut) {
  const FittedSamples fitted = fit_samples(
      *tiny_model(), {sample_of("q", text_of(5000), std::string(90, '?'))}, kMost, Truncate::middle);
  EXPECT_TRUE(fitted.samples.empty());
  EXPECT_EQ(fitted.left_out.size(), 1u);
}

TEST(FitSamples, RoomIsTheModelsContextOrLess) {
  const std::int64_t positions = most_tokens(*tiny_model(), {});
  EXPECT_GT(positions, 0);
  EXPECT_EQ(most_tokens(*tiny_model(), {.rope_factor = 4.0}), 4 * positions);
  EXPECT_EQ(most_tokens(*tiny_model(), {.max_tokens = 50}), 50);
  EXPECT_EQ(most_tokens(*tiny_model(), {.max_tokens = 2 * positions}), positions);
  test::expect_refused("--truncate", [] { parse_truncate("end"); });
}

}  // namespace
}  // namespace lode
