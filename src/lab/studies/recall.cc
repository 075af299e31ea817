// SPDX-License-Identifier: Apache-2.0
#include "lab/studies/recall.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/cancel.h"
#include "base/text.h"
#include "base/threads.h"
#include "engine/context.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/shared/stored_keys.h"

namespace lode {

namespace {

/// Far keys that a selection gives each (query head, token) of a block: [Hq, tokens] rising rows.
std::vector<std::vector<Position>> chosen_rows(const Selection& selection, const QueryBlock& block,
                                               const LayerGeometry& geometry) {
  std::vector<std::vector<Position>> rows(static_cast<std::size_t>(geometry.query_heads * block.tokens));
  for (std::int64_t i = 0; i < selection.sets(); ++i) {
    const Selection::Set set = selection.set(i);
    std::vector<Position> all(set.rows.begin(), set.rows.end());
    for (const Run& run : set.runs) {
      for (Position p = run.begin; p < run.end; ++p) all.push_back(p);
    }
    std::sort(all.begin(), all.end());
    for (int g = 0; g < geometry.group(); ++g) {
      if ((set.queries.heads >> g & 1u) == 0) continue;
      const std::int64_t head = set.queries.kv_head * geometry.group() + g;
      for (std::int64_t t = set.queries.token_begin; t < set.queries.token_end; ++t) {
        const auto end = std::lower_bound(all.begin(), all.end(), block.far_end(t, geometry.dense));
        rows[static_cast<std::size_t>(head * block.tokens + t)].assign(all.begin(), end);
      }
    }
  }
  return rows;
}

class RecallMeter {
 public:
  RecallMeter(Context::Impl& context, const std::vector<MethodId>& methods, const RecallOptions& options)
      : context_(context), methods_(methods), options_(options) {}

  ForwardHooks hooks() {
    ForwardHooks hooks;
    hooks.attended = [this](const LayerGeometry& geometry, std::span<const QueryBlock> blocks,
                            const Selection*, std::span<float* const>) { look(geometry, blocks.front()); };
    return hooks;
  }
  /// [methods][L, Hq].
  std::vector<std::vector<HeadRecall>> take() { return std::move(seen_); }

 private:
  void look(const LayerGeometry& dense, const QueryBlock& block);
  void compare(const LayerGeometry& geometry, const QueryBlock& block, int kv_head);

  Context::Impl& context_;
  const std::vector<MethodId>& methods_;
  const RecallOptions& options_;
  std::vector<std::vector<HeadRecall>> seen_;
  std::vector<std::vector<std::vector<Position>>> chosen_;  // [methods][Hq, tokens] of the running layer
};

void RecallMeter::look(const LayerGeometry& dense, const QueryBlock& block) {
  check_cancel();
  LayerGeometry geometry = dense;
  geometry.dense = options_.dense;
  QueryBlock asking = block;
  asking.far_begin = static_cast<Position>(options_.dense.sink);
  // What is indexed knows nothing of who asks, as a context does not of its questions.
  std::vector<KvRows> heads(block.kv.heads.begin(), block.kv.heads.end());
  for (KvRows& head : heads) head.rows = block.begin;
  chosen_.clear();
  if (seen_.empty())
    seen_.assign(methods_.size(), std::vector<HeadRecall>(static_cast<std::size_t>(context_.config.layers *
                                                                                   geometry.query_heads)));
  for (const MethodId method : methods_) {
    Selector* const selector = context_.methods[static_cast<std::size_t>(method)]
                                   .selectors[static_cast<std::size_t>(geometry.layer)];
    Selection selection;
    selector->build(0, {.heads = heads, .tokens = block.begin});
    selector->append(0, block.kv, asking.far_end(asking.tokens - 1, geometry.dense));
    selector->select({&asking, 1}, selection);
    chosen_.push_back(chosen_rows(selection, asking, geometry));
    selector->roll_back(0, 0);  // nothing is asked of it any more: its memory goes to the next
  }
  geometry.pool->for_each(geometry.kv_heads,
                          [&](std::int64_t head, int) { compare(geometry, asking, static_cast<int>(head)); });
}

/// Adds the recall of every method for the queries of one group.
void RecallMeter::compare(const LayerGeometry& geometry, const QueryBlock& block, int kv_head) {
  const std::int64_t d = geometry.head_dim, group = geometry.group(), n = block.begin + block.tokens;
  const KvRows& kv = block.kv.heads[static_cast<std::size_t>(kv_head)];
  std::vector<float> log_norms(static_cast<std::size_t>(n)), value(static_cast<std::size_t>(d));
  for (std::int64_t row = 0; row < n; ++row) {
    read_stored_values({&kv, 1}, static_cast<Position>(row), value);
    log_norms[static_cast<std::size_t>(row)] = 0.5f * std::log(kernels().dot(value.data(), value.data(), d));
  }
  std::vector<float> scores(static_cast<std::size_t>(n));
  for (std::int64_t t = 0; t < block.tokens; ++t) {
    const Position begin = block.far_begin, end = block.far_end(t, geometry.dense);
    const auto far = static_cast<std::size_t>(end - begin);
    for (std::int64_t g = 0; g < group; ++g) {
      const std::int64_t head = kv_head * group + g;
      std::vector<float> q(block.q.begin() + (t * geometry.query_heads + head) * d,
                           block.q.begin() + (t * geometry.query_heads + head + 1) * d);
      for (float& x : q) x *= geometry.scale;
      kernels().score_run(q.data(), 1, kv, begin, end, scores.data(), n);
      std::vector<Position> by_weight, by_value;
      top_k({scores.data(), far}, options_.top, begin, by_weight);
      for (std::size_t i = 0; i < far; ++i) scores[i] += log_norms[static_cast<std::size_t>(begin) + i];
      top_k({scores.data(), far}, options_.top, begin, by_value);
      for (std::size_t m = 0; m < methods_.size(); ++m) {
        const std::vector<Position>& chosen = chosen_[m][static_cast<std::size_t>(head * block.tokens + t)];
        const auto share = [&](const std::vector<Position>& truth) {
          const auto found = std::count_if(truth.begin(), truth.end(), [&](Position p) {
            return std::binary_search(chosen.begin(), chosen.end(), p);
          });
          return static_cast<double>(found) /
                 static_cast<double>(truth.size() * static_cast<std::size_t>(block.tokens));
        };
        HeadRecall& own = seen_[m][static_cast<std::size_t>(geometry.layer * geometry.query_heads + head)];
        own.layer = geometry.layer;
        own.head = static_cast<int>(head);
        own.by_weight += share(by_weight);
        own.by_value += share(by_value);
        own.chosen += static_cast<double>(chosen.size()) /
                      static_cast<double>(far * static_cast<std::size_t>(block.tokens));
      }
    }
  }
}

/// [specs][L, Hq], in a context of its own: what methods learn while a text is read goes with each
/// measurement, so that no length may depend on those before it.
std::vector<std::vector<HeadRecall>> measure_length(const std::shared_ptr<const Model>& model,
                                                    std::span<const TokenId> tokens,
                                                    const std::vector<NamedSpec>& specs,
                                                    const RecallOptions& options,
                                                    const std::function<void(std::int64_t)>& progress) {
  ContextOptions context_options = options.context;
  context_options.max_tokens = std::ssize(tokens);
  context_options.device = Device::cpu;  // where selectors can be asked
  context_options.chunk = std::max(prefill_chunk(context_options), options.queries);  // all ask together
  Context context(model, context_options);
  std::vector<MethodId> methods;
  for (const NamedSpec& named : specs) {
    if (find_method(named.spec.name).finish)  // a layer is built and asked before the next has keys
      throw InputError("recall: expected methods without thresholds over all layers, found '" + named.name +
                       "'");
    methods.push_back(context.attach(named.spec));
  }
  RecallMeter meter(context.impl(), methods, options);
  const ForwardHooks hooks = meter.hooks();
  const auto asking = static_cast<std::size_t>(options.queries);
  context.prefill(tokens.first(tokens.size() - asking), progress);
  context.impl().hooks = &hooks;
  // As tokens of an answer: each chooses its own keys, also where a method averages over questions.
  context.impl().run(tokens.last(asking), kDense, Phase::generation, LogitRows::none, progress);
  context.impl().hooks = nullptr;
  return meter.take();
}

}  // namespace

HeadRecall RecallRow::mean() const {
  HeadRecall mean;
  for (const HeadRecall& head : heads) {
    mean.by_weight += head.by_weight / static_cast<double>(heads.size());
    mean.by_value += head.by_value / static_cast<double>(heads.size());
    mean.chosen += head.chosen / static_cast<double>(heads.size());
  }
  return mean;
}

void expect_lengths(const RecallOptions& options, std::int64_t tokens, std::string_view where) {
  const std::int64_t least = options.dense.sink + options.dense.window + options.queries + options.top;
  if (options.lengths.empty() || !std::is_sorted(options.lengths.begin(), options.lengths.end()) ||
      options.lengths.front() < least || options.lengths.back() > tokens) {
    throw InputError(
        fmt::format("{}: expected rising lengths from {} tokens, so that there are far keys, to the {} "
                    "of the text, found {}",
                    where, least, tokens, fmt::join(options.lengths, ", ")));
  }
}

RecallReport recall_by_length(const std::shared_ptr<const Model>& model, std::string_view text,
                              const std::vector<NamedSpec>& specs, const RecallOptions& options) {
  const std::vector<TokenId> tokens = model->tokenizer().encode(text, Tokenizer::Bos::as_template);
  expect_lengths(options, std::ssize(tokens), "recall");
  std::vector<NamedSpec> asked = specs;
  for (NamedSpec& named : asked) {
    named.spec.dense = options.dense;
    named.spec.dense_layers = 0;
    if (!find_method(named.spec.name).make)
      throw InputError(fmt::format("expected methods that choose keys, found '{}'", named.spec.str()));
  }
  RecallReport report = {.model = model->path().string(), .options = options, .rows = {}};
  Progress progress("recall",
                    std::accumulate(options.lengths.begin(), options.lengths.end(), std::int64_t{0}),
                    "tokens", options.progress);
  std::int64_t before = 0;  // tokens of the lengths that are done
  for (const std::int64_t length : options.lengths) {
    auto seen = measure_length(model, std::span(tokens).first(static_cast<std::size_t>(length)), asked,
                               options, [&](std::int64_t done) { progress.at(before + done); });
    before += length;
    for (std::size_t m = 0; m < asked.size(); ++m)
      report.rows.push_back({.attention = asked[m].name, .tokens = length, .heads = std::move(seen[m])});
  }
  return report;
}

Json RecallReport::json() const {
  Json all = Json::array();
  for (const RecallRow& row : rows) {
    const HeadRecall mean = row.mean();
    Json heads = Json::array();
    for (const HeadRecall& h : row.heads) {
      heads.push_back({{"layer", h.layer},
                       {"head", h.head},
                       {"recall", h.by_weight},
                       {"recall_by_value", h.by_value},
                       {"chosen", h.chosen}});
    }
    all.push_back({{"attention", row.attention},
                   {"tokens", row.tokens},
                   {"recall", mean.by_weight},
                   {"recall_by_value", mean.by_value},
                   {"chosen", mean.chosen},
                   {"heads", heads}});
  }
  return {{"model", model},
          {"top", options.top},
          {"queries", options.queries},
          {"sink", options.dense.sink},
          {"window", options.dense.window},
          {"results", all}};
}

std::string RecallReport::table() const {
  std::string text = fmt::format(
      "recall of the {} of largest weight a, and of largest a |v|; chosen: share "
      "of the far keys\n\n{:>8} {:>8} {:>8} {:>8}  attention\n",
      counted(options.top, "far key"), "tokens", "a", "a |v|", "chosen");
  for (const RecallRow& row : rows) {
    const HeadRecall mean = row.mean();
    text += fmt::format("{:>8} {:>8.4f} {:>8.4f} {:>8.4f}  {}\n", row.tokens, mean.by_weight, mean.by_value,
                        mean.chosen, row.attention);
  }
  return text;
}

}  // namespace lode
