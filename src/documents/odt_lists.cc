// SPDX-License-Identifier: Apache-2.0
#include "documents/odt_lists.h"

#include <algorithm>
#include <utility>

#include "documents/item_number.h"
#include "documents/xml.h"

namespace lode {

namespace {

/// Of style:num-format, whose letters are HTML's.
char type_of(const std::string& format) {
  if (format.empty()) return ' ';
  return format.size() == 1 && std::string_view("1aAiI").find(format[0]) != std::string_view::npos ? format[0]
                                                                                                   : '1';
}

/// Numbers of several levels say how deep they are; bullets are indented, as those of HTML.
std::string bullet(int level) {
  return std::string(2 * static_cast<std::size_t>(level), ' ') + "- ";
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

/// A list in another has its style, unless it says another. Numbers begin anew, unless the list goes on with an earlier one's; then
/// so do those of a list in it, in front of which no item counts.
void OdtLists::begin_list(const XmlEvent& e) {
  List list = {.style = e.attribute("text:style-name"),
               .id = e.attribute("xml:id"),
               .level = static_cast<int>(std::min<std::size_t>(open_.size(), kLevels - 1))};
  if (list.style.empty() && !open_.empty()) list.style = open_.back().style;
  const std::string continued = e.attribute("text:continue-list");
  list.goes_on = e.attribute("text:continue-numbering") == "true" || !continued.empty() ||
                 (!open_.empty() && open_.back().goes_on);
  if (const auto ended = ended_.find(continued); ended != ended_.end()) numbers_[list.style] = ended->second;
  const auto level = static_cast<std::size_t>(list.level);
  const auto found = styles_.find(list.style);
  list.goes_on = list.goes_on && numbers_.contains(list.style);
  if (found != styles_.end() && !list.goes_on) numbers_[list.style][level] = found->second[level].start - 1;
  open_.push_back(std::move(list));
}

void OdtLists::end_list() {
  if (open_.empty()) return;
  const List& list = open_.back();
  if (!list.id.empty() && numbers_.contains(list.style)) ended_[list.id] = numbers_.at(list.style);
  open_.pop_back();
}

void OdtLists::begin_item(const XmlEvent& e) {
  if (open_.empty()) return;
  open_.back().counts = e.name == "text:list-item";
  const std::string start = e.attribute("text:start-value");
  open_.back().start = start.empty() ? std::nullopt : std::optional(number_of(start, 1));
}

std::string OdtLists::begin_paragraph() {
  if (open_.empty() || !std::exchange(open_.back().counts, false)) return {};
  List& list = open_.back();
  list.goes_on = false;
  const auto found = styles_.find(list.style);
  if (found == styles_.end()) return bullet(list.level);
  Numbers& numbers = numbers_[list.style];
  std::int64_t& number = numbers[static_cast<std::size_t>(list.level)];
  number = list.start.value_or(number + 1);
  return mark(found->second, numbers, list.level);
}

std::string OdtLists::heading(int level, const XmlEvent& e) {
  if (!outlines_ || level < 1 || level > kLevels || e.attribute("text:is-list-header") == "true") return {};
  const bool restarts = e.attribute("text:restart-numbering") == "true";
  for (int i = 0; i < level; ++i) {
    std::int64_t& number = headings_[static_cast<std::size_t>(i)];
    const std::int64_t start = outline_[static_cast<std::size_t>(i)].start;
    if (i + 1 == level)
      number =
          restarts ? number_of(e.attribute("text:start-value"), start) : (number == 0 ? start : number + 1);
    if (number == 0) number = start;
  }
  std::fill(headings_.begin() + level, headings_.end(), 0);
  return mark(outline_, headings_, level - 1);
}

std::string OdtLists::mark(const Levels& levels, const Numbers& numbers, int level) {
  const Level& own = levels[static_cast<std::size_t>(level)];
  if (own.type == '-') return bullet(level);
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
