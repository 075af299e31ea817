// SPDX-License-Identifier: Apache-2.0
#include "prompts.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>

#include "base/file.h"
#include "base/text.h"
#include "cli.h"
#include "engine/model.h"
#include "lodestone/error.h"
#include "model/config.h"

namespace lode::cli {

std::string unescaped(std::string_view text) {
  constexpr std::string_view kNames = "nt\\", kMeanings = "\n\t\\";
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool escape = text[i] == '\\' && i + 1 < text.size();
    const std::size_t known = escape ? kNames.find(text[i + 1]) : kNames.npos;
    result += known == kNames.npos ? text[i] : kMeanings[known];
    i += known == kNames.npos ? 0 : 1;
  }
  return result;
}

namespace {

void add_think_flag(CLI::App& verb, std::string& think, const std::string& help) {
  verb.add_option("--think", think, help)->check(CLI::IsMember({"on", "off", "low", "medium", "high"}));
}

}  // namespace

void add_chat_flags(CLI::App& verb, ChatFlags& flags) {
  verb.add_option("--chat", flags.chat,
                  "put the text into the model's chat template: auto (where the model has one), on or off; "
                  "`ask` then "
                  "goes on inside it")
      ->check(CLI::IsMember({"auto", "on", "off"}));
  verb.add_option("--system", flags.system, "the system message of that conversation; \\n is a line break");
  add_think_flag(
      verb, flags.think,
      "tell the chat template whether the model thinks before it answers, or how much: for templates that "
      "say it in front of the text, where a question's own --think comes too late");
  verb.add_option("--document-role", flags.document_role,
                  "whose message the text belongs to: user (the first question follows in the same message) "
                  "or system")
      ->check(CLI::IsMember({"user", "system"}));
}

IndexedText indexed_text(const Model& model, const ChatFlags& flags, const std::string& text,
                         const Attachments& before, const std::string& before_path, std::time_t now) {
  const std::string source = flags.chat == "off" ? "" : model.impl().chat_template;
  const std::string where = model.path().string() + ": chat template";
  if (source.empty()) {
    if (flags.chat == "on") throw InputError(where + ": expected one for --chat on, found none");
    if (!flags.system.empty() || flags.document_role != "user" || !flags.think.empty())
      throw InputError(
          "--system, --document-role and --think: expected a model with a chat template, and --chat not off");
    return plain_text(model, text);
  }
  DocumentChat::Settings settings = {.source = source,
                                     .system = unescaped(flags.system),
                                     .document_in_system = flags.document_role == "system",
                                     .now = now,
                                     .think = flags.think};
  if (const auto known = before.find(DocumentChat::kAttachment); known != before.end()) {
    const auto earlier =
        DocumentChat::from_json(known->second.text, before_path + ": section 'attached/chat'");
    if (earlier.source == settings.source && earlier.system == settings.system) settings.now = earlier.now;
  }
  const Thinking thinking = thinking_of(settings.think);
  const DocumentChat chat = document_chat(model, std::move(settings), where);
  IndexedText indexed = text_in_chat(model, chat, text);
  if (const std::string left = chat.chat().told(thinking).remark; !left.empty())
    indexed.remarks.push_back("--think: " + left);
  return indexed;
}

void add_prompt_flags(CLI::App& verb, PromptFlags& flags) {
  flags.question_template = kQuestionTemplate;
  for (std::size_t at = 0; (at = flags.question_template.find('\n', at)) != std::string::npos; at += 2)
    flags.question_template.replace(at, 1, "\\n");
  verb.add_option(
          "--chat", flags.chat,
          "go on inside the chat template that the text was indexed in: auto (where it was), on or off")
      ->check(CLI::IsMember({"auto", "on", "off"}));
  add_think_flag(
      verb, flags.think,
      "tell the chat template whether the model thinks before it answers, or how much; else as the text "
      "was indexed");
  verb.add_option("--think-tokens", flags.most_thoughts,
                  "most tokens of thoughts; behind them the answer begins. Else thoughts take as many as the "
                  "model likes")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30));
  verb.add_option(
      "--template", flags.question_template,
      "the prompt of a text that was indexed without a chat template; {question} is replaced, \\n and \\t "
      "are a line break and a tabulator, special tokens are recognised");
  verb.add_option(
          "--stop", flags.stop,
          "a string that ends an answer (in a chat template: none but the end of the turn); \\n is a line "
          "break; may be repeated")
      ->allow_extra_args(false);
}

void note_prompt_flags(const CLI::App& verb, PromptFlags& flags) {
  flags.template_given = verb.count("--template") > 0;
  flags.stop_given = verb.count("--stop") > 0;
}

Prompts::Prompts(const PromptFlags& flags, const Model& model, const Attachments& attachments,
                 std::string text, const std::string& where)
    : model_(model),
      text_(std::move(text)),
      template_(unescaped(flags.question_template)),
      most_thoughts_(flags.most_thoughts),
      encoder_(model.tokenizer()) {
  const auto stored = attachments.find(DocumentChat::kAttachment);
  const bool in_chat = stored != attachments.end();
  if (flags.chat == "on" && !in_chat)
    throw InputError(
        where +
        ": expected a text that was indexed in a chat template, for --chat on, found one without: "
        "index it again with --chat on");
  if (in_chat && flags.chat != "off") {
    if (flags.template_given)
      throw InputError(
          where +
          ": expected no --template, as the text was indexed in the model's chat template; --chat "
          "off asks outside it");
    chat_ = std::make_unique<DocumentChat>(document_chat(
        model, DocumentChat::from_json(stored->second.text, where + ": section 'attached/chat'"),
        where + ": chat template"));
  } else if (in_chat) {
    remark_ =
        "the text was indexed in a chat template; --chat off puts the question there without closing its "
        "turn";
  } else if (!flags.template_given && !model.impl().chat_template.empty()) {
    remark_ = "the text was indexed without the model's chat template: questions are put by --template";
  }
  if (!flags.think.empty()) {
    if (chat_ == nullptr)
      throw InputError(where +
                       ": expected a text that is asked in a chat template, for --think, found one without");
    thinking_ = thinking_of(flags.think);
    const std::string question = "?";
    if (const std::string left = chat_->tail(text_, {&question, 1}, thinking_).remark; !left.empty())
      remark_ = "--think: " + left;
  }
  if (chat_ == nullptr) fill_template(template_, "", "--template");
  if (chat_ == nullptr || flags.stop_given)
    for (const std::string& stop : flags.stop)
      if (!stop.empty()) stop_.push_back(unescaped(stop));
}

std::vector<TokenId> Prompts::of(std::span<const std::string> turns) const {
  if (chat_ != nullptr) return encoder_.encode(chat_->tail(text_, turns, thinking_).parts);
  constexpr std::string_view kSlot = "{question}";
  const std::size_t slot = template_.find(kSlot);
  std::vector<ChatPart> parts;
  for (std::size_t i = 0; i < turns.size(); ++i) {
    const bool question = i % 2 == 0;
    if (question) parts.push_back({template_.substr(0, slot)});
    parts.push_back({turns[i], static_cast<int>(i)});
    if (question) parts.push_back({template_.substr(slot + kSlot.size())});
  }
  return encoder_.encode(parts);
}

void Prompts::set_ends(GenerateOptions& options) const {
  options.stop = stop_;
  options.max_thought_tokens = most_thoughts_.value_or(-1);
}

std::string Prompts::why_empty(const Generation& answer, std::int64_t most_tokens) const {
  if (answer.text.find_first_not_of(" \n\t\r") != std::string::npos) return "";
  const bool thinking =
      !answer.stopped && answer.thought_tokens == std::ssize(answer.tokens) && answer.thought_tokens > 0;
  if (thinking && answer.thought_tokens < most_tokens)
    return fmt::format(
        "the model was still thinking when the context was full, {} tokens behind the question; a larger -c "
        "gives it more where the model's context goes on, --think-tokens keeps some for the answer",
        answer.thought_tokens);
  if (thinking)
    return fmt::format(
        "the model was still thinking when its {} tokens were used up; -n {} gives it more, --think-tokens "
        "keeps some for the answer",
        answer.thought_tokens, std::max<std::int64_t>(2048, 4 * answer.thought_tokens));
  const std::vector<TokenId>& eos = model_.config().eos;
  const TokenId last = answer.tokens.empty() ? -1 : answer.tokens.back();
  const bool ended = std::find(eos.begin(), eos.end(), last) != eos.end();
  const std::string hint = chat_ == nullptr ? "; --template may not be what this model was trained on" : "";
  if (answer.stopped && ended) return "the model ended its answer at once" + hint;
  if (answer.stopped) return "a stop string came first (--stop; --stop '' is none)";
  return fmt::format("its {} tokens are blanks or special tokens{}", answer.tokens.size(), hint);
}

}  // namespace lode::cli
