// SPDX-License-Identifier: Apache-2.0
// What the HTTP layer and the program behind it exchange. Nothing here knows a socket or a protocol of questions.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lode::serve {

using HeaderList = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string id;                ///< ours, in the log and in `x-request-id`
  std::string method;            ///< as it came
  std::string path, query;       ///< of the target, apart at the first '?', still percent-encoded
  HeaderList headers;            ///< names in lower case
  std::string body;              ///< empty until it has been read
  std::uint64_t body_bytes = 0;  ///< that the client announced; 0 where it did not
  /// Of the header's first occurrence; empty when there is none.
  std::string_view header(std::string_view lower_case_name) const;
  int count(std::string_view lower_case_name) const;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  HeaderList headers;
};

/// Where the answer to one request goes; from any thread. Either send(), or begin(), write()... and finish().
/// Nothing is sent any more once the client has gone.
class HttpReply {
 public:
  virtual ~HttpReply() = default;
  virtual void send(HttpResponse response) = 0;
  /// The head of a response whose body comes in pieces (server-sent events).
  virtual void begin(HttpResponse head) = 0;
  virtual void write(std::string piece) = 0;
  virtual void finish() = 0;
  /// Calls `gone` once, when the client leaves before the end of its answer; at once if it has left.
  virtual void on_gone(std::function<void()> gone) = 0;
};

/// What becomes of a request whose head has been read.
struct Admission {
  bool admitted = false;
  std::uint64_t body_limit = 0;  ///< bytes, when admitted
  bool quick = false;            ///< answered at once, without a handler thread
  HttpResponse refusal;          ///< when not
};

/// What stands behind the HTTP layer. All calls may come from several threads at once.
class HttpApp {
 public:
  virtual ~HttpApp() = default;
  virtual Admission admit(const HttpRequest& head) = 0;
  virtual void handle(std::shared_ptr<const HttpRequest> request, std::shared_ptr<HttpReply> reply) = 0;
  /// A refusal by the HTTP layer itself, in the shape that clients of this path expect.
  virtual HttpResponse refuse(std::string_view path, int status, std::string_view sentence) = 0;
  /// A response has been sent, or its client has gone (status 499).
  virtual void done(const HttpRequest& request, int status, std::uint64_t bytes, double seconds) = 0;
};

struct HttpOptions {
  std::string host = "127.0.0.1";
  int port = 8080;                           ///< 0 = any that is free
  int handler_threads = 4;                   ///< for parsing and opening files; one more moves bytes
  int connections = 2048;                    ///< at once; more are answered 503
  std::uint32_t header_bytes = 16 * 1024;    ///< of one request; more is 431
  std::uint64_t bodies_bytes = 1024u << 20;  ///< of all bodies being read; more is 503
  std::uint64_t unsent_bytes = 256 * 1024;  ///< of one streamed answer: a client that reads slower is dropped
  double idle_seconds = 60, header_seconds = 10;  ///< between requests; for a whole head
  double body_seconds = 15;  ///< for each part of a body, of at least `body_part_bytes`, and for the rest
  std::uint64_t body_part_bytes = 64 * 1024;
  double write_seconds = 30;  ///< for each part of a response
};

/// Listens once constructed (InputError names host and port when that fails); serves until stop().
class HttpServer {
 public:
  HttpServer(HttpApp& app, const HttpOptions& options);
  ~HttpServer();
  int port() const;
  int open_connections() const;
  /// No more connections and requests; answers under way go on. Returns once they are sent or `seconds` are over,
  /// then closes what is left.
  void stop(double seconds);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode::serve
