// SPDX-License-Identifier: Apache-2.0
// Lists of several choices put together: each KV head's from the choice that serves it.
#pragma once

#include "kernels/cuda/attend.h"

namespace lode::cuda {

/// Lists that one choice made for all KV heads of a layer; without rows: every far key. Device memory.
struct ListSource {
  const std::int32_t* rows = nullptr;    // [N, Hkv, lists_per_head, capacity]
  const std::int32_t* counts = nullptr;  // [N, Hkv, lists_per_head]
  std::int64_t capacity = 0;
  int lists_per_head = 1;
};

struct JoinTask {
  static constexpr int kMost = 16;

  ListSource source[kMost];
  const std::int32_t* of_head = nullptr;  // [Hkv] which source serves a head; written by copies alone
  std::int32_t* rows = nullptr;           // [N, Hkv, lists_per_head, capacity]
  std::int32_t* counts = nullptr;         // [N, Hkv, lists_per_head]
  std::int64_t capacity = 0;
  int lists_per_head = 1;  ///< no source has more; a list that heads share is repeated for each of them
  std::int64_t sink = 0, window = 0;
};

/// Writes the joined lists of every query token; rows of a list keep their order.
void join_lists(const Queries& queries, const JoinTask& task, StreamHandle stream);

}  // namespace lode::cuda
