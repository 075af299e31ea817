// SPDX-License-Identifier: Apache-2.0
// Who takes the optimiser's steps of HashAttention's functions: the CPU, heads side by side on the pool's
// threads.
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
  std::deque<HashHead>& heads;  ///< [L, Hkv]
};

std::unique_ptr<HashDevice> make_hash_device(const HashWork& work);

}  // namespace lode
