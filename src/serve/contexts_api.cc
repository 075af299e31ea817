// SPDX-License-Identifier: Apache-2.0
// Named contexts: POST /v1/contexts as JSON or as a form with a file, and what is said of one.
#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "lodestone/error.h"
#include "serve/fields.h"
#include "serve/multipart.h"
#include "serve/names.h"
#include "serve/service.h"

namespace lode::serve {

namespace {

constexpr std::size_t kMostSpecs = 16;
constexpr std::int64_t kLongestTtl = std::int64_t{10} * 365 * 86400;

/// Seconds as a number, or as Gemini writes them: "3600s".
std::int64_t ttl_of(const Fields& body) {
  if (!body.has("ttl")) return 0;
  if (!body.member("ttl").is_string()) return *body.integer("ttl", 1, kLongestTtl);
  std::string text = *body.text("ttl");
  if (text.ends_with('s')) text.pop_back();
  const bool digits =
      !text.empty() && text.size() <= 10 && text.find_first_not_of("0123456789") == std::string::npos;
  const std::int64_t seconds = digits ? std::stoll(text) : 0;
  if (seconds < 1 || seconds > kLongestTtl)
    body.wrong("ttl", fmt::format("seconds from 1 to {}, such as 3600 or \"3600s\"", kLongestTtl));
  return seconds;
}

Upload from_json(const HttpRequest& request) {
  const Json json = parse_body(request);
  const Fields body(json);
  body.expect_known({"name", "text", "model", "title", "attention", "ttl", "wait"}, {});
  Upload upload = {.context = {}, .wait = body.flag("wait").value_or(false)};
  NewContext& context = upload.context;
  if (!body.has("text")) body.wrong("text", "a string");
  context.text = *body.text("text");
  context.name = body.text("name").value_or("");
  context.title = body.text("title").value_or(context.name);
  context.model = body.text("model").value_or("");
  context.attentions = body.texts("attention", kMostSpecs);
  context.ttl_seconds = ttl_of(body);
  return upload;
}

Upload from_form(const HttpRequest& request) {
  Upload upload;
  NewContext& context = upload.context;
  bool has_text = false;
  Json fields = Json::object();
  for (const FormPart& part : parse_multipart(request.header("content-type"), request.body)) {
    if (part.name == "file" || part.name == "text") {
      if (std::exchange(has_text, true)) throw ApiError(400, "expected one part 'file' or 'text', found two");
      context.text = std::string(part.content);
      context.is_file = part.name == "file";
      if (!part.file_name.empty()) context.title = part.file_name;
    } else if (part.name == "name" || part.name == "model" || part.name == "title" ||
               part.name == "attention" || part.name == "ttl") {
      if (fields.contains(part.name))
        throw ApiError(400, fmt::format("expected one part '{}', found two", part.name));
      expect_utf8(part.content, fmt::format("the part '{}'", part.name));
      fields[part.name] = std::string(part.content);
    } else if (part.name == "wait") {
      if (part.content != "true" && part.content != "false")
        throw ApiError(
            400, fmt::format("the part 'wait': expected true or false, found '{}'", excerpt(part.content)));
      upload.wait = part.content == "true";
    } else {
      throw ApiError(
          400, fmt::format("expected the parts file, name, model, title, attention, ttl or wait, found '{}'",
                           excerpt(part.name)));
    }
  }
  if (!has_text) throw ApiError(400, "expected a part 'file' or 'text', found none");
  const Fields body(fields);
  context.title = body.text("title").value_or(context.title);
  context.name = body.text("name").value_or("");
  context.model = body.text("model").value_or("");
  context.attentions = body.texts("attention", kMostSpecs);
  context.ttl_seconds = ttl_of(body);
  return upload;
}

}  // namespace

Upload read_upload(const HttpRequest& request) {
  const std::string type = media_type(request.header("content-type"));
  if (type != "application/json" && type != "multipart/form-data")
    throw ApiError(
        415, fmt::format("expected 'Content-Type: application/json' or 'multipart/form-data', found '{}'",
                         excerpt(type)));
  try {
    Upload upload = type == "application/json" ? from_json(request) : from_form(request);
    NewContext& context = upload.context;
    context.any_name = context.name.empty();
    if (context.any_name) context.name = context_name_of(context.title);
    expect_context_name(context.name);
    if (context.is_file && context.text.empty())
      throw ApiError(400, "'file': expected a file with bytes in it, found an empty one");
    if (context.is_file) return upload;  // what it holds shows when it is read
    if (const std::size_t bad = invalid_utf8(context.text); bad != std::string::npos)
      throw ApiError(400, fmt::format("'text': expected UTF-8, found an invalid byte at offset {}", bad));
    if (context.text.find_first_not_of(" \t\r\n") == std::string::npos)
      throw ApiError(400, "'text': expected a text, found an empty one");
    return upload;
  } catch (const InputError& e) {
    throw ApiError(400, e.what());
  }
}

Json context_json(const ContextInfo& info) {
  Json json = {{"object", "context"},
               {"name", info.name},
               {"state", name_of(info.state)},
               {"tokens", info.tokens},
               {"tokens_done", info.tokens_done},
               {"bytes", info.bytes},
               {"text_bytes", info.text_bytes},
               {"model", info.model},
               {"error", info.error.empty() ? Json(nullptr) : Json(info.error)},
               {"attention", info.attentions},
               {"created", info.created},
               {"expires", info.expires == 0 ? Json(nullptr) : Json(info.expires)},
               {"in_memory", info.in_memory}};
  if (info.state == ContextState::reading) {
    json["step"] = info.step;
    json["seconds"] = info.seconds;
    json["seconds_left"] = info.seconds_left < 0 ? Json(nullptr) : Json(info.seconds_left);
  }
  return json;
}

}  // namespace lode::serve
