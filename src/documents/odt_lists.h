// SPDX-License-Identifier: Apache-2.0
// The numbers of an ODT's list items and headings, which its text does not hold: list styles of content.xml and styles.xml say how they
// are made.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lode {

class XmlEvent;

class OdtLists {
 public:
  /// List styles of styles.xml. InputError for malformed XML; `where` begins the message.
  void read_styles(std::string_view xml, std::string_view where);
  /// The begin of any element: whether it belongs to a list style.
  void note_style(const XmlEvent& e);

  void begin_list(const XmlEvent& e);
  void end_list();
  void begin_item(const XmlEvent& e);
  /// The mark of a paragraph in an item, "3.2. ", "c) " or "- ": of the item's first one alone, which is when the item counts.
  std::string begin_paragraph();
  /// The number of a heading, "3.2 "; empty where it has none.
  std::string heading(int level, const XmlEvent& e);

 private:
  static constexpr int kLevels = 10;
  struct Level {
    char type = '-';  ///< as item_number's, '-' for a bullet, ' ' for nothing
    std::string prefix, suffix;
    std::int64_t start = 1;
    int shown = 1;  ///< levels whose numbers are in the mark
  };
  using Levels = std::array<Level, kLevels>;
  using Numbers = std::array<std::int64_t, kLevels>;
  struct List {
    std::string style, id;
    int level = 0;
    bool goes_on = false;                    ///< no item has counted since it went on with an earlier list
    bool counts = false;                     ///< the item's first paragraph is to come
    std::optional<std::int64_t> start = {};  ///< the item's own number
  };

  static std::string mark(const Levels& levels, const Numbers& numbers, int level);

  std::map<std::string, Levels> styles_;
  std::string style_;                       // that is being defined
  Levels outline_;                          // of headings
  bool outlines_ = false;                   // outline_ is said
  std::map<std::string, Numbers> numbers_;  // the last ones of each style
  std::map<std::string, Numbers> ended_;    // and of each list, by xml:id
  Numbers headings_ = {};
  std::vector<List> open_;
};

}  // namespace lode
