// SPDX-License-Identifier: Apache-2.0
// What each of several GPUs has of a model that they share by KV heads (tensor parallelism): its heads' rows of q, k
// and v and columns of o, its share of the feed-forward's rows and columns, and its rows of the output matrix. Norms
// and the embedding are on all of them. What o and down give are parts of a sum.
#pragma once

#include "model/weights.h"

namespace lode {

/// Which share of how many.
struct ModelShare {
  int rank = 0, ranks = 1;
  bool whole() const { return ranks == 1; }
};

/// InputError where a model cannot be cut in so many parts.
void expect_shares(const ModelConfig& config, const ModelWeights& weights, int ranks);

/// Sizes of a share: heads and feed-forward divided, the vocabulary whole.
ModelConfig share_of(const ModelConfig& config, int ranks);

/// A share's weights, where they lie in the file. Rows of o and down are as far apart as in the whole matrix. Biases
/// of o and down are the first share's alone, since parts are summed. A tied output stays whole.
ModelWeights share_of(const ModelWeights& weights, const ModelConfig& config, const ModelShare& share);

/// Rows of the output matrix that a share has: [first, end).
struct OutputRows {
  std::int64_t first = 0, end = 0;
};
OutputRows output_rows(std::int64_t vocab, const ModelShare& share);

}  // namespace lode
