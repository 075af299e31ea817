// SPDX-License-Identifier: Apache-2.0
// How long SAAP's training of one KV head takes, on made-up queries and keys of a shape: what `train saap`
// does, less the reading of prompts by a model.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lab/bench/common.h"
#include "lab/train/saap/head.h"
#include "lab/train/saap/trainer.h"
#include "lodestone/engine.h"
#include "model/config.h"

namespace lode {

struct SaapBenchOptions {
  ModelConfig shape;
  std::int64_t context = 131072;  ///< tokens of each prompt
  std::int64_t prompts = 16;      ///< to train on; settings.held_out more are tested on
  KvKind kind = KvKind::clustered;
  double skew = 1.0;
  Device device = Device::cpu;
  SaapSettings settings;
};

struct SaapBenchResult {
  std::string device;
  std::int64_t examples = 0, held_out = 0, looked_at = 0;  ///< queries; scored to find them
  /// Seconds: of making vectors, which is no part of training; of k-means; of labelling keys; of queries'
  /// targets; of the optimiser's steps; of what is measured on held-out prompts.
  double made = 0, kmeans = 0, labels = 0, targets = 0, steps = 0, measure = 0;
  double first_loss = 0, train_loss = 0;  ///< of the first batch, and over the last 100
  SaapMeasures measures;
  double seconds() const { return kmeans + labels + targets + steps + measure; }
};

/// InputError when no query of the prompts has far keys. `note` is told what is being done.
SaapBenchResult bench_saap_training(const SaapBenchOptions& options, ThreadPool& pool,
                                    const std::function<void(std::string_view)>& note);

}  // namespace lode
