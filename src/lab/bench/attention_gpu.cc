// SPDX-License-Identifier: Apache-2.0
// The bench of one layer on the GPU: its keys and queries are made here as those of the CPU's are.
#include <fmt/format.h>

#include "base/cancel.h"
#include "base/threads.h"
#include "gpu/attention_bench.h"
#include "lab/bench/attention.h"
#include "lodestone/error.h"

namespace lode {
namespace {

constexpr std::int64_t kPieceTokens = 1024;  // of one thread's item

VectorMaker::Shape shape_of(const ModelConfig& c) {
  return {c.query_heads, c.kv_heads, c.head_dim};
}

/// Clustered keys; the centres are those of `seed`, whatever the piece.
void make_shaped(const AttentionBenchOptions& options, const Rope& rope, ThreadPool& pool, std::uint64_t seed,
                 KvStore& kv) {
  const std::int64_t pieces = (options.context + kPieceTokens - 1) / kPieceTokens,
                     round = std::max<std::int64_t>(1, pool.size());
  const VectorMaker around_centres(shape_of(options.shape), options.kind, options.skew, rope, seed);
  kv.expect(options.context);
  for (std::int64_t first = 0; first < pieces; first += round) {
    check_cancel();
    const std::int64_t some = std::min(round, pieces - first);
    std::vector<std::vector<float>> k(static_cast<std::size_t>(some)), v(k);
    pool.for_each(some, [&](std::int64_t i, int) {
      const std::int64_t begin = (first + i) * kPieceTokens;
      VectorMaker maker = around_centres;
      maker.reseed(hash_seed(seed, begin));
      maker.make_keys(static_cast<Position>(begin), std::min(kPieceTokens, options.context - begin));
      k[static_cast<std::size_t>(i)] = std::move(maker.k);
      v[static_cast<std::size_t>(i)] = std::move(maker.v);
    });
    for (std::int64_t i = 0; i < some; ++i) {
      const std::int64_t count = std::min(kPieceTokens, options.context - (first + i) * kPieceTokens);
      kv.write(0, count, k[static_cast<std::size_t>(i)], v[static_cast<std::size_t>(i)], &pool);
      kv.commit(count);
    }
  }
}

/// Artefacts are made up here, and a group's heads choose together: a row under another spec's name would say what
/// was not measured.
void expect_measured(const Spec& spec) {
  const auto refuse = [&](std::string_view key, std::string_view why) {
    throw InputError(
        fmt::format("attention spec '{}': expected none with {}={} on a GPU, where {}, found it; --device "
                    "cpu measures it",
                    spec.str(), key, *spec.text(key), why));
  };
  for (const char* key : {"weights", "network"})
    if (spec.text(key)) refuse(key, "this bench makes up the functions that choose");
  if (spec.text("group").value_or("batched") != "batched")
    refuse("group", "the heads of a group choose together");
  if (spec.text("fallback").value_or("none") != "none") refuse("fallback", "no layer falls back");
}

}  // namespace

std::vector<AttentionBenchRow> bench_attention_gpu(const AttentionBenchOptions& options,
                                                   std::span<const Spec> specs, ThreadPool& pool,
                                                   const std::function<void(std::string_view)>& note) {
  for (const Spec& spec : specs) expect_measured(spec);
  const Rope rope(options.shape, options.context);
  GpuAttentionTask task = {.shape = &options.shape,
                           .rope = &rope,
                           .context = options.context,
                           .batch = options.batch,
                           .queries = options.queries,
                           .kv_type = options.kv_type,
                           .keep = options.keep,
                           .rotate = options.rotate,
                           .largest = options.largest,
                           .seed = options.seed,
                           .make_keys = {},
                           .make_queries = {}};
  if (options.kind != KvKind::normal) {
    task.make_keys = [&](std::uint64_t seed, KvStore& kv) { make_shaped(options, rope, pool, seed, kv); };
  }
  task.make_queries = [&](std::uint64_t keys_seed, std::uint64_t seed, std::vector<float>& q,
                          std::vector<float>& q_unrotated) {
    VectorMaker maker(shape_of(options.shape), options.kind, options.skew, rope, keys_seed);
    maker.reseed(seed);
    maker.make(static_cast<Position>(options.context - options.queries), options.queries);
    q = maker.q;
    q_unrotated = maker.q_unrotated;
  };
  std::vector<AttentionBenchRow> rows;
  for (const GpuAttentionRow& row : bench_attention_on_gpu(task, specs, note)) {
    rows.push_back({.attention = row.attention,
                    .selectivity = row.selectivity,
                    .median_us = row.median_us,
                    .apart_us = row.apart_us,
                    .select_us = row.select_us,
                    .attend_us = row.attend_us,
                    .merge_us = 0,  // the last block of the attention kernel merges
                    .bytes = row.bytes,
                    .limit_us = row.limit_us,
                    .build_seconds = row.build_seconds});
  }
  return rows;
}

}  // namespace lode
