// SPDX-License-Identifier: Apache-2.0
// Attention of new tokens over sink, window and whatever a selector chose: one path for every method.
#pragma once

#include <concepts>
#include <functional>
#include <span>
#include <utility>

#include "lodestone/attention.h"
#include "lodestone/selection.h"
#include "lodestone/selector.h"

namespace lode {

/// What was attended, counted as if every query token came alone at batch 1 (per KV head; the sets of a group
/// add up).
struct AttendWork {
  std::int64_t dense_keys = 0;  ///< sink and window rows read
  std::int64_t far_keys = 0;    ///< far rows read
  std::int64_t far_total = 0;   ///< far rows that full attention would read
  std::int64_t full_keys = 0;   ///< all rows that full attention reads
  std::int64_t kv_bytes = 0;    ///< bytes of K and V read
  std::int64_t full_bytes = 0;  ///< bytes of K and V that full attention reads
  AttendWork& operator+=(const AttendWork&);
};

/// The rows of a sequence behind the document that it branches from: position = seam + row. A QueryBlock's
/// `kv` then holds the document's rows, [0, seam).
struct TailRows {
  KvLayer kv;              ///< includes the query tokens themselves; no heads: the block has no document
  Position seam = 0;       ///< tokens of the document
  bool elsewhere = false;  ///< another rank attends to them: what is left here is the document's part
};
/// Of block b; null when it has no document.
inline const TailRows* tail_of(std::span<const TailRows> tails, std::size_t b) {
  return tails.empty() || tails[b].kv.heads.empty() ? nullptr : &tails[b];
}

/// Who wants to know what was attended. Empty: nobody.
struct MassSink {
  std::function<void(const AttentionMass&)> report;
  /// Keys that got less than this from every query may be left out, and masses are then as exact as the kernels' own
  /// arithmetic. 0: none is left out.
  float least = 0.0f;

  MassSink() = default;
  template <std::invocable<const AttentionMass&> Report>
  MassSink(Report report_, float least_ = 0.0f) : report(std::move(report_)), least(least_) {}
  explicit operator bool() const { return report != nullptr; }
};

/// o[b][t, h, :] for every query token of every block, over sink + selection + window. A set whose keys are
/// all far keys runs full attention's own kernel and splits (attend_prefill when every set of the block is
/// complete). `mass`, when given, receives the attention mass of each (token, KV head) over the attended rows
/// afterwards. `lse`, when given, receives each query's log-sum-exp over what was attended, by which a caller adds
/// what is no key, such as a learned logit, once.
AttendWork attend(std::span<const QueryBlock> blocks, const Selection& selection,
                  const LayerGeometry& geometry, std::span<float* const> outputs /*per block: [T, Hq, d]*/,
                  const MassSink& mass = {}, std::span<float* const> lse = {} /*per block: [T, Hq]*/);

/// Full attention of the same blocks: what `attend` gives when everything is selected.
AttendWork attend_full(std::span<const QueryBlock> blocks, const LayerGeometry& geometry,
                       std::span<float* const> outputs, const MassSink& mass = {},
                       std::span<float* const> lse = {});

/// What blocks of one document attend together.
struct BranchCall {
  std::span<const QueryBlock> blocks;     ///< all with the same document or with none; keys at or behind the
                                          ///< seam are never far (QueryBlock::far_limit)
  std::span<const TailRows> tails;        ///< one a block
  std::span<float* const> outputs;        ///< one a block: [T, Hq, d]
  std::span<const Selection> selections;  ///< one a block; none = full attention
  std::span<AttendWork> work;             ///< one a block, to add to
  std::span<float* const> lse = {};       ///< one a block: [T, Hq], as attend() has it; none: not wanted
};
/// `attend` and `attend_full` for sequences that branch from one document: the document's part and the tail's
/// are attended apart and merge in this order. A generated token that attends to the whole document reads it
/// together with all others of the call that do. Bits of a block depend on that block alone.
void attend_branches(const BranchCall& call, const LayerGeometry& geometry, const MassSink& mass = {});

/// The selection alone, without sink and window, for callers that attend those elsewhere and merge: one state
/// per (token, query head), [T, Hq]. A head for which nothing was chosen gets the empty set.
void attend_far(const QueryBlock& block, const Selection& selection, const LayerGeometry& geometry,
                AttentionState state);

/// One query token and KV head: of `all` keys `far` are far, and `chosen` of those were attended.
AttendWork work_of(std::int64_t all, std::int64_t far, std::int64_t chosen, std::int64_t token_bytes);
/// What `attend` and `attend_full` count, without attending. Of each KV head so many far keys are attended
/// `elsewhere` (none when empty), so that fewer are left to choose from.
AttendWork count_attended(std::span<const QueryBlock> blocks, const Selection& selection,
                          const LayerGeometry& geometry,
                          std::span<const std::int64_t> elsewhere /*[Hkv]*/ = {});
AttendWork count_full(std::span<const QueryBlock> blocks, const LayerGeometry& geometry);

}  // namespace lode
