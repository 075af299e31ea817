// SPDX-License-Identifier: Apache-2.0
#include "lab/bench/decode.h"

#include <algorithm>
#include <cmath>

#include "base/cancel.h"
#include "base/threads.h"
#include "engine/context.h"
#include "engine/row_order.h"
#include "gpu/layers/states_of.h"
#include "lab/bench/artefact.h"
#include "select/shared/shares_index.h"

namespace lode {
namespace {

constexpr std::int64_t kWriteTokens = 512;
constexpr int kWarmUp = 2;

constexpr int kRecallQueries = 6;  // of each layer
constexpr int kQuestions = 6;      // read under each method, the first as a warm-up

VectorMaker maker_of(const Context::Impl& c, const DecodeBenchOptions& options, int layer) {
  const ModelConfig& m = c.config;
  return {{m.query_heads, m.kv_heads, m.head_dim},
          options.kind,
          options.skew,
          c.rope,
          hash_seed(options.seed, layer)};
}

/// Writes made-up keys and values of all tokens to every layer, telling selectors that listen, as a prefill
/// would.
class Filler {
 public:
  Filler(Context::Impl& c, const DecodeBenchOptions& options, int layers)
      : c_(c), options_(options), layers_(layers), pool_(c.model->pool()) {
    for (int layer = 0; layer < layers; ++layer) makers_.push_back(maker_of(c, options, layer));
  }

  void fill() {
    c_.kv.expect(options_.context);
    const std::int64_t chunks = (options_.context + kWriteTokens - 1) / kWriteTokens;
    const std::int64_t together = std::max<std::int64_t>(1, 2 * pool_.size() / layers_);
    for (std::int64_t first = 0; first < chunks; first += together)
      write(first, std::min(together, chunks - first));
    c_.indexed = c_.tokens();
  }

 private:
  /// Some chunks: made at the same time, written in order.
  void write(std::int64_t first, std::int64_t chunks) {
    check_cancel();
    std::vector<VectorMaker> made;  // [chunks, layers]
    for (std::int64_t i = 0; i < chunks * layers_; ++i)
      made.push_back(makers_[static_cast<std::size_t>(i % layers_)]);
    pool_.for_each(std::ssize(made), [&](std::int64_t item, int) {
      const std::int64_t chunk = first + item / layers_;
      VectorMaker& own = made[static_cast<std::size_t>(item)];
      own.reseed(hash_seed(options_.seed, item % layers_, chunk));
      own.make(static_cast<Position>(chunk * kWriteTokens), tokens_of(chunk));
    });
    for (std::int64_t chunk = first; chunk < first + chunks; ++chunk)
      commit(chunk, std::span(made).subspan(static_cast<std::size_t>((chunk - first) * layers_),
                                            static_cast<std::size_t>(layers_)));
  }

  void commit(std::int64_t chunk, std::span<const VectorMaker> made) {
    const std::int64_t count = tokens_of(chunk);
    for (int layer = 0; layer < layers_; ++layer) {
      const VectorMaker& own = made[static_cast<std::size_t>(layer)];
      c_.kv.write(layer, count, own.k, own.v, &pool_);
      for (Selector* selector : c_.listeners[static_cast<std::size_t>(layer)])
        selector->on_write({.sequence = 0,
                            .phase = Phase::context,
                            .begin = static_cast<Position>(chunk * kWriteTokens),
                            .tokens = count,
                            .q_unrotated = own.q_unrotated,
                            .k_unrotated = own.k_unrotated,
                            .q = own.q,
                            .k = own.k,
                            .v = own.v});
    }
    c_.kv.repeat(layers_, count, pool_);
    c_.kv.commit(count);
    c_.ids.insert(c_.ids.end(), static_cast<std::size_t>(count), TokenId{0});
  }

  std::int64_t tokens_of(std::int64_t chunk) const {
    return std::min(kWriteTokens, options_.context - chunk * kWriteTokens);
  }

  Context::Impl& c_;
  const DecodeBenchOptions& options_;
  const int layers_;
  ThreadPool& pool_;
  std::vector<VectorMaker> makers_;  // [layers]
};

void fill(Context::Impl& c, const DecodeBenchOptions& options, int layers) {
  const auto native = [](const AttachedMethod& a) { return a.chosen_by == ChosenBy::gpu || a.dense(); };
  if (c.gpu == nullptr || c.gpu->keys_on_host() || !std::all_of(c.methods.begin(), c.methods.end(), native))
    return Filler(c, options, layers).fill();
  c.gpu->fill_random(options.context, options.seed);
  c.ids.assign(static_cast<std::size_t>(options.context), TokenId{0});
  c.indexed = c.tokens();
}

/// A model of random weights has no artefacts: those of trained methods are made up.
MethodId attach_by_shape(Context& context, const Spec& spec, const DecodeBenchOptions& options) {
  Context::Impl& c = context.impl();
  if (c.model->impl().tokenizer) return context.attach(spec);
  const TemporaryFile file;
  VectorMaker keys = maker_of(c, options, 0);
  const LayerGeometry last{.layer = c.config.layers - 1,
                           .query_heads = c.config.query_heads,
                           .kv_heads = c.config.kv_heads,
                           .head_dim = c.config.head_dim,
                           .scale = score_scale(c.config),
                           .dense = spec.dense,
                           .rope = &c.rope,
                           .pool = &c.model->pool(),
                           .seed = options.seed};
  const std::string fingerprint = c.model->fingerprint();
  return context.attach(
      with_made_up_hash(with_made_up_saap(spec, last, fingerprint, keys, file), c.config, fingerprint, file));
}

/// Indexes the first layers; the others take what these have.
void build(Context::Impl& c, AttachedMethod& method, int layers, bool share) {
  if (layers == c.config.layers || method.chosen_by != ChosenBy::host) return c.build(method, {});
  const auto build_own = [&](int layer) {
    const auto l = static_cast<std::size_t>(layer);
    if (method.selectors[l] != nullptr && !c.take_index(method, l))
      method.selectors[l]->build(0, c.kv.layer(layer));
  };
  for (int layer = 0; layer < layers; ++layer) build_own(layer);
  for (int layer = layers; layer < c.config.layers; ++layer) {
    check_cancel();
    Selector*& own = method.selectors[static_cast<std::size_t>(layer)];
    Selector* const other = method.selectors[static_cast<std::size_t>(layer % layers)];
    if (own == nullptr) continue;
    auto* const taker = dynamic_cast<SharesIndex*>(own);
    if (share && other != nullptr)
      own = other;
    else if (taker == nullptr || other == nullptr || !taker->take_index(0, *other, c.kv.layer(layer)))
      build_own(layer);
  }
  c.finish(method);
  method.built = method.built_on_host = true;
  method.built_over = c.tokens();
}

/// Made-up queries of every step.
class StepQueries {
 public:
  StepQueries(const Context::Impl& c, const DecodeBenchOptions& options, int layers, int steps)
      : row_(static_cast<std::size_t>(c.config.query_heads) * static_cast<std::size_t>(c.config.head_dim)),
        layers_(static_cast<std::size_t>(c.config.layers)) {
    if (options.kind != KvKind::ood) return;
    std::vector<VectorMaker> makers;
    for (int layer = 0; layer < layers; ++layer) makers.push_back(maker_of(c, options, layer));
    for (int step = 0; step < steps; ++step) {
      for (int layer = 0; layer < c.config.layers; ++layer) {
        VectorMaker& maker = makers[static_cast<std::size_t>(layer % layers)];
        maker.reseed(hash_seed(options.seed, layer, -1 - step));
        maker.make(static_cast<Position>(c.tokens()), 1);
        q_.insert(q_.end(), maker.q.begin(), maker.q.end());
        q_unrotated_.insert(q_unrotated_.end(), maker.q_unrotated.begin(), maker.q_unrotated.end());
      }
    }
  }
  QueryOverride of_step(int step) const {
    if (q_.empty()) return {};
    const std::size_t one = layers_ * row_, at = static_cast<std::size_t>(step) * one;
    return {.q_unrotated = std::span(q_unrotated_).subspan(at, one), .q = std::span(q_).subspan(at, one)};
  }
  std::span<const float> of_layer(std::span<const float> step, int layer) const {
    return step.subspan(static_cast<std::size_t>(layer) * row_, row_);
  }
  bool empty() const { return q_.empty(); }

 private:
  std::size_t row_, layers_;
  std::vector<float> q_, q_unrotated_;  // [steps, L, Hq, d]
};

/// What the method chooses for some of the made-up queries, in the layers that were built.
FarRecall recall_of(Context::Impl& c, const AttachedMethod& method, const StepQueries& queries, int steps,
                    int layers, std::int64_t top) {
  FarRecall recall;
  const bool host = c.gpu == nullptr || c.gpu->keys_on_host();
  if (top == 0 || queries.empty() || !host || method.chosen_by != ChosenBy::host) return recall;
  for (int layer = 0; layer < layers; ++layer) {
    Selector* const selector =
        method.selectors.empty() ? nullptr : method.selectors[static_cast<std::size_t>(layer)];
    if (selector == nullptr) continue;
    const LayerGeometry geometry = {.layer = layer,
                                    .query_heads = c.config.query_heads,
                                    .kv_heads = c.config.kv_heads,
                                    .head_dim = c.config.head_dim,
                                    .scale = score_scale(c.config),
                                    .dense = method.spec.dense,
                                    .rope = &c.llama.rope_of(layer, c.rope),
                                    .pool = &c.model->pool()};
    for (int step = 0; step < std::min(steps, kRecallQueries); ++step) {
      const QueryOverride given = queries.of_step(step);
      // In the place of the last token that there is.
      const QueryBlock block = {.sequence = 0,
                                .phase = Phase::generation,
                                .begin = static_cast<Position>(c.tokens() - 1),
                                .tokens = 1,
                                .q = queries.of_layer(given.q, layer),
                                .q_unrotated = queries.of_layer(given.q_unrotated, layer),
                                .kv = c.kv.layer(layer),
                                .far_begin = static_cast<Position>(method.spec.dense.sink)};
      selector->append(0, block.kv, block.far_end(0, method.spec.dense));
      recall.look(*selector, geometry, {&block, 1}, top);
    }
  }
  return recall;
}

std::int64_t index_bytes(const AttachedMethod& method) {
  std::int64_t bytes = 0;
  for (const Selector* selector : method.selectors)
    bytes += selector != nullptr ? selector->index_bytes() : 0;
  return bytes;
}

/// One step's share, on average.
TierWork per_step(TierWork sum, int steps) {
  for (std::int64_t* n : {&sum.bytes_to_host, &sum.bytes_to_gpu, &sum.host_keys, &sum.gpu_keys,
                          &sum.active_keys, &sum.active_hits, &sum.active_bytes})
    *n /= steps;
  for (double* seconds : {&sum.wait_seconds, &sum.search_seconds, &sum.attend_seconds}) *seconds /= steps;
  return sum;
}

/// Reads questions of random tokens under each method, in turn.
void read_questions(Context::Impl& c, const DecodeBenchOptions& options, std::span<const MethodId> methods,
                    std::span<DecodeBenchRow> rows) {
  if (options.question == 0) return;
  const std::int64_t start = c.tokens();
  Rng rng(options.seed);
  std::vector<std::vector<double>> times(methods.size());
  std::vector<WorkReport> work(methods.size());
  for (int question = 0; question < kQuestions; ++question) {
    std::vector<TokenId> tokens;
    for (std::int64_t i = 0; i < options.question; ++i)
      tokens.push_back(static_cast<TokenId>(rng.below(static_cast<std::uint64_t>(c.config.vocab))));
    for (std::size_t i = 0; i < methods.size(); ++i) {
      check_cancel();
      const double us = microseconds(
          [&] { work[i] += c.run(tokens, methods[i], Phase::question, LogitRows::last_of_each); });
      if (question > 0) times[i].push_back(us);
      c.roll_back(start);
    }
  }
  for (std::size_t i = 0; i < methods.size(); ++i) {
    rows[i].question_ms = 1e-3 * median(times[i]);
    rows[i].question_density = work[i].density();
    rows[i].question_selectivity = work[i].selectivity();
  }
}

}  // namespace

void fill_context(Context& context, const DecodeBenchOptions& options) {
  fill(context.impl(), options, context.model().config().layers);
}

std::vector<DecodeBenchRow> bench_decode(const std::shared_ptr<const Model>& model,
                                         const DecodeBenchOptions& options, std::span<const Spec> specs,
                                         const std::function<void(std::string_view)>& note) {
  expect_like_layers(model->config(), "made-up keys and values");
  std::vector<Spec> all = {parse_spec("full")};
  for (const Spec& spec : specs)
    if (spec.name != "full") all.push_back(spec);
  const int steps = options.steps + kWarmUp;
  Context context(model, with_room(*model,
                                   {.kv_type = options.kv_type,
                                    .device = options.device,
                                    .gpu_memory = options.gpu_memory,
                                    .kv_tier = options.kv_tier,
                                    .gpus = options.gpus,
                                    .context_parallel = options.context_parallel,
                                    .gpu_sum = options.gpu_sum,
                                    .active_memory = options.active_memory,
                                    .seed = options.seed},
                                   options.context + std::max<std::int64_t>(steps, options.question), note));
  std::vector<MethodId> methods;
  Context::Impl& c = context.impl();
  for (const Spec& spec : all) methods.push_back(attach_by_shape(context, spec, options));
  const int layers =
      options.built_layers > 0 ? std::min(options.built_layers, c.config.layers) : c.config.layers;
  if (options.share) c.kv.share(layers);
  if (const std::string where = context.placement(); !where.empty()) note(where);
  note("making keys and values");
  fill(c, options, layers);
  note("building indexes");
  std::vector<DecodeBenchRow> rows;
  for (std::size_t i = 0; i < all.size(); ++i) {
    AttachedMethod& method = c.methods[static_cast<std::size_t>(methods[i])];
    rows.push_back({.attention = all[i].str()});
    if (!method.built)
      rows.back().build_seconds = 1e-6 * microseconds([&] { build(c, method, layers, options.share); });
    rows.back().index_bytes = index_bytes(method);
  }
  if (options.order_rows && !options.share && order_rows(context)) note("keys and values lie by clusters");
  note("measuring generated tokens");
  std::vector<std::vector<double>> times(all.size());
  std::vector<WorkReport> work(all.size());
  const std::int64_t start = c.tokens();
  // Recurrent layers go back to what is kept; without it each step would be followed by all tokens, read again.
  if (c.gpu != nullptr) keep_states(c.gpu.get(), c.kv.recurrent());
  const StepQueries queries(c, options, layers, steps);
  for (int step = 0; step < steps; ++step) {
    c.audit.set_rate(step < kWarmUp ? options.audit : 0.0);  // measured steps do no more than their work
    c.given = queries.of_step(step);
    for (std::size_t i = 0; i < all.size(); ++i) {
      check_cancel();
      // Greedy, as far as made-up keys allow: the next token is the best of the last logits.
      const TokenId token =
          c.logits.empty()
              ? 0
              : static_cast<TokenId>(std::max_element(c.logits.begin(), c.logits.end()) - c.logits.begin());
      const double us = microseconds([&] {
        work[i] += c.run(std::span(&token, 1), methods[i], Phase::generation, LogitRows::last_of_each);
      });
      if (step >= kWarmUp) times[i].push_back(us);
      if (step + 1 == kWarmUp) work[i].tiers = {};
      c.roll_back(start);
    }
  }
  c.given = {};
  const double sum_us = c.gpu != nullptr ? c.gpu->sum_microseconds() : 0;
  for (DecodeBenchRow& row : rows) row.sum_us = sum_us;
  read_questions(c, options, methods, rows);
  if (options.recall > 0)
    restore_rows(c);  // recall asks in the place of the last token, which makes one key less far
  for (std::size_t i = 0; i < all.size(); ++i) {
    rows[i].median_ms = 1e-3 * median(times[i]);
    rows[i].tokens_per_second = 1e3 / rows[i].median_ms;
    rows[i].density = work[i].density();
    rows[i].selectivity = work[i].selectivity();
    rows[i].tiers = per_step(work[i].tiers, options.steps);
    rows[i].work = work[i];
    rows[i].recall =
        recall_of(c, c.methods[static_cast<std::size_t>(methods[i])], queries, steps, layers, options.recall);
  }
  return rows;
}

}  // namespace lode
