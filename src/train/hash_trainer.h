// SPDX-License-Identifier: Apache-2.0
// Training of HashAttention (section 4.3) for every layer and KV head of a frozen model: the model reads
// texts chunk by chunk, and after each chunk every head takes a few steps on some of the chunk's queries and
// the keys that were cached before it.
//
// Deviations, all of them settings: functions start linear (hash_start.h) and not at random, queries and keys
// of a step are sampled (the paper takes all keys), the rate falls along a cosine. Keys share one function
// for a KV head by default (the paper: one for each query head). Pivotal are the keys with the largest a |v|,
// as lemma 4.1 says (the authors' program takes the largest logits).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "base/json.h"
#include "base/progress.h"
#include "lodestone/engine.h"
#include "select/hash_weights.h"
#include "train/capture.h"
#include "train/hash_head.h"

namespace lode {

struct HashSettings {
  HashScheme scheme;
  std::vector<std::int64_t> widths;  ///< of hidden layers; none = a linear function
  PivotalLoss loss = PivotalLoss::bce;
  bool by_value = true;                             ///< pivotal by a |v|, else by logits
  std::int64_t top = 32;                            ///< pivotal keys of a query
  DenseParts dense = {.sink = 128, .window = 128};  ///< attended anyway, and so never pivotal
  double alpha = 20, beta = 0;                      ///< class weight alpha + beta context: equation 8
  std::int64_t steps = 1;                           ///< of every head after a chunk
  std::int64_t queries = 16;                        ///< tokens of the chunk in a step
  std::int64_t others = 512;                        ///< keys of a step beside the pivotal ones; 0 = all
  double rate = 1e-2;
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
