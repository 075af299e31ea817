// SPDX-License-Identifier: Apache-2.0
// Untrained functions of the sizes that training makes, for benches of methods whose artefact is not at hand:
// what they choose means nothing, but takes as long.
#pragma once

#include "base/rng.h"
#include "select/hash/weights.h"
#include "select/saap/bucket_net.h"

namespace lode {

class ThreadPool;

/// SAAP's f_q (section 6.1): d -> 1024 -> buckets.
BucketNet made_up_classifier(std::int64_t d, std::int64_t buckets, DType type, Rng& rng);

/// What SAAP assigns keys by: spherical k-means of a sample.
BucketNet centroid_net(Matrix<const float> keys /*[n, d], dense*/, std::int64_t clusters, std::uint64_t seed,
                       ThreadPool& pool);

/// Lets the first bucket hold `share` of keys like these, and every query choose it: its centroid grows, and
/// so does its bias. In (0, 1); `keys` are centroids in f32, as centroid_net makes them.
void enlarge_first_bucket(BucketNet& keys, BucketNet& queries, Matrix<const float> sample /*[n, d], dense*/,
                          double share);

/// phi_q and phi_kv of one layer through `hidden` layers of width d, in f16; none makes hyperplanes.
HashWeights made_up_hash(int query_heads, int kv_heads, std::int64_t d, int bits, int hidden, Rng& rng);

}  // namespace lode
