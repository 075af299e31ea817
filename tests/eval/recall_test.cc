// SPDX-License-Identifier: Apache-2.0
// Recall by length: what a length gives depends on no other length, also where methods learn from the
// prefill.
#include "eval/recall.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lodestone/error.h"
#include "tasks/haystack.h"
#include "tiny_model.h"

namespace lode {
namespace {

std::string some_text() {
  const Haystack prose = Haystack::prose(3, 20'000, make_meter(tiny_model()->tokenizer()));
  return std::string(prose.text().substr(0, 1500));  // as many tokens, for tokens are bytes
}

Json measure(const std::vector<std::string>& texts, const std::vector<std::int64_t>& lengths) {
  std::vector<NamedSpec> specs;
  for (const std::string& text : texts) specs.push_back({text, parse_spec(text)});
  RecallOptions options = {.context = {.kv_type = DType::f32}, .lengths = lengths};
  options.context.chunk = 128;
  options.dense = {.sink = 1, .window = 15};
  options.top = 8;
  options.progress = Progress::Mode::quiet;
  return recall_by_length(tiny_model(), some_text(), specs, options).json().at("results");
}

TEST(RecallByLength, ALengthDependsOnNoOtherLength) {
  const std::vector<std::string> specs = {"topk:k=8", "kmeans:clusters=16", "retrieval:k=8",
                                          "snapkv:max_capacity_prompt=128", "h2o:heavy_ratio=64"};
  const Json alone = measure(specs, {1200}), after = measure(specs, {500, 777, 1200});
  ASSERT_EQ(after.size(), 3 * specs.size());
  for (std::size_t m = 0; m < specs.size(); ++m) EXPECT_EQ(after[2 * specs.size() + m], alone[m]) << specs[m];
  EXPECT_EQ(alone[0].at("recall"), 1.0) << "the exact top 8 are the top 8";
}

TEST(RecallByLength, LengthsBeyondTheTextAreAnErrorWithNumbers) {
  EXPECT_THROW(measure({"topk:k=8"}, {500, 1'000'000}), InputError);
  EXPECT_THROW(measure({"topk:k=8"}, {}), InputError);
  EXPECT_THROW(measure({"full"}, {500}), InputError);
}

}  // namespace
}  // namespace lode
