// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding in Hugging Face's half-split order, with the scalings that models use.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "lodestone/types.h"

namespace lode {

struct RopeScaling {
  enum class Kind { none, linear, dynamic, yarn, llama3, longrope, divisors, proportional };
  Kind kind = Kind::none;
  double factor = 1.0;
  std::int64_t original_max_positions = 0;
  // llama3
  double low_freq_factor = 1.0, high_freq_factor = 4.0;
  // yarn and longrope
  double beta_fast = 32.0, beta_slow = 1.0, attention_factor = 0.0;  ///< 0: the usual one of the kind
  double mscale = 0.0, mscale_all_dim = 0.0;
  bool truncate = true;
  // longrope: divisors of the frequencies in contexts up to original_max_positions, and in longer ones.
  // divisors: those of all contexts (GGUF's rope_freqs).
  std::vector<float> short_divisors = {}, long_divisors = {};
  double share = 1.0;  ///< proportional: of a head's pairs, the first ones turn, as fast as if all did
};

/// As config.json has it.
std::string_view name_of(RopeScaling::Kind kind);

/// What the frequencies follow from.
struct RopeShape {
  int head_dim = 0;    ///< d, even
  int rotary_dim = 0;  ///< dimensions that turn, even; 0 = all of them
  double theta = 10000.0;
  RopeScaling scaling = {};
};

class Rope {
 public:
  /// Frequencies for a context of `max_tokens` (dynamic scaling and longrope depend on it; fixed for the life
  /// of a context).
  Rope(const RopeShape& shape, std::int64_t max_tokens);
  /// Turns nothing: for layers without positions.
  static Rope none(int head_dim);
  /// Frequencies of somebody else's, [d/2] radians per position.
  static Rope of(std::span<const float> frequencies, float attention_scaling);

  /// Rotates the vectors of one or several heads, x [heads, d], in place to `position`: x[h, i], x[h, i +
  /// d/2] by angle position * frequency[i], times the attention scaling (yarn).
  void rotate(std::span<float> x, Position position) const;
  /// Inverse of rotate: gives back the vectors before RoPE (divides by the attention scaling).
  void unrotate(std::span<float> x, Position position) const;

  /// [d/2] radians per position. Of heads that turn in part the turning pairs come first and the others are
  /// 0: the weights' rows are put in that order when a model is read.
  std::span<const float> frequencies() const { return frequencies_; }
  float attention_scaling() const { return attention_scaling_; }  ///< of the pairs that turn alone
  std::size_t turning_pairs() const { return turning_; }          ///< at most d/2

 private:
  Rope() = default;
  std::vector<float> frequencies_;
  std::size_t turning_ = 0;
  float attention_scaling_ = 1.0f;
};

}  // namespace lode
