// SPDX-License-Identifier: Apache-2.0
// The tiny models of every family, and what transformers made of some tokens (tests/golden/make_family_goldens.py).
#pragma once

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "model/source.h"
#include "model/weights.h"
#include "support/source_dir.h"

namespace lode {

inline const std::filesystem::path kFamilies = source_dir() / "tests/golden/families";

struct FamilyTokens {
  explicit FamilyTokens(const std::string& name) {
    const MappedFile file(kFamilies / name / "golden.safetensors");
    const auto tensors = parse_safetensors(file.bytes(), file.path().string());
    const auto floats = [&](const char* tensor) {
      const Tensor& t = tensors.at(tensor);
      std::vector<float> values(static_cast<std::size_t>(t.elements()));
      std::memcpy(values.data(), t.bytes.data(), t.bytes.size());
      return values;
    };
    logits = floats("logits");
    hidden = floats("hidden");
    std::vector<std::int64_t> wide(static_cast<std::size_t>(tensors.at("ids").elements()));
    std::memcpy(wide.data(), tensors.at("ids").bytes.data(), wide.size() * sizeof(std::int64_t));
    ids.assign(wide.begin(), wide.end());
  }
  std::vector<TokenId> ids;           // [T]
  std::vector<float> logits, hidden;  // [T, V], [L + 1, T, D]
};

/// A model from its folder or GGUF file.
struct FamilyModel {
  explicit FamilyModel(const std::filesystem::path& path) {
    ModelSource source = ModelSource::open(path);
    config = source.config();
    weights = ModelWeights::read(source.take_weights(), config);
  }
  ModelConfig config;
  ModelWeights weights;
};

}  // namespace lode
