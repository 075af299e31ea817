// SPDX-License-Identifier: Apache-2.0
#include "serve/load.h"

#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/json.h"
#include "base/text.h"
#include "lodestone/error.h"

namespace lode::serve {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kStatusEnd = 20;  // where a status stands in a response

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Address {
  std::string host, port;
};

Address parse_url(const std::string& url) {
  constexpr std::string_view kScheme = "http://";
  std::string rest = url;
  if (rest.ends_with('/')) rest.pop_back();
  const std::size_t colon = rest.rfind(':');
  const bool whole = rest.starts_with(kScheme) && colon != std::string::npos && colon > kScheme.size() &&
                     colon + 1 < rest.size() &&
                     rest.find_first_not_of("0123456789", colon + 1) == std::string::npos;
  if (!whole)
    throw InputError(fmt::format("expected a URL such as http://127.0.0.1:8080, found '{}'", excerpt(url)));
  return {rest.substr(kScheme.size(), colon - kScheme.size()), rest.substr(colon + 1)};
}

class Socket {
 public:
  Socket(const Address& address, double timeout) {
    addrinfo wanted{}, *found = nullptr;
    wanted.ai_family = AF_UNSPEC;
    wanted.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(address.host.c_str(), address.port.c_str(), &wanted, &found) != 0)
      throw RunError(fmt::format("there is no address of '{}'", excerpt(address.host)));
    for (const addrinfo* at = found; at != nullptr && fd_ < 0; at = at->ai_next) {
      fd_ = socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC, at->ai_protocol);
      if (fd_ >= 0 && connect(fd_, at->ai_addr, at->ai_addrlen) != 0) close_it();
    }
    freeaddrinfo(found);
    if (fd_ < 0) throw RunError(fmt::format("nobody listens on {} port {}", address.host, address.port));
    const timeval limit = {.tv_sec = static_cast<time_t>(timeout), .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  }
  ~Socket() { close_it(); }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  void send_all(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) throw RunError(fmt::format("the server took no request: {}", std::strerror(errno)));
      bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
  }
  /// False at the end.
  bool receive(std::string& into) const {
    char buffer[16384];
    const ssize_t got = recv(fd_, buffer, sizeof buffer, 0);
    if (got < 0) throw RunError(fmt::format("the answer broke off: {}", std::strerror(errno)));
    into.append(buffer, static_cast<std::size_t>(got));
    return got > 0;
  }

 private:
  void close_it() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  int fd_ = -1;
};

std::string request_of(const LoadOptions& options, const Address& address, const LoadQuestion& question) {
  Json body = {{"messages", Json::array({{{"role", "user"}, {"content", question.question}}})},
               {"stream", true},
               {"stream_options", {{"include_usage", true}}},
               {"max_tokens", options.max_new_tokens}};
  if (!options.model.empty()) body["model"] = options.model;
  if (!question.context.empty()) body["context"] = question.context;
  if (!options.attention.empty()) body["attention"] = options.attention;
  if (!options.sources) body["sources"] = false;
  const std::string text = body.dump();
  // HTTP/1.0: the answer comes without chunks, up to the connection's end.
  std::string head = fmt::format(
      "POST /v1/chat/completions HTTP/1.0\r\nHost: {}:{}\r\nContent-Type: "
      "application/json\r\nContent-Length: {}\r\n",
      address.host, address.port, text.size());
  if (!options.key.empty()) head += fmt::format("Authorization: Bearer {}\r\n", options.key);
  return head + "\r\n" + text;
}

struct One {
  double first = -1, whole = 0;
  std::int64_t tokens = 0;
};

/// Takes in one event of a stream: a piece of text, or what it cost.
void take_event(const std::string& event, Clock::time_point start, One& one) {
  if (!event.starts_with("data: {")) return;
  const Json json = parse_json(std::string_view(event).substr(6), "the answer");
  if (json_has(json, "error"))
    throw RunError("the answer ended in an error: " + excerpt(json["error"].dump(), 300));
  if (json_has(json, "usage"))
    one.tokens = json_int(json["usage"], "completion_tokens", "usage", 0, INT64_MAX);
  for (const Json& choice : json_member(json, "choices"))
    if (one.first < 0 && json_has(json_member(choice, "delta"), "content") &&
        !choice["delta"]["content"].get<std::string>().empty())
      one.first = seconds_since(start);
}

One ask(const LoadOptions& options, const Address& address, const LoadQuestion& question) {
  const auto start = Clock::now();
  const Socket socket(address, options.timeout_seconds);
  socket.send_all(request_of(options, address, question));
  std::string received;
  std::size_t at = 0;  // where the body's next event begins; 0 while the head is not there
  One one;
  const auto refused = [&] { return received.find(" 200 ") > kStatusEnd; };
  while (socket.receive(received)) {
    if (const std::size_t end = received.find("\r\n\r\n"); at == 0 && end != std::string::npos) at = end + 4;
    if (at == 0 || refused()) continue;
    for (std::size_t end; at < received.size() && (end = received.find("\n\n", at)) != std::string::npos;
         at = end + 2)
      take_event(received.substr(at, end - at), start, one);
  }
  if (refused())
    throw RunError("the server refused a question: " + excerpt(received.substr(0, received.find('\r')), 60) +
                   ": " + excerpt(at == 0 ? "no body" : received.substr(at), 300));
  one.whole = seconds_since(start);
  if (one.first < 0) one.first = one.whole;
  return one;
}

}  // namespace

double percentile(const std::vector<double>& sorted, double share) {
  if (sorted.empty()) return 0;
  const auto at = static_cast<std::size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  return sorted[std::clamp<std::size_t>(at, 1, sorted.size()) - 1];
}

LoadResult put_load(const LoadOptions& options, const std::vector<LoadQuestion>& questions) {
  const Address address = parse_url(options.url);
  { const Socket somebody(address, options.timeout_seconds); }
  LoadResult result;
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  const auto start = Clock::now();
  const auto client = [&] {
    for (std::int64_t i; (i = next++) < options.requests;) {
      try {
        const One one = ask(options, address, questions[static_cast<std::size_t>(i) % questions.size()]);
        const std::lock_guard lock(mutex);
        ++result.answered;
        result.tokens += one.tokens;
        result.first_token.push_back(one.first);
        result.whole.push_back(one.whole);
      } catch (const std::exception& error) {
        const std::lock_guard lock(mutex);
        if (result.failed++ == 0) result.failure = error.what();
      }
    }
  };
  std::vector<std::thread> clients;
  for (int i = 0; i < options.clients; ++i) clients.emplace_back(client);
  for (std::thread& thread : clients) thread.join();
  result.seconds = seconds_since(start);
  std::sort(result.first_token.begin(), result.first_token.end());
  std::sort(result.whole.begin(), result.whole.end());
  return result;
}

}  // namespace lode::serve
