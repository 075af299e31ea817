// SPDX-License-Identifier: Apache-2.0
#include "show_sources.h"

#include <fmt/format.h>

namespace lode::cli {

namespace {

std::string one_line(std::string text) {
  for (char& c : text) c = c == '\n' || c == '\r' || c == '\t' ? ' ' : c;
  return text;
}

std::string place_of(const Json& source) {
  std::string place = one_line(source["document_title"].get<std::string>());
  const auto add = [&](const std::string& more) { place += (place.empty() ? "" : ", ") + more; };
  if (source.contains("start_page_number")) {
    const auto first = source["start_page_number"].get<std::int64_t>();
    const auto end = source["end_page_number"].get<std::int64_t>();
    add(end > first + 1 ? fmt::format("pages {}-{}", first, end - 1) : fmt::format("page {}", first));
  }
  if (const auto line = source["line"].get<std::int64_t>(); line > 0) add(fmt::format("line {}", line));
  return place.empty() ? fmt::format("token {}", source["token_begin"].get<std::int64_t>()) : place;
}

}  // namespace

Json sources_json(const std::vector<Citation>& citations) {
  Json all = Json::array();
  for (const Citation& c : citations) {
    Json source = {{"type", c.start_page > 0 ? "page_location" : "char_location"},
                   {"document_title", c.document_title},
                   {"cited_text", c.cited_text},
                   {"start_char_index", c.start_char},
                   {"end_char_index", c.end_char},
                   {"line", c.line},
                   {"weight", c.weight},
                   {"token_begin", c.token_begin},
                   {"token_end", c.token_end}};
    if (c.start_page > 0) {
      source["start_page_number"] = c.start_page;
      source["end_page_number"] = c.end_page;
    }
    all.push_back(std::move(source));
  }
  return all;
}

std::string sources_text(const Json& sources) {
  if (sources.empty()) return "  no passage stands out: the answer rests on none in particular\n";
  std::string text;
  for (const Json& s : sources)
    text += fmt::format("  {:3.0f} %  \"{}\"  ({})\n", 100 * s["weight"].get<double>(),
                        one_line(s["cited_text"].get<std::string>()), place_of(s));
  return text;
}

}  // namespace lode::cli
