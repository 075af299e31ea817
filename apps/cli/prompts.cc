// SPDX-License-Identifier: Apache-2.0
#include "prompts.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "cli.h"
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

const ChatNames kFlags = {.on = "--chat on",
                          .off = "--chat off",
                          .system = "--system",
                          .document_role = "--document-role",
                          .think = "--think",
                          .question_template = "--template"};

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

ChatOptions chat_options(const ChatFlags& flags, std::time_t now) {
  return {.chat = parse_chat_use(flags.chat),
          .system = unescaped(flags.system),
          .document_in_system = flags.document_role == "system",
          .think = flags.think,
          .now = now,
          .names = kFlags};
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

PromptOptions prompt_options(const PromptFlags& flags) {
  PromptOptions options = {.chat = parse_chat_use(flags.chat),
                           .think = flags.think,
                           .most_thoughts = flags.most_thoughts,
                           .names = kFlags};
  if (flags.template_given) options.question_template = unescaped(flags.question_template);
  if (flags.stop_given) {
    options.stop.emplace();
    for (const std::string& stop : flags.stop)
      if (!stop.empty()) options.stop->push_back(unescaped(stop));
  }
  return options;
}

std::string why_empty(const Prompts& prompts, const Model& model, const Generation& answer,
                      std::int64_t most_tokens) {
  if (answer.text.find_first_not_of(" \n\t\r") != std::string::npos) return "";
  const bool thinking =
      !answer.stopped && answer.thought_tokens == std::ssize(answer.tokens) && answer.thought_tokens > 0;
  if (thinking && answer.thought_tokens < most_tokens)
    return fmt::format(
        "the model was still thinking when the context was full, {} behind the question; a larger -c "
        "gives it more where the model's context goes on, --think-tokens keeps some for the answer",
        counted(answer.thought_tokens, "token"));
  if (thinking)
    return fmt::format(
        "the model was still thinking when its {} used up; -n {} gives it more, --think-tokens "
        "keeps some for the answer",
        answer.thought_tokens == 1 ? "1 token was" : fmt::format("{} tokens were", answer.thought_tokens),
        std::max<std::int64_t>(2048, 4 * answer.thought_tokens));
  const std::vector<TokenId>& eos = model.config().eos;
  const TokenId last = answer.tokens.empty() ? -1 : answer.tokens.back();
  const bool ended = std::find(eos.begin(), eos.end(), last) != eos.end();
  const std::string hint = !prompts.chat() ? "; --template may not be what this model was trained on" : "";
  if (answer.stopped && ended) return "the model ended its answer at once" + hint;
  if (answer.stopped) return "a stop string came first (--stop; --stop '' is none)";
  return (answer.tokens.size() == 1
              ? std::string("its only token is a blank or a special token")
              : fmt::format("its {} tokens are blanks or special tokens", answer.tokens.size())) +
         hint;
}

}  // namespace lode::cli
