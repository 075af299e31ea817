// SPDX-License-Identifier: Apache-2.0
#include "lab/bench/saap.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "base/cancel.h"
#include "base/threads.h"
#include "lab/train/saap/device.h"
#include "lodestone/error.h"
#include "select/shared/centroids.h"

namespace lode {
namespace {

constexpr std::int64_t kPieceTokens = 4096;  // that one thread makes at a time
constexpr std::int64_t kLossSteps = 100;

/// Vectors of one prompt and KV head.
struct MadePrompt {
  std::vector<float> plain;  // [n, d] keys before RoPE
  SaapKeys keys;
  SaapCandidates candidates;
};

class SaapBench {
 public:
  SaapBench(const SaapBenchOptions& options, ThreadPool& pool)
      : options_(options),
        settings_(options.settings),
        pool_(pool),
        rope_(options.shape, options.context),
        d_(options.shape.head_dim),
        group_(options.shape.query_heads / options.shape.kv_heads),
        device_(make_saap_device(options.device, pool)) {}

  SaapBenchResult run(const std::function<void(std::string_view)>& note) {
    result_.device = device_->name();
    note("making queries and keys");
    timed(result_.made, [&] {
      for (std::int64_t i = 0; i < options_.prompts + settings_.held_out; ++i) prompts_.push_back(make(i));
    });
    note("clustering keys");
    timed(result_.kmeans, [&] { cluster(); });
    note("attention of queries, by bucket");
    SaapExamples examples(d_, settings_.clusters);
    std::vector<std::vector<std::int64_t>> counts;
    for (MadePrompt& prompt : prompts_) counts.push_back(collect(prompt, examples));
    result_.examples = examples.begin_of(options_.prompts);
    result_.held_out = examples.count() - result_.examples;
    if (!has_batch(examples, options_.prompts) || result_.held_out < 1)
      throw InputError(
          "bench train-saap: expected a prompt with two queries that have far keys and one to test on, found "
          "none: raise --context");
    note("training");
    SaapClassifier classifier(d_, settings_.hidden, settings_.clusters, settings_.residual, settings_.seed);
    timed(result_.steps, [&] { fit(examples, classifier); });
    note("measuring");
    timed(result_.measure, [&] {
      result_.measures = measure_saap(examples, options_.prompts, counts, classifier.exported(settings_.type),
                                      keys_, settings_.probes);
    });
    return result_;
  }

 private:
  template <class Body>
  static void timed(double& seconds, const Body& body) {
    check_cancel();
    seconds += 1e-6 * microseconds(body);
  }

  MadePrompt make(std::int64_t index) {
    const std::int64_t n = options_.context, pieces = (n + kPieceTokens - 1) / kPieceTokens;
    std::vector<std::int64_t> positions;
    for (std::int64_t p = 0; p < n; ++p)
      if (!settings_.filter.far(p, n).empty()) positions.push_back(p);
    Rng rng(hash_seed(settings_.seed, index, 1));
    std::vector<std::int64_t> drawn =
        draw_positions(std::move(positions),
                       (settings_.samples * kSaapCandidatesPerSample + group_ - 1) / group_, 0.0, n, rng);
    std::sort(drawn.begin(), drawn.end());
    const auto wanted = static_cast<std::size_t>(std::ssize(drawn) * group_);
    MadePrompt prompt;
    prompt.plain.resize(static_cast<std::size_t>(n * d_));
    prompt.keys.rotated.resize(prompt.plain.size());
    SaapCandidates& candidates = prompt.candidates;
    candidates.q.resize(wanted * static_cast<std::size_t>(d_));
    candidates.positions.resize(wanted);
    candidates.further.resize(wanted, 0);
    pool_.for_each(pieces, [&](std::int64_t piece, int) {
      check_cancel();
      const std::int64_t begin = piece * kPieceTokens, end = std::min(n, begin + kPieceTokens);
      VectorMaker maker({static_cast<int>(group_), 1, static_cast<int>(d_)}, options_.kind, options_.skew,
                        rope_, settings_.seed);
      maker.reseed(hash_seed(settings_.seed, index, piece, 2));
      maker.make(static_cast<Position>(begin), end - begin);
      std::copy(maker.k_unrotated.begin(), maker.k_unrotated.end(), prompt.plain.begin() + begin * d_);
      std::copy(maker.k.begin(), maker.k.end(), prompt.keys.rotated.begin() + begin * d_);
      const auto first = std::lower_bound(drawn.begin(), drawn.end(), begin);
      for (auto at = first; at != drawn.end() && *at < end; ++at) {
        const std::int64_t to = (at - drawn.begin()) * group_;
        std::copy_n(maker.q_unrotated.begin() + (*at - begin) * group_ * d_, group_ * d_,
                    candidates.q.begin() + to * d_);
        std::fill_n(candidates.positions.begin() + to, group_, static_cast<Position>(*at));
      }
    });
    return prompt;
  }

  /// On as many keys as `train saap` takes.
  void cluster() {
    const std::int64_t each =
        (settings_.clusters * kTrainingKeysPerCentroid + options_.prompts - 1) / options_.prompts;
    std::vector<float> sample;
    for (std::int64_t i = 0; i < options_.prompts; ++i) {
      const std::vector<float>& plain = prompts_[static_cast<std::size_t>(i)].plain;
      Rng rng(hash_seed(settings_.seed, i, 3));
      for (std::int64_t k = 0; k < std::min(each, options_.context); ++k) {
        const auto row = static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(options_.context)));
        sample.insert(sample.end(), plain.begin() + row * d_, plain.begin() + (row + 1) * d_);
      }
    }
    const std::int64_t keys = std::ssize(sample) / d_;
    if (keys < settings_.clusters)
      throw InputError(
          "bench train-saap: expected at least as many keys as clusters, found fewer: raise --context");
    const std::vector<float> centroids =
        device_->cluster({sample.data(), keys, d_}, {.clusters = settings_.clusters, .seed = settings_.seed});
    keys_ = BucketNet(d_, settings_.clusters, {{}, {}, {}, centroids, {}}, DType::f16);
  }

  /// Its keys by bucket.
  std::vector<std::int64_t> collect(MadePrompt& prompt, SaapExamples& examples) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(d_));
    timed(result_.labels, [&] {
      prompt.keys.labels.resize(static_cast<std::size_t>(options_.context));
      device_->label(keys_, {prompt.plain.data(), options_.context, d_}, prompt.keys.labels);
      prompt.keys.counts = count_labels(prompt.keys.labels, settings_.clusters, settings_.filter.sink);
    });
    timed(result_.targets, [&] {
      result_.looked_at += device_->add_examples(prompt.candidates, prompt.keys, rope_, scale,
                                                 settings_.filter, settings_.samples, examples);
      examples.end_prompt();
    });
    return prompt.keys.counts;
  }

  std::vector<SaapFit::Step> steps_of(const SaapExamples& examples, std::int64_t first,
                                      std::int64_t most) const {
    return draw_steps(examples, options_.prompts, settings_, hash_seed(settings_.seed, 4), first, most);
  }

  void fit(const SaapExamples& examples, SaapClassifier& classifier) {
    Adam adam(classifier.module(), {.rate = settings_.rate, .weight_decay = settings_.weight_decay});
    const auto fit = device_->fit(examples, classifier, adam, settings_.batch);
    std::vector<double> losses;
    for (auto next = steps_of(examples, 0, fit->series()); !next.empty();) {
      check_cancel();
      fit->begin(next);
      next = steps_of(examples, adam.steps(), fit->series());
      const std::vector<double> some = fit->finish();
      losses.insert(losses.end(), some.begin(), some.end());
    }
    fit->store();
    result_.first_loss = losses.front();
    const std::int64_t last = std::min(kLossSteps, std::ssize(losses));
    result_.train_loss = std::accumulate(losses.end() - last, losses.end(), 0.0) / static_cast<double>(last);
  }

  const SaapBenchOptions& options_;
  const SaapSettings& settings_;
  ThreadPool& pool_;
  Rope rope_;
  std::int64_t d_, group_;
  std::unique_ptr<SaapDevice> device_;
  std::vector<MadePrompt> prompts_;
  BucketNet keys_;
  SaapBenchResult result_;
};

}  // namespace

SaapBenchResult bench_saap_training(const SaapBenchOptions& options, ThreadPool& pool,
                                    const std::function<void(std::string_view)>& note) {
  return SaapBench(options, pool).run(note);
}

}  // namespace lode
