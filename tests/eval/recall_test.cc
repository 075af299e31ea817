// SPDX-License-Identifier: Apache-2.0
// Recall by length: what a length gives depends on no other length, also where methods learn from the
// prefill.
#include "lab/studies/recall.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "lab/eval/probe.h"
#include "lab/tasks/haystack.h"
#include "lodestone/error.h"
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
  RecallOptions options;
  options.context.kv_type = DType::f32;
  options.lengths = lengths;
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

// In the first layer, whose queries do not depend on what is attended: what a probe finds, which indexes the
// text before it asks.
TEST(RecallByLength, IndexesKnowNothingOfTheQueriesThatAsk) {
  const std::vector<NamedSpec> specs = {
      {"snapkv", parse_spec("snapkv:window_size=16,max_capacity_prompt=128,dense_layers=0")},
      {"retrieval", parse_spec("retrieval:k=8,recall=0.7,warm=off,dense_layers=0")}};
  const std::string text = some_text();  // and a token that begins it
  RecallOptions options;
  options.context.kv_type = DType::f32;
  options.lengths = {1500};
  options.progress = Progress::Mode::quiet;
  options.top = 24;
  const RecallReport report = recall_by_length(tiny_model(), text, specs, options);
  ProbeOptions asked = {.context = options.context};
  asked.dense = options.dense;
  asked.top = options.top;
  asked.last = asked.measured = options.queries;
  asked.progress = Progress::Mode::quiet;
  const ProbeReport probed = probe(tiny_model(), text, specs, asked);
  for (std::size_t m = 0; m < specs.size(); ++m) {
    const std::vector<HeadMeasure>& found = probed.rows[probed.row_of[m]].heads;
    for (std::size_t head = 0; head < 4; ++head) {
      ASSERT_EQ(found[head].layer, 0);
      EXPECT_NEAR(report.rows[m].heads[head].by_weight, found[head].recall, 1e-9) << specs[m].name << head;
    }
  }
}

TEST(RecallByLength, LengthsBeyondTheTextAreAnErrorWithNumbers) {
  EXPECT_THROW(measure({"topk:k=8"}, {500, 1'000'000}), InputError);
  EXPECT_THROW(measure({"topk:k=8"}, {}), InputError);
  EXPECT_THROW(measure({"full"}, {500}), InputError);
}

}  // namespace
}  // namespace lode
