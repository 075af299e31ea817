// SPDX-License-Identifier: Apache-2.0
// snapkv: Li et al., "SnapKV: LLM Knows What You Are Looking for Before Generation" (2024), section 4. The
// last tokens of the context vote, once, for the keys before them; each head keeps those with the most votes,
// and everything from there on.
//
//   votes(k) = sum over the window_size last queries of softmax(q K / sqrt(d))_k
//   pooled(k) = the mean (avgpool) or maximum (maxpool) of the votes within kernel_size / 2 of k
//   kept = the max_capacity_prompt - window_size keys of the largest pooled votes
//
// Outside the text there are votes of 0 for the mean, none for the maximum. A query head each by default, as
// the authors' program, which therefore keeps K and V once a query head; `per=kv-head` lets a group vote
// together. Chosen among the keys that are far when the context ends: those in sink and window are attended
// anyway. Keys that leave the window later stay, as every key behind the observation window does in the
// paper. Without a prefill to observe there are no votes: then the newest keys are kept.
//
// The paper's window is the prompt's end, question included. Where the prompt is known before the answer (decode-sparse, last:N)
// its last tokens vote anew when it is complete, each sequence for itself; the document's last queries fill the window up where
// the prompt is shorter. Where the document is indexed for questions to come, its own last tokens vote, once for all.
#include "select/baselines/snapkv.h"

#include <algorithm>
#include <array>
#include <map>

#include "base/cancel.h"
#include "base/threads.h"
#include "io/container.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/shared/branches.h"
#include "select/shared/observed_queries.h"
#include "select/shared/per_token.h"
#include "select/shared/softmax_sum.h"

namespace lode {

namespace {

constexpr std::array<std::string_view, 2> kPooling = {"avgpool", "maxpool"}, kPer = {"query-head", "kv-head"};

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

/// One sequence.
struct KeptKeys {
  std::vector<std::vector<Position>> rows;  // [sets] chosen, rising, below `from`
  Position from = 0;                        // every key from here on
  std::int64_t version = 0;
};

/// A prompt by which a sequence chooses.
struct Prompt {
  ObservedQueries queries;
  Position begin = 0;  ///< of its tokens
  bool complete = false;
  std::int64_t end = 0;  ///< when it is
  KeptKeys kept = {};
};

class SnapKv final : public PerTokenSelector, public KeyKeeper, public Branches {
 public:
  SnapKv(const LayerGeometry& geometry, const SnapKvOptions& options)
      : PerTokenSelector(geometry), options_(options) {}

  bool wants_writes() const override { return true; }
  void on_write(const KvWrite& write) override {
    if (write.phase == Phase::context)
      observed_.try_emplace(write.sequence, options_.window).first->second.take(write);
    const auto prompt = prompts_.find(write.sequence);
    if (write.phase == Phase::question && prompt != prompts_.end() && !prompt->second.complete)
      prompt->second.queries.take(write);
  }
  void build(std::int32_t sequence, KvLayer kv) override;
  void append(std::int32_t sequence, KvLayer, Position) override { of(sequence); }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override;
  void save(std::int32_t sequence, SectionWriter& out) const override;
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override;
  std::int64_t index_bytes() const override;
  KeyKeeper::Kept kept_keys() const override {
    if (!kept_.contains(0)) return {.version = 0, .rows = {}, .from = sink()};
    const KeptKeys& kept = kept_of(0);
    return {kept.version, kept.rows, kept.from};
  }
  bool per_sequence() const override { return true; }
  void branch(std::int32_t id) override {
    kept_.insert_or_assign(id, kept_.contains(0) ? kept_.at(0) : all());
  }
  void drop_branch(std::int32_t id) override {
    kept_.erase(id);
    prompts_.erase(id);
  }
  bool chooses_by_prompt() const override { return true; }
  void begin_prompt(std::int32_t id, Position position) override {
    prompts_.insert_or_assign(id, Prompt{.queries = ObservedQueries(options_.window), .begin = position});
  }
  void choose_by_prompt(std::int32_t id, KvLayer kv, KvLayer tail) override;

 private:
  Position sink() const { return static_cast<Position>(geometry_.dense.sink); }
  int sets() const { return options_.per_kv_head ? geometry_.kv_heads : geometry_.query_heads; }
  /// Everything, until build() chooses.
  KeptKeys all() const {
    return {.rows = std::vector<std::vector<Position>>(at(sets())), .from = sink(), .version = 0};
  }
  void set(std::int32_t sequence, KeptKeys kept) {
    kept.version = ++versions_;
    kept_.insert_or_assign(sequence, std::move(kept));
  }
  KeptKeys& of(std::int32_t sequence) { return kept_.try_emplace(sequence, all()).first->second; }
  /// By the sequence's own prompt, or the document's.
  const KeptKeys& kept_of(std::int32_t sequence) const {
    const auto prompt = prompts_.find(sequence);
    if (prompt != prompts_.end() && prompt->second.complete) return prompt->second.kept;
    return kept_.at(sequence);
  }

  /// Keys and values of a head, and those of a branch behind them.
  struct Rows {
    const KvRows& kv;
    const KvRows* tail = nullptr;
    std::int64_t count() const { return kv.rows + (tail != nullptr ? tail->rows : 0); }
  };
  /// The keys before `end` that are kept, by the last of `tokens` tokens, whose queries were `observed`. Keys from `end` on are
  /// kept all.
  KeptKeys chosen(std::span<const ObservedQueries* const> observed, KvLayer kv, KvLayer tail,
                  std::int64_t tokens, std::int64_t end) const;
  void vote(const ObservedQueries& observed, const Rows& rows, int first, int heads, std::int64_t from,
            std::span<float> votes) const;
  std::vector<float> pool(std::span<const float> votes) const;
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;

  SnapKvOptions options_;
  std::map<std::int32_t, ObservedQueries> observed_;  // by sequence
  std::map<std::int32_t, KeptKeys> kept_;
  std::map<std::int32_t, Prompt> prompts_;
  std::int64_t versions_ = 0;  ///< that there have been
};

void SnapKv::build(std::int32_t sequence, KvLayer kv) {
  const ObservedQueries* const observed = &observed_.try_emplace(sequence, options_.window).first->second;
  set(sequence, chosen({&observed, 1}, kv, {}, kv.tokens, kv.tokens));
}

void SnapKv::choose_by_prompt(std::int32_t id, KvLayer kv, KvLayer tail) {
  const auto found = prompts_.find(id);
  if (found == prompts_.end() || found->second.queries.tokens() == 0 || !kept_.contains(id)) return;
  Prompt& prompt = found->second;
  const std::int64_t end = std::int64_t{prompt.queries.begin()} + prompt.queries.tokens();
  std::vector<const ObservedQueries*> observed = {&prompt.queries};
  if (const auto document = observed_.find(0); document != observed_.end())
    observed.push_back(&document->second);
  prompt.kept = chosen(observed, kv, tail, end, prompt.begin);
  prompt.kept.version = ++versions_;
  prompt.end = end;
  prompt.complete = true;
  prompt.queries = ObservedQueries(options_.window);  // nobody votes again
}

KeptKeys SnapKv::chosen(std::span<const ObservedQueries* const> observed, KvLayer kv, KvLayer tail,
                        std::int64_t tokens, std::int64_t end) const {
  KeptKeys kept = all();
  const std::int64_t behind = std::max(options_.window, geometry_.dense.window);
  const std::int64_t first_vote = tokens - options_.window,
                     voted = std::min(
                         {end, kv.tokens, first_vote});  // a branch chooses among the document's keys
  kept.from = static_cast<Position>(std::max<std::int64_t>(sink(), std::min(voted, tokens - behind)));
  const std::int64_t n = kept.from - sink(), budget = options_.budget(n);
  if (budget >= n) {
    kept.from = sink();
    return kept;
  }
  const int heads = options_.per_kv_head ? geometry_.group() : 1;
  for_each(sets(), [&](std::int64_t set, int) {
    check_cancel();
    const int first = static_cast<int>(set) * heads, kv_head = first / geometry_.group();
    const Rows rows = {.kv = kv.heads[at(kv_head)],
                       .tail = tail.heads.empty() ? nullptr : &tail.heads[at(kv_head)]};
    std::vector<float> votes(at(voted), 0.0f);
    for (const ObservedQueries* const queries : observed)
      vote(*queries, rows, first, heads, first_vote, votes);
    const std::vector<float> pooled = pool(votes);
    top_k(std::span(pooled).subspan(at(sink()), at(n)), budget, sink(), kept.rows[at(set)]);
  });
  return kept;
}

/// Adds the softmax weights that keys receive from the observed queries, of some heads, that stand at `from` or behind.
void SnapKv::vote(const ObservedQueries& observed, const Rows& rows, int first, int heads, std::int64_t from,
                  std::span<float> votes) const {
  const std::int64_t d = geometry_.head_dim;
  std::vector<float> scores, q(at(d));
  for (std::int64_t i = 0; i < observed.tokens() * heads; ++i) {
    const std::int64_t token = i / heads, end = std::int64_t{observed.begin()} + token + 1,
                       own = std::min(end, rows.kv.rows);
    if (end <= from || end > rows.count()) continue;  // an earlier text's
    const float* const given = observed.q().data() + (token * geometry_.query_heads + first + i % heads) * d;
    for (std::int64_t j = 0; j < d; ++j) q[at(j)] = given[j] * geometry_.scale;
    scores.resize(at(end));
    kernels().score_run(q.data(), 1, rows.kv, 0, own, scores.data(), own);
    if (end > own) kernels().score_run(q.data(), 1, *rows.tail, 0, end - own, scores.data() + own, end - own);
    add_softmax(votes, scores);
  }
}

std::vector<float> SnapKv::pool(std::span<const float> votes) const {
  const std::int64_t n = std::ssize(votes), reach = options_.kernel / 2;
  std::vector<float> pooled(votes.size());
  for (std::int64_t i = 0; i < n; ++i) {
    double sum = 0.0;
    float most = 0.0f;
    for (std::int64_t j = std::max<std::int64_t>(0, i - reach); j <= std::min(n - 1, i + reach); ++j) {
      sum += votes[at(j)];
      most = std::max(most, votes[at(j)]);
    }
    pooled[at(i)] =
        options_.max_pooling ? most : static_cast<float>(sum / static_cast<double>(options_.kernel));
  }
  return pooled;
}

void SnapKv::roll_back(std::int32_t sequence, std::int64_t tokens) {
  if (const auto found = observed_.find(sequence); found != observed_.end()) found->second.roll_back(tokens);
  if (const auto found = prompts_.find(sequence); found != prompts_.end()) {
    Prompt& prompt = found->second;
    prompt.queries.roll_back(tokens);
    if (tokens < prompt.begin || (prompt.complete && tokens < prompt.end)) prompts_.erase(found);
  }
  const auto found = kept_.find(sequence);
  if (found == kept_.end()) return;
  KeptKeys& kept = found->second;
  if (kept.from <= tokens) return;
  kept.version = ++versions_;
  for (std::vector<Position>& rows : kept.rows)
    rows.erase(std::lower_bound(rows.begin(), rows.end(), tokens), rows.end());
  kept.from =
      static_cast<Position>(std::min<std::int64_t>(kept.from, std::max<std::int64_t>(sink(), tokens)));
}

void SnapKv::choose(const SelectUnit& unit, int, Selection& out, SelectWork& work) {
  const KeptKeys& kept = kept_of(unit.block->sequence);
  const auto add = [&](std::uint32_t heads, int set) {
    out.add_set(unit.set(heads));
    const std::vector<Position>& rows = kept.rows[at(set)];
    const auto end = std::lower_bound(rows.begin(), rows.end(), unit.far_end);
    out.add_rows({rows.begin(), end});
    const Position from = std::max(kept.from, unit.far_begin);
    if (from < unit.far_end) out.add_run(from, unit.far_end);
    work.bytes += (end - rows.begin()) * std::int64_t{sizeof(Position)};
  };
  if (options_.per_kv_head || kept.from <= unit.far_begin)
    return add(all_heads(geometry_.group()), options_.per_kv_head ? unit.kv_head : 0);
  for (int g = 0; g < geometry_.group(); ++g) add(1u << g, unit.kv_head * geometry_.group() + g);
}

void SnapKv::save(std::int32_t sequence, SectionWriter& out) const {
  const auto found = kept_.find(sequence);
  const KeptKeys& kept = found == kept_.end() ? all() : found->second;
  const std::array<std::int64_t, 3> shape = {sets(), sink(), kept.from};
  std::vector<std::int64_t> offsets = {0};
  std::vector<Position> rows;
  for (const std::vector<Position>& own : kept.rows) {
    rows.insert(rows.end(), own.begin(), own.end());
    offsets.push_back(std::ssize(rows));
  }
  out.add<std::int64_t>("shape", shape);
  out.add<std::int64_t>("offsets", offsets);
  out.add<Position>("rows", rows);
}

void SnapKv::load(std::int32_t sequence, SectionReader& in, KvLayer kv) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto shape = in.values<std::int64_t>("shape");
  require(shape.size() == 3 && shape[0] == sets(), "one list for each head that chooses");
  require(shape[1] == sink() && shape[2] >= sink() && shape[2] <= std::max<std::int64_t>(sink(), kv.tokens),
          "keys behind the sink and within the context");
  const auto offsets = in.values<std::int64_t>("offsets");
  const auto rows = in.values<Position>("rows");
  require(std::ssize(offsets) == sets() + 1 && offsets.front() == 0 && offsets.back() == std::ssize(rows) &&
              std::is_sorted(offsets.begin(), offsets.end()),
          "rising offsets up to the number of rows");
  KeptKeys kept = all();
  kept.from = static_cast<Position>(shape[2]);
  for (int set = 0; set < sets(); ++set) {
    const auto own = rows.subspan(at(offsets[at(set)]), at(offsets[at(set + 1)] - offsets[at(set)]));
    require(std::adjacent_find(own.begin(), own.end(), std::greater_equal<>()) == own.end() &&
                (own.empty() || (own.front() >= sink() && own.back() < kept.from)),
            "rising rows of far keys");
    kept.rows[at(set)].assign(own.begin(), own.end());
  }
  set(sequence, std::move(kept));
}

std::int64_t SnapKv::index_bytes() const {
  std::int64_t bytes = 0;
  const auto add = [&](const KeptKeys& kept) {
    for (const std::vector<Position>& rows : kept.rows)
      bytes += static_cast<std::int64_t>(rows.capacity() * sizeof(Position));
  };
  for (const auto& [sequence, observed] : observed_) bytes += observed.bytes();
  for (const auto& [sequence, kept] : kept_) add(kept);
  for (const auto& [sequence, prompt] : prompts_) {
    bytes += prompt.queries.bytes();
    add(prompt.kept);
  }
  return bytes;
}

}  // namespace

SnapKvOptions SnapKvOptions::of(const Spec& spec) {
  SnapKvOptions options;
  options.window = spec.integer("window_size", options.window, 1, 1 << 16);
  options.kernel = spec.integer("kernel_size", options.kernel, 1, (1 << 16) - 1);
  options.capacity = spec.amount("max_capacity_prompt", options.capacity);
  options.max_pooling = spec.choice("pooling", kPooling[0], kPooling) == "maxpool";
  options.per_kv_head = spec.choice("per", kPer[0], kPer) == "kv-head";
  const auto expect = [&](bool fits, const char* what) {
    if (!fits) throw InputError("attention spec '" + spec.str() + "': expected " + what);
  };
  expect(options.kernel % 2 == 1, "an odd kernel_size, which has a middle, found an even one");
  expect(options.capacity.is_share || options.capacity.value > static_cast<double>(options.window),
         "a max_capacity_prompt above window_size, which is part of it, found less");
  return options;
}

std::int64_t SnapKvOptions::budget(std::int64_t n) const {
  if (capacity.is_share) return capacity.of(n);
  return std::min(n, static_cast<std::int64_t>(capacity.value) - window);
}

MethodInfo snapkv_method() {
  return {.name = "snapkv",
          .aliases = {},
          .source = "SnapKV (Li et al. 2024): keys that the context's last queries attend, once for all",
          .keys = {{"window_size", "last tokens of the context whose queries vote, 1 to 65536", "64"},
                   {"max_capacity_prompt",
                    "keys that are kept of the context: a count, which includes window_size, or a share of "
                    "the far keys",
                    "320"},
                   {"kernel_size", "keys over which votes are pooled, odd, 1 to 65535", "5"},
                   {"pooling", "avgpool or maxpool", "avgpool"},
                   {"per", "who votes: query-head (each for itself) or kv-head (the group together)",
                    "query-head"}},
          .dense = {},
          .dense_layers = 0,
          .revision = 2,
          .make = make_of<SnapKv, SnapKvOptions>,
          .index_bytes =
              [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
                const SnapKvOptions options = SnapKvOptions::of(spec);
                return (options.per_kv_head ? geometry.kv_heads : geometry.query_heads) *
                           options.budget(tokens) * std::int64_t{sizeof(Position)} +
                       options.window * geometry.query_heads * geometry.head_dim *
                           std::int64_t{sizeof(float)};
              },
          .validate = check_of<SnapKvOptions>};
}

}  // namespace lode
