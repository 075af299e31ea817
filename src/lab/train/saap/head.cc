// SPDX-License-Identifier: Apache-2.0
#include "lab/train/saap/head.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/kernels.h"
#include "lab/train/loss.h"

namespace lode {

std::vector<std::int64_t> draw_positions(std::vector<std::int64_t> positions, std::int64_t wanted,
                                         double late, std::int64_t late_begin, Rng& rng) {
  wanted = std::min(wanted, std::ssize(positions));
  const auto cut = std::partition(positions.begin(), positions.end(),
                                  [&](std::int64_t p) { return late == 0.0 || p < late_begin; });
  std::vector<std::int64_t> last(cut, positions.end());
  positions.erase(cut, positions.end());
  const std::size_t late_count =
      std::min(last.size(), static_cast<std::size_t>(late * static_cast<double>(wanted)));
  const auto shuffle = [&](std::vector<std::int64_t>& all, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i)
      std::swap(all[i], all[i + rng.below(static_cast<std::uint64_t>(all.size() - i))]);
    all.resize(count);
  };
  shuffle(positions, std::min(positions.size(), static_cast<std::size_t>(wanted) - late_count));
  shuffle(last, late_count);
  std::vector<std::int64_t> order;
  for (std::size_t total = positions.size() + last.size(), taken = 0, i = 0; i < total; ++i) {
    const bool next_is_late = (i + 1) * last.size() / total > taken;
    order.push_back(next_is_late ? last[taken++] : positions[i - taken]);
  }
  return order;
}

bool has_batch(const SaapExamples& examples, std::int64_t prompts) {
  bool found = false;
  for (std::int64_t p = 0; p < prompts; ++p) found |= examples.end_of(p) - examples.begin_of(p) >= 2;
  return found;
}

std::vector<std::int32_t> draw_batch(const SaapExamples& examples, std::int64_t prompts, std::int64_t batch,
                                     Rng& rng) {
  std::int64_t begin = 0, count = 0;
  while (count < 2) {
    const auto prompt = static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(prompts)));
    begin = examples.begin_of(prompt);
    count = examples.end_of(prompt) - begin;
  }
  std::vector<std::int32_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), static_cast<std::int32_t>(begin));
  const auto n = static_cast<std::size_t>(std::min(batch, count));
  for (std::size_t i = 0; i < n; ++i)
    std::swap(order[i], order[i + rng.below(static_cast<std::uint64_t>(order.size() - i))]);
  order.resize(n);
  return order;
}

namespace {

/// Share of the target and of the prompt's keys in the `probes` best buckets.
SaapChoice choice_of(std::span<const float> scores, std::span<const float> target,
                     std::span<const std::int64_t> counts, std::int64_t probes) {
  std::vector<Position> best;
  top_k(scores, probes, 0, best);
  SaapChoice choice;
  double keys = 0;
  for (const std::int64_t n : counts) keys += static_cast<double>(n);
  for (const Position c : best) {
    choice.mass += target[static_cast<std::size_t>(c)];
    choice.selectivity += static_cast<double>(counts[static_cast<std::size_t>(c)]) / std::max(1.0, keys);
  }
  return choice;
}

/// sum_c t_c log(p_c n / n_c), one key more in every bucket.
double gain_of(std::span<const float> shares, std::span<const float> target,
               std::span<const std::int64_t> counts) {
  const double n = std::accumulate(counts.begin(), counts.end(), static_cast<double>(counts.size()));
  double gain = 0.0;
  for (std::size_t c = 0; c < target.size(); ++c) {
    if (target[c] <= 0.0f) continue;
    const double share = std::max(1e-30, static_cast<double>(shares[c]));
    gain += target[c] * std::log(share * n / static_cast<double>(counts[c] + 1));
  }
  return gain;
}

/// What measure_saap ranks buckets by for one query.
struct Rankings {
  std::vector<float> shares, by_root, by_target;
  Rankings(std::span<const float> scores, std::span<const float> target, std::span<const std::int64_t> counts)
      : shares(scores.begin(), scores.end()) {
    softmax_rows({shares.data(), 1, std::ssize(shares)});
    for (std::size_t c = 0; c < shares.size(); ++c) {
      const auto keys = static_cast<float>(std::max<std::int64_t>(1, counts[c]));
      by_root.push_back(shares[c] / std::sqrt(keys));
      by_target.push_back(target[c] / keys);
    }
  }
};

}  // namespace

SaapCaptured captured_at_shares(std::span<const float> scores, std::span<const float> target,
                                std::span<const std::int64_t> counts) {
  const auto total = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
  std::vector<std::int32_t> heap(scores.size());
  std::iota(heap.begin(), heap.end(), 0);
  const auto at = [](auto values, std::int32_t c) { return values[static_cast<std::size_t>(c)]; };
  const auto worse = [&](std::int32_t a, std::int32_t b) {
    return at(scores, a) != at(scores, b) ? at(scores, a) < at(scores, b) : a > b;
  };
  std::make_heap(heap.begin(), heap.end(), worse);
  SaapCaptured captured = {};
  double keys = 0.0, mass = 0.0;
  std::size_t share = 0;
  while (!heap.empty() && share < captured.size()) {
    std::pop_heap(heap.begin(), heap.end(), worse);
    const auto own = static_cast<double>(at(counts, heap.back()));
    const double attention = at(target, heap.back());
    heap.pop_back();
    if (own == 0.0) continue;
    for (; share < captured.size() && keys + own >= kSaapShares[share] * total; ++share)
      captured[share] = mass + attention * (kSaapShares[share] * total - keys) / own;
    keys += own;
    mass += attention;
  }
  return captured;
}

SaapMeasures measure_saap(const SaapExamples& examples, std::int64_t first,
                          std::span<const std::vector<std::int64_t>> counts, const BucketNet& net,
                          const BucketNet& keys, std::int64_t probes) {
  const std::int64_t d = net.inputs, c = net.buckets, begin = examples.begin_of(first);
  std::vector<float> q(static_cast<std::size_t>(d)), target(static_cast<std::size_t>(c)),
      scores(target.size()), distance(target.size()), scratch;
  SaapMeasures measures;
  for (std::int64_t p = 1; p <= c; p *= 2) measures.selectivity.push_back(0.0f);
  const double weight = 1.0 / static_cast<double>(examples.count() - begin);
  for (std::int64_t prompt = first; prompt < examples.prompts(); ++prompt) {
    const std::vector<std::int64_t>& sizes = counts[static_cast<std::size_t>(prompt)];
    const auto add = [&](SaapChoice& to, std::span<const float> by) {
      const SaapChoice choice = choice_of(by, target, sizes, probes);
      to.mass += weight * choice.mass;
      to.selectivity += weight * choice.selectivity;
    };
    for (std::int64_t i = examples.begin_of(prompt); i < examples.end_of(prompt); ++i) {
      examples.read(i, q, target);
      net.scores(q.data(), 1, scratch, scores.data());
      measures.loss += weight * kl_divergence({scores.data(), 1, c}, {target.data(), 1, c}, {});
      const Rankings rankings(scores, target, sizes);
      const auto add_captured = [&](SaapCaptured& to, std::span<const float> by) {
        const SaapCaptured captured = captured_at_shares(by, target, sizes);
        for (std::size_t s = 0; s < to.size(); ++s) to[s] += weight * captured[s];
      };
      measures.gain += weight * gain_of(rankings.shares, target, sizes);
      add_captured(measures.captured, rankings.by_root);
      add_captured(measures.best_captured, rankings.by_target);
      add(measures.chosen, scores);
      if (keys.hidden == 0) {
        kernels().gemv(q.data(), 1, keys.linear_weight.data(), keys.type, d, 0, c, distance.data(), c);
        add(measures.kmeans, distance);
        add_captured(measures.kmeans_captured, distance);
      }
      add(measures.best, target);
      for (std::size_t p = 0; p < measures.selectivity.size(); ++p) {
        const SaapChoice choice = choice_of(scores, target, sizes, std::int64_t{1} << p);
        measures.selectivity[p] += static_cast<float>(weight * choice.selectivity);
      }
    }
  }
  return measures;
}

}  // namespace lode
