// SPDX-License-Identifier: Apache-2.0
#include "serve/service.h"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <ctime>

#include "base/json.h"
#include "base/text.h"
#include "lodestone/error.h"
#include "serve/names.h"
#include "serve/status.h"

namespace lode {
extern const std::string_view kWebPage;        // assets/web/index.html
extern const std::string_view kWebPageScript;  // its script, as a Content-Security-Policy names it
}  // namespace lode

namespace lode::serve {

struct Service::Route {
  const char* method;
  const char* path;  ///< "{name}" stands for one segment
  void (Service::*handle)(const Call&);
  enum Body { none, question, upload } body;
  bool open;  ///< needs no key
};

namespace {

constexpr std::uint64_t kBodyOfNone = 4096;  // some clients send an empty object with a GET

/// Whether a path is that of a route, and its {name}, still encoded.
bool matches(std::string_view pattern, std::string_view path, std::string_view& name) {
  const std::size_t at = pattern.find("{name}");
  if (at == std::string_view::npos) return pattern == path;
  const std::string_view before = pattern.substr(0, at), after = pattern.substr(at + 6);
  if (path.size() <= before.size() + after.size() || !path.starts_with(before) || !path.ends_with(after))
    return false;
  name = path.substr(before.size(), path.size() - before.size() - after.size());
  return name.find('/') == std::string_view::npos;
}

bool is_anthropic(std::string_view path) {
  return path.starts_with("/v1/messages");
}

/// OpenAI's word for a kind of error.
const char* openai_type(int status) {
  if (status == 401) return "authentication_error";
  if (status == 403) return "permission_error";
  if (status == 429) return "rate_limit_error";
  return status >= 500 ? "server_error" : "invalid_request_error";
}

const char* anthropic_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 403:
      return "permission_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    default:
      return status >= 500 ? "api_error" : "invalid_request_error";
  }
}

std::string now_text() {
  std::timespec now{};
  std::timespec_get(&now, TIME_UTC);
  std::tm parts{};
  gmtime_r(&now.tv_sec, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%S", &parts);
  return fmt::format("{}.{:03}Z", text.data(), now.tv_nsec / 1000000);
}

}  // namespace

std::string_view name_of(ContextState state) {
  return state == ContextState::reading ? "reading" : state == ContextState::ready ? "ready" : "failed";
}

std::string dump(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace);
}

HttpResponse json_response(std::string body, int status) {
  HttpResponse response;
  response.status = status;
  response.body = std::move(body) + "\n";
  response.headers = {{"Cache-Control", "no-store"}};
  return response;
}

HttpResponse error_response(std::string_view path, const ApiError& error) {
  Json body;
  if (is_anthropic(path)) {
    body = {{"type", "error"},
            {"error", {{"type", anthropic_type(error.status)}, {"message", error.what()}}}};
  } else {
    body = {{"error",
             {{"message", error.what()},
              {"type", openai_type(error.status)},
              {"param", nullptr},
              {"code", error.code.empty() ? Json(nullptr) : Json(error.code)}}}};
  }
  HttpResponse response = json_response(dump(body), error.status);
  const bool later = error.status == 429 || error.status == 503;
  if (later || error.retry_seconds > 0)
    response.headers.emplace_back("Retry-After", std::to_string(std::max(error.retry_seconds, 1)));
  if (error.status == 401) response.headers.emplace_back("WWW-Authenticate", "Bearer");
  return response;
}

Service::Service(Backend& backend, Guard guard, const ServiceOptions& options)
    : backend_(backend), guard_(std::move(guard)), options_(options) {}

const Service::Route* Service::find(std::string_view method, std::string_view path, std::string& name,
                                    std::string& allowed) {
  static constexpr Route kRoutes[] = {
      {"GET", "/", &Service::page, Route::none, true},
      {"GET", "/health", &Service::health, Route::none, true},
      {"GET", "/metrics", &Service::metrics, Route::none, false},
      {"GET", "/v1/models", &Service::models, Route::none, false},
      {"GET", "/v1/models/{name}", &Service::models, Route::none, false},
      {"POST", "/v1/chat/completions", &Service::chat, Route::question, false},
      {"POST", "/v1/messages", &Service::messages, Route::question, false},
      {"GET", "/v1/contexts", &Service::list_contexts, Route::none, false},
      {"POST", "/v1/contexts", &Service::create_context, Route::upload, false},
      {"GET", "/v1/contexts/{name}", &Service::show_context, Route::none, false},
      {"DELETE", "/v1/contexts/{name}", &Service::delete_context, Route::none, false},
      {"GET", "/v1/contexts/{name}/text", &Service::context_text, Route::none, false},
  };
  for (const Route& route : kRoutes) {
    std::string_view encoded;
    if (!matches(route.path, path, encoded)) continue;
    if (method == route.method || (method == "HEAD" && std::string_view(route.method) == "GET")) {
      if (!percent_decode(encoded, name))
        throw ApiError(400, "expected two hexadecimal digits behind each '%' of the path");
      return &route;
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(route.method);
  }
  return nullptr;
}

Admission Service::admit(const HttpRequest& head) {
  const auto refused = [&](const ApiError& error) {
    Admission admission;
    admission.refusal = error_response(head.path, error);
    return admission;
  };
  if (const std::string why = guard_.wrong_host(head); !why.empty()) return refused(ApiError(403, why));
  if (const std::string why = guard_.wrong_origin(head); !why.empty()) return refused(ApiError(403, why));
  std::string name, allowed;
  const Route* route = nullptr;
  try {
    route = find(head.method, head.path, name, allowed);
  } catch (const ApiError& error) {
    return refused(error);
  }
  // Who has no key learns nothing of what is there.
  if ((route == nullptr || !route->open) && !guard_.has_key(head))
    return refused(ApiError(
        401,
        "expected an API key in 'Authorization: Bearer KEY' or 'x-api-key: KEY', found none that is known",
        "invalid_api_key"));
  if (route == nullptr && !allowed.empty()) {
    Admission admission = refused(
        ApiError(405, fmt::format("expected {} on this path, found {}", allowed, excerpt(head.method, 20))));
    admission.refusal.headers.emplace_back("Allow", allowed);
    return admission;
  }
  if (route == nullptr)
    return refused(ApiError(404, fmt::format("there is nothing at '{}'", excerpt(head.path))));
  Admission admission;
  admission.admitted = true;
  admission.body_limit = route->body == Route::upload     ? options_.upload_bytes
                         : route->body == Route::question ? options_.question_bytes
                                                          : kBodyOfNone;
  admission.quick = route->handle == &Service::health;
  return admission;
}

void Service::handle(std::shared_ptr<const HttpRequest> request, std::shared_ptr<HttpReply> reply) {
  try {
    Call call{request, reply, {}};
    std::string allowed;
    const Route* route = find(request->method, request->path, call.name, allowed);
    LODE_ASSERT(route != nullptr);  // admitted
    if (stopping_ && route->body != Route::none) throw ApiError(503, "the server is stopping");
    (this->*route->handle)(call);
  } catch (const ApiError& error) {
    reply->send(error_response(request->path, error));
  } catch (const InputError& error) {
    reply->send(error_response(request->path, ApiError(400, error.what())));
  } catch (const std::exception& error) {
    reply->send(error_response(request->path, ApiError(500, error.what())));
  }
}

HttpResponse Service::refuse(std::string_view path, int status, std::string_view sentence) {
  return error_response(path, ApiError(status, std::string(sentence)));
}

/// The log has routes, never paths, which are the users' own words.
void Service::done(const HttpRequest& request, int status, std::uint64_t bytes, double seconds) {
  std::string name, allowed, label = "other";
  try {
    if (const Route* route = find(request.method, request.path, name, allowed); route != nullptr)
      label = route->path;
  } catch (const ApiError&) {
    label = "other";
  }
  metrics_.add_request(label, status, seconds);
  if (!options_.log) return;
  const Json line = {{"time", now_text()},
                     {"level", status >= 500 ? "error" : "info"},
                     {"request_id", request.id},
                     {"method", excerpt(request.method, 20)},
                     {"route", label},
                     {"status", status},
                     {"bytes_in", request.body_bytes},
                     {"bytes_out", bytes},
                     {"ms", static_cast<double>(static_cast<std::int64_t>(seconds * 1e5)) / 100}};
  const std::string text = dump(line) + "\n";
  std::fwrite(text.data(), 1, text.size(), stderr);
}

void Service::page(const Call& call) {
  HttpResponse response;
  response.content_type = "text/html; charset=utf-8";
  response.body = std::string(kWebPage);
  // Everything that the page needs is in it. Its one script runs and no other: what a document says can
  // neither load nor run anything.
  response.headers = {
      {"Content-Security-Policy", fmt::format("default-src 'none'; script-src {}; style-src 'unsafe-inline'; "
                                              "connect-src 'self'; img-src data:; "
                                              "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
                                              kWebPageScript)},
      {"X-Frame-Options", "DENY"},
      {"Referrer-Policy", "no-referrer"},
      {"Cross-Origin-Opener-Policy", "same-origin"},
      {"Cross-Origin-Resource-Policy", "same-origin"},
      {"Cache-Control", "no-cache"}};
  call.reply->send(std::move(response));
}

void Service::health(const Call& call) {
  if (stopping_) return call.reply->send(json_response(R"({"status":"stopping"})", 503));
  call.reply->send(json_response(R"({"status":"ok"})"));
}

void Service::metrics(const Call& call) {
  HttpResponse response;
  response.content_type = "text/plain; version=0.0.4; charset=utf-8";
  response.body = metrics_.print(backend_.stats(), connections_());
  call.reply->send(std::move(response));
}

void Service::models(const Call& call) {
  Json list = Json::array();
  for (const ServedModel& model : backend_.models()) {
    const Json one = {{"id", model.id},
                      {"object", "model"},
                      {"type", "model"},
                      {"display_name", model.id},
                      {"created", model.created},
                      {"owned_by", "lodestone"},
                      {"max_model_len", model.context}};
    if (call.name == model.id) return call.reply->send(json_response(dump(one)));
    list.push_back(one);
  }
  if (!call.name.empty())
    throw ApiError(
        404,
        fmt::format("there is no model '{}'; GET /v1/models lists those that are there", excerpt(call.name)),
        "model_not_found");
  call.reply->send(json_response(dump({{"object", "list"}, {"data", list}, {"has_more", false}})));
}

void Service::chat(const Call& call) {
  answer_chat(backend_, metrics_, call);
}
void Service::messages(const Call& call) {
  answer_messages(backend_, metrics_, call);
}

void Service::list_contexts(const Call& call) {
  Json list = Json::array();
  for (const ContextInfo& info : backend_.contexts()) list.push_back(context_json(info));
  call.reply->send(json_response(dump({{"object", "list"}, {"data", list}})));
}

/// A client that goes while it waits for a reading does not end that: others may ask about the document.
void Service::create_context(const Call& call) {
  Upload upload = read_upload(*call.request);
  if (upload.wait)
    upload.context.on_read = [reply = call.reply](const ContextInfo& info) {
      reply->send(info.state == ContextState::ready
                      ? json_response(dump(context_json(info)))
                      : error_response("/v1/contexts", unusable_context(info.name, info.error)));
    };
  const ContextInfo info = backend_.create(std::move(upload.context));
  if (!upload.wait) call.reply->send(json_response(dump(context_json(info)), 202));
}

void Service::show_context(const Call& call) {
  call.reply->send(json_response(dump(context_json(backend_.context(call.name)))));
}

void Service::delete_context(const Call& call) {
  backend_.remove(call.name);
  call.reply->send(
      json_response(dump({{"object", "context.deleted"}, {"name", call.name}, {"deleted", true}})));
}

void Service::context_text(const Call& call) {
  HttpResponse response;
  response.content_type = "text/plain; charset=utf-8";
  response.body = backend_.text_of(call.name);
  response.headers = {{"Cache-Control", "no-store"},
                      {"Content-Security-Policy", "default-src 'none'; sandbox"}};
  call.reply->send(std::move(response));
}

}  // namespace lode::serve
