// SPDX-License-Identifier: Apache-2.0
// Sums of exponentials that scorers leave for share_scores, in float64.
#pragma once

#include "harness.h"
#include "kernels/cuda/select/select.h"

namespace lode::cuda::test {

/// Which of `n` keys of a row are far.
struct FarKeys {
  std::int64_t sink = 0, window = 0, n = 0;
};

inline std::vector<ExponentialSum> poisoned_sums(std::int64_t rows, std::int64_t n) {
  return std::vector<ExponentialSum>(static_cast<std::size_t>(rows * sums_of_keys(n)), {1e30f, 1e30f});
}

/// Of scores [tokens, heads, n].
inline std::vector<ExponentialSum> sums_of(const std::vector<float>& scores,
                                           const std::vector<QueryToken>& tokens, int heads,
                                           const FarKeys& far) {
  const std::int64_t rows = static_cast<std::int64_t>(tokens.size()) * heads, each = sums_of_keys(far.n);
  std::vector<ExponentialSum> sums = poisoned_sums(rows, far.n);
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t end = tokens[static_cast<std::size_t>(row / heads)].position + 1 - far.window;
    const float* const own = scores.data() + row * far.n;
    for (std::int64_t first = 0; first < end; first += kKeysOfSum) {
      const std::int64_t from = std::max(first, far.sink), to = std::min(end, first + kKeysOfSum);
      float peak = -INFINITY;
      double sum = 0.0;
      for (std::int64_t i = from; i < to; ++i)
        if (std::isfinite(own[i])) peak = std::max(peak, own[i]);
      for (std::int64_t i = from; i < to; ++i)
        if (std::isfinite(own[i])) sum += std::exp(static_cast<double>(own[i]) - peak);
      sums[static_cast<std::size_t>(row * each + first / kKeysOfSum)] = {peak, static_cast<float>(sum)};
    }
  }
  return sums;
}

/// What a scorer left beside its scores: exact peaks, sums within what exponentials of floats give.
inline void expect_sums(const std::vector<ExponentialSum>& found, const std::vector<float>& scores,
                        const std::vector<QueryToken>& tokens, int heads, const FarKeys& far) {
  const std::vector<ExponentialSum> expected = sums_of(scores, tokens, heads, far);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    LODE_CHECK(found[i].peak == expected[i].peak);
    LODE_CHECK_CLOSE(found[i].sum, expected[i].sum, 2e-5 * expected[i].sum);
  }
}

}  // namespace lode::cuda::test
