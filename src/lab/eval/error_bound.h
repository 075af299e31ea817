// SPDX-License-Identifier: Apache-2.0
// A bound on the error of sparse attention that computes no score of a key that was left out.
//
// With A the attended keys' sum of exp(score), U that of all others, and d = U / (A + U), full attention's
// output o and the sparse one s differ by o - s = d (mean of the values left out - s), so that
//
//   |o - s| <= d (max |v| + |s|)
//
// U is bounded by pages of 16 keys: no key of a page scores more than sum_c max(q_c least_c, q_c largest_c)
// over the least and the largest number in each channel (Quest's bound, arXiv 2406.10774, section 3.3). Two
// numbers a channel and page are an eighth of the keys' bytes.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lodestone/kv_view.h"
#include "lodestone/types.h"

namespace lode {

class ErrorBound {
 public:
  /// Of the keys and values of one head; they may grow, but not change.
  void extend(const KvRows& kv, std::int64_t keys);
  std::int64_t keys() const { return keys_; }

  /// At least |o - s|, of one query: `q` [d] scaled, `attended` [n] says which of the first n keys it attends
  /// with weights exp(score), `scores` [n] need be right for those alone, `output` [d] is s. n <= keys().
  double of(std::span<const float> q, std::span<const char> attended, std::span<const float> scores,
            std::span<const float> output) const;

 private:
  static constexpr std::int64_t kPage = 16;
  double page_bound(std::span<const float> q, std::int64_t page) const;

  std::int64_t keys_ = 0;
  std::vector<float> least_, largest_;  // [pages, d]
  double longest_value_ = 0;
};

}  // namespace lode
