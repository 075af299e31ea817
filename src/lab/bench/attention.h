// SPDX-License-Identifier: Apache-2.0
// Speed of one layer's attention under several methods, through the same selectors and the same attend() as
// the engine, beside full attention and beside plain reads of as many bytes.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/progress.h"
#include "lab/bench/common.h"
#include "lodestone/spec.h"
#include "model/config.h"

namespace lode {

struct AttentionBenchOptions {
  ModelConfig shape;
  std::int64_t context = 8192;  ///< N: keys of each sequence, the query tokens' own included
  std::int64_t batch = 1;       ///< B sequences of their own keys
  std::int64_t queries = 1;     ///< T query tokens per sequence
  DType kv_type = DType::f16;
  KvKind kind = KvKind::normal;
  double skew = 1.0;
  /// Share of the keys in one bucket that all attend, of the first spec of saap; further ones stay as they
  /// come, to be held against it in the same run. 0 = all do.
  double largest = 0;
  std::optional<double> keep;  ///< share of the far keys that selections are cut or filled to
  std::int64_t recall = 0;     ///< best far keys of a query that selections are held against; 0 = not
  double seconds = 2.0;        ///< measuring time per spec, roughly
  bool order_rows = true;      ///< as order_rows() does for a context, on the CPU
  bool rotate = true;          ///< on a GPU, past its caches; without: a trial, not for times
  Progress::Mode progress = Progress::Mode::quiet;  ///< while indexes are built
  std::string fingerprint = "bench";                ///< of the model whose artefacts specs may name
  std::uint64_t seed = 1;
};

/// Medians over calls. limit = time of plain reads of `bytes`, in the same run. On the GPU merging is part of
/// the attention kernel.
struct AttentionBenchRow {
  std::string attention;
  double selectivity = 1.0;
  double median_us = 0;
  double apart_us = 0;  ///< of a call that waits for the one before, as all do on a CPU
  double select_us = 0, attend_us = 0, merge_us = 0;
  std::int64_t bytes = 0;
  double limit_us = 0;
  double build_seconds = 0;  ///< of the index over one sequence
  /// With AttentionBenchOptions::recall: share of the best far keys that selections hold, and keys or index
  /// entries compared with a query, of its far keys. Means over queries and heads.
  double recall = 0, scanned = 0;
};

/// The first row is `full`, whether asked for or not. Calls, and the reads they are compared with, rotate
/// over buffers of at least three times the last-level cache, or, where that would take more than a few batches, the
/// caches are emptied between calls. `note` is told what is being done.
std::vector<AttentionBenchRow> bench_attention(const AttentionBenchOptions& options,
                                               std::span<const Spec> specs, ThreadPool& pool,
                                               const std::function<void(std::string_view)>& note);

/// The same on the GPU, for methods whose keys it chooses by itself; those whose tokens do not choose
/// together are left out where `queries` is more than 8.
std::vector<AttentionBenchRow> bench_attention_gpu(const AttentionBenchOptions& options,
                                                   std::span<const Spec> specs, ThreadPool& pool,
                                                   const std::function<void(std::string_view)>& note);

}  // namespace lode
