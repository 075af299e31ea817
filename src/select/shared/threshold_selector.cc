// SPDX-License-Identifier: Apache-2.0
#include "select/shared/threshold_selector.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/cancel.h"
#include "base/threads.h"
#include "kernels/exponentials.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kRowsAtOnce = 8;  // queries that share a pass over the centroids
constexpr std::int64_t kPiecesOfUnit =
    16;                                 // of a large unit; fixed, so that sums do not depend on the threads
constexpr float kLargestLogit = 1e30f;  // infinities would leave no weight to compare
constexpr std::array<std::string_view, 2> kAverages = {"squares", "plain"};

/// Memory that lives as long as the thread: one unit after the other needs as much.
std::span<float> scratch_floats(std::int64_t count) {
  thread_local std::vector<float> floats;
  if (std::ssize(floats) < count) floats.resize(static_cast<std::size_t>(count));
  return std::span(floats).first(static_cast<std::size_t>(count));
}

void push(std::vector<NodeRange>& ranges, const NodeRange& range) {
  if (!ranges.empty() && ranges.back().part == range.part && ranges.back().end == range.begin) {
    ranges.back().end = range.end;
  } else {
    ranges.push_back(range);
  }
}

}  // namespace

ThresholdSelector::Options ThresholdSelector::Options::of(const Spec& spec) {
  Options options;
  options.target = Target::of(spec);
  options.stretch = spec.integer("block", 0, 1, 1 << 20);
  options.squares = spec.choice("average", kAverages[0], kAverages) == "squares";
  return options;
}

void Frontier::clear() {
  ranges.clear();
  keys.clear();
  scores.clear();
}

ThresholdSelector::ThresholdSelector(const LayerGeometry& geometry, const Options& options)
    : geometry_(geometry), options_(options), scratch_(static_cast<std::size_t>(workers())) {
  LODE_ASSERT(geometry.kv_heads > 0 && geometry.query_heads % geometry.kv_heads == 0 &&
              geometry.group() <= 32);
}

int ThresholdSelector::workers() const {
  return geometry_.pool != nullptr ? geometry_.pool->size() : 1;
}

void ThresholdSelector::for_each(std::int64_t items,
                                 const std::function<void(std::int64_t, int)>& body) const {
  if (geometry_.pool != nullptr) return geometry_.pool->for_each(items, body);
  for (std::int64_t item = 0; item < items; ++item) body(item, 0);
}

Position ThresholdSelector::indexed_end(std::int64_t tokens) const {
  const std::int64_t dense = std::max(kLast, geometry_.dense.window - 1);
  return static_cast<Position>(std::max(geometry_.dense.sink, tokens - dense));
}

void ThresholdSelector::build(std::int32_t sequence, KvLayer kv) {
  start(sequence, kv);
  State& state = state_of(sequence);
  state.calibration = {};
  state.context_end = static_cast<Position>(geometry_.dense.sink);
  grow(sequence, kv);
}

void ThresholdSelector::grow(std::int32_t sequence, KvLayer kv) {
  State& state = state_of(sequence);
  const Position end = indexed_end(kv.tokens);
  if (end <= state.context_end) return;
  index_context(sequence, kv, state.context_end, end);
  state.context_end = end;
}

void ThresholdSelector::roll_back(std::int32_t sequence, std::int64_t tokens) {
  const auto found = states_.find(sequence);
  if (found == states_.end()) return;
  found->second.sample.roll_back(tokens);
  // A part that is cut is forgotten whole: where it began is where the next one will. So are thresholds,
  // which a text as short as what is left may not have queries enough to find anew.
  if (found->second.context_end > tokens) {
    found->second.context_end = static_cast<Position>(geometry_.dense.sink);
    found->second.calibration = {};
  }
}

bool ThresholdSelector::copy_state(std::int32_t sequence, const ThresholdSelector& other) {
  const auto found = other.states_.find(sequence);
  const LocalWindow &own = geometry_.dense, &its = other.geometry_.dense;
  if (found == other.states_.end() || own.sink != its.sink || own.window != its.window) return false;
  State& state = state_of(sequence);
  state.calibration = {};
  state.context_end = found->second.context_end;
  return true;
}

void ThresholdSelector::save(std::int32_t sequence, SectionWriter& out) const {
  const Calibration* const known = calibration(sequence);
  (known != nullptr ? *known : Calibration{}).save(out, options_.target);
  save_index(sequence, out);
}

void ThresholdSelector::load(std::int32_t sequence, SectionReader& in, KvLayer kv) {
  Calibration calibration = Calibration::load(in);
  const Position end = load_index(sequence, in, kv, calibration.thresholds.levels());
  states_[sequence] = {.sample = {}, .calibration = std::move(calibration), .context_end = end};
}

std::int64_t ThresholdSelector::index_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [sequence, state] : states_) bytes += state.sample.bytes();
  return bytes;
}

const Calibration* ThresholdSelector::calibration(std::int32_t sequence) const {
  const auto found = states_.find(sequence);
  return found != states_.end() ? &found->second.calibration : nullptr;
}

std::vector<ChoiceUnit> ThresholdSelector::units_of(std::span<const QueryBlock> blocks,
                                                    const LocalWindow& dense) const {
  std::vector<ChoiceUnit> units;
  for (const QueryBlock& block : blocks) {
    const bool alone = block.phase != Phase::question || options_.stretch == 1;
    const std::int64_t step = alone ? 1 : options_.stretch == 0 ? block.tokens : options_.stretch;
    for (std::int64_t token = 0; token < block.tokens; token += step) {
      const std::int64_t end = std::min(block.tokens, token + step);
      for (int head = 0; head < geometry_.kv_heads; ++head) {
        units.push_back({.block = &block,
                         .kind = alone ? QueryKind::alone : QueryKind::together,
                         .token_begin = token,
                         .token_end = end,
                         .kv_head = head,
                         .together = step,
                         .far_begin = block.far_begin,
                         .far_first = block.far_end(token, dense),
                         .far_last = block.far_end(end - 1, dense)});
      }
    }
  }
  return units;
}

void ThresholdSelector::select(std::span<const QueryBlock> blocks, Selection& out) {
  check_cancel();
  select_units(units_of(blocks, geometry_.dense), out);
}

/// Units of one token run side by side; a unit of many tokens has the whole pool.
void ThresholdSelector::select_units(std::span<const ChoiceUnit> units, Selection& out) {
  if (chosen_.size() < units.size()) chosen_.resize(units.size());
  unit_work_.assign(units.size(), {});
  const Loop in_line = [](std::int64_t items, const std::function<void(std::int64_t)>& body) {
    for (std::int64_t item = 0; item < items; ++item) body(item);
  };
  const Loop spread = [this](std::int64_t items, const std::function<void(std::int64_t)>& body) {
    for_each(items, [&](std::int64_t item, int) { body(item); });
  };
  const auto run = [&](std::size_t i, int worker, const Loop& loop) {
    chosen_[i].clear();
    choose(units[i], loop, scratch_[static_cast<std::size_t>(worker)], chosen_[i], unit_work_[i]);
  };
  for_each(std::ssize(units), [&](std::int64_t item, int worker) {
    const auto i = static_cast<std::size_t>(item);
    if (units[i].kind == QueryKind::alone) run(i, worker, in_line);
  });
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (units[i].kind == QueryKind::together) run(i, 0, spread);
    out.append(chosen_[i]);
    work_.bytes += unit_work_[i].bytes;
    work_.keys_scored += unit_work_[i].keys_scored;
  }
}

void ThresholdSelector::choose(const ChoiceUnit& unit, const Loop& loop, Scratch& scratch, Selection& out,
                               SelectWork& work) const {
  out.add_set({.sequence = unit.block->sequence,
               .kv_head = unit.kv_head,
               .heads = all_heads(geometry_.group()),
               .token_begin = static_cast<std::int32_t>(unit.token_begin),
               .token_end = static_cast<std::int32_t>(unit.token_end)});
  if (unit.far_last <= unit.far_begin) return;
  if (options_.target.is_everything()) return out.add_run(unit.far_begin, unit.far_last);
  Lookup& lookup = scratch.lookup;
  look_up(unit, levels(unit.block->sequence) - 1, /*cut_last=*/true, loop, lookup);
  // Parts whose rows lie leaf by leaf come before all others.
  const std::size_t runs = add_runs(unit, lookup.kept, out);
  std::size_t count = 0;
  if (const std::span<const NodeRange> rest = std::span(lookup.kept).subspan(runs); !rest.empty()) {
    scratch.rows.reset(lookup.end);
    count = static_cast<std::size_t>(add_rows(unit, rest, scratch.rows));
    if (scratch.chosen.size() < count) scratch.chosen.resize(count);
    Position* next = scratch.chosen.data();
    scratch.rows.drain([&](std::int64_t row) { *next++ = static_cast<Position>(row); });
    out.add_rows(std::span(scratch.chosen).first(count));
  }
  out.add_run(lookup.end, unit.far_last);  // not clustered yet
  if (options_.tail) add_tail(unit, lookup, loop, out);
  for (const Frontier& frontier : lookup.levels) {
    work.bytes += unit.tokens() * frontier.nodes() * node_bytes(unit);
    work.keys_scored += unit.tokens() * frontier.nodes();
  }
  work.bytes += unit.tokens() * row_bytes() * static_cast<std::int64_t>(count);
}

void ThresholdSelector::look_up(const ChoiceUnit& unit, int last, bool cut_last, const Loop& loop,
                                Lookup& out) const {
  out.levels.resize(static_cast<std::size_t>(last + 1));
  out.pruned.resize(out.levels.size());
  for (std::size_t l = 0; l < out.levels.size(); ++l) {
    out.levels[l].clear();
    out.pruned[l].clear();
  }
  out.kept.clear();
  out.end = top(unit, out.levels[0].ranges);
  const std::int64_t keys = std::int64_t{out.end} - unit.far_begin;
  for (int level = 0; level <= last; ++level) {
    Frontier& frontier = out.levels[static_cast<std::size_t>(level)];
    score(unit, level, keys, loop, frontier);
    if (level == last && !cut_last) return;
    cut(threshold(unit, level, keys, frontier), out, level);
    if (level == last) return;
    for (const NodeRange& range : out.kept)
      out.levels[static_cast<std::size_t>(level + 1)].ranges.push_back(children(unit, level, range));
  }
}

void ThresholdSelector::cut(double tau, Lookup& out, int level) const {
  const Frontier& frontier = out.levels[static_cast<std::size_t>(level)];
  out.kept.clear();
  if (tau == 0.0) {
    for (const NodeRange& range : frontier.ranges) push(out.kept, range);
    return;
  }
  const double bar = options_.squares ? tau * tau : tau;
  std::vector<std::int32_t>& places = out.places;
  if (places.size() < frontier.scores.size()) places.resize(frontier.scores.size());
  std::size_t kept = 0;  // no branch on what a query finds, which nobody can foresee
  for (std::size_t i = 0; i < frontier.scores.size(); ++i) {
    places[kept] = static_cast<std::int32_t>(i);
    kept += static_cast<double>(frontier.scores[i]) > bar ? 1 : 0;
  }
  std::size_t next = 0;
  std::int32_t base = 0;  // of the range, in the frontier
  std::vector<NodeRange>& pruned = out.pruned[static_cast<std::size_t>(level)];
  for (const NodeRange& range : frontier.ranges) {
    std::int32_t open = range.begin;  // nodes before it are kept, or noted as pruned
    for (; next < kept && places[next] < base + range.count(); ++next) {
      const std::int32_t node = range.begin + places[next] - base;
      if (options_.tail && open < node) push(pruned, {range.part, open, node});
      push(out.kept, {range.part, node, node + 1});
      open = node + 1;
    }
    if (options_.tail && open < range.end) push(pruned, {range.part, open, range.end});
    base += range.count();
  }
}

void ThresholdSelector::score(const ChoiceUnit& unit, int level, std::int64_t keys, const Loop& loop,
                              Frontier& frontier) const {
  std::int64_t nodes = 0;
  for (const NodeRange& range : frontier.ranges) nodes += range.count();
  frontier.keys.resize(static_cast<std::size_t>(nodes));
  frontier.scores.assign(static_cast<std::size_t>(nodes), 0.0f);
  std::int64_t at = 0;
  for (const NodeRange& range : frontier.ranges) {
    node_keys(unit, level, range, frontier.keys.data() + at);
    at += range.count();
  }
  const std::int64_t rows = unit.tokens() * geometry_.group();
  const auto add = [&](std::int64_t begin, std::int64_t end, std::span<float> sum) {
    add_rows_scores(unit, level, static_cast<double>(keys), begin, end, frontier, sum);
  };
  if (rows <= kRowsAtOnce) {
    add(0, rows, frontier.scores);
    return;
  }
  const std::int64_t pieces = std::min(kPiecesOfUnit, (rows + kRowsAtOnce - 1) / kRowsAtOnce);
  std::vector<std::vector<float>> sums(static_cast<std::size_t>(pieces));  // [pieces][nodes]
  loop(pieces, [&](std::int64_t piece) {
    std::vector<float>& sum = sums[static_cast<std::size_t>(piece)];
    sum.assign(static_cast<std::size_t>(nodes), 0.0f);
    add(rows * piece / pieces, rows * (piece + 1) / pieces, sum);
  });
  for (const std::vector<float>& sum : sums) {
    for (std::size_t i = 0; i < sum.size(); ++i) frontier.scores[i] += sum[i];
  }
}

/// sum[i] += keys S_i, or its square, of each of the unit's queries [begin, end), over the number of all.
void ThresholdSelector::add_rows_scores(const ChoiceUnit& unit, int level, double keys, std::int64_t begin,
                                        std::int64_t end, const Frontier& frontier,
                                        std::span<float> sum) const {
  const double share = 1.0 / static_cast<double>(unit.tokens() * geometry_.group());
  const double weight = keys * (options_.squares ? std::sqrt(share) : share);
  const std::int64_t nodes = frontier.nodes(), d = geometry_.head_dim;
  const std::span<float> memory = scratch_floats(kRowsAtOnce * (nodes + d));
  float *const q = memory.data(), *const z = q + kRowsAtOnce * d;  // [8, d], [8, nodes]
  for (std::int64_t row = begin; row < end; row += kRowsAtOnce) {
    const std::int64_t count = std::min(kRowsAtOnce, end - row);
    gather(unit, row, row + count, q);
    std::int64_t at = 0;
    for (const NodeRange& range : frontier.ranges) {
      logits(unit, level, range, q, static_cast<int>(count), z + at, nodes);
      at += range.count();
    }
    for (std::int64_t r = 0; r < count; ++r) {
      const std::span<float> own(z + r * nodes, static_cast<std::size_t>(nodes));
      const double total = exponential_kernels().weigh(own.data(), frontier.keys.data(), nodes);
      if (total <= 0.0) continue;  // a query that is not a number has no say
      const auto factor = static_cast<float>(weight / total);
      if (options_.squares) {
        for (std::size_t i = 0; i < own.size(); ++i) sum[i] += factor * own[i] * (factor * own[i]);
      } else {
        for (std::size_t i = 0; i < own.size(); ++i) sum[i] += factor * own[i];
      }
    }
  }
}

void ThresholdSelector::gather(const ChoiceUnit& unit, std::int64_t row_begin, std::int64_t row_end,
                               float* q) const {
  const std::int64_t d = geometry_.head_dim, group = geometry_.group();
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t head =
        (unit.token_begin + row / group) * geometry_.query_heads + unit.kv_head * group + row % group;
    for (std::int64_t i = 0; i < d; ++i)
      *q++ = unit.block->q[static_cast<std::size_t>(head * d + i)] * geometry_.scale;
  }
}

double ThresholdSelector::threshold(const ChoiceUnit& unit, int level, std::int64_t keys,
                                    const Frontier& frontier) const {
  const Calibration* const known = calibration(unit.block->sequence);
  if (known != nullptr && known->queries > 0) return known->thresholds.of(unit.kind, unit.together, level);
  // Without calibration, what is asked for is given to every unit by itself; an error cannot be foreseen.
  const bool last = level + 1 == levels(unit.block->sequence);
  ScoreHistogram histogram;
  if (!last || options_.target.kind == Target::Kind::sparsity) {
    for (std::size_t i = 0; i < frontier.keys.size(); ++i)
      histogram.add(average_of(frontier.scores[i]), frontier.keys[i]);
    return histogram.threshold_for(kept_share(unit.block->sequence, level) * static_cast<double>(keys));
  }
  if (options_.target.kind == Target::Kind::error) return 0.0;
  for (std::size_t i = 0; i < frontier.keys.size(); ++i)
    histogram.add(average_of(frontier.scores[i]), average_of(frontier.scores[i]) * frontier.keys[i]);
  return histogram.threshold_for(options_.target.value * histogram.total());
}

void ThresholdSelector::add_tail(const ChoiceUnit& unit, const Lookup& lookup, const Loop& loop,
                                 Selection& out) const {
  const auto empty = [](const std::vector<NodeRange>& ranges) { return ranges.empty(); };
  if (std::all_of(lookup.pruned.begin(), lookup.pruned.end(), empty)) return;
  const std::int64_t rows = unit.tokens() * geometry_.group(), d = geometry_.head_dim;
  std::vector<float> output(static_cast<std::size_t>(rows * d)), lse(static_cast<std::size_t>(rows));
  const std::int64_t pieces = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
  loop(pieces, [&](std::int64_t piece) {
    const std::int64_t begin = piece * kRowsAtOnce, end = std::min(rows, begin + kRowsAtOnce);
    tail_rows(unit, lookup, begin, end, output.data() + begin * d, lse.data() + begin);
  });
  out.set_tail(output, lse);
}

/// output = sum N exp(q . C) mean value / sum N exp(q . C) over the pruned nodes of all levels, and the log
/// of that sum: of all keys with one centroid, this is the least that their sum of exponentials can be
/// (Jensen).
void ThresholdSelector::tail_rows(const ChoiceUnit& unit, const Lookup& lookup, std::int64_t begin,
                                  std::int64_t end, float* output, float* lse) const {
  const std::int64_t d = geometry_.head_dim, count = end - begin;
  std::int64_t nodes = 0;
  for (const auto& level : lookup.pruned) {
    for (const NodeRange& range : level) nodes += range.count();
  }
  std::vector<float> q(static_cast<std::size_t>(count * d)), z(static_cast<std::size_t>(count * nodes)),
      value(static_cast<std::size_t>(d));
  std::vector<std::int32_t> keys(static_cast<std::size_t>(nodes));
  gather(unit, begin, end, q.data());
  const auto each_range = [&](const auto& body) {
    std::int64_t at = 0;
    for (std::size_t level = 0; level < lookup.pruned.size(); ++level) {
      for (const NodeRange& range : lookup.pruned[level]) {
        body(static_cast<int>(level), range, at);
        at += range.count();
      }
    }
  };
  each_range([&](int level, const NodeRange& range, std::int64_t at) {
    logits(unit, level, range, q.data(), static_cast<int>(count), z.data() + at, nodes);
    node_keys(unit, level, range, keys.data() + at);
  });
  std::vector<float> share(static_cast<std::size_t>(count));  // 1 / total of each query
  for (std::int64_t r = 0; r < count; ++r) {
    const std::span<float> own(z.data() + r * nodes, static_cast<std::size_t>(nodes));
    const float peak = std::clamp(*std::max_element(own.begin(), own.end()), -kLargestLogit, kLargestLogit);
    const double total = exponential_kernels().weigh(own.data(), keys.data(), nodes);
    share[static_cast<std::size_t>(r)] = total > 0.0 ? static_cast<float>(1.0 / total) : 0.0f;
    lse[r] =
        total > 0.0 ? peak + static_cast<float>(std::log(total)) : -std::numeric_limits<float>::infinity();
  }
  each_range([&](int level, const NodeRange& range, std::int64_t at) {
    for (std::int32_t i = 0; i < range.count(); ++i) {
      mean_value(unit, level, range.part, range.begin + i, value.data());
      const auto n = static_cast<float>(keys[static_cast<std::size_t>(at + i)]);
      for (std::int64_t r = 0; r < count; ++r) {
        const float w =
            n * z[static_cast<std::size_t>(r * nodes + at + i)] * share[static_cast<std::size_t>(r)];
        for (std::int64_t j = 0; j < d; ++j) output[r * d + j] += w * value[static_cast<std::size_t>(j)];
      }
    }
  });
}

}  // namespace lode
