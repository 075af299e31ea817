// SPDX-License-Identifier: Apache-2.0
#include "serve/multipart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "base/text.h"
#include "lodestone/error.h"

namespace lode::serve {

namespace {

constexpr std::size_t kMostParts = 32, kLongestBoundary = 70, kLongestPartHead = 4096, kLongestName = 255;
constexpr std::string_view kWhere = "multipart/form-data";

bool same_word(std::string_view a, std::string_view b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](unsigned char x, unsigned char y) { return std::tolower(x) == std::tolower(y); });
}

std::string_view without_blanks(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

/// A quoted string from its first quote on, or a word up to ';'. `text` moves behind it.
std::string take_value(std::string_view& text) {
  std::string value;
  if (!text.starts_with('"')) {
    const std::size_t end = std::min(text.find(';'), text.size());
    value = std::string(without_blanks(text.substr(0, end)));
    text.remove_prefix(end);
    return value;
  }
  text.remove_prefix(1);
  while (!text.empty() && text.front() != '"') {
    if (text.front() == '\\' && text.size() > 1) text.remove_prefix(1);
    value += text.front();
    text.remove_prefix(1);
  }
  text.remove_prefix(std::min(text.find(';'), text.size()));
  return value;
}

/// Where a boundary's line begins: text may begin like one.
std::size_t find_boundary(std::string_view body, std::string_view boundary) {
  std::size_t at = body.find(boundary);
  while (at != std::string_view::npos) {
    const std::string_view behind = body.substr(at + boundary.size(), 2);
    if (behind == "\r\n" || behind == "--") break;
    at = body.find(boundary, at + 1);
  }
  return at;
}

std::string checked_name(const std::string& name, const char* what) {
  if (name.size() > kLongestName || invalid_utf8(name) != std::string::npos)
    throw InputError(fmt::format("{}: expected a {} of at most {} bytes of UTF-8, found '{}'", kWhere, what,
                                 kLongestName, excerpt(name)));
  return name;
}

FormPart part_of(std::string_view head, std::string_view content) {
  FormPart part;
  part.content = content;
  bool named = false;
  while (!head.empty()) {
    const std::size_t end = std::min(head.find("\r\n"), head.size());
    const std::string_view line = head.substr(0, end);
    head.remove_prefix(std::min(end + 2, head.size()));
    const std::size_t colon = line.find(':');
    if (colon == std::string_view::npos || !same_word(line.substr(0, colon), "content-disposition")) continue;
    const std::string_view value = line.substr(colon + 1);
    part.name = checked_name(header_parameter(value, "name"), "field name");
    part.file_name = checked_name(header_parameter(value, "filename"), "file name");
    part.has_file_name = value.find("filename=") != std::string_view::npos;
    named = !part.name.empty();
  }
  if (!named)
    throw InputError(
        fmt::format("{}: expected a name in each part's Content-Disposition, found none", kWhere));
  return part;
}

}  // namespace

std::string media_type(std::string_view content_type) {
  std::string type(
      without_blanks(content_type.substr(0, std::min(content_type.find(';'), content_type.size()))));
  std::transform(type.begin(), type.end(), type.begin(), [](unsigned char c) { return std::tolower(c); });
  return type;
}

std::string header_parameter(std::string_view value, std::string_view name) {
  for (std::size_t at = value.find(';'); at != std::string_view::npos && at < value.size();) {
    value = value.substr(at + 1);
    const std::size_t equals = value.find('=');
    if (equals == std::string_view::npos) break;
    const std::string_view key = without_blanks(value.substr(0, equals));
    value.remove_prefix(equals + 1);
    while (value.starts_with(' ') || value.starts_with('\t')) value.remove_prefix(1);
    std::string found = take_value(value);
    if (same_word(key, name)) return found;
    at = value.find(';');
  }
  return {};
}

std::vector<FormPart> parse_multipart(std::string_view content_type, std::string_view body) {
  const std::string boundary = header_parameter(content_type, "boundary");
  if (boundary.empty() || boundary.size() > kLongestBoundary)
    throw InputError(fmt::format("{}: expected a boundary of 1 to {} characters in Content-Type, found {}",
                                 kWhere, kLongestBoundary, boundary.size()));
  const std::string first = "--" + boundary, between = "\r\n--" + boundary;
  if (!body.starts_with(first))
    throw InputError(
        fmt::format("{}: expected a body that begins with its boundary, found another beginning", kWhere));
  std::vector<FormPart> parts;
  for (body.remove_prefix(first.size()); !body.starts_with("--");) {
    if (!body.starts_with("\r\n"))
      throw InputError(
          fmt::format("{}: expected the end of a line behind a boundary, found other bytes", kWhere));
    body.remove_prefix(2);
    const std::size_t head_end = body.substr(0, kLongestPartHead).find("\r\n\r\n");
    if (head_end == std::string_view::npos)
      throw InputError(fmt::format("{}: expected a part's headers within {} bytes, found no end", kWhere,
                                   kLongestPartHead));
    const std::string_view head = body.substr(0, head_end);
    body.remove_prefix(head_end + 2);  // its second line end may be the boundary's, of an empty part
    const std::size_t end = find_boundary(body, between);
    if (end == std::string_view::npos)
      throw InputError(fmt::format("{}: expected a closing boundary, found the body's end", kWhere));
    if (parts.size() == kMostParts)
      throw InputError(fmt::format("{}: expected at most {} parts, found more", kWhere, kMostParts));
    parts.push_back(part_of(head, end < 2 ? std::string_view() : body.substr(2, end - 2)));
    body.remove_prefix(end + between.size());
  }
  return parts;
}

}  // namespace lode::serve
