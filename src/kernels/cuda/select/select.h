// SPDX-License-Identifier: Apache-2.0
// Exact selection primitives on the GPU, deterministic and graph-capturable. Rows of a result rise and are
// unique.
#pragma once

#include <cmath>

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// What a softmax over some keys is divided by: exp(peak) * sum, of those whose scores are finite. Of no
/// keys, or none with a weight, -inf and 0.
struct ExponentialSum {
  float peak = -INFINITY, sum = 0.0f;
};
inline constexpr std::int64_t kKeysOfSum = 512;  // consecutive keys that share an ExponentialSum
LODE_HD constexpr std::int64_t sums_of_keys(std::int64_t keys) {
  return (keys + kKeysOfSum - 1) / kKeysOfSum;
}

/// scores[n, head, i] = scale * q . k[i] for the far keys i in [sink, position + 1 - window) of query token
/// n, -inf for those below the sink; entries behind the far keys are left alone. Per query head. `sums`, if
/// not null, gets the sums over the far keys in [i kKeysOfSum, (i + 1) kKeysOfSum), where there are any.
void score_keys(const Queries& queries, std::int64_t sink, std::int64_t window, std::int64_t max_tokens,
                float* scores /*[N, Hq, max_tokens]*/,
                ExponentialSum* sums /*[N, Hq, sums_of_keys(max_tokens)]*/, StreamHandle stream);

/// From per-head scores and their sums to one row of shared scores per KV head: the log of the sum over the
/// group of softmax weights among the far keys (what CPU `topk:per=kv-head` ranks by). Keys that no head
/// gives a weight have the least finite score of all, those below the sink -inf; an infinite score stays so.
void share_scores(const float* scores /*[N, Hq, max_tokens]*/, const ExponentialSum* sums,
                  const Queries& queries, std::int64_t sink, std::int64_t window, std::int64_t max_tokens,
                  float* shared /*[N, Hkv, max_tokens]*/, StreamHandle stream);

/// Device memory for the selections below.
std::int64_t select_workspace_bytes(std::int64_t lists, std::int64_t n);

/// The k largest of each list's scores, ties to the higher index, NaN and -inf never chosen; rows rising.
/// lengths (device, [lists], may be null) limits each list to its first entries; without k it is the capacity.
void top_k(const float* scores /*[lists, n]*/, std::int64_t lists, std::int64_t n,
           const std::int32_t* lengths, const std::int32_t* k /*[lists] device, or null*/,
           std::int32_t* rows /*[lists, capacity]*/, std::int64_t capacity, std::int32_t* counts /*[lists]*/,
           void* workspace, StreamHandle stream);

/// Which keys are those of the best pages. Far keys of query token n are [sink, position + 1 - window), pages
/// of `page` keys begin at the sink.
struct PageRule {
  const QueryToken* tokens = nullptr;    // [N]
  const std::int32_t* budget = nullptr;  // [N] device: far keys that each list of the token takes
  int lists_of_query = 1, page = 16;
  std::int64_t sink = 0, window = 0;
};
/// Of each list the far keys behind the last whole page, the newest of them, then whole pages by their
/// scores, and of the next in rank its newest keys, `budget` in all; ties to the newer page, NaN as -inf,
/// rows rising.
void top_pages(const float* scores /*[lists, n]*/, std::int64_t lists, std::int64_t n, const PageRule& rule,
               std::int32_t* rows /*[lists, capacity]*/, std::int64_t capacity,
               std::int32_t* counts /*[lists]*/, StreamHandle stream);

/// As top_k for small integer scores in [0, levels), levels at most 1024: counting select, no sort. all_ties
/// keeps every entry that ties with the last (up to the capacity).
void counting_select(const std::uint16_t* scores /*[lists, n]*/, int levels, bool all_ties,
                     std::int64_t lists, std::int64_t n, const std::int32_t* lengths, const std::int32_t* k,
                     std::int32_t* rows, std::int64_t capacity, std::int32_t* counts, void* workspace,
                     StreamHandle stream);

/// All entries with score >= threshold[list] (NaN never), rising.
void threshold_select(const float* scores, const float* threshold /*[lists] device*/, std::int64_t lists,
                      std::int64_t n, const std::int32_t* lengths, std::int32_t* rows, std::int64_t capacity,
                      std::int32_t* counts, void* workspace, StreamHandle stream);

/// Concatenates chosen buckets: bucket b of list group h holds members[h][offsets[h][b] .. offsets[h][b +
/// 1]); the chosen buckets' members below `end` come out rising. A bitmap of the far keys is set, then
/// compacted.
void buckets_to_rows(const std::int32_t* chosen /*[lists, probes]*/, int probes,
                     const std::int32_t* labels /*[Hkv, max_tokens]*/, int kv_heads, int buckets,
                     std::int64_t lists, std::int64_t n, const std::int32_t* begin /*[lists]*/,
                     const std::int32_t* end /*[lists]*/, std::int32_t* rows, std::int64_t capacity,
                     std::int32_t* counts, void* workspace, StreamHandle stream);

/// label[i] = argmax_c x[i] . c, lowest index wins ties; float32 in, float32 arithmetic.
void assign(const float* x /*[n, d]*/, std::int64_t n, const float* centroids /*[c, d]*/, std::int64_t c,
            int d, std::int32_t* label /*[n]*/, float* best /*[n] or null*/, StreamHandle stream);

}  // namespace lode::cuda
