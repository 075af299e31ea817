// SPDX-License-Identifier: Apache-2.0
// What a training of HashAttention's functions follows from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "base/json.h"
#include "lab/train/hash/head.h"
#include "lodestone/types.h"
#include "select/hash/weights.h"

namespace lode {

struct HashSettings {
  HashScheme scheme;
  std::vector<std::int64_t> widths;  ///< of hidden layers; none = a linear function
  PivotalLoss loss = PivotalLoss::bce;
  bool by_value = true;                              ///< pivotal by a |v|, else by logits
  std::int64_t top = 32;                             ///< pivotal keys of a query
  LocalWindow dense = {.sink = 128, .window = 128};  ///< attended anyway, and so never pivotal
  double alpha = 20, beta = 0;                       ///< class weight alpha + beta context: equation 8
  /// When heads learn: from a prompt when all of it is read, so that a step's queries stand all over it, or,
  /// as the authors' program does, after each chunk from the chunk's own.
  enum class Draw { prompt, chunk };
  Draw draw = Draw::prompt;
  std::int64_t steps = 64;     ///< of every head, after a prompt or a chunk
  std::int64_t queries = 24;   ///< tokens in a step
  std::int64_t others = 4096;  ///< keys of a step beside the pivotal ones; 0 = all
  /// Share of a step's tokens that are among a prompt's last `late_tokens`: where texts end with questions.
  double late = 0;
  std::int64_t late_tokens = 1024;
  /// Queries and keys of a step are turned on by RoPE together, by 0 to `shift` positions: nothing that they
  /// choose changes, and functions of turned vectors learn positions beyond the prompts'.
  std::int64_t shift = 0;
  /// In a share `apart` of the steps some of those positions, up to this many, are the queries' alone: they
  /// look from further away, as in contexts longer than the prompts, and their pivotal keys are those of
  /// there.
  std::int64_t further = 0;
  double apart = 0.5;
  std::filesystem::path from;  ///< functions to train further; empty = none
  double rate = 5e-3;
  bool linear_start = true;
  double gamma = 0.25;      ///< of the linear start
  DType type = DType::f16;  ///< of the weights in the result
  std::uint64_t seed = 0;
  Json json() const;
};

}  // namespace lode
