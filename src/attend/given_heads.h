// SPDX-License-Identifier: Apache-2.0
// Checks of keys and queries that callers of the public face hand in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lodestone/kv_view.h"

namespace lode {

/// Query heads of [tokens, Hq, d] queries over these KV heads; InputError when the shapes do not fit.
int query_heads_of(std::size_t numbers, std::span<const KvRows> kv, std::int64_t tokens);

}  // namespace lode
