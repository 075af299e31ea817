// SPDX-License-Identifier: Apache-2.0
// Inverted files on the GPU: every key is in the list of one centroid, a query head scores the keys of the
// lists whose centroids it likes best. Deterministic, no word from the host inside a step.
#pragma once

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// Heads of this many channels, a multiple of 4 at most.
inline constexpr int kMostProbedDim = 256;
inline constexpr int kMostProbedLists = 8192;

/// scores[n, head, c] = q . centroid c of the head's KV head.
void score_lists(const Queries& queries, const float* centroids /*[Hkv, lists, d]*/, int lists,
                 float* scores /*[N, Hq, lists]*/, StreamHandle stream);

/// Which list every key of one model layer is in, and which lists the query heads have chosen.
struct ProbedKeys {
  const std::uint16_t* labels = nullptr;  // [Hkv, max_tokens]
  std::int64_t sequence_stride = 0;       ///< labels from one sequence's to the next one's
  int lists = 0;
  const std::int32_t* probed = nullptr;  // [N, Hq, most]
  const std::int32_t* counts = nullptr;  // [N, Hq] how many
  int most = 0;
};

/// scores[n, head, i] = scale * q . k[i] for the far keys i in [sink, position + 1 - window) of query token n
/// that are in lists of the head; -inf for all others; entries behind the far keys are left alone. Adds to
/// `scanned` how many there were.
void score_probed_keys(const Queries& queries, const ProbedKeys& keys, std::int64_t sink, std::int64_t window,
                       std::int64_t max_tokens, float* scores /*[N, Hq, max_tokens]*/,
                       std::int32_t* scanned /*[N, Hq]*/, StreamHandle stream);

}  // namespace lode::cuda
