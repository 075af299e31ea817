// SPDX-License-Identifier: Apache-2.0
// Exact nearest keys of many queries on the GPU (ann/nearest.h), of rows in host memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/kmeans/kmeans.h"
#include "lodestone/types.h"

namespace lode {

class NearestRows {
 public:
  /// Whether the kernels take so many; `width` of a row.
  static bool takes(std::int64_t keys, std::int64_t width, std::int64_t k);
  /// Bytes of device memory that a call holds at most.
  static std::int64_t bytes_for(std::int64_t queries, std::int64_t keys, std::int64_t width, std::int64_t k);

  /// [queries, k], best first; -1 in front of a list that is not known (cuda::nearest_keys). Polls check_cancel.
  std::vector<std::int32_t> find(Matrix<const float> queries, Matrix<const float> keys, int k,
                                 const cuda::Stream& stream);
  void release();
  std::int64_t bytes() const;  ///< of device memory held

 private:
  static void for_buffers(auto& self, const auto& body) {
    for (auto* const buffer :
         {&self.rows_, &self.keys_, &self.key_factors_, &self.queries_, &self.query_factors_, &self.partial_,
          &self.least_, &self.counts_, &self.above_, &self.found_})
      body(*buffer);
  }
  cuda::HalfRows halved(Matrix<const float> rows, cuda::Buffer& halves, cuda::Buffer& factors,
                        const cuda::Stream& stream);
  void find_some(const cuda::HalfRows& queries, const cuda::HalfRows& keys, int k, std::int32_t* to,
                 const cuda::Stream& stream);

  cuda::Buffer rows_;                                      // [rows, width] as they come
  cuda::Buffer keys_, key_factors_;                        // [n, half width], [n]
  cuda::Buffer queries_, query_factors_;                   // of the queries of one launch
  cuda::Buffer partial_, least_, counts_, above_, found_;  // see cuda::nearest_keys
};

}  // namespace lode
