// SPDX-License-Identifier: Apache-2.0
#include "documents/text_builder.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

void TextBuilder::at(std::int32_t page, std::int32_t line) {
  page_ = page;
  line_ = line;
}

void TextBuilder::put(std::string_view text) {
  if (text.empty()) return;
  if (text.size() > limit_ - text_.size())
    throw InputError(fmt::format("{}: expected a text of at most {}, found more", where_,
                                 human_bytes(static_cast<std::int64_t>(limit_))));
  if (!marked_ || page_ != implied_page_ || line_ != implied_line_) {
    marks_.push_back({.begin = text_.size(), .page = page_, .line = line_});
    marked_ = true;
  }
  text_ += text;
  const auto breaks = static_cast<std::int32_t>(std::count(text.begin(), text.end(), '\n'));
  if (line_ > 0) line_ += breaks;
  implied_page_ = page_;
  implied_line_ = line_;
}

void TextBuilder::cut(std::size_t bytes) {
  text_.erase(bytes);
  while (!marks_.empty() && marks_.back().begin >= text_.size()) {
    marks_.pop_back();
    marked_ = false;
  }
}

void TextBuilder::finish() {
  trim(" \t\n");
  break_line();
}

void TextBuilder::break_line(int breaks) {
  trim(" \t");
  int there = 0;
  for (auto c = text_.rbegin(); c != text_.rend() && *c == '\n'; ++c) ++there;
  if (text_.empty()) return;
  for (; there < breaks; ++there) put("\n");
}

void TextBuilder::space() {
  if (!text_.empty() && text_.back() != ' ' && text_.back() != '\n') put(" ");
}

}  // namespace lode
