// SPDX-License-Identifier: Apache-2.0
// A small network that scores every bucket for a vector: SAAP's query classifier f_q (section 6.1: two
// layers, batch norm folded into the first), and the centroids that keys are assigned by, which are such a
// network without a hidden layer.
//
//   scores(x) = W2 relu(W1 x + b1) + W3 x + b2
//
// Any of the two paths may be missing. Plain arrays, so that a device can take them as they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/types.h"

namespace lode {

struct Tensor;
struct TensorToWrite;

struct BucketNet {
  DType type = DType::f32;  ///< of the weights: f32, f16 or bf16; biases are f32
  /// Every row of weights is whole numbers of 127ths of its largest one, and is written to files so. In
  /// memory they are f32.
  bool in_8_bits = false;
  std::int64_t inputs = 0, hidden = 0, buckets = 0;  // d, H (0: no hidden path), C
  std::vector<std::byte> hidden_weight;              // W1 [H, d]
  std::vector<float> hidden_bias;                    // b1 [H]
  std::vector<std::byte> output_weight;              // W2 [C, H]
  std::vector<std::byte> linear_weight;              // W3 [C, d], or empty
  std::vector<float> bias;                           // b2 [C], or empty

  /// From float32 weights, rounded to `type` (q8: to 8 bits a row); empty spans for missing paths.
  struct Weights {
    std::span<const float> hidden_weight, hidden_bias, output_weight, linear_weight, bias;
  };
  BucketNet() = default;
  BucketNet(std::int64_t inputs, std::int64_t buckets, const Weights& weights, DType type);

  std::int64_t bytes() const;  ///< of weights and biases
  /// y[n, C] for any n; the bits of a row do not depend on the others. `scratch` grows as needed.
  void scores(const float* x /*[n, d]*/, std::int64_t n, std::vector<float>& scratch, float* y) const;
  /// The bucket of the highest score of each vector, the lowest of equal ones; 0 where scores are NaN.
  void label(Matrix<const float> x /*[n, d], dense*/, std::span<std::int32_t> labels) const;

  /// Whether label() says the nearest of centroids, by inner product.
  bool is_centroids() const { return hidden == 0 && !linear_weight.empty() && bias.empty(); }
  /// These, [C, d]; none where it is another function.
  std::vector<float> centroids() const;

  /// The network of weights rounded as Int8Net rounds them, so that it makes the same Int8Net, bit for bit.
  BucketNet rounded_to_8_bits() const;

  /// Tensors "PREFIX.hidden.weight", ".hidden.bias", ".output.weight", ".linear.weight" and ".bias". Weights
  /// in 8 bits are an I8 tensor of codes in [-127, 127] with ".hidden.most", ".output.most" or
  /// ".linear.most" beside it, the largest magnitude of each row: w = code * most / 127. `bytes` keeps what
  /// is made for it.
  void write(const std::string& prefix, std::vector<TensorToWrite>& tensors,
             std::deque<std::vector<std::byte>>& bytes) const;
  /// InputError names the tensor that is missing, has another shape or type, or a number that is not finite.
  static BucketNet read(const std::map<std::string, Tensor>& tensors, const std::string& prefix,
                        std::int64_t inputs, std::string_view where);
};

/// A tensor as finite float32 numbers of the given shape (-1 = any length from 1 on); InputError otherwise.
std::vector<float> read_floats(const std::map<std::string, Tensor>& tensors, const std::string& name,
                               const std::vector<std::int64_t>& shape, std::string_view where);

}  // namespace lode
