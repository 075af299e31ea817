// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding in Hugging Face's half-split order, with the scalings of Llama-family models.
#pragma once

#include <span>
#include <vector>

#include "lodestone/types.h"
#include "model/config.h"

namespace lode {

class Rope {
 public:
  /// Frequencies for a context of `max_tokens` (dynamic scaling depends on it; fixed for the life of a
  /// context).
  Rope(const ModelConfig& config, std::int64_t max_tokens);

  /// Rotates the vectors of one or several heads, x [heads, d], in place to `position`: x[h, i], x[h, i +
  /// d/2] by angle position * frequency[i], times the attention scaling (yarn).
  void rotate(std::span<float> x, Position position) const;
  /// Inverse of rotate: gives back the vectors before RoPE (divides by the attention scaling).
  void unrotate(std::span<float> x, Position position) const;

  std::span<const float> frequencies() const { return frequencies_; }  // [d/2] radians per position
  float attention_scaling() const { return attention_scaling_; }

 private:
  std::vector<float> frequencies_;
  float attention_scaling_ = 1.0f;
};

}  // namespace lode
