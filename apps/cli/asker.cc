// SPDX-License-Identifier: Apache-2.0
#include "asker.h"

#include <array>
#include <limits>
#include <utility>

#include "cluster/shard_attention.h"
#include "engine/document.h"
#include "lodestone/error.h"
#include "ranks.h"

namespace lode::cli {

Asker::Asker(AskedText text, std::optional<double> audit_limit) : audit_limit_(audit_limit) {
  if (text.context.options().device == Device::cuda) {
    if (ranks() != nullptr) throw InputError("over several ranks: expected --device cpu, found cuda");
    text_.emplace(std::move(text));
    context_ = &text_->context;
    return;
  }
  const auto model = text.model;
  std::string words = source_of(text.context).text;
  document_ = Document::Impl::share(std::move(text.context), std::move(words), std::move(text.attachments));
  context_ = &document_->impl().context;
  if (ranks() != nullptr) share_out(*document_, *ranks());
  // One question at a time: what the machine has is its, and all ranks run the same steps.
  scheduler_ = std::make_unique<Scheduler>(
      model, SchedulerOptions{.max_sequences = 1, .memory = std::numeric_limits<std::int64_t>::max()});
}

Answer Asker::ask(const Question& question) {
  if (ranks() == nullptr) return scheduler_ ? ask_scheduler(question) : ask_context(question);
  const Traffic before = ranks()->sent(), chosen_before = selection_sent(*document_);
  Answer answer = ask_scheduler(question);
  const Traffic own = ranks()->sent() - before, chosen = selection_sent(*document_) - chosen_before;
  std::array<std::int64_t, 4> all = {own.messages, own.bytes, chosen.messages, chosen.bytes};
  ranks()->sum(all);
  told_ = {.all = {all[0], all[1]}, .selection = {all[2], all[3]}};
  return answer;
}

Answer Asker::ask_scheduler(const Question& question) {
  const Spec spec = question.method == kDense
                        ? parse_spec("full")
                        : context_->methods()[static_cast<std::size_t>(question.method)];
  return scheduler_
      ->submit({.document = document_,
                .prompt = question.prompt,
                .attention = spec,
                .options = question.options,
                .want_sources = question.want_sources,
                .exact = question.exact,
                .audit = question.exact ? 0 : context_->options().audit,
                .audit_limit = audit_limit_})
      .result.get();
}

Answer Asker::ask_context(const Question& question) {
  if (question.exact)
    throw InputError("--exact: expected --device cpu, where drafts are verified, found cuda");
  Context& context = text_->context;
  const std::int64_t indexed = context.indexed_tokens();
  Answer answer;
  answer.generation = context.generate(question.prompt, question.method, question.options,
                                       question.want_sources ? &answer.sources : nullptr);
  answer.full_layers = context.impl().audit.fallen_back();
  context.roll_back(indexed);
  return answer;
}

void Asker::set_neutral(std::vector<TokenId> prompt) {
  finder_.emplace(*context_, std::move(prompt),
                  [this](const std::vector<TokenId>& neutral, MethodId method, std::int64_t tokens) {
                    return ask({.prompt = neutral,
                                .method = method,
                                .options = {.max_new_tokens = tokens},
                                .want_sources = true})
                        .sources;
                  });
}

std::vector<Citation> Asker::sources(const Answer& answer, MethodId method, std::size_t count) {
  return finder_->find(answer.sources, method, count);
}

}  // namespace lode::cli
