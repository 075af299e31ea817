// SPDX-License-Identifier: Apache-2.0
// The inverted lists of partition methods: keys of one sequence and layer, each in one bucket per KV head.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "lodestone/selection.h"

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

  /// Keys [begin(), end) of a head bucket by bucket, rising inside.
  std::vector<Position> listed(int head, Position end) const;
  /// The bucket of each of a head's keys [begin, end), of which every one is in the index.
  std::vector<std::uint16_t> labels(int head, Position begin, Position end) const;
  /// From now on these lie in the rows [begin(), end) in that order; 0: every key in its own row.
  void set_ordered(Position end);
  Position ordered_end() const { return ordered_end_; }
  /// The rows of a bucket's keys below ordered_end().
  Run ordered_rows(int head, std::int64_t bucket) const {
    const auto at = static_cast<std::size_t>(head * (buckets() + 1) + bucket);
    return ordered_.empty() ? Run{} : Run{ordered_[at], ordered_[at + 1]};
  }
  /// Keys of a bucket from ordered_end() on and below `end`, rising, each in its own row.
  std::span<const Position> rows_behind(int head, std::int64_t bucket, Position end) const {
    if (ordered_.empty()) return rows(head, bucket, end);
    if (lasts_[static_cast<std::size_t>(head * buckets() + bucket)] < ordered_end_) return {};
    const Run run = ordered_rows(head, bucket);
    return rows(head, bucket, end).subspan(static_cast<std::size_t>(run.end - run.begin));
  }

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
  Position ordered_end_ = 0;
  std::vector<Position> ordered_;  // [Hkv, C + 1] first row of each bucket's keys; empty: in token order
};

}  // namespace lode
