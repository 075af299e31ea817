// SPDX-License-Identifier: Apache-2.0
// The tiny models whose hidden states and logits transformers computed (tests/golden/make_goldens.py).
#pragma once

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "model/config.h"
#include "model/weights.h"
#include "support/source_dir.h"

namespace lode {

inline const std::vector<std::string> kGoldenModels = {
    "gqa-f32",     "gqa-bf16",     "gqa-f16",   "mha-untied-bias", "mqa-head-dim",
    "rope-linear", "rope-dynamic", "rope-yarn", "rope-llama3",     "mistral"};

struct GoldenModel {
  explicit GoldenModel(const std::string& name)
      : GoldenModel(source_dir() / "tests/golden/models" / name, 0) {}

  ModelConfig config;
  ModelWeights weights;
  std::vector<TokenId> ids;           // [T]
  std::vector<float> logits, hidden;  // [T, V], [L + 1, T, D]

 private:
  GoldenModel(const std::filesystem::path& dir, int)
      : config(read_config(dir)), weights(ModelWeights::read(dir, config)) {
    const MappedFile file(dir / "golden.safetensors");
    const auto tensors = parse_safetensors(file.bytes(), file.path().string());
    logits = floats(tensors.at("logits"));
    hidden = floats(tensors.at("hidden"));
    std::vector<std::int64_t> wide(static_cast<std::size_t>(tensors.at("ids").elements()));
    std::memcpy(wide.data(), tensors.at("ids").bytes.data(), wide.size() * sizeof(std::int64_t));
    ids.assign(wide.begin(), wide.end());
  }
  static std::vector<float> floats(const Tensor& tensor) {
    std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
    std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
    return values;
  }
};

}  // namespace lode
