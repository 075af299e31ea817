// SPDX-License-Identifier: Apache-2.0
// A BucketNet whose weights are kept in 8 bits, for scores at half the bytes of f16: SAAP's classifier is a
// third of what a decode step reads. A row of weights is whole numbers in [-127, 127] times max |w| / 127;
// vectors enter with at least 11 bits, so that only the rounding of the weights shows.
#pragma once

#include <cstdint>
#include <vector>

#include "select/saap/bucket_net.h"

namespace lode {

class Int8Net {
 public:
  Int8Net() = default;
  explicit Int8Net(const BucketNet& net);

  struct Scratch {
    std::vector<std::int16_t> codes;  // [vectors, columns]
    std::vector<float> scales;        // [vectors]
    std::vector<std::int32_t> sums;   // [vectors, rows]
    std::vector<float> hidden;        // [vectors, H]
  };
  /// y[n, C], as BucketNet::scores but for the rounding of the weights; the same bits on every machine,
  /// whatever the other rows are. A row with a number that is not finite, on the way or at the start, is NaN.
  void scores(const float* x /*[n, d]*/, std::int64_t n, Scratch& scratch, float* y) const;
  std::int64_t bytes() const;  ///< of weights, scales and biases

 private:
  /// A matrix of weights.
  struct Product {
    std::int64_t inputs = 0, columns = 0;  // columns: inputs rounded up, zeros behind
    std::vector<std::int8_t> codes;        // [rows / 4, columns / 32, 4, 32], rows rounded up
    std::vector<float> scales;             // [rows]
    Product() = default;
    Product(const std::vector<std::byte>& weights, DType type, std::int64_t inputs);
    std::int64_t rows() const { return static_cast<std::int64_t>(scales.size()); }
  };
  /// y[vectors, rows] = or += x w.
  static void multiply(const Product& w, const float* x, int vectors, bool add, Scratch& scratch, float* y);

  std::int64_t inputs_ = 0, hidden_ = 0, buckets_ = 0;
  Product first_, output_, linear_;        // rows: none of a path that is missing
  std::vector<float> hidden_bias_, bias_;  // [H], [C] or none
};

}  // namespace lode
