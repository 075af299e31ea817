// SPDX-License-Identifier: Apache-2.0
// Experts' tensors that a folder holds in another form than rows of projections (gpt-oss), turned into those.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/weights.h"

namespace lode {

using OwnedBytes = std::vector<std::unique_ptr<std::byte[]>>;

/// [E, in, out] becomes [E * out, in] for `shape` [E, out, in]. With `in_turn` the even outputs are gate's and come
/// first, the odd ones are up's.
Weight from_columns(const Weight& w, std::span<const std::int64_t> shape, bool in_turn, OwnedBytes& owned);
/// A block-quantised weight as float32; a plain one as it is.
Weight as_plain(const Weight& w, OwnedBytes& owned);
/// Vectors [E, n] in which gate and up take turns: gate's numbers first.
Weight apart(const Weight& w, OwnedBytes& owned);
/// Blocks [E, out, in / 32, 16], in whose bytes neighbours share a byte (the even one low), and exponents
/// [E, out, in / 32] become rows of our MXFP4 [E * out, in].
Weight from_mxfp4(std::span<const std::byte> blocks, std::span<const std::byte> scales,
                  std::span<const std::int64_t> shape, bool in_turn, OwnedBytes& owned);

}  // namespace lode
