// SPDX-License-Identifier: Apache-2.0
#include "serve/guard.h"

#include <arpa/inet.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "base/text.h"
#include "lodestone/error.h"

namespace lode::serve {

namespace {

constexpr std::size_t kShortestKey = 16, kLongestKey = 1024;

/// "host:port" or "[v6]:port" without the port; empty when it is neither.
std::string host_of(std::string_view authority) {
  std::string_view host = authority, port;
  if (authority.starts_with('[')) {
    const std::size_t end = authority.find(']');
    if (end == std::string_view::npos) return {};
    host = authority.substr(1, end - 1);
    port = authority.substr(end + 1);
    if (!port.empty() && port.front() != ':') return {};
    port = port.substr(std::min<std::size_t>(1, port.size()));
  } else if (const std::size_t colon = authority.find(':'); colon != std::string_view::npos) {
    host = authority.substr(0, colon);
    port = authority.substr(colon + 1);
  }
  if (!std::all_of(port.begin(), port.end(), [](unsigned char c) { return std::isdigit(c) != 0; })) return {};
  std::string lower(host);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  return lower;
}

bool is_ip_address(const std::string& host) {
  in_addr v4{};
  in6_addr v6{};
  return inet_pton(AF_INET, host.c_str(), &v4) == 1 || inet_pton(AF_INET6, host.c_str(), &v6) == 1;
}

std::string_view without_blanks(std::string_view line) {
  const std::size_t begin = line.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return line.substr(begin, line.find_last_not_of(" \t\r") - begin + 1);
}

}  // namespace

std::vector<std::string> parse_keys(std::string_view text, std::string_view where) {
  std::vector<std::string> keys;
  for (int number = 1; !text.empty(); ++number) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = without_blanks(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.empty() || line.front() == '#') continue;
    if (line.size() < kShortestKey || line.size() > kLongestKey)
      throw InputError(fmt::format("{}: line {}: expected a key of {} to {} characters, found {}", where,
                                   number, kShortestKey, kLongestKey, line.size()));
    if (!std::all_of(line.begin(), line.end(), [](unsigned char c) { return c > 0x20 && c < 0x7f; }))
      throw InputError(fmt::format(
          "{}: line {}: expected a key of printable ASCII without blanks, found another one", where, number));
    keys.emplace_back(line);
  }
  if (keys.empty()) throw InputError(fmt::format("{}: expected a key, one a line, found none", where));
  return keys;
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  // As long as the longer of both could be: only the length of a key may show.
  volatile unsigned char different = a.size() == b.size() ? 0 : 1;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const char other = b.empty() ? '\0' : b[i % b.size()];
    different = static_cast<unsigned char>(
        different | (static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(other)));
  }
  return different == 0;
}

bool is_loopback(std::string_view host) {
  const std::string text(host);
  in_addr v4{};
  if (inet_pton(AF_INET, text.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  return text == "localhost" || text == "::1";
}

bool Guard::knows_host(std::string_view authority) const {
  const std::string host = host_of(authority);
  if (host.empty()) return false;
  return host == "localhost" || is_ip_address(host) ||
         std::find(names_.begin(), names_.end(), host) != names_.end();
}

std::string Guard::wrong_host(const HttpRequest& request) const {
  const std::string_view host = request.header("host");
  if (request.count("host") == 0 || knows_host(host)) return {};  // HTTP/1.0 may come without
  return fmt::format(
      "expected a Host header with an IP address, localhost or a name given by --allow-host, found '{}'",
      excerpt(host));
}

std::string Guard::wrong_origin(const HttpRequest& request) const {
  if (request.header("sec-fetch-site") == "cross-site")
    return "expected a request of this server's own page, found one of another site (Sec-Fetch-Site)";
  const std::string_view origin = request.header("origin");
  if (request.count("origin") == 0) return {};
  const std::string_view host = request.header("host");
  if (origin == fmt::format("http://{}", host) || origin == fmt::format("https://{}", host)) return {};
  return fmt::format("expected an Origin that is this server's own, or none, found '{}'", excerpt(origin));
}

bool Guard::has_key(const HttpRequest& request) const {
  if (keys_.empty()) return true;
  std::string_view given = request.header("x-api-key");
  const std::string_view authorization = request.header("authorization");
  static constexpr std::string_view kBearer = "bearer ";
  if (authorization.size() > kBearer.size() &&
      std::equal(kBearer.begin(), kBearer.end(), authorization.begin(),
                 [](char a, char b) { return a == std::tolower(static_cast<unsigned char>(b)); }))
    given = without_blanks(authorization.substr(kBearer.size()));
  bool found = false;
  for (const std::string& key : keys_)
    found = equal_in_constant_time(given, key) || found;  // all of them, always
  return found;
}

}  // namespace lode::serve
