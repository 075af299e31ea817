// SPDX-License-Identifier: Apache-2.0
// Which of a head's centroids keys of the cache are nearest to: what methods of buckets keep of a key.
#pragma once

#include "gpu/select/selectors.h"
#include "kernels/cuda/device/device.h"

namespace lode {

class BucketLabels {
 public:
  struct Head {
    int layer = 0, kv_head = 0;
    bool roped = false;                ///< keys as they are stored, else as before RoPE
    const float* centroids = nullptr;  // [buckets, d]
    std::int64_t buckets = 0;
  };

  explicit BucketLabels(int head_dim);
  /// Of keys [begin, end), by position.
  void make(const GpuKeys& keys, const Head& head, std::int64_t begin, std::int64_t end,
            std::uint16_t* labels, cuda::StreamHandle stream) const;
  std::int64_t bytes() const { return points_.bytes() + found_.bytes(); }

 private:
  cuda::Buffer points_, found_;  // [piece, d], [piece]: keys on their way to their labels
};

}  // namespace lode
