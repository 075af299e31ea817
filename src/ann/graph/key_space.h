// SPDX-License-Identifier: Apache-2.0
// The directions of keys that queries tell apart, in which a walk compares them: fewer numbers than a key
// has, so that a key is fewer cache lines.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/types.h"

namespace lode {

/// With the queries' second moment L L^T and the keys' mean m: q.(k - m) = (L^-1 q).(L^T (k - m)), where the
/// first factor has the second moment 1. So directions of the second one matter by its variance alone, and
/// its principal ones are kept: of all projections the one that loses least of the scores, on average over
/// queries. q.m is the same for all keys of a query and left out. Distances between keys are those that
/// queries see, E[(q.(x - y))^2] = |L^T (x - y)|^2.
class KeySpace {
 public:
  /// Keys and queries as they are.
  explicit KeySpace(int head_dim) : head_dim_(head_dim), numbers_(head_dim) {}
  /// `numbers` directions, at most as many as there are; 0: as many as fit the fewest cache lines beside a
  /// scale that leave out at most kLost of the variance. Of either at most kSample rows are looked at, at
  /// even steps; at least one row each. Rows that are not finite are left out, and few that are much longer
  /// than the others bend nothing.
  static KeySpace of(Matrix<const float> queries, Matrix<const float> keys, int numbers = 0);
  /// Of 64 directions 60 always keep more than this, so that a key of 64 numbers is always one line.
  static constexpr double kLost = 1.0 / 16;
  static constexpr std::int64_t kSample = 2048;

  int numbers() const { return numbers_; }
  void key(const float* k /*[d]*/, std::span<float> out /*[numbers]*/) const;
  void query(const float* q /*[d]*/, std::span<float> out /*[numbers]*/) const;

  /// For files: [keys, queries, shift], or nothing where keys are taken as they are.
  std::vector<float> values() const;
  static KeySpace restore(int head_dim, int numbers, std::span<const float> values);
  static std::int64_t value_count(int head_dim, int numbers) {
    return (2 * std::int64_t{head_dim} + 1) * numbers;
  }
  std::int64_t bytes() const {
    return static_cast<std::int64_t>((keys_.capacity() + queries_.capacity() + shift_.capacity()) *
                                     sizeof(float));
  }

 private:
  int head_dim_, numbers_;
  std::vector<float> keys_, queries_;  // [numbers, d]; empty: as they are
  std::vector<float> shift_;           // [numbers] of the keys' mean
};

}  // namespace lode
