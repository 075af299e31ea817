// SPDX-License-Identifier: Apache-2.0
// Calibration over all layers (Squeezed Attention, section 3.2 and appendix C), on every second query of a
// sample; others tell what was achieved. Differs from the authors' code: log-sum-exp instead of bare
// exponentials; thresholds for single queries and, by their number, for queries that are averaged; the
// thresholds of finer levels are found with the same restricted denominators as the lookup's; targets by
// captured mass and by output error.
//
// Differs from the paper: not the last 100 queries where they are, but queries from all over the context,
// turned to positions behind it. What the last tokens attend to most, the text right before them, is indexed,
// and makes all other clusters' shares of the softmax small: a threshold from these lets through 13 to 15 %
// of the keys where 10 were asked for, since of a question and an answer such neighbours are in the window.
#include <algorithm>
#include <cmath>

#include "base/relative_error.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/attention.h"
#include "lodestone/error.h"
#include "select/shared/threshold_selector.h"

namespace lode {

namespace {

constexpr int kHalvings = 12;  // of the range of log thresholds: 20 / 2^12 is below the histogram's bins
constexpr double kLowestLog = -12.0, kHighestLog = 8.0;
constexpr int kRelaxations = 3;  // of the coarser levels, when what they keep is not enough for the target
constexpr std::int64_t kMostHeldOut = 64;  // queries
constexpr std::int64_t kFewest = 32;       // queries of a sample that say anything

/// Sums of what `Achieved` is the mean of.
struct Tally {
  double kept = 0, keys = 0, mass = 0, error = 0, queries = 0;
  void operator+=(const Tally& other) {
    kept += other.kept, keys += other.keys, mass += other.mass, error += other.error;
    queries += other.queries;
  }
  Achieved mean() const {
    if (queries == 0 || keys == 0) return {};
    return {1.0 - kept / keys, mass / queries, error / queries};
  }
};

/// Of Thresholds: by level, where thresholds are `few` for so few tokens and `many` for so many.
std::vector<double> powers_between(const std::vector<double>& few, std::int64_t tokens,
                                   const std::vector<double>& many, std::int64_t more) {
  std::vector<double> out(few.size(), 0.0);
  for (std::size_t l = 0; l < many.size(); ++l) {
    if (more > tokens && few[l] > 0.0 && many[l] > few[l])
      out[l] = std::min(
          Thresholds::kMostPower,
          std::log(many[l] / few[l]) / std::log(static_cast<double>(more) / static_cast<double>(tokens)));
  }
  return out;
}

/// At most `most` of the first `count` odd or even places of a sample, evenly spread.
std::vector<std::int64_t> every_second(std::int64_t count, bool odd, std::int64_t most) {
  const std::int64_t half = (count + (odd ? 0 : 1)) / 2, kept = std::min(half, most);
  std::vector<std::int64_t> out;
  for (std::int64_t i = 0; i < kept; ++i) out.push_back(2 * (i * half / kept) + (odd ? 1 : 0));
  return out;
}

}  // namespace

/// Queries of one layer that stand behind the context, as a block whose far keys are the indexed ones.
struct ThresholdSelector::Trial {
  ThresholdSelector* layer = nullptr;
  QueryKind kind = QueryKind::alone;
  QueryBlock block;
  std::vector<float> full, full_lse;  // [T, Hq, d], [T, Hq], when exact attention has been computed

  Trial(ThresholdSelector& of, QueryKind kind_, std::int32_t sequence, KvLayer kv, std::span<const float> q)
      : layer(&of), kind(kind_) {
    block = {.sequence = sequence,
             .phase = kind == QueryKind::together ? Phase::question : Phase::generation,
             .begin = static_cast<Position>(kv.tokens),
             .tokens = std::ssize(q) / (of.geometry_.query_heads * of.geometry_.head_dim),
             .q = q,
             .q_unrotated = {},
             .kv = kv,
             .far_begin = static_cast<Position>(of.geometry_.dense.sink),
             .far_limit = of.states_.at(sequence).context_end};
  }

  std::vector<ChoiceUnit> units() const {
    return layer->units_of({&block, 1}, {.sink = block.far_begin, .window = 1});
  }
  double keys() const { return static_cast<double>(block.far_limit - block.far_begin); }

  /// Scores of the nodes that a level reads for a unit, weighted by their keys.
  void add_level(const ChoiceUnit& unit, int level, int worker, ScoreHistogram& out) const;
  /// Attends each token's group of heads over the runs and rows that `keys_of(token, head)` gives.
  void attend(const auto& keys_of, std::vector<float>& output, std::vector<float>& lse) const;
  void attend_all();
  void take_full(Trial& of_same_queries) {
    full = std::move(of_same_queries.full);
    full_lse = std::move(of_same_queries.full_lse);
  }
  void measure(Tally& tally);
  /// Adds to a tally what outputs of query row `row` are off from full attention.
  void compare(std::int64_t row, const float* output, float lse, Tally& tally) const;
  static Tally measure_all(std::span<Trial> trials);

  /// Tokens that choose together, and as whose scores add spreads.
  std::int64_t together() const {
    if (is_alone()) return 1;
    return layer->options_.stretch > 0 ? std::min(layer->options_.stretch, block.tokens) : block.tokens;
  }
  bool is_alone() const { return kind == QueryKind::alone || layer->options_.stretch == 1; }
  ScoringQueries scoring() const {
    return {
        .layer = layer->geometry_.layer,
        .q = block.q,
        .together = together(),
        .scale = layer->geometry_.scale,
        .squares = layer->options_.squares,
        .spreads = layer->adds_spreads(block.sequence, is_alone() ? QueryKind::alone : QueryKind::together)};
  }
  void measure_on_device(Tally& tally);
};

/// For as long as it lives, a device has the clusters of all layers and scores them, if it can.
class ThresholdSelector::OnDevice {
 public:
  OnDevice(std::span<ThresholdSelector* const> layers, std::int32_t sequence, std::int64_t most_tokens)
      : layers_(layers), device_(layers[0]->device_) {
    bool held = false;
    try {
      held = hold(sequence, most_tokens);
    } catch (...) {
      forget();
      throw;
    }
    if (!held) forget();  // those of the first layers, which would take memory for nothing
    for (ThresholdSelector* layer : layers_) layer->scored_by_device_ = held;
  }
  ~OnDevice() {
    for (ThresholdSelector* layer : layers_) layer->scored_by_device_ = false;
    forget();
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  bool hold(std::int32_t sequence, std::int64_t most_tokens) const {
    return device_ != nullptr && std::ranges::all_of(layers_, [&](const ThresholdSelector* layer) {
             const LayerGeometry& g = layer->geometry_;
             if (layer->device_ != device_ || !g.covered.empty()) return false;
             const auto clusters = layer->scored_clusters(sequence);
             return clusters.has_value() && device_->hold_clusters(g.layer, *clusters, most_tokens);
           });
  }
  void forget() const {
    if (device_ != nullptr) device_->forget_clusters();
  }
  std::span<ThresholdSelector* const> layers_;
  DeviceKeys* device_;
};

void ThresholdSelector::Trial::add_level(const ChoiceUnit& unit, int level, int worker,
                                         ScoreHistogram& out) const {
  const Loop in_line = [](std::int64_t items, const std::function<void(std::int64_t)>& body) {
    for (std::int64_t item = 0; item < items; ++item) body(item);
  };
  Lookup& lookup = layer->scratch_[static_cast<std::size_t>(worker)].lookup;
  layer->look_up(unit, level, /*cut_last=*/false, in_line, lookup);
  const Frontier& frontier = lookup.levels.back();
  for (std::size_t i = 0; i < frontier.keys.size(); ++i)
    out.add(layer->average_of(frontier.scores[i]), frontier.keys[i]);
}

void ThresholdSelector::Trial::attend(const auto& keys_of, std::vector<float>& output,
                                      std::vector<float>& lse) const {
  const LayerGeometry& g = layer->geometry_;
  const std::int64_t d = g.head_dim, group = g.group();
  output.resize(block.q.size());
  lse.resize(block.q.size() / static_cast<std::size_t>(d));
  struct Keys {
    std::vector<Run> runs;
    std::vector<Position> rows;
  };
  std::vector<Keys> keys(static_cast<std::size_t>(block.tokens * g.kv_heads));
  std::vector<AttendItem> items;
  for (std::int64_t t = 0; t < block.tokens; ++t) {
    for (int head = 0; head < g.kv_heads; ++head) {
      Keys& own = keys[static_cast<std::size_t>(t * g.kv_heads + head)];
      keys_of(t, head, own.runs, own.rows);
      const std::int64_t row = t * g.query_heads + head * group;
      items.push_back({.q = block.q.data() + row * d,
                       .queries = static_cast<int>(group),
                       .kv = block.kv.heads[static_cast<std::size_t>(head)],
                       .runs = own.runs,
                       .rows = own.rows,
                       .log_weights = {},
                       .o = output.data() + row * d,
                       .lse = lse.data() + row});
    }
  }
  attend_items(items, g.scale, *g.pool);
}

void ThresholdSelector::Trial::attend_all() {
  if (!full.empty()) return;
  const LayerGeometry& g = layer->geometry_;
  const KeysOnDevice all = {g.layer, heads_in_layer(g), 0, block.begin};
  if (g.covered.empty() && layer->on_device(all, block.tokens)) {
    full.resize(block.q.size());
    full_lse.resize(block.q.size() / static_cast<std::size_t>(g.head_dim));
    return layer->device_->attend(g.layer, block.tokens, block.q, g.scale, full, full_lse);
  }
  attend(
      [&](std::int64_t, int, std::vector<Run>& runs, std::vector<Position>&) {
        runs = {{0, block.begin}};
      },
      full, full_lse);
}

/// Layers side by side, as many as their lists of keys leave memory for.
Tally ThresholdSelector::Trial::measure_all(std::span<Trial> trials) {
  constexpr double kMostBytes = 4e9;  // if every key is chosen
  for (Trial& trial : trials) trial.attend_all();
  if (trials[0].layer->scored_by_device_) {
    Tally all;
    for (Trial& trial : trials) trial.measure_on_device(all);
    return all;
  }
  const LayerGeometry& g = trials[0].layer->geometry_;
  const double bytes =
      static_cast<double>(trials[0].block.tokens * g.kv_heads) * trials[0].keys() * double{sizeof(Position)};
  const auto at_once = static_cast<std::size_t>(std::clamp(kMostBytes / bytes, 1.0, 64.0));
  std::vector<std::size_t> begins;  // where the trials of each layer begin
  for (std::size_t i = 0; i < trials.size(); ++i)
    if (i == 0 || trials[i].layer != trials[i - 1].layer) begins.push_back(i);
  begins.push_back(trials.size());
  std::vector<Tally> tallies(begins.size() - 1);  // by layer, whose selector serves one at a time
  for (std::size_t first = 0; first < tallies.size(); first += at_once) {
    const std::size_t some = std::min(at_once, tallies.size() - first);
    g.pool->for_each(static_cast<std::int64_t>(some), [&](std::int64_t item, int) {
      const std::size_t own = first + static_cast<std::size_t>(item);
      for (std::size_t i = begins[own]; i < begins[own + 1]; ++i) trials[i].measure(tallies[own]);
    });
  }
  Tally all;
  for (const Tally& tally : tallies) all += tally;
  return all;
}

void ThresholdSelector::Trial::compare(std::int64_t row, const float* output, float lse, Tally& tally) const {
  const auto at = static_cast<std::size_t>(row);
  if (!std::isfinite(full_lse[at]) || !std::isfinite(lse)) return;  // keys that are not numbers
  const std::int64_t d = layer->geometry_.head_dim;
  tally.mass += std::exp(static_cast<double>(lse) - full_lse[at]);
  tally.error += relative_error(output, full.data() + row * d, d);
  tally.queries += 1;
}

void ThresholdSelector::Trial::measure_on_device(Tally& tally) {
  const LayerGeometry& g = layer->geometry_;
  const ScoringQueries queries = scoring();
  const std::int64_t units = (block.tokens + queries.together - 1) / queries.together,
                     rows = block.tokens * g.query_heads;
  std::vector<float> output(block.q.size()), lse(static_cast<std::size_t>(rows));
  std::vector<std::int32_t> kept(static_cast<std::size_t>(units * g.kv_heads));
  const Calibration& known = layer->states_.at(block.sequence).calibration;
  // Of a unit that is shorter than the others, too, the threshold is that of the whole ones.
  const std::int64_t of =
      is_alone() || layer->options_.stretch == 0 ? queries.together : layer->options_.stretch;
  const QueryKind unit_kind = is_alone() ? QueryKind::alone : QueryKind::together;
  layer->device_->attend_chosen(queries, {.threshold = known.thresholds.of(unit_kind, of, 0),
                                          .sink = block.far_begin,
                                          .window = std::int64_t{block.begin} - block.far_limit,
                                          .outputs = output,
                                          .lse = lse,
                                          .kept = kept});
  for (const std::int32_t some : kept) tally.kept += some, tally.keys += keys();
  for (std::int64_t row = 0; row < rows; ++row)
    compare(row, output.data() + row * g.head_dim, lse[static_cast<std::size_t>(row)], tally);
}

void ThresholdSelector::Trial::measure(Tally& tally) {
  Selection selection;
  layer->select_units(units(), selection);
  const LayerGeometry& g = layer->geometry_;
  const std::int64_t d = g.head_dim, group = g.group();
  std::vector<Selection::Set> sets(static_cast<std::size_t>(block.tokens * g.kv_heads));  // [T, Hkv]
  for (std::int64_t i = 0; i < selection.sets(); ++i) {
    const Selection::Set set = selection.set(i);
    for (std::int64_t t = set.queries.token_begin; t < set.queries.token_end; ++t)
      sets[static_cast<std::size_t>(t * g.kv_heads + set.queries.kv_head)] = set;
    tally.kept += static_cast<double>(selection.keys(i));
    tally.keys += keys();
  }
  std::vector<float> output, lse;
  attend(
      [&](std::int64_t t, int head, std::vector<Run>& runs, std::vector<Position>& rows) {
        const Selection::Set& set = sets[static_cast<std::size_t>(t * g.kv_heads + head)];
        if (block.far_begin > 0) runs.push_back({0, block.far_begin});
        runs.insert(runs.end(), set.runs.begin(), set.runs.end());
        runs.push_back({block.far_limit, block.begin});
        rows.assign(set.rows.begin(), set.rows.end());
      },
      output, lse);
  for (std::size_t s = 0; s < sets.size(); ++s) {
    const std::int64_t t = static_cast<std::int64_t>(s) / g.kv_heads,
                       row = t * g.query_heads + sets[s].queries.kv_head * group;
    for (std::int64_t r = row; r < row + group; ++r) {
      const auto at = static_cast<std::size_t>(r);
      const float attended = lse[at];  // a tail is no key that is attended
      if (std::isfinite(attended) && !sets[s].tail_lse.empty()) {
        const std::int64_t own = (t - sets[s].queries.token_begin) * group + r - row;
        std::vector<float> tail(sets[s].tail_output.begin() + own * d,
                                sets[s].tail_output.begin() + (own + 1) * d);
        float tail_lse = sets[s].tail_lse[static_cast<std::size_t>(own)];
        merge({output.data() + r * d, &lse[at], 1, d}, {tail.data(), &tail_lse, 1, d});
      }
      compare(r, output.data() + r * d, attended, tally);
    }
  }
}

bool ThresholdSelector::State::observed() const {
  return sample.tokens() >= kFewest &&
         (calibration.queries == 0 || 2 * std::int64_t{sample.begin()} <= context_end);
}

void ThresholdSelector::finish(std::span<Selector* const> layers, std::int32_t sequence,
                               const std::function<KvLayer(int layer)>& kv) {
  std::vector<ThresholdSelector*> own;
  bool observed = true;
  for (Selector* const selector : layers) {
    if (selector == nullptr) continue;
    auto* const layer = static_cast<ThresholdSelector*>(selector);
    layer->grow(sequence, kv(layer->geometry_.layer));
    const State& state = layer->state_of(sequence);
    observed = observed && state.observed() && state.context_end > layer->geometry_.dense.sink;
    own.push_back(layer);
  }
  // Nothing is indexed, everything is kept, or nobody has seen the text's queries: what was known before
  // stays.
  if (own.empty() || !observed || own[0]->options_.target.is_everything()) return;
  calibrate(own, sequence, kv);
}

/// Thresholds for as many tokens as choose together in trials, level by level, then the last one's by search
/// where the target is not a share of keys.
class ThresholdSelector::Search {
 public:
  Search(std::span<ThresholdSelector* const> layers, std::int32_t sequence, QueryKind kind,
         std::vector<Trial> trials)
      : layers_(layers), sequence_(sequence), kind_(kind), trials_(std::move(trials)) {}

  std::vector<double> run() {
    const Target target = layers_[0]->options_.target;
    const int levels = layers_[0]->levels(sequence_);
    for (int relaxation = 0; relaxation <= kRelaxations; ++relaxation) {
      // Halves what the coarser levels prune, and in the end prunes nothing there.
      const double slack = relaxation == kRelaxations ? 0.0 : std::ldexp(1.0, -relaxation);
      for (int level = 0; level < levels; ++level) {
        const bool last = level + 1 == levels;
        if (last && target.kind != Target::Kind::sparsity) break;
        set(level,
            by_share(level, 1.0 - (1.0 - layers_[0]->kept_share(sequence_, level)) * (last ? 1.0 : slack)));
      }
      if (target.kind == Target::Kind::sparsity || by_measure(levels - 1, target)) break;
    }
    return layers_[0]->states_.at(sequence_).calibration.thresholds.at[static_cast<std::size_t>(kind_)];
  }

 private:
  void set(int level, double tau) {
    for (ThresholdSelector* layer : layers_)
      layer->states_.at(sequence_)
          .calibration.thresholds.at[static_cast<std::size_t>(kind_)][static_cast<std::size_t>(level)] = tau;
  }
  double by_share(int level, double share) {
    if (share >= 1.0) return 0.0;  // whatever other queries score
    ScoreHistogram histogram;
    if (layers_[0]->scored_by_device_) {
      const double keys = count_on_device(histogram);
      return histogram.threshold_for(share * keys);
    }
    struct Item {
      const Trial* trial;
      ChoiceUnit unit;
    };
    std::vector<Item> items;  // of all layers: a unit is one thread's
    double keys = 0;
    for (const Trial& trial : trials_) {
      for (const ChoiceUnit& unit : trial.units()) {
        items.push_back({&trial, unit});
        keys += trial.keys();
      }
    }
    std::vector<ScoreHistogram> parts(static_cast<std::size_t>(layers_[0]->workers()));
    layers_[0]->for_each(std::ssize(items), [&](std::int64_t item, int worker) {
      const Item& own = items[static_cast<std::size_t>(item)];
      own.trial->add_level(own.unit, level, worker, parts[static_cast<std::size_t>(worker)]);
    });
    for (const ScoreHistogram& part : parts) histogram.add(part);
    return histogram.threshold_for(share * keys);
  }
  /// Of all trials' units; returns the keys that they have in all. Trials of a layer lie one behind the other.
  double count_on_device(ScoreHistogram& histogram) const {
    std::vector<std::uint64_t> bins(ScoreHistogram::kBins);
    double keys = 0;
    for (std::size_t begin = 0, end = 0; begin < trials_.size(); begin = end) {
      const Trial& first = trials_[begin];
      std::size_t numbers = 0;
      for (end = begin; end < trials_.size() && trials_[end].layer == first.layer; ++end) {
        numbers += trials_[end].block.q.size();
        keys += trials_[end].keys() * static_cast<double>(trials_[end].units().size());
      }
      ScoringQueries queries = first.scoring();
      queries.q = {first.block.q.data(), numbers};
      first.layer->device_->count_scores(
          queries,
          {.lowest = ScoreHistogram::kLowest, .per_unit = ScoreHistogram::kBinsPerUnit, .keys = bins});
    }
    histogram.add(std::span<const std::uint64_t>(bins));
    return keys;
  }
  bool meets(int level, double tau, const Target& target) {
    set(level, tau);
    const Achieved a = Trial::measure_all(trials_).mean();
    return target.kind == Target::Kind::mass ? a.mass >= target.value : a.error <= target.value;
  }
  /// The largest threshold that meets the target; false when even all children of kept nodes do not.
  bool by_measure(int level, const Target& target) {
    if (!meets(level, 0.0, target)) return false;
    double low = kLowestLog, high = kHighestLog, found = 0.0;
    for (int i = 0; i < kHalvings; ++i) {
      const double middle = (low + high) / 2.0;
      const bool fits = meets(level, std::exp(middle), target);
      if (fits) found = std::exp(middle);
      (fits ? low : high) = middle;
    }
    set(level, found);
    return true;
  }

  std::span<ThresholdSelector* const> layers_;
  std::int32_t sequence_;
  QueryKind kind_;
  std::vector<Trial> trials_;  // [layers][those of as many tokens]
};

void ThresholdSelector::calibrate(std::span<ThresholdSelector* const> layers, std::int32_t sequence,
                                  const std::function<KvLayer(int layer)>& kv) {
  const auto queries_of = [&](bool held_out) {
    std::vector<std::vector<float>> out;  // [layers][queries, Hq, d]
    for (const ThresholdSelector* layer : layers) {
      const QuerySample& sample = layer->states_.at(sequence).sample;
      const auto which =
          every_second(sample.tokens(), held_out, held_out ? kMostHeldOut : Calibration::kMost);
      out.push_back(queries_behind(sample, which, layer->geometry_,
                                   static_cast<Position>(kv(layer->geometry_.layer).tokens)));
    }
    return out;
  };
  const std::vector<std::vector<float>> queries = queries_of(false), held_out = queries_of(true);
  const LayerGeometry& g = layers[0]->geometry_;
  const std::int64_t width = std::int64_t{g.query_heads} * g.head_dim, count = std::ssize(queries[0]) / width;
  /// One a layer and as many tokens, as far as they go.
  const auto trials = [&](QueryKind kind, const std::vector<std::vector<float>>& of, std::int64_t tokens) {
    std::vector<Trial> out;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      for (std::span<const float> rest = of[l]; std::ssize(rest) >= tokens * width;
           rest = rest.subspan(static_cast<std::size_t>(tokens * width)))
        out.emplace_back(*layers[l], kind, sequence, kv(layers[l]->geometry_.layer),
                         rest.first(static_cast<std::size_t>(tokens * width)));
    }
    return out;
  };
  const auto search = [&](QueryKind kind, std::int64_t tokens) {
    return Search(layers, sequence, kind, trials(kind, queries, tokens)).run();
  };
  const OnDevice device(layers, sequence, std::max(count, std::ssize(held_out[0]) / width));
  const std::vector<double> none(static_cast<std::size_t>(layers[0]->levels(sequence)), 0.0);
  for (ThresholdSelector* layer : layers)
    layer->states_.at(sequence).calibration = {
        .queries = count, .thresholds = {.at = {none, none}, .power = none}, .held_out = {}};
  Thresholds found = {.at = {}, .power = none, .most = count};
  found.at[static_cast<std::size_t>(QueryKind::alone)] = search(QueryKind::alone, count);
  const std::int64_t stretch = layers[0]->options_.stretch,
                     few = std::min(stretch > 0 ? stretch : Thresholds::kFew, count);
  const std::vector<double> many = stretch > 0 ? std::vector<double>{} : search(QueryKind::together, count);
  found.at[static_cast<std::size_t>(QueryKind::together)] = search(QueryKind::together, few);
  found.power = powers_between(found.at[static_cast<std::size_t>(QueryKind::together)], few, many, count);
  for (ThresholdSelector* layer : layers) layer->states_.at(sequence).calibration.thresholds = found;
  std::vector<Trial> before;  // of the same queries
  for (const QueryKind kind : kQueryKinds) {
    std::vector<Trial> of_kind = trials(kind, held_out, std::ssize(held_out[0]) / width);
    for (std::size_t i = 0; i < before.size(); ++i) of_kind[i].take_full(before[i]);
    const Tally tally = Trial::measure_all(of_kind);
    before = std::move(of_kind);
    for (ThresholdSelector* layer : layers)
      layer->states_.at(sequence).calibration.held_out[static_cast<std::size_t>(kind)] = tally.mean();
  }
  for (ThresholdSelector* layer : layers) layer->take_work();  // its lookups served no query
}

}  // namespace lode
