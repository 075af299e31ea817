// SPDX-License-Identifier: Apache-2.0
#include "eval/bench_decode.h"

#include <algorithm>

#include "base/cancel.h"
#include "engine/context.h"

namespace lode {
namespace {

constexpr std::int64_t kWriteTokens = 512;
constexpr int kWarmUp = 2;

/// Writes made-up keys and values of `count` tokens to every layer, telling selectors that listen, as a
/// prefill would.
void fill(Context::Impl& c, const DecodeBenchOptions& options) {
  const ModelConfig& m = c.config;
  if (const auto native = [](const AttachedMethod& a) { return a.chosen_by == ChosenBy::gpu || a.dense(); };
      c.gpu != nullptr && !c.gpu->keys_on_host() && std::all_of(c.methods.begin(), c.methods.end(), native)) {
    c.gpu->fill_random(options.context, options.seed);
    c.ids.assign(static_cast<std::size_t>(options.context), TokenId{0});
    c.indexed = c.tokens();
    return;
  }
  std::vector<VectorMaker> makers;
  for (int layer = 0; layer < m.layers; ++layer)
    makers.emplace_back(VectorMaker::Shape{m.query_heads, m.kv_heads, m.head_dim}, options.kind, options.skew,
                        c.rope, hash_seed(options.seed, layer));
  c.kv.expect(options.context);
  for (std::int64_t t = 0; t < options.context; t += kWriteTokens) {
    check_cancel();
    const std::int64_t count = std::min(kWriteTokens, options.context - t);
    for (int layer = 0; layer < m.layers; ++layer) {
      VectorMaker& made = makers[static_cast<std::size_t>(layer)];
      made.make(static_cast<Position>(t), count);
      c.kv.write(layer, count, made.k, made.v);
      for (Selector* selector : c.listeners[static_cast<std::size_t>(layer)])
        selector->on_write({.sequence = 0,
                            .phase = Phase::context,
                            .begin = static_cast<Position>(t),
                            .tokens = count,
                            .q_unrotated = made.q_unrotated,
                            .k_unrotated = made.k_unrotated,
                            .q = made.q,
                            .k = made.k,
                            .v = made.v});
    }
    c.kv.commit(count);
    c.ids.insert(c.ids.end(), static_cast<std::size_t>(count), TokenId{0});
  }
  c.indexed = c.tokens();
}

/// One step's share, on average.
TierWork per_step(TierWork sum, int steps) {
  for (std::int64_t* n : {&sum.bytes_to_host, &sum.bytes_to_gpu, &sum.host_keys, &sum.gpu_keys}) *n /= steps;
  for (double* seconds : {&sum.wait_seconds, &sum.search_seconds, &sum.attend_seconds}) *seconds /= steps;
  return sum;
}

}  // namespace

std::vector<DecodeBenchRow> bench_decode(const std::shared_ptr<const Model>& model,
                                         const DecodeBenchOptions& options, std::span<const Spec> specs,
                                         const std::function<void(std::string_view)>& note) {
  std::vector<Spec> all = {parse_spec("full")};
  for (const Spec& spec : specs)
    if (spec.name != "full") all.push_back(spec);
  const int steps = options.steps + kWarmUp;
  Context context(model, {.kv_type = options.kv_type,
                          .device = options.device,
                          .gpu_memory = options.gpu_memory,
                          .kv_tier = options.kv_tier,
                          .max_tokens = options.context + steps,
                          .seed = options.seed});
  std::vector<MethodId> methods;
  for (const Spec& spec : all) methods.push_back(context.attach(spec));
  Context::Impl& c = context.impl();
  if (const std::string where = context.placement(); !where.empty()) note(where);
  note("making keys and values");
  fill(c, options);
  note("building indexes");
  std::vector<DecodeBenchRow> rows;
  for (std::size_t i = 0; i < all.size(); ++i) {
    AttachedMethod& method = c.methods[static_cast<std::size_t>(methods[i])];
    rows.push_back({.attention = all[i].str()});
    if (!method.built) rows.back().build_seconds = 1e-6 * microseconds([&] { c.build(method, {}); });
  }
  note("measuring");
  std::vector<std::vector<double>> times(all.size());
  std::vector<WorkReport> work(all.size());
  const std::int64_t start = c.tokens();
  for (int step = 0; step < steps; ++step) {
    c.audit.set_rate(step < kWarmUp ? options.audit : 0.0);  // measured steps do no more than their work
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
  for (std::size_t i = 0; i < all.size(); ++i) {
    rows[i].median_ms = 1e-3 * median(times[i]);
    rows[i].tokens_per_second = 1e3 / rows[i].median_ms;
    rows[i].density = work[i].density();
    rows[i].selectivity = work[i].selectivity();
    rows[i].tiers = per_step(work[i].tiers, options.steps);
    rows[i].work = work[i];
  }
  return rows;
}

}  // namespace lode
