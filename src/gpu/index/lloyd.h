// SPDX-License-Identifier: Apache-2.0
// Lloyd's iterations for several heads at once on the GPU: the initial points, the number of rounds and what
// becomes of empty clusters are those of ann/kmeans.h; sums and products round otherwise. Points are compared with
// all centroids in every round, so there is one step for few clusters and for many (ann/partition.h takes two).
#pragma once

#include <span>

#include "kernels/cuda/kmeans/kmeans.h"

namespace lode {

struct LloydTask {
  int heads = 1, width = 0;
  std::int64_t count = 0, clusters = 0;  ///< of a head
  bool by_distance = false;
  int rounds = 10;
  std::span<const std::uint64_t> seeds;  // [heads]
};

class Lloyd {
 public:
  /// Bytes of device memory for a head of a task, its points not counted.
  static std::int64_t bytes_for(const LloydTask& head);

  /// Clusters points [heads, count, width] of device memory. A point with a number that is not finite becomes 0.
  /// Polls check_cancel.
  void run(float* points, const LloydTask& task, cuda::StreamHandle stream);
  /// Puts every point into the cluster that is nearest: labels.
  void label(cuda::StreamHandle stream);

  const float* centroids() const { return centroids_.as<float>(); }          // [heads, C, width]
  const std::int32_t* labels() const { return labels_.as<std::int32_t>(); }  // [heads, count]
  const std::int32_t* counts() const { return counts_.as<std::int32_t>(); }  // [heads, C] of the last sums
  /// Rows' means by label, and `plus` (or null) on top; device memory.
  void means(const float* rows /*[heads, count, width]*/, const float* plus /*[heads, width]*/,
             float* to /*[heads, C, width]*/, cuda::StreamHandle stream);
  void variances(const float* rows, const float* means, float* to, cuda::StreamHandle stream);
  void release();
  std::int64_t bytes() const;  ///< of device memory held

 private:
  cuda::HalfRows points_in_halves() const;
  cuda::Clusters clusters() const;
  cuda::LabelSums sums() const;
  void allocate();
  void start(const float* points, cuda::StreamHandle stream);
  void send_seeds(int round, cuda::StreamHandle stream);
  /// Calls body(buffer) for all that hold memory, of a Lloyd that is const or not.
  static void for_buffers(auto& self, const auto& body) {
    for (auto* const buffer :
         {&self.halves_, &self.factors_, &self.labels_, &self.centroids_, &self.centroid_halves_,
          &self.centroid_factors_, &self.biases_, &self.sums_, &self.counts_, &self.largest_, &self.seeds_})
      body(*buffer);
  }

  LloydTask task_;
  cuda::Buffer halves_, factors_;             // of points: [heads, count, half width], [heads, count]
  cuda::Buffer centroids_, centroid_halves_;  // [heads, C, width], [heads, C, half width]
  cuda::Buffer centroid_factors_, biases_;    // [heads, C]
  cuda::Buffer labels_, sums_, counts_, largest_, seeds_;  // see cuda::LabelSums
};

/// At least so many bytes; what was in there is lost when it grows.
void reserve(cuda::Buffer& buffer, std::int64_t bytes);

}  // namespace lode
