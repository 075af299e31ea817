// SPDX-License-Identifier: Apache-2.0
#include "serve/mcp.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/text.h"
#include "lodestone/error.h"
#include "serve/fields.h"
#include "serve/prompt.h"
#include "serve/service.h"

namespace lode::serve {

namespace {

constexpr std::array<const char*, 4> kVersions = {"2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"};
constexpr int kParseError = -32700, kInvalidRequest = -32600, kUnknownMethod = -32601,
              kInvalidParams = -32602;
constexpr std::int64_t kPassageTokens = 24, kMostAnswerTokens = 4096, kUsualAnswerTokens = 512,
                       kMostPassages = 12;
constexpr std::size_t kLongestLine = std::size_t{16} << 20;

Json text_field(const char* description) {
  return {{"type", "string"}, {"description", description}};
}
Json whole_field(const char* description, std::int64_t low, std::int64_t high) {
  return {{"type", "integer"}, {"description", description}, {"minimum", low}, {"maximum", high}};
}
Json object_schema(Json properties, std::vector<std::string> required) {
  return {{"type", "object"},
          {"properties", std::move(properties)},
          {"required", std::move(required)},
          {"additionalProperties", false}};
}

Json tool(const char* name, const char* title, const char* description, Json input) {
  return {{"name", name},
          {"title", title},
          {"description", description},
          {"inputSchema", std::move(input)},
          {"annotations", {{"readOnlyHint", true}, {"idempotentHint", true}, {"openWorldHint", false}}}};
}

Json tools() {
  const Json document = text_field("Name of a document, as list_documents gives it");
  const Json attention = text_field("Attention method; 'full' reads every key. Default: the document's own");
  return Json::array(
      {tool("list_documents", "List documents",
            "Lists the stored documents with their size and whether they can be asked.",
            object_schema(Json::object(), {})),
       tool("ask_document", "Ask a document",
            "Answers a question about the whole of one stored document, with the passages that the answer "
            "attended to.",
            object_schema({{"document", document},
                           {"question", text_field("The question")},
                           {"attention", attention},
                           {"max_tokens", whole_field("Most tokens of the answer", 1, kMostAnswerTokens)}},
                          {"document", "question"})),
       tool("find_passages", "Find passages",
            "Finds the passages of one stored document that matter to a question or topic, heaviest first, "
            "word for word.",
            object_schema({{"document", document},
                           {"query", text_field("What the passages should be about")},
                           {"attention", attention},
                           {"count", whole_field("Most passages", 1, kMostPassages)}},
                          {"document", "query"}))});
}

Json passages_of(const Answer& answer, std::size_t count) {
  Json all = own_member(answer, {}).at("sources");
  while (all.size() > count) all.erase(all.size() - 1);
  return all;
}

std::string passages_text(const Json& passages) {
  std::string text;
  for (const Json& p : passages) {
    const std::string page = p.contains("start_page_number")
                                 ? fmt::format("page {}, ", p["start_page_number"].get<std::int64_t>())
                                 : "";
    text += fmt::format("[{}line {}; {:.0f} %] {}\n", page, p["line"].get<std::int64_t>(),
                        100 * p["weight"].get<double>(), p["cited_text"].get<std::string>());
  }
  return text.empty() ? "No passage stands out.\n" : text;
}

Json content(std::string text, Json structured) {
  return {{"content", Json::array({{{"type", "text"}, {"text", std::move(text)}}})},
          {"structuredContent", std::move(structured)},
          {"isError", false}};
}

Json result_of(const Answer& answer, bool passages_only, std::size_t count) {
  Json passages = passages_of(answer, count);
  if (passages_only) {
    std::string text = passages_text(passages);
    return content(std::move(text), {{"document", answer.context}, {"passages", std::move(passages)}});
  }
  std::string text = answer.text.empty() && !answer.notice.empty() ? "(" + answer.notice + ")" : answer.text;
  if (!passages.empty()) text += "\n\nPassages that the answer attended to:\n" + passages_text(passages);
  return content(std::move(text), {{"answer", answer.text},
                                   {"document", answer.context},
                                   {"attention", answer.attention},
                                   {"density", answer.density},
                                   {"complete", answer.ending == "stop"},
                                   {"sources", std::move(passages)}});
}

}  // namespace

McpServer::McpServer(Backend& backend, std::string version, std::function<void(std::string)> send)
    : backend_(backend), version_(std::move(version)), send_(std::move(send)) {}

void McpServer::emit(const Json& message) {
  const std::lock_guard lock(sending_);
  send_(dump(message));
}
void McpServer::reply(const Json& id, Json result) {
  emit({{"jsonrpc", "2.0"}, {"id", id}, {"result", std::move(result)}});
}
void McpServer::reply_error(const Json& id, int code, const std::string& sentence) {
  emit({{"jsonrpc", "2.0"}, {"id", id}, {"error", {{"code", code}, {"message", sentence}}}});
}
/// A tool that could not do it: the model on the other side reads why.
void McpServer::reply_failure(const Json& id, const std::string& sentence) {
  reply(id, {{"content", Json::array({{{"type", "text"}, {"text", sentence}}})}, {"isError", true}});
}

void McpServer::receive(std::string_view line) {
  if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
  try {
    if (line.size() > kLongestLine)
      throw InputError(
          fmt::format("the message: expected at most {} bytes, found {}", kLongestLine, line.size()));
    handle(parse_json(line, "the message"));
  } catch (const InputError& error) {
    reply_error(nullptr, kParseError, error.what());
  }
}

void McpServer::handle(const Json& message) {
  const Json& id = json_member(message, "id");
  const Json& method = json_member(message, "method");
  const bool well_formed = message.is_object() && json_member(message, "jsonrpc") == "2.0";
  if (!well_formed || (!id.is_null() && !id.is_string() && !id.is_number_integer()))
    return reply_error(nullptr, kInvalidRequest,
                       "expected a JSON-RPC 2.0 object with an id that is a string or a whole number");
  if (method.is_null() && (json_has(message, "result") || json_has(message, "error")))
    return;  // we ask nothing
  if (!method.is_string()) return reply_error(id, kInvalidRequest, "expected a string 'method', found none");
  const Json& params = json_member(message, "params");
  if (!params.is_null() && !params.is_object())
    return reply_error(id, kInvalidRequest,
                       fmt::format("'params': expected an object, found {}", shown(params)));
  const auto name = method.get<std::string>();
  if (!id.is_null()) return handle_request(id, name, params);
  if (name == "notifications/cancelled") cancel(params);
}

void McpServer::handle_request(const Json& id, const std::string& method, const Json& params) {
  try {
    if (method == "initialize") return reply(id, initialize(params));
    if (method == "ping") return reply(id, Json::object());
    if (method == "tools/list") return reply(id, {{"tools", tools()}});
    if (method == "tools/call") return call_tool(id, params);
    reply_error(id, kUnknownMethod, fmt::format("there is no method '{}'", excerpt(method)));
  } catch (const ApiError& error) {
    reply_error(id, kInvalidParams, error.what());
  }
}

Json McpServer::initialize(const Json& params) const {
  const Json& wanted = json_member(params, "protocolVersion");
  const bool known = wanted.is_string() && std::find(kVersions.begin(), kVersions.end(),
                                                     wanted.get<std::string>()) != kVersions.end();
  return {{"protocolVersion", known ? wanted : Json(kVersions.front())},
          {"capabilities", {{"tools", {{"listChanged", false}}}}},
          {"serverInfo", {{"name", "lodestone"}, {"title", "Lodestone"}, {"version", version_}}},
          {"instructions",
           "Documents here were read in full. Ask one with ask_document; find_passages gives its own words. "
           "Answers name "
           "the passages that they rest on: check them."}};
}

void McpServer::call_tool(const Json& id, const Json& params) {
  const Fields call(params, "params");
  const std::string name = call.text("name").value_or("");
  static const Json kNone = Json::object();
  const Json& arguments = call.has("arguments") ? call.member("arguments") : kNone;
  if (name == "list_documents") {
    Fields(arguments, "arguments").expect_known({}, {});
    return reply(id, list_documents());
  }
  if (name == "ask_document" || name == "find_passages") return ask(id, arguments, name == "find_passages");
  reply_error(id, kInvalidParams, fmt::format("there is no tool '{}'", excerpt(name)));
}

Json McpServer::list_documents() {
  Json documents = Json::array();
  std::string text;
  for (const ContextInfo& info : backend_.contexts()) {
    documents.push_back(context_json(info));
    text += fmt::format("{}: {}, {} tokens{}\n", info.name, name_of(info.state), info.tokens,
                        info.error.empty() ? "" : ": " + info.error);
  }
  return content(text.empty() ? "There are no documents.\n" : text, {{"documents", documents}});
}

void McpServer::ask(const Json& id, const Json& arguments, bool passages_only) {
  const Fields fields(arguments, "arguments");
  const char* const asked = passages_only ? "query" : "question";
  passages_only ? fields.expect_known({"document", "query", "attention", "count"}, {})
                : fields.expect_known({"document", "question", "attention", "max_tokens"}, {});
  for (const char* key : {"document", asked})
    if (fields.text(key).value_or("").empty()) fields.wrong(key, "a string that is not empty");
  Question question;
  question.context = *fields.text("document");
  question.turns = {{"user", *fields.text(asked)}};
  question.attention = fields.text("attention").value_or("");
  question.want_sources = true;
  question.max_new_tokens =
      passages_only ? kPassageTokens
                    : fields.integer("max_tokens", 1, kMostAnswerTokens).value_or(kUsualAnswerTokens);
  const auto count =
      static_cast<std::size_t>(passages_only ? fields.integer("count", 1, kMostPassages).value_or(5) : 5);
  const std::string known = dump(id);
  {
    const std::lock_guard lock(mutex_);
    if (!running_.emplace(known, 0).second)
      throw ApiError(400, "expected an id of its own for each request, found one twice");
  }
  Listener listener;
  listener.on_text = [](std::string_view) {};
  listener.on_answer = [this, id, known, passages_only, count](const Answer& answer) {
    // Who cancels a request expects no response to it.
    if (answer.ending != "cancelled") reply(id, result_of(answer, passages_only, count));
    ended(known);
  };
  listener.on_failure = [this, id, known](const ApiError& error) {
    reply_failure(id, error.what());
    ended(known);
  };
  try {
    const std::uint64_t number = backend_.ask(std::move(question), std::move(listener));
    const std::lock_guard lock(mutex_);
    if (const auto at = running_.find(known); at != running_.end()) at->second = number;
  } catch (const ApiError& error) {
    reply_failure(id, error.what());
    ended(known);
  }
}

void McpServer::cancel(const Json& params) {
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto at = running_.find(dump(json_member(params, "requestId")));
    if (at != running_.end()) number = at->second;
  }
  if (number != 0) backend_.cancel(number);
}

void McpServer::ended(const std::string& id) {
  const std::lock_guard lock(mutex_);
  running_.erase(id);
  idle_.notify_all();
}

void McpServer::finish() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [&] { return running_.empty(); });
}

}  // namespace lode::serve
