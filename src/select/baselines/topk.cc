// SPDX-License-Identifier: Apache-2.0
// topk: exact search, the oracle that every method is measured against ("Flat" of the RetrievalAttention
// paper, section 4.1, with its 100 keys; "top-p" when `mass` is given, as in the Twilight paper). Every far
// key is scored.
//
// Per query head by default: each head of a group takes its own best keys. Per KV head, the group shares the
// keys that have the largest sum of softmax weights over its heads. By value, a key counts a * |v| instead of
// its softmax weight a, since that bounds what leaving it out does to the output (HashAttention, section 3).
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>

#include "base/threads.h"
#include "kernels/kernels.h"
#include "kernels/kv_row.h"
#include "kernels/rope.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/shared/best_keys.h"
#include "select/shared/estimated_keys.h"
#include "select/shared/per_token.h"
#include "select/shared/softmax_sum.h"

namespace lode {

namespace {

constexpr std::array<std::string_view, 2> kBy = {"score", "value"};
constexpr std::array<std::string_view, 2> kPer = {"query-head", "kv-head"};

struct Options {
  Amount k = {100, false};
  double mass = 0.0;  ///< 0: by count
  bool by_value = false;
  bool per_kv_head = false;

  static Options of(const Spec& spec) {
    Options options;
    expect_not_both(spec, "k", "mass");
    options.k = spec.amount("k", options.k);
    options.mass = spec.number("mass", 0.0, std::numeric_limits<double>::min(), 1.0);
    options.by_value = spec.choice("by", kBy[0], kBy) == "value";
    options.per_kv_head = spec.choice("per", kPer[0], kPer) == "kv-head";
    return options;
  }
};

/// log |v| of the rows of a head from the first one here, extended as rows are asked for: a function of the store alone. Of
/// latent rows, which are keys and values at once, the numbers that turn are no part of the value.
class ValueNorms {
 public:
  explicit ValueNorms(std::int64_t begin) : begin_(begin) {}
  void extend(const KvRows& kv, const Rope* rope, std::int64_t rows) {
    std::vector<float> v(static_cast<std::size_t>(kv.d));
    const std::size_t turning = rope != nullptr && kv.k == kv.v ? rope->turning_pairs() : 0;
    for (std::int64_t row = begin_ + std::ssize(logs_); row < rows; ++row) {
      read_value_row(kv, row, v.data());
      std::fill_n(v.begin(), turning, 0.0f);
      std::fill_n(v.begin() + kv.d / 2, turning, 0.0f);
      logs_.push_back(0.5f * std::log(kernels().dot(v.data(), v.data(), kv.d)));
    }
  }
  void cut(std::int64_t rows) {
    const std::int64_t left = std::max<std::int64_t>(0, rows - begin_);
    if (std::ssize(logs_) > left) logs_.resize(static_cast<std::size_t>(left));
  }
  const float* from(Position row) const { return logs_.data() + (row - begin_); }
  std::int64_t bytes() const { return std::ssize(logs_) * std::int64_t{sizeof(float)}; }

 private:
  std::int64_t begin_;
  std::vector<float> logs_;
};

class TopK final : public PerTokenSelector {
 public:
  TopK(const LayerGeometry& geometry, const Options& options)
      : PerTokenSelector(geometry), options_(options), scratch_(static_cast<std::size_t>(workers())) {}

  void build(std::int32_t sequence, KvLayer kv) override {
    norms_.erase(sequence);
    append(sequence, kv, static_cast<Position>(kv.tokens));
  }
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override {
    if (!options_.by_value) return;
    std::vector<ValueNorms>& norms = norms_[sequence];
    norms.resize(kv.heads.size(), ValueNorms(share().own.begin));
    for_each(std::ssize(norms), [&](std::int64_t head, int) {
      const auto h = static_cast<std::size_t>(head);
      norms[h].extend(kv.heads[h], geometry_.rope, far_end);
    });
  }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override {
    if (const auto found = norms_.find(sequence); found != norms_.end()) {
      for (ValueNorms& norms : found->second) norms.cut(tokens);
    }
  }
  // The norms follow from the values: nothing to keep.
  void save(std::int32_t, SectionWriter&) const override {}
  void load(std::int32_t sequence, SectionReader&, KvLayer kv) override { build(sequence, kv); }

  std::int64_t index_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& [sequence, heads] : norms_) {
      for (const ValueNorms& norms : heads) bytes += norms.bytes();
    }
    return bytes;
  }

 private:
  struct Scratch {
    std::vector<float> q;       // [G, d]
    std::vector<float> scores;  // [G, far keys]
    std::vector<float> best;    // of the rows that are chosen
    std::vector<Position> rows;
  };

  /// A share of the mass, and a group's common weights, need sums over all keys first.
  bool divides() const override { return options_.mass == 0.0 && !options_.per_kv_head; }

  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override {
    const KvRows& kv = unit.kv();
    const std::int64_t n = unit.far_keys();
    work.bytes += n * (kv.token_bytes() / 2 + (options_.by_value ? std::int64_t{sizeof(float)} : 0));
    work.keys_scored += n;
    Scratch& s = scratch_[static_cast<std::size_t>(worker)];
    score(unit, s);
    const std::span<float> scores(s.scores);
    if (options_.per_kv_head) {
      sum_exponentials({s.scores.data(), geometry_.group(), n});
      return add(unit, all_heads(geometry_.group()), scores.first(static_cast<std::size_t>(n)), s, out);
    }
    for (int g = 0; g < geometry_.group(); ++g) {
      add(unit, 1u << g, scores.subspan(static_cast<std::size_t>(g * n), static_cast<std::size_t>(n)), s,
          out);
    }
  }

  /// scores[g, i] of far key i, up to what is the same for all keys of a head: s, or s + log|v|.
  void score(const SelectUnit& unit, Scratch& s) const {
    const std::int64_t n = unit.far_keys();
    scale_queries(unit, geometry_, s.q);
    s.scores.resize(static_cast<std::size_t>(geometry_.group() * n));
    kernels().score_run(s.q.data(), geometry_.group(), unit.kv(), unit.far_begin, unit.far_end,
                        s.scores.data(), n);
    for (int g = 0; g < geometry_.group(); ++g) {
      const std::span<float> row(s.scores.data() + g * n, static_cast<std::size_t>(n));
      if (options_.per_kv_head) log_softmax(row);  // heads must be comparable before they are summed
      if (!options_.by_value) continue;
      const float* const norm =
          norms_.at(unit.block->sequence)[static_cast<std::size_t>(unit.kv_head)].from(unit.far_begin);
      for (std::int64_t i = 0; i < n; ++i) row[static_cast<std::size_t>(i)] += norm[i];
    }
  }

  void add(const SelectUnit& unit, std::uint32_t heads, std::span<const float> scores, Scratch& s,
           Selection& out) {
    out.add_set(unit.set(heads));
    const std::int64_t n = unit.all_far_keys(), k = options_.mass > 0.0 ? 0 : options_.k.of(n);
    if (k >= n || options_.mass >= 1.0) return out.add_run(unit.far_begin, unit.far_end);
    s.rows.clear();
    if (options_.mass > 0.0) {
      top_mass(scores, options_.mass, unit.far_begin, s.rows);
    } else {
      top_count(scores, k, unit.far_begin, s.rows);
    }
    out.add_rows(s.rows);
    s.best.clear();
    for (const Position row : s.rows)
      s.best.push_back(scores[static_cast<std::size_t>(row - unit.far_begin)]);
    rank_rows(unit, {.budget = k}, s.rows, s.best);
  }

  Options options_;
  std::map<std::int32_t, std::vector<ValueNorms>> norms_;  // per sequence: [Hkv]
  std::vector<Scratch> scratch_;                           // [workers]
};

}  // namespace

MethodInfo topk_method() {
  return {
      .name = "topk",
      .aliases = {"flat"},
      .source = "exact search (Flat of RetrievalAttention)",
      .keys = {{"k", "keys a query takes, a count or a share of the far keys", "100"},
               {"mass",
                "instead of k: as many keys as hold this share of the far softmax weight, above 0 up to 1",
                ""},
               {"by", "what a key counts: score (its softmax weight) or value (weight times |v|)", "score"},
               {"per", "who chooses: query-head (each its own keys) or kv-head (the group together)",
                "query-head"}},
      .dense = {},
      .dense_layers = 0,
      .make = make_of<TopK, Options>,
      .index_bytes =
          [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
            const std::int64_t norms = Options::of(spec).by_value ? tokens : 0;
            return geometry.kv_heads * norms * std::int64_t{sizeof(float)};
          },
      .validate = check_of<Options>};
}

}  // namespace lode
