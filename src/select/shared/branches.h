// SPDX-License-Identifier: Apache-2.0
// For methods whose choice depends on more than query, position and index: what belongs to a sequence rather
// than to the document that it branches from.
#pragma once

#include <cstdint>

#include "lodestone/selector.h"

namespace lode {

/// A document is sequence 0 of its selectors. Sequences that branch from it are known by ids above 0 where
/// `per_sequence` says so; all others ask as sequence 0.
class Branches {
 public:
  virtual ~Branches() = default;
  /// Whether what a sequence has asked before changes what it gets next.
  virtual bool per_sequence() const = 0;
  /// Sequence `id` begins as the document is now. roll_back(id, tokens) takes it back.
  virtual void branch(std::int32_t /*id*/) {}
  virtual void drop_branch(std::int32_t /*id*/) {}
  /// Whether the index grows with the window. Such an index keeps what build() made of the document: the keys
  /// of its last window never become far.
  virtual bool grows_with_window() const { return false; }

  /// Whether keys are chosen by a prompt's own queries, where the prompt is known before its answer is begun
  /// (GenerateOptions::sparse_prompt_tokens). Then begin_prompt comes before its first token, at `position`; on_write is told its
  /// tokens, whether they attend densely or not; and choose_by_prompt comes when they are complete.
  virtual bool chooses_by_prompt() const { return false; }
  virtual void begin_prompt(std::int32_t /*id*/, Position /*position*/) {}
  /// `kv`: the document's keys or, of sequence 0, all; `tail`: those of a branch behind them.
  virtual void choose_by_prompt(std::int32_t /*id*/, KvLayer /*kv*/, KvLayer /*tail*/) {}
};

/// Whether a selector, which may be null, is one of sequences by id.
inline bool is_per_sequence(const Selector* selector) {
  const auto* const branches = dynamic_cast<const Branches*>(selector);
  return branches != nullptr && branches->per_sequence();
}
inline void branch(Selector* selector, std::int32_t id) {
  if (is_per_sequence(selector)) dynamic_cast<Branches*>(selector)->branch(id);
}
inline void drop_branch(Selector* selector, std::int32_t id) {
  if (is_per_sequence(selector)) dynamic_cast<Branches*>(selector)->drop_branch(id);
}
/// The selector, if it is one that chooses by prompts.
inline Branches* prompt_chooser(Selector* selector) {
  auto* const branches = dynamic_cast<Branches*>(selector);
  return branches != nullptr && branches->chooses_by_prompt() ? branches : nullptr;
}
inline bool grows_with_window(const Selector* selector) {
  const auto* const branches = dynamic_cast<const Branches*>(selector);
  return branches != nullptr && branches->grows_with_window();
}

}  // namespace lode
