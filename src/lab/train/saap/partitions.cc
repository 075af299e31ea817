// SPDX-License-Identifier: Apache-2.0
// Step 1 of SAAP's training: buckets by k-means on sampled keys, those of an artefact, or of a trained f_k.
#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <numeric>

#include "ann/balance.h"
#include "base/cancel.h"
#include "kernels/kernels.h"
#include "lab/train/saap/run.h"
#include "lodestone/error.h"
#include "select/shared/centroids.h"

namespace lode {

void SaapRun::find_partitions() {
  if (!settings_.from.empty()) return partitions_from_artefact();
  const std::int64_t d = config_.head_dim, clusters = settings_.clusters;
  if (!checkpoint_.arrays.contains(heads_[0].prefix() + "centroids")) partitions_by_kmeans();
  for (Head& head : heads_) {
    const std::string prefix = head.prefix();
    const std::vector<float>&centroids = checkpoint_.arrays[prefix + "centroids"],
          &offsets = checkpoint_.arrays[prefix + "offsets"];
    if (std::ssize(centroids) != clusters * d || (!offsets.empty() && std::ssize(offsets) != clusters))
      throw InputError(path_.string() + ": expected centroids of every head, found others");
    head.start.keys = BucketNet(d, clusters, {{}, {}, {}, centroids, offsets}, type_of_keys());
  }
}

/// Centroids of sampled keys into the checkpoint.
void SaapRun::partitions_by_kmeans() {
  const std::int64_t clusters = settings_.clusters;
  CentroidTrainer trainer(config_.layers, config_.kv_heads, config_.head_dim, false, settings_.seed);
  const std::int64_t all = training_prompts(),
                     used = settings_.key_prompts > 0 ? std::min(all, settings_.key_prompts) : all;
  const std::int64_t share = (clusters * kTrainingKeysPerCentroid + used - 1) / used;
  const auto prompt_of = [&](std::int64_t i) -> const Prompt& {
    return prompts_[static_cast<std::size_t>(i * all / used)];
  };
  std::int64_t total = 0, done = 0;
  for (std::int64_t i = 0; i < used; ++i) total += std::ssize(prompt_of(i).tokens);
  Capture capture(model_, context_options_);
  {
    Progress progress("saap: keys", total, "tokens", mode_);
    for (std::int64_t i = 0; i < used; ++i) {
      const Prompt& prompt = prompt_of(i);
      capture.read(prompt, {}, [&](std::int64_t tokens) { progress.at(done + tokens); });
      done += std::ssize(prompt.tokens);
      trainer.add(capture.kv(), capture.rope(), settings_.filter.sink, share, pool());
    }
  }
  Progress progress("saap: k-means", std::int64_t{config_.layers} * config_.kv_heads, "heads", mode_);
  const auto centroids = trainer.train(
      clusters,
      [&](Matrix<const float> keys, const KMeansOptions& how) { return device_->cluster(keys, how); },
      [&](std::int64_t heads) { progress.at(heads); });
  for (const Head& head : heads_) {
    const std::string prefix = head.prefix();
    const auto& own = centroids[static_cast<std::size_t>(head.layer)][static_cast<std::size_t>(head.head)];
    checkpoint_.arrays[prefix + "centroids"] = own;
    if (settings_.balance > 0) {
      checkpoint_.arrays[prefix + "offsets"] =
          balanced_offsets(trainer.sample(head.layer, head.head), own, settings_.balance, pool());
    }
  }
  save_checkpoint(true);
}

void SaapRun::partitions_from_artefact() {
  const auto held = read_saap_fingerprints(settings_.from);
  if (!held.empty() && held.begin()->first < settings_.dense_layers) {
    throw InputError(fmt::format(
        "{}: expected layers from {} on (--dense-layers), found layer {} too, which would be lost",
        settings_.from.string(), settings_.dense_layers, held.begin()->first));
  }
  for (Head& head : heads_) {
    if (head.head > 0) continue;
    const LayerGeometry geometry = {.layer = head.layer,
                                    .query_heads = config_.query_heads,
                                    .kv_heads = config_.kv_heads,
                                    .head_dim = config_.head_dim};
    const SaapLayer layer = read_saap(settings_.from, geometry, model_->fingerprint());
    if (layer.buckets() != settings_.clusters) {
      throw InputError(fmt::format("{}: expected {} clusters, found {}", settings_.from.string(),
                                   settings_.clusters, layer.buckets()));
    }
    const auto networks = std::ssize(layer.stretches) - (settings_.replace_network ? 1 : 0);
    if (networks < 1)
      throw InputError(
          fmt::format("{}: expected an artefact of several networks, of which the last could be "
                      "replaced, found one",
                      settings_.from.string()));
    if (settings_.add_network ? networks >= kMostSaapNetworks : networks > 1) {
      throw InputError(
          fmt::format("{}: expected an artefact of {}, found {} networks", settings_.from.string(),
                      settings_.add_network ? fmt::format("fewer than {} networks", kMostSaapNetworks)
                                            : "one network to train further",
                      networks));
    }
    for (Head& other : heads_) {
      if (other.layer != head.layer) continue;
      other.start = layer.heads[static_cast<std::size_t>(other.head)];
      other.start.networks.resize(static_cast<std::size_t>(networks));
    }
  }
}

void SaapRun::train_keys(std::span<Head* const> heads) {
  std::vector<Head*> group;
  std::copy_if(heads.begin(), heads.end(), std::back_inserter(group),
               [&](Head* h) { return !restore_keys(*h); });
  if (group.empty()) return;
  const std::string layers = fmt::format("layers {} to {}", group.front()->layer, group.back()->layer);
  std::vector<std::vector<SaapKeySample>> samples(group.size());  // [heads][prompts to train on]
  {
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < training_prompts(); ++i)
      total += std::ssize(prompts_[static_cast<std::size_t>(i)].tokens);
    Capture capture(model_, context_options_);
    Progress progress("saap: keys and queries of " + layers, total, "tokens", mode_);
    for (std::int64_t i = 0; i < training_prompts(); ++i) {
      const Reading reading = {.index = i, .queries = settings_.key_queries, .filter = settings_.filter};
      read_prompt(capture, reading, group, progress,
                  [&](std::size_t at, const SaapCandidates& candidates, const KvRows& kv) {
                    Rng rng(hash_seed(settings_.seed, i, group[at]->layer, group[at]->head));
                    SaapKeySample sample = sample_saap_keys(
                        candidates, read_saap_rows(kv, capture.rope()), capture.rope(), scale_of_scores(),
                        settings_.filter, settings_.key_queries, settings_.key_sample, rng);
                    if (sample.queries(config_.head_dim) >= 2) samples[at].push_back(std::move(sample));
                  });
    }
  }
  steps_done_ = 0;
  Progress progress("saap: key classifiers of " + layers, std::ssize(group) * settings_.key_steps, "steps",
                    mode_);
  try {
    pool().for_each(std::ssize(group), [&](std::int64_t i, int) {
      const auto at = static_cast<std::size_t>(i);
      if (!samples[at].empty()) fit_keys(*group[at], samples[at], progress);  // else the centroids stay
    });
  } catch (const Interrupted&) {
    save_checkpoint(true);
    throw;
  }
  save_checkpoint(true);
}

void SaapRun::fit_keys(Head& head, std::span<const SaapKeySample> samples, Progress& progress) {
  const std::string prefix = head.prefix() + "joint.";
  std::vector<float> centroids(static_cast<std::size_t>(settings_.clusters * config_.head_dim));
  kernels().widen(head.keys().linear_weight.data(), head.keys().type, std::ssize(centroids),
                  centroids.data());
  const std::uint64_t seed = hash_seed(settings_.seed, head.layer, head.head, 5);
  SaapKeyTrainer trainer({config_.head_dim, settings_.key_width(), settings_.clusters}, centroids,
                         settings_.rate, seed);
  {
    const std::lock_guard lock(mutex_);
    if (checkpoint_.notes.contains(prefix + "keys.steps")) trainer.get(checkpoint_, prefix, path_.string());
    steps_done_ += trainer.steps();
    progress.skip(trainer.steps());
  }
  while (trainer.steps() < settings_.key_steps) {
    if (cancel_requested()) {
      const std::lock_guard lock(mutex_);
      trainer.put(checkpoint_, prefix);
    }
    check_cancel();
    Rng rng(hash_seed(seed, trainer.steps()));
    const SaapKeySample& sample = samples[rng.below(samples.size())];
    std::vector<std::int32_t> queries(static_cast<std::size_t>(sample.queries(config_.head_dim)));
    std::iota(queries.begin(), queries.end(), 0);
    trainer.step(sample, queries,
                 settings_.decay ? cosine_decay(trainer.steps(), settings_.key_steps, 0.01) : 1.0);
    const std::lock_guard lock(mutex_);
    progress.at(++steps_done_);
    if (Clock::now() - saved_ < kCheckpointEvery) continue;
    trainer.put(checkpoint_, prefix);
    save_checkpoint(false);
  }
  const BucketNet net = trainer.exported(type_of_keys());
  SaapClassifier kept(net);
  const std::lock_guard lock(mutex_);
  checkpoint_.erase(prefix);
  checkpoint_.put(head.prefix() + "keys.", kept.module());
  head.start.keys = net;
}

}  // namespace lode
