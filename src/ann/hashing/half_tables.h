// SPDX-License-Identifier: Apache-2.0
// Multi-index hashing of 32-bit codes (Norouzi, Punjani and Fleet, "Fast search in Hamming space with
// multi-index hashing", 2012), for distances that are sums over several queries. Keys lie by the low half of
// their code in one table and by the high half in another. What a key has beyond the mismatches that no key
// avoids is split over its halves, so a key within a limit is within r in its low half, or within the limit
// less r + 1 in its high half: only the cells of such halves are read.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "ann/hashing/hamming_hits.h"

namespace lode {

/// Mismatches beyond those that no key avoids, of all queries together, by the value of each byte of a code.
struct ByteCosts {
  ByteCosts(const std::uint32_t* queries /*[count]*/, int count);
  int low(std::uint32_t code) const { return of_byte[0][code & 0xff] + of_byte[1][code >> 8 & 0xff]; }
  int high(std::uint32_t code) const { return of_byte[2][code >> 16 & 0xff] + of_byte[3][code >> 24]; }

  std::array<std::array<std::uint16_t, 256>, 4> of_byte{};
  int avoided_by_none = 0;  ///< a key's distance is this and its costs
};

class HalfTables {
 public:
  /// Of codes [n], in place of those held.
  void build(std::span<const std::uint32_t> codes);
  std::int64_t size() const { return size_; }  ///< keys
  std::int64_t bytes() const { return size_ == 0 ? 0 : bytes_of(size_); }
  static std::int64_t bytes_of(std::int64_t keys);  ///< memory of tables

  /// What a search reads.
  struct Effort {
    std::int64_t cells = 0, keys = 0;
  };
  /// Adds the keys below `end` whose distance is at most `limit`, in no order. The low half is searched to
  /// costs of `low`, -1 or more: what is found does not depend on it.
  Effort collect(const ByteCosts& costs, int limit, int low, std::int64_t end, HammingHits& near) const;

 private:
  struct Table {
    std::vector<std::uint32_t> first;  // [2^16 + 1]: where the cell of a half begins
    std::vector<Position> keys;        // [size], rising within a cell
    std::vector<std::uint16_t> other;  // [size]: the other half of each
  };
  struct Reach {
    int half, least_other,
        cost;  // searched to `cost`; keys of no more than least_other are the other table's
  };
  Effort collect(const ByteCosts& costs, const Reach& reach, int most, std::int64_t end,
                 HammingHits& near) const;

  std::array<Table, 2> tables_;  // by the low half, by the high half
  std::int64_t size_ = 0;
};

/// How many cells of a half have costs of at most `most`: `half` is 0 for the low one.
std::int64_t cells_within(const ByteCosts& costs, int half, int most);

}  // namespace lode
