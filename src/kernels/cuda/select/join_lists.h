// SPDX-License-Identifier: Apache-2.0
// Lists of several choices put together: each KV head's from the choice that serves it.
#pragma once

#include <limits>

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// Lists that one choice made for all KV heads of a layer. Device memory.
struct ListSource {
  /// Half of the largest: compilers make `a > b ? a - b : 0` one maximum, whose difference must not overflow.
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max() / 2;

  const std::int32_t* rows = nullptr;    // [N, Hkv, lists_per_head, capacity], or null: none
  const std::int32_t* counts = nullptr;  // [N, Hkv, lists_per_head]
  std::int64_t capacity = 0;
  int lists_per_head = 1;
  bool same_for_all = false;  ///< there is no N: rows rise, and those that are far for a token are its list
  std::int64_t from = kNone;  ///< behind the rows, every far key from here on
};

struct JoinTask {
  static constexpr int kMost = 16;

  ListSource source[kMost] = {};
  const std::int32_t* of_head = nullptr;  // [Hkv] which source serves a head; written by copies alone
  std::int32_t* rows = nullptr;           // [N, Hkv, lists_per_head, capacity]
  std::int32_t* counts = nullptr;         // [N, Hkv, lists_per_head]
  std::int64_t capacity = 0;
  int lists_per_head = 1;  ///< no source has more; a list that heads share is repeated for each of them
  std::int64_t sink = 0, window = 0;

  /// What is written, as attention takes it.
  RowLists lists() const {
    return {.rows = rows,
            .counts = counts,
            .capacity = capacity,
            .lists_per_head = lists_per_head,
            .sink = sink,
            .window = window};
  }
};

/// Writes the joined lists of every query token; rows of a list keep their order. Far keys of a token are
/// [sink, position + 1 - window).
void join_lists(const Queries& queries, const JoinTask& task, StreamHandle stream);

}  // namespace lode::cuda
