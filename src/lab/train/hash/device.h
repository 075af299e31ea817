// SPDX-License-Identifier: Apache-2.0
// Who takes the optimiser's steps of HashAttention's functions: the CPU, heads side by side on the pool's
// threads; or a GPU. Both see the same draws; sums differ in their last bits.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lab/train/hash/head.h"
#include "lab/train/hash/steps.h"
#include "lodestone/engine.h"
#include "model/config.h"

namespace lode {

class KvStore;
class Rope;
class ThreadPool;

/// Some steps of all heads over the keys [sink, keys_end) of the prompt that was read.
struct HashSeries {
  Position keys_end = 0;
  double class1_weight = 1;
  std::function<double(std::int64_t step)> rate_scale;
  /// [steps][L]; the tokens are the same in all layers.
  const std::vector<std::vector<StepQueries>>* queries = nullptr;
  /// For draw_step.
  std::function<Rng(std::int64_t step, std::int64_t head)> rng;
};

class HashDevice {
 public:
  virtual ~HashDevice() = default;
  /// Before the series of another prompt.
  virtual void begin_prompt() {}
  /// The loss of each step and head in nats, [steps, heads]. RunError when one is no number.
  virtual std::vector<double> take(const HashSeries& series) = 0;
  /// Brings functions and optimisers on the host up to date.
  virtual void store() {}
};

/// What a device works on; all of it outlives the device.
struct HashWork {
  const ModelConfig& config;
  const HashSettings& settings;
  const KvStore& kv;
  const Rope& rope;
  ThreadPool& pool;
  std::deque<HashHead>& heads;   ///< [L, Hkv]; the GPU takes them as they are at the first series
  std::int64_t most_tokens = 0;  ///< of a prompt
};

/// `device` takes the steps, or, where a GPU has no room for those of one head, the host: `why_host` then
/// says so in a sentence. `memory`: what the steps may take of a GPU, 0 = half of what is free once the longest
/// prompt has its keys and values there; the bits do not depend on it. RunError when a GPU was asked for and
/// there is none.
std::unique_ptr<HashDevice> make_hash_device(Device device, const HashWork& work, std::string& why_host,
                                             std::int64_t memory = 0);

}  // namespace lode
