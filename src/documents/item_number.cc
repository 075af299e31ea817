// SPDX-License-Identifier: Apache-2.0
#include "documents/item_number.h"

#include <charconv>
#include <utility>

namespace lode {

namespace {

/// "a" to "z", "aa", ...
std::string in_letters(std::int64_t n) {
  std::string letters;
  for (; n > 0; n = (n - 1) / 26) letters.insert(0, 1, static_cast<char>('a' + (n - 1) % 26));
  return letters;
}

std::string in_roman(std::int64_t n) {
  constexpr std::pair<int, const char*> kNumerals[] = {
      {1000, "m"}, {900, "cm"}, {500, "d"}, {400, "cd"}, {100, "c"}, {90, "xc"}, {50, "l"},
      {40, "xl"},  {10, "x"},   {9, "ix"},  {5, "v"},    {4, "iv"},  {1, "i"}};
  std::string numerals;
  for (const auto& [value, letters] : kNumerals)
    for (; n >= value; n -= value) numerals += letters;
  return numerals;
}

}  // namespace

std::string item_number(char type, std::int64_t number) {
  std::string text = std::to_string(number);
  const bool alpha = type == 'a' || type == 'A', roman = type == 'i' || type == 'I';
  if (alpha && number > 0) text = in_letters(number);
  if (roman && number > 0 && number < 4000) text = in_roman(number);
  if (type == 'A' || type == 'I')
    for (char& c : text) c = c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  return text;
}

std::int64_t number_of(const std::string& text, std::int64_t otherwise) {
  std::int32_t number = 0;
  const auto end = text.data() + text.size();
  return std::from_chars(text.data(), end, number).ec == std::errc() ? number : otherwise;
}

}  // namespace lode
