// SPDX-License-Identifier: Apache-2.0
// How the cost of a lookup grows with the context while the number of keys that it keeps stays: bytes and
// time of choosing alone, over made-up keys.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lab/bench/common.h"
#include "model/config.h"

namespace lode {

struct GrowthBenchOptions {
  ModelConfig shape;
  std::vector<std::int64_t> contexts;  ///< keys, each a run of its own
  std::int64_t kept = 1024;            ///< keys that a query keeps, whatever the context
  DType kv_type = DType::f16;
  KvKind kind = KvKind::clustered;
  double skew = 1.0;
  double seconds = 1.0;  ///< measuring time per spec and context, roughly
  std::uint64_t seed = 1;
};

/// Of one query token in one layer, all its KV heads together.
struct GrowthBenchRow {
  std::string attention;  ///< as asked for
  std::int64_t context = 0;
  std::int64_t bytes = 0;   ///< read to choose: means over the queries
  std::int64_t scored = 0;  ///< index entries compared with the query
  double kept = 0;          ///< far keys chosen by one KV head
  double mass = 0;          ///< share of the far keys' attention that goes to the chosen ones
  double median_us = 0;     ///< of choosing, with nothing of the index in the caches
  double build_seconds = 0;
};

/// Methods with the key `sparsity` are given the one that keeps `kept` keys; others stay as their specs say. Trained ones
/// without a file get a made-up artefact. Rows come context by context. `note` is told what is being done. InputError when
/// a context has no more than `kept` keys, for a spec that names a sparsity, and for `full`.
std::vector<GrowthBenchRow> bench_growth(const GrowthBenchOptions& options,
                                         std::span<const std::string> specs, ThreadPool& pool,
                                         const std::function<void(std::string_view)>& note);

}  // namespace lode
