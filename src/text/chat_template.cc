// SPDX-License-Identifier: Apache-2.0
#include "text/chat_template.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "base/text.h"
#include "lodestone/error.h"
#include "text/jinja/lexer.h"
#include "text/utf8.h"

namespace lode {

namespace {

using jinja::Text;
using jinja::Value;

constexpr const char* kBetween = "\n\n";  // document and first question

std::string text_of(const Tokenizer& tokenizer, std::span<const TokenId> ids) {
  return ids.empty() ? "" : tokenizer.decode(ids.first(1), false);
}

/// Whether a text is a token of its own, and a special one.
bool has_token(const Tokenizer& tokenizer, std::string_view text) {
  const auto ids = tokenizer.encode(text, Tokenizer::Bos::none, Tokenizer::Special::parsed);
  return ids.size() == 1 && tokenizer.is_special(ids.front());
}

std::vector<ChatPart> parts_of(const Text& text, std::size_t begin, std::size_t end) {
  std::vector<ChatPart> parts;
  const auto put = [&](std::size_t from, std::size_t to, int message) {
    if (from < to) parts.push_back({text.bytes().substr(from, to - from), message});
  };
  std::size_t done = begin;
  for (const jinja::Run& run : text.runs()) {
    if (run.end <= begin || run.begin >= end) continue;
    put(done, std::max(run.begin, done), -1);
    put(std::max(run.begin, begin), std::min(run.end, end), run.origin - 1);
    done = std::min(run.end, end);
  }
  put(done, end, -1);
  return parts;
}

/// A message as templates read it; its role is the program's own word, its content is not.
Value message_of(const std::string& role, const Text& content, bool as_parts) {
  Value value(content);
  if (as_parts) {
    value = Value::list({Value::mapping({{"type", "text"}, {"text", value}})});
  }
  return Value::mapping({{"role", Text(role, 1 << 20)}, {"content", value}});
}

}  // namespace

ChatTokens ChatTokens::of(const Tokenizer& tokenizer, std::span<const TokenId> bos,
                          std::span<const TokenId> eos) {
  return {text_of(tokenizer, bos), text_of(tokenizer, eos)};
}

Thinking thinking_of(std::string_view word, std::string_view where) {
  if (word.empty()) return {};
  if (word == "on" || word == "off") return {.on = word == "on", .effort = {}};
  if (word != "low" && word != "medium" && word != "high")
    throw InputError(
        fmt::format("{}: expected on, off, low, medium or high, found '{}'", where, excerpt(word)));
  return {.on = true, .effort = std::string(word)};
}

ChatTemplate::ChatTemplate(const std::string& source, ChatTokens tokens, std::string where)
    : template_(source, where), tokens_(std::move(tokens)), where_(std::move(where)) {}

Text ChatTemplate::render(std::span<const ChatMessage> messages, const Content& contents, bool as_parts,
                          bool open_answer, std::time_t now, const jinja::OrderedJson& variables) const {
  std::vector<Value> values;
  std::size_t bytes = variables.is_null() ? 0 : variables.dump().size();
  for (std::size_t i = 0; i < messages.size(); ++i) {
    values.push_back(message_of(messages[i].role, contents[i], as_parts));
    bytes += contents[i].size();
  }
  jinja::Template::Globals globals = {{"messages", Value::list(std::move(values))},
                                      {"add_generation_prompt", open_answer}};
  if (!tokens_.bos.empty()) globals.emplace_back("bos_token", tokens_.bos);
  if (!tokens_.eos.empty()) globals.emplace_back("eos_token", tokens_.eos);
  if (variables.is_object())
    for (const auto& [name, value] : variables.items()) globals.emplace_back(name, Value::of(value, 1 << 20));
  return template_.render(std::move(globals), now, bytes);
}

std::vector<ChatPart> ChatTemplate::render(std::span<const ChatMessage> messages, bool open_answer,
                                           std::time_t now, const jinja::OrderedJson& variables) const {
  Content contents;
  for (std::size_t i = 0; i < messages.size(); ++i)
    contents.emplace_back(messages[i].content, static_cast<int>(i) + 1);
  const auto all_there = [&](const Text& text) {
    return std::all_of(contents.begin(), contents.end(), [&](const Text& content) {
      return content.empty() ||
             std::any_of(text.runs().begin(), text.runs().end(),
                         [&](const jinja::Run& run) { return run.origin == content.first_origin(); });
    });
  };
  const Text text = render(messages, contents, false, open_answer, now, variables);
  if (all_there(text)) return parts_of(text, 0, text.size());
  // Some templates take contents as lists of parts alone, and leave out what is none.
  const Text listed = render(messages, contents, true, open_answer, now, variables);
  const Text& better = all_there(listed) ? listed : text;
  return parts_of(better, 0, better.size());
}

namespace {

/// Of a question: whether a model thinks, and how much, is said at its beginning or behind it. None: refused.
std::optional<std::string> text_told(const ChatTemplate& chat, std::optional<bool> on,
                                     const std::string& effort) {
  const std::vector<ChatMessage> question = {{"user", "?"}};
  jinja::OrderedJson variables = {{"reasoning_effort", effort}};
  if (on) variables.update({{"enable_thinking", *on}, {"thinking", *on}});
  std::string text;
  try {
    for (const ChatPart& part : chat.render(question, true, 0, variables)) text += part.text;
  } catch (const InputError&) {
    return std::nullopt;
  }
  return text;
}

}  // namespace

ChatTemplate::Told ChatTemplate::told(const Thinking& thinking) const {
  if (thinking == Thinking()) return {};
  const auto tried = [&](bool on, const std::string& effort) { return text_told(*this, on, effort); };
  const auto usual = tried(true, "high"), low = tried(true, "low"), none = tried(true, "none");
  const bool switched = usual != tried(false, "high"), graded = usual != low;
  // Mistral's templates refuse "low": "none" and "high" are their switch. gpt-oss's takes any word for an effort.
  const bool none_is_off = !switched && usual && !low && none && none != usual;
  const bool off = thinking.on && !*thinking.on, little = off && !switched && graded && !none_is_off;
  Told told;
  if (thinking.on) told.variables = {{"enable_thinking", *thinking.on}, {"thinking", *thinking.on}};
  std::string effort = little ? "low" : off ? "" : thinking.effort;
  if (none_is_off && effort.empty()) effort = off ? "none" : "high";
  const bool refused = usual && !effort.empty() && !tried(true, effort);
  if (refused) effort = "high";
  if (!effort.empty()) told.variables["reasoning_effort"] = effort;
  if (refused)
    told.remark = "the chat template does not know this effort: it was told 'high'";
  else if (little)
    told.remark = "the chat template cannot be told not to think: it was told to think little";
  else if (!effort.empty() && graded && !thinking.on &&
           text_told(*this, {}, "high") == text_told(*this, {}, "low"))
    told.remark = "the chat template heeds an effort only where it is told to think, too: it was left aside";
  else if (!effort.empty() && !graded)
    told.remark = switched ? "the chat template can be told whether to think, but not how much"
                           : "the chat template cannot be told how much to think";
  else if (thinking.on && effort.empty() && !switched)
    told.remark = "the chat template cannot be told whether to think";
  return told;
}

std::vector<TokenId> ChatTemplate::ends_of_turn(const Tokenizer& tokenizer) const {
  const std::vector<ChatMessage> messages = {{"user", "Question"}, {"assistant", "Answer"}, {"user", "More"}};
  const std::vector<ChatPart> parts = render(messages, true, 0);
  const auto answer =
      std::find_if(parts.begin(), parts.end(), [](const ChatPart& part) { return part.message == 1; });
  if (answer == parts.end() || answer + 1 == parts.end() || (answer + 1)->message != -1) return {};
  const std::vector<TokenId> tokens = tokenizer.encode(jinja::without_leading_space((answer + 1)->text),
                                                       Tokenizer::Bos::none, Tokenizer::Special::parsed);
  if (tokens.empty() || !tokenizer.is_special(tokens.front())) return {};
  if (tokenizer.decode({tokens.data(), 1}, false) == "<|end|>" && has_token(tokenizer, "<|return|>") &&
      has_token(tokenizer, "<|call|>"))
    return {};
  return {tokens.front()};
}

PartEncoder::PartEncoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {
  for (TokenId id = 0; id < tokenizer.vocab(); ++id)
    if (tokenizer.is_special(id))
      specials_.add(tokenizer.decode({&id, 1}, false), static_cast<std::size_t>(id));
}

/// Where content spells a special token the text is cut within it, so that no piece holds it.
std::vector<TokenId> PartEncoder::encode(std::span<const ChatPart> parts) const {
  std::string text;
  std::vector<jinja::Run> contents;
  for (const ChatPart& part : parts) {
    if (part.message >= 0 && !part.text.empty())
      contents.push_back({text.size(), text.size() + part.text.size(), 1});
    text += part.text;
  }
  const std::string_view all = text;
  std::vector<TokenId> tokens;
  std::size_t begin = 0;
  const auto put = [&](std::size_t end) {
    const auto piece =
        tokenizer_.encode(all.substr(begin, end - begin), Tokenizer::Bos::none, Tokenizer::Special::parsed);
    tokens.insert(tokens.end(), piece.begin(), piece.end());
    begin = end;
  };
  StringFinder::Match match{};
  for (std::size_t from = 0; specials_.next(all, from, match);) {
    const auto run = std::partition_point(contents.begin(), contents.end(),
                                          [&](const jinja::Run& r) { return r.end <= match.begin; });
    from = match.end;
    if (run == contents.end() || run->begin >= match.end) continue;
    from = match.begin + first_code_point(all.substr(match.begin)).bytes;
    put(from);
  }
  put(all.size());
  return tokens;
}

DocumentChat::DocumentChat(Settings settings, ChatTokens tokens, const std::string& where)
    : settings_(std::move(settings)),
      where_(where),
      template_(settings_.source, std::move(tokens), where),
      usual_(template_.told(thinking_of(settings_.think)).variables) {}

std::string DocumentChat::to_json() const {
  Json json = {{"template", settings_.source},
               {"system", settings_.system},
               {"document_role", settings_.document_in_system ? "system" : "user"},
               {"time", settings_.now}};
  if (!settings_.think.empty()) json["think"] = settings_.think;
  return json.dump();
}

DocumentChat::Settings DocumentChat::from_json(std::string_view json, const std::string& where) {
  const Json parsed = parse_json(json, where);
  const std::string role = json_string(parsed, "document_role", where);
  if (role != "user" && role != "system")
    throw InputError(fmt::format("{}: field 'document_role': expected user or system, found another", where));
  const std::string think = json_has(parsed, "think") ? json_string(parsed, "think", where) : "";
  thinking_of(think, where + ": field 'think'");
  return {.source = json_string(parsed, "template", where),
          .system = json_string(parsed, "system", where),
          .document_in_system = role == "system",
          .now = json_int(parsed, "time", where, 0, std::int64_t{1} << 40),
          .think = think};
}

/// A rendered conversation, and where the document lies in it.
struct DocumentChat::Cut {
  Text text;
  std::size_t begin = 0, end = 0;
};

DocumentChat::Cut DocumentChat::render(const std::string& document, std::span<const std::string> turns,
                                       const jinja::OrderedJson& variables) const {
  constexpr jinja::Origin kDocument = 1, kOther = 2;
  std::vector<ChatMessage> messages;
  ChatTemplate::Content contents;
  Text opening;
  if (!settings_.system.empty() || settings_.document_in_system) {
    Text system(settings_.system, kOther);
    if (settings_.document_in_system) {
      if (!system.empty()) system.append(kBetween);
      system.append(Text(document, kDocument));
    }
    messages.push_back({"system", ""});
    contents.push_back(std::move(system));
  }
  if (!settings_.document_in_system) {
    opening = Text(document, kDocument);
    opening.append(Text(kBetween, kOther));
  }
  for (std::size_t i = 0; i < turns.size(); ++i) {
    messages.push_back({i % 2 == 0 ? "user" : "assistant", ""});
    Text content = i == 0 ? opening : Text();
    content.append(Text(turns[i], kOther));
    contents.push_back(std::move(content));
  }
  const std::string_view core = jinja::without_trailing_space(jinja::without_leading_space(document));
  for (const bool as_parts : {false, true}) {
    Cut cut = {template_.render(messages, contents, as_parts, true, settings_.now, variables)};
    std::vector<jinja::Run> found;
    for (const jinja::Run& run : cut.text.runs())
      if (run.origin == kDocument) found.push_back(run);
    if (found.size() != 1) continue;
    cut.begin = found[0].begin;
    cut.end = found[0].end;
    const std::string_view there = cut.text.view().substr(cut.begin, cut.end - cut.begin);
    if (jinja::without_trailing_space(jinja::without_leading_space(there)) == core) return cut;
  }
  throw InputError(fmt::format(
      "{}: expected a template that gives a message's text once, as it is; this one does not", where_));
}

DocumentChat::Head DocumentChat::head(const std::string& document) const {
  const std::string question = "?";
  const Cut cut = render(document, {&question, 1}, usual_);
  return {.parts = parts_of(cut.text, 0, cut.end), .in_front = parts_of(cut.text, 0, cut.begin)};
}

DocumentChat::Tail DocumentChat::tail(const std::string& document, std::span<const std::string> turns,
                                      const Thinking& thinking) const {
  const auto behind = [](const Cut& cut) { return parts_of(cut.text, cut.end, cut.text.size()); };
  const Cut usual = render(document, turns, usual_);
  if (thinking == Thinking()) return {.parts = behind(usual), .remark = {}};
  const ChatTemplate::Told told = template_.told(thinking);
  const Cut cut = render(document, turns, told.variables);
  if (cut.text.view().substr(0, cut.end) != usual.text.view().substr(0, usual.end))
    return {.parts = behind(usual),
            .remark =
                "the chat template says in front of the text whether to think, or how much, which was read "
                "already: it goes on as the text was indexed"};
  return {.parts = behind(cut), .remark = told.remark};
}

}  // namespace lode
