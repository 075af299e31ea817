// SPDX-License-Identifier: Apache-2.0
// What SAAP's query classifier is to predict, on the GPU: the attention of a query on far keys, summed by
// bucket (the rows of A H_k of equation 1). Keys lie in the order of their buckets, so that a sum is over
// neighbours and needs no atomics: the same bits every time.
#pragma once

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// Which keys a query looks at, by their positions.
struct TargetQuery {
  std::int32_t begin = 0, first_end = 0;   ///< far keys: [begin, first_end) ...
  std::int32_t second_begin = 0, end = 0;  ///< ... and [second_begin, end)
  /// The best key in [look_begin, look_end) must be more than `distance` away from `position`; no such filter
  /// when distance < 0.
  std::int32_t look_begin = 0, look_end = 0, position = 0, distance = -1;
};

/// Keys of a prompt sorted by bucket. `stride` >= the number of keys; what lies behind them has position -1.
struct TargetKeys {
  const std::int32_t* positions = nullptr;  // [stride]
  const std::int32_t* offsets = nullptr;    // [buckets + 1] where each bucket begins
  std::int64_t stride = 0, buckets = 0;
};

/// most[i] = the highest score of query i's far keys; passes[i] = whether it has any and passes the filter.
void look_at_scores(const float* scores /*[count, stride]*/, const TargetQuery* queries /*[count]*/,
                    std::int64_t count, const TargetKeys& keys, float* most, std::int32_t* passes,
                    StreamHandle stream);

/// targets[i, :] = softmax over the far keys of query chosen[i], summed by bucket, rounded to f16.
void sum_by_bucket(const float* scores /*[.., stride]*/, const TargetQuery* queries, const float* most,
                   const std::int32_t* chosen /*[count]*/, std::int64_t count, const TargetKeys& keys,
                   float* sums /*[count, buckets] scratch*/, void* targets /*[count, buckets] f16*/,
                   StreamHandle stream);

/// to[i, :] = from[rows[i], :]; a row below 0 gives zeros.
void gather_rows(const float* from, const std::int32_t* rows /*[count]*/, std::int64_t count, std::int64_t d,
                 float* to /*[count, d]*/, StreamHandle stream);

/// The second half of an iteration of spherical k-means: centroids[c, :] = the sum of the points
/// order[offsets[c]
/// .. offsets[c + 1]), in that order, scaled to norm 1 as ann/kmeans.h does it; a cluster without points, or
/// whose sum is not finite, keeps its centroid.
void update_centroids(const float* x /*[n, d]*/, const std::int32_t* order /*[n]*/,
                      const std::int32_t* offsets /*[clusters + 1]*/, std::int64_t clusters, std::int64_t d,
                      float* centroids /*[clusters, d]*/, StreamHandle stream);

}  // namespace lode::cuda
