// SPDX-License-Identifier: Apache-2.0
// Keys as partitions see them: out of the store, before RoPE.
#pragma once

#include <span>

#include "lodestone/kv_view.h"

namespace lode {

class Rope;

/// Keys of one position, of some heads: [heads, d]. Un-rotated by `rope`, unless that is null. A key with a
/// NaN or an infinity counts as 0: it must not reach a centroid.
void read_stored_keys(std::span<const KvRows> heads, Position row, const Rope* rope, std::span<float> keys);

}  // namespace lode
