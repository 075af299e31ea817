// SPDX-License-Identifier: Apache-2.0
// From the lines of a PDF's pages to text that flows.
#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <set>
#include <utility>

#include "documents/readers.h"

namespace lode {

namespace {

using Page = std::vector<std::string>;

constexpr std::size_t kEdgeLines = 2;        // a header or footer has at most so many lines
constexpr std::size_t kLongestHeader = 120;  // bytes
constexpr std::size_t kNarrowest = 36;       // bytes of a full line; below it they are verses or cells
constexpr std::size_t kFewestPages = 3;      // on which it must stand

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// The line itself, and the line with one of its numbers told relative to the page: "12 | Results" on page 12
/// and "13 | Results" on page 13 have the key "<0> | Results" in common.
std::vector<std::string> keys_of(const std::string& line, std::size_t page) {
  std::vector<std::string> keys = {line};
  for (std::size_t at = 0; at < line.size() && keys.size() < 4; ++at) {
    if (!is_digit(line[at])) continue;
    std::size_t end = at;
    while (end < line.size() && is_digit(line[end])) ++end;
    std::int64_t number = 0;
    const auto parsed = std::from_chars(line.data() + at, line.data() + end, number);
    if (parsed.ec == std::errc() && end - at < 7)
      keys.push_back(line.substr(0, at) + "<" + std::to_string(number - static_cast<std::int64_t>(page)) +
                     ">" + line.substr(end));
    at = end;
  }
  return keys;
}

/// Which lines of a page may be a header or footer; -1 = none.
struct Edges {
  std::ptrdiff_t top = -1, below_top = -1, bottom = -1, above_bottom = -1;
  std::array<std::ptrdiff_t, 4> all() const { return {top, below_top, bottom, above_bottom}; }
};

Edges edge_lines(const Page& page) {
  std::vector<std::ptrdiff_t> filled;
  for (std::size_t i = 0; i < page.size(); ++i)
    if (!page[i].empty()) filled.push_back(static_cast<std::ptrdiff_t>(i));
  const auto line = [&](std::size_t n) {
    return n < filled.size() && page[static_cast<std::size_t>(filled[n])].size() <= kLongestHeader ? filled[n]
                                                                                                   : -1;
  };
  const std::size_t n = filled.size();
  return {line(0), n > 6 ? line(1) : -1, n > 1 ? line(n - 1) : -1, n > 6 ? line(n - 2) : -1};
}

struct Seen {
  std::size_t first = 0, last = 0, pages = 0;
  /// On two pages of five at least, from its first to its last: left and right pages may differ.
  bool runs() const { return pages >= kFewestPages && 5 * pages >= 2 * (last - first + 1); }
};

/// The first time a header says something, so it stays there; a page's number says nothing.
bool is_running(const std::string& line, std::size_t page, const std::map<std::string, Seen>& seen) {
  for (const std::string& key : keys_of(line, page)) {
    const Seen& s = seen.at(key);
    if (s.runs() && (key != line || page > s.first)) return true;
  }
  return false;
}

/// What stands at an edge of page after page, [pages].
std::vector<std::set<std::size_t>> running_lines(const std::vector<Page>& pages) {
  std::map<std::string, Seen> seen;
  for (std::size_t p = 0; p < pages.size(); ++p) {
    std::set<std::string> of_page;
    for (const std::ptrdiff_t i : edge_lines(pages[p]).all()) {
      if (i < 0) continue;
      for (std::string& key : keys_of(pages[p][static_cast<std::size_t>(i)], p))
        of_page.insert(std::move(key));
    }
    for (const std::string& key : of_page) {
      Seen& s = seen.try_emplace(key, Seen{.first = p}).first->second;
      s.last = p;
      ++s.pages;
    }
  }
  std::vector<std::set<std::size_t>> running(pages.size());
  for (std::size_t p = 0; p < pages.size(); ++p) {
    const auto runs = [&](std::size_t line) { return is_running(pages[p][line], p, seen); };
    const auto edges = edge_lines(pages[p]);
    // The second line from an edge only behind the first.
    for (const auto& [first, second] :
         {std::pair(edges.top, edges.below_top), std::pair(edges.bottom, edges.above_bottom)}) {
      if (first < 0 || !runs(static_cast<std::size_t>(first))) continue;
      running[p].insert(static_cast<std::size_t>(first));
      if (second >= 0 && runs(static_cast<std::size_t>(second)))
        running[p].insert(static_cast<std::size_t>(second));
    }
  }
  return running;
}

/// The length that full lines of a page have, in bytes: the one that most lines are near to. Not the longest:
/// where a word was broken, two lines have become one.
std::size_t full_length(const Page& page) {
  std::vector<std::size_t> lengths;
  for (const std::string& line : page)
    if (!line.empty()) lengths.push_back(line.size());
  std::sort(lengths.begin(), lengths.end());
  std::size_t full = 0, most = 0, low = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    while (100 * lengths[low] < 85 * lengths[i]) ++low;
    if (i + 1 - low < most) continue;
    most = i + 1 - low;
    full = lengths[i];
  }
  return full;
}

/// "- one", "• one", "3. one", "(a) one".
bool begins_item(std::string_view line) {
  for (const std::string_view bullet : {"- ", "* ", "• ", "– ", "▪ ", "◦ "})
    if (line.starts_with(bullet)) return true;
  const std::size_t blank = std::min(line.find(' '), line.size());
  const std::string_view word = line.substr(0, blank);
  return word.size() >= 2 && word.size() <= 5 && (word.back() == '.' || word.back() == ')') &&
         std::all_of(word.begin(), word.end() - 1,
                     [](char c) { return is_digit(c) || c == '(' || c == '.'; });
}

bool ends_sentence(std::string_view text) {
  return text.empty() || std::string_view(".!?:;\"')]").find(text.back()) != std::string_view::npos;
}

bool begins_lower(std::string_view line) {
  return !line.empty() && line.front() >= 'a' && line.front() <= 'z';
}

/// Whether a paragraph goes on from the line before, which is `before`.
bool goes_on(std::string_view before, std::string_view line, std::size_t full) {
  if (before.empty() || begins_item(line)) return false;
  if (begins_lower(line)) return true;
  return full >= kNarrowest && before.size() + 1 + std::min(line.find(' '), line.size()) >= full * 9 / 10;
}

}  // namespace

void put_pages(const std::vector<Page>& pages, TextBuilder& out) {
  const auto running = running_lines(pages);
  for (std::size_t p = 0; p < pages.size(); ++p) {
    const Page& page = pages[p];
    const std::size_t full = full_length(page);
    std::string_view before;
    bool first = true, gap = false;
    for (std::size_t i = 0; i < page.size(); ++i) {
      if (running[p].contains(i)) continue;
      if (page[i].empty()) {
        gap = true;
        continue;
      }
      if (first && begins_lower(page[i]) && !out.text().empty() && !ends_sentence(out.text()))
        out.space();  // a sentence goes on from the page before
      else if (first || gap)
        out.break_line(2);
      else if (goes_on(before, page[i], full))
        out.space();
      else
        out.break_line();
      out.at(static_cast<std::int32_t>(p + 1), static_cast<std::int32_t>(i + 1));
      out.put(page[i]);
      before = page[i];
      first = gap = false;
    }
  }
  out.finish();
}

}  // namespace lode
