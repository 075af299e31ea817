// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/eval.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "base/cancel.h"
#include "base/text.h"
#include "engine/batch.h"
#include "engine/document.h"
#include "engine/row_order.h"
#include "engine/running_answer.h"
#include "lab/eval/audit_result.h"
#include "lab/eval/fit_samples.h"
#include "lab/eval/records.h"
#include "lab/eval/scoring.h"
#include "lab/eval/settings.h"
#include "lab/eval/work_cost.h"
#include "lodestone/error.h"
#include "lodestone/scheduler.h"
#include "model/config.h"

namespace lode {

namespace {

/// A chat model answers in sentences: room for them, where a sample does not say how much it needs.
constexpr std::int64_t kChatAnswer = 128;
/// On a GPU a step of so many times more questions takes hardly more time.
constexpr int kGpuTogether = 4;

/// Samples that share a context, and are all in a chat template or all verbatim, in the order of the file.
struct SharedContext {
  std::vector<std::size_t> samples;
};

std::vector<SharedContext> documents_of(std::span<const Sample> samples) {
  std::vector<SharedContext> documents;
  std::map<std::pair<const std::string*, bool>, std::size_t> known;
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const auto [entry, is_new] =
        known.emplace(std::pair(samples[i].context.get(), samples[i].verbatim), documents.size());
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

/// A method of a context.
struct Asked {
  const NamedSpec* spec;
  MethodId method;
};

/// Whether answers by a method are found as branches of the context, several at once. A GPU's batch does not audit, and
/// there a question alone is fastest in place.
bool branches(const Context& context, const Asked& asked, const EvalOptions& options) {
  if (context.tokens() == 0) return false;
  const bool on_gpu = context.options().device == Device::cuda;
  if (on_gpu && (options.together == 1 || options.context.audit > 0 || options.order_rows)) return false;
  return asked_together(context.impl(), asked.method);
}

/// A context that is read and indexed, and answers to questions about it: as branches of it, several at once, or in
/// place, one after another.
class Questions {
 public:
  using Found = std::function<void(Answer)>;

  Questions(Context context, bool branches, const EvalOptions& options)
      : options_(options), context_(std::move(context)) {
    if (!branches) return;
    const auto model = context_->impl().model;
    // On a GPU what it has left bounds the sequences that are in work.
    const Device device = context_->options().device;
    const std::int64_t memory = device == Device::cuda ? 0 : std::numeric_limits<std::int64_t>::max();
    document_ = Document::Impl::share(std::move(*context_), {}, {});
    context_.reset();
    scheduler_.emplace(
        model, SchedulerOptions{.max_sequences = together(device), .memory = memory, .device = device});
  }

  /// The context, once all that was asked is found. Nothing can be asked then.
  Context take_back() {
    finish();
    if (!document_) return std::move(*context_);
    scheduler_.reset();
    return Document::Impl::take_back(std::move(document_));
  }

  /// The prompt, for answers under several methods before which it attends densely; null where each reads it itself:
  /// branches on a GPU cannot begin with the tokens of another.
  std::shared_ptr<const ReadPrompt> read(const std::vector<TokenId>& prompt) {
    if (document_ && document_->impl().parts().gpu != nullptr) return nullptr;
    if (document_) return read_prompt(document_, prompt);
    context_->roll_back(context_->indexed_tokens());
    return read_prompt(context_->impl(), prompt);
  }
  /// `found` is told the answer now or later, in the order of the questions.
  void ask(Request request, const Asked& by, Found found);
  /// All that was asked is found.
  void finish() {
    while (!waiting_.empty()) take_first();
  }
  /// The same after something went wrong: only what has been found by itself.
  void give_up() noexcept;

 private:
  struct Waiting {
    Ticket<Answer> ticket;
    Found found;
  };
  int together(Device device) const {
    return device == Device::cuda ? options_.together * kGpuTogether : options_.together;
  }
  void take_first() {
    const Waiting first = std::move(waiting_.front());
    waiting_.pop_front();
    first.found(first.ticket.result.get());
  }

  const EvalOptions& options_;
  std::optional<Context> context_;  // in place
  std::shared_ptr<const Document> document_;
  std::optional<Scheduler> scheduler_;
  std::deque<Waiting> waiting_;
};

void Questions::ask(Request request, const Asked& by, Found found) {
  const Context::Impl& context = document_ ? document_->impl().parts() : context_->impl();
  // A method that chooses by the prompt reads it itself.
  if (by.method != kDense && chooses_by_prompt(context.methods.at(static_cast<std::size_t>(by.method))))
    request.read = nullptr;
  request.audit = options_.context.audit;
  request.audit_limit = options_.audit_limit;
  const double read_seconds = request.read != nullptr ? request.read->seconds : 0;
  if (!scheduler_) {
    if (request.read == nullptr) context_->roll_back(context_->indexed_tokens());
    Answer answer = answer_in_place(context_->impl(), by.method, std::move(request));
    answer.step_seconds = answer.generation.prompt_seconds + answer.generation.decode_seconds;
    return found(std::move(answer));
  }
  request.document = document_;
  request.attention = by.method == kDense ? parse_spec("full") : by.spec->spec;
  waiting_.push_back(
      {scheduler_->submit(std::move(request)), [found = std::move(found), read_seconds](Answer answer) {
         answer.step_seconds += read_seconds;
         found(std::move(answer));
       }});
  while (std::ssize(waiting_) > 2 * together(document_->impl().parts().options.device)) take_first();
}

void Questions::give_up() noexcept {
  for (; !waiting_.empty();) {
    try {
      take_first();
    } catch (...) {  // the first that went wrong is what is told
    }
  }
}

/// One row of a method over all samples of a task and length.
EvalRow row_of(std::span<const Sample> samples, const std::vector<SharedContext>& documents,
               const EvalRow& group, const NamedSpec& spec, const NamedSpec& reference,
               const Records& records) {
  EvalRow row = group;
  WorkReport work;
  std::vector<double> differences;        // percent points, per sample
  std::vector<std::int64_t> of_document;  // per sample
  for (std::size_t d = 0; d < documents.size(); ++d) {
    for (const std::size_t i : documents[d].samples) {
      if (samples[i].task != row.task || samples[i].tokens != row.tokens) continue;
      const AnswerRecord& answer = *records.find(samples[i], spec.name, spec.files);
      const AnswerRecord& full = *records.find(samples[i], reference.name, reference.files);
      row.n += 1;
      row.score += 100 * answer.score;
      row.agreement += answer.tokens == full.tokens ? 1 : 0;
      row.seconds += answer.seconds;
      work += answer.work;
      row.back_to_full += answer.full_layers.empty() ? 0 : 1;
      differences.push_back(100 * (answer.score - full.score));
      of_document.push_back(static_cast<std::int64_t>(d));
    }
  }
  row.score /= static_cast<double>(row.n);
  row.agreement /= static_cast<double>(row.n);
  row.density = work.density();
  row.selectivity = work.selectivity();
  row.selector_share = work.full_bytes > 0
                           ? static_cast<double>(work.selector_bytes) / static_cast<double>(work.full_bytes)
                           : 0;
  row.dense_reason = work.dense_reason;
  row.notice = work.notice;
  row.work = work;
  row.difference = difference_by_document(differences, of_document);
  return row;
}

}  // namespace

struct Answering::Impl {
  std::shared_ptr<const Model> model;
  std::span<const Sample> samples;
  std::span<const NamedSpec> specs;
  std::span<const EvalPass> passes;
  const EvalOptions& options;
  std::vector<SharedContext> documents;

  bool is_pending(std::size_t sample, const NamedSpec& spec, const EvalPass& pass) const;
  std::int64_t pending(const SharedContext& document, const NamedSpec& spec,
                       std::span<const EvalPass> of) const;
  std::int64_t tokens_of(const SharedContext& document) const;  ///< of the context, about
  std::int64_t cost(const SharedContext& document, std::span<const EvalPass> of) const;
  /// Passes whose contexts are prefilled alike.
  std::vector<std::span<const EvalPass>> groups() const;
  Prompts encode(const SharedContext& document, const Protocol& protocol) const;
  void answer(const SharedContext& document, std::span<const EvalPass> of,
              const std::function<void(std::int64_t)>& progress) const;
  void ask_all(Questions& questions, std::span<const Asked> asked, const SharedContext& document,
               const Prompts& prompts, std::span<const EvalPass> of,
               const std::function<void(std::int64_t)>& found) const;
  void ask(Questions& questions, std::span<const Asked> asked, const Sample& sample, const Prompts& prompts,
           std::size_t question, const EvalPass& pass, const std::function<void()>& done) const;
  void ask_reader(const SharedContext& document, const Prompts& prompts, const ContextOptions& context,
                  const EvalPass& pass, const std::function<void(std::int64_t)>& progress) const;
  GenerateOptions generate_options(const Sample& sample, const Prompts& prompts, std::size_t question) const;
  /// The template that a sample stands in; null: none.
  const DocumentChat* chat_of(const Sample& sample) const {
    return sample.verbatim ? nullptr : options.chat.get();
  }
  std::vector<TokenId> encode_context(const Sample& sample) const;
  std::vector<TokenId> encode_prompt(const Sample& sample, std::span<const TokenId> context) const;
};

bool Answering::Impl::is_pending(std::size_t sample, const NamedSpec& spec, const EvalPass& pass) const {
  if (options.wanted && !options.wanted(samples[sample], spec, pass.protocol)) return false;
  return pass.records->find(samples[sample], spec.name, spec.files) == nullptr;
}

/// Answers that a spec still has to give about a document.
std::int64_t Answering::Impl::pending(const SharedContext& document, const NamedSpec& spec,
                                      std::span<const EvalPass> of) const {
  std::int64_t answers = 0;
  for (const EvalPass& pass : of) {
    answers += std::count_if(document.samples.begin(), document.samples.end(),
                             [&](std::size_t i) { return is_pending(i, spec, pass); });
  }
  return answers;
}

std::int64_t Answering::Impl::tokens_of(const SharedContext& document) const {
  return static_cast<std::int64_t>(samples[document.samples.front()].context->size() / 4);
}

/// The context, an index for each method, and what is left to answer.
std::int64_t Answering::Impl::cost(const SharedContext& document, std::span<const EvalPass> of) const {
  const std::int64_t context = tokens_of(document);
  std::int64_t cost = 0;
  std::set<std::string> indexed;
  for (const NamedSpec& spec : specs) {
    if (pending(document, spec, of) > 0)
      cost += index_cost(spec.spec.name, context, indexed.insert(spec.spec.name).second);
  }
  for (const std::size_t i : document.samples) {
    for (const EvalPass& pass : of) {
      const auto left = std::count_if(specs.begin(), specs.end(),
                                      [&](const NamedSpec& spec) { return is_pending(i, spec, pass); });
      cost += answers_cost(pass.protocol, context, left);
    }
  }
  return cost == 0 ? 0 : prefill_cost(context) + cost;
}

std::vector<std::span<const EvalPass>> Answering::Impl::groups() const {
  const auto alone = [](const EvalPass& pass) { return pass.protocol.kind == Protocol::Kind::last; };
  std::vector<std::span<const EvalPass>> groups;
  for (std::size_t begin = 0, end = 0; begin < passes.size(); begin = end) {
    end = begin + 1;
    while (!alone(passes[begin]) && end < passes.size() && !alone(passes[end])) ++end;
    groups.push_back(passes.subspan(begin, end - begin));
  }
  return groups;
}

std::vector<TokenId> Answering::Impl::encode_context(const Sample& sample) const {
  const DocumentChat* const chat = chat_of(sample);
  if (chat == nullptr) return model->tokenizer().encode(*sample.context, Tokenizer::Bos::as_template);
  if (sample.context->find_first_not_of(" \t\r\n") == std::string::npos)
    throw InputError("sample '" + sample.id +
                     "': expected a context to put into the chat template, found none");
  return PartEncoder(model->tokenizer()).encode(chat->head(*sample.context).parts);
}

std::vector<TokenId> Answering::Impl::encode_prompt(const Sample& sample,
                                                    std::span<const TokenId> context) const {
  const DocumentChat* const chat = chat_of(sample);
  if (chat == nullptr)
    return model->tokenizer().encode(*sample.context + sample.question, Tokenizer::Bos::as_template);
  std::vector<TokenId> prompt(context.begin(), context.end());
  const auto tail =
      PartEncoder(model->tokenizer()).encode(chat->tail(*sample.context, {&sample.question, 1}).parts);
  prompt.insert(prompt.end(), tail.begin(), tail.end());
  return prompt;
}

/// The model reads context + question as one text. A tokenizer may join the two at the seam, so each question
/// is encoded together with the context, and the tokens that all of them share are what is prefilled.
Prompts Answering::Impl::encode(const SharedContext& document, const Protocol& protocol) const {
  Prompts prompts;
  prompts.context = encode_context(samples[document.samples.front()]);
  std::size_t shared = prompts.context.size();
  for (const std::size_t i : document.samples) {
    auto whole = encode_prompt(samples[i], prompts.context);
    if (whole.empty())
      throw InputError("sample '" + samples[i].id + "': expected a context or a question, found neither");
    const std::size_t most = std::min(shared, whole.size() - 1);
    const auto differs = std::mismatch(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(most),
                                       prompts.context.begin());
    shared = static_cast<std::size_t>(differs.first - whole.begin());
    if (protocol.kind == Protocol::Kind::last) {
      const std::int64_t before = static_cast<std::int64_t>(whole.size()) - protocol.tokens;
      shared = std::min(shared, static_cast<std::size_t>(std::max<std::int64_t>(1, before)));
    }
    prompts.questions.push_back(std::move(whole));
  }
  prompts.context.resize(shared);
  const std::int64_t limit = most_tokens(*model, options.context);
  for (std::size_t q = 0; q < prompts.questions.size(); ++q) {
    const auto length = static_cast<std::int64_t>(prompts.questions[q].size());
    const Sample& sample = samples[document.samples[q]];
    std::int64_t wanted = most_new_tokens(model->tokenizer(), sample);
    if (chat_of(sample) != nullptr && sample.max_new == 0) wanted = std::max(wanted, kChatAnswer);
    // A sample may be as long as the model's context, answer included: then the margin gives way.
    prompts.most_new.push_back(std::min(wanted, std::max<std::int64_t>(1, limit - length)));
    prompts.longest = std::max(prompts.longest, length + prompts.most_new.back());
    prompts.questions[q].erase(prompts.questions[q].begin(),
                               prompts.questions[q].begin() + static_cast<std::ptrdiff_t>(shared));
  }
  return prompts;
}

void Answering::Impl::answer(const SharedContext& document, std::span<const EvalPass> of,
                             const std::function<void(std::int64_t)>& progress) const {
  check_cancel();
  const Prompts prompts = encode(document, of.front().protocol);
  ContextOptions context_options = options.context;
  if (context_options.max_tokens == 0) context_options.max_tokens = prompts.longest;
  if (options.reader != nullptr) {
    for (const EvalPass& pass : of) ask_reader(document, prompts, context_options, pass, progress);
    return;
  }
  Context context(model, context_options);
  std::vector<Asked> asked;
  std::int64_t done = prefill_cost(tokens_of(document));
  std::set<std::string> indexed;
  for (const NamedSpec& s : specs) {
    if (pending(document, s, of) == 0) continue;
    done += index_cost(s.spec.name, tokens_of(document), indexed.insert(s.spec.name).second);
    asked.push_back({&s, s.spec.name == "full" ? kDense : context.attach(s.spec)});
  }
  // Densities are those of the order that was asked for, or nothing is scored.
  if (options.order_rows) expect_order(context);
  // The document's tokens were guessed: what is read of them counts as that share of the guess.
  const auto about = static_cast<double>(prefill_cost(tokens_of(document)));
  const auto all = static_cast<double>(prefill_cost(std::ssize(prompts.context)));
  if (!prompts.context.empty())
    context.prefill(prompts.context, [&](std::int64_t tokens) {
      progress(static_cast<std::int64_t>(about * static_cast<double>(prefill_cost(tokens)) / all));
    });
  context.build_indexes();
  if (options.order_rows) order_rows(context);
  progress(done);
  const auto in_place = std::stable_partition(asked.begin(), asked.end(),
                                              [&](const Asked& a) { return branches(context, a, options); });
  std::optional<Context> read(std::move(context));
  for (const bool as_branches : {true, false}) {
    const std::span<const Asked> some = as_branches ? std::span<const Asked>(asked.begin(), in_place)
                                                    : std::span<const Asked>(in_place, asked.end());
    if (some.empty()) continue;
    Questions questions(std::move(*read), as_branches, options);
    try {
      ask_all(questions, some, document, prompts, of, [&](std::int64_t cost) { progress(done += cost); });
      read.emplace(questions.take_back());
    } catch (...) {
      questions.give_up();
      throw;
    }
  }
}

void Answering::Impl::ask_all(Questions& questions, std::span<const Asked> asked,
                              const SharedContext& document, const Prompts& prompts,
                              std::span<const EvalPass> of,
                              const std::function<void(std::int64_t)>& found) const {
  for (std::size_t q = 0; q < document.samples.size(); ++q) {
    for (const EvalPass& pass : of) {
      std::vector<Asked> left;
      std::copy_if(asked.begin(), asked.end(), std::back_inserter(left),
                   [&](const Asked& a) { return is_pending(document.samples[q], *a.spec, pass); });
      const std::int64_t cost = answers_cost(pass.protocol, tokens_of(document), std::ssize(left));
      ask(questions, left, samples[document.samples[q]], prompts, q, pass, [found, cost] { found(cost); });
    }
  }
}

GenerateOptions Answering::Impl::generate_options(const Sample& sample, const Prompts& prompts,
                                                  std::size_t question) const {
  GenerateOptions generate;
  generate.max_new_tokens = prompts.most_new[question];
  if (sample.max_new == 0 && chat_of(sample) == nullptr) generate.stop = {options.stop};
  return generate;
}

void Answering::Impl::ask_reader(const SharedContext& document, const Prompts& prompts,
                                 const ContextOptions& context, const EvalPass& pass,
                                 const std::function<void(std::int64_t)>& progress) const {
  std::vector<const NamedSpec*> asked;
  std::vector<Spec> methods;
  for (const NamedSpec& spec : specs) {
    if (pending(document, spec, {&pass, 1}) == 0) continue;
    asked.push_back(&spec);
    if (spec.spec.name != "full") methods.push_back(spec.spec);
  }
  if (asked.empty()) return;
  options.reader->read(prompts.context, methods, context, progress);
  for (std::size_t q = 0; q < document.samples.size(); ++q) {
    const Sample& sample = samples[document.samples[q]];
    for (const NamedSpec* spec : asked) {
      if (!is_pending(document.samples[q], *spec, pass)) continue;
      Generation g =
          options.reader->ask(prompts.questions[q], spec->spec, generate_options(sample, prompts, q));
      AnswerRecord answer = {.text = std::move(g.text),
                             .tokens = std::move(g.tokens),
                             .seconds = g.prompt_seconds + g.decode_seconds,
                             .work = std::move(g.work)};
      answer.score = score(answer.text, sample);
      pass.records->add(sample, spec->name, std::move(answer), spec->files);
    }
  }
}

/// Under decode-sparse the question's tokens attend densely whatever the method: they are read once for all.
void Answering::Impl::ask(Questions& questions, std::span<const Asked> asked, const Sample& sample,
                          const Prompts& prompts, std::size_t question, const EvalPass& pass,
                          const std::function<void()>& done) const {
  if (asked.empty()) return;
  Request request;
  request.prompt = prompts.questions[question];
  request.options = generate_options(sample, prompts, question);
  if (pass.protocol.kind == Protocol::Kind::last) request.options.sparse_prompt_tokens = pass.protocol.tokens;
  if (pass.protocol.kind == Protocol::Kind::decode_sparse) {
    request.options.sparse_prompt_tokens = 0;
    request.read = questions.read(request.prompt);
  }
  for (const Asked& a : asked) {
    const bool last = &a == &asked.back();
    questions.ask(request, a, [&sample, &pass, done, last, spec = a.spec](Answer found) {
      Generation& g = found.generation;
      AnswerRecord answer = {.text = std::move(g.text),
                             .tokens = std::move(g.tokens),
                             .seconds = found.step_seconds,
                             .work = std::move(g.work)};
      answer.full_layers = std::move(found.full_layers);
      answer.score = score(answer.text, sample);
      pass.records->add(sample, spec->name, std::move(answer), spec->files);
      if (last) done();
    });
  }
}

Answering::Answering(std::shared_ptr<const Model> model, std::span<const Sample> samples,
                     std::span<const NamedSpec> specs, std::span<const EvalPass> passes,
                     const EvalOptions& options)
    : impl_(new Impl{std::move(model), samples, specs, passes, options, documents_of(samples)}) {}

Answering::~Answering() = default;

std::int64_t Answering::cost() const {
  std::int64_t total = 0;
  for (const auto& group : impl_->groups()) {
    for (const SharedContext& document : impl_->documents) total += impl_->cost(document, group);
  }
  return total;
}

void Answering::run(const std::function<void(std::int64_t)>& progress) {
  std::int64_t done = 0;
  for (const auto& group : impl_->groups()) {
    for (const SharedContext& document : impl_->documents) {
      const std::int64_t cost = impl_->cost(document, group);
      if (cost == 0) continue;
      const std::int64_t after = done + cost;
      impl_->answer(document, group, [&](std::int64_t tokens) { progress(std::min(done + tokens, after)); });
      progress(done = after);
    }
  }
}

Json record_settings(const Model& model, const Protocol& protocol, const ContextOptions& context,
                     const DocumentChat* chat) {
  Json settings = run_settings(model, context);
  settings.update({{"lodestone", "answers of eval"}, {"protocol", protocol.str()}});
  // Alone a question attends to fewer near keys there (gpu/batch.h).
  if (context.device == Device::cuda && context.audit == 0) settings["asked"] = "together";
  if (chat == nullptr) return settings;
  const DocumentChat::Settings& how = chat->settings();
  settings["chat"] = how.source;
  // Answers of two days would be to two prompts.
  if (how.source.find("strftime_now") != std::string::npos) settings[kBegunAt] = how.now;
  return settings;
}

EvalReport summarise(const Model& model, std::span<const Sample> samples, std::span<const NamedSpec> specs,
                     const EvalPass& pass, const ContextOptions& context) {
  EvalReport report = {.model = model.path().string(),
                       .protocol = pass.protocol.str(),
                       .device = std::string(name_of(context.device)),
                       .rows = {}};
  const std::vector<SharedContext> documents = documents_of(samples);
  std::set<std::pair<std::string, std::int64_t>> groups;
  for (const Sample& s : samples) {
    if (!groups.insert({s.task, s.tokens}).second) continue;
    for (const NamedSpec& spec : specs) {
      const EvalRow group = {.attention = spec.name, .task = s.task, .tokens = s.tokens};
      report.rows.push_back(row_of(samples, documents, group, spec, specs.front(), *pass.records));
    }
  }
  return report;
}

Protocol Protocol::parse(std::string_view text, std::string_view where) {
  if (text == "context-dense") return {Kind::context_dense, 0};
  if (text == "decode-sparse") return {Kind::decode_sparse, 0};
  if (text.starts_with("last:")) {
    Protocol protocol = {Kind::last, 0};
    const auto [end, error] = std::from_chars(text.data() + 5, text.data() + text.size(), protocol.tokens);
    if (error == std::errc() && end == text.data() + text.size() && protocol.tokens > 0) return protocol;
  }
  throw InputError(fmt::format(
      "{}: expected context-dense, decode-sparse or last:N with N from 1, found '{}'", where, excerpt(text)));
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
    if (!r.dense_reason.empty()) results.back()["dense_because"] = r.dense_reason;
    if (!r.notice.empty()) results.back()["notice"] = r.notice;
    put_audit(results.back(), r.work);
    if (r.work.audited > 0) results.back()["audit"]["back_to_full"] = r.back_to_full;
  }
  return {{"model", model}, {"protocol", protocol}, {"device", device}, {"results", results}};
}

namespace {

/// "needle, 4096 tokens: 8 samples, 2 documents"; samples of a user may tell no length.
std::string group_line(const EvalRow& row) {
  const std::string length = row.tokens > 0 ? fmt::format(", {} tokens", row.tokens) : "";
  return fmt::format("{}{}: {}, {}", row.task, length, counted(row.n, "sample"),
                     counted(row.difference.documents, "document"));
}

}  // namespace

std::string EvalReport::table() const {
  const bool few = std::any_of(rows.begin(), rows.end(), [](const EvalRow& r) { return !r.difference.low; });
  std::string text = fmt::format(
      "{} under {}\ndifference: points from full on the same samples, 95 % interval by document{}\n", model,
      protocol, few ? fmt::format("\n(none of fewer than {} documents)", kLeastDocuments) : "");
  for (std::size_t begin = 0, end = 0; begin < rows.size(); begin = end) {
    std::vector<std::vector<std::string>> lines = {
        {"attention", "score", "difference", "agreement", "density", "far keys"}};
    const std::string group = group_line(rows[begin]);
    for (; end < rows.size() && group_line(rows[end]) == group; ++end) {
      const EvalRow& r = rows[end];
      const std::string interval =
          r.difference.low ? fmt::format(" [{:+.1f}, {:+.1f}]", *r.difference.low, *r.difference.high) : "";
      lines.push_back({r.attention, fmt::format("{:.1f}", r.score),
                       fmt::format("{:+.1f}{}", r.difference.mean, interval),
                       fmt::format("{:.3f}", r.agreement), fmt::format("{:.2f} %", 100 * r.density),
                       fmt::format("{:.2f} %", 100 * r.selectivity)});
      if (r.back_to_full > 0)
        lines.push_back(
            {fmt::format("    layers went back to full attention in {} of {} answers", r.back_to_full, r.n)});
    }
    text += "\n" + group + "\n" + text_table(lines);
  }
  return text;
}

std::int64_t template_tokens(const Model& model, const DocumentChat& chat) {
  const std::string document = "x", question = "?";
  const PartEncoder encoder(model.tokenizer());
  return std::ssize(encoder.encode(chat.head(document).parts)) +
         std::ssize(encoder.encode(chat.tail(document, {&question, 1}).parts));
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
  if (options.order_rows && specs.size() != 2)
    throw InputError(fmt::format("expected one method beside full for the order of its clusters, found {}",
                                 specs.size() - 1));
  if (options.reader != nullptr && options.protocol.kind != Protocol::Kind::context_dense)
    throw InputError(fmt::format("over several ranks: expected --protocol context-dense, found {}",
                                 options.protocol.str()));
  for (NamedSpec& named : specs) named.files = files_hash(named.spec, model->path());
  Json settings = record_settings(*model, options.protocol, options.context, options.chat.get());
  if (options.audit_limit) settings["audit_limit"] = *options.audit_limit;
  if (options.order_rows) settings["order"] = "cluster";
  Records records(options.records, settings);
  const EvalPass pass = {options.protocol, &records};
  Answering answering(model, samples, specs, {&pass, 1}, options);
  Progress progress("eval", answering.cost(), "tokens", options.progress);
  answering.run([&](std::int64_t done) { progress.at(done); });
  return summarise(*model, samples, specs, pass, options.context);
}

}  // namespace lode
