// SPDX-License-Identifier: Apache-2.0
#include "serve/specs.h"

#include <fmt/format.h>

#include "base/text.h"
#include "lodestone/error.h"
#include "serve/backend.h"

namespace lode::serve {

namespace {

constexpr std::size_t kLongestSpec = 1024;

/// Looked for in the text: parsing a spec may already open its file.
bool names_file(const std::string& text) {
  if (text.substr(0, text.find(':')) == "plan") return true;
  for (const char* key : {"weights", "file", "folder", "network"})
    if (text.find(std::string(key) + "=") != std::string::npos) return true;
  return false;
}

}  // namespace

std::optional<AutoSpec> parse_request_auto(const std::string& text) {
  if (text.size() > kLongestSpec) return std::nullopt;
  try {
    return parse_auto(text);
  } catch (const InputError& error) {
    throw ApiError(400, fmt::format("'attention': {}", error.what()));
  }
}

Spec parse_request_spec(const std::string& text) {
  if (text.size() > kLongestSpec)
    throw ApiError(400, fmt::format("'attention': expected a spec of at most {} bytes, found {}",
                                    kLongestSpec, text.size()));
  if (names_file(text))
    throw ApiError(400, fmt::format("'attention': expected a method without files of its own, found '{}'",
                                    excerpt(text)));
  try {
    return parse_spec(text);
  } catch (const InputError& error) {
    throw ApiError(400, fmt::format("'attention': {}", error.what()));
  }
}

}  // namespace lode::serve
