// SPDX-License-Identifier: Apache-2.0
#include "text/byte_level.h"

#include <array>
#include <cstdint>

#include "text/utf8.h"

namespace lode {

namespace {

struct Alphabet {
  std::array<char32_t, 256> character{};    // of a byte
  std::array<std::int16_t, 512> byte_of{};  // of a character, -1 where there is none
};

constexpr Alphabet make_alphabet() {
  Alphabet alphabet;
  alphabet.byte_of.fill(-1);
  char32_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xff && byte != 0xad);
    const char32_t character = printable ? byte : next++;
    alphabet.character[byte] = character;
    alphabet.byte_of[character] = static_cast<std::int16_t>(byte);
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = make_alphabet();

}  // namespace

char32_t byte_to_character(unsigned char byte) {
  return kAlphabet.character[byte];
}

std::optional<unsigned char> character_to_byte(char32_t character) {
  if (character >= kAlphabet.byte_of.size() || kAlphabet.byte_of[character] < 0) return std::nullopt;
  return static_cast<unsigned char>(kAlphabet.byte_of[character]);
}

std::optional<std::string> bytes_of_characters(std::string_view text) {
  std::string bytes;
  while (!text.empty()) {
    const CodePoint c = first_code_point(text);
    const auto byte = character_to_byte(c.value);
    if (!byte) return std::nullopt;
    bytes.push_back(static_cast<char>(*byte));
    text.remove_prefix(c.bytes);
  }
  return bytes;
}

}  // namespace lode
