// SPDX-License-Identifier: Apache-2.0
// What the signature kernels of all instruction sets share, after one vec_*.h.
#pragma once

#include "kernels/cpu/simd/exp-inl.h"
#include "kernels/select/signature.h"

namespace lode {
namespace {

void silu(float* x, std::int64_t n) noexcept {
  constexpr int kLanes = Vec::kLanes;
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const int count = static_cast<int>(n - i < kLanes ? n - i : kLanes);
    alignas(64) float power[kLanes];
    store(power, exp_of(set1(0.0f) - (count == kLanes ? load(x + i) : load_first(x + i, count))));
    // Below -87 the power may have left the range, and the result is smaller than any normal number.
    for (int lane = 0; lane < count; ++lane) {
      const float a = x[i + lane];
      x[i + lane] = a < -87.0f ? 0.0f : a / (1.0f + power[lane]);
    }
  }
}

/// Mismatches of a key bit with the queries' bits, as a binary number: c where the key has 0, count - c where
/// it has 1, c the queries that have 1 there. Digit `shift` of all bits of a signature; digits that are the
/// same either way go into a constant. So many queries cost as much as their number has digits.
struct Digit {
  std::uint32_t zero[kMaxSignatureWords], one[kMaxSignatureWords];  // where the key bit is 0, 1
  int shift;
};
constexpr std::int64_t kAheadWords = 1024;  // keys that memory is asked for ahead: past the end of the page
constexpr int kMostDigits = 5, kDigitQueries = 31;  // queries of one pass: their sums of 8 bits fit a byte

/// Fills in the digits that depend on the key, lowest first; returns how many. `constant` gets the rest.
inline int digits_of(const std::uint32_t* queries /*[count, words]*/, int count, int words,
                     Digit (&digits)[kMostDigits], int& constant) {
  int used = 0;
  constant = 0;
  for (int shift = 0; count >> shift != 0; ++shift) {
    Digit& digit = digits[used] = {.zero = {}, .one = {}, .shift = shift};
    bool alike = true;
    int ones = 0;
    for (int bit = 0; bit < words * 32; ++bit) {
      int set = 0;
      for (int q = 0; q < count; ++q) set += static_cast<int>(queries[q * words + bit / 32] >> bit % 32 & 1u);
      const auto zero = static_cast<std::uint32_t>(set >> shift & 1),
                 one = static_cast<std::uint32_t>((count - set) >> shift & 1);
      digit.zero[bit / 32] |= zero << bit % 32;
      digit.one[bit / 32] |= one << bit % 32;
      alike = alike && zero == one;
      ones += static_cast<int>(zero);
    }
    if (alike) {
      constant += ones << shift;
    } else {
      ++used;
    }
  }
  return used;
}

/// For each nibble of a word, lowest first, the mismatches beyond those that no key avoids: of all queries
/// together, by the nibble's value.
struct NibbleTables {
  alignas(16) std::uint8_t sum[8][16];
};
/// distance = constant + (the sum over all nibbles << shift): of an even number of queries only even numbers
/// of mismatches can be avoided.
struct NibbleSums {
  NibbleTables words[kMaxSignatureWords];
  int constant = 0, shift = 0;
};

/// False when a word's sum could exceed a byte.
inline bool nibble_sums_of(const std::uint32_t* queries /*[count, words]*/, int count, int words,
                           NibbleSums& sums) {
  sums.shift = count % 2 == 0 ? 1 : 0;
  if (count * 32 >> sums.shift > 255) return false;
  for (int bit = 0; bit < words * 32; ++bit) {
    int set = 0;
    for (int q = 0; q < count; ++q) set += static_cast<int>(queries[q * words + bit / 32] >> bit % 32 & 1u);
    const int avoided = set < count - set ? set : count - set;
    const int place = 1 << bit % 4;  // the table below it is complete for the bits before
    std::uint8_t* const table = sums.words[bit / 32].sum[bit % 32 / 4];
    if (place == 1) table[0] = 0;
    for (int value = place; value-- > 0;) {
      table[value + place] =
          static_cast<std::uint8_t>(table[value] + ((count - set - avoided) >> sums.shift));
      table[value] = static_cast<std::uint8_t>(table[value] + ((set - avoided) >> sums.shift));
    }
    sums.constant += avoided;
  }
  return true;
}

/// Calls pass.operator()<W>(digits, used, constant, add) for as many queries at a time as one pass takes, W
/// words each; from the second on it adds.
template <class Pass>
inline void for_digits(const std::uint32_t* queries, int words, int count, bool add, Pass pass) {
  for (int first = 0; first == 0 || first < count; first += kDigitQueries, add = true) {
    Digit digits[kMostDigits];
    int constant = 0;
    const int left = count - first, some = left < kDigitQueries ? left : kDigitQueries;
    const int used = digits_of(queries + first * words, some, words, digits, constant);
    if (words == 1) pass.template operator()<1>(digits, used, constant, add);
    if (words == 2) pass.template operator()<2>(digits, used, constant, add);
    if (words == 4) pass.template operator()<4>(digits, used, constant, add);
  }
}

/// rows of the set bits of `mask`, each bit standing for `kBitsEach` of them.
template <int kBitsEach>
inline Position* rows_of(std::uint32_t mask, Position first, Position* rows) {
  for (; mask != 0; mask &= mask - 1) *rows++ = first + __builtin_ctz(mask) / kBitsEach;
  return rows;
}

}  // namespace
}  // namespace lode

#define LODE_SIGNATURE_TABLE(table_name)                                                    \
  {                                                                                         \
    .name = table_name, .distances = distances, .least = least, .count_up_to = count_up_to, \
    .collect_up_to = collect_up_to, .silu = silu                                            \
  }
