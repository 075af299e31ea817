// SPDX-License-Identifier: Apache-2.0
// The server's behaviour: which route does what, in which protocol's shapes, counted and logged.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/json.h"
#include "serve/backend.h"
#include "serve/guard.h"
#include "serve/http.h"
#include "serve/metrics.h"

namespace lode::serve {

struct ServiceOptions {
  std::uint64_t question_bytes = 64u << 20;  ///< of a request that asks
  std::uint64_t upload_bytes = 256u << 20;   ///< of a document
  bool log = true;                           ///< one JSON object a request, to stderr
};

/// What a handler gets.
struct Call {
  std::shared_ptr<const HttpRequest> request;
  std::shared_ptr<HttpReply> reply;
  std::string name;  ///< the {name} of the route's path, decoded and checked
};

class Service : public HttpApp {
 public:
  Service(Backend& backend, Guard guard, const ServiceOptions& options);

  Admission admit(const HttpRequest& head) override;
  void handle(std::shared_ptr<const HttpRequest> request, std::shared_ptr<HttpReply> reply) override;
  HttpResponse refuse(std::string_view path, int status, std::string_view sentence) override;
  void done(const HttpRequest& request, int status, std::uint64_t bytes, double seconds) override;

  /// From now on /health says that the server is going, so that a load balancer leaves it.
  void set_stopping() { stopping_ = true; }
  void count_connections(std::function<int()> count) { connections_ = std::move(count); }

 private:
  struct Route;
  static const Route* find(std::string_view method, std::string_view path, std::string& name,
                           std::string& allowed);
  void health(const Call& call);
  void metrics(const Call& call);
  void page(const Call& call);
  void models(const Call& call);
  void chat(const Call& call);
  void messages(const Call& call);
  void list_contexts(const Call& call);
  void create_context(const Call& call);
  void show_context(const Call& call);
  void delete_context(const Call& call);
  void context_text(const Call& call);

  Backend& backend_;
  Guard guard_;
  ServiceOptions options_;
  Metrics metrics_;
  std::atomic<bool> stopping_{false};
  std::function<int()> connections_ = [] { return 0; };
};

/// The error object of the protocol that a path belongs to.
HttpResponse error_response(std::string_view path, const ApiError& error);
HttpResponse json_response(std::string body, int status = 200);
std::string dump(const Json& value);

/// POST /v1/chat/completions and POST /v1/messages. ApiError when the request is refused.
void answer_chat(Backend& backend, Metrics& metrics, const Call& call);
void answer_messages(Backend& backend, Metrics& metrics, const Call& call);

/// POST /v1/contexts, of JSON or multipart/form-data.
struct Upload {
  NewContext context;
  bool wait = false;  ///< to be answered when the text has been read
};
Upload read_upload(const HttpRequest& request);
Json context_json(const ContextInfo& info);

}  // namespace lode::serve
