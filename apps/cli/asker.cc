// SPDX-License-Identifier: Apache-2.0
#include "asker.h"

#include <algorithm>
#include <array>
#include <limits>
#include <span>
#include <utility>

#include "cluster/shard_attention.h"
#include "engine/document.h"
#include "engine/running_answer.h"
#include "lodestone/error.h"
#include "ranks.h"

namespace lode::cli {

Asker::Asker(AskedText text, std::optional<double> audit_limit)
    : attachments_(std::move(text.attachments)), audit_limit_(audit_limit) {
  open(std::move(text.context));
}

void Asker::open(Context context) {
  if (context.options().device == Device::cuda) {
    if (ranks() != nullptr) throw InputError("over several ranks: expected --device cpu, found cuda");
    own_.emplace(std::move(context));
    context_ = &*own_;
    return;
  }
  const auto model = context.impl().model;
  std::string words = source_of(context).text;
  document_ = Document::Impl::share(std::move(context), std::move(words), attachments_);
  context_ = &document_->impl().context;
  if (ranks() != nullptr) share_out(*document_, *ranks());
  // One question at a time: what the machine has is its, and all ranks run the same steps.
  scheduler_ = std::make_unique<Scheduler>(
      model, SchedulerOptions{.max_sequences = 1, .memory = std::numeric_limits<std::int64_t>::max()});
}

void Asker::forget() {
  cache_->clear();
  if (own_) own_->roll_back(own_->indexed_tokens());
}

void Asker::change(const std::function<void(Context&)>& change) {
  forget();
  if (own_) return change(*own_);
  scheduler_.reset();  // now nobody else holds the document
  Context context = Document::Impl::take_back(std::move(document_));
  const auto again = [&] {
    open(std::move(context));
    find_sources();
  };
  try {
    change(context);
  } catch (...) {
    again();
    throw;
  }
  again();
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
                .audit_limit = audit_limit_,
                .cache = question.goes_on ? cache_ : nullptr})
      .result.get();
}

Answer Asker::ask_context(const Question& question) {
  const std::int64_t indexed = own_->indexed_tokens();
  std::span<const TokenId> prompt = question.prompt;
  if (question.goes_on) {
    const auto held = own_->token_ids().subspan(static_cast<std::size_t>(indexed));
    const auto most = std::min(held.size(), std::max<std::size_t>(1, prompt.size()) - 1);
    const auto same =
        std::mismatch(held.begin(), held.begin() + static_cast<std::ptrdiff_t>(most), prompt.begin());
    own_->roll_back(indexed + (same.first - held.begin()));
    prompt = prompt.subspan(static_cast<std::size_t>(same.first - held.begin()));
  }
  Answer answer = answer_in_place(own_->impl(), question.method,
                                  {.document = {},
                                   .prompt = {prompt.begin(), prompt.end()},
                                   .attention = {},
                                   .options = question.options,
                                   .want_sources = question.want_sources,
                                   .exact = question.exact,
                                   .audit = own_->options().audit,
                                   .audit_limit = audit_limit_});
  if (!question.goes_on) own_->roll_back(indexed);
  return answer;
}

void Asker::set_neutral(std::vector<TokenId> prompt) {
  neutral_ = std::move(prompt);
  find_sources();
}

void Asker::find_sources() {
  finder_.emplace(*context_, neutral_,
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
