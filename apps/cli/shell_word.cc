// SPDX-License-Identifier: Apache-2.0
#include "shell_word.h"

#include <algorithm>
#include <cctype>
#include <cstring>

namespace lode::cli {

std::string as_word(const std::string& value) {
  const auto plain = [](unsigned char c) {
    return std::isalnum(c) != 0 || c >= 0x80 || std::strchr("_-./:=,%+@", c);
  };
  if (!value.empty() && std::all_of(value.begin(), value.end(), plain)) return value;
  std::string word = "'";
  for (const char c : value) word += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return word + "'";
}

}  // namespace lode::cli
