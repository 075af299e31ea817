// SPDX-License-Identifier: Apache-2.0
#include "documents/docx_styles.h"

#include <utility>

#include "documents/item_number.h"
#include "documents/xml.h"

namespace lode {

namespace {

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

void DocxStyles::read_level(const XmlEvent& e, Level& level) {
  constexpr std::size_t kLongest = 256;  // Word takes 31 characters
  const std::string value = e.attribute("w:val");
  if (e.name == "w:lvlText") level.text = value.size() <= kLongest ? value : std::string();
  if (e.name == "w:numFmt") level.type = type_of(value);
  if (e.name == "w:start") level.start = number_of(value, 1);
  if (e.name == "w:isLgl") level.decimal = value != "0" && value != "false";
  if (e.name == "w:lvlRestart") level.goes_on = value == "0";
  if (e.name == "w:suff") level.joined = value == "nothing";
  if (e.name == "w:pStyle") level.style = value;
}

void DocxStyles::read_numbering(std::string_view xml, std::string_view where) {
  std::string definition, list;
  int level = -1, changed = -1;
  read_xml(xml, where, [&](const XmlEvent& e) {
    if (e.kind == XmlEvent::Kind::end) {
      if (e.name == "w:lvl") level = -1;
      if (e.name == "w:lvlOverride") changed = -1;
      if (e.name == "w:abstractNum") definition.clear();
      if (e.name == "w:num") list.clear();
    }
    if (e.kind != XmlEvent::Kind::begin) return;
    if (e.name == "w:abstractNum") definition = e.attribute("w:abstractNumId");
    if (e.name == "w:num") list = e.attribute("w:numId");
    if (e.name == "w:numStyleLink" && !definition.empty()) links_[definition] = e.attribute("w:val");
    if (e.name == "w:lvl") level = list_level(e.attribute("w:ilvl"));
    if (e.name == "w:abstractNumId" && !list.empty()) lists_[list].of = e.attribute("w:val");
    if (e.name == "w:lvlOverride") changed = list_level(e.attribute("w:ilvl"));
    if (e.name == "w:startOverride" && !list.empty() && changed >= 0)
      lists_[list].restarts[changed] = number_of(e.attribute("w:val"), 1);
    if (level < 0) return;
    if (!definition.empty()) read_level(e, levels_[definition][static_cast<std::size_t>(level)]);
    if (definition.empty() && !list.empty() && changed == level) read_level(e, lists_[list].own[level]);
  });
}

void DocxStyles::read_styles(std::string_view xml, std::string_view where) {
  std::string style;
  int before = 0;  // elements that say how it was before a change
  read_xml(xml, where, [&](const XmlEvent& e) {
    const bool begin = e.kind == XmlEvent::Kind::begin;
    if (e.name == "w:pPrChange" && !e.empty) before += begin ? 1 : -1;
    if (e.kind == XmlEvent::Kind::end && e.name == "w:style") style.clear();
    if (!begin) return;
    if (e.name == "w:style") style = e.attribute("w:styleId");
    if (style.empty() || before > 0) return;
    if (e.name == "w:name") styles_[style].name = e.attribute("w:val");
    if (e.name == "w:basedOn") styles_[style].parent = e.attribute("w:val");
    if (e.name == "w:numId") styles_[style].place.list = e.attribute("w:val");
    if (e.name == "w:ilvl") styles_[style].place.level = list_level(e.attribute("w:val"));
  });
}

std::string DocxStyles::name_of(const std::string& style) const {
  const auto found = styles_.find(style);
  return found == styles_.end() || found->second.name.empty() ? style : found->second.name;
}

/// A list whose levels are known; null: there is none of that number.
const DocxStyles::List* DocxStyles::find(const std::string& list) const {
  auto found = lists_.find(list);
  if (found == lists_.end()) return nullptr;
  if (const auto link = links_.find(found->second.of); link != links_.end()) {
    const auto style = styles_.find(link->second);
    found = style == styles_.end() ? lists_.end() : lists_.find(style->second.place.list);
  }
  return found != lists_.end() && levels_.contains(found->second.of) ? &found->second : nullptr;
}

const DocxStyles::Level& DocxStyles::level_of(const List& list, int level) const {
  const auto own = list.own.find(level);
  return own != list.own.end() ? own->second : levels_.at(list.of)[static_cast<std::size_t>(level)];
}

/// What is not said by the paragraph is said by its style, or by the one that this is based on.
ListPlace DocxStyles::place_of(const std::string& style, const ListPlace& own) const {
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
  if (list == nullptr || style.empty()) return place;
  for (int level = 0; level < kLevels; ++level)
    if (level_of(*list, level).style == style) place.level = level;
  return place;
}

/// Goes on to the next number of a level; levels below it begin anew.
const DocxStyles::Counts& DocxStyles::count(const List& list, int level) {
  Counts& counts = counts_[list.of];
  for (int i = 0; i <= level; ++i) {
    auto& number = counts[static_cast<std::size_t>(i)];
    const std::int64_t start = level_of(list, i).start;
    if (i == level) number = number ? *number + 1 : start;
    if (!number) number = start;
  }
  for (int i = level + 1; i < kLevels; ++i)
    if (!level_of(list, i).goes_on) counts[static_cast<std::size_t>(i)].reset();
  return counts;
}

std::string DocxStyles::next(const std::string& style, const ListPlace& own) {
  const ListPlace place = place_of(style, own);
  if (place.list.empty() || place.list == "0") return {};
  const List* const list = find(place.list);
  if (list == nullptr) return own.list.empty() ? "" : "- ";
  if (begun_.insert(place.list).second)
    for (const auto& [restarted, start] : list->restarts)
      counts_[list->of][static_cast<std::size_t>(restarted)] = start - 1;
  const Counts& counts = count(*list, place.level);
  const Level& level = level_of(*list, place.level);
  const bool blank = level.text.find_first_not_of(' ') == std::string::npos;
  if (level.type == '-') return blank ? "" : "- ";
  std::string mark = mark_of(*list, place.level, counts);
  if (!mark.empty() && mark.back() != ' ' && !level.joined) mark += ' ';
  return mark;
}

std::string DocxStyles::mark_of(const List& list, int level, const Counts& counts) const {
  const Level& own = level_of(list, level);
  std::string mark;
  for (std::size_t i = 0; i < own.text.size(); ++i) {
    const char digit = i + 1 < own.text.size() ? own.text[i + 1] : ' ';
    if (own.text[i] != '%' || digit < '1' || digit > '9') {
      mark += own.text[i];
      continue;
    }
    const Level& named = level_of(list, digit - '1');
    const char type = own.decimal && named.type != ' ' ? '1' : named.type;
    if (type != ' ' && type != '-')
      mark += number_text(type, counts[static_cast<std::size_t>(digit - '1')].value_or(named.start));
    ++i;
  }
  return mark;
}

}  // namespace lode
