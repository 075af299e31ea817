// SPDX-License-Identifier: Apache-2.0
// Attention of layers with a sliding window.
#pragma once

#include "kernels/cuda/attend/attend.h"

namespace lode::cuda {

/// As attend_prefill, where every token attends to the last `window` keys alone, its own included. Few tokens
/// do the same by attend_rows_decode with empty lists.
void attend_window_prefill(const Queries& queries, std::int32_t position, std::int64_t window,
                           StreamHandle stream, Precision precision = Precision::fast);

/// Tokens that branch from documents, and the window of a layer.
struct WindowRows {
  const QueryToken* absolute = nullptr;  // [N] positions in the whole text
  const QueryToken* in_tail = nullptr;   // [N] positions behind the document
  int kv_heads = 0;
  std::int64_t window = 0, capacity = 0;  ///< of a list: at least the window or the longest document
};
/// Lists the rows of each token's document that its window reaches, the same for every KV head: rows
/// [N, Hkv, capacity], counts [N, Hkv].
void list_window(const WindowRows& in, int count, std::int32_t* rows, std::int32_t* counts,
                 StreamHandle stream);

}  // namespace lode::cuda
