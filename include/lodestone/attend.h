// SPDX-License-Identifier: Apache-2.0
// Attention over keys and values that the caller owns, without a model: for other engines, and for Python.
//
//   auto threads = lode::make_threads();
//   lode::attend(q, heads, choices, scale, state, *threads);      // chosen keys
//   lode::attend(selector, {&block, 1}, geometry, outputs);       // sink + window + what the selector chooses
#pragma once

#include <memory>
#include <span>

#include "lodestone/attention.h"
#include "lodestone/kv_view.h"
#include "lodestone/selection.h"
#include "lodestone/selector.h"

namespace lode {

/// Threads for the functions below and for selectors (LayerGeometry::pool); 0 = one per core that this process
/// may use. Several callers may share them.
std::shared_ptr<ThreadPool> make_threads(int threads = 0);

/// RoPE by its frequencies [d/2], radians per position, for selectors that look at keys before it
/// (LayerGeometry::rope); none = vectors stay as they are. InputError when there are not d/2 of them.
std::shared_ptr<const Rope> make_rope(std::span<const float> frequencies, int head_dim,
                                      float attention_scaling = 1.0f);
/// Gives back a vector or several, [heads, d], as they were before RoPE turned them to `position`.
void unrotate(const Rope& rope, std::span<float> x, Position position);

/// The keys that some query heads attend to: runs and rows, disjoint, each rising and unique.
struct KeyChoice {
  std::span<const Run> runs;
  std::span<const Position> rows;
  std::span<const float> log_weights;  ///< one per row, added to its score; empty = all 0
};

/// Attention of one query token over chosen keys. One choice for each KV head, which its whole group of
/// query heads shares, or one for each query head. State rows are query heads. Bits depend on neither the
/// number of threads nor other heads. InputError when heads do not divide, a row is out of range, or rows do
/// not rise.
void attend(std::span<const float> q /*[Hq, d]*/, std::span<const KvRows> kv /*[Hkv]*/,
            std::span<const KeyChoice> choices /*[Hkv] or [Hq]*/, float scale, AttentionState state /*[Hq]*/,
            ThreadPool& threads);

/// Causal attention of T query tokens over all keys; the last query token sits at the last row of kv.
void attend_causal(std::span<const float> q /*[T, Hq, d]*/, std::int64_t tokens,
                   std::span<const KvRows> kv /*[Hkv]*/, float scale, AttentionState state /*[T * Hq]*/,
                   ThreadPool& threads);

/// What the engine computes in a layer: the selector takes in keys that may now be far, chooses, and its
/// choice is attended with sink and window (geometry.dense). Blocks hold their queries' own keys. Outputs per
/// block: [T, Hq, d].
void attend(Selector& selector, std::span<const QueryBlock> blocks, const LayerGeometry& geometry,
            std::span<float* const> outputs);

}  // namespace lode
