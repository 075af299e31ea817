// SPDX-License-Identifier: Apache-2.0
#include "ann/packed_codes.h"

#include <algorithm>
#include <cmath>

namespace lode {

namespace {

constexpr std::int64_t kWords = 16;  // of one part of a block

int shift_of(std::int64_t key) {
  return static_cast<int>(4 * (key % kPackedBlock / kWords));
}

}  // namespace

std::int64_t NibbleCodes::words_for(std::int64_t size, int parts) {
  return (size + kPackedBlock - 1) / kPackedBlock * parts * kWords;
}

void NibbleCodes::resize(std::int64_t size) {
  for (std::int64_t key = size;
       key < std::min(size_, (size + kPackedBlock - 1) / kPackedBlock * kPackedBlock); ++key) {
    for (int part = 0; part < parts_; ++part) set(key, part, 0);
  }
  size_ = size;
  words_.resize(static_cast<std::size_t>(words_for(size, parts_)));
}

std::uint32_t& NibbleCodes::word(std::int64_t key, int part) {
  return words_[static_cast<std::size_t>((key / kPackedBlock * parts_ + part) * kWords + key % kWords)];
}

void NibbleCodes::set(std::int64_t key, int part, std::uint32_t code) {
  std::uint32_t& to = word(key, part);
  to = (to & ~(15u << shift_of(key))) | code << shift_of(key);
}

std::uint32_t NibbleCodes::get(std::int64_t key, int part) const {
  return words_[static_cast<std::size_t>((key / kPackedBlock * parts_ + part) * kWords + key % kWords)] >>
             shift_of(key) &
         15u;
}

NibbleCodes NibbleCodes::of(std::span<const std::uint32_t> words, std::int64_t size, int parts) {
  NibbleCodes codes(parts);
  codes.words_.assign(words.begin(), words.end());
  codes.size_ = size;
  return codes;
}

// Spans of channels are taken in double: that of numbers near the largest float is no float.
ChannelLevels::ChannelLevels(int bits_of_code, std::span<const float> least, std::span<const float> largest)
    : bits(bits_of_code), low(least.begin(), least.end()), step(least.size()) {
  for (std::size_t c = 0; c < step.size(); ++c)
    step[c] = static_cast<float>((static_cast<double>(largest[c]) - low[c]) / ((1 << bits) - 1));
}

std::uint32_t ChannelLevels::code(std::int64_t channel, float x, Rounding rounding) const {
  const auto c = static_cast<std::size_t>(channel);
  if (!(step[c] > 0.0f)) return 0;
  const double level = (static_cast<double>(x) - low[c]) / step[c];
  const double rounded = rounding == Rounding::down ? std::floor(level)
                         : rounding == Rounding::up ? std::ceil(level)
                                                    : std::floor(level + 0.5);
  return static_cast<std::uint32_t>(std::clamp(rounded, 0.0, static_cast<double>((1 << bits) - 1)));
}

float ChannelLevels::value(std::int64_t channel, std::uint32_t code) const {
  const auto c = static_cast<std::size_t>(channel);
  return static_cast<float>(low[c] + static_cast<double>(step[c]) * code);
}

void fill_nibble_table(int bits, std::span<const float> weighted_steps, std::span<float, 16> table) {
  const std::uint32_t mask = (1u << bits) - 1u;
  for (std::uint32_t code = 0; code < 16; ++code) {
    float sum = 0.0f;
    for (std::size_t c = 0; c < weighted_steps.size(); ++c)
      sum += weighted_steps[c] * static_cast<float>(code >> (bits * static_cast<int>(c)) & mask);
    table[code] = sum;
  }
}

}  // namespace lode
