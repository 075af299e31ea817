// SPDX-License-Identifier: Apache-2.0
// Speed of many sequences at once, through the scheduler that a server uses.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lab/bench/common.h"
#include "lodestone/engine.h"

namespace lode {

struct BatchBenchOptions {
  std::int64_t context = 8192;  ///< tokens of each document
  int documents = 1, sequences = 8;
  std::int64_t tail = 256;  ///< tokens of each sequence's own before the first measured one; they differ
  DType kv_type = DType::f16;
  Device device = Device::cpu;
  std::int64_t gpu_memory = 0;  ///< as in ContextOptions
  KvKind kind = KvKind::normal;
  double skew = 1.0;
  int steps = 32;      ///< measured, after some that warm up
  bool mixed = false;  ///< one run in which the specs alternate among the sequences, instead of one run each
  /// Tokens of a document that is read once beside the sequences and once alone; 0 = none.
  std::int64_t prefill = 0;
  std::uint64_t seed = 1;
};

/// A document is read while sequences generate.
struct BesidePrefill {
  double seconds = 0, alone_seconds = 0;    ///< of the reading
  double ms_step = 0, longest_ms_step = 0;  ///< of the sequences meanwhile: mean and longest
};

struct BatchBenchRow {
  std::string attention;
  double ms_step = 0, tokens_per_second = 0;
  std::int64_t bytes = 0;  ///< that a step must read: weights, documents or the chosen keys, tails, indexes
  double limit_ms = 0;     ///< of reading so many
  int shared = 1;          ///< sequences that read their document together
  BesidePrefill beside;    ///< with BatchBenchOptions::prefill
};

/// Keys and values of the documents are made up, those of the tails are computed. A row is the mean of its steps.
std::vector<BatchBenchRow> bench_batch(const std::shared_ptr<const Model>& model,
                                       const BatchBenchOptions& options, std::span<const Spec> specs,
                                       const std::function<void(std::string_view)>& note);

}  // namespace lode
