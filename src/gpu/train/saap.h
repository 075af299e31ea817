// SPDX-License-Identifier: Apache-2.0
// The heavy steps of SAAP's training on the GPU: iterations of k-means, the attention of queries summed by
// bucket, and the optimiser's steps of a query classifier. Plain arrays in host memory go in and out; a
// prompt's keys and a head's examples stay on the device while they are used. Every function may be called
// from any thread; calls wait for each other. RunError says what the GPU lacks.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ann/kmeans.h"
#include "lodestone/types.h"

namespace lode {

/// Keys of a prompt as attention sees them, with their buckets.
struct GpuSaapKeys {
  Matrix<const float> rotated;           // [n, d], dense
  std::span<const std::int32_t> labels;  // [n]
  std::int64_t buckets = 0;
};

/// Queries as attention sees them, times its scale, and the keys that each looks at.
struct GpuSaapQueries {
  /// By positions: far keys are [begin, first_end) and [second_begin, end); the best key in [look_begin,
  /// look_end) must be more than `distance` from `position`, unless distance < 0.
  struct Reach {
    std::int32_t begin = 0, first_end = 0, second_begin = 0, end = 0;
    std::int32_t look_begin = 0, look_end = 0, position = 0, distance = -1;
  };
  Matrix<const float> q;         // [count, d], dense
  std::span<const Reach> reach;  // [count]
};

struct GpuSaapTargets {
  std::vector<std::int32_t> chosen;  // [m] queries that have far keys and pass, rising
  std::vector<f16> targets;          // [m, C] the share of their attention in each bucket
  std::int64_t looked_at = 0;        ///< queries that were scored
};

/// A query classifier while it is trained: W2 relu(norm(W1 x + b1)) + b2 (+ W3 x + b3), with what Adam keeps
/// of each array. Arrays of parts that are missing are empty.
struct GpuSaapNet {
  struct Array {
    std::span<float> value, first, second;  ///< first, second: moments; empty of running statistics
  };
  std::int64_t inputs = 0, hidden = 0, buckets = 0;
  Array w1, b1, gain, shift, mean, variance, w2, b2, w3, b3;
  double momentum = 0.1, norm_epsilon = 1e-5;  ///< of the batch norm
  double beta1 = 0.9, beta2 = 0.999;           ///< of Adam
};

struct GpuSaapExamples {
  std::span<const float> q;      // [n, d] before RoPE
  std::span<const f16> targets;  // [n, C]
};

/// One step of the optimiser: its batch, and Adam's numbers with their corrections.
struct GpuSaapStep {
  std::vector<std::int32_t> rows;  ///< of the examples
  float rate = 0, keep = 1, epsilon = 0;
};

inline constexpr std::int64_t kGpuSaapSteps = 256;  ///< of one series, at most

/// One head's network on the GPU.
class GpuSaapFit {
 public:
  virtual ~GpuSaapFit() = default;
  /// Enqueues up to kGpuSaapSteps steps; one series at a time.
  virtual void begin(std::span<const GpuSaapStep> steps) = 0;
  /// Waits for them: the loss of each batch in nats.
  virtual std::vector<double> finish() = 0;
  /// Copies values, moments and running statistics into the arrays that it was made from.
  virtual void store() = 0;
};

class GpuSaapTraining {
 public:
  virtual ~GpuSaapTraining() = default;
  virtual std::vector<float> cluster(Matrix<const float> x /*[n, d], dense*/,
                                     const KMeansOptions& options) = 0;
  /// labels[i] = argmax_c (x_i . c + offset_c), the lowest c of equal ones.
  virtual void label(Matrix<const float> x /*[n, d], dense*/, std::span<const float> centroids /*[C, d]*/,
                     std::span<const float> offsets /*[C] or empty*/, std::span<std::int32_t> labels) = 0;
  /// Of the first `wanted` queries that pass; later ones are not scored.
  virtual GpuSaapTargets targets(const GpuSaapKeys& keys, const GpuSaapQueries& queries,
                                 std::int64_t wanted) = 0;
  /// `net`'s arrays outlive the fit; batches have at most `most_rows`.
  virtual std::unique_ptr<GpuSaapFit> fit(const GpuSaapNet& net, const GpuSaapExamples& examples,
                                          std::int64_t most_rows) = 0;
  /// The library of matrix products in use, or why there is none.
  virtual std::string library() const = 0;
};

/// RunError when there is no GPU. `exact`: products in float32 instead of TF32, for comparisons.
std::unique_ptr<GpuSaapTraining> make_gpu_saap_training(bool exact = false);

}  // namespace lode
