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
#include "documents/xml.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr const char *kBody = "content.xml", *kStyles = "styles.xml", *kManifest = "META-INF/manifest.xml";

class Reader {
 public:
  Reader(bool paged, OdtLists& lists, TextBuilder& out) : out_(out), numbers_(lists), page_(paged ? 1 : 0) {
    out_.at(page_, 1);
  }

  void take(const XmlEvent& e) {
    if (e.kind == XmlEvent::Kind::begin) note_style(e), numbers_.note_style(e);
    if (e.name == "style:style" && (e.kind == XmlEvent::Kind::end || e.empty)) style_.clear();
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

 private:
  /// What was deleted, comments, and where the text says nothing.
  static bool skipped(std::string_view name) {
    return name == "text:tracked-changes" || name == "office:annotation" || name == "text:sequence-decls" ||
           name == "office:automatic-styles" || name == "office:scripts" || name == "text:note-citation";
  }

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
      if (cells_ == 0 && notes_ == 0) out_.break_line(lists_ > 0 ? 1 : 2);
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
    if (e.name == "table:table-row") out_.break_line(), cell_of_row_ = 0;
    if (e.name == "table:table-cell") {
      if (cell_of_row_++ > 0) out_.space(), put("| ");
      ++cells_;
    }
    if (e.name == "text:note") ++notes_, put(" [");
    if (e.name == "text:tab") put("\t");
    if (e.name == "text:line-break") put("\n");
    if (e.name == "text:s") put(std::string(blanks(e.attribute("text:c")), ' '));
    if (e.name == "text:soft-page-break" && page_ > 0) out_.at(++page_, 1);
  }

  void leave(std::string_view name) {
    if (name == "text:p" || name == "text:h") {
      end_paragraph();
      if (cells_ > 0 || notes_ > 0) out_.space();
    }
    if (name == "text:list") --lists_, numbers_.end_list();
    if (name == "text:list-item") prefix_.clear();
    if (name == "table:table-cell") --cells_;
    if (name == "table:table") out_.break_line(2);
    if (name == "text:note") --notes_, put("]");
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
    const bool numbered = !prefix_.empty() && prefix_ != "- ";  // as an item of a list
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
  int skip_ = 0, lists_ = 0, cells_ = 0, cell_of_row_ = 0, notes_ = 0;
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
  return {.text = out.take_text(), .marks = out.take_marks(), .pages = reader.pages()};
}

}  // namespace lode
