// SPDX-License-Identifier: Apache-2.0
// h2o: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
// (2023), section 4 and algorithm 1. Keys that attention has favoured so far are kept, and the recent ones;
// what is dropped never returns.
//
//   score(k) = sum over the queries so far of their softmax weights on k         (section 4.1, F_score)
//   kept = the heavy_ratio * n keys of the largest score before the recent ones,
//          and the recent_ratio * n last keys; n = tokens of the context, both stay as they are when it grows
//
// Scores are summed over a group's heads, which share their keys. A dropped key gains nothing any more, and
// kept keys only gain: so the keys kept by dropping the least one after the other, the paper's algorithm, are
// those of the largest scores among all, which is how they are found here, ties to the newer key.
//
// Scores of the context come from its own queries, `queries` tokens of them at most, drawn alike over the
// text and weighted by how many each stands for: the paper's sum where the context has no more. After that
// every query that attends through this method adds what it gave to the keys it attended (Selector::observe).
// A question's tokens all choose by the scores before it, so that chunking changes nothing; its gains count
// from the first generated token on. Where a prompt is known before its answer (decode-sparse, last:N), the paper has seen all of
// it before it drops a key: then what its queries give to all keys counts when the prompt is complete, each sequence for itself,
// and all keys compete anew. Rolling back to before a query that added something forgets what was
// added since the last question began, or since the context ended when that is cut too. Sink and window are
// attended anyway, the recent keys beyond the window and the heavy ones are chosen among the far keys. An
// index that was never built chooses everything.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>

#include "base/cancel.h"
#include "base/threads.h"
#include "io/container.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/shared/best_keys.h"
#include "select/shared/branches.h"
#include "select/shared/captured_queries.h"
#include "select/shared/per_token.h"
#include "select/shared/softmax_sum.h"

namespace lode {

namespace {

constexpr std::int64_t kParts =
    16;  // of the captured queries, summed apart: the same for any number of threads

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

struct Options {
  Amount heavy = {0.1, true}, recent = {0.1, true};
  std::int64_t queries = 2048;

  static Options of(const Spec& spec) {
    Options options;
    options.heavy = spec.amount("heavy_ratio", options.heavy);
    options.recent = spec.amount("recent_ratio", options.recent);
    options.queries = spec.integer("queries", options.queries, 1, 1 << 24);
    return options;
  }
};

/// One KV head: what each position gained, and the heavy keys among those before a border.
struct Scores {
  std::vector<float> context;  // [n] from the context's queries
  std::vector<float> gained;   // [positions] since then, counted
  std::vector<float> pending;  // [positions] since then, not counted yet
  std::vector<Position> heavy;
  Position border = 0;  // keys from here on have not been looked at for `heavy`

  float of(Position row) const {
    const auto i = at(row);
    return (i < context.size() ? context[i] : 0.0f) + (i < gained.size() ? gained[i] : 0.0f);
  }
};

/// One sequence.
struct Kept {
  /// What had been gained when a question began.
  struct Before {
    Position begin = -1;                              ///< of the question; -1: none has begun
    Position last = -1;                               ///< the last query that had added something
    std::vector<std::vector<float>> gained, pending;  // [Hkv]
  };
  std::int64_t tokens = -1;        ///< of the context; -1 before build()
  Position last = -1;              ///< the last query that added something
  std::vector<Scores> heads = {};  // [Hkv]
  Before before = {};
  bool answered = false;  ///< since the question in `before`
};

/// A prompt that is not complete, by which a sequence will choose.
struct Prompt {
  CapturedQueries queries;
  Position begin = 0;
};

class H2o final : public PerTokenSelector, public Branches {
 public:
  H2o(const LayerGeometry& geometry, const Options& options)
      : PerTokenSelector(geometry), options_(options), scratch_(at(workers())) {}

  bool wants_writes() const override { return true; }
  bool wants_mass() const override { return true; }
  void on_write(const KvWrite& write) override {
    if (write.phase == Phase::context) captured_of(write.sequence).take(write);
    const auto prompt = prompts_.find(write.sequence);
    if (write.phase == Phase::question && prompt != prompts_.end()) prompt->second.queries.take(write);
  }
  void build(std::int32_t sequence, KvLayer kv) override;
  void append(std::int32_t sequence, KvLayer, Position) override { kept_.try_emplace(sequence, fresh(-1)); }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override;
  void select(std::span<const QueryBlock> blocks, Selection& out) override;
  void observe(const AttentionMass& mass) override;
  void save(std::int32_t sequence, SectionWriter& out) const override;
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override;
  std::int64_t index_bytes() const override;
  bool per_sequence() const override { return true; }
  void branch(std::int32_t id) override {
    kept_.insert_or_assign(id, kept_.contains(0) ? kept_.at(0) : fresh(-1));
  }
  void drop_branch(std::int32_t id) override {
    kept_.erase(id);
    prompts_.erase(id);
  }
  bool chooses_by_prompt() const override { return true; }
  void begin_prompt(std::int32_t id, Position position) override;
  void choose_by_prompt(std::int32_t id, KvLayer kv, KvLayer tail) override;

 private:
  struct Scratch {
    std::vector<Position> candidates, best, heavy;
    std::vector<float> scores;
  };

  Position sink() const { return static_cast<Position>(geometry_.dense.sink); }
  CapturedQueries& captured_of(std::int32_t sequence) {
    return captured_.try_emplace(sequence, geometry_.query_heads, geometry_.head_dim, options_.queries)
        .first->second;
  }
  Kept fresh(std::int64_t tokens) const {
    Scores none;
    none.border = sink();
    return {.tokens = tokens, .heads = std::vector<Scores>(at(geometry_.kv_heads), none)};
  }
  /// Keys from here up to the window are recent for a query at `position`.
  Position recent_from(const Kept& kept, Position position, Position far_end) const {
    const std::int64_t from = std::int64_t{position} + 1 - options_.recent.of(kept.tokens);
    return static_cast<Position>(std::clamp<std::int64_t>(from, sink(), std::max(sink(), far_end)));
  }
  /// What a text's captured queries give to each of `keys` keys, those of a branch behind `kv` included; `tokens`: the text's.
  std::vector<float> given(const CapturedQueries& captured, const KvRows& kv, const KvRows* tail, int head,
                           std::int64_t keys, std::int64_t tokens) const;
  /// Notes what was gained before a question that begins here.
  static void remember_gains(Kept& kept, Position begin);
  /// Back to what was gained when the last question began, if it began at `tokens` or before, or to nothing.
  static void forget_gains(Kept& kept, std::int64_t tokens, Position sink);
  /// heavy := the best `count` of `heavy` and of [from, to).
  static void grow(const Scores& scores, std::int64_t count, Position from, Position to, Scratch& s,
                   std::vector<Position>& heavy);
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;

  Options options_;
  std::map<std::int32_t, CapturedQueries> captured_;  // by sequence
  std::map<std::int32_t, Kept> kept_;
  std::map<std::int32_t, Prompt> prompts_;
  std::vector<Scratch> scratch_;  // [workers]
};

void H2o::build(std::int32_t sequence, KvLayer kv) {
  Kept kept = fresh(kv.tokens);
  const CapturedQueries& captured = captured_of(sequence);
  for (int head = 0; head < geometry_.kv_heads; ++head)
    kept.heads[at(head)].context = given(captured, kv.heads[at(head)], nullptr, head, kv.tokens, kv.tokens);
  kept_.insert_or_assign(sequence, std::move(kept));
}

void H2o::begin_prompt(std::int32_t id, Position position) {
  prompts_.insert_or_assign(
      id, Prompt{.queries = CapturedQueries(geometry_.query_heads, geometry_.head_dim, options_.queries),
                 .begin = position});
  Kept& kept = kept_.try_emplace(id, fresh(-1)).first->second;
  if (kept.answered || kept.before.begin < 0) remember_gains(kept, position);
}

void H2o::choose_by_prompt(std::int32_t id, KvLayer kv, KvLayer tail) {
  const auto prompt = prompts_.find(id);
  if (prompt == prompts_.end()) return;
  const std::int64_t keys = kv.tokens + tail.tokens;
  Kept& kept = kept_.at(id);
  for (int head = 0; head < geometry_.kv_heads && !kv.heads.empty(); ++head) {
    const std::vector<float> sum =
        given(prompt->second.queries, kv.heads[at(head)],
              tail.heads.empty() ? nullptr : &tail.heads[at(head)], head, keys, keys - prompt->second.begin);
    Scores& scores = kept.heads[at(head)];
    if (scores.gained.size() < sum.size()) scores.gained.resize(sum.size(), 0.0f);
    for (std::size_t i = 0; i < sum.size(); ++i) scores.gained[i] += sum[i];
    scores.heavy.clear();
    scores.border = sink();
  }
  kept.last = std::max(kept.last, static_cast<Position>(keys - 1));
  prompts_.erase(prompt);
}

/// Softmax weights of the captured queries of a group, summed for each key.
std::vector<float> H2o::given(const CapturedQueries& captured, const KvRows& kv, const KvRows* tail, int head,
                              std::int64_t keys, std::int64_t tokens) const {
  const std::int64_t group = geometry_.group(), d = geometry_.head_dim, count = captured.tokens();
  std::vector<float> sum(at(keys), 0.0f);
  if (count == 0) return sum;
  std::vector<float> queries = captured.of_heads(static_cast<int>(head * group), static_cast<int>(group));
  for (float& x : queries) x *= geometry_.scale;
  std::vector<std::vector<float>> parts(at(kParts), std::vector<float>(at(keys), 0.0f));
  for_each(kParts, [&](std::int64_t part, int) {
    std::vector<float>& own = parts[at(part)];
    std::vector<float> scores;
    // Every kParts-th token: early ones have few keys, late ones many.
    for (std::int64_t t = part; t < count; t += kParts) {
      check_cancel();
      const std::int64_t end = std::int64_t{captured.positions()[at(t)]} + 1, seam = std::min(end, kv.rows);
      if (end > keys) break;
      scores.resize(at(group * end));
      const float* const q = queries.data() + t * group * d;
      kernels().score_run(q, static_cast<int>(group), kv, 0, seam, scores.data(), end);
      if (end > seam)
        kernels().score_run(q, static_cast<int>(group), *tail, 0, end - seam, scores.data() + seam, end);
      for (std::int64_t g = 0; g < group; ++g)
        add_softmax(std::span(own).first(at(end)), std::span(scores).subspan(at(g * end), at(end)));
    }
  });
  const float each = static_cast<float>(tokens) / static_cast<float>(count);
  for (const std::vector<float>& part : parts) {
    for (std::size_t k = 0; k < sum.size(); ++k) sum[k] += part[k] * each;
  }
  return sum;
}

void H2o::remember_gains(Kept& kept, Position begin) {
  kept.answered = false;
  kept.before = {.begin = begin, .last = kept.last, .gained = {}, .pending = {}};
  for (const Scores& head : kept.heads) {
    kept.before.gained.push_back(head.gained);
    kept.before.pending.push_back(head.pending);
  }
}

void H2o::forget_gains(Kept& kept, std::int64_t tokens, Position sink) {
  const bool known = kept.before.begin >= 0 && kept.before.begin <= tokens;
  if (!known) kept.before = {};
  kept.last = kept.before.last;
  kept.answered = false;
  for (std::size_t h = 0; h < kept.heads.size(); ++h) {
    Scores& head = kept.heads[h];
    head.gained = known ? kept.before.gained[h] : std::vector<float>();
    head.pending = known ? kept.before.pending[h] : std::vector<float>();
    head.heavy.clear();
    head.border = sink;
  }
}

void H2o::roll_back(std::int32_t sequence, std::int64_t tokens) {
  if (const auto captured = captured_.find(sequence); captured != captured_.end())
    captured->second.cut(tokens);
  if (const auto prompt = prompts_.find(sequence); prompt != prompts_.end()) {
    prompt->second.queries.cut(tokens);
    if (tokens < prompt->second.begin) prompts_.erase(prompt);
  }
  const auto found = kept_.find(sequence);
  if (found == kept_.end()) return;
  Kept& kept = found->second;
  if (kept.last >= tokens) forget_gains(kept, tokens, sink());
  if (kept.before.begin > tokens) kept.before = {};
  for (Scores& head : kept.heads) {
    if (head.border > tokens) {  // heavy keys were dropped for some that are gone now
      head.heavy.clear();
      head.border = sink();
    }
    const auto most = [&](const std::vector<float>& x) { return std::min(x.size(), at(tokens)); };
    head.context.resize(most(head.context));
    head.gained.resize(most(head.gained));
    head.pending.resize(most(head.pending));
  }
}

void H2o::observe(const AttentionMass& mass) {
  const auto found = kept_.find(mass.sequence);
  if (found == kept_.end() || mass.rows.empty()) return;
  // What a prompt's queries give to all keys is counted when it is complete.
  if (const auto prompt = prompts_.find(mass.sequence);
      prompt != prompts_.end() && mass.query >= prompt->second.begin)
    return;
  found->second.last = std::max(found->second.last, mass.query);
  std::vector<float>& pending = found->second.heads[at(mass.kv_head)].pending;
  if (pending.size() <= at(mass.rows.back())) pending.resize(at(mass.rows.back() + 1), 0.0f);
  for (std::size_t i = 0; i < mass.rows.size(); ++i) {
    if (std::isfinite(mass.mass[i])) pending[at(mass.rows[i])] += mass.mass[i];
  }
}

void H2o::grow(const Scores& scores, std::int64_t count, Position from, Position to, Scratch& s,
               std::vector<Position>& heavy) {
  s.candidates.assign(heavy.begin(), heavy.end());
  for (Position row = from; row < to; ++row) s.candidates.push_back(row);
  s.scores.clear();
  for (const Position row : s.candidates) s.scores.push_back(scores.of(row));
  s.best.clear();
  top_k(s.scores, count, 0, s.best);
  heavy.clear();
  for (const Position i : s.best) heavy.push_back(s.candidates[at(i)]);
}

/// Counts what was gained before generated tokens, and looks at the keys that were recent until now.
void H2o::select(std::span<const QueryBlock> blocks, Selection& out) {
  for (const QueryBlock& block : blocks) {
    Kept& kept = kept_.at(block.sequence);
    if (kept.tokens < 0 || block.tokens == 0) continue;
    if (block.phase == Phase::generation) {
      kept.answered = true;
      prompts_.erase(block.sequence);  // of a request that was given up
    }
    if (block.phase == Phase::question && (kept.answered || kept.before.begin < 0))
      remember_gains(kept, block.begin);
    Position to = recent_from(kept, block.begin, block.far_end(0, geometry_.dense));
    // What a question gains is not counted yet, so its own keys are not judged yet either.
    if (block.phase == Phase::question)
      to = std::min(to, recent_from(kept, static_cast<Position>(kept.tokens - 1), to));
    const std::int64_t count = options_.heavy.of(kept.tokens);
    for_each(geometry_.kv_heads, [&](std::int64_t head, int worker) {
      Scores& scores = kept.heads[at(head)];
      if (block.phase == Phase::generation) {
        if (scores.gained.size() < scores.pending.size()) scores.gained.resize(scores.pending.size(), 0.0f);
        for (std::size_t i = 0; i < scores.pending.size(); ++i) scores.gained[i] += scores.pending[i];
        scores.pending.clear();
      }
      if (to <= scores.border) return;
      grow(scores, count, scores.border, to, scratch_[at(worker)], scores.heavy);
      scores.border = to;
    });
  }
  PerTokenSelector::select(blocks, out);
}

void H2o::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const Kept& kept = kept_.at(unit.block->sequence);
  out.add_set(unit.set(all_heads(geometry_.group())));
  if (kept.tokens < 0) return out.add_run(unit.far_begin, unit.far_end);
  const Scores& scores = kept.heads[at(unit.kv_head)];
  const Position to = recent_from(kept, unit.position(), unit.far_end);
  const std::int64_t count = options_.heavy.of(kept.tokens);
  if (count >= to - unit.far_begin) return out.add_run(unit.far_begin, unit.far_end);
  Scratch& s = scratch_[at(worker)];
  const bool known = scores.border <= to;  // else a query from before those that were looked at
  s.heavy.clear();
  if (known) s.heavy = scores.heavy;
  const Position from = known ? scores.border : unit.far_begin;
  if (from < to) grow(scores, count, from, to, s, s.heavy);
  out.add_rows(s.heavy);
  if (to < unit.far_end) out.add_run(to, unit.far_end);
  const std::int64_t looked_at = (known ? std::ssize(scores.heavy) : 0) + (to - from);
  work.bytes += looked_at * std::int64_t{sizeof(Position) + sizeof(float)};
  work.keys_scored += looked_at;
}

void H2o::save(std::int32_t sequence, SectionWriter& out) const {
  const auto found = kept_.find(sequence);
  const Kept& kept = found == kept_.end() ? fresh(-1) : found->second;
  const std::array<std::int64_t, 3> shape = {geometry_.kv_heads, kept.tokens,
                                             std::ssize(kept.heads[0].context)};
  std::vector<float> scores;
  for (const Scores& head : kept.heads) scores.insert(scores.end(), head.context.begin(), head.context.end());
  out.add<std::int64_t>("shape", shape);
  out.add<float>("scores", scores);
}

void H2o::load(std::int32_t sequence, SectionReader& in, KvLayer kv) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto shape = in.values<std::int64_t>("shape");
  require(shape.size() == 3 && shape[0] == geometry_.kv_heads, "the model's KV heads");
  // The text may have been cut after it was built, never the other way round.
  constexpr std::int64_t kMost = std::numeric_limits<Position>::max();
  require(shape[1] >= -1 && shape[1] <= kMost && shape[2] >= 0 && shape[2] <= std::min(kv.tokens, kMost) &&
              shape[2] <= std::max<std::int64_t>(0, shape[1]),
          "scores of keys within the context");
  const auto scores = in.values<float>("scores");
  require(std::ssize(scores) == geometry_.kv_heads * shape[2],
          "a section 'scores' of the size that 'shape' gives");
  require(std::all_of(scores.begin(), scores.end(), [](float x) { return std::isfinite(x) && x >= 0.0f; }),
          "finite scores that are not negative");
  Kept kept = fresh(shape[1]);
  for (int head = 0; head < geometry_.kv_heads; ++head) {
    const auto own = scores.subspan(at(head * shape[2]), at(shape[2]));
    kept.heads[at(head)].context.assign(own.begin(), own.end());
  }
  kept_.insert_or_assign(sequence, std::move(kept));
}

std::int64_t H2o::index_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [sequence, captured] : captured_) bytes += captured.bytes();
  for (const auto& [sequence, prompt] : prompts_) bytes += prompt.queries.bytes();
  for (const auto& [sequence, kept] : kept_) {
    for (const auto* gains : {&kept.before.gained, &kept.before.pending})
      for (const std::vector<float>& head : *gains)
        bytes += static_cast<std::int64_t>(head.capacity() * sizeof(float));
    for (const Scores& head : kept.heads) {
      bytes += static_cast<std::int64_t>(
          (head.context.capacity() + head.gained.capacity() + head.pending.capacity()) * sizeof(float) +
          head.heavy.capacity() * sizeof(Position));
    }
  }
  return bytes;
}

}  // namespace

MethodInfo h2o_method() {
  return {.name = "h2o",
          .aliases = {},
          .source = "H2O (Zhang et al. 2023): keys of the largest accumulated attention, and recent ones",
          .keys = {{"heavy_ratio", "heavy hitters that are kept, a count or a share of the context", "10%"},
                   {"recent_ratio",
                    "last keys that are kept, window included, a count or a share of the context", "10%"},
                   {"queries", "tokens of the context whose attention is summed, at most, 1 to 16777216",
                    "2048"}},
          .dense = {},
          .dense_layers = 0,
          .revision = 2,
          .make = make_of<H2o, Options>,
          .index_bytes =
              [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
                const Options options = Options::of(spec);
                return geometry.kv_heads * (tokens + options.heavy.of(tokens)) * std::int64_t{4} +
                       CapturedQueries(geometry.query_heads, geometry.head_dim, options.queries)
                           .bytes_for(tokens);
              },
          .validate = check_of<Options>};
}

}  // namespace lode
