// SPDX-License-Identifier: Apache-2.0
#include "engine/sentences.h"

#include <algorithm>
#include <string_view>

namespace lode {

namespace {

using namespace std::string_view_literals;

constexpr std::size_t kFullLine = 60;  // bytes of a line that a program or a typist has broken

bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}
bool is_lower(char c) {
  return c >= 'a' && c <= 'z';
}

/// Whether text[at] is the full stop of an abbreviation or initial ("Dr. Who", "J. S. Bach", "e.g. this").
bool abbreviates(std::string_view text, std::size_t at) {
  std::size_t begin = at;
  while (begin > 0 && !is_blank(text[begin - 1]) && text[begin - 1] != '(') --begin;
  const std::string_view word = text.substr(begin, at - begin);
  if (word.size() == 1 && word.front() >= 'A' && word.front() <= 'Z') return true;
  for (const std::string_view known :
       {"Dr"sv, "Mr"sv, "Mrs"sv, "Ms"sv, "St"sv, "Prof"sv, "No"sv, "Nr"sv, "Fig"sv, "vs"sv, "cf"sv, "e.g"sv,
        "i.e"sv, "approx"sv, "pp"sv, "Eq"sv, "Sec"sv, "Art"sv})
    if (word == known) return true;
  return false;
}

/// The end of a sentence that ends with text[at], closing quotation marks included; 0: it does not end there.
std::size_t end_of_sentence(std::string_view text, std::size_t at) {
  constexpr std::string_view kWide[] = {"。", "！", "？"};
  for (const std::string_view stop : kWide)
    if (text.substr(at).starts_with(stop)) return at + stop.size();
  if (text[at] != '.' && text[at] != '!' && text[at] != '?') return 0;
  if (text[at] == '.' && abbreviates(text, at)) return 0;
  std::size_t end = at + 1;
  for (bool more = true; more;) {
    more = false;
    for (const std::string_view closing :
         {"\""sv, "'"sv, ")"sv, "]"sv, "”"sv, "’"sv, "»"sv, "."sv, "!"sv, "?"sv})
      if (text.substr(end).starts_with(closing)) {
        end += closing.size();
        more = true;
      }
  }
  return end == text.size() || is_blank(text[end]) ? end : 0;
}

/// Whether the sentence goes on behind the line break at `at`.
bool goes_on(std::string_view text, std::size_t at) {
  std::size_t begin = text.rfind('\n', at == 0 ? 0 : at - 1);
  begin = begin == std::string_view::npos ? 0 : begin + 1;
  const std::string_view line = text.substr(begin, at - begin);
  const std::string_view next = text.substr(std::min(at + 1, text.size()));
  if (line.empty() || next.empty()) return false;
  const char last = line.back() == '\r' && line.size() > 1 ? line[line.size() - 2] : line.back();
  if (is_lower(next.front())) return is_lower(last) || last == ',' || last == '-';
  const bool wrapped = line.size() >= kFullLine && std::count(line.begin(), line.end(), ' ') >= 6;
  const bool open = is_lower(last) || last == ',';
  return wrapped && open && !is_blank(next.front()) && next.front() != '-' && next.front() != '*' &&
         next.front() != '#';
}

/// Splits [begin, end) of the text, which is no heading.
void split(std::string_view text, std::size_t begin, std::size_t end, std::vector<Sentence>& sentences) {
  const std::string_view part = text.substr(0, end);
  const auto add = [&](std::size_t first, std::size_t last) {
    while (first < last && is_blank(part[first])) ++first;
    while (last > first && is_blank(part[last - 1])) --last;
    if (last > first) sentences.push_back({first, last});
  };
  std::size_t start = begin;
  for (std::size_t at = begin; at < end; ++at) {
    const std::size_t stop = part[at] == '\n' && !goes_on(part, at) ? at + 1 : end_of_sentence(part, at);
    if (stop == 0) continue;
    add(start, stop);
    start = stop;
    at = stop - 1;
  }
  add(start, end);
}

}  // namespace

std::vector<Sentence> sentences_of(const SourceText& source) {
  std::vector<Sentence> sentences;
  const std::string_view text = source.text;
  if (source.files.empty()) {
    split(text, 0, text.size(), sentences);
    return sentences;
  }
  for (const SourceFile& file : source.files) {
    // Stretches of the file between headings of ours.
    std::size_t begin = file.begin;
    bool heading = false;
    auto mark = std::lower_bound(source.marks.begin(), source.marks.end(), file.begin,
                                 [](const PlaceMark& m, std::size_t at) { return m.begin < at; });
    for (; mark != source.marks.end() && mark->begin < file.end; ++mark) {
      if ((mark->line == 0) == heading) continue;
      if (!heading) split(text, begin, mark->begin, sentences);
      begin = mark->begin;
      heading = !heading;
    }
    if (!heading) split(text, begin, file.end, sentences);
  }
  return sentences;
}

}  // namespace lode
