// SPDX-License-Identifier: Apache-2.0
// The inverted lists of partition methods: keys of one sequence and layer, each in one bucket per KV head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "lodestone/types.h"

namespace lode {

class SectionWriter;
class SectionReader;

class BucketIndex {
 public:
  BucketIndex() = default;
  /// No keys yet: the first to be added is `begin`. Every head has the same number of centroids.
  BucketIndex(Position begin, int head_dim, std::vector<std::vector<float>> centroids /*[Hkv][C, d]*/);
  /// The same for methods that keep what names the buckets elsewhere: no centroids, a head dimension of 0.
  BucketIndex(Position begin, int heads, std::int64_t buckets);

  Position begin() const { return begin_; }
  Position end() const { return end_; }  ///< keys [begin, end) are in the buckets
  int heads() const { return static_cast<int>(centroids_.size()); }
  std::int64_t buckets() const { return std::ssize(rows_) / std::max(1, heads()); }  // C
  std::span<const float> centroids(int head) const {
    return centroids_[static_cast<std::size_t>(head)];
  }  // [C, d]

  /// Keys of a bucket below `end`, rising.
  std::span<const Position> rows(int head, std::int64_t bucket, Position end) const;
  /// How many those are; of buckets that lie below `end` it is known without touching their lists.
  std::int64_t keys(int head, std::int64_t bucket, Position end) const {
    const auto at = static_cast<std::size_t>(head * buckets() + bucket);
    return lasts_[at] < end ? std::ssize(rows_[at]) : std::ssize(rows(head, bucket, end));
  }
  /// First key of each bucket of a head, kNone for an empty one: tells which buckets hold keys without
  /// touching their lists.
  std::span<const Position> firsts(int head) const {
    return std::span(firsts_).subspan(static_cast<std::size_t>(head * buckets()),
                                      static_cast<std::size_t>(buckets()));  // [C]
  }
  static constexpr Position kNone = std::numeric_limits<Position>::max();

  /// Puts keys [end(), end() + count) into the buckets that the labels name.
  void add(std::span<const std::int32_t> labels /*[Hkv, count]*/, std::int64_t count);
  /// Forgets keys at or beyond `tokens`.
  void roll_back(std::int64_t tokens);
  std::int64_t bytes() const;  ///< memory held

  void save(SectionWriter& out) const;
  /// What save wrote; InputError unless it fits the heads, the dimension, the first key and a context of
  /// `tokens`, and every key is in one bucket.
  static BucketIndex load(const SectionReader& in, Position begin, int heads, int head_dim,
                          std::int64_t tokens);

 private:
  Position begin_ = 0, end_ = 0;
  int head_dim_ = 0;
  std::vector<std::vector<float>> centroids_;  // [Hkv][C, d]
  std::vector<std::vector<Position>> rows_;    // [Hkv, C], rising each
  std::vector<Position> firsts_, lasts_;       // [Hkv, C]; kNone and -1 of empty buckets
};

}  // namespace lode
