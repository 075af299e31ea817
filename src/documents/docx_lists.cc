// SPDX-License-Identifier: Apache-2.0
#include "documents/docx_lists.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "documents/item_number.h"
#include "documents/xml.h"

namespace lode {

namespace {

std::int64_t number_of(const std::string& text, std::int64_t otherwise) {
  std::int32_t number = 0;
  const auto end = text.data() + text.size();
  return std::from_chars(text.data(), end, number).ec == std::errc() ? number : otherwise;
}

/// Of w:numFmt. What is neither letters nor Roman numerals is decimal.
char type_of(const std::string& format) {
  constexpr std::pair<std::string_view, char> kFormats[] = {
      {"bullet", '-'},     {"none", ' '},       {"lowerLetter", 'a'}, {"upperLetter", 'A'},
      {"lowerRoman", 'i'}, {"upperRoman", 'I'}, {"decimalZero", '0'}};
  for (const auto& [name, type] : kFormats)
    if (format == name) return type;
  return '1';
}

std::string number_text(char type, std::int64_t number) {
  const std::string text = item_number(type, number);
  return type == '0' && number >= 0 && number < 10 ? "0" + text : text;
}

}  // namespace

int list_level(const std::string& text) {
  const std::int64_t level = number_of(text, -1);
  return level >= 0 && level <= 8 ? static_cast<int>(level) : -1;
}

void DocxLists::read_level(const XmlEvent& e, Level& level) {
  const std::string value = e.attribute("w:val");
  if (e.name == "w:lvlText") level.text = value;
  if (e.name == "w:numFmt") level.type = type_of(value);
  if (e.name == "w:start") level.start = number_of(value, 1);
  if (e.name == "w:isLgl") level.decimal = value != "0" && value != "false";
  if (e.name == "w:pStyle") level.style = value;
}

void DocxLists::read_numbering(std::string_view xml, std::string_view where) {
  std::string definition, list;
  int level = -1, restarted = -1;
  read_xml(xml, where, [&](const XmlEvent& e) {
    if (e.kind == XmlEvent::Kind::end) {
      if (e.name == "w:lvl") level = -1;
      if (e.name == "w:abstractNum") definition.clear();
      if (e.name == "w:num") list.clear();
    }
    if (e.kind != XmlEvent::Kind::begin) return;
    if (e.name == "w:abstractNum") definition = e.attribute("w:abstractNumId");
    if (e.name == "w:num") list = e.attribute("w:numId");
    if (e.name == "w:numStyleLink" && !definition.empty()) links_[definition] = e.attribute("w:val");
    if (e.name == "w:lvl") level = list_level(e.attribute("w:ilvl"));
    if (e.name == "w:abstractNumId" && !list.empty()) lists_[list].of = e.attribute("w:val");
    if (e.name == "w:lvlOverride") restarted = list_level(e.attribute("w:ilvl"));
    if (e.name == "w:startOverride" && !list.empty() && restarted >= 0)
      lists_[list].restarts[restarted] = number_of(e.attribute("w:val"), 1);
    if (!definition.empty() && level >= 0)
      read_level(e, levels_[definition][static_cast<std::size_t>(level)]);
  });
}

void DocxLists::read_styles(std::string_view xml, std::string_view where) {
  std::string style;
  read_xml(xml, where, [&](const XmlEvent& e) {
    if (e.kind == XmlEvent::Kind::end && e.name == "w:style") style.clear();
    if (e.kind != XmlEvent::Kind::begin) return;
    if (e.name == "w:style") style = e.attribute("w:styleId");
    if (style.empty()) return;
    if (e.name == "w:basedOn") styles_[style].parent = e.attribute("w:val");
    if (e.name == "w:numId") styles_[style].place.list = e.attribute("w:val");
    if (e.name == "w:ilvl") styles_[style].place.level = list_level(e.attribute("w:val"));
  });
}

/// A list whose levels are known; null: there is none of that number.
const DocxLists::List* DocxLists::find(const std::string& list) const {
  auto found = lists_.find(list);
  if (found == lists_.end()) return nullptr;
  if (const auto link = links_.find(found->second.of); link != links_.end()) {
    const auto style = styles_.find(link->second);
    found = style == styles_.end() ? lists_.end() : lists_.find(style->second.place.list);
  }
  return found != lists_.end() && levels_.contains(found->second.of) ? &found->second : nullptr;
}

/// What is not said by the paragraph is said by its style, or by the one that this is based on.
ListPlace DocxLists::place_of(const std::string& style, const ListPlace& own) const {
  constexpr int kMostStyles = 16;  // of a chain, which may be a circle
  ListPlace place = own;
  auto at = styles_.find(style);
  for (int i = 0; i < kMostStyles && at != styles_.end() && (place.list.empty() || place.level < 0); ++i) {
    if (place.list.empty()) place.list = at->second.place.list;
    if (place.level < 0) place.level = at->second.place.level;
    at = styles_.find(at->second.parent);
  }
  if (place.level >= 0) return place;
  place.level = 0;
  const List* const list = find(place.list);
  if (list == nullptr) return place;
  const Levels& levels = levels_.at(list->of);
  for (int level = 0; level < kLevels; ++level)
    if (!style.empty() && levels[static_cast<std::size_t>(level)].style == style) place.level = level;
  return place;
}

/// Goes on to the next number of a level; levels below it begin anew.
const DocxLists::Counts& DocxLists::count(const List& list, const Levels& levels, int level) {
  Counts& counts = counts_[list.of];
  for (int i = 0; i <= level; ++i) {
    auto& number = counts[static_cast<std::size_t>(i)];
    const std::int64_t start = levels[static_cast<std::size_t>(i)].start;
    if (i == level) number = number ? *number + 1 : start;
    if (!number) number = start;
  }
  std::fill(counts.begin() + level + 1, counts.end(), std::nullopt);
  return counts;
}

std::string DocxLists::next(const std::string& style, const ListPlace& own) {
  const ListPlace place = place_of(style, own);
  if (place.list.empty() || place.list == "0") return {};
  const List* const list = find(place.list);
  if (list == nullptr) return own.list.empty() ? "" : "- ";
  const Levels& levels = levels_.at(list->of);
  const Level& level = levels[static_cast<std::size_t>(place.level)];
  if (level.type == '-') return "- ";
  if (begun_.insert(place.list).second)
    for (const auto& [restarted, start] : list->restarts)
      counts_[list->of][static_cast<std::size_t>(restarted)] = start - 1;
  const Counts& counts = count(*list, levels, place.level);
  std::string mark;
  for (std::size_t i = 0; i < level.text.size(); ++i) {
    const char digit = i + 1 < level.text.size() ? level.text[i + 1] : ' ';
    if (level.text[i] != '%' || digit < '1' || digit > '9') {
      mark += level.text[i];
      continue;
    }
    const auto named = static_cast<std::size_t>(digit - '1');
    const char type = level.decimal && levels[named].type != ' ' ? '1' : levels[named].type;
    if (type != ' ' && type != '-') mark += number_text(type, counts[named].value_or(levels[named].start));
    ++i;
  }
  return mark.empty() ? mark : mark + " ";
}

}  // namespace lode
