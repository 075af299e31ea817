// SPDX-License-Identifier: Apache-2.0
#include "lab/bench/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/cancel.h"
#include "base/rng.h"
#include "engine/context.h"
#include "engine/row_order.h"
#include "lab/bench/common.h"
#include "lodestone/error.h"

namespace lode {

namespace {

std::int64_t room_of(const ModelBenchOptions& options) {
  std::int64_t most = options.generated;
  for (const std::int64_t tokens : options.prompts) most = std::max(most, tokens);
  return std::max<std::int64_t>(1, *std::max_element(options.depths.begin(), options.depths.end()) + most);
}

/// A context that goes from depth to depth.
class Bench {
 public:
  Bench(const std::shared_ptr<const Model>& model, const ModelBenchOptions& options,
        std::span<const Spec> specs, const std::function<void(std::string_view)>& note)
      : options_(options),
        context_(model, with_room(*model, options.context, room_of(options), note)),
        vocab_(model->config().vocab) {
    methods_.push_back({parse_spec("full"), context_.attach(parse_spec("full"))});
    for (const Spec& spec : specs)
      if (spec.name != "full") methods_.push_back({spec, context_.attach(spec)});
    if (options.order == "cluster") expect_order(context_);
  }

  void go_to(std::int64_t depth) {
    context_.roll_back(std::min(depth, context_.tokens()));
    if (depth > context_.tokens()) context_.prefill(random_tokens(depth - context_.tokens()));
    if (depth > 0) context_.build_indexes();
  }

  void prompts(std::int64_t depth, std::vector<ModelBenchRow>& rows) {
    for (const std::int64_t tokens : options_.prompts) {
      ModelBenchRow row{.attention = "full", .prompt = tokens, .depth = depth};
      for (int repetition = -1; repetition < options_.repetitions; ++repetition) {  // the first warms up
        const std::vector<TokenId> text =
            random_tokens(repetition < 0 ? std::min<std::int64_t>(tokens, 64) : tokens);
        keep(row, repetition, microseconds([&] { context_.prefill(text); }));
        context_.roll_back(depth);
      }
      rows.push_back(std::move(row));
    }
  }

  void answers(std::int64_t depth, std::vector<ModelBenchRow>& rows) {
    if (options_.generated == 0) return;
    const std::size_t first = rows.size(), methods = depth == 0 ? 1 : methods_.size();
    const bool by_cluster = depth > 0 && options_.order != "token" && order_rows(context_);
    for (std::size_t i = 0; i < methods; ++i)
      rows.push_back({.attention = methods_[i].spec.str(),
                      .generated = options_.generated,
                      .depth = depth,
                      .by_cluster = by_cluster});
    for (int repetition = -1; repetition < options_.repetitions; ++repetition) {
      for (std::size_t i = 0; i < methods; ++i) {
        const double us =
            microseconds([&] { generate(methods_[i].id, repetition < 0 ? 1 : options_.generated); });
        keep(rows[first + i], repetition, us);
        context_.roll_back(depth);
      }
    }
  }

 private:
  struct Method {
    Spec spec;
    MethodId id;
  };

  static void keep(ModelBenchRow& row, int repetition, double us) {
    check_cancel();
    if (repetition >= 0) row.seconds.push_back(1e-6 * us);
  }

  void generate(MethodId method, std::int64_t tokens) {
    for (const TokenId token : random_tokens(tokens)) {
      check_cancel();
      context_.impl().run(std::span(&token, 1), method, Phase::generation, LogitRows::last_of_each);
    }
  }

  std::vector<TokenId> random_tokens(std::int64_t count) {
    std::vector<TokenId> tokens(static_cast<std::size_t>(count));
    for (TokenId& t : tokens) t = static_cast<TokenId>(rng_.below(static_cast<std::uint64_t>(vocab_)));
    return tokens;
  }

  const ModelBenchOptions& options_;
  Context context_;
  const std::int64_t vocab_;
  std::vector<Method> methods_;
  Rng rng_{7};
};

}  // namespace

std::string ModelBenchRow::test() const {
  const std::string what = prompt > 0 ? fmt::format("pp{}", prompt) : fmt::format("tg{}", generated);
  return depth > 0 ? fmt::format("{} @ d{}", what, depth) : what;
}

double ModelBenchRow::tokens_per_second(std::size_t repetition) const {
  return static_cast<double>(prompt + generated) / seconds[repetition];
}

double ModelBenchRow::average() const {
  double sum = 0;
  for (std::size_t i = 0; i < seconds.size(); ++i) sum += tokens_per_second(i);
  return sum / static_cast<double>(seconds.size());
}

double ModelBenchRow::deviation() const {
  if (seconds.size() < 2) return 0;
  const double mean = average();
  double sum = 0;
  for (std::size_t i = 0; i < seconds.size(); ++i) sum += std::pow(tokens_per_second(i) - mean, 2);
  return std::sqrt(sum / static_cast<double>(seconds.size() - 1));
}

std::vector<ModelBenchRow> bench_model(const std::shared_ptr<const Model>& model,
                                       const ModelBenchOptions& options, std::span<const Spec> specs,
                                       const std::function<void(std::string_view)>& note) {
  LODE_ASSERT(!options.depths.empty() && options.repetitions > 0);
  std::vector<std::int64_t> depths = options.depths;
  std::sort(depths.begin(), depths.end());
  Bench bench(model, options, specs, note);
  std::vector<ModelBenchRow> rows;
  for (const std::int64_t depth : depths) {
    if (depth > 0) note(fmt::format("reading {} tokens", depth));
    bench.go_to(depth);
    bench.prompts(depth, rows);
    bench.answers(depth, rows);
  }
  return rows;
}

}  // namespace lode
