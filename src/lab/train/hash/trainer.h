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
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "lab/train/capture.h"
#include "lab/train/hash/settings.h"
#include "lodestone/engine.h"
#include "select/hash/weights.h"

namespace lode {

/// Mean loss of a KV head over the last tenth of its steps.
struct HashHeadLoss {
  int layer = 0, kv_head = 0;
  double loss = 0;
};

struct HashResult {
  std::vector<HashWeights> layers;
  std::vector<HashHeadLoss> heads;
  std::int64_t steps = 0, tokens = 0;
  bool steps_on_gpu = false;
};

/// Reads the prompts in order. After each one, what has been reached is written to `checkpoint`, unless that
/// is empty; a run that finds one goes on from there, to the same bits. InputError when it belongs to other
/// settings, model, device or prompts, or when no prompt is long enough to have far keys. A GPU that reads the
/// prompts takes the steps, too; a run goes on where its steps began. `say` is told, for people, where its memory is too small for them and the host
/// takes them, and that `options.gpu_memory` does not bound them.
HashResult train_hash(const std::shared_ptr<const Model>& model, const ContextOptions& options,
                      const HashSettings& settings, const std::vector<Prompt>& prompts,
                      const std::filesystem::path& checkpoint, Progress::Mode progress,
                      const std::function<void(const std::string&)>& say = {});

}  // namespace lode
