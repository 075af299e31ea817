// SPDX-License-Identifier: Apache-2.0
// Who may ask: keys, and the Host and Origin headers, which keep web pages of others out (DNS rebinding, cross-site
// requests).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "serve/http.h"

namespace lode::serve {

/// One key a line; blank lines and those that begin with '#' are skipped. InputError when there is none, or one
/// shorter than 16 characters.
std::vector<std::string> parse_keys(std::string_view text, std::string_view where);

/// Takes as long whatever the bytes are.
bool equal_in_constant_time(std::string_view a, std::string_view b);

/// True of 127.0.0.0/8, ::1 and localhost.
bool is_loopback(std::string_view host);

class Guard {
 public:
  /// `names`: what the server may be called besides localhost and IP addresses, lower case, without a port.
  Guard(std::vector<std::string> keys, std::vector<std::string> names)
      : keys_(std::move(keys)), names_(std::move(names)) {}

  /// Why this Host or Origin is not served; empty when it is. A rebound DNS name is never an IP address.
  std::string wrong_host(const HttpRequest& request) const;
  std::string wrong_origin(const HttpRequest& request) const;
  /// `Authorization: Bearer KEY` or `x-api-key: KEY`; true where no key is asked for.
  bool has_key(const HttpRequest& request) const;

 private:
  bool knows_host(std::string_view authority) const;
  std::vector<std::string> keys_, names_;
};

}  // namespace lode::serve
