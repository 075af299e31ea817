// SPDX-License-Identifier: Apache-2.0
// hnsw: Malkov and Yashunin, "Efficient and robust approximate nearest neighbor search using Hierarchical
// Navigable Small World graphs" (2016), with the inner product as nearness: RetrievalAttention's baseline for
// a graph that knows keys only (section 4.1 and figure 2b). The graph is in ann/graph/hnsw.cc.
//
// Keys and queries are taken after RoPE; one graph a KV head, a search for each query head with the ef (at
// least k) best nodes held, the k best of them attended. Keys that left the window after build() are scanned
// until there are kBatch of them, then added to the graph, as it would have been built from them. What was
// added after build() is taken away to the bit; cutting what build() added makes the graph anew.
#include "ann/graph/hnsw.h"

#include <algorithm>
#include <array>
#include <map>

#include "base/cancel.h"
#include "base/rng.h"
#include "base/threads.h"
#include "io/container.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/shared/best_keys.h"
#include "select/shared/branches.h"
#include "select/shared/per_token.h"
#include "select/shared/shares_index.h"

namespace lode {

namespace {

constexpr std::int64_t kBatch = 64;

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

struct Options {
  int m = 16;
  std::int64_t ef_construction = 200, ef = 10;
  Amount k = {100, false};

  static Options of(const Spec& spec) {
    Options options;
    options.m = static_cast<int>(spec.integer("M", options.m, 2, 256));
    options.ef_construction = spec.integer("ef_construction", options.ef_construction, 1, 1 << 16);
    options.ef = spec.integer("ef", options.ef, 1, 1 << 20);
    options.k = spec.amount("k", options.k);
    return options;
  }
};

/// One sequence.
struct Indexed {
  std::int64_t settled = 0;  // keys of the context that build() took
  std::vector<Hnsw> graphs;  // [Hkv]
};

class HnswSelector final : public PerTokenSelector, public SharesIndex, public Branches {
 public:
  HnswSelector(const LayerGeometry& geometry, const Options& options)
      : PerTokenSelector(geometry), options_(options), scratch_(at(workers())) {}

  void build(std::int32_t sequence, KvLayer kv) override {
    Indexed indexed = fresh();
    indexed.settled = std::max<std::int64_t>(0, kv.tokens - geometry_.dense.window - geometry_.dense.sink);
    advance(indexed, indexed.settled, kv);
    indexed_.insert_or_assign(sequence, std::move(indexed));
  }
  bool take_index(std::int32_t sequence, const Selector& other, KvLayer) override {
    const auto* const same = dynamic_cast<const HnswSelector*>(&other);
    if (same == nullptr || !same->indexed_.contains(sequence) || same->options_.m != options_.m ||
        same->options_.ef_construction != options_.ef_construction || same->sink() != sink() ||
        same->geometry_.dense.window != geometry_.dense.window)
      return false;
    indexed_.insert_or_assign(sequence, same->indexed_.at(sequence));
    return true;
  }
  void append(std::int32_t sequence, KvLayer, Position) override { indexed_.try_emplace(sequence, fresh()); }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override;
  void select(std::span<const QueryBlock> blocks, Selection& out) override;
  void save(std::int32_t sequence, SectionWriter& out) const override;
  void load(std::int32_t sequence, SectionReader& in, KvLayer kv) override;
  std::int64_t index_bytes() const override;
  bool per_sequence() const override { return false; }
  bool grows_with_window() const override { return true; }

 private:
  struct Scratch {
    HnswScratch graph;
    std::vector<float> scores;
    std::vector<Position> rows, best;
  };

  Position sink() const { return static_cast<Position>(geometry_.dense.sink); }
  Hnsw::Shape shape(int head) const {
    return {.m = options_.m,
            .ef_construction = options_.ef_construction,
            .seed = hash_seed(geometry_.seed, geometry_.layer, geometry_.kv_head_in_layer(head))};
  }
  Indexed fresh() const {
    Indexed indexed;
    for (int head = 0; head < geometry_.kv_heads; ++head) indexed.graphs.emplace_back(shape(head));
    return indexed;
  }
  GraphKeys keys_of(const KvRows& kv) const { return {.rows = kv, .first = sink()}; }
  /// Keys that are in the graphs when a query has so many far keys; the rest is scanned.
  static std::int64_t linked(const Indexed& indexed, std::int64_t far) {
    return far <= indexed.settled ? indexed.settled : far - (far - indexed.settled) % kBatch;
  }
  /// Makes the graphs those of the first `keys` keys.
  void advance(Indexed& indexed, std::int64_t keys, KvLayer kv);
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;
  void search(const SelectUnit& unit, const float* q, std::int64_t k, Scratch& s, SelectWork& work) const;

  Options options_;
  std::map<std::int32_t, Indexed> indexed_;  // by sequence
  std::vector<Scratch> scratch_;             // [workers]
};

void HnswSelector::advance(Indexed& indexed, std::int64_t keys, KvLayer kv) {
  for_each(geometry_.kv_heads, [&](std::int64_t head, int worker) {
    Hnsw& graph = indexed.graphs[at(head)];
    graph.cut(keys);
    graph.grow(keys, indexed.settled, keys_of(kv.heads[at(head)]), scratch_[at(worker)].graph);
  });
}

void HnswSelector::roll_back(std::int32_t sequence, std::int64_t tokens) {
  const auto found = indexed_.find(sequence);
  if (found == indexed_.end()) return;
  Indexed& indexed = found->second;
  const std::int64_t keys = std::max<std::int64_t>(0, tokens - sink());
  indexed.settled = std::min(indexed.settled, keys);
  for (Hnsw& graph : indexed.graphs) graph.cut(keys);
}

/// Tokens of a block between which no key joins the graphs choose side by side.
void HnswSelector::select(std::span<const QueryBlock> blocks, Selection& out) {
  for (const QueryBlock& block : blocks) {
    Indexed& indexed = indexed_.at(block.sequence);
    const auto far_keys = [&](std::int64_t token) {
      return std::int64_t{block.far_end(token, geometry_.dense)} - block.far_begin;
    };
    for (std::int64_t first = 0, last = 0; first < block.tokens; first = last) {
      check_cancel();
      const std::int64_t keys = linked(indexed, far_keys(first));
      while (last < block.tokens && linked(indexed, far_keys(last)) == keys) ++last;
      if (far_keys(last - 1) > 0) advance(indexed, keys, block.kv);
      const std::int64_t heads = geometry_.kv_heads, units = (last - first) * heads;
      std::vector<Selection> chosen(at(units));
      std::vector<SelectWork> works(at(units));
      for_each(units, [&](std::int64_t item, int worker) {
        const std::int64_t token = first + item / heads;
        const SelectUnit unit = {&block, token, static_cast<int>(item % heads), block.far_begin,
                                 block.far_end(token, geometry_.dense)};
        if (unit.far_keys() > 0) return choose(unit, worker, chosen[at(item)], works[at(item)]);
        chosen[at(item)].add_set(unit.set(all_heads(geometry_.group())));
      });
      for (std::size_t i = 0; i < chosen.size(); ++i) {
        out.append(chosen[i]);
        work_.bytes += works[i].bytes;
        work_.keys_scored += works[i].keys_scored;
      }
    }
  }
}

void HnswSelector::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const std::int64_t k = options_.k.of(unit.far_keys()), d = geometry_.head_dim;
  if (k >= unit.far_keys()) {
    out.add_set(unit.set(all_heads(geometry_.group())));
    return out.add_run(unit.far_begin, unit.far_end);
  }
  Scratch& s = scratch_[at(worker)];
  const std::span<const float> q = unit.group_of(unit.block->q, geometry_);  // [G, d]
  for (int g = 0; g < geometry_.group(); ++g) {
    out.add_set(unit.set(1u << g));
    search(unit, q.data() + g * d, std::max<std::int64_t>(1, k), s, work);
    for (const Position i : s.best) out.add_row(s.rows[at(i)]);
  }
}

/// s.best := numbers in s.rows of the k best keys among those that the walk found and those not linked yet.
void HnswSelector::search(const SelectUnit& unit, const float* q, std::int64_t k, Scratch& s,
                          SelectWork& work) const {
  const Hnsw& graph = indexed_.at(unit.block->sequence).graphs[at(unit.kv_head)];
  s.graph.scored = s.graph.expanded = 0;
  graph.search(q, std::max(options_.ef, k), keys_of(unit.kv()), s.graph);
  std::sort(s.graph.best.begin(), s.graph.best.end(),
            [](const auto& a, const auto& b) { return a.second < b.second; });
  s.rows.clear();
  s.scores.clear();
  for (const auto& [score, node] : s.graph.best) {
    if (const Position row = sink() + node; row < unit.far_end) {
      s.rows.push_back(row);
      s.scores.push_back(score);
    }
  }
  const std::int64_t behind = std::max<std::int64_t>(0, unit.far_keys() - graph.nodes()),
                     walked = std::ssize(s.scores);
  s.scores.resize(at(walked + behind));
  kernels().score_run(q, 1, unit.kv(), unit.far_end - behind, unit.far_end, s.scores.data() + walked, behind);
  for (std::int64_t i = 0; i < behind; ++i)
    s.rows.push_back(unit.far_end - static_cast<Position>(behind - i));
  s.best.clear();
  top_count(s.scores, k, 0, s.best);
  const std::int64_t scored = s.graph.scored + behind;
  work.bytes += scored * unit.kv().token_bytes() / 2 +
                s.graph.expanded * 2 * options_.m * std::int64_t{sizeof(std::int32_t)};
  work.keys_scored += scored;
}

void HnswSelector::save(std::int32_t sequence, SectionWriter& out) const {
  const auto found = indexed_.find(sequence);
  const Indexed& indexed = found == indexed_.end() ? fresh() : found->second;
  // What came after the context joins again when it is asked for; graphs that were cut down are made again.
  const bool whole = std::all_of(indexed.graphs.begin(), indexed.graphs.end(),
                                 [&](const Hnsw& graph) { return graph.nodes() >= indexed.settled; });
  const std::array<std::int64_t, 7> shape = {geometry_.kv_heads,
                                             options_.m,
                                             options_.ef_construction,
                                             sink(),
                                             indexed.settled,
                                             whole ? 1 : 0,
                                             static_cast<std::int64_t>(geometry_.seed)};
  std::vector<std::int32_t> ground, upper;
  std::vector<std::int64_t> offsets = {0};
  for (Hnsw graph : indexed.graphs) {
    if (!whole) break;
    graph.cut(indexed.settled);
    const std::vector<std::int32_t> own = graph.upper();
    ground.insert(ground.end(), graph.ground().begin(), graph.ground().end());
    upper.insert(upper.end(), own.begin(), own.end());
    offsets.push_back(std::ssize(upper));
  }
  out.add<std::int64_t>("shape", shape);
  out.add<std::int32_t>("ground", ground);
  out.add<std::int32_t>("upper", upper);
  out.add<std::int64_t>("offsets", offsets);
}

void HnswSelector::load(std::int32_t sequence, SectionReader& in, KvLayer kv) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto shape = in.values<std::int64_t>("shape");
  require(shape.size() == 7 && shape[0] == geometry_.kv_heads && shape[1] == options_.m &&
              shape[2] == options_.ef_construction,
          "the model's KV heads, and the spec's M and ef_construction");
  require(shape[6] == static_cast<std::int64_t>(geometry_.seed),
          "levels of the same seed: index the text again");
  require(shape[3] == sink() && shape[4] >= 0 && shape[4] <= std::max<std::int64_t>(0, kv.tokens - sink()) &&
              (shape[5] == 0 || shape[5] == 1),
          "keys behind the sink and within the context");
  const auto ground = in.values<std::int32_t>("ground");
  const auto upper = in.values<std::int32_t>("upper");
  const auto offsets = in.values<std::int64_t>("offsets");
  Indexed indexed = fresh();
  indexed.settled = shape[4];
  if (shape[5] == 1) {
    const std::int64_t each = shape[4] * 2 * options_.m;
    require(std::ssize(ground) == geometry_.kv_heads * each &&
                std::ssize(offsets) == geometry_.kv_heads + 1 && offsets.front() == 0 &&
                offsets.back() == std::ssize(upper) && std::is_sorted(offsets.begin(), offsets.end()),
            "sections of the sizes that 'shape' gives");
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      const auto own = upper.subspan(at(offsets[at(head)]), at(offsets[at(head + 1)] - offsets[at(head)]));
      indexed.graphs[at(head)] =
          Hnsw::restore(this->shape(head), shape[4], ground.subspan(at(head * each), at(each)), own,
                        "index '" + in.prefix() + "'");
    }
  }
  indexed_.insert_or_assign(sequence, std::move(indexed));
}

std::int64_t HnswSelector::index_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [sequence, indexed] : indexed_) {
    for (const Hnsw& graph : indexed.graphs) bytes += graph.bytes();
  }
  return bytes;
}

}  // namespace

MethodInfo hnsw_method() {
  return {
      .name = "hnsw",
      .aliases = {},
      .source = "HNSW (Malkov and Yashunin 2016) over keys: RetrievalAttention's baseline",
      .keys = {{"M", "links of a key on each level, twice as many on the lowest, 2 to 256", "16"},
               {"ef_construction", "keys held while a new one's neighbours are sought, 1 to 65536", "200"},
               {"ef", "keys held while a query is searched, at least k are, 1 to 1048576", "10"},
               {"k", "keys that a query takes of those, a count or a share of the far keys", "100"}},
      .dense = {},
      .dense_layers = 0,
      .make = make_of<HnswSelector, Options>,
      .index_bytes =
          [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
            // Links of level 0 in lists that grow by doubling; one key in M has upper levels.
            const Options options = Options::of(spec);
            return geometry.kv_heads * tokens * (options.m * std::int64_t{2 * 4} * 3 / 2 + 4 + 25);
          },
      .validate = check_of<Options>};
}

}  // namespace lode
