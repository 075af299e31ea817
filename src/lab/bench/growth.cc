// SPDX-License-Identifier: Apache-2.0
#include "lab/bench/growth.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>

#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lab/bench/artefact.h"
#include "lodestone/error.h"
#include "lodestone/selector.h"
#include "lodestone/spec.h"

namespace lode {
namespace {

constexpr std::int64_t kPieceTokens = 1024;  // of keys that one thread makes at a time
constexpr int kQueryVariants = 32;           // counted; those timed go round
constexpr int kLeastRounds = 8;
constexpr float kNone = -std::numeric_limits<float>::infinity();  // the log of what no key weighs

/// One context's keys, the queries behind them, and the selectors that index them.
class Growth {
 public:
  Growth(const GrowthBenchOptions& options, std::int64_t context, ThreadPool& pool)
      : options_(options),
        context_(context),
        pool_(pool),
        rope_(options.shape, context + 1),
        kv_({1, options.shape.kv_heads, options.shape.head_dim, options.kv_type, context + 1}),
        caches_(pool) {}

  void add(const std::string& text) {
    const Spec plain = parse_spec(text);
    const MethodInfo& info = find_method(plain.name);
    if (!info.make) throw InputError("bench growth: expected methods that choose keys, found '" + text + "'");
    const bool by_share = std::any_of(info.keys.begin(), info.keys.end(),
                                      [](const SpecKey& key) { return key.name == "sparsity"; });
    if (by_share && plain.text("sparsity"))
      throw InputError(fmt::format(
          "bench growth: expected '{}' without 'sparsity', which follows from the keys kept (--kept)", text));
    const double sparsity = 1.0 - static_cast<double>(options_.kept) / static_cast<double>(context_);
    const Spec spec = !by_share ? plain
                                : parse_spec(fmt::format("{}{}sparsity={:.9f}", text,
                                                         text.find(':') == text.npos ? ':' : ',', sparsity));
    const LayerGeometry geometry = bench_geometry(options_.shape, spec, rope_, pool_, options_.seed);
    const std::unique_ptr<VectorMaker> keys = maker(0);
    candidates_.push_back({text, spec, make_bench_selector(spec, geometry, "bench", *keys, 0.0)});
  }

  /// Makes keys in parallel, gives them to the store and to who listens in order, then the queries.
  void fill() {
    const std::int64_t pieces = (context_ + kPieceTokens - 1) / kPieceTokens,
                       at_once = std::max<std::int64_t>(1, pool_.size());
    kv_.expect(context_ + 1);
    for (std::int64_t first = 0; first < pieces; first += at_once) {
      check_cancel();
      const std::int64_t some = std::min(at_once, pieces - first);
      std::vector<std::unique_ptr<VectorMaker>> made(static_cast<std::size_t>(some));
      pool_.for_each(some, [&](std::int64_t i, int) {
        const std::int64_t begin = (first + i) * kPieceTokens;
        made[static_cast<std::size_t>(i)] = maker(begin);
        made[static_cast<std::size_t>(i)]->make(static_cast<Position>(begin),
                                                std::min(kPieceTokens, context_ - begin));
      });
      for (std::int64_t i = 0; i < some; ++i)
        write((first + i) * kPieceTokens, *made[static_cast<std::size_t>(i)]);
    }
    const std::unique_ptr<VectorMaker> last = maker(context_);
    for (int variant = 0; variant < kQueryVariants; ++variant) {
      last->make(static_cast<Position>(context_), 1);
      q_.push_back(last->q);
      q_unrotated_.push_back(last->q_unrotated);
    }
    kv_.write(0, 1, last->k, last->v);
    kv_.commit(1);
  }

  GrowthBenchRow measure(std::size_t which) {
    Candidate& c = candidates_[which];
    GrowthBenchRow row = {.attention = c.text, .context = context_};
    row.build_seconds = 1e-6 * microseconds([&] { build(c); });
    c.selector->take_work();
    double kept = 0;
    for (int variant = 0; variant < kQueryVariants; ++variant) {
      Selection selection;
      const QueryBlock queries = block(c, variant);
      c.selector->select({&queries, 1}, selection);
      double all = 0;  // of sets of a KV head or of a query head
      for (std::int64_t i = 0; i < selection.sets(); ++i) all += static_cast<double>(selection.keys(i));
      kept += all / static_cast<double>(std::max<std::int64_t>(1, selection.sets()));
      row.mass += captured(selection, queries, c.spec.dense) / kQueryVariants;
    }
    const SelectWork work = c.selector->take_work();
    row.kept = kept / kQueryVariants;
    row.bytes = work.bytes / kQueryVariants;
    row.scored = work.keys_scored / kQueryVariants;
    std::vector<double> times;
    const auto start = std::chrono::steady_clock::now();
    const std::chrono::duration<double> limit(options_.seconds);
    for (int round = 0; round < kLeastRounds || std::chrono::steady_clock::now() - start < limit; ++round) {
      check_cancel();
      caches_.empty();
      Selection selection;
      const QueryBlock queries = block(c, round % kQueryVariants);
      times.push_back(microseconds([&] { c.selector->select({&queries, 1}, selection); }));
    }
    row.median_us = median(times);
    return row;
  }

 private:
  struct Candidate {
    std::string text;
    Spec spec;
    std::unique_ptr<Selector> selector;
  };

  /// The centres are those of the seed, whatever the piece.
  std::unique_ptr<VectorMaker> maker(std::int64_t begin) const {
    const ModelConfig& c = options_.shape;
    auto made = std::make_unique<VectorMaker>(VectorMaker::Shape{c.query_heads, c.kv_heads, c.head_dim},
                                              options_.kind, options_.skew, rope_, options_.seed);
    made->reseed(hash_seed(options_.seed, begin));
    return made;
  }

  void write(std::int64_t begin, const VectorMaker& made) {
    const std::int64_t count = std::min(kPieceTokens, context_ - begin);
    kv_.write(0, count, made.k, made.v);
    kv_.commit(count);
    for (Candidate& c : candidates_) {
      if (!c.selector->wants_writes()) continue;
      c.selector->on_write({.sequence = 0,
                            .phase = Phase::context,
                            .begin = static_cast<Position>(begin),
                            .tokens = count,
                            .q_unrotated = made.q_unrotated,
                            .k_unrotated = made.k_unrotated,
                            .q = made.q,
                            .k = made.k,
                            .v = made.v});
    }
  }

  void build(Candidate& c) {
    const KvLayer all = kv_.layer(0);
    std::vector<KvRows> heads(all.heads.begin(), all.heads.end());
    for (KvRows& head : heads) head.rows = context_;
    const KvLayer context = {.heads = heads, .tokens = context_};
    c.selector->build(0, context);
    Selector* const layers[] = {c.selector.get()};
    if (const MethodInfo& info = find_method(c.spec.name); info.finish)
      info.finish(layers, 0, [&](int) { return context; });
    if (!c.spec.dense.from_context)
      c.selector->append(
          0, all, static_cast<Position>(std::max(c.spec.dense.sink, context_ + 1 - c.spec.dense.window)));
  }

  QueryBlock block(const Candidate& c, int variant) const {
    const LocalWindow& dense = c.spec.dense;
    return {.sequence = 0,
            .phase = Phase::generation,
            .begin = static_cast<Position>(context_),
            .tokens = 1,
            .q = q_[static_cast<std::size_t>(variant)],
            .q_unrotated = q_unrotated_[static_cast<std::size_t>(variant)],
            .kv = kv_.layer(0),
            .far_begin = static_cast<Position>(dense.sink),
            .far_limit = dense.from_context
                             ? static_cast<Position>(std::max<std::int64_t>(0, context_ - dense.window))
                             : QueryBlock::kNoLimit};
  }

  /// Share of the far keys' attention that chosen ones have: mean over the query heads of one token.
  double captured(const Selection& selection, const QueryBlock& queries, const LocalWindow& dense) {
    const ModelConfig& c = options_.shape;
    const Run far = {queries.far_begin, queries.far_end(0, dense)};
    const auto heads = static_cast<std::size_t>(c.query_heads);
    std::vector<float> output(queries.q.size()), all(heads), chosen(heads, kNone);
    std::vector<AttendItem> items;
    const auto add = [&](int head, std::span<const Run> runs, const Selection::Set& of,
                         std::vector<float>& lse) {
      const auto at = static_cast<std::size_t>(head);
      items.push_back({.q = queries.q.data() + head * c.head_dim,
                       .queries = 1,
                       .kv = queries.kv.heads[at / (heads / queries.kv.heads.size())],
                       .runs = runs,
                       .rows = of.rows,
                       .log_weights = {},
                       .o = output.data() + head * c.head_dim,
                       .lse = lse.data() + head});
    };
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim));
    for (int head = 0; head < c.query_heads; ++head) add(head, {&far, 1}, {}, all);
    attend_items(items, scale, pool_);
    items.clear();
    for (std::int64_t i = 0; i < selection.sets(); ++i) {
      const Selection::Set set = selection.set(i);
      const int first = set.queries.kv_head * (c.query_heads / c.kv_heads);
      for (std::uint32_t rest = set.queries.heads; rest != 0; rest &= rest - 1)
        add(first + std::countr_zero(rest), set.runs, set, chosen);
    }
    attend_items(items, scale, pool_);
    double sum = 0.0;
    for (std::size_t head = 0; head < heads; ++head) sum += std::exp(chosen[head] - all[head]);
    return sum / static_cast<double>(heads);
  }

  const GrowthBenchOptions& options_;
  const std::int64_t context_;
  ThreadPool& pool_;
  Rope rope_;
  KvStore kv_;
  std::vector<std::vector<float>> q_, q_unrotated_;  // [variants][Hq, d]
  std::vector<Candidate> candidates_;
  CacheEmptier caches_;
};

}  // namespace

std::vector<GrowthBenchRow> bench_growth(const GrowthBenchOptions& options,
                                         std::span<const std::string> specs, ThreadPool& pool,
                                         const std::function<void(std::string_view)>& note) {
  std::vector<GrowthBenchRow> rows;
  for (const std::int64_t context : options.contexts) {
    if (context <= options.kept)
      throw InputError(fmt::format("bench growth: expected contexts of more than --kept ({}) keys, found {}",
                                   options.kept, context));
    Growth growth(options, context, pool);
    for (const std::string& spec : specs) growth.add(spec);
    note(fmt::format("making {} keys", context));
    growth.fill();
    for (std::size_t i = 0; i < specs.size(); ++i) {
      note(fmt::format("{} at {} keys", specs[i], context));
      rows.push_back(growth.measure(i));
    }
  }
  return rows;
}

}  // namespace lode
