// SPDX-License-Identifier: Apache-2.0
// Evaluation on a GPU: questions asked together have the answers and counts of questions asked alone, but for more near
// keys. Run on a GPU, and where there is none on one that the host plays (tests/gpu_fake).
#include "lab/eval/eval.h"

#include <gtest/gtest.h>

#include <map>

#include "engine/batch.h"
#include "lab/tasks/samples.h"
#include "support/gpu.h"

namespace lode {
namespace {

std::vector<Sample> samples_about_one_text() {
  const Haystack prose = Haystack::prose(3, 50'000, make_meter(pocket()->tokenizer()));
  std::vector<Sample> samples;
  make_samples({.task = "kv", .tokens = 1200, .count = 4, .seed = 2, .questions = 4}, Language::built_in(),
               prose, [&](const Sample& s, bool) { samples.push_back(s); });
  return samples;
}

std::vector<EvalRow> rows_of(const std::vector<Sample>& samples, const std::vector<NamedSpec>& specs,
                             const char* protocol, int together) {
  EvalOptions options;
  options.protocol = Protocol::parse(protocol);
  options.context = {.kv_type = DType::f32, .device = Device::cuda};
  options.together = together;
  options.progress = Progress::Mode::quiet;
  return evaluate(pocket(), samples, specs, options).rows;
}

/// The GPU chooses by one method, the host by the others.
TEST(GpuEval, QuestionsTogetherAreAnsweredAsAlone) {
  NEEDS_GPU();
  const std::vector<Sample> samples = samples_about_one_text();
  std::vector<NamedSpec> specs;
  for (const char* const text : {"random:fraction=1.0,sink=4,window=50", "retrieval:k=40,sink=16,window=64",
                                 "hnsw:k=40,sink=4,window=64"})
    specs.push_back({text, parse_spec(text)});
  for (const char* const protocol : {"context-dense", "decode-sparse"}) {
    const std::vector<EvalRow> alone = rows_of(samples, specs, protocol, 1);
    const std::vector<EvalRow> together = rows_of(samples, specs, protocol, 8);
    ASSERT_EQ(alone.size(), 4u);
    ASSERT_EQ(together.size(), 4u);
    for (std::size_t i = 0; i < alone.size(); ++i) {
      EXPECT_EQ(together[i].n, 4);
      EXPECT_EQ(together[i].score, alone[i].score) << protocol << " " << alone[i].attention;
      EXPECT_EQ(together[i].agreement, alone[i].agreement) << protocol << " " << alone[i].attention;
      // A batch attends from the last whole block in front of the window on: up to 127 of 1,200 keys more are near, and
      // so many keys are a larger share of fewer far ones.
      EXPECT_NEAR(together[i].selectivity, alone[i].selectivity, 0.01 + 0.12 * alone[i].selectivity)
          << protocol << " " << alone[i].attention;
      EXPECT_NEAR(together[i].density, alone[i].density, 0.06 + 0.06 * alone[i].density)
          << protocol << " " << alone[i].attention;
      EXPECT_GT(together[i].seconds, 0.0);
    }
    EXPECT_EQ(together[1].agreement, 1.0) << "all keys were selected";
  }
}

// A method with dense layers, whose far keys are attended to, all of them.
TEST(GpuEval, CountsFarKeysOfDenseLayersTogetherAsAlone) {
  NEEDS_GPU();
  const std::vector<Sample> samples = samples_about_one_text();
  const std::vector<NamedSpec> specs = {
      {"quest", parse_spec("quest:budget=64,dense_layers=2,sink=4,window=64")}};
  const EvalRow alone = rows_of(samples, specs, "context-dense", 1).at(1);
  const EvalRow together = rows_of(samples, specs, "context-dense", 8).at(1);
  EXPECT_GT(alone.selectivity, 0.33);
  EXPECT_NEAR(together.selectivity, alone.selectivity, 0.03);
}

TEST(GpuEval, AsksTogetherWhatTheGpuChoosesAmongKeysThatItHolds) {
  NEEDS_GPU();
  struct Case {
    DType type;
    KvTier tier;
    bool full, random, retrieval;
  };
  for (const Case& c : {Case{DType::f32, KvTier::gpu, true, true, true},
                        Case{DType::f32, KvTier::host, false, false, false}}) {
    Context context(pocket(),
                    {.kv_type = c.type, .device = Device::cuda, .kv_tier = c.tier, .max_tokens = 1024});
    const MethodId random = context.attach(parse_spec("random:fraction=1/4,window=64"));
    const MethodId snapkv = context.attach(parse_spec("snapkv:max_capacity_prompt=96,sink=4,window=64"));
    const MethodId h2o = context.attach(parse_spec("h2o:heavy_ratio=40,recent_ratio=32"));
    const MethodId retrieval = context.attach(parse_spec("retrieval:k=40,sink=16,window=64"));
    context.prefill(story(600));
    context.build_indexes();
    EXPECT_EQ(asked_together(context.impl(), kDense), c.full);
    EXPECT_EQ(asked_together(context.impl(), random), c.random);
    EXPECT_EQ(asked_together(context.impl(), retrieval), c.retrieval);
    EXPECT_FALSE(asked_together(context.impl(), snapkv)) << "it chooses by the prompt";
    EXPECT_FALSE(asked_together(context.impl(), h2o)) << "it goes by the weights of earlier keys";
  }
}

}  // namespace
}  // namespace lode
