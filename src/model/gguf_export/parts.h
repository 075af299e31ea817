// SPDX-License-Identifier: Apache-2.0
// What writing a model as a GGUF file is made of: which tensors the file has, their rows, and the metadata.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/gguf_writer.h"
#include "kernels/weight_type.h"
#include "model/config.h"
#include "model/family.h"
#include "model/weights.h"

namespace lode {

/// A tensor of a file, by its name there.
struct GgufTarget {
  std::string name;
  Place place;
  int layer;  ///< -1: the model's own
  std::vector<std::int64_t> shape;
};

/// Every tensor that a file of this model has, but for those that belong to RoPE.
std::vector<GgufTarget> gguf_targets(const ModelConfig& c);

/// A tensor's rows in the file's order. A vector is one row.
struct TensorRows {
  struct Row {
    WeightType type;
    const std::byte* data;
  };
  std::function<Row(std::int64_t row)> row;
  std::function<void(std::span<float> numbers)> change = nullptr;  ///< null: numbers are written as they are
  bool copied = false;  ///< blocks of experts that stay as they are
};

/// Those of a tensor; they point into `m`.
TensorRows rows_of_target(const GgufTarget& target, const ModelWeights& m, const ModelConfig& c);

/// A vector that is part of what RoPE is made from.
struct RopeVector {
  std::string name;
  std::vector<float> numbers;
};
std::vector<RopeVector> rope_vectors(const ModelConfig& c);

/// Sizes and plan of a model; `name` is for people.
void add_gguf_config(const ModelConfig& c, const std::string& name, GgufWriter& to);

/// InputError where a file of these metadata and tensors would be read as another model than `c`, naming what GGUF
/// cannot say of it.
void expect_said(const ModelConfig& c, const GgufWriter& metadata, std::span<const GgufTarget> targets,
                 std::span<const RopeVector> vectors, std::string_view where);

}  // namespace lode
