// SPDX-License-Identifier: Apache-2.0
#include "documents/odt_lists.h"

#include <algorithm>
#include <charconv>

#include "documents/item_number.h"
#include "documents/xml.h"

namespace lode {

namespace {

std::int64_t number_of(const std::string& text, std::int64_t otherwise) {
  std::int32_t number = 0;
  return std::from_chars(text.data(), text.data() + text.size(), number).ec == std::errc() ? number
                                                                                           : otherwise;
}

/// Of style:num-format, whose letters are HTML's.
char type_of(const std::string& format) {
  if (format.empty()) return ' ';
  return format.size() == 1 && std::string_view("1aAiI").find(format[0]) != std::string_view::npos ? format[0]
                                                                                                   : '1';
}

}  // namespace

void OdtLists::read_styles(std::string_view xml, std::string_view where) {
  read_xml(xml, where, [&](const XmlEvent& e) {
    if (e.kind == XmlEvent::Kind::begin) note_style(e);
  });
}

void OdtLists::note_style(const XmlEvent& e) {
  if (e.name == "text:list-style") style_ = e.attribute("style:name");
  const bool outlines = e.name == "text:outline-level-style";
  const bool numbers = e.name == "text:list-level-style-number" || outlines;
  if (!numbers && e.name != "text:list-level-style-bullet") return;
  const std::int64_t level = number_of(e.attribute("text:level"), 0);
  if (level < 1 || level > kLevels || (!outlines && style_.empty())) return;
  outlines_ = outlines_ || outlines;
  (outlines ? outline_ : styles_[style_])[static_cast<std::size_t>(level - 1)] = {
      .type = numbers ? type_of(e.attribute("style:num-format")) : '-',
      .prefix = e.attribute("style:num-prefix"),
      .suffix = e.attribute("style:num-suffix"),
      .start = number_of(e.attribute("text:start-value"), 1),
      .shown = static_cast<int>(
          std::clamp<std::int64_t>(number_of(e.attribute("text:display-levels"), 1), 1, level))};
}

/// A list in another has its style, unless it says another. Numbers begin anew, unless the list goes on with an earlier one's.
void OdtLists::begin_list(const XmlEvent& e) {
  List list = {.style = e.attribute("text:style-name"), .level = static_cast<int>(open_.size())};
  if (list.style.empty() && !open_.empty()) list.style = open_.back().style;
  list.level = std::min(list.level, kLevels - 1);
  const bool goes_on =
      e.attribute("text:continue-numbering") == "true" || !e.attribute("text:continue-list").empty();
  const auto level = static_cast<std::size_t>(list.level);
  const auto found = styles_.find(list.style);
  if (const bool known = numbers_.contains(list.style); found != styles_.end() && (!known || !goes_on))
    numbers_[list.style][level] = found->second[level].start - 1;
  open_.push_back(list);
}

void OdtLists::end_list() {
  if (!open_.empty()) open_.pop_back();
}

std::string OdtLists::begin_item(const XmlEvent& e) {
  if (open_.empty()) return {};
  const List& list = open_.back();
  const auto found = styles_.find(list.style);
  if (found == styles_.end()) return "- ";
  Numbers& numbers = numbers_[list.style];
  std::int64_t& number = numbers[static_cast<std::size_t>(list.level)];
  number = number_of(e.attribute("text:start-value"), number + 1);
  return mark(found->second, numbers, list.level);
}

std::string OdtLists::heading(int level) {
  if (!outlines_ || level < 1 || level > kLevels) return {};
  for (int i = 0; i < level; ++i) {
    std::int64_t& number = headings_[static_cast<std::size_t>(i)];
    const std::int64_t start = outline_[static_cast<std::size_t>(i)].start;
    if (i + 1 == level) number = number == 0 ? start : number + 1;
    if (number == 0) number = start;
  }
  std::fill(headings_.begin() + level, headings_.end(), 0);
  return mark(outline_, headings_, level - 1);
}

std::string OdtLists::mark(const Levels& levels, const Numbers& numbers, int level) {
  const Level& own = levels[static_cast<std::size_t>(level)];
  if (own.type == '-') return "- ";
  if (own.type == ' ') return {};
  std::string text;
  for (int i = level + 1 - own.shown; i <= level; ++i) {
    const char type = levels[static_cast<std::size_t>(i)].type;
    if (type == '-' || type == ' ') continue;
    text += (text.empty() ? "" : ".") + item_number(type, numbers[static_cast<std::size_t>(i)]);
  }
  return own.prefix + text + own.suffix + " ";
}

}  // namespace lode
