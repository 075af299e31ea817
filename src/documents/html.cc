// SPDX-License-Identifier: Apache-2.0
// HTML by libxml2's forgiving parser: what a reader sees, without scripts, styles and hidden elements, with the
// numbers of lists and notes.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "base/text.h"
#include "documents/encoding.h"
#include "documents/item_number.h"
#include "documents/readers.h"
#include "documents/table_row.h"
#include "lodestone/error.h"

#if LODE_LIBXML2
#include <libxml/HTMLparser.h>
#endif

namespace lode {

#if LODE_LIBXML2

namespace {

using namespace std::string_view_literals;

struct Element {
  std::string_view name;
  int breaks;             ///< line breaks around it; 0: it stands in a line, -1: it is not shown
  std::string_view mark;  ///< stands in front of its text
};
constexpr Element kElements[] = {
    {"script", -1, ""},    {"style", -1, ""},    {"template", -1, ""}, {"noscript", -1, ""},
    {"svg", -1, ""},       {"iframe", -1, ""},   {"object", -1, ""},   {"head", -1, ""},
    {"select", -1, ""},    {"datalist", -1, ""}, {"menu", 2, ""},      {"h1", 2, "# "},
    {"h2", 2, "## "},      {"h3", 2, "### "},    {"h4", 2, "#### "},   {"h5", 2, "##### "},
    {"h6", 2, "###### "},  {"p", 2, ""},         {"ul", 2, ""},        {"ol", 2, ""},
    {"dl", 2, ""},         {"table", 2, ""},     {"pre", 2, ""},       {"blockquote", 2, ""},
    {"figure", 2, ""},     {"section", 2, ""},   {"article", 2, ""},   {"header", 2, ""},
    {"footer", 2, ""},     {"nav", 2, ""},       {"aside", 2, ""},     {"main", 2, ""},
    {"div", 1, ""},        {"li", 1, "- "},      {"dt", 1, ""},        {"dd", 1, "  "},
    {"tr", 1, ""},         {"br", 1, ""},        {"hr", 2, ""},        {"caption", 1, ""},
    {"figcaption", 1, ""}, {"form", 1, ""},      {"option", 1, ""},    {"address", 1, ""},
    {"body", 1, ""},       {"title", 2, "# "},   {"details", 2, ""},   {"summary", 1, ""},
    {"fieldset", 2, ""},   {"legend", 1, ""},    {"video", -1, ""},    {"audio", -1, ""},
    {"canvas", -1, ""},
};

Element element_of(const xmlNode* node) {
  const std::string_view name(reinterpret_cast<const char*>(node->name));
  const auto* found = std::find_if(std::begin(kElements), std::end(kElements),
                                   [&](const Element& e) { return e.name == name; });
  return found == std::end(kElements) ? Element{name, 0, ""} : *found;
}

bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\n' || c == '\r' || c == '\f';
}

/// Lower case, without blanks: how CSS and HTML compare words.
std::string bare_word(std::string_view text) {
  std::string word;
  for (const char c : text)
    if (!is_blank(c)) word += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return word;
}

std::optional<std::string> attribute(const xmlNode* node, const char* name) {
  const std::unique_ptr<xmlChar, void (*)(void*)> value(xmlGetProp(node, BAD_CAST name), xmlFree);
  if (value == nullptr) return std::nullopt;
  return reinterpret_cast<const char*>(value.get());
}

/// What the element's own `style` says of a property, its last word on it; empty if nothing.
std::string style_of(const xmlNode* node, std::string_view property) {
  const std::string style = attribute(node, "style").value_or("");
  std::string found;
  for (std::size_t at = 0; at < style.size();) {
    const std::size_t end = std::min(style.find(';', at), style.size());
    const std::string_view declared = std::string_view(style).substr(at, end - at);
    const std::size_t colon = declared.find(':');
    if (colon != std::string_view::npos && bare_word(declared.substr(0, colon)) == property)
      found = bare_word(declared.substr(colon + 1));
    at = end + 1;
  }
  return found.substr(0, found.find('!'));  // !important
}

/// The names by which links may lead to the element.
std::vector<std::string> anchors_of(const xmlNode* node) {
  std::vector<std::string> names;
  if (node->properties == nullptr) return names;
  if (auto id = attribute(node, "id")) names.push_back(std::move(*id));
  if (element_of(node).name == "a")
    if (auto name = attribute(node, "name")) names.push_back(std::move(*name));
  return names;
}

/// The number by which the text refers to the element; empty if it does not.
std::string label_here(const xmlNode* node, const PageNotes& notes) {
  if (notes.labels.empty()) return {};
  for (const std::string& name : anchors_of(node))
    if (const auto found = notes.labels.find(notes.page + "#" + name); found != notes.labels.end())
      return found->second;
  return {};
}

/// A note, or a list of notes.
bool holds_notes(const xmlNode* node, const PageNotes& notes) {
  for (const char* name : {"epub:type", "role"}) {
    const std::string said = bare_word(attribute(node, name).value_or(""));
    for (const char* kind : {"footnote", "endnote", "rearnote"})
      if (said.find(kind) != std::string::npos) return true;
  }
  return !label_here(node, notes).empty();
}

/// Whether the element itself says that nobody sees it. A page hides its whole body until a script has run, and notes
/// until somebody asks for them: those are seen.
bool is_hidden(const xmlNode* node, std::string_view name, const PageNotes& notes) {
  if (node->properties == nullptr) return name == "dialog";
  if (name == "html" || name == "body" || holds_notes(node, notes)) return false;
  if (attribute(node, "hidden") || (name == "dialog" && !attribute(node, "open"))) return true;
  const std::string visibility = style_of(node, "visibility");
  return visibility == "hidden" || visibility == "collapse" || style_of(node, "display") == "none";
}

std::optional<std::int64_t> whole(const std::optional<std::string>& text) {
  if (!text) return std::nullopt;
  std::string_view digits = *text;
  while (!digits.empty() && is_blank(digits.front())) digits.remove_prefix(1);
  if (digits.starts_with('+')) digits.remove_prefix(1);
  std::int32_t value = 0;
  if (std::from_chars(digits.data(), digits.data() + digits.size(), value).ec != std::errc())
    return std::nullopt;
  return value;
}

/// A list whose items are being read.
struct List {
  char type = '-';  ///< as the attribute says it: 1, a, A, i or I; "-" when it is not numbered
  std::int64_t next = 1, step = 1;
  std::string mark;  ///< of the item that was entered last
};

/// The type that CSS names in `style`, or `type` where it names none.
char list_type(const xmlNode* node, char type) {
  constexpr std::pair<std::string_view, char> kStyles[] = {
      {"none", '-'},        {"disc", '-'},        {"decimal", '1'},
      {"lower-alpha", 'a'}, {"lower-latin", 'a'}, {"upper-alpha", 'A'},
      {"upper-latin", 'A'}, {"lower-roman", 'i'}, {"upper-roman", 'I'}};
  std::string style = style_of(node, "list-style-type");
  if (style.empty()) style = style_of(node, "list-style");
  for (const auto& [name, letter] : kStyles)
    if (style == name) return letter;
  return type;
}

List list_at(const xmlNode* node, std::string_view name) {
  List list;
  if (name != "ol") return list;
  const std::string type = attribute(node, "type").value_or("1");
  list.type = list_type(node, type.size() == 1 && type.find_first_of("1aAiI") == 0 ? type[0] : '1');
  const auto start = whole(attribute(node, "start"));
  if (attribute(node, "reversed")) {
    list.step = -1;
    list.next = 0;
    for (const xmlNode* item = node->children; item != nullptr; item = item->next)
      list.next += item->type == XML_ELEMENT_NODE && element_of(item).name == "li" ? 1 : 0;
  }
  list.next = start.value_or(list.next);
  return list;
}

/// "3. ", "c. " or "- ".
std::string mark_of(char type, std::int64_t number) {
  return type == '-' ? "- " : item_number(type, number) + ". ";
}

bool has_name(const xmlNode* node, std::string_view name) {
  return node != nullptr && node->type == XML_ELEMENT_NODE && element_of(node).name == name;
}

/// Where a link leads: the page's name and the id there; empty when it names no id, or leaves the document.
std::string target_of(const xmlNode* link, const PageNotes& notes) {
  const std::string href = attribute(link, "href").value_or("");
  const std::size_t hash = href.find('#');
  if (hash == std::string::npos || hash + 1 == href.size() ||
      href.substr(0, hash).find(':') != std::string::npos)
    return {};
  const std::string page = hash == 0 ? notes.page : name_in_archive(notes.page, href.substr(0, hash));
  return page + href.substr(hash);
}

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// Whether a note could be called that: "1", "12a", "b", "cc", "iv", "*", "note 1", but not "th".
bool looks_like_label(std::string_view text) {
  if (text.empty()) return false;
  const auto is_sign = [](char c) { return !is_letter(c) && !is_digit(c) && !is_blank(c); };
  const std::size_t words = static_cast<std::size_t>(
      std::find_if_not(text.begin(), text.end(), [](char c) { return is_letter(c); }) - text.begin());
  std::string_view rest = text.substr(words);
  if (words == text.size()) {
    const bool alike = std::all_of(text.begin(), text.end(), [&](char c) { return c == text[0]; });
    return alike || text.find_first_not_of("ivxlc") == text.npos ||
           text.find_first_not_of("IVXLC") == text.npos;
  }
  // Beyond ASCII: signs as they are in U+0080 to U+00BF and U+2000 to U+2FFF, or one letter, with a number or without.
  std::size_t characters = 0, letters = 0;
  for (const char c : rest) {
    const auto byte = static_cast<unsigned char>(c);
    characters += (byte & 0xc0) != 0x80 ? 1 : 0;
    letters += byte >= 0xc3 && byte != 0xe2 ? 1 : 0;
  }
  if (words == 0 && std::all_of(rest.begin(), rest.end(), is_sign))
    return letters == 0 ? characters <= 4 : characters == 1;
  if (words > 0 && is_blank(rest.front())) rest.remove_prefix(1);
  while (words == 0 && letters == 1 && !rest.empty() && is_sign(rest.front())) rest.remove_prefix(1);
  const auto end = std::find_if_not(rest.begin(), rest.end(), is_digit);
  const auto behind = rest.end() - end;
  return end != rest.begin() && (behind == 0 || (behind == 1 && is_letter(*end)));
}

/// A link's text where it looks like a note's number.
std::string label_of(const xmlNode* link) {
  constexpr std::size_t kLongest = 12;
  const std::unique_ptr<xmlChar, void (*)(void*)> content(xmlNodeGetContent(link), xmlFree);
  std::string_view text = content == nullptr ? "" : reinterpret_cast<const char*>(content.get());
  const auto at_edge = [](char c) {
    return is_blank(c) || std::string_view("[](){}.:").find(c) != std::string_view::npos;
  };
  while (!text.empty() && at_edge(text.front())) text.remove_prefix(1);
  while (!text.empty() && at_edge(text.back())) text.remove_suffix(1);
  const bool arrow = text.starts_with("\xe2\x86") || text.starts_with("\xe2\x87") || text.starts_with("^");
  return text.size() > kLongest || arrow || !looks_like_label(text) ? std::string() : std::string(text);
}

/// A link to a note.
struct NoteLink {
  std::string target, label;  ///< an empty label: it is none
  bool says_so = false;       ///< else it is raised
};
NoteLink note_link(const xmlNode* node, const PageNotes& notes) {
  if (!has_name(node, "a")) return {};
  std::string target = target_of(node, notes);
  if (target.empty()) return {};
  bool is_note = false;
  for (const char* name : {"epub:type", "role", "class"}) {
    const std::string said = bare_word(attribute(node, name).value_or(""));
    if (said.find("backlink") != std::string::npos || said.find("footnote-back") != std::string::npos)
      return {};
    is_note = is_note || said.find("noteref") != std::string::npos ||
              said.find("footnote-ref") != std::string::npos;
  }
  const bool says_so = is_note;
  const xmlNode* above = node->parent;
  while (has_name(above, "span") || has_name(above, "b") || has_name(above, "i")) above = above->parent;
  is_note = is_note || has_name(above, "sup");
  for (const xmlNode* inside = node->children; inside != nullptr; inside = inside->next)
    is_note = is_note || has_name(inside, "sup");
  if (!is_note) return {};
  return {.target = std::move(target), .label = label_of(node), .says_so = says_so};
}

/// A paragraph, heading, item or cell.
bool is_paragraph(const xmlNode* node) {
  constexpr std::array kNames = {"p"sv,  "li"sv, "dt"sv, "dd"sv, "td"sv, "th"sv,
                                 "h1"sv, "h2"sv, "h3"sv, "h4"sv, "h5"sv, "h6"sv};
  return node->type == XML_ELEMENT_NODE &&
         std::find(kNames.begin(), kNames.end(), element_of(node).name) != kNames.end();
}

/// An anchor without text stands for the paragraph that it is in.
bool is_empty_anchor(const xmlNode* node) {
  return node->children == nullptr && (has_name(node, "a") || has_name(node, "span"));
}

/// Calls `enter` on each node in the document's order and `leave` behind what is inside, unless `enter` says false.
/// Without recursion: a page may be nested as deep as it likes.
template <class Enter, class Leave>
void walk(const xmlNode* root, const Enter& enter, const Leave& leave) {
  for (const xmlNode* node = root; node != nullptr;) {
    const bool shown = enter(node);
    if (shown && node->children != nullptr) {
      node = node->children;
      continue;
    }
    if (shown) leave(node);
    while (node != root && node->next == nullptr) {
      node = node->parent;
      leave(node);
    }
    node = node == root ? nullptr : node->next;
  }
}

/// Adds the notes that the page refers to. A link to what stands in front of it, or around it, leads to no note, nor
/// one from a note to what is not here: most lead back to where the note was referred to.
void add_notes(const xmlNode* root, PageNotes& notes) {
  struct Reference {
    std::size_t place;
    bool in_note;
    NoteLink link;
  };
  std::map<std::string, std::size_t> anchors;                      // where each begins
  std::vector<std::pair<const xmlNode*, std::size_t>> paragraphs;  // that are open, and where they begin
  std::vector<Reference> references;
  std::set<std::string> targets;       // of the references
  std::vector<const xmlNode*> inside;  // notes that are open
  std::size_t place = 0;
  walk(
      root,
      [&](const xmlNode* node) {
        if (node->type != XML_ELEMENT_NODE) return false;
        ++place;
        if (is_paragraph(node)) paragraphs.emplace_back(node, place);
        const bool empty = is_empty_anchor(node) && !paragraphs.empty();
        const auto [holder, begin] = empty ? paragraphs.back() : std::pair(node, place);
        for (const std::string& name : anchors_of(node)) {
          const std::string full = notes.page + "#" + name;
          anchors.emplace(full, begin);
          const bool note = targets.contains(full) || notes.labels.contains(full);
          if (note && std::find(inside.begin(), inside.end(), holder) == inside.end())
            inside.push_back(holder);
        }
        if (NoteLink link = note_link(node, notes); !link.label.empty()) {
          targets.insert(link.target);
          references.push_back({place, !inside.empty(), std::move(link)});
        }
        return true;
      },
      [&](const xmlNode* node) {
        if (is_paragraph(node)) paragraphs.pop_back();
        std::erase(inside, node);
      });
  for (const Reference& reference : references) {
    const std::string& target = reference.link.target;
    const auto here = anchors.find(target);
    if (here == anchors.end() && reference.in_note && !reference.link.says_so) continue;
    const bool behind =
        here == anchors.end()
            ? reference.link.says_so || !notes.searched.contains(target.substr(0, target.find('#')))
            : here->second > reference.place;
    if (behind) notes.labels.emplace(target, reference.link.label);
  }
}

bool is_cell(std::string_view name) {
  return name == "td" || name == "th";
}

bool is_row_group(std::string_view name) {
  return name == "thead" || name == "tbody" || name == "tfoot";
}

/// Over how many columns or rows a cell goes, as browsers read it; 0 rows are those to the end.
std::int64_t span_of(const xmlNode* cell, const char* name) {
  const bool rows = name == "rowspan"sv;
  const std::int64_t span = whole(attribute(cell, name)).value_or(1);
  if (span < 0 || (span == 0 && !rows)) return 1;
  return std::min<std::int64_t>(span, rows ? 65534 : 1000);
}

/// Whether one of the table's own cells, none of a table in it, goes over several columns or rows.
bool has_spans(const xmlNode* table) {
  bool found = false;
  walk(
      table,
      [&](const xmlNode* node) {
        if (found || node->type != XML_ELEMENT_NODE) return false;
        const std::string_view name = element_of(node).name;
        if (is_cell(name) && node->properties != nullptr)
          found = span_of(node, "colspan") != 1 || span_of(node, "rowspan") != 1;
        return node == table || name != "table";
      },
      [](const xmlNode*) {});
  return found;
}

/// Without blanks: files are indented.
std::size_t text_bytes(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return !is_blank(c); }));
}

/// How a row stands in the text.
struct RowShape {
  bool columns = false;  ///< nothing in its cells needs lines of its own: each cell is in its column
  bool line = false;     ///< and it has several: paragraphs in them are parts of a line
};

/// A page that is laid out in a table has paragraphs of much text in its cells, and they are none of a row.
RowShape shape_of(const xmlNode* row, const PageNotes& notes) {
  constexpr std::size_t kMostText = 1000;  // bytes, where there are paragraphs
  constexpr int kMostBreaks = 2;           // in a cell; a poem has more
  constexpr std::array kOwnLines = {"tr"sv, "table"sv, "ul"sv, "ol"sv, "menu"sv, "dl"sv, "pre"sv,
                                    "h1"sv, "h2"sv,    "h3"sv, "h4"sv, "h5"sv,   "h6"sv};
  std::size_t bytes = 0;
  int cells = 0, breaks = 0;
  bool paragraphs = false, lines = false;
  walk(
      row,
      [&](const xmlNode* node) {
        if (lines || node == row) return !lines;
        if ((node->type == XML_TEXT_NODE || node->type == XML_CDATA_SECTION_NODE) && node->content != nullptr)
          bytes += text_bytes(reinterpret_cast<const char*>(node->content));
        if (node->type != XML_ELEMENT_NODE) return false;
        const Element element = element_of(node);
        if (element.breaks < 0 || is_hidden(node, element.name, notes)) return false;
        if (is_cell(element.name)) ++cells, breaks = 0;
        paragraphs = paragraphs || element.breaks > 0;
        lines = (element.name == "br" && ++breaks > kMostBreaks) ||
                std::find(kOwnLines.begin(), kOwnLines.end(), element.name) != kOwnLines.end();
        return !lines;
      },
      [](const xmlNode*) {});
  const bool columns = !lines && (!paragraphs || bytes <= kMostText);
  return {columns, columns && cells > 1};
}

/// A table that is open: where the cells of its rows stand.
class Table {
 public:
  explicit Table(bool spans) : spans_(spans) {}
  const RowShape& row() const { return shape_; }
  bool has_spans() const { return spans_; }
  /// Whether a cell is open whose row stands in one line.
  bool in_line() const { return shape_.line && cells_ > 0; }
  void note_cell() { ++cells_; }
  void end_cell() { cells_ = std::max(0, cells_ - 1); }
  /// How much text there was in front of the row.
  std::size_t begin() const { return begin_; }

  void begin_row(std::size_t text, const RowShape& shape) {
    row_ = {};
    shape_ = shape;
    cells_ = 0;
    begin_ = text;
    ++number_;
  }
  /// Cells go on in rows of their own thead, tbody or tfoot alone.
  void begin_rows() { ends_.clear(); }

  /// How many bars stand in front of the cell.
  std::size_t begin_cell(const xmlNode* cell, EmptyCells& empty) {
    while (row_.column() < ends_.size() && ends_[row_.column()] > number_) row_.cover(1);
    const std::size_t first = row_.column(), bars = row_.begin_cell(empty);
    shape_.line = shape_.line || (shape_.columns && bars > 0);  // beside a cell of a row above
    row_.cover(static_cast<std::size_t>(span_of(cell, "colspan") - 1));
    const std::int64_t rows = span_of(cell, "rowspan"), end = rows == 0 ? INT64_MAX : number_ + rows;
    const std::size_t behind = std::min(row_.column(), kTableColumns);
    if (rows == 1 || first >= behind) return bars;
    if (ends_.size() < behind) ends_.resize(behind, 0);
    std::fill(ends_.begin() + static_cast<std::ptrdiff_t>(first),
              ends_.begin() + static_cast<std::ptrdiff_t>(behind), end);
    return bars;
  }

 private:
  bool spans_;
  RowShape shape_;
  int cells_ = 0;  // that are open
  TableRow row_;
  std::size_t begin_ = 0;
  std::int64_t number_ = 0;         // of the row
  std::vector<std::int64_t> ends_;  // of each column: the row in which it is free again
};

/// Puts what is shown.
class Walk {
 public:
  Walk(bool lines, const PageNotes& notes, TextBuilder& out) : lines_(lines), notes_(notes), out_(out) {}

  void run(const xmlNode* root) {
    walk(
        root, [&](const xmlNode* node) { return enter(node); }, [&](const xmlNode* node) { leave(node); });
  }

 private:
  /// False: what is inside is not shown, or was put.
  bool enter(const xmlNode* node) {
    if (node->type == XML_TEXT_NODE || node->type == XML_CDATA_SECTION_NODE) return text(node), false;
    if (node->type != XML_ELEMENT_NODE) return false;
    const Element element = element_of(node);
    if (element.breaks < 0 || is_hidden(node, element.name, notes_)) return false;
    if (lines_) line_ = static_cast<std::int32_t>(std::min<long>(xmlGetLineNo(node), INT32_MAX));
    const bool list = is_list(element.name), nested = list && !lists_.empty();
    if (element.breaks > 0 && in_line())
      out_.space();
    else if (element.breaks > 0)
      out_.break_line(nested ? 1 : element.breaks);
    enter_table(node, element.name);
    if (element.name == "pre") ++pre_;
    if (list) lists_.push_back(list_at(node, element.name));
    if (element.name == "li")
      pending_ += item_mark(node);
    else
      pending_ += element.mark;
    await_note(node);
    if (element.name == "img") alternative(node);
    if (element.name == "sup") return raised(node);
    if (const NoteLink link = note_link(node, notes_);
        !link.label.empty() &&
        (link.says_so || link.label == label_ || notes_.labels.contains(link.target) || touches(link.label)))
      return put("[" + link.label + "]"), false;
    return true;
  }

  void leave(const xmlNode* node) {
    if (node->type != XML_ELEMENT_NODE) return;
    const Element element = element_of(node);
    if (is_list(element.name) && !lists_.empty()) lists_.pop_back();
    const int breaks = is_list(element.name) && !lists_.empty() ? 1 : element.breaks;
    if (is_cell(element.name)) end_cell();
    if (breaks > 0 && in_line())
      out_.space();
    else if (breaks > 0 && element.name != "br")
      out_.break_line(breaks);
    if (element.name == "pre" && pre_ > 0) --pre_;
    if (!tables_.empty()) leave_table(element.name);
    const std::string_view mark = element.name != "li" ? element.mark
                                  : lists_.empty()     ? "- "sv
                                                       : std::string_view(lists_.back().mark);
    if (!mark.empty() && pending_.ends_with(mark)) pending_.resize(pending_.size() - mark.size());
  }

  static bool is_list(std::string_view name) { return name == "ol" || name == "ul" || name == "menu"; }

  void enter_table(const xmlNode* node, std::string_view name) {
    if (name == "table") tables_.emplace_back(has_spans(node));
    if (is_cell(name)) enter_cell(node);
    if (tables_.empty()) return;
    if (name == "tr") tables_.back().begin_row(out_.text().size(), shape_of(node, notes_));
    if (is_row_group(name)) tables_.back().begin_rows();
  }

  void leave_table(std::string_view name) {
    if (name == "tr") end_row();
    if (is_row_group(name)) tables_.back().begin_rows();
    if (name == "table") tables_.pop_back();
  }

  void end_cell() {
    --cells_;
    if (!tables_.empty()) tables_.back().end_cell();
  }

  /// In a cell of a row that stands in one line.
  bool in_line() const { return !tables_.empty() && tables_.back().in_line(); }

  /// A bar stands between cells in a line. Where cells are in their columns, an empty cell stands for each column that a span
  /// covers.
  void enter_cell(const xmlNode* node) {
    ++cells_;
    const bool starts = out_.at_line_start();
    std::size_t bars = starts ? 0 : 1;
    if (!tables_.empty()) tables_.back().note_cell();
    if (!tables_.empty() && (tables_.back().row().columns || tables_.back().has_spans())) {
      const std::size_t own = tables_.back().begin_cell(node, empty_);
      if (tables_.back().row().columns || !starts) bars = std::max(bars, own);
    }
    const std::string label = std::exchange(label_, {});  // of the note's text, not of a bar
    for (std::size_t bar = 0; bar < bars; ++bar) out_.space(), put("| ");
    label_ = label;
  }

  /// A row of empty cells is nothing.
  void end_row() {
    const std::size_t begin = std::min(tables_.back().begin(), out_.text().size());
    if (out_.text().find_first_not_of(" |\n", begin) == std::string::npos) out_.cut(begin);
  }

  std::string item_mark(const xmlNode* node) {
    if (lists_.empty()) return "- ";
    List& list = lists_.back();
    list.next = whole(attribute(node, "value")).value_or(list.next);
    const std::size_t deep = pending_.empty() ? std::min<std::size_t>(lists_.size() - 1, 8) : 0;
    list.mark = std::string(2 * deep, ' ') + mark_of(list_type(node, list.type), list.next);
    list.next += list.step;
    return list.mark;
  }

  /// A note begins with the number by which the text refers to it, unless it has it already.
  void await_note(const xmlNode* node) {
    std::string label = label_here(node, notes_);
    const bool too_late = is_empty_anchor(node) && !out_.at_line_start();
    if (!label.empty() && !too_late) label_ = std::move(label);
  }

  /// A raised number must not be one with what stands beside it: "10^6", and "[1] " in front of a note. A cell may begin
  /// with one that is none's, as in an isotope.
  bool raised(const xmlNode* node) {
    const xmlNode* const inside = node->children;
    if (inside == nullptr || inside->next != nullptr || inside->content == nullptr) return true;
    const std::string number = bare_word(reinterpret_cast<const char*>(inside->content));
    if (number.empty() || number.find_first_not_of("0123456789+-") != std::string::npos) return true;
    if (out_.text().ends_with(' ')) return true;
    const bool begins = out_.at_line_start();
    if (begins && cells_ > 0 && label_ != number) return true;
    put(begins ? "[" + number + "]" : "^" + number);
    if (begins) out_.space();
    return false;
  }

  /// Whether a raised number, of a link that leads to no note, would be one with what stands in front of it.
  bool touches(std::string_view number) const {
    return std::all_of(number.begin(), number.end(), is_digit) && !out_.at_line_start() &&
           !out_.text().ends_with(' ');
  }

  void alternative(const xmlNode* node) {
    const std::string alt = attribute(node, "alt").value_or("");
    if (!alt.empty()) put("[" + alt + "]");
  }

  void put(std::string_view text) {
    if (lines_) out_.at(0, line_);
    if (!label_.empty()) number_note(text);
    if (!pending_.empty()) out_.put(pending_);
    pending_.clear();
    out_.put(text);
  }

  /// The note's own number takes the place of its item's.
  void number_note(std::string_view text) {
    const std::string label = std::exchange(label_, {});
    if (!lists_.empty() && !lists_.back().mark.empty() && pending_.ends_with(lists_.back().mark))
      pending_.resize(pending_.size() - lists_.back().mark.size());
    std::string_view begin = text;
    while (!begin.empty() && std::string_view("[(").find(begin.front()) != std::string_view::npos)
      begin.remove_prefix(1);
    const bool says_it = begin.starts_with(label) &&
                         (begin.size() == label.size() ||
                          std::string_view(".:)] \n").find(begin[label.size()]) != std::string_view::npos);
    if (!says_it) pending_ += "[" + label + "] ";
  }

  void text(const xmlNode* node) {
    if (node->content == nullptr) return;
    const std::string_view all(reinterpret_cast<const char*>(node->content));
    if (pre_ > 0) return put(all);
    for (std::size_t at = 0; at < all.size();) {
      if (is_blank(all[at])) {
        out_.space();
        ++at;
        continue;
      }
      std::size_t end = at;
      while (end < all.size() && !is_blank(all[end])) ++end;
      put(all.substr(at, end - at));
      at = end;
    }
  }

  bool lines_;
  const PageNotes& notes_;
  TextBuilder& out_;
  int pre_ = 0, cells_ = 0;
  std::int32_t line_ = 1;
  std::vector<List> lists_;    // from the outermost
  std::vector<Table> tables_;  // from the outermost
  EmptyCells empty_;
  std::string pending_;  // marks of the elements that were entered, until they have text
  std::string label_;    // of the note that was entered, until it has text
};

void silent(void*, const char*, ...) {}

/// "iso-8859-1" of a charset that the page's first kilobytes declare; the parser obeys those by itself.
bool declares_encoding(std::string_view bytes) {
  std::string head(bytes.substr(0, 4096));
  for (char& c : head) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return head.find("charset") != std::string::npos ||
         (head.starts_with("<?xml") && head.find("encoding=") < head.find("?>"));
}

const xmlNode* find_title(const xmlNode* root) {
  for (const xmlNode* head = root->children; head != nullptr; head = head->next) {
    if (head->type != XML_ELEMENT_NODE ||
        std::string_view(reinterpret_cast<const char*>(head->name)) != "head")
      continue;
    for (const xmlNode* node = head->children; node != nullptr; node = node->next)
      if (node->type == XML_ELEMENT_NODE &&
          std::string_view(reinterpret_cast<const char*>(node->name)) == "title")
        return node;
  }
  return nullptr;
}

/// What is shown of an element, with its mark.
std::string shown(const xmlNode* node, std::string_view where) {
  TextBuilder out(SIZE_MAX, std::string(where));
  Walk(false, {}, out).run(node);
  out.finish();
  return out.take_text();
}

/// Whether the page shows a heading of the first level that reads like this.
bool has_heading(const xmlNode* root, std::string_view heading, std::string_view where) {
  for (const xmlNode* node = root; node != nullptr;) {
    const bool element = node->type == XML_ELEMENT_NODE, h1 = element && element_of(node).name == "h1";
    if (h1 && shown(node, where) == heading) return true;
    const bool inside =
        element && !h1 && element_of(node).breaks >= 0 && !is_hidden(node, element_of(node).name, {});
    if (inside && node->children != nullptr) {
      node = node->children;
      continue;
    }
    while (node != root && node->next == nullptr) node = node->parent;
    node = node == root ? nullptr : node->next;
  }
  return false;
}

/// The page as a tree.
using Page = std::unique_ptr<xmlDoc, void (*)(xmlDoc*)>;
Page parse_page(std::string_view bytes, std::string_view where) {
  constexpr std::size_t kLargest = std::size_t{256} << 20;
  if (bytes.size() > kLargest)
    throw InputError(fmt::format("{}: expected a page of at most {}, found {}", where, human_bytes(kLargest),
                                 human_bytes(static_cast<std::int64_t>(bytes.size()))));
  std::string converted;
  const char* encoding = nullptr;
  if (bytes.starts_with("\xef\xbb\xbf") || bytes.starts_with("\xff\xfe") || bytes.starts_with("\xfe\xff") ||
      !declares_encoding(bytes)) {
    converted = text_as_utf8(bytes, where);
    bytes = converted;
    encoding = "UTF-8";
  }
  xmlSetGenericErrorFunc(nullptr, silent);
  Page page(htmlReadMemory(bytes.data(), static_cast<int>(bytes.size()), nullptr, encoding,
                           HTML_PARSE_RECOVER | HTML_PARSE_NOERROR | HTML_PARSE_NOWARNING | HTML_PARSE_NONET |
                               HTML_PARSE_COMPACT),
            xmlFreeDoc);
  if (page == nullptr || xmlDocGetRootElement(page.get()) == nullptr)
    throw InputError(fmt::format("{}: expected a page in HTML, found one without any element", where));
  return page;
}

}  // namespace

void find_notes(std::string_view bytes, std::string_view where, PageNotes& notes) {
  const Page page = parse_page(bytes, where);
  add_notes(xmlDocGetRootElement(page.get()), notes);
  notes.searched.insert(notes.page);
}

void put_html(std::string_view bytes, std::string_view where, bool lines, const PageNotes& notes,
              TextBuilder& out) {
  const Page page = parse_page(bytes, where);
  const xmlNode* const root = xmlDocGetRootElement(page.get());
  // A page's title heads it, as its reader sees it; most pages say it again in their first heading.
  const xmlNode* const title = lines ? find_title(root) : nullptr;
  if (title != nullptr && !has_heading(root, shown(title, where), where)) Walk(lines, {}, out).run(title);
  PageNotes own;
  if (notes.page.empty()) add_notes(root, own);
  Walk(lines, notes.page.empty() ? own : notes, out).run(root);
  out.break_line();
}

#else

void find_notes(std::string_view, std::string_view, PageNotes&) {}

void put_html(std::string_view, std::string_view where, bool, const PageNotes&, TextBuilder&) {
  throw InputError(
      fmt::format("{}: HTML needs a build with libxml2, which this one lacks (apt install libxml2-dev, "
                  "then build again)",
                  where));
}

#endif

DocumentText read_html(std::string_view bytes, std::string_view where, const ReadOptions& options) {
  TextBuilder out(options.largest_text, std::string(where));
  put_html(bytes, where, true, {}, out);
  out.finish();
  if (out.text().empty())
    throw InputError(fmt::format("{}: expected a page with text, found none in it", where));
  return {.text = out.take_text(), .marks = out.take_marks()};
}

}  // namespace lode
