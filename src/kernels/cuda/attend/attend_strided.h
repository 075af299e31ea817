// SPDX-License-Identifier: Apache-2.0
// Attention over keys and values of a caller's, plain arrays of any strides, on a stream of its own: for
// other engines. Kernels are launched plainly, since what is in front of them in that stream is not ours.
#pragma once

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// Keys and values [Hkv, rows, d], the numbers of a row side by side. Device memory.
struct StridedKv {
  const char *k = nullptr, *v = nullptr;
  std::int64_t k_head = 0, v_head = 0;  ///< bytes from one head to the next
  std::int64_t k_row = 0, v_row = 0;    ///< bytes from one row to the next
  std::int64_t rows = 0;

  LODE_HD const char* key(int kv_head, std::int64_t row) const { return k + kv_head * k_head + row * k_row; }
  LODE_HD const char* value(int kv_head, std::int64_t row) const {
    return v + kv_head * v_head + row * v_row;
  }
};

/// The keys of one list: `rows` and what is added to their scores, or without rows the first `count` keys.
struct StridedList {
  const std::int32_t* rows = nullptr;
  const float* log_weights = nullptr;
  int count = 0;
};

/// Which keys each query token attends to; device memory. A token has 1, Hkv or Hq lists side by side, which
/// serve as many query heads each. Without lists token i of N attends to the first S - N + 1 + i of S keys.
struct StridedLists {
  const std::int64_t* begins = nullptr;  // [N * per_token + 1] places in `rows`; null: no lists
  const std::int32_t* rows = nullptr;    // unique within a list; the caller knows that they exist
  const float* log_weights = nullptr;    // as many, or null
  std::int64_t longest = 0;              ///< rows of the longest list
  int per_token = 1;

  /// Of a token's query head; `all` keys of token 0 where there are no lists.
  LODE_HD StridedList list(int query, int head, int query_heads, std::int64_t all) const {
    if (begins == nullptr) return {nullptr, nullptr, static_cast<int>(all + query)};
    const std::int64_t at = std::int64_t{query} * per_token + head / (query_heads / per_token),
                       begin = begins[at];
    return {rows + begin, log_weights != nullptr ? log_weights + begin : nullptr,
            static_cast<int>(begins[at + 1] - begin)};
  }
};

/// Query tokens that one call takes at most.
inline constexpr int kMostStrided = 32;

/// Of `queries`, layout says kv_heads, head_dim and type alone; tokens and bases are not read. `workspace` as for
/// attend_full_decode, for min(count, kMostStrided) queries. Deterministic: a query's bits depend on itself, its
/// keys and the number of heads alone.
void attend_strided(const Queries& queries, const StridedKv& kv, const StridedLists& lists, void* workspace,
                    StreamHandle stream);

/// Causal attention of many query tokens, the last at the last row; queries of up to kFewStrided tokens are
/// better served by attend_strided. Keys and values of bf16 or f16 on the matrix unit, q rounded to their type.
inline constexpr int kFewStrided = 8;
void attend_strided_prefill(const Queries& queries, const StridedKv& kv, StreamHandle stream);

/// Copies lists of rows [count] of any places, such as arrays of a caller's, one behind another. A row outside
/// of [0, end) becomes row 0 with a log-weight of NaN, so that its query's state is NaN and no memory is read
/// that is not there.
struct GivenRows {
  static constexpr int kMost = 128;
  const std::int32_t* rows[kMost];
  int counts[kMost];
};
void pack_rows(const GivenRows& given, int lists, std::int64_t end, std::int64_t* begins /*[lists + 1]*/,
               std::int32_t* rows, float* log_weights, StreamHandle stream);

}  // namespace lode::cuda
