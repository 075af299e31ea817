// SPDX-License-Identifier: Apache-2.0
// Fields of JSON requests: present or not, of the right type and range, and none that nobody knows. Each fault is an
// ApiError 400 with one sentence.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "serve/backend.h"
#include "serve/http.h"

namespace lode::serve {

/// The body of a request that has to be a JSON object; 415 where Content-Type says something else.
Json parse_body(const HttpRequest& request);

/// The members of one object. `where` names it in messages, such as "messages[2]"; empty = the body itself.
class Fields {
 public:
  explicit Fields(const Json& object, std::string where = {});

  bool has(const char* key) const;  ///< there and not null
  std::optional<std::string> text(const char* key) const;
  std::optional<bool> flag(const char* key) const;
  std::optional<double> number(const char* key, double low, double high) const;
  std::optional<std::int64_t> integer(const char* key, std::int64_t low, std::int64_t high) const;
  /// A string or a list of at most `most` of them.
  std::vector<std::string> texts(const char* key, std::size_t most) const;
  const Json& member(const char* key) const;  ///< null when there is none
  std::string path_of(const char* key) const;
  /// The JSON of the member at a pointer such as "/a/b", which is there, with its members in the order in which they
  /// came. The object itself must be the body, and `text` its bytes. ApiError 400 where it has too many members.
  std::string in_order(std::string_view text, const char* pointer) const;

  [[noreturn]] void wrong(const char* key, const std::string& expected) const;
  /// Refuses members that are neither in `known` nor in `ignored`.
  void expect_known(std::initializer_list<const char*> known,
                    std::initializer_list<const char*> ignored) const;

 private:
  const Json& object_;
  std::string where_;
};

/// What JSON of a message shows of a value.
std::string shown(const Json& value);

}  // namespace lode::serve
