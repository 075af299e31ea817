// SPDX-License-Identifier: Apache-2.0
// HTML by libxml2's forgiving parser: what a reader sees, without scripts and styles.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>

#include "base/text.h"
#include "documents/encoding.h"
#include "documents/readers.h"
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
    {"script", -1, ""}, {"style", -1, ""},     {"template", -1, ""},  {"noscript", -1, ""},
    {"svg", -1, ""},    {"iframe", -1, ""},    {"object", -1, ""},    {"head", -1, ""},
    {"select", -1, ""}, {"h1", 2, "# "},       {"h2", 2, "## "},      {"h3", 2, "### "},
    {"h4", 2, "#### "}, {"h5", 2, "##### "},   {"h6", 2, "###### "},  {"p", 2, ""},
    {"ul", 2, ""},      {"ol", 2, ""},         {"dl", 2, ""},         {"table", 2, ""},
    {"pre", 2, ""},     {"blockquote", 2, ""}, {"figure", 2, ""},     {"section", 2, ""},
    {"article", 2, ""}, {"header", 2, ""},     {"footer", 2, ""},     {"nav", 2, ""},
    {"aside", 2, ""},   {"main", 2, ""},       {"div", 1, ""},        {"li", 1, "- "},
    {"dt", 1, ""},      {"dd", 1, "  "},       {"tr", 1, ""},         {"br", 1, ""},
    {"hr", 2, ""},      {"caption", 1, ""},    {"figcaption", 1, ""}, {"form", 1, ""},
    {"option", 1, ""},  {"address", 1, ""},    {"body", 1, ""},       {"title", 2, "# "},
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

/// Walks the tree without recursion: a page may be nested as deep as it likes.
class BeamSearch {
 public:
  BeamSearch(bool lines, TextBuilder& out) : lines_(lines), out_(out) {}

  void run(const xmlNode* root) {
    for (const xmlNode* node = root; node != nullptr;) {
      const bool inside = enter(node) && node->children != nullptr;
      if (inside) {
        node = node->children;
        continue;
      }
      leave(node);
      while (node != root && node->next == nullptr) {
        node = node->parent;
        leave(node);
      }
      node = node == root ? nullptr : node->next;
    }
  }

 private:
  /// False: what is inside is not shown.
  bool enter(const xmlNode* node) {
    if (node->type == XML_TEXT_NODE || node->type == XML_CDATA_SECTION_NODE) return text(node), false;
    if (node->type != XML_ELEMENT_NODE) return false;
    const Element element = element_of(node);
    if (element.breaks < 0) return false;
    if (lines_) line_ = static_cast<std::int32_t>(std::min<long>(xmlGetLineNo(node), INT32_MAX));
    if (element.breaks > 0) out_.break_line(element.breaks);
    if (element.name == "pre") ++pre_;
    if ((element.name == "td" || element.name == "th") && !out_.at_line_start()) out_.space(), put("| ");
    pending_ = element.mark.empty() ? pending_ : element.mark;
    if (element.name == "img") alternative(node);
    return true;
  }

  void leave(const xmlNode* node) {
    if (node->type != XML_ELEMENT_NODE) return;
    const Element element = element_of(node);
    if (element.breaks > 0 && element.name != "br") out_.break_line(element.breaks);
    if (element.name == "pre" && pre_ > 0) --pre_;
    if (!element.mark.empty()) pending_ = {};
  }

  void alternative(const xmlNode* node) {
    const std::unique_ptr<xmlChar, void (*)(void*)> alt(xmlGetProp(node, BAD_CAST "alt"), xmlFree);
    if (alt != nullptr && *alt != 0) put("[" + std::string(reinterpret_cast<const char*>(alt.get())) + "]");
  }

  void put(std::string_view text) {
    if (lines_) out_.at(0, line_);
    if (!pending_.empty()) out_.put(pending_);
    pending_ = {};
    out_.put(text);
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
  TextBuilder& out_;
  int pre_ = 0;
  std::int32_t line_ = 1;
  std::string_view pending_;  // of the element that was entered, until it has text
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
  BeamSearch(false, out).run(node);
  out.finish();
  return out.take_text();
}

/// Whether the page shows a heading of the first level that reads like this.
bool has_heading(const xmlNode* root, std::string_view heading, std::string_view where) {
  for (const xmlNode* node = root; node != nullptr;) {
    const bool element = node->type == XML_ELEMENT_NODE, h1 = element && element_of(node).name == "h1";
    if (h1 && shown(node, where) == heading) return true;
    if (element && !h1 && element_of(node).breaks >= 0 && node->children != nullptr) {
      node = node->children;
      continue;
    }
    while (node != root && node->next == nullptr) node = node->parent;
    node = node == root ? nullptr : node->next;
  }
  return false;
}

}  // namespace

void put_html(std::string_view bytes, std::string_view where, bool lines, TextBuilder& out) {
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
  const std::unique_ptr<xmlDoc, void (*)(xmlDoc*)> page(
      htmlReadMemory(bytes.data(), static_cast<int>(bytes.size()), nullptr, encoding,
                     HTML_PARSE_RECOVER | HTML_PARSE_NOERROR | HTML_PARSE_NOWARNING | HTML_PARSE_NONET |
                         HTML_PARSE_COMPACT),
      xmlFreeDoc);
  const xmlNode* root = page == nullptr ? nullptr : xmlDocGetRootElement(page.get());
  if (root == nullptr)
    throw InputError(fmt::format("{}: expected a page in HTML, found one without any element", where));
  // A page's title heads it, as its reader sees it; most pages say it again in their first heading.
  const xmlNode* const title = lines ? find_title(root) : nullptr;
  if (title != nullptr && !has_heading(root, shown(title, where), where)) BeamSearch(lines, out).run(title);
  BeamSearch(lines, out).run(root);
  out.break_line();
}

#else

void put_html(std::string_view, std::string_view where, bool, TextBuilder&) {
  throw InputError(
      fmt::format("{}: HTML needs a build with libxml2, which this one lacks (apt install libxml2-dev, "
                  "then build again)",
                  where));
}

#endif

DocumentText read_html(std::string_view bytes, std::string_view where, const ReadOptions& options) {
  TextBuilder out(options.largest_text, std::string(where));
  put_html(bytes, where, true, out);
  out.finish();
  if (out.text().empty())
    throw InputError(fmt::format("{}: expected a page with text, found none in it", where));
  return {.text = out.take_text(), .marks = out.take_marks()};
}

}  // namespace lode
