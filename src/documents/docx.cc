// SPDX-License-Identifier: Apache-2.0
// DOCX (WordprocessingML): paragraphs, headings, lists with their numbers, tables, footnotes, without hidden text; the pages are those
// that Word last laid out, where it noted them.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "documents/archive.h"
#include "documents/docx_styles.h"
#include "documents/readers.h"
#include "documents/table_row.h"
#include "documents/xml.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// The parts that are read, by the kind of the relationship that names each, and what Word usually calls them.
using Parts = std::map<std::string, std::string>;
const Parts& usual_parts() {
  static const Parts parts = {{"officeDocument", "word/document.xml"},
                              {"numbering", "word/numbering.xml"},
                              {"styles", "word/styles.xml"},
                              {"footnotes", "word/footnotes.xml"},
                              {"endnotes", "word/endnotes.xml"}};
  return parts;
}

/// What a part's relationships name. Nothing where they are missing or damaged.
Parts relations_of(const std::string& part, std::string_view bytes, std::string_view where,
                   std::size_t limit) {
  const std::size_t slash = part.rfind('/') + 1;
  const std::string name = fmt::format("{}_rels/{}.rels", part.substr(0, slash), part.substr(slash));
  Parts relations;
  try {
    const auto files = read_zip(bytes, where, limit, [&](std::string_view entry) { return entry == name; });
    if (!files.contains(name)) return {};
    read_xml(files.at(name), name, [&](const XmlEvent& e) {
      if (e.kind != XmlEvent::Kind::begin || e.name != "relations:Relationship") return;
      const std::string type = e.attribute("Type"), target = e.attribute("Target");
      if (!target.empty() && e.attribute("TargetMode") != "External")
        relations.emplace(type.substr(type.rfind('/') + 1), name_in_archive(part, target));
    });
  } catch (const InputError&) {
    return {};
  }
  return relations;
}

/// Programs may call parts as they like (Word on the web writes word/document2.xml): relationships say how.
Parts named_parts(std::string_view bytes, std::string_view where, std::size_t limit) {
  const char* const kBody = "officeDocument";
  const Parts root = relations_of("", bytes, where, limit);
  const std::string body = root.contains(kBody) ? root.at(kBody) : usual_parts().at(kBody);
  Parts parts = relations_of(body, bytes, where, limit);
  parts[kBody] = body;
  return parts;
}

class Reader {
 public:
  Reader(bool paged, DocxStyles& styles, TextBuilder& out)
      : out_(out), styles_(styles), page_(paged ? 1 : 0) {
    out_.at(page_, 1);
  }

  /// What follows is no part of the text in front of it: its lists begin anew.
  void begin_notes() {
    out_.break_line(2);
    styles_.begin_anew();
  }

  void take(const XmlEvent& e) {
    if (e.kind == XmlEvent::Kind::begin && (skip_ > 0 || skipped(e.name))) skip_ += e.empty ? 0 : 1;
    if (skip_ > 0 || (e.empty && skipped(e.name))) {
      if (e.kind == XmlEvent::Kind::end) --skip_;
      return;
    }
    if (e.kind == XmlEvent::Kind::text) {
      if (in_text_ && e.name == "#text") put(e.text);
      return;
    }
    const bool begin = e.kind == XmlEvent::Kind::begin;
    if (e.name == "w:t") in_text_ = begin && !e.empty;
    if (begin) enter(e);
    if (!begin || e.empty) leave(e.name);
  }

  std::int32_t pages() const { return page_; }

 private:
  /// What says once more what is read elsewhere: a text box for old programs, where moved text stood, how text looked.
  static bool skipped(std::string_view name) {
    return name == "mc:Fallback" || name == "w:moveFrom" || name == "w:rPrChange" || name == "w:pPrChange" ||
           name == "w:tcPrChange" || name == "w:trPrChange";
  }

  void enter(const XmlEvent& e) {
    if (e.name == "w:p" && cells_ == 0)
      out_.break_line(list_ ? 1 : 2), after_list_ = std::exchange(list_, false);
    if (e.name == "w:p") paragraph_ = {};
    if (e.name == "w:txbxContent" && !e.empty) around_.push_back(std::exchange(paragraph_, {}));
    if (e.name == "w:r" && !e.empty) hidden_.push_back(!hidden_.empty() && hidden_.back());
    if (e.name == "w:vanish" && !in_properties_ && !hidden_.empty())
      hidden_.back() = is_on(e.attribute("w:val"));
    if (in_properties_ && ((e.name == "w:vanish" && is_on(e.attribute("w:val"))) || e.name == "w:del"))
      paragraph_.left_out = true;
    if (e.name == "w:tbl") ++tables_, rows_.emplace_back(), out_.break_line(2);
    if (e.name == "w:tr") out_.break_line(), rows_.back() = {};
    if (e.name == "w:gridBefore") rows_.back().cover(columns(e));
    if (e.name == "w:tc") {
      for (std::size_t bars = rows_.back().begin_cell(empty_); bars > 0; --bars) out_.space(), put("| ");
      ++cells_;
    }
    if (e.name == "w:gridSpan") rows_.back().cover(columns(e) - 1);
    if (e.name == "w:pStyle") style(e.attribute("w:val"));
    if (e.name == "w:numId") paragraph_.place.list = e.attribute("w:val");
    if (e.name == "w:ilvl") paragraph_.place.level = list_level(e.attribute("w:val"));
    if (e.name == "w:tab" && !in_properties_) put("\t");
    if (e.name == "w:pPr") in_properties_ = !e.empty;
    if (e.name == "w:br" || e.name == "w:cr") put("\n");
    if (e.name == "w:noBreakHyphen") put("-");
    if (e.name == "w:footnoteReference" || e.name == "w:endnoteReference") put(note(e));
    if ((e.name == "w:footnote" || e.name == "w:endnote") && e.attribute("w:type").empty())
      note_ = note(e) + " ";
    if (e.name == "w:lastRenderedPageBreak" && page_ > 0) out_.at(++page_, 1);
  }

  static std::size_t columns(const XmlEvent& e) { return repeats_of(e.attribute("w:val")); }

  /// "[1]", "[2]", ... in the order in which notes are referred to: Word's own ids begin anywhere, and a footnote may have
  /// an endnote's.
  std::string note(const XmlEvent& e) {
    const std::string id = (e.name.starts_with("w:footnote") ? "f" : "e") + e.attribute("w:id");
    return fmt::format("[{}]", notes_.emplace(id, notes_.size() + 1).first->second);
  }

  void leave(std::string_view name) {
    if (name == "w:pPr") in_properties_ = false, number();
    if (name == "w:r" && !hidden_.empty()) hidden_.pop_back();
    if (name == "w:p") end_paragraph();
    if (name == "w:txbxContent" && !around_.empty()) {
      paragraph_ = std::move(around_.back());
      around_.pop_back();
      if (!paragraph_.prefix.empty()) out_.break_line();
    }
    if (name == "w:footnote" || name == "w:endnote") note_.clear();
    if (name == "w:p" && cells_ > 0) out_.space();
    if (name == "w:tc") --cells_;
    if (name == "w:tbl" && rows_.size() > 1) rows_.pop_back();
    if (name == "w:tbl" && --tables_ == 0) out_.break_line(2);
  }

  static bool is_on(const std::string& value) {
    return value != "0" && value != "false" && value != "off" && value != "none";
  }

  /// Many documents say their title again in the heading right behind it. A paragraph without text, such as a hidden
  /// heading, leaves nothing to the next; a cell of a table may hold its number alone.
  void end_paragraph() {
    if (cells_ > 0 && paragraph_.numbered && !paragraph_.spoke) put("");
    const Paragraph ended = std::exchange(paragraph_, {});
    if (!ended.spoke) return;
    const std::string said = ended.head == Head::none ? std::string() : out_.text().substr(head_begin_);
    if (ended.head == Head::heading && said == title_) out_.cut(head_begin_);
    title_ = ended.head == Head::title ? said : std::string();
  }

  /// What stands in front of the paragraph's text: its number behind the sign of a heading. What is left out does not count.
  void number() {
    if (paragraph_.left_out) {
      list_ = after_list_;
      return;
    }
    const std::string mark = styles_.next(paragraph_.style, paragraph_.place);
    paragraph_.numbered = !mark.empty();
    list_ = paragraph_.numbered && paragraph_.prefix.empty();
    paragraph_.prefix += mark;
  }

  /// Word has names in English for its own styles, "heading 1", whatever their ids are; a file without names has ids like them.
  void style(const std::string& id) {
    paragraph_.style = id;
    std::string name;
    for (const char c : styles_.name_of(id))
      if (c != ' ') name += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    if (name == "title") paragraph_.prefix = "# ", paragraph_.head = Head::title;
    if (name == "heading1") paragraph_.head = Head::heading;
    if (!name.starts_with("heading") || name.size() != 8) return;
    const int level = name.back() - '0';
    if (level >= 1 && level <= 6) paragraph_.prefix = std::string(static_cast<std::size_t>(level), '#') + " ";
  }

  void put(std::string_view text) {
    if (!hidden_.empty() && hidden_.back()) return;
    out_.put(std::exchange(note_, {}));
    if (!paragraph_.prefix.empty()) head_begin_ = out_.text().size();
    out_.put(std::exchange(paragraph_.prefix, {}));
    paragraph_.spoke = paragraph_.spoke || text.find_first_not_of(" \t\n") != std::string_view::npos;
    out_.put(text);
  }

  enum class Head { none, title, heading };
  struct Paragraph {
    std::string style;
    ListPlace place;         ///< by its own word
    std::string prefix;      ///< until it has text
    Head head = Head::none;  ///< what it is
    bool numbered = false;
    bool spoke = false;     ///< it has had text
    bool left_out = false;  ///< hidden or deleted, and its number with it
  };

  TextBuilder& out_;
  DocxStyles& styles_;
  std::int32_t page_;
  bool in_text_ = false, in_properties_ = false, list_ = false, after_list_ = false;
  int skip_ = 0, tables_ = 0, cells_ = 0;
  std::vector<TableRow> rows_ = {{}};  // of the tables that are open; the first is of none
  EmptyCells empty_;
  std::vector<bool> hidden_;  // of each run that is open: a text box lies in one
  Paragraph paragraph_;
  std::vector<Paragraph> around_;  // those that hold the text boxes that are open
  std::size_t head_begin_ = 0;
  std::string title_;                         // of the document, until other text follows
  std::string note_;                          // number of the note, until it has text
  std::map<std::string, std::size_t> notes_;  // the number of each
};

}  // namespace

DocumentText read_docx(std::string_view bytes, std::string_view where, const ReadOptions& options) {
  Parts names = named_parts(bytes, where, options.largest_text);
  const auto parts = read_zip(bytes, where, options.largest_text, [&](std::string_view name) {
    return std::any_of(usual_parts().begin(), usual_parts().end(), [&](const auto& usual) {
      const auto named = names.find(usual.first);
      return name == usual.second || (named != names.end() && name == named->second);
    });
  });
  for (const auto& [kind, usual] : usual_parts())
    if (!parts.contains(names[kind])) names[kind] = usual;
  const std::string& body = names.at("officeDocument");
  if (!parts.contains(body))
    throw InputError(fmt::format("{}: expected '{}' in it, found none", where, body));
  TextBuilder out(options.largest_text, std::string(where));
  const bool paged = has_element(parts.at(body), "lastRenderedPageBreak");
  DocxStyles styles;
  std::vector<std::string> remarks;
  const auto read_beside = [&](const std::string& name, auto read, const char* lost) {
    if (!parts.contains(name)) return;
    try {
      (styles.*read)(parts.at(name), fmt::format("{}: {}", where, name));
    } catch (const InputError& e) {
      remarks.push_back(fmt::format("{}; {}", e.what(), lost));
    }
  };
  read_beside(names.at("numbering"), &DocxStyles::read_numbering, "lists have no numbers");
  read_beside(names.at("styles"), &DocxStyles::read_styles, "headings may be missed");
  Reader reader(paged, styles, out);
  read_xml(parts.at(body), fmt::format("{}: {}", where, body), [&](const XmlEvent& e) { reader.take(e); });
  const std::int32_t pages = reader.pages();
  std::set<std::string> read = {body};
  for (const std::string& notes : {names.at("footnotes"), names.at("endnotes")}) {
    if (!parts.contains(notes) || !read.insert(notes).second) continue;
    reader.begin_notes();
    read_xml(parts.at(notes), fmt::format("{}: {}", where, notes),
             [&](const XmlEvent& e) { reader.take(e); });
  }
  out.finish();
  if (out.text().empty())
    throw InputError(fmt::format("{}: expected a document with text, found none in it", where));
  return {.text = out.take_text(), .marks = out.take_marks(), .pages = pages, .remarks = std::move(remarks)};
}

}  // namespace lode
