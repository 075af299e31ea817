// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <utility>

#include "base/text.h"
#include "engine/chat/indexed_text.h"
#include "engine/model.h"
#include "lodestone/chat.h"
#include "lodestone/error.h"
#include "text/question_template.h"

namespace lode {

ChatUse parse_chat_use(std::string_view text) {
  if (text == "auto") return ChatUse::automatic;
  if (text == "on") return ChatUse::on;
  if (text == "off") return ChatUse::off;
  throw InputError(fmt::format("chat: expected auto, on or off, found '{}'", excerpt(text)));
}

IndexedText indexed_text(const Model& model, const ChatOptions& options, const std::string& text,
                         const Attachments& before, const std::string& before_path) {
  const ChatNames& names = options.names;
  const std::string source = options.chat == ChatUse::off ? "" : model.impl().chat_template;
  const std::string where = model.path().string() + ": chat template";
  if (source.empty()) {
    if (options.chat == ChatUse::on)
      throw InputError(fmt::format("{}: expected one for {}, found none", where, names.on));
    if (!options.system.empty() || options.document_in_system || !options.think.empty())
      throw InputError(fmt::format("{}, {} and {}: expected a model with a chat template, and not {}",
                                   names.system, names.document_role, names.think, names.off));
    return plain_text(model, text);
  }
  DocumentChat::Settings settings = {.source = source,
                                     .system = options.system,
                                     .document_in_system = options.document_in_system,
                                     .now = options.now > 0 ? options.now : std::time(nullptr),
                                     .think = options.think};
  if (const auto known = before.find(DocumentChat::kAttachment); known != before.end()) {
    const auto earlier =
        DocumentChat::from_json(known->second.text, before_path + ": section 'attached/chat'");
    if (earlier.source == settings.source && earlier.system == settings.system) settings.now = earlier.now;
  }
  const Thinking thinking = thinking_of(settings.think, names.think);
  try {
    const DocumentChat chat = document_chat(model, std::move(settings), where);
    IndexedText indexed = text_in_chat(model, chat, text);
    if (const std::string left = chat.chat().told(thinking).remark; !left.empty())
      indexed.remarks.push_back(names.think + ": " + left);
    return indexed;
  } catch (const InputError& error) {
    if (names.off.empty()) throw;
    throw InputError(fmt::format("{}; {} indexes the text outside of it", error.what(), names.off));
  }
}

struct Prompts::Impl {
  const PromptOptions options;
  const std::string text, question_template;
  const PartEncoder encoder;
  std::optional<DocumentChat> chat;
  Thinking thinking = {};
  std::vector<std::string> stop = {};
  std::string remark = {};

  void open_chat(const Model& model, const Attachments& attachments, const std::string& where);
  void set_thinking(const std::string& where);
};

void Prompts::Impl::open_chat(const Model& model, const Attachments& attachments, const std::string& where) {
  const ChatNames& names = options.names;
  const auto stored = attachments.find(DocumentChat::kAttachment);
  const bool in_chat = stored != attachments.end();
  if (options.chat == ChatUse::on && !in_chat)
    throw InputError(
        fmt::format("{}: expected a text that was indexed in a chat template, for {}, found one without: "
                    "index it again with {}",
                    where, names.on, names.on));
  if (in_chat && options.chat != ChatUse::off) {
    if (options.question_template)
      throw InputError(
          fmt::format("{}: expected no {}, as the text was indexed in the model's chat template; {} asks "
                      "outside it",
                      where, names.question_template, names.off));
    chat.emplace(document_chat(
        model, DocumentChat::from_json(stored->second.text, where + ": section 'attached/chat'"),
        where + ": chat template"));
  } else if (in_chat) {
    remark = fmt::format(
        "the text was indexed in a chat template; {} puts the question there without closing its turn",
        names.off);
  } else if (!options.question_template && !model.impl().chat_template.empty()) {
    remark = fmt::format("the text was indexed without the model's chat template: questions are put by {}",
                         names.question_template);
  }
}

void Prompts::Impl::set_thinking(const std::string& where) {
  const std::string& name = options.names.think;
  if (options.think.empty()) return;
  if (!chat)
    throw InputError(fmt::format(
        "{}: expected a text that is asked in a chat template, for {}, found one without", where, name));
  thinking = thinking_of(options.think, name);
  const std::string question = "?";
  if (const std::string left = chat->tail(text, {&question, 1}, thinking).remark; !left.empty())
    remark = name + ": " + left;
}

Prompts::Prompts(const PromptOptions& options, const Model& model, const Attachments& attachments,
                 std::string text, const std::string& where)
    : impl_(new Impl{.options = options,
                     .text = std::move(text),
                     .question_template = options.question_template.value_or(kQuestionTemplate),
                     .encoder = PartEncoder(model.tokenizer()),
                     .chat = {}}) {
  impl_->open_chat(model, attachments, where);
  impl_->set_thinking(where);
  if (!impl_->chat) {
    fill_template(impl_->question_template, "", options.names.question_template.c_str());
    impl_->stop = {"\n"};
  }
  if (options.stop) impl_->stop = *options.stop;
}

Prompts::Prompts(const PromptOptions& options, const Document& document, const std::string& where)
    : Prompts(options, *document.model(), document.attachments(), document.text(), where) {}
Prompts::~Prompts() = default;
Prompts::Prompts(Prompts&&) noexcept = default;

bool Prompts::chat() const {
  return impl_->chat.has_value();
}
const std::string& Prompts::remark() const {
  return impl_->remark;
}

std::vector<TokenId> Prompts::of(std::span<const std::string> turns) const {
  if (impl_->chat) return impl_->encoder.encode(impl_->chat->tail(impl_->text, turns, impl_->thinking).parts);
  constexpr std::string_view kSlot = "{question}";
  const std::string& form = impl_->question_template;
  const std::size_t slot = form.find(kSlot);
  std::vector<ChatPart> parts;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const bool question = i % 2 == 0;
    if (question) parts.push_back({form.substr(0, slot)});
    parts.push_back({turns[i], static_cast<int>(i)});
    if (question) parts.push_back({form.substr(slot + kSlot.size())});
  }
  return impl_->encoder.encode(parts);
}

std::vector<TokenId> Prompts::of(const std::string& question) const {
  return of({&question, 1});
}

void Prompts::set_ends(GenerateOptions& options) const {
  options.stop = impl_->stop;
  options.max_thought_tokens = impl_->options.most_thoughts.value_or(-1);
}

}  // namespace lode
