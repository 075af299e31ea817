// SPDX-License-Identifier: Apache-2.0
// From words and where they stand on a page to lines in the order in which people read them: columns one
// after the other, footnotes apart.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lode {

/// A word of a page and its box in points; y grows downwards.
struct PageWord {
  float x0 = 0, y0 = 0, x1 = 0, y1 = 0;
  std::string text;  ///< UTF-8, not empty
  float height() const { return y1 - y0; }
  float middle() const { return (y0 + y1) / 2; }
};

/// A page as lines; an empty line is a gap that is larger than between lines.
struct PageLines {
  std::vector<std::string> body;
  std::vector<std::string> notes;  ///< footnotes of all columns
};

PageLines lines_in_reading_order(std::vector<PageWord> words);

/// Pages of words in what `pdftotext -bbox` writes. Lines of another form are passed over.
std::vector<std::vector<PageWord>> parse_word_boxes(std::string_view xhtml);

}  // namespace lode
