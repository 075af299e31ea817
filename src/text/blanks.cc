// SPDX-License-Identifier: Apache-2.0
#include "text/blanks.h"

#include <algorithm>

namespace lode {

namespace {

constexpr const char* kBlanks = " \t\r\n";  // a line of a file from Windows ends with \r

}  // namespace

std::string_view without_blanks(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

std::string BlankTrimmer::push(std::string_view text) {
  held_ += text;
  if (!begun_) held_.erase(0, std::min(held_.find_first_not_of(kBlanks), held_.size()));
  const std::size_t last = held_.find_last_not_of(kBlanks);
  if (last == std::string::npos) return {};
  begun_ = true;
  std::string ready = held_.substr(0, last + 1);
  held_.erase(0, last + 1);
  return ready;
}

}  // namespace lode
