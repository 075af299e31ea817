// SPDX-License-Identifier: Apache-2.0
#include "base/printable.h"

#include <algorithm>

#include "base/text.h"

namespace lode {

namespace {

bool is_control(unsigned char c) {
  return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f;
}

/// Bytes of valid UTF-8 at the front, all of them or those before the first that is not.
std::size_t valid_bytes(std::string_view text) {
  return std::min(invalid_utf8(text), text.size());
}

}  // namespace

std::string printable(std::string_view text) {
  std::string shown;
  shown.reserve(text.size());
  std::size_t valid = valid_bytes(text);
  for (std::size_t at = 0; at < text.size(); ++at) {
    const auto c = static_cast<unsigned char>(text[at]);
    const auto next = at + 1 < text.size() ? static_cast<unsigned char>(text[at + 1]) : 0;
    if (at >= valid) {  // this byte is none
      shown += '?';
      valid = at + 1 + valid_bytes(text.substr(at + 1));
    } else if (c == '\r' && next == '\n') {
      continue;
    } else if (c == 0xc2 && next < 0xa0) {  // C1: U+009B begins a sequence as ESC [ does
      shown += '?';
      ++at;
    } else {
      shown += is_control(c) ? '?' : text[at];
    }
  }
  return shown;
}

}  // namespace lode
