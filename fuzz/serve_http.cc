// SPDX-License-Identifier: Apache-2.0
// Bytes on a connection: each request is refused with a status, or reaches the app with a head and a body as HTTP
// has them.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>

#include "fuzz/target.h"
#include "serve/http.h"

namespace {

using namespace lode::serve;

constexpr std::uint64_t kBodyLimit = 4096;

/// Takes every request, and looks at what it gets.
class Looking : public HttpApp {
 public:
  Admission admit(const HttpRequest& head) override {
    LODE_ASSERT(head.path.starts_with('/') && !head.method.empty());
    for (const auto& [name, value] : head.headers) {
      LODE_ASSERT(!name.empty());
      LODE_ASSERT(std::none_of(name.begin(), name.end(),
                               [](unsigned char c) { return c <= ' ' || c == ':' || std::isupper(c); }));
      LODE_ASSERT(value.find_first_of("\r\n", 0) == std::string::npos &&
                  value.find('\0') == std::string::npos);
    }
    Admission admission;
    admission.admitted = true;
    admission.body_limit = kBodyLimit;
    return admission;
  }
  void handle(std::shared_ptr<const HttpRequest> request, std::shared_ptr<HttpReply> reply) override {
    LODE_ASSERT(request->body.size() <= kBodyLimit);
    HttpResponse response;
    response.body = request->path;
    reply->send(std::move(response));
  }
  HttpResponse refuse(std::string_view, int status, std::string_view sentence) override {
    LODE_ASSERT(status >= 400 && status < 600 && !sentence.empty());
    HttpResponse response;
    response.status = status;
    response.body = std::string(sentence);
    return response;
  }
  void done(const HttpRequest&, int, std::uint64_t, double) override {}
};

int port() {
  static Looking app;
  static HttpServer server(app, {.port = 0, .handler_threads = 1});
  return server.port();
}

int connected() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  LODE_ASSERT(fd >= 0 && connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  return fd;
}

}  // namespace

LODE_FUZZ_TARGET(serve_http) {
  const int fd = connected();
  while (!input.empty()) {
    const ssize_t sent = send(fd, input.data(), input.size(), MSG_NOSIGNAL);
    if (sent <= 0) break;
    input.remove_prefix(static_cast<std::size_t>(sent));
  }
  shutdown(fd, SHUT_WR);
  std::string reply;
  char buffer[4096];
  for (ssize_t got = 0; (got = recv(fd, buffer, sizeof buffer, 0)) > 0;)
    reply.append(buffer, static_cast<std::size_t>(got));
  close(fd);
  LODE_ASSERT(reply.empty() || reply.starts_with("HTTP/1.1 "));
}
