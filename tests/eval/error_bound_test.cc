// SPDX-License-Identifier: Apache-2.0
// The bound on the error of sparse attention holds whatever is left out, also the one key that matters, and
// is of use where the keys of a page are alike.
#include "lab/eval/error_bound.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.h"

namespace lode {
namespace {

constexpr int kWidth = 8;

struct Head {
  std::vector<float> k, v, q, scores, full;
  KvRows rows() const {
    return {.type = DType::f32,
            .k = reinterpret_cast<const std::byte*>(k.data()),
            .v = reinterpret_cast<const std::byte*>(v.data()),
            .rows = std::ssize(k) / kWidth,
            .d = kWidth};
  }
  /// Softmax over the keys that are marked.
  std::vector<float> attend(std::span<const char> attended) const {
    std::vector<float> out(kWidth);
    double total = 0;
    for (std::size_t i = 0; i < attended.size(); ++i) {
      if (attended[i] == 0) continue;
      const double p = std::exp(static_cast<double>(scores[i]));
      total += p;
      for (std::size_t c = 0; c < kWidth; ++c) out[c] += static_cast<float>(p * v[i * kWidth + c]);
    }
    for (float& x : out) x = static_cast<float>(x / total);
    return out;
  }
};

/// Keys of a page lie around one centre, `spread` from it.
Head make_head(std::int64_t n, double spread, Rng& rng) {
  Head head;
  std::vector<double> centre(kWidth);
  for (std::int64_t i = 0; i < n; ++i) {
    if (i % 16 == 0)
      for (double& c : centre) c = rng.normal();
    for (const double c : centre) {
      head.k.push_back(static_cast<float>(c + spread * rng.normal()));
      head.v.push_back(static_cast<float>(rng.normal()));
    }
  }
  for (int c = 0; c < kWidth; ++c) head.q.push_back(static_cast<float>(rng.normal()));
  for (std::int64_t i = 0; i < n; ++i) {
    float sum = 0;
    for (int c = 0; c < kWidth; ++c)
      sum += head.q[static_cast<std::size_t>(c)] * head.k[static_cast<std::size_t>(i * kWidth + c)];
    head.scores.push_back(sum);
  }
  head.full = head.attend(std::vector<char>(static_cast<std::size_t>(n), 1));
  return head;
}

double distance(std::span<const float> a, std::span<const float> b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::pow(static_cast<double>(a[i]) - b[i], 2);
  return std::sqrt(sum);
}

TEST(ErrorBound, HoldsForAnyChoiceAndAnyKeys) {
  Rng rng(3);
  for (int trial = 0; trial < 300; ++trial) {
    const std::int64_t n = 1 + static_cast<std::int64_t>(rng.below(200));
    const Head head = make_head(n, trial % 3, rng);
    ErrorBound bound;
    bound.extend(head.rows(), n / 2);
    bound.extend(head.rows(), n);
    std::vector<char> attended(static_cast<std::size_t>(n));
    for (char& a : attended) a = rng.below(4) == 0 ? 1 : 0;
    attended[rng.below(static_cast<std::uint64_t>(n))] = 1;
    if (trial % 5 == 0) {  // all but the strongest
      std::fill(attended.begin(), attended.end(), char{1});
      if (n > 1)
        attended[static_cast<std::size_t>(std::max_element(head.scores.begin(), head.scores.end()) -
                                          head.scores.begin())] = 0;
    }
    const std::vector<float> output = head.attend(attended);
    EXPECT_GE(bound.of(head.q, attended, head.scores, output), distance(output, head.full) - 1e-5) << trial;
  }
}

TEST(ErrorBound, IsNothingWhereNothingIsLeftOutAndSmallWherePagesTell) {
  Rng rng(4);
  Head head = make_head(320, 0.0, rng);
  ErrorBound bound;
  bound.extend(head.rows(), 320);
  std::vector<char> attended(320, 1);
  EXPECT_EQ(bound.of(head.q, attended, head.scores, head.full), 0.0);
  const float most = *std::max_element(head.scores.begin(), head.scores.end());
  for (std::size_t i = 0; i < attended.size(); ++i) attended[i] = head.scores[i] > most - 3.0f ? 1 : 0;
  const std::vector<float> output = head.attend(attended);
  const double found = bound.of(head.q, attended, head.scores, output);
  EXPECT_GT(found, 0.0);
  EXPECT_LT(found, 3.0) << "one vector at most is as long";
}

}  // namespace
}  // namespace lode
