// SPDX-License-Identifier: Apache-2.0
// What a DOCX says of a paragraph elsewhere: word/styles.xml what its style is called, and with word/numbering.xml the number
// that stands in front of it.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace lode {

class XmlEvent;

/// What a paragraph or a style says of its number.
struct ListPlace {
  std::string list;  ///< w:numId; empty: not said
  int level = -1;    ///< w:ilvl; below 0: not said
};

/// A level of w:ilvl, 0 to 8; -1 for others.
int list_level(const std::string& text);

class DocxStyles {
 public:
  /// InputError for malformed XML; `where` begins the message.
  void read_numbering(std::string_view xml, std::string_view where);
  void read_styles(std::string_view xml, std::string_view where);

  /// The next paragraphs are those of another text: all lists begin anew.
  void begin_anew() {
    counts_.clear();
    begun_.clear();
  }

  /// What people call a style in English, "heading 1"; its id where no file says it.
  std::string name_of(const std::string& style) const;
  /// The mark of the next paragraph, "3.2. ", "c) " or "- ", with what the paragraph itself says first; empty where it has none.
  std::string next(const std::string& style, const ListPlace& own);

 private:
  static constexpr int kLevels = 9;
  struct Level {
    std::string text;  ///< "%1.%2."
    char type = '1';   ///< as item_number's, '0' for "01", '-' for a bullet, ' ' for nothing
    std::int64_t start = 1;
    bool decimal = false;    ///< all numbers of the text are
    bool goes_on = false;    ///< it does not begin anew behind a higher level
    bool joined = false;     ///< nothing stands between the mark and the text
    std::string style = {};  ///< of paragraphs whose level it is
  };
  using Levels = std::array<Level, kLevels>;
  struct List {
    std::string of;                        ///< w:abstractNumId: lists of one count on
    std::map<int, std::int64_t> restarts;  ///< levels that begin anew with this list, and where
    std::map<int, Level> own;              ///< levels that are another in this list
  };
  struct Style {
    std::string name, parent;
    ListPlace place;
  };
  using Counts = std::array<std::optional<std::int64_t>, kLevels>;

  static void read_level(const XmlEvent& e, Level& level);
  const List* find(const std::string& list) const;
  const Level& level_of(const List& list, int level) const;
  ListPlace place_of(const std::string& style, const ListPlace& own) const;
  const Counts& count(const List& list, int level);
  std::string mark_of(const List& list, int level, const Counts& counts) const;

  std::map<std::string, Levels> levels_;      // by w:abstractNumId
  std::map<std::string, std::string> links_;  // by w:abstractNumId: the style that has its levels
  std::map<std::string, List> lists_;         // by w:numId
  std::map<std::string, Style> styles_;
  std::map<std::string, Counts> counts_;  // by w:abstractNumId
  std::set<std::string> begun_;           // lists whose restarts are done
};

}  // namespace lode
