// SPDX-License-Identifier: Apache-2.0
#include "serve/engine/prompting.h"

#include <ctime>

#include "engine/model.h"
#include "lodestone/error.h"
#include "model/config.h"
#include "serve/prompt_text.h"

namespace lode::serve {

namespace {

constexpr const char* kNoTemplate = "there is no chat template that could be told whether to think";

/// A request's fault, unlike those of files.
template <class Make>
auto of_request(Make make) {
  try {
    return make();
  } catch (const InputError& error) {
    throw ApiError(400, error.what());
  }
}

}  // namespace

std::vector<std::string> alternating(const std::vector<Turn>& turns) {
  std::vector<std::string> texts;
  for (const Turn& turn : turns) {
    const bool question = turn.role != "assistant", questions_turn = texts.size() % 2 == 0;
    if (question == questions_turn) {
      texts.push_back(turn.text);
    } else if (texts.empty()) {
      texts = {"", turn.text};
    } else {  // the same speaker goes on
      texts.back() += (texts.back().empty() ? "" : "\n\n") + turn.text;
    }
  }
  return texts;
}

Prompting::Prompting(std::shared_ptr<const Model> model, std::string question_template)
    : model_(std::move(model)),
      question_template_(std::move(question_template)),
      where_("the model's chat template"),
      encoder_(model_->tokenizer()) {
  const std::string& source = model_->impl().chat_template;
  const ModelConfig& config = model_->config();
  if (!source.empty())
    chat_.emplace(source, ChatTokens::of(model_->tokenizer(), config.bos, config.eos), where_);
}

Prompt Prompting::of(const std::vector<Turn>& turns, const Thinking& thinking) const {
  if (!chat_) {
    PromptText plain = plain_prompt(turns, question_template_, false);
    return {.tokens = model_->tokenizer().encode(plain.text, Tokenizer::Bos::as_template),
            .stop = std::move(plain.stop),
            .notice = thinking == Thinking() ? "" : kNoTemplate};
  }
  std::vector<ChatMessage> messages;
  for (const Turn& turn : turns) messages.push_back({turn.role, turn.text});
  return of_request([&] {
    const ChatTemplate::Told told = chat_->told(thinking);
    return Prompt{
        .tokens = encoder_.encode(chat_->render(messages, true, std::time(nullptr), told.variables)),
        .stop = {},
        .notice = told.remark};
  });
}

Prompt Prompting::behind(const Document& document, const std::vector<Turn>& turns,
                         const Thinking& thinking) const {
  const std::string* const stored = document.attachment(DocumentChat::kAttachment);
  if (stored == nullptr) {
    PromptText plain = plain_prompt(turns, question_template_, true);
    return {.tokens = model_->tokenizer().encode(plain.text, Tokenizer::Bos::none),
            .stop = std::move(plain.stop),
            .notice = thinking == Thinking() ? "" : kNoTemplate};
  }
  return of_request([&] {
    const DocumentChat chat =
        document_chat(*model_, DocumentChat::from_json(*stored, "the context's chat template"), where_);
    const DocumentChat::Tail tail = chat.tail(document.text(), alternating(turns), thinking);
    return Prompt{.tokens = encoder_.encode(tail.parts), .stop = {}, .notice = tail.remark};
  });
}

IndexedText Prompting::document(const std::string& text) const {
  return indexed_text(*model_, {.names = {.off = ""}}, text);  // no request turns the template off
}

std::shared_ptr<TokenFilter> Prompting::filter(const std::string& schema) {
  const Tokenizer& tokenizer = model_->tokenizer();
  std::call_once(ordered_, [&] { order_ = std::make_shared<const TokenOrder>(tokenizer); });
  auto grammar = std::make_shared<const SchemaGrammar>(grammar_of_schema(schema));
  return std::make_shared<Constraint>(std::move(grammar), order_, tokenizer, model_->config().eos);
}

}  // namespace lode::serve
