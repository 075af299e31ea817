// SPDX-License-Identifier: Apache-2.0
// Attention over keys and values that the caller owns, without a model: for other engines, and for Python.
//
//   auto threads = lode::make_threads();
//   lode::attend(q, heads, choices, scale, state, *threads);      // chosen keys
//   lode::AttentionPlan plan(lists, query_heads, kv_heads);       // chosen keys of a whole step: once, then in each layer
//   plan.run(q, heads, scale, state, *threads);
//   lode::attend(selector, {&block, 1}, geometry, outputs);       // sink + window + what the selector chooses
#pragma once

#include <memory>
#include <span>
#include <vector>

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

/// The keys that B query tokens attend to, as compressed rows: list i has the pages indptr[i] to indptr[i + 1] - 1.
/// Each token has 1, Hkv or Hq lists, which lie side by side and serve as many query heads each.
struct KeyLists {
  std::span<const std::int32_t> indptr;  // [B * per_token + 1], from 0, never falling
  std::span<const Position> pages;  // [indptr.back()], in any order; page p has rows p * page_size and on
  std::span<const Run> runs;        // [indptr.back()] in place of pages, in any order
  std::int64_t page_size = 1;       ///< rows
  std::span<const std::int32_t> last_page_rows;  // [lists]: rows of a list's last page; empty = page_size
  std::span<const float> log_weights;  // [pages], added to the scores of a page's rows; empty = all 0
  int per_token = 1;
};

/// The keys of a plan's lists, one list behind another, for kernels that take them as rows.
struct PlannedRows {
  std::vector<std::int64_t> begins;  // [lists + 1] places in `rows`
  std::vector<Position> rows;        // unique within a list
  std::vector<float> log_weights;    // [rows], added to their scores; empty = all 0
};

/// Key lists that were checked, sorted and cut into runs and rows once, for attention in any number of layers.
/// Does not change; copies share it.
class AttentionPlan {
 public:
  /// InputError when a list's pages overlap or do not exist, or when the lists do not fit the heads.
  AttentionPlan(const KeyLists& lists, int query_heads, int kv_heads);

  /// State rows are token-major: [B, Hq]. A list without keys gives the empty set. The bits of a token depend on
  /// its own lists alone. InputError when the shapes do not fit, or a list has a row that `kv` does not.
  void run(std::span<const float> q /*[B, Hq, d]*/, std::span<const KvRows> kv /*[Hkv]*/, float scale,
           AttentionState state /*[B * Hq]*/, ThreadPool& threads) const;

  std::int64_t tokens() const;  ///< B
  std::int64_t rows() const;    ///< keys must have as many rows or more
  int query_heads() const;
  int kv_heads() const;
  int lists_per_token() const;
  PlannedRows planned_rows() const;

 private:
  struct Lists;
  std::shared_ptr<const Lists> lists_;
};

/// What the engine computes in a layer: the selector takes in keys that may now be far, chooses, and its
/// choice is attended with sink and window (geometry.dense). Blocks hold their queries' own keys. Outputs per
/// block: [T, Hq, d]. `lse`, when given, receives each query's log-sum-exp over what it attended to, so that
/// callers can merge keys of elsewhere: per block [T, Hq].
void attend(Selector& selector, std::span<const QueryBlock> blocks, const LayerGeometry& geometry,
            std::span<float* const> outputs, std::span<float* const> lse = {});

}  // namespace lode
