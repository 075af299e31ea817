// SPDX-License-Identifier: Apache-2.0
// Keys and values as methods see them: out of the store, keys before RoPE if they are asked for so.
#pragma once

#include <span>

#include "lodestone/kv_view.h"

namespace lode {

class Rope;

/// Keys of one position, of some heads: [heads, d]. Un-rotated by `rope`, unless that is null. A key with a
/// NaN or an infinity counts as 0: it must not reach a centroid.
void read_stored_keys(std::span<const KvRows> heads, Position row, const Rope* rope, std::span<float> keys);

/// Values of one position, of some heads: [heads, d]. One with a NaN or an infinity counts as 0.
void read_stored_values(std::span<const KvRows> heads, Position row, std::span<float> values);

}  // namespace lode
