// SPDX-License-Identifier: Apache-2.0
// squeezed: keys are clustered once; a query compares with the clusters' centroids and attends every key of
// the clusters whose softmax estimate is above one threshold for the whole model. Squeezed Attention (Hooper
// et al.): section 3.1 for the clusters, equation 1 for the lookup, equations 2 and 3 for the hierarchy,
// section 6.1 for the figures (5 % and 1 % of the keys, the last 100 tokens exact).
//
// Scores of all tokens of one user input are averaged (section 4.1), and over the heads of a group, which the
// paper's models do not have. A parent's centroid is the mean of the raw keys below it, not of its children's
// centroids. Children of pruned parents are not read, and the thresholds of finer levels are calibrated with
// the denominators that the lookup has; the authors' code reads all and calibrates with full ones.
//
// Metric: the paper clusters by cosine (`metric=cosine`), which says little about scores: it mixes keys of
// different length, and most of what keys differ by is nothing that queries look at. The mean of such a
// cluster hides the one key that a query is about, at whatever threshold. By default keys are clustered by
// how differently queries of the context, turned to the positions behind it, score them (query_metric.h).
// docs/results/squeezed.md has what that buys. Likewise the first of several levels keeps 75 % of the keys,
// not 50 % (`kept1`).
//
// Centroids have 8 bits, with a scale for each (`centroids=f16`: 16): half of what a lookup reads. Thresholds
// are calibrated with the scores that these give; those of an older file, whose centroids had 16, are kept.
//
// Not in the paper: any number of levels, targets by mass and error, averages over stretches of `block`
// tokens, contexts that grow, and `tail`, by which pruned clusters count with their centroid's weight and the
// mean of their values.
//
// Growth: keys that come behind the clustered context are attended exactly until kGrowth of them can be
// clustered, as a part of their own. What a query sees is a function of the context's end and its own far
// keys: only parts that lie wholly among these count, the keys behind them are attended one by one. So an
// index that was appended to equals one that was built over the same context and appended to in any other
// steps. Roll back into a part forgets the part.
#include <fmt/format.h>

#include <array>
#include <cmath>

#include "base/rng.h"
#include "base/text.h"
#include "io/container.h"
#include "kernels/kernels.h"
#include "kernels/select/centroid_scores.h"
#include "lodestone/error.h"
#include "select/device_keys.h"
#include "select/methods.h"
#include "select/shared/orders_rows.h"
#include "select/shared/query_metric.h"
#include "select/shared/shares_index.h"
#include "select/shared/threshold_selector.h"
#include "select/squeezed/cluster_choice.h"
#include "select/squeezed/cluster_tree.h"

namespace lode {

namespace {

constexpr Position kGrowth = 128;
// levels=auto: so many nodes at the top, and for each child that a node has.
constexpr std::int64_t kMostAtTop = 1024, kAtTopPerChild = 128;
constexpr double kManyChildren = 8.0, kFewChildren = 4.0;  // levels=auto
// levels=auto: a level keeps as many keys as so many average nodes have, and all above the leaves together.
constexpr double kAutoNodes = 48.0, kAutoNodesInAll = 220.0;
constexpr double kPrunedAbove = 1.0 / 3.0;  // levels=auto: of what a level prunes, by the one above it
constexpr int kMostLevels = 16;
constexpr double kSlack = 2.0;  // a coarser level never keeps less than so many times the wanted keys
constexpr std::array<std::string_view, 2> kOffOn = {"off", "on"}, kMetrics = {"queries", "cosine"},
                                          kCentroids = {"q8", "f16"};
constexpr std::array<std::string_view, 4> kSpreads = {"off", "question", "decode", "on"};  // as Spreads

/// Children per node that a tree of levels=auto was built with.
double branch_of(const ClusterTree& tree) {
  const std::size_t steps = tree.levels.size() - 1;
  const double leaves = tree.levels.back().nodes(), top = tree.levels.front().nodes();
  return steps == 0 ? kManyChildren
                    : std::max(2.0, std::round(std::pow(leaves / top, 1.0 / static_cast<double>(steps))));
}

int levels_of(const Spec& spec) {
  try {
    return static_cast<int>(spec.integer("levels", 1, 1, kMostLevels));
  } catch (const InputError&) {
    throw InputError(fmt::format("attention spec '{}': key 'levels': expected 1 to {} or auto, found '{}'",
                                 spec.str(), kMostLevels, excerpt(*spec.text("levels"))));
  }
}

struct SqueezedOptions {
  Amount clusters = {0.05, true}, clusters1 = {0.01, true};
  int levels = 1;  ///< 0: auto
  /// Children per node; 0: levels between clusters and clusters1 are spaced evenly in logarithm, those of
  /// levels=auto as children_for() says.
  double branch = 0;
  double kept1 = 0.75;       ///< share of the keys below what the coarsest of several levels keeps
  bool kept1_asked = false;  ///< else levels=auto has its own
  bool by_queries = true;    ///< else by cosine
  bool q8 = true;            ///< centroids in 8 bits
  Spreads spreads = Spreads::all;
  bool spread_asked = false;  ///< else a file keeps its own setting
  ThresholdSelector::Options common;

  static SqueezedOptions of(const Spec& spec) {
    SqueezedOptions o;
    o.clusters = spec.amount("clusters", o.clusters);
    o.clusters1 = spec.amount("clusters1", o.clusters1);
    const bool is_auto = spec.text("levels") == "auto";
    expect_not_both(spec, "branch", "clusters1");
    o.levels = is_auto ? 0 : levels_of(spec);
    o.branch = static_cast<double>(spec.integer("branch", 0, 2, 1024));
    o.common = ThresholdSelector::Options::of(spec);
    o.kept1 = spec.number("kept1", o.kept1, 0.01, 1.0);
    o.kept1_asked = spec.text("kept1").has_value();
    o.by_queries = spec.choice("metric", kMetrics[0], kMetrics) == "queries";
    o.q8 = spec.choice("centroids", kCentroids[0], kCentroids) == "q8";
    const std::string spread = spec.choice("spread", o.q8 ? "on" : "off", kSpreads);
    o.spreads = static_cast<Spreads>(std::find(kSpreads.begin(), kSpreads.end(), spread) - kSpreads.begin());
    o.spread_asked = !o.q8 || spec.text("spread").has_value();
    o.common.tail = spec.choice("tail", kOffOn[0], kOffOn) == "on";
    return o;
  }

  /// A context of so many keys.
  bool clusters_like(const SqueezedOptions& other, std::int64_t keys) const {
    return same_amount(clusters, other.clusters) && same_amount(clusters1, other.clusters1) &&
           levels == other.levels && levels_for(keys) == other.levels_for(keys) &&
           children_for(keys) == other.children_for(keys) && by_queries == other.by_queries &&
           q8 == other.q8 && common.tail == other.common.tail;
  }

  /// Share of the keys to keep; targets that are none count as one in ten.
  double wanted() const {
    return common.target.kind == Target::Kind::sparsity ? 1.0 - common.target.value : 0.1;
  }

  /// levels=auto: whether a level keeps a number of its nodes, not a share, as the one above the leaves says.
  bool keeps_a_number(std::int64_t leaves) const {
    return kSlack * wanted() * static_cast<double>(leaves) / kFewChildren < kAutoNodes;
  }

  /// levels=auto: where a level keeps a share of its nodes, a lookup compares children / (children - 1) of
  /// what the leaves alone cost, so many children are best; where it keeps a number of them, children times
  /// as many as there are levels, so few are.
  double children_for(std::int64_t keys) const {
    if (levels > 0 || branch > 0) return branch;
    return keeps_a_number(clusters.of(keys)) ? kFewChildren : kManyChildren;
  }

  /// Nodes per level, coarsest first, of a part with `keys` of an index whose context has `all` keys: parts
  /// that came later have the context's shares and its number of levels, and so has `first`, its tree, which
  /// may be a file's of another branching.
  std::vector<std::int64_t> nodes(std::int64_t keys, std::int64_t all,
                                  const ClusterTree* first = nullptr) const {
    const auto n = static_cast<double>(all);
    const double finest = static_cast<double>(clusters.of(all)) / n;
    std::vector<double> shares = {finest};
    const int wanted = first != nullptr ? static_cast<int>(first->levels.size()) : levels_for(all);
    const double children = first != nullptr && levels == 0 ? branch_of(*first) : children_for(all),
                 coarsest = std::min(finest, static_cast<double>(clusters1.of(all)) / n);
    for (int up = 1; up < wanted; ++up) {
      const double along = static_cast<double>(up) / (wanted - 1);
      shares.push_back(children > 0 ? finest * std::pow(children, -up)
                                    : finest * std::pow(coarsest / finest, along));
    }
    std::vector<std::int64_t> out;
    for (auto share = shares.rbegin(); share != shares.rend(); ++share) {
      const auto count = static_cast<std::int64_t>(std::ceil(*share * static_cast<double>(keys) - 1e-6));
      out.push_back(std::clamp<std::int64_t>(count, 1, keys));
    }
    return out;
  }

  /// Share of all keys below what a level keeps, where the last one keeps `wanted`; `nodes` per level. What
  /// one query needs is rarely what a coarse node's mean shows: the heads that look things up have it
  /// anywhere among the coarser nodes. So with levels=auto each level prunes a third of what the one below it
  /// does, but for lookups that must not grow with the context, which keep a number of nodes.
  double kept_at(int level, double wanted, std::span<const std::int64_t> nodes) const {
    const int last = static_cast<int>(nodes.size()) - 1;
    if (level == last) return wanted;
    if (levels > 0 || kept1_asked)
      return std::max(std::pow(kept1, level + 1), std::min(1.0, kSlack * wanted));
    if (!keeps_a_number(nodes.back())) return 1.0 - (1.0 - wanted) * std::pow(kPrunedAbove, last - level);
    const double some = std::min(kAutoNodes, kAutoNodesInAll / last),
                 own = static_cast<double>(nodes[static_cast<std::size_t>(level)]);
    return std::min(1.0, std::max(kSlack * wanted, some / own));
  }

  /// levels=auto: several only where a level keeps a number of its nodes, or where they are asked for. Those
  /// that keep a share prune little and are slower than one level, on a GPU and on a CPU.
  int levels_for(std::int64_t keys) const {
    if (levels > 0) return levels;
    auto nodes = static_cast<double>(clusters.of(keys));
    const bool asked = branch > 0 || kept1_asked;
    if (nodes <= kMostAtTop || (!asked && !keeps_a_number(clusters.of(keys)))) return 1;
    const double children = children_for(keys),
                 most = std::min<double>(kMostAtTop, kAtTopPerChild * children);
    int count = 1;
    for (; nodes > most && count < kMostLevels; ++count) nodes = std::ceil(nodes / children);
    return count;
  }
};

/// Asks the memory for the first lines of what will be read; it foresees the others itself.
void ask_for(std::span<const std::byte> bytes) {
  constexpr std::size_t kLine = 64, kMostLines = 4;
  for (std::size_t at = 0; at < bytes.size() && at < kMostLines * kLine; at += kLine)
    __builtin_prefetch(bytes.data() + at);
}

/// A row of 8 bits and its scale.
std::int64_t coded_bytes(std::int64_t d) {
  return d + std::int64_t{sizeof(float)};
}

/// sqrt(2 log N) of nodes with N keys: deviations that the largest of N normal numbers is off. Few sizes of
/// clusters occur often.
void most_spreads(std::span<const std::int32_t> keys, float* most) {
  static const auto known = [] {
    std::array<float, 1024> of = {};
    for (std::size_t n = 1; n < of.size(); ++n) of[n] = std::sqrt(2.0f * std::log(static_cast<float>(n)));
    return of;
  }();
  const float* const of = known.data();
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto n = static_cast<std::size_t>(keys[i]);
    most[i] = n < known.size() ? of[n] : std::sqrt(2.0f * std::log(static_cast<float>(n)));
  }
}

class Squeezed final : public ThresholdSelector,
                       public ClusterChooser,
                       public SharesIndex,
                       public OrdersRows {
 public:
  Squeezed(const LayerGeometry& geometry, const SqueezedOptions& options)
      : ThresholdSelector(geometry, options.common), own_(options) {
    LODE_ASSERT(geometry.pool != nullptr);
  }

  bool take_index(std::int32_t sequence, const Selector& other, KvLayer) override {
    const auto* const same = dynamic_cast<const Squeezed*>(&other);
    const Index* const its = same != nullptr ? same->find(sequence) : nullptr;
    if (its == nullptr || !own_.clusters_like(same->own_, its->context()) ||
        (its->spreads == Spreads::none) != (own_.spreads == Spreads::none) || !copy_state(sequence, *same))
      return false;
    Index& index = indexes_.insert_or_assign(sequence, *its).first->second;
    index.ordered_end = 0;
    index.spreads = own_.spreads;
    ++version_;
    return true;
  }
  void append(std::int32_t sequence, KvLayer kv, Position far_end) override {
    Index& index = index_of(sequence);
    if (index.metric.empty()) learn_metric(index, sequence, kv, far_end);  // never built
    while (index.end(sink()) + kGrowth <= far_end) {
      const Position begin = index.end(sink());
      add(index, kv, begin, begin + kGrowth);
    }
  }
  void roll_back(std::int32_t sequence, std::int64_t tokens) override {
    ThresholdSelector::roll_back(sequence, tokens);
    const auto found = indexes_.find(sequence);
    if (found == indexes_.end()) return;
    LODE_ASSERT(tokens >= found->second.ordered_end);
    if (std::erase_if(found->second.segments,
                      [&](const ClusterSegment& segment) { return segment.end > tokens; }) > 0)
      ++version_;
  }
  /// Part after part, leaf by leaf.
  RowOrder row_order(std::int32_t sequence, int head, Position end) const override {
    RowOrder order = {.begin = sink(), .tokens = {}};
    const Index* const index = find(sequence);
    for (std::size_t part = 0; index != nullptr && part < index->segments.size(); ++part) {
      const ClusterSegment& segment = index->segments[part];
      if (segment.end > end) break;
      const std::vector<Position>& rows = segment.heads[static_cast<std::size_t>(head)].rows;
      order.tokens.insert(order.tokens.end(), rows.begin(), rows.end());
    }
    return order;
  }
  void rows_ordered(std::int32_t sequence, Position end) override {
    if (const auto found = indexes_.find(sequence); found != indexes_.end()) found->second.ordered_end = end;
  }
  Position ordered_end(std::int32_t sequence) const override {
    const auto found = indexes_.find(sequence);
    return found == indexes_.end() ? 0 : found->second.ordered_end;
  }
  std::string why_not_on_device() const override {
    if (own_.levels > kMostDeviceLevels) return "so many levels are read on the host";
    if (own_.spreads != Spreads::none && !own_.q8)
      return "spreads beside centroids of 16 bits are read on the host";
    return options_.tail ? "the tail is added on the host" : "";
  }
  std::optional<ClusterChoice> cluster_choice() const override {
    const Index* const index = find(0);
    ClusterChoice choice = {.version = version_, .segments = {}};
    if (index == nullptr) return choice;
    choice.segments = index->segments;
    choice.squares = options_.squares;
    choice.spreads = index->spreads;
    const std::vector<double> none(static_cast<std::size_t>(levels(0)), 0.0);
    choice.thresholds = {.at = {none, none}, .power = none};
    if (options_.target.is_everything()) return choice;
    const Calibration* const known = calibration(0);
    if (known == nullptr || known->queries == 0) return std::nullopt;
    choice.thresholds = known->thresholds;
    return choice;
  }
  std::int64_t index_bytes() const override {
    std::int64_t bytes = ThresholdSelector::index_bytes();
    for (const auto& [sequence, index] : indexes_) {
      for (const ClusterSegment& segment : index.segments) {
        for (const ClusterTree& tree : segment.heads) bytes += tree.bytes();
      }
      for (const auto& metric : index.metric) bytes += std::ssize(metric) * std::int64_t{sizeof(float)};
    }
    return bytes;
  }

 private:
  struct Index {
    std::vector<ClusterSegment> segments = {};  // one after the other, from the sink on
    /// [Hkv][d, d], of the context as it was first; empty: cosine
    std::vector<std::vector<float>> metric = {};
    Position ordered_end = 0;         // rows of the parts that end up to it lie leaf by leaf
    Spreads spreads = Spreads::none;  // of all parts, the spec's or a file's
    Position end(Position sink) const { return segments.empty() ? sink : segments.back().end; }
    /// Keys that shares are of: those of the first part.
    std::int64_t context() const {
      return segments.empty() ? 0 : std::int64_t{segments[0].end} - segments[0].begin;
    }
  };

  Position sink() const { return static_cast<Position>(geometry_.dense.sink); }
  Index& index_of(std::int32_t sequence) {
    return indexes_.try_emplace(sequence, Index{.spreads = own_.spreads}).first->second;
  }
  const Index* find(std::int32_t sequence) const {
    const auto found = indexes_.find(sequence);
    return found != indexes_.end() && !found->second.segments.empty() ? &found->second : nullptr;
  }
  bool adds_spreads(std::int32_t sequence, QueryKind kind) const override {
    return adds(indexes_.at(sequence).spreads, kind);
  }
  const ClusterTree& tree(const ChoiceUnit& unit, std::int32_t part) const {
    return indexes_.at(unit.block->sequence)
        .segments[static_cast<std::size_t>(part)]
        .heads[static_cast<std::size_t>(unit.kv_head)];
  }
  const ClusterLevel& level_of(const ChoiceUnit& unit, std::int32_t part, int level) const {
    return tree(unit, part).levels[static_cast<std::size_t>(level)];
  }

  void add(Index& index, KvLayer kv, Position begin, Position end) {
    ++version_;
    const std::int64_t all = index.segments.empty() ? end - begin : index.context();
    std::vector<ClusterTreeOptions> options;  // [Hkv]
    for (std::size_t head = 0; head < static_cast<std::size_t>(geometry_.kv_heads); ++head) {
      options.push_back(
          {.nodes = own_.nodes(end - begin, all,
                               index.segments.empty() ? nullptr : &index.segments[0].heads[head]),
           .values = options_.tail,
           .spreads = index.spreads != Spreads::none,
           .q8 = own_.q8,
           .seed = hash_seed(geometry_.seed, geometry_.layer,
                             geometry_.kv_head_in_layer(static_cast<int>(head)), begin),
           .metric =
               index.metric.empty() ? std::span<const float>{} : std::span<const float>(index.metric[head])});
    }
    ClusterSegment segment = {.begin = begin, .end = end, .heads = {}};
    const std::vector<KeyClusters> by_device = clusters_by_device(index, begin, end, options);
    segment.heads.resize(options.size());
    const auto build = [&](std::size_t head) {
      KeyClusters ordered;
      if (!by_device.empty()) {
        ordered = in_order(by_device[head], geometry_.head_dim);
        options[head].clusters = &ordered;
      }
      segment.heads[head] = build_cluster_tree(kv.heads[head], begin, end, options[head], *geometry_.pool);
    };
    // What the device leaves is little: a head a thread. Clusters made here need all threads for one.
    if (!by_device.empty())
      for_each(std::ssize(options), [&](std::int64_t head, int) { build(static_cast<std::size_t>(head)); });
    else
      for (std::size_t head = 0; head < options.size(); ++head) build(head);
    index.segments.push_back(std::move(segment));
  }
  /// Of each head, where a GPU that has the keys makes them; else nothing.
  std::vector<KeyClusters> clusters_by_device(const Index& index, Position begin, Position end,
                                              std::span<const ClusterTreeOptions> options) const {
    const KeysOnDevice keys = {geometry_.layer, heads_in_layer(geometry_), begin, end};
    const std::int64_t wanted = std::clamp<std::int64_t>(options[0].nodes.back(), 1, keys.count());
    if (!on_device(keys, wanted)) return {};
    std::vector<std::uint64_t> seeds;
    for (const ClusterTreeOptions& of_head : options) seeds.push_back(hash_seed(of_head.seed, 0));
    return device_->clusters(keys, {.clusters = wanted, .seeds = seeds, .metrics = index.metric});
  }

  void index_context(std::int32_t sequence, KvLayer kv, Position begin, Position end) override {
    Index& index = index_of(sequence);
    LODE_ASSERT(begin >= index.ordered_end);  // rows in the clusters' order are no text to index
    std::erase_if(index.segments, [&](const ClusterSegment& segment) { return segment.end > begin; });
    LODE_ASSERT(index.end(sink()) == begin);
    if (index.segments.empty()) learn_metric(index, sequence, kv, static_cast<Position>(kv.tokens));
    add(index, kv, begin, end);
  }
  void start(std::int32_t sequence, KvLayer kv) override {
    Index& index = indexes_[sequence] = {.spreads = own_.spreads};
    const auto end = static_cast<Position>(kv.tokens);
    if (indexed_end(kv.tokens) <= sink()) learn_metric(index, sequence, kv, end);  // too short for a part
    ++version_;
  }
  /// What all parts of an index are clustered by; questions stand behind `position`.
  void learn_metric(Index& index, std::int32_t sequence, KvLayer kv, Position position) {
    if (own_.by_queries)
      index.metric =
          query_metric(sample(sequence), geometry_, position,
                       {.kv = kv, .begin = sink(), .end = indexed_end(position), .device = device_});
  }

  ClusterShape shape(int levels, Spreads spreads) const {
    return {.heads = geometry_.kv_heads,
            .head_dim = geometry_.head_dim,
            .levels = levels,
            .begin = sink(),
            .values = options_.tail,
            .spreads = spreads,
            .q8 = own_.q8};
  }
  void save_index(std::int32_t sequence, SectionWriter& out) const override {
    const auto found = indexes_.find(sequence);
    const Index none = {.spreads = own_.spreads}, &index = found != indexes_.end() ? found->second : none;
    save_segments(index.segments, shape(levels(sequence), index.spreads), out);
    std::vector<float> metric;  // [Hkv, d, d]
    for (const std::vector<float>& head : index.metric) metric.insert(metric.end(), head.begin(), head.end());
    out.add<float>("metric", metric);
  }
  /// Only an index without parts may be without the metric that the spec asks for.
  std::vector<std::vector<float>> load_metric(const SectionReader& in, bool parts) const {
    const auto saved = in.values<float>("metric");
    const std::int64_t one = std::int64_t{geometry_.head_dim} * geometry_.head_dim;
    const bool none = saved.empty() && (!own_.by_queries || !parts);
    if ((!none && (!own_.by_queries || std::ssize(saved) != geometry_.kv_heads * one)) ||
        !std::all_of(saved.begin(), saved.end(), [](float x) { return std::isfinite(x); }))
      throw InputError("index '" + in.prefix() +
                       "': expected the metric that the spec asks for, found none or another");
    std::vector<std::vector<float>> out;
    for (auto at = saved.begin(); at != saved.end(); at += one) out.emplace_back(at, at + one);
    return out;
  }
  Position load_index(std::int32_t sequence, const SectionReader& in, KvLayer kv,
                      std::int64_t levels) override {
    const int expected = levels > 0        ? static_cast<int>(levels)
                         : own_.levels > 0 ? own_.levels
                                           : saved_levels(in);
    if (own_.levels > 0 && expected != own_.levels)
      throw InputError("index '" + in.prefix() + "': expected the calibration of " +
                       std::to_string(own_.levels) + " levels, found " + std::to_string(expected));
    const Spreads spreads = own_.spread_asked ? own_.spreads : saved_spreads(in);
    Index index = {load_segments(shape(expected, spreads), kv.tokens, in), {}, 0, spreads};
    index.metric = load_metric(in, !index.segments.empty());
    const Position end = index.end(sink());
    indexes_.insert_or_assign(sequence, std::move(index));
    ++version_;
    return end;
  }

  int levels(std::int32_t sequence) const override {
    const Index* const index = find(sequence);
    return index != nullptr ? static_cast<int>(index->segments[0].heads[0].levels.size())
                            : own_.levels_for(0);
  }
  std::optional<ScoredClusters> scored_clusters(std::int32_t sequence) const override {
    const Index* const index = find(sequence);
    if (index == nullptr || levels(sequence) != 1 || options_.tail) return std::nullopt;
    ScoredClusters out = {.type = index->segments[0].heads[0].type, .heads = {}};
    out.heads.resize(index->segments[0].heads.size());
    const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
    for (const ClusterSegment& segment : index->segments) {
      for (std::size_t head = 0; head < out.heads.size(); ++head) {
        ScoredClusters::Head& to = out.heads[head];
        const ClusterTree& tree = segment.heads[head];
        const ClusterLevel& level = tree.levels[0];
        if (tree.type != out.type) return std::nullopt;  // a part whose numbers do not fit halves
        append(to.centroids, level.centroids);
        append(to.scales, level.scales);
        append(to.spreads, level.spreads);
        append(to.spread_scales, level.spread_scales);
        if (to.first.empty()) to.first.push_back(0);
        for (const std::int32_t keys : level.keys) to.first.push_back(to.first.back() + keys);
        append(to.rows, tree.rows);
      }
    }
    return out;
  }
  double kept_share(std::int32_t sequence, int level) const override {
    const Index* const index = find(sequence);
    std::vector<std::int64_t> nodes;
    if (index == nullptr) nodes.assign(static_cast<std::size_t>(levels(sequence)), 1);
    for (std::size_t l = 0; index != nullptr && l < index->segments[0].heads[0].levels.size(); ++l)
      nodes.push_back(index->segments[0].heads[0].levels[l].nodes());
    return own_.kept_at(level, own_.wanted(), nodes);
  }

  Position top(const ChoiceUnit& unit, std::vector<NodeRange>& ranges) const override {
    const Index* const index = find(unit.block->sequence);
    Position end = unit.far_begin;
    for (std::size_t part = 0; index != nullptr && part < index->segments.size(); ++part) {
      const ClusterSegment& segment = index->segments[part];
      if (segment.end > unit.far_first) break;
      end = segment.end;
      const ClusterTree& own = segment.heads[static_cast<std::size_t>(unit.kv_head)];
      ranges.push_back({static_cast<std::int32_t>(part), 0, own.levels[0].nodes()});
    }
    return end;
  }
  void node_keys(const ChoiceUnit& unit, int level, const NodeRange& range,
                 std::int32_t* keys) const override {
    std::copy_n(level_of(unit, range.part, level).keys.data() + range.begin, range.count(), keys);
  }
  /// With spreads, z adds what the log of the mean of exp(q . k) over a node's N keys is above the exponent's
  /// mean, if q . k is normal there with the variance s^2 = sum of (q_i^2 + q_j^2) variance over planes
  /// (i, j): s^2 / 2, as long as N keys can show it. Means of exponentials of few numbers are made by the
  /// largest, near s sqrt(2 log N): beyond s = sqrt(2 log N) the sum is linear in s (Derrida's random energy
  /// model). A key alone adds nothing.
  void logits(const ChoiceUnit& unit, int level, const NodeRange& range, const float* q, int rows, float* z,
              std::int64_t stride) const override {
    thread_local std::vector<float> most;
    const ClusterTree& own = tree(unit, range.part);
    const ClusterLevel& level_nodes = own.levels[static_cast<std::size_t>(level)];
    const auto begin = static_cast<std::size_t>(range.begin), count = static_cast<std::size_t>(range.count());
    const std::int64_t d = geometry_.head_dim;
    NodeRows nodes = {.type = own.type,
                      .centroids = level_nodes.centroids.data() + range.begin * d * bytes_of(own.type),
                      .scales = own_.q8 ? level_nodes.scales.data() + begin : nullptr,
                      .count = range.count(),
                      .d = d};
    if (adds_spreads(unit.block->sequence, unit.kind)) {
      if (most.size() < count) most.resize(count);
      most_spreads(std::span(level_nodes.keys).subspan(begin, count), most.data());
      nodes.spreads = level_nodes.spreads.data() + range.begin * spread_dims(d);
      nodes.spread_scales = level_nodes.spread_scales.data() + begin;
      nodes.most = most.data();
    }
    centroid_score_kernels().score(q, rows, nodes, z, stride);
  }
  NodeRange children(const ChoiceUnit& unit, int level, const NodeRange& range) const override {
    const std::vector<std::int32_t>& first = level_of(unit, range.part, level).first;
    return {range.part, first[static_cast<std::size_t>(range.begin)],
            first[static_cast<std::size_t>(range.end)]};
  }
  std::size_t add_runs(const ChoiceUnit& unit, std::span<const NodeRange> leaves,
                       Selection& out) const override {
    const Index& index = indexes_.at(unit.block->sequence);
    const auto head = static_cast<std::size_t>(unit.kv_head);
    std::size_t added = 0;
    for (; added < leaves.size(); ++added) {
      const NodeRange& range = leaves[added];
      const ClusterSegment& part = index.segments[static_cast<std::size_t>(range.part)];
      if (part.end > index.ordered_end) break;
      const std::vector<std::int32_t>& first = part.heads[head].levels.back().first;
      out.add_run(part.begin + first[static_cast<std::size_t>(range.begin)],
                  part.begin + first[static_cast<std::size_t>(range.end)]);
    }
    return added;
  }
  /// Leaves lie scattered in memory: what is some leaves ahead is asked for.
  std::int64_t add_rows(const ChoiceUnit& unit, std::span<const NodeRange> leaves,
                        RowSet& rows) const override {
    constexpr std::size_t kAhead = 16;
    const std::vector<ClusterSegment>& parts = indexes_.at(unit.block->sequence).segments;
    const auto head = static_cast<std::size_t>(unit.kv_head);
    const auto keys_of = [&](const NodeRange& range) {
      const ClusterTree& own = parts[static_cast<std::size_t>(range.part)].heads[head];
      const std::vector<std::int32_t>& first = own.levels.back().first;
      const std::int32_t begin = first[static_cast<std::size_t>(range.begin)];
      return std::span(own.rows.data() + begin,
                       static_cast<std::size_t>(first[static_cast<std::size_t>(range.end)] - begin));
    };
    std::int64_t count = 0;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      if (i + kAhead < leaves.size()) ask_for(std::as_bytes(keys_of(leaves[i + kAhead])));
      const std::span<const Position> keys = keys_of(leaves[i]);
      for (const Position key : keys) rows.insert(key);
      count += std::ssize(keys);
    }
    return count;
  }
  /// A centroid with its scale and its N, and with a tail, which reads them for every node that is pruned,
  /// the mean of its values.
  std::int64_t node_bytes(const ChoiceUnit& unit) const override {
    const Index* const index = find(unit.block->sequence);
    if (index == nullptr) return 0;
    const ClusterTree& own = index->segments[0].heads[static_cast<std::size_t>(unit.kv_head)];
    const std::int64_t d = geometry_.head_dim;
    return (own_.q8 ? coded_bytes(d) : d * bytes_of(own.type)) +
           (adds(index->spreads, unit.kind) ? coded_bytes(spread_dims(d)) : 0) +
           (options_.tail ? d * bytes_of(own.values_type) : 0) + std::int64_t{sizeof(std::int32_t)};
  }
  std::int64_t row_bytes() const override { return sizeof(Position); }
  void mean_value(const ChoiceUnit& unit, int level, std::int32_t part, std::int32_t node,
                  float* out) const override {
    const ClusterTree& own = tree(unit, part);
    const std::int64_t d = geometry_.head_dim, row = d * bytes_of(own.values_type);
    kernels().widen(own.levels[static_cast<std::size_t>(level)].values.data() + node * row, own.values_type,
                    d, out);
  }

  static int saved_levels(const SectionReader& in) {
    const auto numbers = in.values<std::int64_t>("shape");
    return numbers.size() < 3 ? 1 : static_cast<int>(std::clamp<std::int64_t>(numbers[2], 1, kMostLevels));
  }

  const SqueezedOptions own_;
  std::map<std::int32_t, Index> indexes_;  // by sequence
  std::int64_t version_ = 0;               ///< counts changes of the indexes
};

}  // namespace

ClusterPlan cluster_plan(const Spec& spec, std::int64_t keys) {
  const SqueezedOptions options = SqueezedOptions::of(spec);
  ClusterPlan plan = {.nodes = options.nodes(keys, keys), .kept = {}};
  for (int level = 0; level < static_cast<int>(plan.nodes.size()); ++level)
    plan.kept.push_back(options.kept_at(level, options.wanted(), plan.nodes));
  return plan;
}

Spreads wanted_spreads(const Spec& spec) {
  return SqueezedOptions::of(spec).spreads;
}

MethodInfo squeezed_method() {
  return {
      .name = "squeezed",
      .aliases = {},
      .source = "Squeezed Attention (Hooper et al. 2024)",
      .keys = {{"levels",
                "levels of centroids, 1 to 16, or auto: one, but where few keys of many are kept as many as "
                "leave 512 at the top",
                "1"},
               {"clusters", "centroids of the finest level, a count or a share of the keys", "5%"},
               {"clusters1", "centroids of the coarsest of several levels, a count or a share of the keys",
                "1%"},
               {"metric",
                "what keys are clustered by: queries (how differently the context's queries score "
                "them) or cosine (the paper's)",
                "queries"},
               {"kept1", "share of the keys that the coarsest of several levels keeps, 0.01 to 1",
                "0.75; with levels=auto each level keeps 48 nodes, or with a branch of one's own where many "
                "keys are kept prunes a third of what the one below does"},
               {"branch", "instead of clusters1: children per centroid, 2 to 1024",
                "with levels=auto 8, or 4 where few keys are kept"},
               {"sparsity",
                "share of the keys to leave out, calibrated over all layers and heads, 0 to 0.999999", "0.9"},
               {"mass", "instead of sparsity: share of the attention to capture, 0.01 to 1", ""},
               {"error", "instead of sparsity: relative error of the output to allow, 0 to 10", ""},
               {"centroids", "bits of a centroid: q8 (8 and a scale) or f16 (16)", "q8"},
               {"spread",
                "whose scores of clusters add what their keys differ by (8 bits for two dimensions): off, "
                "on, question (tokens that choose together) or decode (single ones)",
                "on; off with centroids=f16"},
               {"tail", "whether pruned clusters count with centroid and mean value: off or on", "off"},
               {"average", "of scores over a question and a group: squares (root of their mean) or plain",
                "squares"},
               {"block", "question tokens whose scores are averaged, 1 to 1048576", "the whole question"}},
      .dense = {.sink = 0, .window = ThresholdSelector::kLast, .from_context = true},
      .dense_layers = 0,
      .make = make_of<Squeezed, SqueezedOptions>,
      .index_bytes =
          [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
            const SqueezedOptions options = SqueezedOptions::of(spec);
            std::int64_t bytes = tokens * std::int64_t{sizeof(Position)};
            for (const std::int64_t nodes :
                 options.nodes(std::max<std::int64_t>(1, tokens), std::max<std::int64_t>(1, tokens)))
              bytes += nodes *
                       ((options.q8 ? coded_bytes(geometry.head_dim) : 2 * geometry.head_dim) +
                        (options.spreads != Spreads::none ? coded_bytes(spread_dims(geometry.head_dim)) : 0) +
                        (options.common.tail ? 2 * geometry.head_dim : 0) + 8);
            if (options.by_queries)
              bytes += std::int64_t{geometry.head_dim} * geometry.head_dim * std::int64_t{sizeof(float)};
            return geometry.kv_heads * bytes + QuerySample::bytes_for(geometry, tokens);
          },
      .validate = check_of<SqueezedOptions>,
      .finish = &ThresholdSelector::finish};
}

}  // namespace lode
