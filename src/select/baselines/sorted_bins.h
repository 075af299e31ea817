// SPDX-License-Identifier: Apache-2.0
// Base of methods that sort keys by a hash and cut the sorted keys into bins of equal size, of which a query
// visits those at its own place in the order: partitions that are balanced by force (SAAP, appendix B).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "lodestone/spec.h"
#include "select/shared/per_token.h"
#include "select/shared/rows.h"

namespace lode {

/// Numbers 0, 1, 2, ... in the order of their codes, equal codes by rising number.
class SortedCodes {
 public:
  std::int64_t size() const { return std::ssize(codes_); }
  std::span<const std::uint32_t> codes() const { return codes_; }
  void append(std::span<const std::uint32_t> codes);
  void cut(std::int64_t size);
  std::int64_t bytes() const;  ///< memory held

  /// The numbers below `end` in order: those held, or, when that is fewer, a copy in `scratch`.
  std::span<const std::int32_t> order(std::int64_t end, std::vector<std::int32_t>& scratch) const;
  /// Where in such an order the numbers of one code stand: [first, last); the place where they would when
  /// there are none.
  std::pair<std::int64_t, std::int64_t> places(std::span<const std::int32_t> order, std::uint32_t code) const;

 private:
  std::vector<std::uint32_t> codes_;  // by number
  std::vector<std::int32_t> order_;
};

class SortedBinsSelector : public PerTokenSelector {
 public:
  /// `bin` keys a bin, a count or a share of the far keys; `tables` hashes of each key.
  SortedBinsSelector(const LayerGeometry& geometry, const Amount& bin, int tables);

  void build(std::int32_t sequence, KvLayer kv) override;
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override;
  void roll_back(std::int32_t sequence, std::int64_t tokens) override;
  void save(std::int32_t sequence, SectionWriter& out) const override;
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override;
  std::int64_t index_bytes() const override;

 protected:
  /// How many codes there are for a context of so many keys; stays as build() found it.
  virtual std::int64_t codes_for(std::int64_t keys) const = 0;
  /// Whether codes_for can give this number; bounds what a file may ask for.
  virtual bool gives_codes(std::int64_t codes) const = 0;
  /// Directions that a vector is multiplied with to find one of so many codes.
  virtual std::int64_t directions_for(std::int64_t codes) const = 0;
  /// The code that the products with the directions mean.
  virtual std::uint32_t code_of(std::span<const float> products) const = 0;
  /// Bins [first, last) that a query visits whose code stands at places [begin, end) in the order;
  /// bin_of(place) is the bin that holds a place.
  struct Bins {
    std::int64_t keys, count;
    std::int64_t begin_of(std::int64_t bin) const { return bin * keys / count; }
    std::int64_t bin_of(std::int64_t place) const { return ((place + 1) * count - 1) / keys; }
  };
  virtual std::pair<std::int64_t, std::int64_t> visited(const Bins& bins, std::int64_t begin,
                                                        std::int64_t end) const = 0;

 private:
  struct Index {
    Position begin = 0, end = 0;      // keys [begin, end) are in
    std::int64_t codes = 1;           // how many there are
    std::vector<SortedCodes> tables;  // [Hkv, tables]
  };
  struct Scratch {
    std::vector<float> products;
    std::vector<std::uint32_t> codes;
    std::vector<std::int32_t> order;
    std::vector<Position> rows;
    RowSet set;
  };

  Index empty_index(std::int64_t codes);
  void extend(Index& index, KvLayer kv, Position end) const;
  void extend_block(Index& index, KvLayer kv, Position end) const;
  void hash(std::size_t table, std::int64_t codes, const float* x /*[n, d]*/, std::int64_t n,
            std::uint32_t* out /*[n]*/, std::vector<float>& products) const;
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;

  Amount bin_;
  int tables_;
  std::vector<std::vector<float>> directions_;  // [Hkv, tables][as many as were needed so far, d]
  std::map<std::int32_t, Index> indexes_;       // by sequence
  std::vector<Scratch> scratch_;                // [workers]
};

}  // namespace lode
