// SPDX-License-Identifier: Apache-2.0
// Prefill attention over a part of the keys: what a sequence attends of the document it branches from.
#pragma once

#include <cstdint>
#include <span>

#include "lodestone/kv_view.h"

namespace lode {

class ThreadPool;

/// attend_prefill (kernels.h) for query tokens at rows first, first + 1, ... of `kv`: token t attends rows [0,
/// min(rows, first + t + 1)). Behind all rows (first >= rows) each attends them all. Bits depend on tokens, rows
/// and first alone.
void attend_span(std::span<const float> q /*[T, Hq, d]*/, std::int64_t tokens, int query_heads,
                 std::span<const KvRows> kv /*[Hkv]*/, std::int64_t first, float scale,
                 float* o /*[T, Hq, d]*/, float* lse /*[T, Hq]*/, ThreadPool& pool);

}  // namespace lode
