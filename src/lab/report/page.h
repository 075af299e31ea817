// SPDX-License-Identifier: Apache-2.0
// A report's text, tables and figures, written twice: as one HTML file that needs nothing else, and as
// Markdown with the figures beside it.
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
  std::vector<std::string> items;              ///< of a list; the head of a table
  std::vector<std::vector<std::string>> rows;  ///< of a table; a first column of names, numbers after it
  std::string svg, name;                       ///< of a figure; the name is that of its file
};

class Page {
 public:
  explicit Page(std::string title) : title_(std::move(title)) {}
  void heading(int level, std::string text);
  void paragraph(std::string text);
  void code(std::string text);
  void list(std::vector<std::string> items);
  void table(std::string caption, std::vector<std::string> head, std::vector<std::vector<std::string>> rows);
  void figure(std::string name, std::string caption, std::string svg);

  /// Text between back quotes is set as code in both.
  std::string html() const;
  std::string markdown() const;
  /// index.html, report.md and figures/NAME.svg, each whole or not at all.
  void write(const std::filesystem::path& folder) const;

 private:
  std::string title_;
  std::vector<Block> blocks_;
};

}  // namespace lode
