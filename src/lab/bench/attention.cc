// SPDX-License-Identifier: Apache-2.0
#include "lab/bench/attention.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <utility>

#include "attend/attend.h"
#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lab/bench/artefact.h"
#include "lab/bench/far_recall.h"
#include "select/shared/orders_rows.h"

namespace lode {
namespace {

constexpr std::int64_t kWriteTokens = 512;  // as a prefill chunk
constexpr std::int64_t kMostSets = 4;       // each has indexes of its own, which may take minutes
constexpr int kQueryVariants = 16;          // of each sequence, so that selections differ from call to call

/// One sequence: its keys and some alternative query blocks at its end.
struct Sequence {
  KvStore kv;
  std::vector<std::vector<float>> q, q_unrotated;  // [variants][T, Hq, d]
};

/// A method under measurement.
struct Candidate {
  Spec spec;
  LayerGeometry geometry;
  std::unique_ptr<Selector> selector;  // null: full
  std::vector<double> select, attend, merge, total, bytes;
  std::int64_t far_keys = 0, far_total = 0;
  double build_seconds = 0;
  FarRecall recall;
};

/// All of one run. Sequences [set * B, (set + 1) * B) are one call's batch.
class Bench {
 public:
  Bench(const AttentionBenchOptions& options, ThreadPool& pool)
      : options_(options), pool_(pool), rope_(options.shape, options.context), caches_(pool) {
    const ModelConfig& c = options.shape;
    const KvShape shape = {1, c.kv_heads, c.head_dim, options.kv_type, options.context};
    const std::int64_t batch_bytes = options.batch * options.context * shape.token_bytes();
    const std::int64_t past_caches = (3 * last_level_cache_bytes() + batch_bytes - 1) / batch_bytes;
    sets_ = std::min(kMostSets, past_caches);
    empties_caches_ = sets_ < past_caches;
    for (std::int64_t i = 0; i < sets_ * options.batch; ++i) sequences_.push_back({KvStore(shape), {}, {}});
    outputs_.resize(static_cast<std::size_t>(options.batch));
    for (std::vector<float>& o : outputs_)
      o.resize(static_cast<std::size_t>(options.queries * c.query_heads * c.head_dim));
  }

  void add(const Spec& spec) {
    const ModelConfig& c = options_.shape;
    Candidate candidate = {.spec = spec, .geometry = bench_geometry(c, spec, rope_, pool_, options_.seed)};
    candidates_.push_back(std::move(candidate));
    Candidate& added = candidates_.back();
    VectorMaker keys({c.query_heads, c.kv_heads, c.head_dim}, options_.kind, options_.skew, rope_,
                     hash_seed(options_.seed, 0));  // the first sequence's
    const bool first_saap = spec.name == "saap" && !std::exchange(met_saap_, true);
    added.selector = make_bench_selector(added.spec, added.geometry, options_.fingerprint, keys,
                                         first_saap ? options_.largest : 0.0);
  }

  /// Fills the caches with made-up keys, as prefill would, chunk by chunk.
  void fill() {
    const ModelConfig& c = options_.shape;
    pool_.for_each(std::ssize(sequences_), [&](std::int64_t i, int) {
      Sequence& s = sequences_[static_cast<std::size_t>(i)];
      VectorMaker maker({c.query_heads, c.kv_heads, c.head_dim}, options_.kind, options_.skew, rope_,
                        hash_seed(options_.seed, i));
      s.kv.expect(options_.context);
      for (std::int64_t t = 0, count = 0; t < options_.context; t += count) {
        check_cancel();
        count = std::min(kWriteTokens, (t < indexed() ? indexed() : options_.context) - t);
        maker.make(static_cast<Position>(t), count);
        s.kv.write(0, count, maker.k, maker.v);
        s.kv.commit(count);
        if (t >= indexed()) continue;  // the queries' own tokens, which are no context
        tell_writers(static_cast<std::int32_t>(i), static_cast<Position>(t), count, maker);
      }
      for (int variant = 0; variant < kQueryVariants; ++variant) {
        maker.make(static_cast<Position>(options_.context - options_.queries), options_.queries);
        s.q.push_back(maker.q);
        s.q_unrotated.push_back(maker.q_unrotated);
      }
    });
  }

  void build() {
    const auto indexed = std::count_if(candidates_.begin(), candidates_.end(),
                                       [](const Candidate& c) { return c.selector != nullptr; });
    Progress progress("building indexes", indexed * std::ssize(sequences_), "indexes", options_.progress);
    std::int64_t built = 0;
    for (Candidate& c : candidates_) {
      if (!c.selector) continue;
      std::vector<double> seconds;
      for (std::size_t i = 0; i < sequences_.size(); ++i) {
        check_cancel();
        seconds.push_back(1e-6 * microseconds([&] {
                            std::vector<KvRows> heads;
                            build(c, static_cast<std::int32_t>(i), context_of(sequences_[i], heads));
                          }));
        const KvLayer kv = sequences_[i].kv.layer(0);
        const std::int64_t far_end = std::max(c.spec.dense.sink, options_.context - c.spec.dense.window);
        if (!c.spec.dense.from_context)
          c.selector->append(static_cast<std::int32_t>(i), kv, static_cast<Position>(far_end));
        progress.at(++built);
      }
      c.selector->take_work();
      c.build_seconds = median(seconds);
    }
    order_rows();
  }

  /// As a context does that has one method (engine/row_order.h).
  void order_rows() {
    const auto sparse = [](const Candidate& c) { return c.selector != nullptr; };
    const auto only = std::find_if(candidates_.begin(), candidates_.end(), sparse);
    if (!options_.order_rows || std::count_if(candidates_.begin(), candidates_.end(), sparse) != 1) return;
    for (std::size_t i = 0; i < sequences_.size(); ++i) {
      check_cancel();
      lode::order_rows(sequences_[i].kv, 0, only->selector.get(), static_cast<std::int32_t>(i),
                       always_far_end(only->spec.dense, indexed()), pool_);
    }
  }

  /// One call of one candidate over the batch `set`.
  void call(Candidate& c, std::int64_t set, std::int64_t round) {
    const std::vector<QueryBlock> blocks = blocks_of(c, set, round % kQueryVariants);
    std::vector<float*> outputs;
    for (std::vector<float>& o : outputs_) outputs.push_back(o.data());
    Selection selection;
    const double select = c.selector ? microseconds([&] { c.selector->select(blocks, selection); }) : 0.0;
    if (c.selector && options_.keep) selection = kept(selection, blocks, c.spec.dense);
    AttendWork work;
    const std::int64_t merged = attend_merge_nanoseconds();
    const double attend_time = microseconds([&] {
      work = c.selector ? attend(blocks, selection, c.geometry, outputs)
                        : attend_full(blocks, c.geometry, outputs);
    });
    const double merge = 1e-3 * static_cast<double>(attend_merge_nanoseconds() - merged) / pool_.size();
    c.select.push_back(select);
    c.merge.push_back(merge);
    c.attend.push_back(attend_time - merge);
    c.total.push_back(select + attend_time);
    // What query tokens share is read once: never more than all keys of the batch.
    const std::int64_t most = options_.batch * options_.context * sequences_.front().kv.shape().token_bytes();
    const std::int64_t selector_bytes = c.selector ? c.selector->take_work().bytes : 0;
    c.bytes.push_back(static_cast<double>(std::min(most, work.kv_bytes) + selector_bytes));
    c.far_keys += work.far_keys;
    c.far_total += work.far_total;
  }

  std::vector<AttentionBenchRow> measure() {
    std::vector<std::span<const std::byte>> buffers;
    for (const Sequence& s : sequences_)
      for (int h = 0; h < options_.shape.kv_heads; ++h)
        for (const KvStore::Part part : {KvStore::Part::k, KvStore::Part::v})
          buffers.push_back(s.kv.rows(0, h, part));
    const std::int64_t most = options_.batch * options_.context * sequences_.front().kv.shape().token_bytes();
    ReadFloor floor(buffers, most, pool_);
    const auto start = std::chrono::steady_clock::now();
    const std::chrono::duration<double> limit(options_.seconds * static_cast<double>(candidates_.size() + 1));
    std::int64_t set = 0;
    // The first round warms up and is dropped; calls and reads take turns, so that a slow moment of the
    // machine meets both.
    constexpr std::int64_t kLeastRounds = 6, kMostRounds = 200;
    for (std::int64_t round = 0; round < kMostRounds; ++round) {
      if (round >= kLeastRounds && std::chrono::steady_clock::now() - start > limit) break;
      check_cancel();
      for (Candidate& c : candidates_) {
        if (empties_caches_) caches_.empty();
        call(c, set, round);
        set = (set + 1) % sets_;
      }
      if (empties_caches_) caches_.empty();
      floor.measure();
      if (round == 0) forget();
    }
    std::vector<AttentionBenchRow> rows;
    for (Candidate& c : candidates_) {
      if (options_.recall > 0 && c.selector) examine(c);
      rows.push_back(row_of(c, floor));
    }
    return rows;
  }

 private:
  std::vector<QueryBlock> blocks_of(const Candidate& c, std::int64_t set, std::int64_t variant) {
    std::vector<QueryBlock> blocks;
    for (std::int64_t b = 0; b < options_.batch; ++b) {
      const std::int64_t i = set * options_.batch + b;
      const Sequence& s = sequences_[static_cast<std::size_t>(i)];
      const std::int64_t begin = options_.context - options_.queries;
      const std::int64_t far_begin = std::min<std::int64_t>(c.spec.dense.sink, options_.context);
      blocks.push_back({.sequence = static_cast<std::int32_t>(i),
                        .phase = options_.queries > 1 ? Phase::question : Phase::generation,
                        .begin = static_cast<Position>(begin),
                        .tokens = options_.queries,
                        .q = s.q[static_cast<std::size_t>(variant)],
                        .q_unrotated = s.q_unrotated[static_cast<std::size_t>(variant)],
                        .kv = s.kv.layer(0),
                        .far_begin = static_cast<Position>(far_begin),
                        .far_limit = far_limit(c.spec.dense)});
    }
    return blocks;
  }

  /// What the selections hold of the best keys, and at what price.
  void examine(Candidate& c) {
    for (std::int64_t variant = 0; variant < kQueryVariants; ++variant) {
      check_cancel();
      c.recall.look(*c.selector, c.geometry, blocks_of(c, variant % sets_, variant), options_.recall);
    }
  }

  /// Tokens before the queries: what is indexed as the context.
  std::int64_t indexed() const { return std::max<std::int64_t>(0, options_.context - options_.queries); }
  Position far_limit(const LocalWindow& dense) const {
    if (!dense.from_context) return QueryBlock::kNoLimit;
    return static_cast<Position>(std::max<std::int64_t>(0, indexed() - dense.window));
  }
  KvLayer context_of(const Sequence& s, std::vector<KvRows>& heads) const {
    const KvLayer all = s.kv.layer(0);
    heads.assign(all.heads.begin(), all.heads.end());
    for (KvRows& head : heads) head.rows = indexed();
    return {.heads = heads, .tokens = indexed()};
  }
  static void build(const Candidate& c, std::int32_t sequence, KvLayer kv) {
    c.selector->build(sequence, kv);
    Selector* const layers[] = {c.selector.get()};
    if (const MethodInfo& info = find_method(c.spec.name); info.finish)
      info.finish(layers, sequence, [&](int) { return kv; });
  }

  void tell_writers(std::int32_t sequence, Position begin, std::int64_t count, const VectorMaker& maker) {
    for (Candidate& c : candidates_) {
      if (!c.selector || !c.selector->wants_writes()) continue;
      const std::lock_guard lock(writers_);
      c.selector->on_write({.sequence = sequence,
                            .phase = Phase::context,
                            .begin = begin,
                            .tokens = count,
                            .q_unrotated = maker.q_unrotated,
                            .k_unrotated = maker.k_unrotated,
                            .q = maker.q,
                            .k = maker.k,
                            .v = maker.v});
    }
  }

  /// The same query sets with exactly the share `keep` of their far keys: chosen ones first, then others,
  /// evenly spread.
  Selection kept(const Selection& selection, std::span<const QueryBlock> blocks,
                 const LocalWindow& dense) const {
    Selection out;
    for (std::int64_t i = 0; i < selection.sets(); ++i) {
      const Selection::Set set = selection.set(i);
      const QueryBlock& queries = *std::find_if(blocks.begin(), blocks.end(), [&](const QueryBlock& b) {
        return b.sequence == set.queries.sequence;
      });
      const Position begin = queries.far_begin, end = queries.far_end(set.queries.token_end - 1, dense);
      std::vector<char> taken(static_cast<std::size_t>(end - begin), 0);
      auto left = static_cast<std::int64_t>(std::ceil(*options_.keep * static_cast<double>(end - begin)));
      const auto take = [&](Position p) {
        if (left > 0 && !taken[static_cast<std::size_t>(p - begin)])
          taken[static_cast<std::size_t>(p - begin)] = 1, --left;
      };
      for (const Run run : set.runs)
        for (Position p = run.begin; p < run.end; ++p) take(p);
      for (const Position p : set.rows) take(p);
      const std::int64_t step = left > 0 ? std::max<std::int64_t>(1, (end - begin) / left) : 1;
      for (std::int64_t offset = 0; offset < step && left > 0; ++offset)
        for (std::int64_t p = begin + offset; p < end; p += step) take(static_cast<Position>(p));
      out.add_set(set.queries);
      for (Position p = begin; p < end; ++p)
        if (taken[static_cast<std::size_t>(p - begin)]) out.add_row(p);
    }
    return out;
  }

  void forget() {
    for (Candidate& c : candidates_) {
      for (std::vector<double>* times : {&c.select, &c.attend, &c.merge, &c.total, &c.bytes}) times->clear();
      c.far_keys = c.far_total = 0;
    }
  }

  AttentionBenchRow row_of(const Candidate& c, const ReadFloor& floor) const {
    AttentionBenchRow row = {
        .attention = c.spec.str(),
        .selectivity =
            c.far_total == 0 ? 1.0 : static_cast<double>(c.far_keys) / static_cast<double>(c.far_total),
        .median_us = median(c.total),
        .apart_us = median(c.total),
        .select_us = median(c.select),
        .attend_us = median(c.attend),
        .merge_us = median(c.merge),
        .bytes = static_cast<std::int64_t>(median(c.bytes)),
        .build_seconds = c.build_seconds,
        .recall = c.recall.recall(),
        .scanned = c.recall.scanned()};
    row.limit_us = floor.microseconds_for(row.bytes);
    return row;
  }

  const AttentionBenchOptions& options_;
  ThreadPool& pool_;
  Rope rope_;
  std::int64_t sets_ = 1;
  bool empties_caches_ = false;  ///< between calls, since the sets would fit into them
  CacheEmptier caches_;
  std::vector<Sequence> sequences_;          // [sets * B]
  std::vector<std::vector<float>> outputs_;  // [B][T, Hq, d]
  std::vector<Candidate> candidates_;
  bool met_saap_ = false;
  std::mutex writers_;
};

}  // namespace

std::vector<AttentionBenchRow> bench_attention(const AttentionBenchOptions& options,
                                               std::span<const Spec> specs, ThreadPool& pool,
                                               const std::function<void(std::string_view)>& note) {
  Bench bench(options, pool);
  bench.add(parse_spec("full"));
  for (const Spec& spec : specs) {
    if (spec.name == "full") continue;
    if (find_method(spec.name).trained && !spec.text("weights"))
      note(spec.name + ": no weights named, random ones are made up");
    bench.add(spec);
  }
  note("making keys and values");
  bench.fill();
  bench.build();
  note("measuring");
  return bench.measure();
}

}  // namespace lode
