// SPDX-License-Identifier: Apache-2.0
// POST /v1/messages, in Anthropic's shapes.
#include <fmt/format.h>

#include "serve/conversation.h"

namespace lode::serve {

namespace {

constexpr std::int64_t kMostTokens = std::int64_t{1} << 20;
constexpr std::size_t kMostStops = 16;

Json stop_reason(const Answer& answer) {
  if (answer.ending == "length" || answer.ending == "room") return "max_tokens";
  return answer.stop_string.empty() ? "end_turn" : "stop_sequence";
}
Json stop_sequence(const Answer& answer) {
  return answer.stop_string.empty() ? Json(nullptr) : Json(answer.stop_string);
}

Json usage_of(const Answer& answer) {
  return {{"input_tokens", answer.prompt_tokens - answer.cached_tokens},
          {"cache_creation_input_tokens", 0},
          {"cache_read_input_tokens", answer.cached_tokens},
          {"output_tokens", answer.answer_tokens}};
}

class MessageVoice : public Voice {
 public:
  explicit MessageVoice(const std::string& request_id)
      : id_("msg_" + request_id.substr(request_id.find('_') + 1)) {}

  Json whole(const std::vector<Answer>& answers, const Reuse& reuse) override {
    const Answer& answer = answers.front();
    Json message = envelope(answer);
    if (!answer.thoughts.empty())
      message["content"].push_back({{"type", "thinking"}, {"thinking", answer.thoughts}, {"signature", ""}});
    message["content"].push_back({{"type", "text"}, {"text", answer.text}, {"citations", cited(answer)}});
    message["stop_reason"] = stop_reason(answer);
    message["stop_sequence"] = stop_sequence(answer);
    message["lodestone"] = own_member(answer, reuse);
    return message;
  }

  std::string opening(const Answer& known) override {
    return event("message_start", {{"message", envelope(known)}});
  }
  std::string piece(std::size_t, std::string_view text) override {
    const std::string begin = text_block();
    return begin + delta({{"type", "text_delta"}, {"text", text}});
  }
  std::string thought(std::size_t, std::string_view text) override {
    const Json block = {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}};
    const std::string begin = open(Block::thinking, block);
    return begin + delta({{"type", "thinking_delta"}, {"thinking", text}});
  }
  std::string end_of(std::size_t, const Answer& answer, const Reuse& reuse) override {
    std::string events = text_block();
    for (const Json& citation : citations(answer))
      events += delta({{"type", "citations_delta"}, {"citation", citation}});
    events += event("content_block_stop", {{"index", index_}});
    return events +
           event("message_delta",
                 {{"delta", {{"stop_reason", stop_reason(answer)}, {"stop_sequence", stop_sequence(answer)}}},
                  {"usage", usage_of(answer)},
                  {"lodestone", own_member(answer, reuse)}});
  }
  std::string closing(const std::vector<Answer>&) override { return event("message_stop", Json::object()); }
  std::string failure(const ApiError& error) override {
    return fmt::format("event: error\ndata: {}\n\n", error_response("/v1/messages", error).body);
  }

 private:
  enum class Block { none, thinking, text };

  std::string text_block() {
    return open(Block::text, {{"type", "text"}, {"text", ""}, {"citations", nullptr}});
  }
  /// Ends the block before, where another one begins.
  std::string open(Block block, const Json& content) {
    if (block == block_) return {};
    const bool first = block_ == Block::none;
    std::string events = first ? "" : event("content_block_stop", {{"index", index_}});
    block_ = block;
    index_ += first ? 0 : 1;
    events += event("content_block_start", {{"index", index_}, {"content_block", content}});
    return first ? events + event("ping", Json::object()) : events;
  }
  std::string delta(const Json& delta) const {
    return event("content_block_delta", {{"index", index_}, {"delta", delta}});
  }
  Json envelope(const Answer& answer) const {
    return {{"id", id_},
            {"type", "message"},
            {"role", "assistant"},
            {"model", answer.model},
            {"content", Json::array()},
            {"stop_reason", nullptr},
            {"stop_sequence", nullptr},
            {"usage", usage_of(answer)}};
  }
  static std::string event(const char* name, Json data) {
    data["type"] = name;
    return event_of(data, name);
  }
  static Json cited(const Answer& answer) {
    Json all = citations(answer);
    return all.empty() ? Json(nullptr) : all;
  }

  std::string id_;
  Block block_ = Block::none;  ///< that is open
  int index_ = 0;              ///< its own
};

/// `text`: the body as it came, since properties are written in the order in which the schema has them.
std::string schema_of(const Fields& body, std::string_view text) {
  if (!body.has("output_config")) return {};
  const Fields config(body.member("output_config"), "output_config");
  if (!config.has("format")) return {};
  const Fields format(config.member("format"), "output_config.format");
  if (format.text("type").value_or("") != "json_schema") format.wrong("type", "'json_schema'");
  if (!format.member("schema").is_object()) format.wrong("schema", "an object");
  return body.in_order(text, "/output_config/format/schema");
}

/// Adaptive thoughts are as the template has them.
void read_thinking(const Fields& body, Question& question) {
  const Fields thinking(body.member("thinking"), "thinking");
  thinking.expect_known({"type", "budget_tokens"}, {"display"});
  const std::string type = thinking.text("type").value_or("");
  if (type != "enabled" && type != "disabled" && type != "adaptive")
    thinking.wrong("type", "'enabled', 'adaptive' or 'disabled'");
  if (type != "adaptive") question.think = type == "enabled";
  if (!thinking.has("budget_tokens")) return;
  if (type != "enabled") thinking.wrong("budget_tokens", "none beside a type other than 'enabled'");
  const auto budget = thinking.integer("budget_tokens", 1, kMostTokens);
  if (*budget >= question.max_new_tokens)
    thinking.wrong("budget_tokens", fmt::format("less than max_tokens ({})", question.max_new_tokens));
  question.max_thought_tokens = *budget;
}

/// Thoughts that are switched off have no effort; Anthropic's own models take it for the answer's, too.
void read_output_config(const Fields& body, Question& question) {
  const Fields config(body.member("output_config"), "output_config");
  config.expect_known({"format", "effort"}, {});
  if (!config.has("effort")) return;
  const std::string effort = effort_of(config, "effort");
  if (effort.empty()) config.wrong("effort", "'low', 'medium', 'high', 'xhigh' or 'max'");
  if (question.think.value_or(true))
    question.effort = effort;
  else
    question.notice = "'output_config.effort' is left aside, since 'thinking' is disabled";
}

Conversation read_message(const Fields& body, std::string_view text) {
  body.expect_known({"model", "messages", "max_tokens", "system", "stop_sequences", "stream", "temperature",
                     "top_p", "top_k", "context", "cachedContent", "attention", "exact", "sources", "tools",
                     "thinking", "output_config"},
                    {"metadata", "service_tier", "tool_choice", "container"});
  if (body.member("tools").is_array() && !body.member("tools").empty())
    body.wrong("tools", "none (tools are not supported)");
  Conversation c;
  c.question.model = body.text("model").value_or("");
  read_own_fields(body, c.question);
  c.question.turns = read_turns(body);
  if (body.has("system"))
    c.question.turns.insert(c.question.turns.begin(), {"system", content_text(body, "system")});
  const auto most = body.integer("max_tokens", 1, kMostTokens);
  if (!most) body.wrong("max_tokens", fmt::format("a whole number from 1 to {}", kMostTokens));
  c.question.max_new_tokens = *most;
  if (body.has("thinking")) read_thinking(body, c.question);
  if (body.has("output_config")) read_output_config(body, c.question);
  c.question.stop = body.texts("stop_sequences", kMostStops);
  c.question.sampling.temperature = body.number("temperature", 0, 1).value_or(0);
  c.question.sampling.top_p = std::max(body.number("top_p", 0, 1).value_or(1), 1e-9);
  c.question.sampling.top_k = static_cast<int>(body.integer("top_k", 0, 1 << 20).value_or(0));
  c.question.schema = schema_of(body, text);
  c.stream = body.flag("stream").value_or(false);
  return c;
}

}  // namespace

void answer_messages(Backend& backend, Metrics& metrics, const Call& call) {
  const Json json = parse_body(*call.request);
  Conversation conversation = read_message(Fields(json), call.request->body);
  auto voice = std::make_unique<MessageVoice>(call.request->id);
  converse(backend, metrics, call, std::move(conversation), std::move(voice));
}

}  // namespace lode::serve
