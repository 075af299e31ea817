// SPDX-License-Identifier: Apache-2.0
#include "serve/names.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/text.h"
#include "serve/backend.h"

namespace lode::serve {

namespace {

bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' || c == '_' ||
         c == '-';
}

}  // namespace

bool is_context_name(std::string_view name) {
  return !name.empty() && name.size() <= kLongestContextName && name.front() != '.' && name.front() != '-' &&
         std::all_of(name.begin(), name.end(), is_name_character);
}

void expect_context_name(std::string_view name) {
  if (is_context_name(name)) return;
  throw ApiError(
      400, fmt::format("'name': expected 1 to {} letters, digits, '.', '_' or '-', the first no '.' or '-', "
                       "found '{}'",
                       kLongestContextName, excerpt(name)));
}

std::string context_name_of(std::string_view file_name) {
  std::string name;
  for (const char c : file_name) {
    const char kept = is_name_character(c) ? c : '-';
    if (kept != '-' || (!name.empty() && name.back() != '-')) name += kept;
  }
  name.erase(0, std::min(name.find_first_not_of(".-"), name.size()));
  name.resize(std::min(name.size(), kLongestContextName));
  return name.empty() ? "document" : name;
}

std::string numbered_name(std::string_view name, int number) {
  constexpr std::size_t kLongestExtension = 6;  // with its dot
  std::size_t end = name.rfind('.');
  if (end == std::string_view::npos || end == 0 || name.size() - end > kLongestExtension) end = name.size();
  const std::string tail = fmt::format("-{}{}", number, name.substr(end));
  return std::string(name.substr(0, std::min(end, kLongestContextName - tail.size()))) + tail;
}

bool percent_decode(std::string_view text, std::string& out) {
  out.clear();
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    unsigned value = 0;
    if (text.size() - i < 3) return false;
    const char* const first = text.data() + i + 1;
    const auto [end, error] = std::from_chars(first, first + 2, value, 16);
    if (error != std::errc() || end != first + 2) return false;
    out += static_cast<char>(value);
    i += 2;
  }
  return true;
}

}  // namespace lode::serve
