// SPDX-License-Identifier: Apache-2.0
// The parts of a training step of HashAttention's functions (section 4.3) beside the matrix products, for H
// heads at once: which keys a step sees, activations, the loss over products of codes, and Adam. Keys are
// numbered from the first one that may be pivotal. All sums have a fixed order.
#pragma once

#include "kernels/cuda/device/device.h"
#include "kernels/cuda/linear/many_products.h"

namespace lode::cuda {

/// The keys of each head that a step sees, as bits, and how many stand before each word.
struct HashMarks {
  std::uint32_t* words = nullptr;  // [H, W], 0 at first
  std::int32_t* before = nullptr;  // [H, W]
  std::int64_t heads = 0, keys = 0;
  constexpr std::int64_t width() const { return (keys + 31) / 32; }  ///< W
};

/// Queries of a step, and how far each token sees: the same tokens for all heads, [group, tokens] queries a
/// head.
struct HashQueries {
  std::int64_t group = 1, tokens = 0;
  const std::int32_t* far_ends = nullptr;  // [tokens] 1 to keys
  constexpr std::int64_t rows() const { return group * tokens; }
};

/// Marks counts[h] keys of each head.
void mark_keys(const HashMarks& marks, const std::int32_t* keys /*[H, most]*/,
               const std::int32_t* counts /*[H]*/, std::int64_t most, StreamHandle stream);

/// For each query the `top` largest of score + log_norm among its far keys, as top_k of the host has them
/// (ties to the larger key), rising; fewer where there are fewer. Marks them.
void find_pivotal(const HashMarks& marks, const HashQueries& queries, const float* scores /*[H, rows, keys]*/,
                  const float* log_norms /*[H, keys] or null*/, std::int64_t top,
                  std::int32_t* pivotal /*[H, rows, top]*/, StreamHandle stream);

/// The marked keys in rising order, and how many of them are each token's far keys.
void list_marked(const HashMarks& marks, const HashQueries& queries, std::int64_t most,
                 std::int32_t* listed /*[H, most]*/, std::int32_t* counts /*[H]*/,
                 std::int32_t* far_counts /*[H, tokens]*/, StreamHandle stream);

/// labels[h, row, i] = 1 where the i-th listed key is pivotal of the query, and 0 elsewhere.
void label_pivotal(const HashMarks& marks, const HashQueries& queries, const std::int32_t* pivotal,
                   std::int64_t top, std::int64_t most, std::uint8_t* labels /*[H, rows, most]*/,
                   StreamHandle stream);

/// x[h, i, :] = inputs[h, listed key i, :], the first d numbers turned: pairs (j, j + d/2) by turns [H, d],
/// cosines and then sines.
struct HashGather {
  const float* inputs = nullptr;  // [H, keys, width]
  const float* turns = nullptr;   // [H, d]
  const std::int32_t *listed = nullptr, *counts = nullptr;
  std::int64_t heads = 0, keys = 0, width = 0, head_dim = 0, most = 0;
};
void gather_turned(const HashGather& gather, float* x /*[H, most, width]*/, StreamHandle stream);

enum class HashActivation { relu, silu, tanh };

/// Rows of a layer's outputs, of each function of each head: [H, functions, rows, width].
struct HashRows {
  std::int64_t heads = 0, functions = 1, rows = 0, width = 0;
  const std::int32_t* counts = nullptr;  ///< [H] rows that there are, or null: all
};
/// x += bias, y = f(x); y may be x.
void activate(HashActivation activation, const HashRows& shape, const ManyMatrices<const float>& bias,
              float* x, float* y, StreamHandle stream);

/// dx = f'(x) times the sum of `parts` gradients dy, which lie `part` numbers apart; `saved` is x, or f(x) of
/// tanh. Sums of dx over kPartLength rows at a time go to bias.data, `bias_part` numbers apart; 0 where there
/// are no rows.
struct HashSlopes {
  const float *saved = nullptr, *dy = nullptr;
  std::int64_t parts = 1, part = 0;
  float* dx = nullptr;  ///< may be dy
  ManyMatrices<float> bias;
  std::int64_t bias_part = 0;
};
void slopes(HashActivation activation, const HashRows& shape, const HashSlopes& slopes, StreamHandle stream);

/// z [H, rows, most] becomes the gradient of the mean loss of a head's queries; row_losses [H, rows] add up
/// to the head's own times the group.
struct HashLoss {
  bool softmax = false;
  float class1_weight = 1;
  const std::uint8_t* labels = nullptr;      // [H, rows, most]
  const std::int32_t* far_counts = nullptr;  // [H, tokens]
  std::int64_t heads = 0, group = 1, tokens = 0, most = 0;
};
void pivotal_loss(const HashLoss& loss, const std::int32_t* counts /*[H]*/, float* z, double* row_losses,
                  StreamHandle stream);
/// losses[h] = the sum of row_losses over the group's queries / group.
void sum_losses(const HashLoss& loss, const double* row_losses, double* losses /*[H]*/, StreamHandle stream);

/// One update of `count` numbers whose gradients lie in `parts` parts, `part` numbers apart.
struct HashAdam {
  float *value = nullptr, *first = nullptr, *second = nullptr;
  const float* gradient = nullptr;
  std::int64_t parts = 1, part = 0;
  float beta1 = 0.9f, beta2 = 0.999f;
  float rate = 0, keep = 1, epsilon = 0;  ///< corrections included
};
void adam_of_parts(const HashAdam& adam, std::int64_t count, StreamHandle stream);

}  // namespace lode::cuda
