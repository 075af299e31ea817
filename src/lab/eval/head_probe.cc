// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/head_probe.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "attend/attend.h"
#include "base/cancel.h"
#include "base/relative_error.h"
#include "base/threads.h"
#include "kernels/kernels.h"

namespace lode {

namespace {

constexpr double kRounding = 0x1p-6;  ///< relative error of an output, more than prefill's bf16 tiles round

/// Which far keys head `head` of the group attends for a query token, added to `attended` [keys]. False when
/// they do not all count with the weights of attention.
bool mark_far(const Selection& selection, std::int32_t sequence, int kv_head, int head, std::int64_t token,
              Position far_begin, Position far_end, std::vector<char>& attended) {
  bool plain = true;
  for (std::int64_t i = 0; i < selection.sets(); ++i) {
    const Selection::Set set = selection.set(i);
    const QuerySet& q = set.queries;
    const bool ours = q.sequence == sequence && q.kv_head == kv_head && (q.heads >> head & 1u) != 0 &&
                      q.token_begin <= token && token < q.token_end;
    if (!ours) continue;
    plain = plain && set.log_weights.empty() && set.tail_lse.empty();
    for (const Run& run : set.runs) {
      for (Position p = std::max(run.begin, far_begin); p < std::min(run.end, far_end); ++p)
        attended[static_cast<std::size_t>(p)] = 1;
    }
    for (const Position p : set.rows) {
      if (p >= far_begin && p < far_end) attended[static_cast<std::size_t>(p)] = 1;
    }
  }
  return plain;
}

double norm_of(const float* x, std::int64_t n) {
  double square = 0;
  for (std::int64_t i = 0; i < n; ++i) square += static_cast<double>(x[i]) * x[i];
  return std::sqrt(square);
}

/// The share of softmax(scores) on the attended keys.
double captured_mass(std::span<const float> scores, const std::vector<char>& attended) {
  const float most = *std::max_element(scores.begin(), scores.end());
  double all = 0, on = 0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double p = std::exp(static_cast<double>(scores[i]) - most);
    all += p;
    if (attended[i] != 0) on += p;
  }
  return on / all;
}

}  // namespace

HeadProbe::HeadProbe(int layers, int query_heads, std::int64_t top, std::vector<Position> positions,
                     bool errors_alone)
    : query_heads_(query_heads),
      top_(top),
      positions_(std::move(positions)),
      errors_alone_(errors_alone),
      sums_(static_cast<std::size_t>(layers * query_heads)) {}

ForwardHooks HeadProbe::hooks() {
  ForwardHooks hooks;
  hooks.attended = [this](const LayerGeometry& geometry, std::span<const QueryBlock> blocks,
                          const Selection* selection, std::span<float* const> outputs) {
    if (selection == nullptr) return;
    for (std::size_t b = 0; b < blocks.size(); ++b) look(geometry, blocks[b], *selection, outputs[b]);
  };
  return hooks;
}

void HeadProbe::look(const LayerGeometry& geometry, const QueryBlock& block, const Selection& selection,
                     const float* output) {
  check_cancel();
  std::vector<std::int64_t> tokens;  // of the block, that are looked at
  for (std::int64_t t = 0; t < block.tokens; ++t) {
    if (std::binary_search(positions_.begin(), positions_.end(), block.begin + t)) tokens.push_back(t);
  }
  if (tokens.empty()) return;
  // Only these are attended fully, each as if decoded alone.
  const auto width =
      static_cast<std::size_t>(geometry.query_heads) * static_cast<std::size_t>(geometry.head_dim);
  std::vector<float> exact(tokens.size() * width);  // [looked at, Hq, d]
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const auto at = static_cast<std::size_t>(tokens[i]) * width;
    QueryBlock one = block;
    one.begin = static_cast<Position>(block.begin + tokens[i]);
    one.tokens = 1;
    one.q = block.q.subspan(at, width);
    one.q_unrotated = {};
    float* const exact_output = exact.data() + i * width;
    attend_full({&one, 1}, geometry, {&exact_output, 1});
  }
  const auto heads = static_cast<std::size_t>(geometry.kv_heads);
  bounds_.resize(std::max(bounds_.size(), (static_cast<std::size_t>(geometry.layer) + 1) * heads));
  const auto extend = [&](std::int64_t head, int) {
    bounds_[static_cast<std::size_t>(geometry.layer) * heads + static_cast<std::size_t>(head)].extend(
        block.kv.heads[static_cast<std::size_t>(head)], block.begin + block.tokens);
  };
  if (!errors_alone_) geometry.pool->for_each(geometry.kv_heads, extend);
  const auto items = static_cast<std::int64_t>(tokens.size()) * geometry.kv_heads;
  std::vector<std::vector<Sums>> seen(static_cast<std::size_t>(items));
  geometry.pool->for_each(items, [&](std::int64_t item, int) {
    const auto i = static_cast<std::size_t>(item / geometry.kv_heads);
    seen[static_cast<std::size_t>(item)] =
        compare(geometry, block, selection, output, exact.data() + i * width, tokens[i],
                static_cast<int>(item % geometry.kv_heads));
  });
  for (std::int64_t item = 0; item < items; ++item) {
    const std::int64_t first = geometry.layer * query_heads_ + item % geometry.kv_heads * geometry.group();
    for (int g = 0; g < geometry.group(); ++g) {
      Sums& sum = sums_[static_cast<std::size_t>(first + g)];
      const Sums& one = seen[static_cast<std::size_t>(item)][static_cast<std::size_t>(g)];
      sum.density += one.density;
      sum.read += one.read;
      sum.recall += one.recall;
      sum.mass += one.mass;
      sum.error += one.error;
      sum.bound += one.bound;
      sum.queries += 1;
    }
  }
}

std::vector<HeadProbe::Sums> HeadProbe::compare(const LayerGeometry& geometry, const QueryBlock& block,
                                                const Selection& selection, const float* output,
                                                const float* exact, std::int64_t token, int kv_head) const {
  const std::int64_t d = geometry.head_dim, keys = block.begin + token + 1, group = geometry.group();
  const std::int64_t row = token * geometry.query_heads + kv_head * group;               // of [T, Hq]
  std::vector<float> q(block.q.begin() + row * d, block.q.begin() + (row + group) * d);  // [G, d]
  for (float& x : q) x *= geometry.scale;
  std::vector<float> scores(static_cast<std::size_t>(errors_alone_ ? 0 : group * keys));  // [G, keys]
  if (!errors_alone_)
    kernels().score_run(q.data(), static_cast<int>(group), block.kv.heads[static_cast<std::size_t>(kv_head)],
                        0, keys, scores.data(), keys);
  const Position far_end = block.far_end(token, geometry.dense);
  const Position far_begin = std::min(block.far_begin, far_end);
  std::vector<Sums> sums(static_cast<std::size_t>(group));
  std::vector<char> read(static_cast<std::size_t>(keys), 0);  // by any head of the group
  for (int g = 0; g < group; ++g) {
    std::vector<char> attended(static_cast<std::size_t>(keys), 1);
    std::fill(attended.begin() + far_begin, attended.begin() + far_end, char{0});
    const bool plain = mark_far(selection, block.sequence, kv_head, g, token, far_begin, far_end, attended);
    const auto count = std::count(attended.begin(), attended.end(), char{1});
    std::transform(read.begin(), read.end(), attended.begin(), read.begin(), std::bit_or<char>());
    const auto size = static_cast<std::size_t>(d);
    // Who leaves nothing out errs by nothing: what prefill's kernels round is full attention's own, too.
    const double error = relative_error(output + (row + g) * d, exact + (kv_head * group + g) * d, d);
    const bool rounding = plain && count == keys && error < kRounding;
    Sums& sum = sums[static_cast<std::size_t>(g)];
    sum.density = static_cast<double>(count) / static_cast<double>(keys);
    sum.error = rounding ? 0.0 : error;
    if (errors_alone_) continue;
    add_score_measures(
        geometry, kv_head, std::span(q).subspan(static_cast<std::size_t>(g) * size, size),
        std::span(scores).subspan(static_cast<std::size_t>(g * keys), static_cast<std::size_t>(keys)),
        attended, {far_begin, far_end}, {output + (row + g) * d, size}, sum);
    const double norm = norm_of(exact + (kv_head * group + g) * d, d);
    sum.bound = !plain ? std::numeric_limits<double>::infinity() : sum.bound == 0 ? 0.0 : sum.bound / norm;
  }
  for (Sums& sum : sums)
    sum.read = static_cast<double>(std::count(read.begin(), read.end(), char{1})) / static_cast<double>(keys);
  return sums;
}

void HeadProbe::add_score_measures(const LayerGeometry& geometry, int kv_head, std::span<const float> q,
                                   std::span<const float> scores, const std::vector<char>& attended,
                                   std::pair<Position, Position> far, std::span<const float> output,
                                   Sums& sums) const {
  std::vector<Position> best;
  top_k(scores.subspan(static_cast<std::size_t>(far.first), static_cast<std::size_t>(far.second - far.first)),
        top_, far.first, best);
  const auto found = std::count_if(best.begin(), best.end(),
                                   [&](Position p) { return attended[static_cast<std::size_t>(p)] != 0; });
  sums.recall = best.empty() ? 1.0 : static_cast<double>(found) / static_cast<double>(best.size());
  sums.mass = captured_mass(scores, attended);
  sums.bound = bounds_[static_cast<std::size_t>(geometry.layer * geometry.kv_heads + kv_head)].of(
      q, attended, scores, output);
}

std::vector<HeadMeasure> HeadProbe::measures() const {
  std::vector<HeadMeasure> measures;
  for (std::size_t i = 0; i < sums_.size(); ++i) {
    const Sums& s = sums_[i];
    if (s.queries == 0) continue;
    const auto n = static_cast<double>(s.queries);
    measures.push_back({.layer = static_cast<int>(i) / query_heads_,
                        .head = static_cast<int>(i) % query_heads_,
                        .density = s.density / n,
                        .read = s.read / n,
                        .recall = s.recall / n,
                        .mass = s.mass / n,
                        .error = s.error / n,
                        .bound = s.bound / n});
  }
  return measures;
}

}  // namespace lode
