// SPDX-License-Identifier: Apache-2.0
// The interface of a retrieval method: one object per layer, which covers all of its heads and sequences.
//
// Life:   create -> prepare (trained artefact) -> [on_write per chunk] -> build (a context is complete)
//         -> { on_write, append, select, observe } per step, roll_back at any time -> save / load.
// Calls of one object come from one thread; select may use `pool` inside. Which keys are far is the caller's
// rule: sink [0, sink), window (p - window, p], far between. An index may hold keys that are in some query's
// window: select must return far keys of the query only, [query.far_begin, query.far_end).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lodestone/kv_view.h"
#include "lodestone/selection.h"

namespace lode {

class ThreadPool;
class Rope;           // model/rope.h: rotates, and un-rotates a stored key
class SectionWriter;  // io/container.h
class SectionReader;

/// Keys that every query attends: `sink` first tokens and the last `window` tokens, the query's own included.
struct LocalWindow {
  std::int64_t sink = 1;
  std::int64_t window = 2047;
  /// The window does not slide: it is the last `window` tokens of the indexed context and all that follows.
  bool from_context = false;
};

/// What stays fixed for a selector's life.
struct LayerGeometry {
  int layer = 0;
  int query_heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 1.0f;  ///< of q.k, normally 1 / sqrt(d)
  LocalWindow dense;
  const Rope* rope = nullptr;  ///< outlives the selector
  ThreadPool* pool = nullptr;  ///< outlives the selector
  std::uint64_t seed = 0;
  /// Which of the layer's KV heads the selector covers, rising; empty = all. Everywhere else heads are
  /// counted among those covered: `kv_heads` is their number, and queries and keys that it is given are
  /// theirs alone.
  std::vector<int> covered;
  int group() const { return query_heads / kv_heads; }
  /// A covered head's number in the layer: what artefacts and seeds go by.
  int kv_head_in_layer(int head) const {
    return covered.empty() ? head : covered[static_cast<std::size_t>(head)];
  }
  int query_head_in_layer(int head) const {
    return kv_head_in_layer(head / group()) * group() + head % group();
  }
};

/// Why tokens were written: methods treat them differently.
enum class Phase { context, question, generation };

/// Freshly projected vectors of one sequence, in this layer. The KV store already holds k and v of these
/// tokens.
struct KvWrite {
  std::int32_t sequence = 0;
  Phase phase = Phase::context;
  Position begin = 0;                  ///< position of the first token
  std::int64_t tokens = 0;             // T
  std::span<const float> q_unrotated;  // [T, Hq, d] before RoPE
  std::span<const float> k_unrotated;  // [T, Hkv, d] before RoPE
  std::span<const float> q;            // [T, Hq, d] after RoPE
  std::span<const float> k;            // [T, Hkv, d] after RoPE
  std::span<const float> v;            // [T, Hkv, d]
};

/// Query tokens of one sequence for which keys are wanted.
struct QueryBlock {
  std::int32_t sequence = 0;
  Phase phase = Phase::generation;
  Position begin = 0;                  ///< position of the first query token; token t sits at begin + t
  std::int64_t tokens = 0;             // T
  std::span<const float> q;            // [T, Hq, d] after RoPE
  std::span<const float> q_unrotated;  // [T, Hq, d] before RoPE
  KvLayer kv;                          ///< includes the query tokens themselves
  Position far_begin = 0;              ///< = min(sink, ...), the same for all tokens
  Position far_limit = kNoLimit;       ///< keys from here on are never far (LocalWindow::from_context)
  static constexpr Position kNoLimit = std::numeric_limits<Position>::max();
  /// End of the far keys of query token t (exclusive); never below far_begin.
  Position far_end(std::int64_t t, const LocalWindow& dense) const {
    const std::int64_t end = std::min<std::int64_t>(std::int64_t{begin} + t + 1 - dense.window, far_limit);
    return end > far_begin ? static_cast<Position>(end) : far_begin;
  }
};

/// Attention mass that attended keys received from one query token, summed over the group's heads (so in [0,
/// G]).
struct AttentionMass {
  std::int32_t sequence = 0, kv_head = 0;
  Position query = 0;
  std::span<const Position> rows;
  std::span<const float> mass;
};

/// What select calls have cost since the counters were last taken.
struct SelectWork {
  std::int64_t bytes = 0;  ///< of index and keys read to choose, as if each query token came alone at batch 1
  std::int64_t keys_scored = 0;  ///< keys or index entries compared with a query
};

class Selector {
 public:
  virtual ~Selector() = default;

  /// Whether on_write wants context chunks / observe wants attention mass (both cost time when asked for).
  virtual bool wants_writes() const { return false; }
  virtual bool wants_mass() const { return false; }
  /// Tokens of a question that choose their keys together, and so must come in one call of select: stretches
  /// of this many from the question's first token on; 1 = each for itself, 0 = the whole question.
  virtual std::int64_t joint_query_tokens() const { return 1; }

  virtual void on_write(const KvWrite&) {}
  /// The first `kv.tokens` tokens of the sequence are its context: index them, replacing what was there.
  virtual void build(std::int32_t sequence, KvLayer kv) = 0;
  /// Keys up to `far_end` (exclusive) may be asked for from now on: take in those not yet indexed. Nothing is
  /// lost or doubled when calls overlap or come one token at a time: the result equals one build over the
  /// same keys, except for what a method's file states.
  virtual void append(std::int32_t sequence, KvLayer kv, Position far_end) = 0;
  /// The sequence has been cut to `tokens`: forget every key at or beyond.
  virtual void roll_back(std::int32_t sequence, std::int64_t tokens) = 0;
  /// Appends the query sets of all `blocks` to `out`; each (token, query head) of each block is in exactly
  /// one set.
  virtual void select(std::span<const QueryBlock> blocks, Selection& out) = 0;
  virtual void observe(const AttentionMass&) {}

  virtual void save(std::int32_t sequence, SectionWriter&) const = 0;
  /// Restores what save wrote for the same keys; InputError when it does not fit. All or nothing.
  virtual void load(std::int32_t sequence, SectionReader&, KvLayer kv) = 0;

  virtual std::int64_t index_bytes() const = 0;  ///< memory that the index holds, all sequences
  /// What users should know of this sequence beside its answers (a text unlike the training text); empty =
  /// nothing.
  virtual std::string notice(std::int32_t) const { return {}; }
  SelectWork take_work() { return std::exchange(work_, {}); }

 protected:
  SelectWork work_;
};

}  // namespace lode
