// SPDX-License-Identifier: Apache-2.0
// The forward pass against transformers, on tiny models that have each feature
// (tests/golden/make_goldens.py).
#include "model/llama.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "base/threads.h"
#include "io/safetensors.h"

namespace lode {
namespace {

struct Golden {
  std::vector<TokenId> ids;           // [T]
  std::vector<float> logits, hidden;  // [T, V], [L + 1, T, D]
};

std::vector<float> floats(const Tensor& tensor) {
  std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

Golden read_golden(const std::filesystem::path& path) {
  const MappedFile file(path);
  const auto tensors = parse_safetensors(file.bytes(), path.string());
  Golden golden = {.ids = {}, .logits = floats(tensors.at("logits")), .hidden = floats(tensors.at("hidden"))};
  std::vector<std::int64_t> ids(static_cast<std::size_t>(tensors.at("ids").elements()));
  std::memcpy(ids.data(), tensors.at("ids").bytes.data(), ids.size() * sizeof(std::int64_t));
  golden.ids.assign(ids.begin(), ids.end());
  return golden;
}

/// max |a - b| / max |b|.
float relative_difference(std::span<const float> a, std::span<const float> b) {
  EXPECT_EQ(a.size(), b.size());
  float worst = 0, largest = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    worst = std::max(worst, std::abs(a[i] - b[i]));
    largest = std::max(largest, std::abs(b[i]));
  }
  return worst / largest;
}

class LlamaGolden : public testing::TestWithParam<std::string> {};

TEST_P(LlamaGolden, LogitsAndHiddenStatesEqualTransformers) {
  const std::filesystem::path dir =
      std::filesystem::path(LODESTONE_SOURCE_DIR) / "tests/golden/models" / GetParam();
  const ModelConfig config = read_config(dir);
  const ModelWeights weights = ModelWeights::read(dir, config);
  const Golden golden = read_golden(dir / "golden.safetensors");
  const auto tokens = static_cast<std::int64_t>(golden.ids.size());
  // On machines with bf16 matrix units activations are rounded to bf16 before they meet 16-bit weights.
  const float tolerance = weights.layers[0].q.type == DType::f32 ? 1e-4f : 2e-2f;

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

INSTANTIATE_TEST_SUITE_P(Models, LlamaGolden,
                         testing::Values("gqa-f32", "gqa-bf16", "gqa-f16", "mha-untied-bias", "mqa-head-dim",
                                         "rope-linear", "rope-dynamic", "rope-yarn", "rope-llama3",
                                         "mistral"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace lode
