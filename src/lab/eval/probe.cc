// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/probe.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/cancel.h"
#include "base/relative_error.h"
#include "base/text.h"
#include "engine/context.h"
#include "lab/eval/head_probe.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Tokens per forward pass of the measured end: keeps the logits of large vocabularies small.
constexpr std::int64_t kStep = 64;
/// Tokens that are looked into get steps of their own if they average at least so many apart, because a GPU leaves such
/// steps to the host.
constexpr std::int64_t kApart = 16;

double log_sum_exp(std::span<const float> logits) {
  const float most = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float x : logits) sum += std::exp(static_cast<double>(x) - most);
  return std::log(sum) + most;
}

/// Kullback-Leibler divergence of softmax(logits) from softmax(exact), in nats; norms are their log_sum_exp.
double divergence_of(std::span<const float> logits, double norm, std::span<const float> exact,
                     double exact_norm) {
  double sum = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double log_p = exact[i] - exact_norm;
    sum += std::exp(log_p) * (log_p - (logits[i] - norm));
  }
  return sum;
}

std::ptrdiff_t likeliest_of(std::span<const float> logits) {
  return std::max_element(logits.begin(), logits.end()) - logits.begin();
}

double mean_where(const std::vector<double>& losses, const std::vector<bool>& counts) {
  double sum = 0, n = 0;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    if (!counts[i]) continue;
    sum += losses[i];
    n += 1;
  }
  return n == 0 ? 0.0 : sum / n;
}

class Probing {
 public:
  Probing(std::shared_ptr<const Model> model, std::string_view text, const std::vector<NamedSpec>& specs,
          const ProbeOptions& options)
      : model_(std::move(model)), options_(options) {
    tokens_ = model_->tokenizer().encode(text, Tokenizer::Bos::as_template);
    const std::int64_t n = std::ssize(tokens_);
    expect_tokens(n, options, "probe");
    specs_ = {{"full", parse_spec("full")},
              {"streaming", probe_spec(parse_spec("streaming"), options.dense)}};
    for (const NamedSpec& s : specs) {
      const Spec spec = probe_spec(s.spec, options.dense);
      const auto known = std::find_if(specs_.begin(), specs_.end(),
                                      [&](const NamedSpec& k) { return k.spec.str() == spec.str(); });
      row_of_.push_back(static_cast<std::size_t>(known - specs_.begin()));
      if (known == specs_.end()) specs_.push_back({s.name, spec});
    }
  }

  ProbeReport run(const std::function<void(const ProbeReport&)>& measured) {
    ContextOptions context_options = options_.context;
    if (context_options.max_tokens == 0)
      context_options.max_tokens = static_cast<std::int64_t>(tokens_.size());
    Context context(model_, context_options);
    std::vector<MethodId> methods;
    for (const NamedSpec& s : specs_)
      methods.push_back(s.spec.name == "full" ? kDense : context.attach(s.spec));
    const std::int64_t before = static_cast<std::int64_t>(tokens_.size()) - options_.last - 1;
    Progress progress(options_.title, before + static_cast<std::int64_t>(specs_.size()) * options_.last,
                      "tokens", options_.progress);
    context.prefill(std::span(tokens_).first(static_cast<std::size_t>(before)),
                    [&](std::int64_t done) { progress.at(done); });
    context.build_indexes();
    ProbeReport report = {.model = model_->path().string(),
                          .tokens = static_cast<std::int64_t>(tokens_.size()),
                          .options = options_,
                          .row_of = row_of_};
    std::vector<Predictions> predictions;
    std::vector<Position> looked_at;  // nothing of full attention
    for (std::size_t m = 0; m < specs_.size(); ++m) {
      report.rows.push_back({.attention = specs_[m].name});
      const Predictions* const exact = m == 0 ? nullptr : &predictions[0];
      if (m == 1) {
        looked_at = evenly_spread();
        if (options_.of_far_past && options_.measured > 0) {
          ProbeRow not_kept;
          const Predictions streaming = measure(context, methods[m], exact, not_kept, {});
          looked_at = some_of(needing_past(*exact, streaming), looked_at);
          context.roll_back(before);
        }
      }
      predictions.push_back(measure(context, methods[m], exact, report.rows.back(), looked_at));
      context.roll_back(before);
      progress.at(before + static_cast<std::int64_t>(m + 1) * options_.last);
      if (m == 0) continue;  // what is compared is compared with the first two
      compare(predictions, report);
      if (measured) measured(report);
    }
    if (const DType type = context_options.kv_type;
        options_.kv_error && (type == DType::q8 || type == DType::q4))
      report.kv_error = kv_error(context, context_options, before);
    return report;
  }

 private:
  /// What is predicted after each of the last tokens.
  struct Predictions {
    std::vector<double> losses;
    std::vector<TokenId> likeliest;
    std::vector<bool> right;          // whether the likeliest is the text's own
    std::vector<double> divergences;  // from full attention's, if asked for
    std::vector<float> logits;        // [last, vocab] of full attention where divergences are asked for
    std::vector<double> norms;        // [last] log_sum_exp of each row of logits
  };

  /// Positions of the last tokens that are looked at, rising; none where no head is.
  std::vector<Position> evenly_spread() const {
    std::vector<Position> positions;
    if (options_.measured == 0) return positions;
    const std::int64_t stride = std::max<std::int64_t>(1, options_.last / options_.measured);
    for (std::int64_t at = std::ssize(tokens_) - 1 - options_.last; at < std::ssize(tokens_) - 1; ++at)
      if (at % stride == 0) positions.push_back(static_cast<Position>(at));
    return positions;
  }
  /// Picks `measured` of the wanted tokens, evenly, or all if they are fewer; `others` if none is wanted.
  std::vector<Position> some_of(const std::vector<bool>& wanted, std::vector<Position> others) const {
    std::vector<Position> all, some;
    for (std::size_t i = 0; i < wanted.size(); ++i)
      if (wanted[i])
        all.push_back(static_cast<Position>(std::ssize(tokens_) - 1 - options_.last) +
                      static_cast<Position>(i));
    if (all.empty()) return others;
    const std::size_t count = std::min(all.size(), static_cast<std::size_t>(options_.measured));
    for (std::size_t i = 0; i < count; ++i) some.push_back(all[i * all.size() / count]);
    return some;
  }
  /// Which of the last tokens full attention predicts better than sink and window alone by the gap.
  std::vector<bool> needing_past(const Predictions& full, const Predictions& streaming) const {
    std::vector<bool> needing(full.losses.size());
    for (std::size_t i = 0; i < needing.size(); ++i)
      needing[i] = streaming.losses[i] - full.losses[i] >= options_.gap;
    return needing;
  }

  struct Step {
    std::size_t tokens = 0;
    bool looked_into = false;
  };
  /// The step that begins with a token.
  Step step_at(std::size_t begin, const std::vector<Position>& looked_at) const {
    const std::size_t most = std::min<std::size_t>(kStep, tokens_.size() - 1 - begin);
    if (looked_at.empty()) return {.tokens = most};
    if (options_.last < kApart * std::ssize(looked_at)) return {.tokens = most, .looked_into = true};
    auto next = std::lower_bound(looked_at.begin(), looked_at.end(), static_cast<Position>(begin));
    std::size_t run = 0;
    for (; next != looked_at.end() && run < most && *next == static_cast<Position>(begin + run); ++next)
      ++run;
    if (run > 0) return {.tokens = run, .looked_into = true};
    if (next == looked_at.end()) return {.tokens = most};
    return {.tokens = std::min(most, static_cast<std::size_t>(*next) - begin)};
  }

  /// Runs the last tokens under a method: what it predicts, and what its heads did. exact: full attention's,
  /// null for itself. looked_at: positions of the tokens whose heads are measured.
  Predictions measure(Context& context, MethodId method, const Predictions* exact, ProbeRow& row,
                      const std::vector<Position>& looked_at) const {
    const ModelConfig& config = model_->config();
    HeadProbe heads(config.layers, config.query_heads, options_.top, looked_at, options_.errors_alone);
    const ForwardHooks hooks = heads.hooks();
    Predictions found;
    WorkReport work;
    const std::size_t first = tokens_.size() - static_cast<std::size_t>(options_.last) - 1;
    for (std::size_t begin = first, count = 0; begin + 1 < tokens_.size(); begin += count) {
      check_cancel();
      const Step step = step_at(begin, looked_at);
      count = step.tokens;
      context.impl().hooks = step.looked_into ? &hooks : nullptr;
      // As tokens of an answer: each chooses its own keys, also where a method averages over questions.
      work += context.impl().run(std::span(tokens_).subspan(begin, count), method, Phase::generation,
                                 LogitRows::all);
      const std::vector<float>& logits = context.impl().logits;
      const std::size_t vocab = logits.size() / count;
      for (std::size_t i = 0; i < count; ++i) {
        const auto row_of = std::span(logits).subspan(i * vocab, vocab);
        const auto target = static_cast<std::size_t>(tokens_[begin + i + 1]);
        const double norm = log_sum_exp(row_of);
        found.losses.push_back(norm - row_of[target]);
        if (options_.divergence && exact == nullptr) {
          found.norms.push_back(norm);
        } else if (options_.divergence) {
          const std::size_t token = found.divergences.size();
          found.divergences.push_back(divergence_of(
              row_of, norm, std::span(exact->logits).subspan(token * vocab, vocab), exact->norms[token]));
        }
        found.likeliest.push_back(static_cast<TokenId>(likeliest_of(row_of)));
        found.right.push_back(found.likeliest.back() == tokens_[begin + i + 1]);
      }
      if (options_.divergence && exact == nullptr) {
        found.logits.reserve(static_cast<std::size_t>(options_.last) * vocab);
        found.logits.insert(found.logits.end(), logits.begin(), logits.end());
      }
    }
    context.impl().hooks = nullptr;
    row.density = work.density();
    row.selector_share = work.full_bytes == 0 ? 0.0
                                              : static_cast<double>(work.selector_bytes) /
                                                    static_cast<double>(work.full_bytes);
    row.selectivity = work.selectivity();
    row.notice = work.notice;
    row.heads = heads.measures();
    row.dense_heads = std::int64_t{config.layers} * config.query_heads - std::ssize(row.heads);
    return found;
  }

  /// The text is read a second time, with keys and values in 16 bits; full attention then predicts its last tokens from both.
  KvError kv_error(Context& context, ContextOptions options, std::int64_t before) const {
    KvError error = {.type = std::string(name_of(options.kv_type)), .agreement = 0};
    options.kv_type = DType::f16;
    Context wide(model_, options);
    Progress progress(options_.title + ": f16", std::ssize(tokens_), "tokens", options_.progress);
    wide.prefill(std::span(tokens_).first(static_cast<std::size_t>(before)),
                 [&](std::int64_t done) { progress.at(done); });
    for (std::int64_t at = before; at < before + options_.last; at += kStep) {
      check_cancel();
      const auto count = static_cast<std::size_t>(std::min(kStep, before + options_.last - at));
      const auto begin = static_cast<std::size_t>(at);
      for (Context* both : {&context, &wide})
        both->impl().run(std::span(tokens_).subspan(begin, count), kDense, Phase::generation, LogitRows::all);
      const std::span<const float> found = context.impl().logits, exact = wide.impl().logits;
      const std::size_t vocab = exact.size() / count;
      for (std::size_t i = 0; i < count; ++i) {
        const auto of_found = found.subspan(i * vocab, vocab), of_exact = exact.subspan(i * vocab, vocab);
        error.logits += relative_error(of_found.data(), of_exact.data(), std::ssize(of_exact));
        error.loss += log_sum_exp(of_exact) - of_exact[static_cast<std::size_t>(tokens_[begin + i + 1])];
        error.agreement += likeliest_of(of_found) == likeliest_of(of_exact) ? 1 : 0;
      }
      progress.at(at + static_cast<std::int64_t>(count));
    }
    for (double* mean : {&error.logits, &error.loss, &error.agreement})
      *mean /= static_cast<double>(options_.last);
    progress.at(std::ssize(tokens_));
    return error;
  }

  /// The answers among the last tokens, where it is known how they are marked.
  std::optional<std::vector<TokenStretch>> stretches() const {
    if (!options_.marks) return std::nullopt;
    return answers_between(*options_.marks, model_->tokenizer(),
                           std::span(tokens_).last(static_cast<std::size_t>(options_.last)));
  }

  /// Agreement, and the recovered gap, over the tokens where full beats streaming clearly.
  void compare(const std::vector<Predictions>& predictions, ProbeReport& report) const {
    const std::vector<double>&full = predictions[0].losses, &streaming = predictions[1].losses;
    const std::vector<bool> needs_past = needing_past(predictions[0], predictions[1]);
    report.gap_tokens = std::count(needs_past.begin(), needs_past.end(), true);
    std::vector<bool> far(full.size());  // what full attention finds there
    for (std::size_t i = 0; i < far.size(); ++i)
      far[i] = predictions[0].right[i] && std::exp(-full[i]) >= options_.sure && !predictions[1].right[i];
    const FoundAnswers answers(far, predictions[0].right, stretches());
    report.found_answers = static_cast<std::int64_t>(answers.count());
    const double gap = mean_where(streaming, needs_past) - mean_where(full, needs_past);
    for (std::size_t m = 0; m < report.rows.size(); ++m) {
      ProbeRow& row = report.rows[m];
      const std::vector<double>& losses = predictions[m].losses;
      row.loss = mean_where(losses, std::vector<bool>(losses.size(), true));
      row.gap_loss = mean_where(losses, needs_past);
      if (const std::vector<double>& divergences = predictions[m].divergences; !divergences.empty()) {
        row.divergence = mean_where(divergences, std::vector<bool>(divergences.size(), true));
        row.gap_divergence = mean_where(divergences, needs_past);
      }
      std::vector<double> same;
      for (std::size_t i = 0; i < losses.size(); ++i)
        same.push_back(predictions[m].likeliest[i] == predictions[0].likeliest[i] ? 1.0 : 0.0);
      row.agreement = mean_where(same, std::vector<bool>(losses.size(), true));
      row.kept = answers.kept(predictions[m].right);
      if (report.gap_tokens > 0) row.recovered = (mean_where(streaming, needs_past) - row.gap_loss) / gap;
    }
  }

  std::shared_ptr<const Model> model_;
  const ProbeOptions& options_;
  std::vector<TokenId> tokens_;
  std::vector<NamedSpec> specs_;
  std::vector<std::size_t> row_of_;
};

Json measure_json(const HeadMeasure& m) {
  return {{"density", m.density},
          {"recall", m.recall},
          {"mass", m.mass},
          {"error", m.error},
          {"bound", std::isfinite(m.bound) ? Json(m.bound) : Json()}};
}

}  // namespace

Spec probe_spec(const Spec& spec, const LocalWindow& dense) {
  if (spec.name == "full") return spec;
  std::string text = fmt::format("{}:sink={},window={}", spec.name, dense.sink, dense.window);
  for (const auto& [key, value] : spec.given) {
    if (key != "sink" && key != "window") text += fmt::format(",{}={}", key, value);
  }
  return parse_spec(text);
}

HeadMeasure ProbeRow::mean() const {
  const auto exact = static_cast<double>(dense_heads), all = exact + static_cast<double>(heads.size());
  if (all == 0) return {};
  HeadMeasure mean = {.density = exact / all, .recall = exact / all, .mass = exact / all};
  for (const HeadMeasure& h : heads) {
    mean.density += h.density / all;
    mean.recall += h.recall / all;
    mean.mass += h.mass / all;
    mean.error += h.error / all;
    mean.bound += h.bound / all;
  }
  return mean;
}

Json ProbeReport::json_of(const ProbeRow& row) const {
  Json result = {{"attention", row.attention},
                 {"loss", row.loss},
                 {"gap_loss", gap_tokens > 0 ? Json(row.gap_loss) : Json()},
                 {"recovered", row.recovered ? Json(*row.recovered) : Json()},
                 {"agreement", row.agreement},
                 {"kept", row.kept ? Json(*row.kept) : Json()},
                 {"density", row.density},
                 {"selector_share", row.selector_share},
                 {"selectivity", row.selectivity}};
  if (!row.notice.empty()) result["notice"] = row.notice;
  if (row.heads.empty()) return result;
  result["mean"] = measure_json(row.mean());
  for (const HeadMeasure& h : row.heads) {
    Json head = measure_json(h);
    head["layer"] = h.layer;
    head["head"] = h.head;
    result["heads"].push_back(std::move(head));
  }
  return result;
}

Json ProbeReport::json() const {
  Json results = Json::array();
  for (const ProbeRow& row : rows) results.push_back(json_of(row));
  Json result = {{"model", model},
                 {"device", "cpu"},
                 {"tokens", tokens},
                 {"last", options.last},
                 {"gap_tokens", gap_tokens},
                 {"found_answers", found_answers},
                 {"gap", options.gap},
                 {"sure", options.sure},
                 {"sink", options.dense.sink},
                 {"window", options.dense.window},
                 {"top", options.top},
                 {"results", results}};
  if (kv_error)
    result["kv_error"] = {{"kv_type", kv_error->type},
                          {"beside", "f16"},
                          {"logits", kv_error->logits},
                          {"loss", kv_error->loss},
                          {"agreement", kv_error->agreement}};
  return result;
}

std::string ProbeReport::table(bool with_heads) const {
  std::string text = fmt::format(
      "{}, {}; the last {} attend sink {} + window {}\n"
      "and what the method finds\n"
      "recovered: over the {} that full attention predicts better than\n"
      "  streaming by {} nat or more\n"
      "recall: of the top {}; error: of the output; both, and mass, as means\n"
      "  over all heads, those of layers left dense too\n"
      "bound: on the error, from the least and largest numbers of pages of 16 keys,\n"
      "  no key left out read\n\n",
      model, counted(tokens, "token"), options.last, options.dense.sink, options.dense.window,
      counted(gap_tokens, "token"), options.gap, options.top);
  std::vector<std::vector<std::string>> lines = {
      {"attention", "loss", "recovered", "density", "recall", "mass", "error", "bound"}};
  for (const ProbeRow& row : rows) {
    const HeadMeasure mean = row.mean();
    const auto of_heads = [&](double value, int digits) {
      return row.heads.empty() ? "" : fmt::format("{:.{}f}", value, digits);
    };
    lines.push_back({row.attention, fmt::format("{:.4f}", row.loss),
                     row.recovered ? fmt::format("{:.4f}", *row.recovered) : "-",
                     fmt::format("{:.4f}", row.density), of_heads(mean.recall, 4), of_heads(mean.mass, 4),
                     of_heads(mean.error, 4), of_heads(mean.bound, 2)});
  }
  text += text_table(lines);
  if (kv_error)
    text += fmt::format(
        "\n{} beside f16, full attention: logits {:.2f} % apart, loss {:.4f} beside {:.4f},\n"
        "  the likeliest token is the same for {:.1f} % of the last {}\n",
        kv_error->type, 100 * kv_error->logits, rows.front().loss, kv_error->loss, 100 * kv_error->agreement,
        options.last);
  for (const ProbeRow& row : rows) {
    if (!row.notice.empty()) text += fmt::format("\n{}: {}\n", row.attention, row.notice);
  }
  for (const ProbeRow& row : rows) {
    if (!with_heads || row.heads.empty()) continue;
    text += fmt::format("\n{}\n  layer  head   density    recall      mass     error\n", row.attention);
    for (const HeadMeasure& h : row.heads) {
      text += fmt::format("  {:>5} {:>5} {:>9.5f} {:>9.4f} {:>9.4f} {:>9.4f}\n", h.layer, h.head, h.density,
                          h.recall, h.mass, h.error);
    }
  }
  return text;
}

void expect_tokens(std::int64_t tokens, const ProbeOptions& options, std::string_view where) {
  const std::int64_t least = options.last + options.dense.sink + options.dense.window + 2;
  if (tokens < least)
    throw InputError(fmt::format(
        "{}: expected a text of at least {} tokens ({} to measure, behind sink and window), found {}", where,
        least, options.last, tokens));
}

ProbeReport probe(std::shared_ptr<const Model> model, std::string_view text,
                  const std::vector<NamedSpec>& specs, const ProbeOptions& options,
                  const std::function<void(const ProbeReport&)>& measured) {
  return Probing(std::move(model), text, specs, options).run(measured);
}

}  // namespace lode
