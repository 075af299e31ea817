// SPDX-License-Identifier: Apache-2.0
// ODT (OpenDocument text): paragraphs, headings, lists with their numbers, tables, notes, without what fields, sections and the styles of
// content.xml hide; pages where the program noted its soft page breaks.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <set>
#include <utility>
#include <vector>

#include "documents/archive.h"
#include "documents/odt_lists.h"
#include "documents/readers.h"
#include "documents/table_row.h"
#include "documents/xml.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr const char *kBody = "content.xml", *kStyles = "styles.xml", *kManifest = "META-INF/manifest.xml";
constexpr std::string_view kCovered = "table:covered-table-cell";  // by a neighbour's span
constexpr std::size_t kRows = 1000;                                // that equal their neighbour
constexpr std::size_t kCopies = std::size_t{1} << 20;  // bytes of a document's repeated cells and rows

class Reader {
 public:
  Reader(bool paged, OdtLists& lists, TextBuilder& out) : out_(out), numbers_(lists), page_(paged ? 1 : 0) {
    out_.at(page_, 1);
  }

  void take(const XmlEvent& e) {
    if (e.kind == XmlEvent::Kind::begin) note_style(e), numbers_.note_style(e);
    if (e.name == "style:style" && (e.kind == XmlEvent::Kind::end || e.empty)) style_.clear();
    if (e.kind == XmlEvent::Kind::begin && skip_ == 0 && e.name == kCovered)
      tables_.back().row.cover(repeats_of(e.attribute("table:number-columns-repeated")));
    const bool skips = e.kind == XmlEvent::Kind::begin && (skip_ > 0 || skipped(e.name) || is_hidden(e));
    if (skips && !e.empty) ++skip_;
    if (skip_ > 0 || skips) {
      if (e.kind == XmlEvent::Kind::end) --skip_;
      return;
    }
    if (e.kind == XmlEvent::Kind::text) {
      if (!paragraphs_.empty()) put_collapsed(e.text);
      return;
    }
    if (e.kind == XmlEvent::Kind::begin) enter(e);
    if (e.kind == XmlEvent::Kind::end || e.empty) leave(e.name);
  }

  std::int32_t pages() const { return page_; }
  /// Some repeated cells or rows were left out.
  bool left_out() const { return copies_end_; }

 private:
  /// What was deleted, comments, and where the text says nothing.
  static bool skipped(std::string_view name) {
    return name == "text:tracked-changes" || name == "office:annotation" || name == "text:sequence-decls" ||
           name == "office:automatic-styles" || name == "office:scripts" || name == "text:note-citation" ||
           name == kCovered;
  }

  /// A table that is open, with its row.
  struct Table {
    TableRow row = {};
    std::size_t begin = 0, repeated = 1;  ///< of the row's text; how often it stands there
  };
  /// A cell that is open.
  struct Cell {
    std::size_t before, begin;  ///< of the bars in front of it, and of its text
    std::size_t repeated;       ///< in how many columns it stands
    TableRow row;               ///< as it was in front of it
  };

  enum class Head { none, title, heading };
  /// One that is open; a note's lie in that which refers to it.
  struct Paragraph {
    std::size_t begin;  ///< of the text
    Head head;
    bool hidden = false;  ///< by a field in it
  };

  /// Styles of the document's own: those of titles, and those that hide. List styles have text properties, too.
  void note_style(const XmlEvent& e) {
    if (e.name == "style:style") {
      style_ = e.attribute("style:name");
      if (e.attribute("style:parent-style-name") == "Title") titles_.insert(style_);
    }
    if (e.name == "style:text-properties" && !style_.empty() && e.attribute("text:display") == "none")
      hiding_.insert(style_);
  }

  /// What the condition of a field or section came to when the document was saved. Programs leave "false" out.
  static bool is_off(const XmlEvent& e) { return e.attribute("text:is-hidden") == "true"; }

  bool is_hidden(const XmlEvent& e) const {
    if (e.name == "text:hidden-text") return is_off(e);
    if (e.name == "text:section") {
      const std::string display = e.attribute("text:display");
      return display == "none" || (display == "condition" && is_off(e));
    }
    const bool styled = e.name == "text:span" || e.name == "text:p" || e.name == "text:h";
    return styled && !hiding_.empty() && hiding_.contains(e.attribute("text:style-name"));
  }

  /// Many documents say their title again in the heading right behind it. A paragraph without text leaves nothing to the
  /// next, except an item its mark.
  void end_paragraph() {
    const Paragraph ended = paragraphs_.back();
    paragraphs_.pop_back();
    const std::size_t begin = std::min(ended.begin, out_.text().size());
    if (ended.hidden) out_.cut(begin);
    if (notes_ > 0) return;
    if (prefix_ != mark_) prefix_.clear();
    const std::string said = out_.text().substr(begin);
    if (said.find_first_not_of(' ') == std::string::npos) return;
    if (ended.head == Head::heading && said == title_) out_.cut(begin);
    title_ = ended.head == Head::title ? said : std::string();
  }

  void enter(const XmlEvent& e) {
    if (e.name == "text:p" || e.name == "text:h") {
      if (cells_.empty() && notes_ == 0) out_.break_line(lists_ > 0 ? 1 : 2);
      if (std::string mark = numbers_.begin_paragraph(); !mark.empty()) prefix_ = mark_ = std::move(mark);
      if (e.name == "text:h") heading(e);
      const bool title = e.name == "text:p" && titles_.contains(e.attribute("text:style-name"));
      if (title) prefix_ = "# ";
      paragraphs_.push_back(
          {out_.text().size(), title ? Head::title : (e.name == "text:h" ? Head::heading : Head::none)});
    }
    if (e.name == "text:hidden-paragraph" && !paragraphs_.empty() && is_off(e))
      paragraphs_.back().hidden = true;
    if (e.name == "text:list") ++lists_, numbers_.begin_list(e);
    if (e.name == "text:list-item" || e.name == "text:list-header") numbers_.begin_item(e);
    if (e.name == "table:table") tables_.emplace_back();
    if (e.name == "table:table-row") begin_row(e);
    if (e.name == "table:table-cell") begin_cell(e);
    if (e.name == "text:note") ++notes_, out_.space(), put("[");
    if (e.name == "text:tab") put("\t");
    if (e.name == "text:line-break") put("\n");
    if (e.name == "text:s") put(std::string(blanks(e.attribute("text:c")), ' '));
    if (e.name == "text:soft-page-break" && page_ > 0) out_.at(++page_, 1);
  }

  void leave(std::string_view name) {
    if (name == "text:p" || name == "text:h") {
      end_paragraph();
      if (!cells_.empty() || notes_ > 0) out_.space();
    }
    if (name == "text:list") --lists_, numbers_.end_list();
    if (name == "text:list-item") prefix_.clear();
    if (name == "table:table-cell") end_cell();
    if (name == "table:table-row") end_row();
    if (name == "table:table") {
      if (tables_.size() > 1) tables_.pop_back();
      out_.break_line(2);
    }
    if (name == "text:note") --notes_, out_.cut(out_.text().find_last_not_of(' ') + 1), put("]");
  }

  void begin_row(const XmlEvent& e) {
    out_.break_line();
    tables_.back() = {.begin = out_.text().size(),
                      .repeated = repeats_of(e.attribute("table:number-rows-repeated"))};
  }

  void begin_cell(const XmlEvent& e) {
    TableRow& row = tables_.back().row;
    cells_.push_back({.before = out_.text().size(),
                      .repeated = repeats_of(e.attribute("table:number-columns-repeated")),
                      .row = row});
    put_bars(row.begin_cell(empty_));
    cells_.back().begin = out_.text().size();
  }

  void put_bars(std::size_t bars) {
    for (; bars > 0; --bars) out_.space(), put("| ");
  }

  /// Neighbours that are equal stand in the file once. Empty ones count where a cell with text follows them.
  void end_cell() {
    if (cells_.empty()) return;
    const Cell cell = cells_.back();
    cells_.pop_back();
    if (cell.repeated < 2) return;
    TableRow& row = tables_.back().row;
    const std::string text = text_from(cell.begin);
    if (is_blank(text)) {
      out_.cut(std::min(cell.before, out_.text().size()));
      row = cell.row;
      row.cover(cell.repeated);
      return;
    }
    for (std::size_t times = 1; times < cell.repeated && may_copy(text, row.column() < kTableColumns);
         ++times) {
      put_bars(row.begin_cell(empty_));
      put(text);
    }
  }

  void end_row() {
    const Table table = tables_.back();
    if (table.repeated < 2) return;
    const std::string text = text_from(table.begin);
    if (is_blank(text)) return out_.cut(std::min(table.begin, out_.text().size()));
    for (std::size_t times = 1; times < table.repeated && may_copy(text, times < kRows); ++times) {
      out_.break_line();
      put(text);
    }
  }

  /// What stands behind the first `begin` bytes, without blanks at its end.
  std::string text_from(std::size_t begin) const {
    std::string text = out_.text().substr(std::min(begin, out_.text().size()));
    text.erase(text.find_last_not_of(" \t\n") + 1);
    return text;
  }

  static bool is_blank(const std::string& text) {
    return text.find_first_not_of(" \t\n|") == std::string::npos;
  }

  /// Whether the document still has room for a copy of it. A file of a few bytes can ask for gigabytes: 16,384 columns of
  /// 1,048,576 rows.
  bool may_copy(const std::string& text, bool has_place) {
    const bool may = has_place && text.size() <= copies_;
    if (may) copies_ -= text.size();
    copies_end_ = copies_end_ || !may;
    return may;
  }

  static std::size_t blanks(const std::string& count) {
    std::size_t n = 1;
    std::from_chars(count.data(), count.data() + count.size(), n);
    return std::min<std::size_t>(n, 1000);
  }

  void heading(const XmlEvent& e) {
    const std::string level = e.attribute("text:outline-level");
    std::size_t n = 1;
    std::from_chars(level.data(), level.data() + level.size(), n);
    const bool bullet = prefix_.find_first_not_of(' ') == prefix_.rfind("- ");
    const bool numbered = !prefix_.empty() && !bullet;  // as an item of a list
    const std::string number =
        numbered ? prefix_ : numbers_.heading(static_cast<int>(std::min<std::size_t>(n, 100)), e);
    prefix_ = std::string(std::clamp<std::size_t>(n, 1, 6), '#') + " " + number;
  }

  /// Any run of blanks and line breaks of the XML is one blank.
  void put_collapsed(std::string_view text) {
    std::string words;
    for (const char c : text) {
      const bool blank = c == ' ' || c == '\t' || c == '\n' || c == '\r';
      if (!blank || words.empty() || words.back() != ' ') words += blank ? ' ' : c;
    }
    const bool after_blank = out_.text().empty() || out_.text().back() == ' ' || out_.at_line_start();
    if (words.starts_with(' ') && after_blank) words.erase(0, 1);
    if (!words.empty()) put(words);
  }

  void put(std::string_view text) {
    out_.put(std::exchange(prefix_, {}));
    out_.put(text);
  }

  TextBuilder& out_;
  OdtLists& numbers_;
  std::int32_t page_;
  int skip_ = 0, lists_ = 0, notes_ = 0;
  std::vector<Table> tables_ = {{}};  // that are open; the first is none
  std::vector<Cell> cells_;           // that are open
  EmptyCells empty_;
  std::size_t copies_ = kCopies;       // bytes that are left for repeated cells and rows
  bool copies_end_ = false;            // some were left out
  std::vector<Paragraph> paragraphs_;  // that are open
  std::string prefix_;                 // of the paragraph, until it has text
  std::string mark_;                   // of the item that was entered last
  std::string title_;                  // of the document, until other text follows
  std::string style_;                  // that is being defined
  std::set<std::string> titles_ = {"Title"}, hiding_;
};

}  // namespace

DocumentText read_odt(std::string_view bytes, std::string_view where, const ReadOptions& options) {
  const auto wanted = [](std::string_view name) {
    return name == kBody || name == kStyles || name == kManifest;
  };
  const auto parts = read_zip(bytes, where, options.largest_text, wanted);
  if (!parts.contains(kBody))
    throw InputError(fmt::format("{}: expected '{}' in it, found none", where, kBody));
  if (const auto manifest = parts.find(kManifest);
      manifest != parts.end() && manifest->second.find("encryption-data") != std::string::npos)
    throw InputError(
        fmt::format("{}: expected a document that opens without a password, found an encrypted one", where));
  TextBuilder out(options.largest_text, std::string(where));
  OdtLists lists;
  if (parts.contains(kStyles)) lists.read_styles(parts.at(kStyles), fmt::format("{}: {}", where, kStyles));
  Reader reader(has_element(parts.at(kBody), "soft-page-break"), lists, out);
  read_xml(parts.at(kBody), fmt::format("{}: {}", where, kBody), [&](const XmlEvent& e) { reader.take(e); });
  out.finish();
  if (out.text().empty())
    throw InputError(fmt::format("{}: expected a document with text, found none in it", where));
  std::vector<std::string> remarks;
  if (reader.left_out())
    remarks.push_back(
        fmt::format("{}: a table repeats cells or rows too often; some repeats are left out", where));
  return {.text = out.take_text(),
          .marks = out.take_marks(),
          .pages = reader.pages(),
          .remarks = std::move(remarks)};
}

}  // namespace lode
