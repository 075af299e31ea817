// SPDX-License-Identifier: Apache-2.0
#include "serve/prompt.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/text.h"

namespace lode::serve {

namespace {

constexpr std::size_t kMostMessages = 4096, kMostParts = 4096;
constexpr double kCitedWeight = 0.05;  // of the sharp attention: what an answer is said to rest on

/// Whether a part is what a model thought in front of an earlier answer: clients send it back, templates leave it out.
bool is_thought(const Fields& part) {
  const std::string type = part.text("type").value_or("");
  return type == "thinking" || type == "redacted_thinking";
}

/// The text of one part of a message.
std::string part_text(const Json& json, const std::string& where) {
  const Fields part(json, where);
  const std::string type = part.text("type").value_or("");
  if (type == "text" || type == "input_text") {
    if (!part.has("text")) part.wrong("text", "a string");
    return *part.text("text");
  }
  if (type != "document")
    part.wrong("type", "'text' or a 'document' of plain text (this server's models read text alone)");
  const Fields source(part.member("source"), where + ".source");
  const std::string kind = source.text("type").value_or("");
  if (kind == "text") {
    if (!source.has("data")) source.wrong("data", "a string");
    return *source.text("data");
  }
  if (kind == "content") return content_text(source, "content");
  source.wrong("type", "'text' or 'content' (upload other files to /v1/contexts)");
}

Json citation(const Answer& answer, const Source& s) {
  Json json = {{"type", s.page_begin > 0 ? "page_location" : "char_location"},
               {"cited_text", s.text},
               {"document_index", 0},
               {"document_title", s.title.empty() ? answer.context : s.title}};
  if (s.page_begin > 0) {
    json["start_page_number"] = s.page_begin;
    json["end_page_number"] = s.page_end;
  } else {
    json["start_char_index"] = s.char_begin;
    json["end_char_index"] = s.char_end;
  }
  return json;
}

bool is_blank(std::string_view text) {
  return text.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

/// Takes [begin, end) out of a text, with the blanks around it.
std::string without(const std::string& text, std::size_t begin, std::size_t end) {
  constexpr const char* kBlanks = " \t\r\n";
  const std::size_t last = text.find_last_not_of(kBlanks, begin == 0 ? std::string::npos : begin - 1);
  std::string before = begin == 0 || last == std::string::npos ? "" : text.substr(0, last + 1);
  const std::size_t first = text.find_first_not_of(kBlanks, end);
  const std::string after = first == std::string::npos ? "" : text.substr(first);
  if (!before.empty() && !after.empty()) before += "\n\n";
  return before + after;
}

}  // namespace

std::string content_text(const Fields& message, const char* key) {
  const Json& content = message.member(key);
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array() || content.empty() || content.size() > kMostParts)
    message.wrong(key, fmt::format("a string or a list of 1 to {} parts", kMostParts));
  std::string text;
  bool first = true;
  for (std::size_t i = 0; i < content.size(); ++i) {
    const std::string where = fmt::format("{}[{}]", message.path_of(key), i);
    if (is_thought(Fields(content[i], where))) continue;
    if (!std::exchange(first, false)) text += "\n\n";
    text += part_text(content[i], where);
  }
  return text;
}

std::vector<Turn> read_turns(const Fields& body) {
  const Json& messages = body.member("messages");
  if (!messages.is_array() || messages.empty() || messages.size() > kMostMessages)
    body.wrong("messages", fmt::format("a list of 1 to {} messages", kMostMessages));
  std::vector<Turn> turns;
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Fields message(messages[i], fmt::format("messages[{}]", i));
    Turn turn;
    turn.role = message.text("role").value_or("");
    if (turn.role == "developer") turn.role = "system";
    if (turn.role != "system" && turn.role != "user" && turn.role != "assistant")
      message.wrong("role", "'system', 'developer', 'user' or 'assistant'");
    if (message.has("tool_calls")) message.wrong("tool_calls", "none (tools are not supported)");
    turn.text = content_text(message, "content");
    turns.push_back(std::move(turn));
  }
  if (turns.back().role != "user")
    throw ApiError(400, fmt::format("'messages': expected a last message of the user, found one of the {}",
                                    turns.back().role));
  if (is_blank(turns.back().text))
    throw ApiError(400, "'messages': expected a question in the last message, found an empty text");
  return turns;
}

Reuse find_document(Backend& backend, Question& question) {
  if (!question.context.empty()) return {.how = "named", .why = {}};
  Turn* at = nullptr;
  Recognised best;
  for (Turn& turn : question.turns) {
    if (turn.role == "assistant") continue;
    const auto found = backend.recognise(turn.text, question.model);
    if (!found || (at != nullptr && found->end - found->begin <= best.end - best.begin)) continue;
    best = *found;
    at = &turn;
  }
  if (at == nullptr) return {.how = "none", .why = "no stored document stands in the messages"};
  at->text = without(at->text, best.begin, best.end);
  question.context = best.context;
  std::erase_if(question.turns, [](const Turn& turn) { return is_blank(turn.text); });
  if (question.turns.empty() || question.turns.back().role != "user")
    throw ApiError(
        400, fmt::format("expected a question beside the stored document '{}', found none", best.context));
  return {.how = "recognised", .why = {}};
}

std::string effort_of(const Fields& fields, const char* key) {
  const std::string word = fields.text(key).value_or("");
  if (word == "low" || word == "medium" || word == "high") return word;
  if (word == "xhigh" || word == "max") return "high";
  if (word != "none" && word != "minimal")
    fields.wrong(key, "'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'");
  return {};
}

void read_own_fields(const Fields& body, Question& question) {
  const auto context = body.text("context");
  const auto cached = body.text("cachedContent");
  if (context && cached && *context != *cached)
    body.wrong("cachedContent", "the same as 'context', or none of both");
  question.context = context.value_or(cached.value_or(""));
  // Gemini calls them "cachedContents/NAME".
  constexpr std::string_view kPrefix = "cachedContents/";
  if (question.context.starts_with(kPrefix)) question.context.erase(0, kPrefix.size());
  if ((context || cached) && question.context.empty())
    body.wrong(context ? "context" : "cachedContent", "a name");
  if (const auto attention = body.text("attention")) {
    if (attention->empty()) body.wrong("attention", "a method, or none");
    question.attention = *attention;
  }
  question.exact = body.flag("exact").value_or(false);
  question.want_sources = body.flag("sources").value_or(true);
}

Json citations(const Answer& answer) {
  Json all = Json::array();
  for (const Source& source : answer.sources)
    if (source.weight >= kCitedWeight) all.push_back(citation(answer, source));
  return all;
}

Json own_member(const Answer& answer, const Reuse& reuse) {
  Json sources = Json::array();
  for (const Source& source : answer.sources) {
    sources.push_back(citation(answer, source));
    sources.back()["start_char_index"] = source.char_begin;
    sources.back()["end_char_index"] = source.char_end;
    sources.back()["text_start"] = source.text_begin;  // of the text of /v1/contexts/NAME/text
    sources.back()["text_end"] = source.text_end;
    sources.back()["weight"] = source.weight;
    sources.back()["line"] = source.line;
    sources.back()["token_begin"] = source.token_begin;
    sources.back()["token_end"] = source.token_end;
  }
  Json reused = {{"how", reuse.how}, {"tokens", answer.cached_tokens}};
  if (!answer.context.empty()) reused["context"] = answer.context;
  if (!reuse.why.empty()) reused["why"] = reuse.why;
  Json own = {{"attention", answer.attention},
              {"density", answer.density},
              {"sources", sources},
              {"reuse", reused},
              {"kv_bytes_read", answer.read_bytes},
              {"kv_bytes_full", answer.full_bytes},
              {"queued_ms", 1e3 * answer.queued_seconds},
              {"first_token_ms", 1e3 * answer.first_token_seconds},
              {"total_ms", 1e3 * answer.seconds}};
  if (answer.dense_steps > 0)
    own["exact"] = {{"drafted", answer.drafted},
                    {"accepted", answer.accepted},
                    {"dense_steps", answer.dense_steps},
                    {"draft_density", answer.draft_density}};
  if (!answer.why.empty()) own["why"] = answer.why;
  if (!answer.notice.empty()) own["notice"] = answer.notice;
  return own;
}

}  // namespace lode::serve
