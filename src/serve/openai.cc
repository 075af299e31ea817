// SPDX-License-Identifier: Apache-2.0
// POST /v1/chat/completions, in OpenAI's shapes.
#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <utility>

#include "serve/conversation.h"

namespace lode::serve {

namespace {

constexpr int kMostChoices = 16;
constexpr std::size_t kMostStops = 16;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 20;

std::string finish_reason(const Answer& answer) {
  return answer.ending == "length" || answer.ending == "room" ? "length" : "stop";
}

Json usage_of(const std::vector<Answer>& answers) {
  std::int64_t generated = 0, thoughts = 0;
  for (const Answer& a : answers) {
    generated += a.answer_tokens;
    thoughts += a.thought_tokens;
  }
  const Answer& first = answers.front();
  return {{"prompt_tokens", first.prompt_tokens},
          {"completion_tokens", generated},
          {"total_tokens", first.prompt_tokens + generated},
          {"prompt_tokens_details", {{"cached_tokens", first.cached_tokens}}},
          {"completion_tokens_details", {{"reasoning_tokens", thoughts}}}};
}

/// As vLLM and llama.cpp's server name thoughts.
Json message_of(const Answer& answer) {
  Json message = {{"role", "assistant"}, {"content", answer.text}, {"refusal", nullptr}};
  if (!answer.thoughts.empty()) message["reasoning_content"] = answer.thoughts;
  return message;
}

class ChatVoice : public Voice {
 public:
  ChatVoice(const std::string& request_id, int choices, bool include_usage)
      : id_("chatcmpl-" + request_id.substr(request_id.find('_') + 1)),
        created_(std::time(nullptr)),
        choices_(choices),
        include_usage_(include_usage) {}

  Json whole(const std::vector<Answer>& answers, const Reuse& reuse) override {
    Json choices = Json::array();
    for (std::size_t i = 0; i < answers.size(); ++i)
      choices.push_back({{"index", i},
                         {"message", message_of(answers[i])},
                         {"logprobs", nullptr},
                         {"finish_reason", finish_reason(answers[i])}});
    Json body = envelope("chat.completion");
    body["model"] = answers.front().model;
    body["choices"] = choices;
    body["usage"] = usage_of(answers);
    body["lodestone"] = own_member(answers.front(), reuse);
    return body;
  }

  std::string opening(const Answer& known) override {
    model_ = known.model;
    std::string events;
    for (int i = 0; i < choices_; ++i)
      events +=
          event_of(chunk(static_cast<std::size_t>(i), {{"role", "assistant"}, {"content", ""}}, nullptr));
    return events;
  }
  std::string piece(std::size_t choice, std::string_view text) override {
    return event_of(chunk(choice, {{"content", text}}, nullptr));
  }
  std::string thought(std::size_t choice, std::string_view text) override {
    return event_of(chunk(choice, {{"reasoning_content", text}}, nullptr));
  }
  std::string end_of(std::size_t choice, const Answer& answer, const Reuse& reuse) override {
    Json end = chunk(choice, Json::object(), finish_reason(answer));
    end["lodestone"] = own_member(answer, reuse);
    return event_of(end);
  }
  std::string closing(const std::vector<Answer>& answers) override {
    std::string events;
    if (include_usage_) {
      Json last = envelope("chat.completion.chunk");
      last["choices"] = Json::array();
      last["usage"] = usage_of(answers);
      events = event_of(last);
    }
    return events + "data: [DONE]\n\n";
  }
  std::string failure(const ApiError& error) override {
    return "data: " + error_response("/v1/chat/completions", error).body + "\n\n";
  }

 private:
  Json envelope(const char* object) const {
    return {{"id", id_},
            {"object", object},
            {"created", created_},
            {"model", model_},
            {"system_fingerprint", nullptr}};
  }
  Json chunk(std::size_t choice, Json delta, Json reason) const {
    Json body = envelope("chat.completion.chunk");
    body["choices"] = Json::array({{{"index", choice},
                                    {"delta", std::move(delta)},
                                    {"logprobs", nullptr},
                                    {"finish_reason", std::move(reason)}}});
    if (include_usage_) body["usage"] = nullptr;
    return body;
  }

  std::string id_, model_;
  std::int64_t created_;
  int choices_;
  bool include_usage_;
};

/// Fields of OpenAI's that change the answer and are not there yet: refused, never overlooked.
void refuse_unsupported(const Fields& body) {
  for (const char* key : {"tools", "functions"})
    if (body.member(key).is_array() && !body.member(key).empty())
      body.wrong(key, "none (tools are not supported)");
  if (body.flag("logprobs").value_or(false))
    body.wrong("logprobs", "false (log probabilities are not supported)");
  if (body.has("top_logprobs")) body.wrong("top_logprobs", "none (log probabilities are not supported)");
  if (body.member("logit_bias").is_object() && !body.member("logit_bias").empty())
    body.wrong("logit_bias", "none (it is not supported)");
  for (const char* key : {"frequency_penalty", "presence_penalty"})
    if (body.number(key, -2, 2).value_or(0) != 0) body.wrong(key, "0 (penalties are not supported)");
}

/// `text`: the body as it came, since properties are written in the order in which the schema has them.
std::string schema_of(const Fields& body, std::string_view text) {
  if (!body.has("response_format")) return {};
  const Fields format(body.member("response_format"), "response_format");
  const std::string type = format.text("type").value_or("");
  if (type == "text") return {};
  if (type == "json_object") return R"({"type":"object"})";
  if (type != "json_schema") format.wrong("type", "'text', 'json_object' or 'json_schema'");
  const Fields holder(format.member("json_schema"), "response_format.json_schema");
  if (!holder.member("schema").is_object()) holder.wrong("schema", "an object");
  return body.in_order(text, "/response_format/json_schema/schema");
}

Sampling sampling_of(const Fields& body) {
  Sampling sampling;
  sampling.temperature = body.number("temperature", 0, 2).value_or(0);
  sampling.top_p = body.number("top_p", 0, 1).value_or(1);
  if (sampling.top_p == 0) sampling.top_p = 1e-9;  // the likeliest token alone
  sampling.top_k = static_cast<int>(body.integer("top_k", 0, 1 << 20).value_or(0));
  sampling.min_p = body.number("min_p", 0, 1).value_or(0);
  sampling.seed = static_cast<std::uint64_t>(body.integer("seed", INT64_MIN, INT64_MAX).value_or(0));
  return sampling;
}

void read_effort(const Fields& fields, Question& question) {
  const std::string before = std::exchange(question.effort, effort_of(fields, "reasoning_effort"));
  const bool on = !question.effort.empty();
  if (on && !before.empty() && before != question.effort)
    fields.wrong("reasoning_effort", "the same as in 'chat_template_kwargs', or one of both");
  if (question.think.value_or(on) != on)
    fields.wrong("reasoning_effort", on ? "'none', where 'chat_template_kwargs' tells the model not to think"
                                        : "an effort, where 'chat_template_kwargs' tells the model to think");
  question.think = on;
}

/// vLLM's field for what the chat template is told: here whether the model thinks, which templates call by two names,
/// and how much.
void read_template_kwargs(const Fields& body, Question& question) {
  if (!body.has("chat_template_kwargs")) return;
  const Fields told(body.member("chat_template_kwargs"), "chat_template_kwargs");
  told.expect_known({"enable_thinking", "thinking", "reasoning_effort"}, {});
  const auto enable = told.flag("enable_thinking"), thinking = told.flag("thinking");
  if (enable && thinking && *enable != *thinking)
    told.wrong("thinking", "the same as 'enable_thinking', or one of both");
  question.think = enable ? enable : thinking;
  if (told.has("reasoning_effort")) read_effort(told, question);
}

void read_thinking(const Fields& body, Question& question) {
  read_template_kwargs(body, question);
  if (body.has("reasoning_effort")) read_effort(body, question);
  question.max_thought_tokens = body.integer("thinking_token_budget", 0, kMostTokens).value_or(-1);
}

Conversation read_chat(const Fields& body, std::string_view text, bool& include_usage) {
  body.expect_known(
      {"model",
       "messages",
       "stream",
       "stream_options",
       "temperature",
       "top_p",
       "top_k",
       "min_p",
       "seed",
       "n",
       "stop",
       "max_tokens",
       "max_completion_tokens",
       "response_format",
       "chat_template_kwargs",
       "reasoning_effort",
       "thinking_token_budget",
       "context",
       "cachedContent",
       "attention",
       "exact",
       "sources",
       "tools",
       "functions",
       "logprobs",
       "top_logprobs",
       "logit_bias",
       "frequency_penalty",
       "presence_penalty"},
      {"user", "metadata", "store", "service_tier", "tool_choice", "parallel_tool_calls", "function_call",
       "verbosity", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "modalities"});
  refuse_unsupported(body);
  Conversation c;
  c.question.model = body.text("model").value_or("");
  read_own_fields(body, c.question);
  c.question.turns = read_turns(body);
  c.question.sampling = sampling_of(body);
  c.question.stop = body.texts("stop", kMostStops);
  const auto old_name = body.integer("max_tokens", 1, kMostTokens);
  c.question.max_new_tokens =
      body.integer("max_completion_tokens", 1, kMostTokens).value_or(old_name.value_or(0));
  c.question.schema = schema_of(body, text);
  read_thinking(body, c.question);
  c.choices = static_cast<int>(body.integer("n", 1, kMostChoices).value_or(1));
  c.stream = body.flag("stream").value_or(false);
  if (body.has("stream_options"))
    include_usage =
        Fields(body.member("stream_options"), "stream_options").flag("include_usage").value_or(false);
  return c;
}

}  // namespace

void answer_chat(Backend& backend, Metrics& metrics, const Call& call) {
  const Json json = parse_body(*call.request);
  bool include_usage = false;
  Conversation conversation = read_chat(Fields(json), call.request->body, include_usage);
  auto voice = std::make_unique<ChatVoice>(call.request->id, conversation.choices, include_usage);
  converse(backend, metrics, call, std::move(conversation), std::move(voice));
}

}  // namespace lode::serve
