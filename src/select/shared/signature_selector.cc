// SPDX-License-Identifier: Apache-2.0
// A key's signature is a function of its row in the store alone, computed when the key is first taken in.
// Stored keys are after RoPE; they are un-rotated for functions that were trained before it.
#include "select/shared/signature_selector.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

#include "ann/hashing/code_search.h"
#include "kernels/select/signature.h"
#include "lodestone/error.h"
#include "select/made_for_length.h"
#include "select/shared/per_token.h"
#include "select/shared/signatures.h"

namespace lode {

namespace {

constexpr std::int64_t kPiece = 64;  // keys of one thread's item
constexpr std::array<std::string_view, 3> kModes = {"count", "depth", "combined"};
constexpr std::array<std::string_view, 2> kPer = {"kv-head", "query-head"};
constexpr std::array<std::string_view, 2> kTies = {"newest", "all"};
constexpr std::array<std::string_view, 3> kTables = {"auto", "on", "off"};

// Measured: fewer keys, or a larger share of them, are found as fast by a pass over all signatures.
constexpr std::int64_t kKeysForTables = std::int64_t{1} << 20, kLeastShareOfBudget = 512;

/// Whether tables can serve: they tell keys by the distance of one 32-bit signature to all queries.
bool tables_fit(const SignatureOptions& options, const HashScheme& scheme) {
  return scheme.bits == 32 && options.mode == NearRule::Mode::count &&
         (options.per_query_head || !scheme.per_query_head);
}

/// Whether an index of so many keys has tables.
bool wants_tables(const SignatureOptions& options, const HashScheme& scheme, std::int64_t keys) {
  if (options.tables == SignatureOptions::Tables::off || !tables_fit(options, scheme)) return false;
  return options.tables == SignatureOptions::Tables::on ||
         (keys >= kKeysForTables && options.budget.of(keys) <= keys / kLeastShareOfBudget);
}

class SignatureSelector final : public PerTokenSelector, public MadeForLength {
 public:
  SignatureSelector(const LayerGeometry& geometry, const SignatureOptions& options, HashWeights weights)
      : PerTokenSelector(geometry),
        options_(options),
        weights_(std::move(weights)),
        functions_(weights_.fingerprint()),
        rope_remark_(weights_.trained.rope_remark("an artefact of hash", "train hash", geometry.rope)),
        scratch_(static_cast<std::size_t>(workers())) {
    for (const HashNet& net : weights_.query) query_bytes_ += net.bytes();
  }

  void build(std::int32_t sequence, KvLayer kv) override {
    SignatureIndex index = empty_index();
    extend(index, kv, static_cast<Position>(kv.tokens));
    indexes_.insert_or_assign(sequence, std::move(index));
  }
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override {
    const auto [at, fresh] = indexes_.try_emplace(sequence);
    if (fresh) at->second = empty_index();
    extend(at->second, kv, far_end);
  }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override {
    if (const auto found = indexes_.find(sequence); found != indexes_.end()) found->second.roll_back(tokens);
  }
  void save(std::int32_t sequence, SectionWriter& out) const override {
    const auto found = indexes_.find(sequence);
    (found == indexes_.end() ? empty_index() : found->second).save(out, functions_);
  }
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override {
    const SignatureIndex empty = empty_index();
    SignatureIndex index =
        SignatureIndex::load(in, empty.begin(), sets(), empty.words(), functions_, kv.tokens);
    refresh_tables(index);
    indexes_.insert_or_assign(sequence, std::move(index));
  }
  const HashWeights& weights() const { return weights_; }
  std::string notice(std::int32_t sequence) const override;
  std::string remark_on_length(std::int64_t tokens) const override;
  std::int64_t index_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& [sequence, index] : indexes_) bytes += index.bytes();
    return bytes;
  }

 private:
  struct Scratch {
    std::vector<std::uint32_t> queries;   // [G, words]
    std::vector<std::uint16_t> distance;  // [far keys]
    std::vector<Position> rows;
    std::vector<float> nearness;  // of the rows
    CodeSearch search;
    HashNet::Scratch net;
  };

  int sets() const { return weights_.scheme.signatures(geometry_); }
  int words() const { return weights_.scheme.bits / 32; }
  SignatureIndex empty_index() const {
    return {static_cast<Position>(geometry_.dense.sink), sets(), words()};
  }
  /// Of the head's keys.
  int set_of(int kv_head, int g) const {
    return weights_.scheme.per_query_head ? kv_head * geometry_.group() + g : kv_head;
  }

  void extend(SignatureIndex& index, KvLayer kv, Position end) const;
  void refresh_tables(SignatureIndex& index) const;
  void sign(SignatureIndex& index, KvLayer kv, Position begin, Position end) const;
  bool divides() const override { return true; }
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;
  void rank_found(const SignatureIndex& index, const SelectUnit& unit, int first, int count, Scratch& s);
  void encode_queries(const SelectUnit& unit, Scratch& s) const;
  CodeSearch::Work find(const SignatureIndex& index, const SelectUnit& unit, int first, int count,
                        Scratch& s) const;
  void measure(const SignatureIndex& index, const SelectUnit& unit, int first, int count, Scratch& s) const;

  SignatureOptions options_;
  HashWeights weights_;
  std::string functions_, rope_remark_;
  std::int64_t query_bytes_ = 0;  // of all phi_q
  std::map<std::int32_t, SignatureIndex> indexes_;
  std::vector<Scratch> scratch_;  // [workers]
};

std::string SignatureSelector::notice(std::int32_t sequence) const {
  const auto index = indexes_.find(sequence);
  const std::string too_long =
      index == indexes_.end() ? std::string() : remark_on_length(index->second.end());
  return too_long.empty() ? rope_remark_ : too_long;
}

std::string SignatureSelector::remark_on_length(std::int64_t tokens) const {
  const std::int64_t reach = weights_.trained.reach;
  if (reach == 0 || tokens <= kBeyondReach * reach) return {};
  return fmt::format(
      "a context of {} tokens, and hash's functions were trained for {}: expect them to miss what is far "
      "(train with "
      "longer prompts or --shift, or take another method)",
      tokens, reach);
}

void SignatureSelector::extend(SignatureIndex& index, KvLayer kv, Position end) const {
  const Position begin = index.end();
  if (begin >= end) return;
  LODE_ASSERT(end <= kv.tokens);
  index.grow(end - begin);
  for_each((end - begin + kPiece - 1) / kPiece, [&](std::int64_t piece, int) {
    const auto first = static_cast<Position>(begin + piece * kPiece);
    sign(index, kv, first, static_cast<Position>(std::min<std::int64_t>(end, first + kPiece)));
  });
  refresh_tables(index);
}

void SignatureSelector::refresh_tables(SignatureIndex& index) const {
  if (!wants_tables(options_, weights_.scheme, index.end() - index.begin())) return;
  for_each(sets(), [&](std::int64_t set, int) { index.refresh_tables(static_cast<int>(set)); });
}

/// Signatures of keys [begin, end).
void SignatureSelector::sign(SignatureIndex& index, KvLayer kv, Position begin, Position end) const {
  const std::int64_t heads = geometry_.kv_heads, count = end - begin,
                     inputs = weights_.scheme.key_inputs(geometry_.head_dim);
  std::vector<float> x(static_cast<std::size_t>(heads * count * inputs));  // [Hkv, count, inputs]
  for (std::int64_t i = 0; i < count; ++i) {
    read_key_inputs(weights_.scheme, kv.heads, begin + static_cast<Position>(i), geometry_.rope,
                    x.data() + i * inputs, count * inputs);
  }
  HashNet::Scratch scratch;
  for (int set = 0; set < sets(); ++set) {
    const int head = weights_.scheme.per_query_head ? set / geometry_.group() : set;
    weights_.key[static_cast<std::size_t>(set)].encode(x.data() + head * count * inputs, count,
                                                       index.writable(set, begin), scratch);
  }
}

void SignatureSelector::encode_queries(const SelectUnit& unit, Scratch& s) const {
  const std::span<const float> q =
      unit.group_of(weights_.scheme.roped ? unit.block->q : unit.block->q_unrotated, geometry_);  // [G, d]
  s.queries.resize(static_cast<std::size_t>(geometry_.group() * words()));
  for (int g = 0; g < geometry_.group(); ++g) {
    const HashNet& net = weights_.query[static_cast<std::size_t>(unit.kv_head * geometry_.group() + g)];
    net.encode(q.data() + std::int64_t{g} * geometry_.head_dim, 1, s.queries.data() + g * words(), s.net);
  }
}

/// s.distance := of the far keys, summed over heads [first, first + count) of the group.
void SignatureSelector::measure(const SignatureIndex& index, const SelectUnit& unit, int first, int count,
                                Scratch& s) const {
  const SignatureKernels& table = signature_kernels();
  s.distance.resize(static_cast<std::size_t>(unit.far_keys()));
  const auto add = [&](int head, int some, bool to_others) {
    table.distances(index.keys(set_of(unit.kv_head, head), unit.far_begin), unit.far_keys(), words(),
                    s.queries.data() + head * words(), some, to_others, s.distance.data());
  };
  if (!weights_.scheme.per_query_head) return add(first, count, false);
  for (int head = first; head < first + count; ++head) add(head, 1, head > first);
}

/// s.rows := what heads [first, first + count) of the group choose together.
CodeSearch::Work SignatureSelector::find(const SignatureIndex& index, const SelectUnit& unit, int first,
                                         int count, Scratch& s) const {
  const std::int64_t n = unit.far_keys(), budget = options_.budget.of(unit.all_far_keys());
  const int signatures = weights_.scheme.per_query_head ? count : 1, set = set_of(unit.kv_head, first);
  if (options_.mode == NearRule::Mode::count && signatures == 1) {
    return s.search.nearest({.keys = index.keys(set, unit.far_begin),
                             .n = n,
                             .words = words(),
                             .queries = s.queries.data() + first * words(),
                             .count = count,
                             .budget = budget,
                             .all_ties = options_.all_ties},
                            {&index.tables(set), options_.tables == SignatureOptions::Tables::on},
                            unit.far_begin, s.rows);
  }
  measure(index, unit, first, count, s);
  select_near(s.distance,
              {.mode = options_.mode,
               .budget = budget,
               .depth = options_.depth * count,
               .all_ties = options_.all_ties},
              unit.far_begin, s.rows);
  return {.keys = n, .bytes = n * signatures * words() * std::int64_t{sizeof(std::uint32_t)}};
}

/// Lets the rows that were found compete with those of other ranks, by their distances.
void SignatureSelector::rank_found(const SignatureIndex& index, const SelectUnit& unit, int first, int count,
                                   Scratch& s) {
  if (!share().divided()) return;
  measure(index, unit, first, count, s);
  s.nearness.clear();
  for (const Position row : s.rows)
    s.nearness.push_back(-static_cast<float>(s.distance[static_cast<std::size_t>(row - unit.far_begin)]));
  RankRule rule = {.budget = unit.all_far_keys(), .all_ties = options_.all_ties};
  if (options_.mode != NearRule::Mode::depth) rule.budget = options_.budget.of(unit.all_far_keys());
  if (options_.mode != NearRule::Mode::count) rule.depth = static_cast<float>(options_.depth * count);
  rank_rows(unit, rule, s.rows, s.nearness);
}

void SignatureSelector::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const SignatureIndex& index = indexes_.at(unit.block->sequence);
  LODE_ASSERT(index.begin() == unit.far_begin && index.end() >= unit.far_end);
  const int group = geometry_.group(), together = options_.per_query_head ? 1 : group;
  const std::int64_t n = unit.far_keys(), all = unit.all_far_keys();
  const bool everything = options_.budget.of(all) >= all && options_.mode == NearRule::Mode::count;
  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  if (!everything) encode_queries(unit, s);
  CodeSearch::Work read;
  for (int first = 0; first < group; first += together) {
    out.add_set(unit.set(options_.per_query_head ? 1u << first : all_heads(group)));
    if (everything) {
      out.add_run(unit.far_begin, unit.far_end);
      continue;
    }
    s.rows.clear();
    if (n > 0) {
      const CodeSearch::Work some = find(index, unit, first, together, s);
      read.keys += some.keys;
      read.bytes += some.bytes;
    }
    if (share().divided()) {
      out.add_rows(s.rows);
      rank_found(index, unit, first, together, s);
    } else if (std::ssize(s.rows) == n) {
      out.add_run(unit.far_begin, unit.far_end);
    } else {
      out.add_rows(s.rows);
    }
  }
  if (everything) return;
  // Heads that choose alone read the signatures that they share one after the other: from memory once.
  const int choices = group / together;
  work.keys_scored += read.keys / choices;
  work.bytes +=
      read.bytes / (weights_.scheme.per_query_head ? 1 : choices) + query_bytes_ / geometry_.kv_heads;
}

}  // namespace

SignatureOptions SignatureOptions::of(const Spec& spec) {
  SignatureOptions options;
  const std::string mode = spec.choice("mode", kModes[0], kModes);
  options.mode = static_cast<NearRule::Mode>(std::find(kModes.begin(), kModes.end(), mode) - kModes.begin());
  options.budget = spec.amount("budget", options.budget);
  options.depth = spec.integer("depth", options.depth, 0, 128);
  options.per_query_head = spec.choice("per", kPer[0], kPer) == "query-head";
  options.tables = static_cast<Tables>(
      std::find(kTables.begin(), kTables.end(), spec.choice("index", kTables[0], kTables)) - kTables.begin());
  options.all_ties = spec.choice("ties", kTies[0], kTies) == "all";
  const auto no = [&](const char* key) {
    if (!spec.text(key)) return;
    throw InputError("attention spec '" + spec.str() + "': expected no key " + key + " with mode=" + mode +
                     ", found one");
  };
  if (options.mode == NearRule::Mode::count) no("depth");
  if (options.mode != NearRule::Mode::count) no("index");
  if (options.mode == NearRule::Mode::depth) no("budget");
  return options;
}

std::vector<SpecKey> SignatureOptions::keys() {
  return {{"budget", "keys that a choice takes, a count or a share of the far keys", "1/32"},
          {"mode", "count (the budget's nearest keys), depth (all within depth of the nearest) or combined",
           "count"},
          {"depth", "mismatches beyond the nearest key's, for each head that takes part, 0 to 128", "4"},
          {"per", "who chooses: kv-head (the group, by the sum of its heads) or query-head", "kv-head"},
          {"index",
           "tables over 32-bit signatures on the CPU, which choose the same keys: auto (from 1M keys and "
           "budgets of 1/512 on, where they save time), on or off",
           "auto"},
          {"ties", "of keys as near as the last one taken: newest (exactly the budget) or all", "newest"}};
}

std::unique_ptr<Selector> make_signature_selector(const LayerGeometry& geometry,
                                                  const SignatureOptions& options, HashWeights weights) {
  if (options.tables == SignatureOptions::Tables::on && !tables_fit(options, weights.scheme)) {
    throw InputError(fmt::format(
        "index=on: expected signatures of 32 bits, and one of a key for all who choose together, found {} "
        "bits and one for each {}",
        weights.scheme.bits, weights.scheme.per_query_head ? "query head" : "KV head"));
  }
  return std::make_unique<SignatureSelector>(geometry, options, std::move(weights));
}

const HashWeights* signature_weights(const Selector& selector) {
  const auto* const own = dynamic_cast<const SignatureSelector*>(&selector);
  return own == nullptr ? nullptr : &own->weights();
}

std::int64_t signature_bytes(const SignatureOptions& options, const HashScheme& scheme,
                             const LayerGeometry& geometry, std::int64_t tokens) {
  const std::int64_t keys = std::max<std::int64_t>(0, tokens - geometry.dense.sink),
                     tables = wants_tables(options, scheme, keys) ? HalfTables::bytes_of(keys) : 0;
  return scheme.signatures(geometry) * (tokens * scheme.bits / 8 + tables);
}

}  // namespace lode
