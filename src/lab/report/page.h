// SPDX-License-Identifier: Apache-2.0
// A report's text, tables and figures, written twice: as one HTML file that needs nothing else, each of its
// sections in a fold, and as plain Markdown with the figures beside it.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace lode {

struct Block {
  enum class Kind { heading, paragraph, code, list, table, figure };
  Kind kind = Kind::paragraph;
  int level = 2;                               ///< of headings
  std::string text;                            ///< heading, paragraph, code; the caption of a table or figure
  std::vector<std::string> items;              ///< of a list; the head of a table; a figure in words
  std::vector<std::vector<std::string>> rows;  ///< of a table; a first column of names, numbers after it
  std::string svg;                             ///< of a figure
  std::string name;                            ///< of a figure's file; of a heading, by which links find it
};

/// In a text: a link to the section of that name.
std::string link_to(std::string_view text, std::string_view name);

class Page {
 public:
  explicit Page(std::string title) : title_(std::move(title)) {}
  /// One of level 2 opens a section; what stands before the first is what the page begins with. `name` finds
  /// it, or its text where there is none.
  void heading(int level, std::string text, std::string name = {});
  void paragraph(std::string text);
  void code(std::string text);
  void list(std::vector<std::string> items);
  void table(std::string caption, std::vector<std::string> head, std::vector<std::vector<std::string>> rows);
  /// `told`: what the picture shows, a line each, for those who cannot see it.
  void figure(std::string name, std::string caption, std::string svg, std::vector<std::string> told = {});

  /// Text between back quotes is set as code in both. Links are text alone in Markdown.
  std::string html() const;
  std::string markdown() const;
  /// index.html, report.md and figures/NAME.svg, each whole or not at all.
  void write(const std::filesystem::path& folder) const;

 private:
  std::string title_;
  std::vector<Block> blocks_;
};

}  // namespace lode
