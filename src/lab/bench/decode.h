// SPDX-License-Identifier: Apache-2.0
// Speed of whole decode steps through the engine, under several methods on one context.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lab/bench/common.h"
#include "lab/bench/far_recall.h"
#include "lodestone/engine.h"

namespace lode {

struct DecodeBenchOptions {
  std::int64_t context = 8192;  ///< tokens in front of the first measured one
  DType kv_type = DType::f16;
  Device device = Device::cpu;
  std::int64_t gpu_memory = 0;  ///< as in ContextOptions
  std::vector<int> gpus = {};   ///< the same
  int context_parallel = 1;
  GpuSum gpu_sum = GpuSum::automatic;
  KvTier kv_tier = KvTier::automatic;
  std::int64_t active_memory = 0;
  KvKind kind = KvKind::normal;
  double skew = 1.0;
  /// Layers whose keys are made and indexed; the others copy theirs, in turn, or with `share` use their
  /// memory. 0 = every layer its own.
  int built_layers = 0;
  bool share = false;
  bool order_rows = true;     ///< order_rows(), of a single method
  std::int64_t recall = 0;    ///< best far keys of a query that selections are held against; 0 = not
  int steps = 32;             ///< measured per spec, after two that warm up
  std::int64_t question = 0;  ///< tokens of a question that is read now and then; 0 = none
  std::uint64_t seed = 1;
  double audit = 0;  ///< share of the warm-up's sparse calls that are also computed exactly
};

struct DecodeBenchRow {
  std::string attention;
  double median_ms = 0;          ///< of one step
  double tokens_per_second = 0;  ///< of the median step
  double density = 1, selectivity = 1;
  WorkReport work;
  double question_ms = 0;  ///< of reading a question: the time to the answer's first token
  double question_density = 1, question_selectivity = 1;
  double build_seconds = 0;      ///< of the index, all layers that are built
  std::int64_t index_bytes = 0;  ///< of all layers, as if each had its own
  TierWork tiers = {};           ///< of one step, on average
  double sum_us = 0;      ///< that one step's sums and merges over several GPUs take alone; 0 on one GPU
  FarRecall recall = {};  ///< of some queries in layers that are built, where the host chooses
};

/// The first row is `full`. Keys and values of the context are made up, not computed: a step takes as long,
/// and contexts that would take hours to prefill can be measured. So are a question's tokens. With
/// KvKind::ood the queries are made up too and take the place of the projections'. The specs take turns, step
/// by step.
std::vector<DecodeBenchRow> bench_decode(const std::shared_ptr<const Model>& model,
                                         const DecodeBenchOptions& options, std::span<const Spec> specs,
                                         const std::function<void(std::string_view)>& note);

/// Makes up keys and values of `options.context` tokens in an empty context, as bench_decode does; indexes are
/// not built.
void fill_context(Context& context, const DecodeBenchOptions& options);

}  // namespace lode
