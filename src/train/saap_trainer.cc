// SPDX-License-Identifier: Apache-2.0
#include "train/saap_trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <mutex>
#include <numeric>

#include "ann/balance.h"
#include "base/cancel.h"
#include "base/hash.h"
#include "base/threads.h"
#include "engine/model.h"
#include "kernels/kernels.h"
#include "kv/store.h"
#include "lodestone/error.h"
#include "model/rope.h"
#include "select/centroids.h"
#include "train/checkpoint.h"
#include "train/saap_classifier.h"
#include "train/saap_device.h"
#include "train/saap_head.h"
#include "train/saap_keys.h"

namespace lode {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::int64_t kLossSteps = 100;  // over which the training loss is averaged
constexpr auto kCheckpointEvery = std::chrono::seconds(20);

std::string prefix_of(int layer, int head) {
  return fmt::format("layer.{}.head.{}.", layer, head);
}

/// One head while it is trained.
struct Head {
  int layer = 0, head = 0;
  std::int64_t steps = 0;  ///< done, for the progress
  SaapHead start;          ///< buckets, and what an artefact to begin with says
  std::unique_ptr<SaapExamples> examples;
  std::vector<std::vector<std::int64_t>> counts;  // [prompts][C] keys behind the sink
  SaapHead result;
  const BucketNet& keys() const { return start.keys; }
  const SaapNetwork& trained() const { return result.networks.back(); }
  SaapHeadReport report;
};

class Training {
 public:
  Training(std::shared_ptr<const Model> model, const ContextOptions& options, const SaapSettings& settings,
           const std::vector<Prompt>& prompts, std::filesystem::path checkpoint, Progress::Mode progress,
           const std::function<void(const SaapHeadReport&)>& on_head)
      : model_(std::move(model)),
        settings_(settings),
        prompts_(prompts),
        path_(std::move(checkpoint)),
        mode_(progress),
        on_head_(on_head),
        context_options_(options),
        config_(model_->config()) {
    const std::int64_t all = std::ssize(prompts_);
    if (settings_.adapt && all != 1)
      throw InputError(fmt::format("expected one prompt to fine-tune to, found {}", all));
    if (!settings_.adapt && (all <= settings_.held_out || settings_.held_out < 1)) {
      throw InputError(
          fmt::format("expected more prompts than the {} held out, found {}: give more text, or cut it "
                      "into shorter prompts",
                      settings_.held_out, all));
    }
    for (const Prompt& prompt : prompts_)
      context_options_.max_tokens = std::max(context_options_.max_tokens, std::ssize(prompt.tokens));
    for (int layer = settings_.dense_layers; layer < config_.layers; ++layer) {
      for (int head = 0; head < config_.kv_heads; ++head) {
        heads_.emplace_back();
        heads_.back().layer = layer;
        heads_.back().head = head;
      }
    }
    if (heads_.empty()) throw InputError("expected a layer to train beside the dense ones, found none");
    device_ = make_saap_device(context_options_.device, pool());
  }

  SaapResult run() {
    open_checkpoint();
    find_partitions();
    const std::int64_t at_once = std::max<std::int64_t>(1, settings_.memory / bytes_of_head());
    const std::int64_t layers = std::max<std::int64_t>(1, at_once / config_.kv_heads);
    for (int first = settings_.dense_layers; first < config_.layers; first += static_cast<int>(layers))
      train_layers(first, std::min(config_.layers, first + static_cast<int>(layers)));
    SaapResult result;
    for (Head& head : heads_) {
      result.layers[head.layer].push_back(std::move(head.result));
      result.heads.push_back(head.report);
    }
    return result;
  }

 private:
  std::int64_t training_prompts() const {
    return settings_.adapt ? 1 : std::ssize(prompts_) - settings_.held_out;
  }
  std::int64_t bytes_of_head() const {
    const std::int64_t d = config_.head_dim, keys = settings_.key_sample, queries = settings_.key_queries;
    const std::int64_t examples = settings_.samples * (4 * d + 2 * settings_.clusters),
                       sample = settings_.train_keys ? 4 * d * (keys + queries) + 2 * keys * queries : 0;
    return std::ssize(prompts_) * std::max(examples, sample) + 1;
  }
  ThreadPool& pool() const { return model_->pool(); }
  float scale_of_scores() const { return 1.0f / std::sqrt(static_cast<float>(config_.head_dim)); }

  void open_checkpoint();
  void save_checkpoint(bool now);
  void find_partitions();
  void partitions_from_artefact();
  void train_layers(int begin, int end);
  void train_keys(std::span<Head* const> heads);
  void fit_keys(Head& head, std::span<const SaapKeySample> samples, Progress& progress);
  bool restore_keys(Head& head);
  void collect(std::span<Head* const> heads);
  /// Queries of a prompt, for how many are wanted of a head, and who takes them and the head's keys.
  struct Reading {
    std::int64_t index = 0, queries = 0;
    SaapFilter filter;
    bool last = true, before = true;  ///< queries among the last `late_tokens`, and those before
    using Take = std::function<void(std::size_t head, const SaapCandidates& candidates, const KvRows& kv)>;
  };
  void read_prompt(Capture& capture, const Reading& reading, std::span<Head* const> heads, Progress& progress,
                   const Reading::Take& take);
  void collect_prompt(Capture& capture, const Reading& reading, std::span<Head* const> heads,
                      Progress& progress);
  void fit(Head& head, Progress& progress);
  SaapClassifier new_classifier(const Head& head) const;
  void finish(Head& head, const BucketNet& net, double train_loss, Clock::time_point start);
  void measure(Head& head, const BucketNet& net) const;
  bool goes_on() const { return !settings_.from.empty() && !settings_.add_network; }
  SaapFilter test_filter() const;
  void keep(const Head& head);
  bool restore(Head& head);
  /// The head's part of the artefact.
  SaapHead assembled(const Head& head, SaapNetwork trained, std::vector<float> load, double imbalance) const;
  /// How weights of classifiers and of centroids are kept.
  DType type_of_keys() const { return settings_.type == DType::q8 ? DType::f16 : settings_.type; }

  std::shared_ptr<const Model> model_;
  const SaapSettings& settings_;
  const std::vector<Prompt>& prompts_;
  std::filesystem::path path_;
  Progress::Mode mode_;
  const std::function<void(const SaapHeadReport&)>& on_head_;
  ContextOptions context_options_;
  const ModelConfig& config_;
  std::unique_ptr<SaapDevice> device_;
  std::vector<Head> heads_;

  std::mutex mutex_;  // of what follows
  Checkpoint checkpoint_;
  Clock::time_point saved_ = Clock::now();
  std::int64_t steps_done_ = 0;
};

// ---- Checkpoint ------------------------------------------------------------------------------------------

void Training::open_checkpoint() {
  Hasher hasher;
  for (const Prompt& prompt : prompts_) hasher.add(std::as_bytes(std::span(prompt.tokens)));
  Json settings = settings_.json();
  settings["prompts"] = hasher.hex();
  settings["model"] = model_->fingerprint();
  if (context_options_.device == Device::cuda) settings["device"] = "cuda";  // its sums have other last bits
  if (!settings_.from.empty()) {  // by what it holds: another file may have come to its place
    Hasher from;
    for (const auto& [layer, fingerprint] : read_saap_fingerprints(settings_.from))
      from.add(std::as_bytes(std::span(fingerprint)));
    settings["from_fingerprint"] = from.hex();
  }
  if (std::filesystem::exists(path_)) {
    checkpoint_ = Checkpoint::read(path_);
    const auto found = checkpoint_.notes.find("settings");
    if (found == checkpoint_.notes.end() || found->second != settings.dump()) {
      throw InputError(
          path_.string() +
          ": expected the checkpoint of a run with these settings and texts, found another: remove it "
          "to start anew");
    }
  }
  checkpoint_.notes["settings"] = settings.dump();
}

void Training::save_checkpoint(bool now) {
  if (!now && Clock::now() - saved_ < kCheckpointEvery) return;
  checkpoint_.write(path_);
  saved_ = Clock::now();
}

/// A finished head: its networks as float32 and what was measured.
void Training::keep(const Head& head) {
  const std::string prefix = prefix_of(head.layer, head.head);
  checkpoint_.erase(prefix + "net.");
  SaapClassifier classifier(head.trained().queries);
  checkpoint_.put(prefix + "done.", classifier.module());
  checkpoint_.arrays[prefix + "load"] = head.result.load;
  checkpoint_.arrays[prefix + "imbalance"] = {head.result.imbalance};
  checkpoint_.arrays[prefix + "selectivity"] = head.trained().selectivity;
  checkpoint_.notes[prefix + "report"] = head.report.json().dump();
}

/// For what exported networks are kept as.
SaapClassifier exported_shape(std::int64_t d, std::int64_t hidden, std::int64_t buckets, bool residual) {
  const auto zeros = [](std::int64_t n) { return std::vector<float>(static_cast<std::size_t>(n), 0.0f); };
  const auto w1 = zeros(hidden * d), b1 = zeros(hidden), w2 = zeros(buckets * hidden),
             w3 = zeros(residual ? buckets * d : 0), b2 = zeros(buckets);
  return SaapClassifier(BucketNet(d, buckets, {w1, b1, w2, w3, b2}, DType::f32));
}

bool Training::restore(Head& head) {
  const std::string prefix = prefix_of(head.layer, head.head), where = path_.string();
  const auto report = checkpoint_.notes.find(prefix + "report");
  if (report == checkpoint_.notes.end()) return false;
  // The exported network's shape, filled from the checkpoint.
  const bool residual = checkpoint_.arrays.contains(prefix + "done.projection.weight");
  const auto bias = checkpoint_.arrays.find(prefix + (residual ? "done.inner.0.bias" : "done.0.bias"));
  if (bias == checkpoint_.arrays.end()) throw InputError(where + ": expected a finished network, found none");
  const std::int64_t c = head.keys().buckets;
  SaapClassifier classifier = exported_shape(config_.head_dim, std::ssize(bias->second), c, residual);
  checkpoint_.get(prefix + "done.", classifier.module(), nullptr, where);
  head.result = assembled(head,
                          {.queries = classifier.exported(settings_.type),
                           .selectivity = checkpoint_.array(
                               prefix + "selectivity", std::bit_width(static_cast<std::uint64_t>(c)), where)},
                          checkpoint_.array(prefix + "load", c, where),
                          checkpoint_.array(prefix + "imbalance", 1, where).front());
  head.report = SaapHeadReport::parse(report->second, where);
  return true;
}

SaapHead Training::assembled(const Head& head, SaapNetwork trained, std::vector<float> load,
                             double imbalance) const {
  SaapHead result = {.keys = head.keys(),
                     .networks = {},
                     .load = std::move(load),
                     .imbalance = static_cast<float>(imbalance)};
  if (settings_.add_network) {
    result = head.start;
    for (SaapNetwork& network : result.networks)
      if (settings_.type == DType::q8) network.queries = network.queries.rounded_to_8_bits();
  }
  result.networks.push_back(std::move(trained));
  return result;
}

// ---- 1. Partitions
// -----------------------------------------------------------------------------------------

void Training::find_partitions() {
  if (!settings_.from.empty()) return partitions_from_artefact();
  const std::int64_t d = config_.head_dim, clusters = settings_.clusters;
  if (!checkpoint_.arrays.contains(prefix_of(heads_[0].layer, heads_[0].head) + "centroids")) {
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
      const std::string prefix = prefix_of(head.layer, head.head);
      const auto& own = centroids[static_cast<std::size_t>(head.layer)][static_cast<std::size_t>(head.head)];
      checkpoint_.arrays[prefix + "centroids"] = own;
      if (settings_.balance > 0) {
        checkpoint_.arrays[prefix + "offsets"] =
            balanced_offsets(trainer.sample(head.layer, head.head), own, settings_.balance, pool());
      }
    }
    save_checkpoint(true);
  }
  for (Head& head : heads_) {
    const std::string prefix = prefix_of(head.layer, head.head);
    const std::vector<float>&centroids = checkpoint_.arrays[prefix + "centroids"],
          &offsets = checkpoint_.arrays[prefix + "offsets"];
    if (std::ssize(centroids) != clusters * d || (!offsets.empty() && std::ssize(offsets) != clusters))
      throw InputError(path_.string() + ": expected centroids of every head, found others");
    head.start.keys = BucketNet(d, clusters, {{}, {}, {}, centroids, offsets}, type_of_keys());
  }
}

void Training::partitions_from_artefact() {
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

// ---- Trained keys
// -------------------------------------------------------------------------------------------

void Training::train_keys(std::span<Head* const> heads) {
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
      fit_keys(*group[at], samples[at], progress);
    });
  } catch (const Interrupted&) {
    save_checkpoint(true);
    throw;
  }
  save_checkpoint(true);
}

void Training::fit_keys(Head& head, std::span<const SaapKeySample> samples, Progress& progress) {
  const std::string prefix = prefix_of(head.layer, head.head) + "joint.";
  if (samples.empty()) {
    throw InputError(
        fmt::format("layer {} head {}: expected two queries of a prompt that attend far keys, found fewer: "
                    "longer prompts, a smaller window or another filter would give some",
                    head.layer, head.head));
  }
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
  checkpoint_.put(prefix_of(head.layer, head.head) + "keys.", kept.module());
  head.start.keys = net;
}

bool Training::restore_keys(Head& head) {
  const std::string prefix = prefix_of(head.layer, head.head) + "keys.";
  if (!checkpoint_.arrays.contains(prefix + "inner.0.weight")) return false;
  SaapClassifier kept = exported_shape(config_.head_dim, settings_.key_width(), settings_.clusters, true);
  checkpoint_.get(prefix, kept.module(), nullptr, path_.string());
  head.start.keys = kept.exported(type_of_keys());
  return true;
}

// ---- 2. Examples
// -------------------------------------------------------------------------------------------

void Training::train_layers(int begin, int end) {
  std::vector<Head*> all, group;
  for (Head& head : heads_)
    if (head.layer >= begin && head.layer < end) all.push_back(&head);
  if (settings_.train_keys) train_keys(all);
  for (Head* head : all) {
    if (!restore(*head)) {
      group.push_back(head);
      continue;
    }
    if (on_head_) on_head_(head->report);
  }
  if (group.empty()) return;
  collect(group);
  steps_done_ = 0;
  Progress progress(
      fmt::format("saap: classifiers of layers {} to {}", group.front()->layer, group.back()->layer),
      std::ssize(group) * settings_.steps, "steps", mode_);
  try {
    pool().for_each(std::ssize(group),
                    [&](std::int64_t i, int) { fit(*group[static_cast<std::size_t>(i)], progress); });
  } catch (const Interrupted&) {
    save_checkpoint(true);
    throw;
  }
  save_checkpoint(true);
}

void Training::collect(std::span<Head* const> heads) {
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
  for (const Head* head : heads) {
    const std::int64_t train = head->examples->begin_of(training_prompts());
    if (has_batch(*head->examples, training_prompts()) && head->examples->count() > train) continue;
    throw InputError(
        fmt::format("layer {} head {}: expected queries that attend far keys, two of one trained prompt and "
                    "one of held-out prompts, found {} and {} in all: "
                    "longer prompts, a smaller window or another filter would give some",
                    head->layer, head->head, train, head->examples->count() - train));
  }
}

void Training::read_prompt(Capture& capture, const Reading& reading, std::span<Head* const> heads,
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

void Training::collect_prompt(Capture& capture, const Reading& reading, std::span<Head* const> heads,
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

SaapFilter Training::test_filter() const {
  SaapFilter filter = settings_.filter;
  if (!settings_.test_as_asked) return filter;
  filter.pairs = filter.causal = true;
  filter.queries = false;
  return filter;
}

// ---- 3. Classifiers
// ----------------------------------------------------------------------------------------

SaapClassifier Training::new_classifier(const Head& head) const {
  if (goes_on()) return SaapClassifier(head.start.networks.front().queries);
  const std::int64_t d = config_.head_dim;
  SaapClassifier classifier(d, settings_.hidden, settings_.clusters, settings_.residual,
                            hash_seed(settings_.seed, head.layer, head.head));
  if (!settings_.residual || head.keys().linear_weight.empty()) return classifier;
  std::vector<float> centroids(static_cast<std::size_t>(settings_.clusters * d));
  kernels().widen(head.keys().linear_weight.data(), head.keys().type, std::ssize(centroids),
                  centroids.data());
  classifier.start_linear(centroids);
  return classifier;
}

void Training::fit(Head& head, Progress& progress) {
  const Clock::time_point start = Clock::now();
  const std::string prefix = prefix_of(head.layer, head.head) + "net.";
  SaapClassifier classifier = new_classifier(head);
  Adam adam(classifier.module(), {.rate = settings_.rate});
  {
    const std::lock_guard lock(mutex_);
    if (checkpoint_.notes.contains(prefix + "steps"))
      checkpoint_.get(prefix, classifier.module(), &adam, path_.string());
    steps_done_ += adam.steps();
  }
  const std::unique_ptr<SaapFit> fit = device_->fit(*head.examples, classifier, adam, settings_.batch);
  double loss = 0;
  const auto keep_state = [&] {
    fit->store();
    checkpoint_.put(prefix, classifier.module(), &adam);
  };
  const auto steps_from_here = [&] {
    return draw_steps(*head.examples, training_prompts(), settings_,
                      hash_seed(settings_.seed, head.layer, head.head), adam.steps(), fit->series());
  };
  std::vector<SaapFit::Step> next = steps_from_here();
  while (!next.empty()) {
    if (cancel_requested()) {
      const std::lock_guard lock(mutex_);
      keep_state();
    }
    check_cancel();
    const std::int64_t first = adam.steps();
    fit->begin(next);
    next = steps_from_here();  // drawn while a device takes those
    const std::vector<double> losses = fit->finish();
    for (std::int64_t i = 0; i < std::ssize(losses); ++i) {
      if (first + i >= settings_.steps - kLossSteps)
        loss +=
            losses[static_cast<std::size_t>(i)] / static_cast<double>(std::min(kLossSteps, settings_.steps));
    }
    const std::lock_guard lock(mutex_);
    progress.at(steps_done_ += std::ssize(losses));
    if (Clock::now() - saved_ < kCheckpointEvery) continue;
    keep_state();
    save_checkpoint(false);
  }
  fit->store();
  finish(head, classifier.exported(settings_.type), loss, start);
}

void Training::finish(Head& head, const BucketNet& net, double train_loss, Clock::time_point start) {
  head.report = {.layer = head.layer, .head = head.head, .train_loss = train_loss};
  measure(head, net);
  head.report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  head.examples.reset();
  const std::lock_guard lock(mutex_);
  keep(head);
  if (on_head_) on_head_(head.report);
}

/// Its report, and its result with this network.
void Training::measure(Head& head, const BucketNet& net) const {
  const std::int64_t c = settings_.clusters;
  const SaapExamples& examples = *head.examples;
  SaapHeadReport& report = head.report;
  report.examples = examples.begin_of(training_prompts());
  report.held_out = examples.count() - report.examples;
  const auto measured = [&](const BucketNet& queries) {
    return measure_saap(examples, training_prompts(), head.counts, queries, head.keys(), settings_.probes);
  };
  const SaapMeasures measures = measured(net);
  report.loss = measures.loss;
  report.mass = measures.chosen.mass, report.selectivity = measures.chosen.selectivity;
  report.kmeans_mass = measures.kmeans.mass, report.kmeans_selectivity = measures.kmeans.selectivity;
  report.best_mass = measures.best.mass;
  report.gain = measures.gain;
  report.captured = measures.captured, report.kmeans_captured = measures.kmeans_captured;
  report.best_captured = measures.best_captured;
  if (goes_on()) {
    const SaapMeasures start = measured(head.start.networks.front().queries);
    report.start_loss = start.loss, report.start_captured = start.captured;
  }
  SaapNetwork trained = {.queries = net, .selectivity = measures.selectivity};
  std::vector<double> load(static_cast<std::size_t>(c), 0.0);
  double imbalance = 0;
  for (std::int64_t prompt = 0; prompt < training_prompts(); ++prompt) {
    const std::vector<std::int64_t>& counts = head.counts[static_cast<std::size_t>(prompt)];
    const auto keys = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
    for (std::size_t b = 0; b < counts.size(); ++b)
      load[b] += static_cast<double>(counts[b]) / std::max(1.0, keys);
    imbalance += imbalance_of(counts) / static_cast<double>(training_prompts());
  }
  std::vector<float> shares;
  for (const double share : load)
    shares.push_back(static_cast<float>(share / static_cast<double>(training_prompts())));
  head.result = assembled(head, std::move(trained), std::move(shares), imbalance);
  report.imbalance = imbalance;
}

}  // namespace

std::vector<SaapFit::Step> draw_steps(const SaapExamples& examples, std::int64_t prompts,
                                      const SaapSettings& settings, std::uint64_t seed, std::int64_t first,
                                      std::int64_t most) {
  std::vector<SaapFit::Step> steps;
  for (std::int64_t step = first; step < std::min(settings.steps, first + most); ++step) {
    Rng rng(hash_seed(seed, step));
    steps.push_back({.rows = draw_batch(examples, prompts, settings.batch, rng),
                     .rate_scale = settings.decay ? cosine_decay(step, settings.steps, 0.01) : 1.0});
  }
  return steps;
}

SaapResult train_saap(std::shared_ptr<const Model> model, const ContextOptions& options,
                      const SaapSettings& settings, const std::vector<Prompt>& prompts,
                      const std::filesystem::path& checkpoint, Progress::Mode progress,
                      const std::function<void(const SaapHeadReport&)>& on_head) {
  return Training(std::move(model), options, settings, prompts, checkpoint, progress, on_head).run();
}

}  // namespace lode
