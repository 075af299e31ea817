// SPDX-License-Identifier: Apache-2.0
#include "eval/eval.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <map>
#include <set>

#include "base/cancel.h"
#include "eval/records.h"
#include "eval/scoring.h"
#include "lodestone/error.h"
#include "model/config.h"

namespace lode {

namespace {

/// Tokens that an answer may take beyond the expected one: enough to see that the model goes on.
constexpr std::int64_t kAnswerMargin = 8;

/// Samples that share a context, in the order of the file.
struct Document {
  std::vector<std::size_t> samples;
};

std::vector<Document> documents_of(const std::vector<Sample>& samples) {
  std::vector<Document> documents;
  std::map<const std::string*, std::size_t> known;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const auto [entry, is_new] = known.emplace(samples[i].context.get(), documents.size());
    if (is_new) documents.emplace_back();
    documents[entry->second].samples.push_back(i);
  }
  return documents;
}

/// A context's tokens, cut where every question of it still begins alike, and what each question adds.
struct Prompts {
  std::vector<TokenId> context;
  std::vector<std::vector<TokenId>> questions;
  std::vector<std::int64_t> most_new;  ///< tokens to generate at most
  std::int64_t longest = 0;            ///< context, question and answer
};

class Evaluation {
 public:
  Evaluation(std::shared_ptr<const Model> model, const std::vector<Sample>& samples,
             const std::vector<NamedSpec>& specs, const EvalOptions& options)
      : model_(std::move(model)),
        samples_(samples),
        specs_(specs),
        options_(options),
        documents_(documents_of(samples)),
        records_(options.records, settings()) {}

  void run() {
    std::int64_t total = 0;
    for (const Document& document : documents_) total += cost(document);
    Progress progress("eval", total, "tokens", options_.progress);
    std::int64_t done = 0;
    for (const Document& document : documents_) {
      if (cost(document) == 0) continue;
      const std::int64_t after = done + cost(document);
      answer(document, [&](std::int64_t tokens) { progress.at(std::min(done + tokens, after)); });
      progress.at(done = after);
    }
  }

  EvalReport report() const;

 private:
  /// What the answers depend on, besides the samples.
  Json settings() const {
    return {{"lodestone", "answers of eval"},
            {"model", model_->fingerprint()},
            {"protocol", options_.protocol.str()},
            {"kv_type", name_of(options_.context.kv_type)}};
  }

  bool is_pending(const Sample& sample) const {
    return std::any_of(specs_.begin(), specs_.end(),
                       [&](const NamedSpec& s) { return records_.find(sample, s.name) == nullptr; });
  }

  /// About how many tokens of work are left in a document; 0 when nothing is.
  std::int64_t cost(const Document& document) const {
    const auto pending = std::count_if(document.samples.begin(), document.samples.end(),
                                       [&](std::size_t i) { return is_pending(samples_[i]); });
    if (pending == 0) return 0;
    const auto context = static_cast<std::int64_t>(samples_[document.samples.front()].context->size() / 4);
    return context + pending * static_cast<std::int64_t>(specs_.size()) * 64;
  }

  Prompts encode(const Document& document) const;
  std::int64_t most_new_tokens(const Sample& sample) const;
  void answer(const Document& document, const std::function<void(std::int64_t)>& progress);
  Answer ask(Context& context, MethodId method, const Sample& sample, const Prompts& prompts,
             std::size_t question) const;
  std::vector<EvalRow> rows_of(const std::string& task, std::int64_t tokens) const;

  std::shared_ptr<const Model> model_;
  const std::vector<Sample>& samples_;
  const std::vector<NamedSpec>& specs_;
  const EvalOptions& options_;
  std::vector<Document> documents_;
  Records records_;
};

std::int64_t Evaluation::most_new_tokens(const Sample& sample) const {
  std::int64_t longest = 0, sum = 0;
  for (const std::string& answer : sample.answers) {
    const auto n =
        static_cast<std::int64_t>(model_->tokenizer().encode(" " + answer, Tokenizer::Bos::none).size());
    longest = std::max(longest, n);
    sum += n + 2;  // two for what parts it from the next
  }
  return kAnswerMargin + (sample.match == Match::contains ? sum : longest);
}

/// The model reads context + question as one text. A tokenizer may join the two at the seam, so each question
/// is encoded together with the context, and the tokens that all of them share are what is prefilled.
Prompts Evaluation::encode(const Document& document) const {
  Prompts prompts;
  const std::string& text = *samples_[document.samples.front()].context;
  prompts.context = model_->tokenizer().encode(text, Tokenizer::Bos::as_template);
  std::size_t shared = prompts.context.size();
  for (const std::size_t i : document.samples) {
    auto whole = model_->tokenizer().encode(text + samples_[i].question, Tokenizer::Bos::as_template);
    if (whole.empty())
      throw InputError("sample '" + samples_[i].id + "': expected a context or a question, found neither");
    const std::size_t most = std::min(shared, whole.size() - 1);
    const auto differs = std::mismatch(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(most),
                                       prompts.context.begin());
    shared = static_cast<std::size_t>(differs.first - whole.begin());
    if (options_.protocol.kind == Protocol::Kind::last) {
      const std::int64_t before = static_cast<std::int64_t>(whole.size()) - options_.protocol.tokens;
      shared = std::min(shared, static_cast<std::size_t>(std::max<std::int64_t>(1, before)));
    }
    prompts.questions.push_back(std::move(whole));
  }
  prompts.context.resize(shared);
  const double stretch = options_.context.rope_factor.value_or(1.0);
  const auto limit = static_cast<std::int64_t>(static_cast<double>(model_->config().max_positions) * stretch);
  for (std::size_t q = 0; q < prompts.questions.size(); ++q) {
    const auto length = static_cast<std::int64_t>(prompts.questions[q].size());
    const std::int64_t wanted = most_new_tokens(samples_[document.samples[q]]);
    // A sample may be as long as the model's context, answer included: then the margin gives way.
    prompts.most_new.push_back(std::min(wanted, std::max<std::int64_t>(1, limit - length)));
    prompts.longest = std::max(prompts.longest, length + prompts.most_new.back());
    prompts.questions[q].erase(prompts.questions[q].begin(),
                               prompts.questions[q].begin() + static_cast<std::ptrdiff_t>(shared));
  }
  return prompts;
}

void Evaluation::answer(const Document& document, const std::function<void(std::int64_t)>& progress) {
  check_cancel();
  const Prompts prompts = encode(document);
  ContextOptions context_options = options_.context;
  if (context_options.max_tokens == 0) context_options.max_tokens = prompts.longest;
  Context context(model_, context_options);
  std::vector<MethodId> methods;
  for (const NamedSpec& s : specs_)
    methods.push_back(s.spec.name == "full" ? kDense : context.attach(s.spec));
  if (!prompts.context.empty()) context.prefill(prompts.context, progress);
  context.build_indexes();
  for (std::size_t q = 0; q < document.samples.size(); ++q) {
    const Sample& sample = samples_[document.samples[q]];
    for (std::size_t m = 0; m < specs_.size(); ++m) {
      if (records_.find(sample, specs_[m].name) != nullptr) continue;
      records_.add(sample, specs_[m].name, ask(context, methods[m], sample, prompts, q));
      context.roll_back(context.indexed_tokens());
    }
  }
}

Answer Evaluation::ask(Context& context, MethodId method, const Sample& sample, const Prompts& prompts,
                       std::size_t question) const {
  GenerateOptions generate;
  generate.max_new_tokens = prompts.most_new[question];
  generate.stop = {options_.stop};
  if (options_.protocol.kind == Protocol::Kind::decode_sparse) generate.sparse_prompt_tokens = 0;
  if (options_.protocol.kind == Protocol::Kind::last)
    generate.sparse_prompt_tokens = options_.protocol.tokens;
  Generation g = context.generate(prompts.questions[question], method, generate);
  Answer answer = {.text = std::move(g.text),
                   .tokens = std::move(g.tokens),
                   .seconds = g.prompt_seconds + g.decode_seconds,
                   .work = std::move(g.work)};
  answer.score = score(answer.text, sample);
  return answer;
}

/// One row for each method over all samples of a task and length.
std::vector<EvalRow> Evaluation::rows_of(const std::string& task, std::int64_t tokens) const {
  std::vector<EvalRow> rows;
  for (const NamedSpec& s : specs_) {
    EvalRow row = {.attention = s.name, .task = task, .tokens = tokens};
    WorkReport work;
    std::vector<double> differences;        // percent points, per sample
    std::vector<std::int64_t> of_document;  // per sample
    for (std::size_t d = 0; d < documents_.size(); ++d) {
      for (const std::size_t i : documents_[d].samples) {
        if (samples_[i].task != task || samples_[i].tokens != tokens) continue;
        const Answer& answer = *records_.find(samples_[i], s.name);
        const Answer& full = *records_.find(samples_[i], specs_.front().name);
        row.n += 1;
        row.score += 100 * answer.score;
        row.agreement += answer.tokens == full.tokens ? 1 : 0;
        row.seconds += answer.seconds;
        work += answer.work;
        differences.push_back(100 * (answer.score - full.score));
        of_document.push_back(static_cast<std::int64_t>(d));
      }
    }
    row.score /= static_cast<double>(row.n);
    row.agreement /= static_cast<double>(row.n);
    row.density = work.density();
    row.selectivity = work.selectivity();
    row.dense_reason = work.dense_reason;
    row.notice = work.notice;
    row.difference = mean_by_document(differences, of_document);
    rows.push_back(std::move(row));
  }
  return rows;
}

EvalReport Evaluation::report() const {
  EvalReport report = {.model = model_->path().string(),
                       .protocol = options_.protocol.str(),
                       .device = std::string(name_of(options_.context.device)),
                       .rows = {}};
  std::set<std::pair<std::string, std::int64_t>> groups;
  for (const Sample& s : samples_) {
    if (!groups.insert({s.task, s.tokens}).second) continue;
    for (EvalRow& row : rows_of(s.task, s.tokens)) report.rows.push_back(std::move(row));
  }
  return report;
}

}  // namespace

Protocol Protocol::parse(std::string_view text) {
  if (text == "context-dense") return {Kind::context_dense, 0};
  if (text == "decode-sparse") return {Kind::decode_sparse, 0};
  if (text.starts_with("last:")) {
    Protocol protocol = {Kind::last, 0};
    const auto [end, error] = std::from_chars(text.data() + 5, text.data() + text.size(), protocol.tokens);
    if (error == std::errc() && end == text.data() + text.size() && protocol.tokens > 0) return protocol;
  }
  throw InputError(fmt::format(
      "--protocol: expected context-dense, decode-sparse or last:N with N from 1, found '{}'", text));
}

std::string Protocol::str() const {
  if (kind == Kind::last) return fmt::format("last:{}", tokens);
  return kind == Kind::decode_sparse ? "decode-sparse" : "context-dense";
}

Json EvalReport::json() const {
  const auto bound = [](const std::optional<double>& b) { return b ? Json(*b) : Json(); };
  Json results = Json::array();
  for (const EvalRow& r : rows) {
    results.push_back({{"attention", r.attention},
                       {"task", r.task},
                       {"tokens", r.tokens},
                       {"n", r.n},
                       {"score", r.score},
                       {"agreement", r.agreement},
                       {"density", r.density},
                       {"selectivity", r.selectivity},
                       {"difference", r.difference.mean},
                       {"difference_low", bound(r.difference.low)},
                       {"difference_high", bound(r.difference.high)},
                       {"documents", r.difference.documents},
                       {"seconds", r.seconds}});
    if (!r.notice.empty()) results.back()["notice"] = r.notice;
  }
  return {{"model", model}, {"protocol", protocol}, {"device", device}, {"results", results}};
}

std::string EvalReport::table() const {
  std::string text = fmt::format(
      "{} under {}; difference: points from full on the same samples, 95 % interval by document\n", model,
      protocol);
  std::string last;
  for (const EvalRow& r : rows) {
    const std::string group = fmt::format("{} {}", r.task, r.tokens);
    if (group != last) {
      text += fmt::format("\n{}: {} samples, {} documents\n{:34} {:>7} {:>26} {:>10} {:>9} {:>12}\n", group,
                          r.n, r.difference.documents, "attention", "score", "difference", "agreement",
                          "density", "selectivity");
    }
    last = group;
    const std::string interval = r.difference.low
                                     ? fmt::format("{:+.1f} [{:+.1f}, {:+.1f}]", r.difference.mean,
                                                   *r.difference.low, *r.difference.high)
                                     : fmt::format("{:+.1f}", r.difference.mean);
    text += fmt::format("{:34} {:>7.1f} {:>26} {:>10.3f} {:>9.4f} {:>12.5f}\n", r.attention, r.score,
                        interval, r.agreement, r.density, r.selectivity);
  }
  return text;
}

EvalReport evaluate(std::shared_ptr<const Model> model, const std::vector<Sample>& samples,
                    std::vector<NamedSpec> specs, const EvalOptions& options) {
  const auto full =
      std::find_if(specs.begin(), specs.end(), [](const NamedSpec& s) { return s.spec.name == "full"; });
  if (full == specs.end()) {
    specs.insert(specs.begin(), {"full", parse_spec("full")});
  } else {
    std::rotate(specs.begin(), full, full + 1);
  }
  Evaluation evaluation(std::move(model), samples, specs, options);
  evaluation.run();
  return evaluation.report();
}

}  // namespace lode
