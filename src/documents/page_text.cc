// SPDX-License-Identifier: Apache-2.0
// From the lines of a PDF's pages to text that flows.
#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
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

enum class EdgeKind { text, first, repeat };

/// The first time a header says something, it is kept; a page's number says nothing.
EdgeKind kind_of(const std::string& line, std::size_t page, const std::map<std::string, Seen>& seen) {
  for (const std::string& key : keys_of(line, page)) {
    const Seen& s = seen.at(key);
    if (s.runs() && (key != line || page > s.first)) return EdgeKind::repeat;
  }
  return seen.at(line).runs() ? EdgeKind::first : EdgeKind::text;
}

/// Lines of a page that are headers or footers.
struct Running {
  std::set<std::size_t> repeats;
  std::set<std::size_t> first_headers, first_footers;  // what no page before has
};

/// What stands at an edge of page after page, [pages].
std::vector<Running> running_lines(const std::vector<Page>& pages) {
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
  std::vector<Running> running(pages.size());
  for (std::size_t p = 0; p < pages.size(); ++p) {
    // The second line from an edge only behind the first.
    const auto take = [&](std::ptrdiff_t first, std::ptrdiff_t second, std::set<std::size_t>& firsts) {
      for (const std::ptrdiff_t at : {first, second}) {
        if (at < 0) return;
        const auto line = static_cast<std::size_t>(at);
        const EdgeKind kind = kind_of(pages[p][line], p, seen);
        if (kind == EdgeKind::text) return;
        (kind == EdgeKind::repeat ? running[p].repeats : firsts).insert(line);
      }
    };
    const Edges edges = edge_lines(pages[p]);
    take(edges.top, edges.below_top, running[p].first_headers);
    take(edges.bottom, edges.above_bottom, running[p].first_footers);
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

namespace {

/// A line on its way into the text.
struct Line {
  std::int32_t page = 0, line = 0;  // from 1
  std::string text;
  std::size_t full = 0;            // length of full lines on its page
  bool gap = false, note = false;  // behind a gap; a footnote
};

/// Line i of what begins behind `begin` lines of page p.
Line line_of(std::size_t p, std::size_t begin, const Page& page, std::size_t i) {
  return {.page = static_cast<std::int32_t>(p + 1),
          .line = static_cast<std::int32_t>(begin + i + 1),
          .text = page[i]};
}

std::vector<Line> lines_of(const Page& page, std::size_t p, const std::set<std::size_t>& skipped, bool note,
                           std::size_t begin) {
  std::vector<Line> lines;
  const std::size_t full = full_length(page);
  bool gap = note;
  for (std::size_t i = 0; i < page.size(); ++i) {
    if (skipped.contains(i)) continue;
    if (page[i].empty()) {
      gap = note || !lines.empty();  // what parts a header from the page's text parts no paragraphs
      continue;
    }
    Line& line = lines.emplace_back(line_of(p, begin, page, i));
    line.full = full;
    line.gap = std::exchange(gap, false);
    line.note = note;
  }
  return lines;
}

/// Lines of a page's body that stand among its notes.
void put_among_notes(const Page& page, std::size_t p, const std::set<std::size_t>& which,
                     std::vector<Line>& notes) {
  for (const std::size_t i : which) {
    Line& line = notes.emplace_back(line_of(p, 0, page, i));
    line.gap = line.note = true;
  }
}

/// What stands below a page's text: a header that is to stand there, footnotes, footers.
std::vector<Line> notes_of(const PageLines& page, std::size_t p, const Running& running, bool header) {
  std::vector<Line> notes;
  if (header) put_among_notes(page.body, p, running.first_headers, notes);
  const auto footnotes = lines_of(page.notes, p, {}, true, page.body.size());
  notes.insert(notes.end(), footnotes.begin(), footnotes.end());
  put_among_notes(page.body, p, running.first_footers, notes);
  return notes;
}

/// Where a paragraph that the page before has begun ends among the lines of a page; nullopt = on no line of it.
std::optional<std::size_t> end_of_paragraph(const std::vector<Line>& lines) {
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (i > 0 && lines[i].gap) return i;
    if (ends_sentence(lines[i].text)) return i + 1;
  }
  return std::nullopt;
}

/// All lines of all pages but repeated headers and footers. Footnotes and the first of equal footers come at
/// their page's end, or, when that is in the middle of a sentence, behind the first line that ends one. The first
/// of equal headers stays on top, but goes with the footnotes when it would part a sentence.
std::vector<Line> all_lines(const std::vector<PageLines>& pages) {
  std::vector<Page> bodies;
  for (const PageLines& page : pages) bodies.push_back(page.body);
  const auto running = running_lines(bodies);
  std::vector<Line> all, notes;
  for (std::size_t p = 0; p < pages.size(); ++p) {
    const bool in_sentence = !all.empty() && !ends_sentence(all.back().text);
    std::set<std::size_t> skipped = running[p].repeats;
    skipped.insert(running[p].first_footers.begin(), running[p].first_footers.end());
    if (in_sentence) skipped.insert(running[p].first_headers.begin(), running[p].first_headers.end());
    auto body = lines_of(bodies[p], p, skipped, false, 0);
    const std::optional<std::size_t> end = in_sentence ? end_of_paragraph(body) : 0;
    if (end && !notes.empty()) {
      if (*end < body.size()) body[*end].gap = true;
      body.insert(body.begin() + static_cast<std::ptrdiff_t>(*end), notes.begin(), notes.end());
      notes.clear();
    }
    all.insert(all.end(), body.begin(), body.end());
    const auto own = notes_of(pages[p], p, running[p], in_sentence);
    notes.insert(notes.end(), own.begin(), own.end());
  }
  all.insert(all.end(), notes.begin(), notes.end());
  return all;
}

/// Words with a hyphen inside, as "well-known", in lower case letters: where a line breaks one, it stays.
std::set<std::string> compounds_of(const std::vector<Line>& lines) {
  std::set<std::string> found;
  for (const Line& line : lines)
    for (std::size_t at = line.text.find('-'); at != std::string::npos; at = line.text.find('-', at + 1)) {
      const std::size_t begin = line.text.rfind(' ', at),
                        end = std::min(line.text.find(' ', at), line.text.size());
      if (at + 1 < end) found.insert(line.text.substr(begin + 1, end - begin - 1));
    }
  return found;
}

/// Whether the line ends inside a word that the next one ends.
bool breaks_word(const std::string& text, const Line& next) {
  if (text.size() < 3 || text.back() != '-' || next.gap || next.note) return false;
  const auto before = static_cast<unsigned char>(text[text.size() - 2]);
  return (before >= 0x80 || (before >= 'a' && before <= 'z')) && begins_lower(next.text);
}

/// The rest of a broken word moves to the line that begins it.
void join_words(std::vector<Line>& lines) {
  const auto compounds = compounds_of(lines);
  for (std::size_t i = 0; i + 1 < lines.size(); ++i) {
    Line &line = lines[i], &next = lines[i + 1];
    if (line.note != next.note || !breaks_word(line.text, next)) continue;
    const std::size_t end = std::min(next.text.find(' '), next.text.size());
    const std::string whole = line.text.substr(line.text.rfind(' ') + 1) + next.text.substr(0, end);
    if (!compounds.contains(whole)) line.text.pop_back();
    line.text += next.text.substr(0, end);
    next.text.erase(0, std::min(end + 1, next.text.size()));
  }
  std::erase_if(lines, [](const Line& line) { return line.text.empty(); });
}

}  // namespace

void put_pages(const std::vector<PageLines>& pages, TextBuilder& out) {
  auto lines = all_lines(pages);
  join_words(lines);
  const Line* before = nullptr;
  for (const Line& line : lines) {
    const bool page_turns = before != nullptr && before->page != line.page;
    if (page_turns && !line.gap && !line.note && !before->note && !ends_sentence(before->text) &&
        (begins_lower(line.text) || goes_on(before->text, line.text, before->full)))
      out.space();  // a sentence goes on from the page before
    else if (line.gap || page_turns || (before != nullptr && before->note != line.note))
      out.break_line(2);
    else if (before != nullptr && goes_on(before->text, line.text, line.full))
      out.space();
    else
      out.break_line();
    out.at(line.page, line.line);
    out.put(line.text);
    before = &line;
  }
  out.finish();
}

}  // namespace lode
