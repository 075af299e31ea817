// SPDX-License-Identifier: Apache-2.0
// ivf: an inverted file, RetrievalAttention's baseline (section 4.1 and figure 2b; there faiss's
// IndexIVFFlat). Keys are cut into nlist lists by k-means; a query scores the keys of the nprobe lists whose
// centroids it likes best, and attends the k best of them.
//
//   list(k) = argmax_c k . c,  |c| = 1       probed(q) = the nprobe largest q . c       (inner products)
//
// Keys and queries are taken after RoPE, so the products are attention's own scores; a list file for each KV
// head, a search for each query head. Centroids by spherical k-means in 10 rounds, as faiss trains them for
// inner products; they stay as build() trained them, later keys join their list. An index that was never
// built has one list.
#include "select/baselines/ivf.h"

#include <algorithm>
#include <cmath>

#include "ann/kmeans.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/shared/best_keys.h"
#include "select/shared/partition.h"
#include "select/shared/shares_index.h"

namespace lode {

namespace {

constexpr int kTogether = 8;               // queries of one gemv
constexpr std::int64_t kKeysPerList = 39;  // faiss warns below

class Ivf final : public PartitionSelector, public SharesIndex, public KeyLists {
 public:
  Ivf(const LayerGeometry& geometry, const IvfOptions& options)
      : PartitionSelector(geometry), options_(options), scratch_(static_cast<std::size_t>(workers())) {
    LODE_ASSERT(geometry.pool != nullptr);
  }

  void build(std::int32_t sequence, KvLayer kv) override {
    BucketIndex index = empty_index();
    if (const auto [first, keys] = training_keys(kv); keys > 0) {
      index = BucketIndex(index.begin(), geometry_.head_dim,
                          train_centroids(kv, first, keys, options_.lists_for(keys)));
    }
    extend_to_context(index, kv);
    set_index(sequence, std::move(index));
  }
  bool take_index(std::int32_t sequence, const Selector& other, KvLayer) override {
    const auto* const same = dynamic_cast<const Ivf*>(&other);
    return same != nullptr && same_amount(same->options_.lists, options_.lists) &&
           copy_index(sequence, *same);
  }
  KeyLists::Lists key_lists() const override { return {find_index(0), versions()}; }

 private:
  struct Scratch {
    std::vector<float> lists, scores;  // [G, nlist], [scanned]
    std::vector<Position> probes, scanned, best, rows_of_best;
    std::vector<float> scores_of_best;
    RowSet rows;
  };

  bool divides() const override { return true; }

  BucketIndex empty_index() const override {
    const std::vector<float> zero(static_cast<std::size_t>(geometry_.head_dim), 0.0f);
    return {static_cast<Position>(geometry_.dense.sink), geometry_.head_dim,
            std::vector<std::vector<float>>(static_cast<std::size_t>(geometry_.kv_heads), zero)};
  }
  const Rope* unrotate_by() const override { return nullptr; }
  void label(const BucketIndex& index, int head, Matrix<const float> keys,
             std::span<std::int32_t> labels) const override {
    assign_points(keys, index.centroids(head), labels, *geometry_.pool);
  }
  void choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) override;
  std::int64_t budget_of(const SelectUnit& unit) const {
    return std::max<std::int64_t>(1, options_.k.of(unit.all_far_keys()));
  }
  void search(const SelectUnit& unit, const float* q, std::span<const float> lists, Scratch& s,
              SelectWork& work) const;

  IvfOptions options_;
  std::vector<Scratch> scratch_;  // [workers]
};

void Ivf::choose(const SelectUnit& unit, int worker, Selection& out, SelectWork& work) {
  const BucketIndex& index = index_of(unit);
  const std::int64_t lists = index.buckets(), d = geometry_.head_dim, group = geometry_.group();
  if (options_.probes_for(lists) >= lists && options_.k.of(unit.all_far_keys()) >= unit.all_far_keys()) {
    out.add_set(unit.set(all_heads(geometry_.group())));
    return out.add_run(unit.far_begin, unit.far_end);
  }
  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  const std::span<const float> q = unit.group_of(unit.block->q, geometry_);  // [G, d]
  s.lists.resize(static_cast<std::size_t>(group * lists));
  for (std::int64_t g = 0; g < group; g += kTogether) {
    kernels().gemv(q.data() + g * d, static_cast<int>(std::min<std::int64_t>(kTogether, group - g)),
                   index.centroids(unit.kv_head).data(), DType::f32, d, 0, lists, s.lists.data() + g * lists,
                   lists);
  }
  work.bytes += lists * d * std::int64_t{sizeof(float)};
  work.keys_scored += lists;
  for (std::int64_t g = 0; g < group; ++g) {
    out.add_set(unit.set(1u << g));
    search(unit, q.data() + g * d,
           std::span(s.lists).subspan(static_cast<std::size_t>(g * lists), static_cast<std::size_t>(lists)),
           s, work);
    s.rows_of_best.clear();
    s.scores_of_best.clear();
    for (const Position i : s.best) {
      s.rows_of_best.push_back(s.scanned[static_cast<std::size_t>(i)]);
      s.scores_of_best.push_back(s.scores[static_cast<std::size_t>(i)]);
    }
    out.add_rows(s.rows_of_best);
    rank_rows(unit, {.budget = budget_of(unit)}, s.rows_of_best, s.scores_of_best);
  }
}

/// s.best := numbers in s.scanned, the rows of the probed lists, of those that one query attends.
void Ivf::search(const SelectUnit& unit, const float* q, std::span<const float> lists, Scratch& s,
                 SelectWork& work) const {
  const BucketIndex& index = index_of(unit);
  s.probes.clear();
  top_k(lists, options_.probes_for(std::ssize(lists)), 0, s.probes);
  s.rows.reset(unit.far_end);
  std::int64_t listed = 0;
  for (const Position list : s.probes) {
    const Run run = index.ordered_rows(unit.kv_head, list);
    for (Position row = run.begin; row < run.end; ++row) s.rows.insert(row);
    const std::span<const Position> rows = index.rows_behind(unit.kv_head, list, unit.far_end);
    for (const Position row : rows) s.rows.insert(row);
    listed += std::ssize(rows);
  }
  s.scanned.clear();
  s.rows.drain([&](std::int64_t row) { s.scanned.push_back(static_cast<Position>(row)); });
  const std::int64_t count = std::ssize(s.scanned);
  s.scores.resize(static_cast<std::size_t>(count));
  kernels().score_rows(q, 1, unit.kv(), s.scanned.data(), count, s.scores.data(), count);
  s.best.clear();
  top_count(s.scores, budget_of(unit), 0, s.best);
  work.bytes += count * unit.kv().token_bytes() / 2 + listed * std::int64_t{sizeof(Position)};
  work.keys_scored += count;
}

}  // namespace

IvfOptions IvfOptions::of(const Spec& spec) {
  IvfOptions options;
  if (spec.text("nlist")) options.lists = spec.amount("nlist", {});
  options.probes = spec.amount("nprobe", options.probes);
  options.k = spec.amount("k", options.k);
  return options;
}

std::int64_t IvfOptions::lists_for(std::int64_t keys) const {
  const std::int64_t wanted =
      lists ? lists->of(keys)
            : std::min(keys / kKeysPerList,
                       static_cast<std::int64_t>(4.0 * std::sqrt(static_cast<double>(keys))));
  return std::max<std::int64_t>(1, wanted);
}

std::int64_t IvfOptions::probes_for(std::int64_t of_lists) const {
  return std::max<std::int64_t>(1, probes.of(of_lists));
}

MethodInfo ivf_method() {
  return {.name = "ivf",
          .aliases = {},
          .source = "inverted file over keys (RetrievalAttention's baseline; faiss IndexIVFFlat)",
          .keys = {{"nlist", "lists of the context's keys, a count or a share of the keys",
                    "4 sqrt(keys), at most keys/39"},
                   {"nprobe", "lists whose keys a query scores, a count or a share of the lists", "16"},
                   {"k", "keys that a query takes of those, a count or a share of the far keys", "100"}},
          .dense = {},
          .dense_layers = 0,
          .revision = 2,
          .make = make_of<Ivf, IvfOptions>,
          .index_bytes =
              [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
                // Centroids, and one row id per key in lists that grow by doubling, so half as much again.
                return geometry.kv_heads * (IvfOptions::of(spec).lists_for(tokens) * geometry.head_dim *
                                                std::int64_t{sizeof(float)} +
                                            tokens * std::int64_t{sizeof(Position)} * 3 / 2);
              },
          .validate = check_of<IvfOptions>};
}

}  // namespace lode
