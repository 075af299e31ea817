// SPDX-License-Identifier: Apache-2.0
// Step 2 of SAAP's training: sampled queries of the prompts, with the share of their attention in each
// bucket.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/cancel.h"
#include "base/rng.h"
#include "kernels/rope.h"
#include "lab/train/saap/run.h"
#include "lodestone/error.h"

namespace lode {

void SaapRun::collect(std::span<Head* const> heads) {
  std::int64_t total = 0;
  for (const Prompt& prompt : prompts_) total += std::ssize(prompt.tokens);
  for (Head* head : heads) {
    head->examples = std::make_unique<SaapExamples>(config_.head_dim, settings_.clusters);
    head->counts.clear();
  }
  Capture capture(model_, context_options_);
  Progress progress(
      fmt::format("saap: queries of layers {} to {}", heads.front()->layer, heads.back()->layer), total,
      "tokens", mode_);
  for (std::int64_t i = 0; i < std::ssize(prompts_); ++i) {
    const Reading reading = {.index = i,
                             .queries = settings_.samples,
                             .filter = i < training_prompts() ? settings_.filter : test_filter(),
                             .last = !settings_.adapt};
    collect_prompt(capture, reading, heads, progress);
  }
  if (settings_.adapt) {
    const Reading reading = {
        .index = 0, .queries = settings_.samples, .filter = test_filter(), .before = false};
    collect_prompt(capture, reading, heads, progress);
  }
}

void SaapRun::read_prompt(Capture& capture, const Reading& reading, std::span<Head* const> heads,
                          Progress& progress, const Reading::Take& take) {
  const std::int64_t index = reading.index;
  const Prompt& prompt = prompts_[static_cast<std::size_t>(index)];
  const std::int64_t n = std::ssize(prompt.tokens), d = config_.head_dim,
                     group = config_.query_heads / config_.kv_heads, last = n - settings_.late_tokens;
  std::vector<std::int64_t> positions(static_cast<std::size_t>(n));
  std::iota(positions.begin(), positions.end(), 0);
  std::erase_if(positions, [&](std::int64_t p) {
    return reading.filter.far(p, n).empty() || !(p < last ? reading.before : reading.last);
  });
  Rng rng(hash_seed(settings_.seed, index, 1));
  // With --adapt a reading has the late positions or the others, not a share of each.
  const double late = settings_.adapt ? 0.0 : settings_.late;
  const std::vector<std::int64_t> order =
      draw_positions(std::move(positions), (reading.queries * kSaapCandidatesPerSample + group - 1) / group,
                     late, last, rng);
  const std::int64_t wanted = std::ssize(order);
  std::vector<std::int64_t> place(static_cast<std::size_t>(n), -1);  // of a token among the candidates
  for (std::int64_t i = 0; i < wanted; ++i)
    place[static_cast<std::size_t>(order[static_cast<std::size_t>(i)])] = i;

  std::vector<Position> further(static_cast<std::size_t>(wanted), 0);
  const std::int64_t shift = settings_.shift_to == 0
                                 ? settings_.shift
                                 : std::clamp<std::int64_t>(settings_.shift_to - n, 0, settings_.shift);
  for (std::size_t i = 0; shift > 0 && i < further.size(); ++i) {
    if (rng.uniform() >= settings_.shifted) continue;
    further[i] = static_cast<Position>(rng.uniform() * static_cast<double>(shift));
  }

  std::vector<SaapCandidates> candidates(heads.size());
  for (SaapCandidates& c : candidates) {
    c.q.resize(static_cast<std::size_t>(wanted * group * d));
    c.positions.resize(static_cast<std::size_t>(wanted * group));
    c.further.resize(static_cast<std::size_t>(wanted * group));
  }
  const std::int64_t before =
      std::accumulate(prompts_.begin(), prompts_.begin() + index, std::int64_t{0},
                      [](std::int64_t sum, const Prompt& p) { return sum + std::ssize(p.tokens); });
  const Capture::Sink sink = [&](int layer, const KvWrite& chunk) {
    for (std::int64_t t = 0; t < chunk.tokens; ++t) {
      const std::int64_t at = place[static_cast<std::size_t>(chunk.begin + t)];
      if (at < 0) continue;
      for (std::size_t h = 0; h < heads.size(); ++h) {
        if (heads[h]->layer != layer) continue;
        const float* q = chunk.q_unrotated.data() + (t * config_.query_heads + heads[h]->head * group) * d;
        std::copy_n(q, group * d, candidates[h].q.data() + at * group * d);
        std::fill_n(candidates[h].positions.begin() + at * group, group,
                    chunk.begin + static_cast<Position>(t));
        std::fill_n(candidates[h].further.begin() + at * group, group, further[static_cast<std::size_t>(at)]);
      }
    }
  };
  capture.read(prompt, sink, [&](std::int64_t tokens) { progress.at(before + tokens); });

  pool().for_each(std::ssize(heads), [&](std::int64_t i, int) {
    check_cancel();
    const auto at = static_cast<std::size_t>(i);
    take(at, candidates[at],
         capture.kv().layer(heads[at]->layer).heads[static_cast<std::size_t>(heads[at]->head)]);
  });
}

void SaapRun::collect_prompt(Capture& capture, const Reading& reading, std::span<Head* const> heads,
                             Progress& progress) {
  const float scale = scale_of_scores();
  const auto label = [&](const BucketNet& by, Matrix<const float> plain, std::span<std::int32_t> labels) {
    device_->label(by, plain, labels);
  };
  read_prompt(capture, reading, heads, progress,
              [&](std::size_t at, const SaapCandidates& candidates, const KvRows& kv) {
                Head& head = *heads[at];
                SaapKeys keys = read_saap_keys(kv, capture.rope(), head.keys(), settings_.filter.sink, label);
                device_->add_examples(candidates, keys, capture.rope(), scale, reading.filter,
                                      reading.queries, *head.examples);
                head.examples->end_prompt();
                head.counts.push_back(std::move(keys.counts));
              });
}

SaapFilter SaapRun::test_filter() const {
  SaapFilter filter = settings_.filter;
  if (!settings_.test_as_asked) return filter;
  filter.pairs = filter.causal = true;
  filter.queries = false;
  return filter;
}

}  // namespace lode
