// SPDX-License-Identifier: Apache-2.0
// The output of `pdftotext -bbox`: one element a line, <page ...> and <word xMin=".." yMin=".." ...>text</word>.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>
#include <utility>

#include "documents/page_layout.h"

namespace lode {

namespace {

std::optional<float> number_of(std::string_view line, std::string_view name) {
  const std::size_t at = line.find(name);
  if (at == std::string_view::npos) return std::nullopt;
  float value = 0;
  const char* const begin = line.data() + at + name.size();
  const auto parsed = std::from_chars(begin, line.data() + line.size(), value);
  return parsed.ec == std::errc() && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

/// Character data of XML; control characters of odd fonts go.
std::string plain_of(std::string_view data) {
  static constexpr std::array<std::pair<std::string_view, char>, 5> kEntities = {
      {{"&amp;", '&'}, {"&lt;", '<'}, {"&gt;", '>'}, {"&quot;", '"'}, {"&apos;", '\''}}};
  std::string text;
  for (std::size_t at = 0; at < data.size();) {
    bool replaced = false;
    for (const auto& [name, sign] : kEntities)
      if (!replaced && data.substr(at).starts_with(name)) {
        text += sign;
        at += name.size();
        replaced = true;
      }
    if (replaced) continue;
    if (static_cast<unsigned char>(data[at]) >= 0x20) text += data[at];
    ++at;
  }
  return text;
}

std::optional<PageWord> word_of(std::string_view line) {
  const std::size_t head = line.find('>'), tail = line.rfind("</word>");
  if (head == std::string_view::npos || tail == std::string_view::npos || tail <= head) return std::nullopt;
  const std::string_view tag = line.substr(0, head);
  const auto x0 = number_of(tag, "xMin=\""), y0 = number_of(tag, "yMin=\"");
  const auto x1 = number_of(tag, "xMax=\""), y1 = number_of(tag, "yMax=\"");
  if (!x0 || !y0 || !x1 || !y1) return std::nullopt;
  PageWord word{*x0, *y0, *x1, *y1, plain_of(line.substr(head + 1, tail - head - 1))};
  return word.text.empty() ? std::nullopt : std::optional(std::move(word));
}

}  // namespace

std::vector<std::vector<PageWord>> parse_word_boxes(std::string_view xhtml) {
  std::vector<std::vector<PageWord>> pages;
  for (std::size_t at = 0; at < xhtml.size();) {
    const std::size_t end = std::min(xhtml.find('\n', at), xhtml.size());
    std::string_view line = xhtml.substr(at, end - at);
    at = end + 1;
    line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size()));
    if (line.starts_with("<page ")) pages.emplace_back();
    if (pages.empty() || !line.starts_with("<word ")) continue;
    if (auto word = word_of(line)) pages.back().push_back(std::move(*word));
  }
  return pages;
}

}  // namespace lode
