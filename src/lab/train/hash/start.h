// SPDX-License-Identifier: Apache-2.0
// Where training of HashAttention's functions starts: at the best linear signatures that second moments of
// keys and queries give, since the few steps that training has go further from there than from noise.
//
//   q . k = (q B^-1) . (B (k - m)) + q . m,  B = C^-gamma, m and C mean and covariance of the keys
//
// The last term is the same for all keys of a query, so keys are centred; of the space after B the directions
// in which the queries are long are kept, and turned at random so that every bit tells as much (as iterative
// quantisation does: Gong and Lazebnik 2011).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ann/symmetric_eigen.h"
#include "base/rng.h"
#include "lodestone/types.h"

namespace lode {

/// Sums of samples x [d] and of x x^T.
class Moments {
 public:
  explicit Moments(std::int64_t d = 0)
      : sum_(static_cast<std::size_t>(d)), products_(static_cast<std::size_t>(d * d)) {}
  void add(std::span<const float> x /*[d]*/);
  std::int64_t count() const { return count_; }
  std::vector<double> mean() const;                                    // [d]
  std::vector<double> about(const std::vector<double>& centre) const;  // [d, d] mean of (x - c)(x - c)^T

 private:
  std::int64_t count_ = 0;
  std::vector<double> sum_, products_;  // [d], [d, d]
};

struct LinearStart {
  std::vector<float> centre;   // [d] of the keys
  std::vector<float> keys;     // [bits, d]
  std::vector<float> queries;  // [bits, d]
};
/// From samples of one KV head's keys and of the queries of its group, at least one each. Codes have unit
/// variance on them.
LinearStart linear_start(const Moments& keys, const Moments& queries, std::int64_t bits, double gamma,
                         Rng& rng);

}  // namespace lode
