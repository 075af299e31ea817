// SPDX-License-Identifier: Apache-2.0
// The alphabet of byte-level BPE (GPT-2): every byte has a printable character of its own, so that any text
// is a string of known characters.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace lode {

/// The character that stands for a byte: itself when it is printable in Latin-1, else one from U+0100 on.
char32_t byte_to_character(unsigned char byte);

/// The way back; nothing for a character outside the alphabet.
std::optional<unsigned char> character_to_byte(char32_t character);

/// The bytes that a token's text stands for; nothing when it has a character outside the alphabet.
std::optional<std::string> bytes_of_characters(std::string_view text);

}  // namespace lode
