// SPDX-License-Identifier: Apache-2.0
// The least and the largest number in each channel of the keys of each page (Quest, section 3.3), of one
// sequence and layer: as the keys are stored, or in 2 or 4 bits.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ann/packed_codes.h"
#include "lodestone/kv_view.h"

namespace lode {

class SectionWriter;
class SectionReader;

struct PageShape {
  Position begin = 0;      ///< first key of the first page
  int heads = 0, d = 0;    ///< KV heads, channels
  std::int64_t page = 16;  ///< keys of a page
  int bits = 16;           ///< of a bound: 2 or 4; 16 = as the keys are stored
  bool coded() const { return bits < 16; }
  friend bool operator==(const PageShape&, const PageShape&) = default;
};

class PageBounds {
 public:
  /// Runs body(item, worker) for all items, side by side.
  using ForEach = std::function<void(std::int64_t, const std::function<void(std::int64_t, int)>&)>;
  struct Scratch {
    std::vector<float> weights;  // [queries, 2, d]: those of the largest numbers, then of the least
    std::vector<float> tables;   // [queries, parts, 16]
  };

  PageBounds() = default;
  explicit PageBounds(const PageShape& shape)
      : shape_(shape), heads_(static_cast<std::size_t>(shape.heads)) {}

  /// Takes the levels of coded bounds from keys [begin, kv.tokens); without keys there are none.
  void calibrate(KvLayer kv, const ForEach& for_each);
  /// Takes in the pages whose keys all lie before `end`. Without levels, coded bounds take in none.
  void extend(KvLayer kv, Position end, const ForEach& for_each);
  void roll_back(std::int64_t tokens);

  /// False for coded bounds whose levels are not known: they bound nothing.
  bool ready() const { return !shape_.coded() || heads_[0].levels.channels() > 0; }
  /// Of coded bounds that are ready.
  const ChannelLevels& levels(int head) const { return heads_[static_cast<std::size_t>(head)].levels; }
  std::int64_t pages() const { return pages_; }
  /// scores[r * stride + p] := sum_c max(q_c least_c, q_c largest_c) of pages [0, pages), for each row of q;
  /// up to what is the same for all pages of a row when bounds are coded. stride >= padded(pages).
  void score(int head, Matrix<const float> q /*[rows, d]*/, bool sum_rows, std::int64_t pages, float* scores,
             std::int64_t stride, Scratch& scratch) const;
  static std::int64_t padded(std::int64_t pages) {
    return (pages + kPackedBlock - 1) / kPackedBlock * kPackedBlock;
  }

  std::int64_t page_bytes() const;  ///< of the bounds of one page and head
  std::int64_t bytes() const;       ///< memory held

  void save(SectionWriter& out) const;
  /// What save wrote; InputError unless it fits the shape, a context of `kv.tokens` and the type of its keys.
  static PageBounds load(const PageShape& shape, const SectionReader& in, KvLayer kv);

 private:
  struct Head {
    std::vector<std::byte> stored;  // [pages, 2, d] of type_: largest, then least; empty if coded
    NibbleCodes codes;              // [pages] with 2 d codes each; empty if not
    ChannelLevels levels;           // [d]
  };

  void take(Head& head, const KvRows& kv, std::int64_t page) const;
  void fill_tables(const Head& head, std::int64_t rows, Scratch& scratch) const;

  PageShape shape_;
  DType type_ = DType::f32;  // of stored bounds
  std::int64_t pages_ = 0;
  std::vector<Head> heads_;
};

/// What stored bounds of keys of that type are: the same, and bf16, rounded outwards, for q8.
DType bound_type(DType keys);

}  // namespace lode
