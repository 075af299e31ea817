// SPDX-License-Identifier: Apache-2.0
// k-means of the keys of several heads at once, all of it on the device: products of halves on the matrix
// unit with float32 sums, sums of a cluster's points in whole numbers, whose order does not matter. So every
// run gives the same bits.
#pragma once

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// Vectors as the matrix unit takes them: halves of each row times a power of two, filled up with zeros to
/// half_width(width) columns. Rows of any float32 size keep 11 bits.
struct HalfRows {
  int heads = 0, width = 0;
  std::int64_t count = 0;    ///< rows of a head
  void* halves = nullptr;    // [H, count, half_width(width)]
  float* factors = nullptr;  // [H, count] what halves are multiplied by to give the row
};
inline constexpr int kMostWidth = 256;
/// What `width` numbers take of a row of halves: 64, 96, 128 or 256.
int half_width(int width);

/// A row with a number that is not finite becomes 0, in `rows` too.
void halve(float* rows /*[H, count, width]*/, const HalfRows& to, StreamHandle stream);

struct Clusters {
  HalfRows centroids;     ///< `count` of them a head
  float* rows = nullptr;  // [H, C, width] the same in float32
  float* biases =
      nullptr;  // [H, C] added to products: 0, or -|c|^2 / 2 where points are compared by distance
  bool by_distance = false;  ///< centroids are means, else means' directions (or 0)
};

/// labels[h, i] = argmax_c x_i . c + bias_c, the lowest c of equal ones.
void nearest(const HalfRows& points, const Clusters& clusters, std::int32_t* labels /*[H, n]*/,
             StreamHandle stream);

/// Sums by label. Numbers count as multiples of a unit, the largest of a head's numbers as 2^40 of them or, of
/// more than four million points, as many as sums have room for.
struct LabelSums {
  int heads = 0, width = 0;
  std::int64_t labels = 0;         // C
  std::int64_t count = 0;          // n
  std::int64_t* sums = nullptr;    // [H, C, width]
  std::int32_t* counts = nullptr;  // [H, C]
  float* largest = nullptr;        // [H]
};
/// Finite rows; `labels` null: all of them have the label 0.
void sum_by_label(const float* rows /*[H, n, width]*/, const std::int32_t* labels /*[H, n]*/,
                  const LabelSums& to, StreamHandle stream);
/// The same of squared differences to `means` of the row's label; squares_by_label makes means of them.
void sum_squares_by_label(const float* rows, const std::int32_t* labels, const float* means /*[H, C, width]*/,
                          const LabelSums& to, StreamHandle stream);
/// means = sums / counts, and plus[h, :] added to each, if there is one; 0 of a label without rows.
void means_by_label(const LabelSums& from, const float* plus /*[H, width]*/, float* means /*[H, C, width]*/,
                    StreamHandle stream);
void squares_by_label(const LabelSums& from, float* means /*[H, C, width]*/, StreamHandle stream);

/// rows[h, i, :] -= minus[h, :].
void subtract(float* rows /*[H, n, width]*/, int heads, std::int64_t n, int width,
              const float* minus /*[H, width]*/, StreamHandle stream);
/// Rows of norm 1 or 0.
void directions(const float* rows, std::int64_t n, int width, float* to, StreamHandle stream);

/// Centroid c of head h becomes point start[h, c].
void start_clusters(const float* points /*[H, n, width]*/, std::int64_t n,
                    const std::int32_t* start /*[H, C]*/, const Clusters& to, StreamHandle stream);
/// The second half of an iteration: centroids from their points' sums. One without points becomes a random
/// point of a cluster that has several, or stays where none of 32 draws is one; seeds[h] tells iterations
/// apart.
void move_clusters(const float* points, const std::int32_t* labels, const LabelSums& sums,
                   const std::uint64_t* seeds /*[H]*/, const Clusters& to, StreamHandle stream);

/// The root of sum p^2 over the softmax p of each query's products with all keys: 1 / sqrt(n) where weights
/// are alike, 1 where one key has all. 0 where a number is none.
void softmax_sharpness(const HalfRows& queries, const HalfRows& keys, float scale,
                       float* partial /*sharpness_floats*/, float* sharpness /*[H, queries]*/,
                       StreamHandle stream);
std::int64_t sharpness_floats(int heads, std::int64_t queries);

/// Room for the keys whose products with a query reach what k of them are known to reach.
struct KeysAbove {
  static constexpr int kRoom = 512;  ///< of a query; some 1.4 k are found
  float* least = nullptr;            // [H, queries]
  std::int32_t* counts = nullptr;    // [H, queries]
  std::uint64_t* found = nullptr;    // [H, queries, kRoom]
};
inline constexpr int kMostNearest = 128;
inline constexpr std::int64_t kFewestColumns = 4096;

/// found[h, i] = the k <= kMostNearest keys with the largest products of query i, best first, equal ones by rising
/// index; -1 in front of a list that is not known: products are equal or no numbers, or a query's best keys stand
/// so that there is no room. Every pair is multiplied twice: for a bound, and for the keys that reach it.
/// At least kFewestColumns keys.
void nearest_keys(const HalfRows& queries, const HalfRows& keys, int k, const KeysAbove& scratch,
                  float* partial /*nearest_keys_floats*/, std::int32_t* found /*[H, queries, k]*/,
                  StreamHandle stream);
std::int64_t nearest_keys_floats(const HalfRows& queries, int k);

}  // namespace lode::cuda
