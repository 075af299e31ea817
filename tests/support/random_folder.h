// SPDX-License-Identifier: Apache-2.0
// A model folder of random weights, for sizes that no golden holds.
#pragma once

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/rng.h"
#include "io/safetensors.h"

namespace lode::test {

using NamedShape = std::pair<std::string, std::vector<std::int64_t>>;

/// Writes config.json and model.safetensors (F32): matrices are normal numbers, vectors ones.
inline void write_random_folder(const std::filesystem::path& dir, const Json& config,
                                const std::vector<NamedShape>& shapes) {
  std::ofstream(dir / "config.json") << config.dump();
  std::vector<std::vector<float>> numbers;
  std::vector<TensorToWrite> tensors;
  for (const auto& [name, shape] : shapes) {
    const auto count = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    std::vector<float>& x = numbers.emplace_back(static_cast<std::size_t>(count), 1.0f);
    Rng rng(hash_seed(1, numbers.size()));
    if (shape.size() > 1)
      for (float& v : x) v = static_cast<float>(rng.normal() / std::sqrt(static_cast<double>(shape.back())));
    tensors.push_back({.name = name, .type = DType::f32, .shape = shape, .bytes = {}});
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].bytes = std::as_bytes(std::span(numbers[i]));
  write_safetensors(dir / "model.safetensors", tensors, {});
}

}  // namespace lode::test
