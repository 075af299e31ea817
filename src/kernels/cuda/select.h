// SPDX-License-Identifier: Apache-2.0
// Exact selection primitives on the GPU, deterministic and graph-capturable. Rows of a result rise and are
// unique.
#pragma once

#include "kernels/cuda/attend.h"

namespace lode::cuda {

/// scores[n, head, i] = scale * q . k[i] for the far keys i in [sink, position + 1 - window) of query token
/// n, -inf for those below the sink; entries behind the far keys are left alone. Per query head.
void score_keys(const Queries& queries, std::int64_t sink, std::int64_t window, std::int64_t max_tokens,
                float* scores /*[N, Hq, max_tokens]*/, StreamHandle stream);

/// From per-head scores to one row of shared scores per KV head: the log of the sum over the group of softmax
/// weights among the far keys (what CPU `topk:per=kv-head` ranks by).
void share_scores(const float* scores /*[N, Hq, max_tokens]*/, const Queries& queries, std::int64_t window,
                  std::int64_t max_tokens, float* shared /*[N, Hkv, max_tokens]*/, StreamHandle stream);

/// Device memory for the selections below.
std::int64_t select_workspace_bytes(std::int64_t lists, std::int64_t n);

/// The k largest of each list's scores, ties to the higher index, NaN and -inf never chosen; rows rising.
/// lengths (device, [lists], may be null) limits each list to its first entries.
void top_k(const float* scores /*[lists, n]*/, std::int64_t lists, std::int64_t n,
           const std::int32_t* lengths, const std::int32_t* k /*[lists] device*/,
           std::int32_t* rows /*[lists, capacity]*/, std::int64_t capacity, std::int32_t* counts /*[lists]*/,
           void* workspace, StreamHandle stream);

}  // namespace lode::cuda
