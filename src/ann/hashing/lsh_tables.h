// SPDX-License-Identifier: Apache-2.0
// Hash tables over vectors that were hashed L times: which of them meet a query at least twice (MagicPIG,
// algorithm 1; the hashing itself is the caller's).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lode {

/// A vector's code in every table is kept as it came. The lists of each table's buckets follow from the
/// codes: they cover the first vectors, and are laid anew when those behind them, which are scanned, have
/// become many. What is found does not depend on where that border lies.
class LshTables {
 public:
  LshTables() = default;
  LshTables(int tables, int bits);

  int tables() const { return static_cast<int>(codes_.size()); }
  std::int64_t size() const { return codes_.empty() ? 0 : std::ssize(codes_[0]); }
  std::span<const std::uint16_t> codes(int table) const { return codes_[static_cast<std::size_t>(table)]; }

  /// Vectors that come behind those held: codes [n, tables], below 2^bits.
  void append(std::span<const std::uint16_t> codes, std::int64_t n);
  void cut(std::int64_t size);
  std::int64_t bytes() const;  ///< memory held

  struct Scratch {
    std::vector<std::uint8_t> listed;   // [vectors in lists] 0, 1 or 2: times met
    std::vector<std::uint16_t> behind;  // [vectors behind the lists]
    std::vector<std::int32_t> met;
  };
  /// found := vectors below `end` that share the query's bucket in two tables or more, rising. Returns the
  /// bytes of lists and codes read.
  std::int64_t meet_twice(std::span<const std::uint16_t> query /*[tables]*/, std::int64_t end,
                          Scratch& scratch, std::vector<std::int32_t>& found) const;

 private:
  void lay_lists();

  int bits_ = 1;
  std::vector<std::vector<std::uint16_t>> codes_;  // [L][n]
  std::int64_t listed_ = 0;                        // vectors that the lists know; later ones in them are gone
  std::vector<std::uint32_t> starts_;              // [L, 2^bits + 1]
  std::vector<std::int32_t> lists_;                // [L, vectors when they were laid], by bucket, rising
};

}  // namespace lode
