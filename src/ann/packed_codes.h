// SPDX-License-Identifier: Apache-2.0
// Codes of 4 bits of many keys, laid out for the packed sums, and numbers coded into so many bits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/select/packed_sum.h"
#include "lodestone/types.h"

namespace lode {

/// Nibbles in blocks of kPackedBlock keys: [blocks, parts, 16] words. Different blocks may be written side by
/// side.
class NibbleCodes {
 public:
  explicit NibbleCodes(int parts = 0) : parts_(parts) {}

  int parts() const { return parts_; }
  std::int64_t size() const { return size_; }
  void resize(std::int64_t size);  ///< new keys have code 0
  void set(std::int64_t key, int part, std::uint32_t code);
  std::uint32_t get(std::int64_t key, int part) const;
  const std::uint32_t* data() const { return words_.data(); }

  std::span<const std::uint32_t> words() const { return words_; }
  static std::int64_t words_for(std::int64_t size, int parts);
  /// What words() gave for so many keys; the caller has checked their number.
  static NibbleCodes of(std::span<const std::uint32_t> words, std::int64_t size, int parts);
  std::int64_t bytes() const { return static_cast<std::int64_t>(words_.capacity() * sizeof(std::uint32_t)); }

 private:
  std::uint32_t& word(std::int64_t key, int part);

  int parts_ = 0;
  std::int64_t size_ = 0;
  std::vector<std::uint32_t> words_;
};

/// Codes of a byte in the same blocks: [blocks, parts, 128].
class ByteCodes {
 public:
  explicit ByteCodes(int parts = 0) : parts_(parts) {}

  void resize(std::int64_t size) { bytes_.resize(static_cast<std::size_t>(bytes_for(size, parts_))); }
  void set(std::int64_t key, int part, std::uint32_t code) {
    bytes_[static_cast<std::size_t>((key / kPackedBlock * parts_ + part) * kPackedBlock +
                                    key % kPackedBlock)] = static_cast<std::uint8_t>(code);
  }
  std::uint8_t* data() { return bytes_.data(); }
  const std::uint8_t* data() const { return bytes_.data(); }
  static std::int64_t bytes_for(std::int64_t size, int parts) {
    return (size + kPackedBlock - 1) / kPackedBlock * parts * kPackedBlock;
  }
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_.capacity()); }

 private:
  int parts_ = 0;
  std::vector<std::uint8_t> bytes_;
};

/// How each channel's numbers are coded: 2^bits levels, evenly from the least to the largest that were seen.
/// Numbers beyond get the nearest level.
struct ChannelLevels {
  enum class Rounding { nearest, down, up };

  int bits = 4;                  ///< 1, 2 or 4: so many codes fill a nibble
  std::vector<float> low, step;  // [channels]

  ChannelLevels() = default;
  ChannelLevels(int bits, std::span<const float> least /*[channels], finite*/,
                std::span<const float> largest /*[channels], finite*/);

  std::int64_t channels() const { return std::ssize(low); }
  int codes_in_nibble() const { return 4 / bits; }
  int parts(std::int64_t channels) const {
    return static_cast<int>((channels + codes_in_nibble() - 1) / codes_in_nibble());
  }
  std::uint32_t code(std::int64_t channel, float x, Rounding rounding) const;
  float value(std::int64_t channel, std::uint32_t code) const;
};

/// The table of one nibble that holds codes of some channels, the first in its lowest bits: entry =
/// sum over them of weight * step * code. What `low` adds is the same for all keys, and left out.
void fill_nibble_table(int bits, std::span<const float> weighted_steps /*[up to 4 / bits]*/,
                       std::span<float, 16> table);

}  // namespace lode
