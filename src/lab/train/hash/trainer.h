// SPDX-License-Identifier: Apache-2.0
// Training of HashAttention (section 4.3) for every layer and KV head of a frozen model: the model reads a
// prompt chunk by chunk, and then every head takes some steps, each on queries drawn all over the prompt and
// the far keys of those.
//
// Deviations, all of them settings: steps are drawn over the prompt (the authors' program takes them after
// each chunk, on its own queries), functions start linear (hash_start.h) and not at random, the rate falls
// along a cosine, queries and keys of a step may be turned together to positions beyond the prompt's. Keys
// share one function for a KV head by default (the paper: one for each query head). Pivotal are the keys with
// the largest a |v|, as lemma 4.1 says (the authors' program takes the largest logits).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "base/json.h"
#include "base/progress.h"
#include "lab/train/capture.h"
#include "lab/train/hash/head.h"
#include "lodestone/engine.h"
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

/// Mean loss of a KV head over the last tenth of its steps.
struct HashHeadLoss {
  int layer = 0, kv_head = 0;
  double loss = 0;
};

struct HashResult {
  std::vector<HashWeights> layers;
  std::vector<HashHeadLoss> heads;
  std::int64_t steps = 0, tokens = 0;
};

/// Reads the prompts in order. After each one, what has been reached is written to `checkpoint`, unless that
/// is empty; a run that finds one goes on from there, to the same bits. InputError when it belongs to other
/// settings, model or prompts, or when no prompt is long enough to have far keys.
HashResult train_hash(const std::shared_ptr<const Model>& model, const ContextOptions& options,
                      const HashSettings& settings, const std::vector<Prompt>& prompts,
                      const std::filesystem::path& checkpoint, Progress::Mode progress);

}  // namespace lode
