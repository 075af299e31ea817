// SPDX-License-Identifier: Apache-2.0
// The forward pass against transformers, on tiny models that have each feature
// (tests/golden/make_goldens.py).
#include "model/llama.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/threads.h"
#include "support/compare.h"
#include "support/golden_model.h"

namespace lode {
namespace {

class LlamaGolden : public testing::TestWithParam<std::string> {};

TEST_P(LlamaGolden, LogitsAndHiddenStatesEqualTransformers) {
  const GoldenModel golden(GetParam());
  const ModelConfig& config = golden.config;
  const ModelWeights& weights = golden.weights;
  const auto tokens = static_cast<std::int64_t>(golden.ids.size());
  // On machines with bf16 matrix units activations are rounded to bf16 before they meet 16-bit weights.
  const float tolerance = weights.layers[0].q.type == WeightType::f32 ? 1e-4f : 2e-2f;

  ThreadPool pool(2);
  Llama llama(config, weights, pool);
  KvStore kv({.layers = config.layers,
              .kv_heads = config.kv_heads,
              .head_dim = config.head_dim,
              .type = DType::f32,
              .max_tokens = tokens});
  ForwardHooks hooks;
  hooks.layer_done = [&](int layer, std::span<const float> x) {
    if (layer + 1 == config.layers) return;  // transformers gives the last one after the final norm
    const auto want =
        std::span(golden.hidden).subspan(static_cast<std::size_t>(layer + 1) * x.size(), x.size());
    EXPECT_LT(relative_difference(x, want), tolerance) << "layer " << layer;
  };
  const SequenceTokens sequence = {golden.ids, &kv, 0};
  std::vector<float> logits;
  llama.forward({.sequences = {&sequence, 1}, .hooks = &hooks}, Rope(config, tokens), LogitRows::all, logits);
  EXPECT_LT(relative_difference(logits, golden.logits), tolerance);
}

INSTANTIATE_TEST_SUITE_P(Models, LlamaGolden, testing::ValuesIn(kGoldenModels), [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace lode
