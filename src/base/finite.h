// SPDX-License-Identifier: Apache-2.0
// Whether numbers are numbers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace lode {

/// Of n numbers whose exponent has these bits: an exponent of all ones is infinity or NaN. The flag is as wide as the word
/// and never leaves the loop, so that the loop becomes vector instructions and runs at the speed of memory.
template <class Word>
bool all_finite(const std::byte* data, std::int64_t n, Word exponent) {
  Word bad = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    Word word;
    std::memcpy(&word, data + i * static_cast<std::int64_t>(sizeof(Word)), sizeof word);
    bad = static_cast<Word>(bad | ((word & exponent) == exponent ? ~Word{0} : Word{0}));
  }
  return bad == 0;
}
inline bool all_finite(std::span<const float> numbers) {
  return all_finite<std::uint32_t>(std::as_bytes(numbers).data(), std::ssize(numbers), 0x7f800000u);
}

}  // namespace lode
