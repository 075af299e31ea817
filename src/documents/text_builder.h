// SPDX-License-Identifier: Apache-2.0
// A text that grows piece by piece and remembers where each piece stood in its source.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lodestone/documents.h"

namespace lode {

class TextBuilder {
 public:
  /// InputError when the text passes `limit` bytes; `where` begins its message.
  TextBuilder(std::size_t limit, std::string where) : limit_(limit), where_(std::move(where)) {}

  /// What is put from now on stands here; every line break then adds a line.
  void at(std::int32_t page, std::int32_t line);
  void put(std::string_view text);
  /// At least `breaks` line breaks behind what is there; none at the beginning.
  void break_line(int breaks = 1);
  /// Nothing follows: one line break ends the text.
  void finish();
  /// Drops what stands behind the first `bytes`.
  void cut(std::size_t bytes);
  /// A blank, unless the text begins or has one at its end.
  void space();

  bool at_line_start() const { return text_.empty() || text_.back() == '\n'; }
  const std::string& text() const { return text_; }
  std::string take_text() { return std::move(text_); }
  std::vector<PlaceMark> take_marks() { return std::move(marks_); }

 private:
  void trim(std::string_view ends) { cut(text_.find_last_not_of(ends) + 1); }

  std::size_t limit_;
  std::string where_, text_;
  std::vector<PlaceMark> marks_;
  std::int32_t page_ = 0, line_ = 0;                  // of what is put next
  std::int32_t implied_page_ = 0, implied_line_ = 0;  // that the last mark says of the end
  bool marked_ = false;
};

}  // namespace lode
