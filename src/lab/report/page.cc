// SPDX-License-Identifier: Apache-2.0
#include "lab/report/page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <span>

#include "base/file.h"
#include "lab/report/svg.h"

namespace lode {

namespace {

constexpr std::string_view kPageCss = R"(
:root{color-scheme:light dark}
body{font:16px/1.5 Helvetica,Arial,"DejaVu Sans",sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a;background:#fff}
h1,h2,h3{line-height:1.25}summary{cursor:pointer;border-bottom:1px solid #ccc;padding:.6rem 0 .2rem}summary h2{display:inline}figcaption summary{border:0;padding:0}
.fold{scroll-margin-top:4rem;padding-bottom:2rem}
figure{margin:1.5rem 0;break-inside:avoid}figure svg{max-width:100%;height:auto;display:block}
figcaption,caption{color:#555;font-size:.85rem;text-align:left;padding:.3rem 0}
.wide{overflow-x:auto;margin:1.5rem 0}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .6rem;text-align:right;white-space:nowrap;border-bottom:1px solid #e2e2e2}
th:first-child,td:first-child{text-align:left}thead th{border-bottom:2px solid #888;vertical-align:bottom}
code,pre{font-family:"DejaVu Sans Mono",Consolas,monospace;font-size:.9em}pre{white-space:pre-wrap;background:#f4f4f4;padding:.6rem}
nav li{line-height:1.7}
@media screen and (prefers-color-scheme:dark){body{color:#e6e6e6;background:#16181c}figcaption,caption{color:#aaa}
th,td,summary{border-color:#33363c}pre{background:#22252b}a{color:#8ab4f8}}
@media screen{.many{width:96vw;margin-left:calc(50% - 48vw)}.many table{font-size:.78rem}.many th,.many td{padding:.2rem .35rem}.many thead th{white-space:normal}}
@media print{details::details-content{content-visibility:visible;display:block;block-size:auto}summary{list-style:none}body{max-width:none;margin:0;font-size:10pt}h2{break-after:avoid}table{break-inside:auto}tr{break-inside:avoid}.wide{overflow:visible}th,.many td{white-space:normal}h3{break-after:avoid}
.many table{font-size:6.2pt}.many caption{font-size:8.5pt}.many th,.many td{padding:1px 3px}.many code{white-space:nowrap;font-size:1em}}
)";

/// What may stand in an address without escapes.
std::string anchor_of(std::string_view name) {
  std::string anchor(name);
  for (char& c : anchor)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.' && c != '_') c = '-';
  return anchor;
}

struct Link {
  std::size_t begin = 0, end = 0;  ///< in the text that holds it
  std::string_view text, anchor;
};

/// The first that link_to wrote.
std::optional<Link> find_link(std::string_view text) {
  const std::size_t middle = text.find("](#");
  if (middle == std::string_view::npos) return std::nullopt;
  const std::size_t begin = text.rfind('[', middle), end = text.find(')', middle);
  if (begin == std::string_view::npos || end == std::string_view::npos) return std::nullopt;
  return Link{begin, end + 1, text.substr(begin + 1, middle - begin - 1),
              text.substr(middle + 3, end - middle - 3)};
}

std::string without_links(std::string_view text) {
  std::string out;
  for (auto link = find_link(text); link; link = find_link(text)) {
    out.append(text.substr(0, link->begin)).append(link->text);
    text.remove_prefix(link->end);
  }
  return out.append(text);
}

/// Escaped, with `code` between back quotes.
std::string code_html(std::string_view text) {
  std::string out;
  bool code = false;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t quote = std::min(text.find('`', at), text.size());
    out += xml_escape(text.substr(at, quote - at));
    const bool closes = quote < text.size() && (code || text.find('`', quote + 1) != std::string_view::npos);
    if (closes) {
      out += code ? "</code>" : "<code>";
      code = !code;
    } else if (quote < text.size()) {
      out += '`';
    }
    at = quote + 1;
  }
  return out;
}

/// Likewise, with links.
std::string inline_html(std::string_view text) {
  std::string out;
  for (auto link = find_link(text); link; link = find_link(text)) {
    out += fmt::format("{}<a href=\"#{}\">{}</a>", code_html(text.substr(0, link->begin)),
                       xml_escape(link->anchor), code_html(link->text));
    text.remove_prefix(link->end);
  }
  return out + code_html(text);
}

std::string html_row(std::span<const std::string> cells, std::string_view tag) {
  std::string row = "<tr>";
  for (const std::string& cell : cells) row += fmt::format("<{0}>{1}</{0}>", tag, inline_html(cell));
  return row + "</tr>\n";
}

/// Whether a page of paper does not hold the table in letters of the usual size.
bool is_too_wide(const Block& table) {
  constexpr std::size_t kLetters = 100, kPadding = 3;
  std::size_t letters = 0;
  for (std::size_t column = 0; column < table.items.size(); ++column) {
    std::size_t longest = table.items[column].size() / 2;  // heads break
    for (const auto& row : table.rows)
      if (column < row.size()) longest = std::max(longest, row[column].size());
    letters += longest + kPadding;
  }
  return letters > kLetters;
}

std::string list_html(std::span<const std::string> items) {
  std::string list = "<ul>\n";
  for (const std::string& item : items) list += "<li>" + inline_html(item) + "</li>\n";
  return list + "</ul>\n";
}

/// A picture in words, folded away from those who see it.
std::string told_html(std::span<const std::string> lines) {
  if (lines.empty()) return {};
  return "<details><summary>The picture in words</summary>\n" + list_html(lines) + "</details>";
}

std::string html_of(const Block& block) {
  switch (block.kind) {
    case Block::Kind::heading:
      return fmt::format("<h{0}>{1}</h{0}>\n", block.level, inline_html(block.text));
    case Block::Kind::paragraph:
      return fmt::format("<p>{}</p>\n", inline_html(block.text));
    case Block::Kind::code:
      return fmt::format("<pre>{}</pre>\n", xml_escape(block.text));
    case Block::Kind::list:
      return list_html(block.items);
    case Block::Kind::table: {
      std::string table =
          fmt::format("<div class=\"wide{}\"><table>\n<caption>", is_too_wide(block) ? " many" : "") +
          inline_html(block.text) + "</caption>\n<thead>" + html_row(block.items, "th") +
          "</thead>\n<tbody>\n";
      for (const auto& row : block.rows) table += html_row(row, "td");
      return table + "</tbody></table></div>\n";
    }
    default:
      return fmt::format("<figure>\n{}<figcaption>{}{}</figcaption>\n</figure>\n", block.svg,
                         inline_html(block.text), told_html(block.items));
  }
}

std::string markdown_row(std::span<const std::string> cells) {
  std::string row = "|";
  for (const std::string& cell : cells) {
    std::string text = cell;
    for (std::size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, "\\");
    row += " " + text + " |";
  }
  return row + "\n";
}

std::string list_markdown(std::span<const std::string> items) {
  std::string list;
  for (const std::string& item : items) list += "- " + without_links(item) + "\n";
  return list;
}

std::string markdown_of(const Block& block) {
  switch (block.kind) {
    case Block::Kind::heading:
      return std::string(static_cast<std::size_t>(block.level), '#') + " " + block.text + "\n";
    case Block::Kind::paragraph:
      return without_links(block.text) + "\n";
    case Block::Kind::code: {
      std::string code = "    ";
      for (const char c : block.text) code += c == '\n' ? std::string("\n    ") : std::string(1, c);
      return code + "\n";
    }
    case Block::Kind::list:
      return list_markdown(block.items);
    case Block::Kind::table: {
      std::string rule = "|";
      for (std::size_t i = 0; i < block.items.size(); ++i) rule += i == 0 ? "---|" : "---:|";
      std::string table = block.text + "\n\n" + markdown_row(block.items) + rule + "\n";
      for (const auto& row : block.rows) table += markdown_row(row);
      return table;
    }
    default:
      return fmt::format("![{0}](figures/{1}.svg)\n\n{0}\n{2}", block.text, block.name,
                         block.items.empty() ? "" : "\n" + list_markdown(block.items));
  }
}

void write_whole(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

}  // namespace

std::string link_to(std::string_view text, std::string_view name) {
  return fmt::format("[{}](#{})", text, anchor_of(name));
}

void Page::heading(int level, std::string text, std::string name) {
  if (name.empty()) name = text;
  blocks_.push_back(
      {.kind = Block::Kind::heading, .level = level, .text = std::move(text), .name = std::move(name)});
}

void Page::paragraph(std::string text) {
  if (!text.empty()) blocks_.push_back({.kind = Block::Kind::paragraph, .text = std::move(text)});
}

void Page::code(std::string text) {
  blocks_.push_back({.kind = Block::Kind::code, .text = std::move(text)});
}

void Page::list(std::vector<std::string> items) {
  blocks_.push_back({.kind = Block::Kind::list, .items = std::move(items)});
}

void Page::table(std::string caption, std::vector<std::string> head,
                 std::vector<std::vector<std::string>> rows) {
  blocks_.push_back({.kind = Block::Kind::table,
                     .text = std::move(caption),
                     .items = std::move(head),
                     .rows = std::move(rows)});
}

void Page::figure(std::string name, std::string caption, std::string svg, std::vector<std::string> told) {
  blocks_.push_back({.kind = Block::Kind::figure,
                     .text = std::move(caption),
                     .items = std::move(told),
                     .svg = std::move(svg),
                     .name = std::move(name)});
}

/// A link leads into the fold, not to its head: browsers open a closed fold that holds what a link leads to.
std::string Page::html() const {
  std::string front, contents, folds;
  for (const Block& block : blocks_) {
    if (block.kind != Block::Kind::heading || block.level != 2) {
      (contents.empty() ? front : folds) += html_of(block);
      continue;
    }
    const std::string anchor = anchor_of(block.name);
    const bool first = contents.empty();
    folds +=
        fmt::format("{}<details{}><summary>{}</summary>\n<div class=\"fold\" id=\"{}\">\n",
                    first ? "" : "</div></details>\n", first ? " open=\"open\"" : "", html_of(block), anchor);
    contents += fmt::format("<li><a href=\"#{}\">{}</a></li>\n", anchor, inline_html(block.text));
  }
  if (!contents.empty()) {
    contents = "<nav><ul>\n" + contents + "</ul></nav>\n";
    folds += "</div></details>\n";
  }
  return fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>{0}</title>\n"
      "<style>{1}{2}</style>\n</head>\n<body>\n<h1>{0}</h1>\n{3}{4}{5}</body>\n</html>\n",
      xml_escape(title_), kPageCss, chart_css(), front, contents, folds);
}

std::string Page::markdown() const {
  std::string text = "# " + title_ + "\n";
  for (const Block& block : blocks_) text += "\n" + markdown_of(block);
  return text;
}

void Page::write(const std::filesystem::path& folder) const {
  std::filesystem::create_directories(folder / "figures");
  for (const Block& block : blocks_) {
    if (block.kind == Block::Kind::figure)
      write_whole(folder / "figures" / (block.name + ".svg"), svg_file(block.svg));
  }
  write_whole(folder / "report.md", markdown());
  write_whole(folder / "index.html", html());
}

}  // namespace lode
