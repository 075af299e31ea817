// SPDX-License-Identifier: Apache-2.0
// A run of SAAP's training, and its step 3: the classifiers.
#include "lab/train/saap/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <mutex>
#include <numeric>

#include "ann/balance.h"
#include "base/cancel.h"
#include "base/text.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lab/train/saap/run.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kLossSteps = 100;  // over which the training loss is averaged

}  // namespace

SaapRun::SaapRun(std::shared_ptr<const Model> model, const ContextOptions& options,
                 const SaapSettings& settings, const std::vector<Prompt>& prompts,
                 std::filesystem::path checkpoint, Progress::Mode progress,
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
  if (settings_.rate * settings_.weight_decay >= 1.0)
    throw InputError(fmt::format(
        "expected a rate times a weight decay below 1, or weights do not shrink but turn, found {:g} x {:g}",
        settings_.rate, settings_.weight_decay));
  expect_like_layers(config_, "train saap");
  if (heads_.empty()) throw InputError("expected a layer to train beside the dense ones, found none");
  if (bytes_of_head() > settings_.memory)
    throw InputError(
        fmt::format("--sample-memory: expected at least {}, which the queries of one head take in {} "
                    "prompts, found {}: raise it, "
                    "or take fewer --samples or --prompts",
                    human_bytes(bytes_of_head()), prompts_.size(), human_bytes(settings_.memory)));
  device_ = make_saap_device(context_options_.device, pool());
}

SaapResult SaapRun::run() {
  open_checkpoint();
  find_partitions();
  const std::int64_t at_once = settings_.memory / bytes_of_head();
  // Whole layers where they fit: prompts are read once for each group.
  const std::int64_t size =
      at_once < config_.kv_heads ? at_once : at_once / config_.kv_heads * config_.kv_heads;
  for (std::int64_t first = 0; first < std::ssize(heads_); first += size) {
    std::vector<Head*> group;
    for (std::int64_t i = first; i < std::min(std::ssize(heads_), first + size); ++i)
      group.push_back(&heads_[static_cast<std::size_t>(i)]);
    train_heads(group);
  }
  const auto learnt_nothing = [](const Head& head) { return head.report.near_only; };
  if (std::all_of(heads_.begin(), heads_.end(), learnt_nothing)) {
    std::filesystem::remove(path_);  // nothing was learnt, and it would be in the way of other settings
    throw InputError(
        "train saap: expected queries that attend far keys, two of one trained prompt and one of held-out "
        "prompts, "
        "found no head that has them: longer prompts, a smaller --window or --distance, or another --filter "
        "would "
        "give some");
  }
  SaapResult result;
  for (Head& head : heads_) {
    result.layers[head.layer].push_back(std::move(head.result));
    result.heads.push_back(head.report);
  }
  return result;
}

void SaapRun::train_heads(std::span<Head* const> all) {
  std::vector<Head*> group;
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
  for (Head* head : group)
    if (starves(*head)) settle(*head);
  std::erase_if(group, [](const Head* head) { return head->examples == nullptr; });
  if (group.empty()) return save_checkpoint(true);
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

SaapClassifier SaapRun::new_classifier(const Head& head) const {
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

bool SaapRun::starves(const Head& head) const {
  return !has_batch(*head.examples, training_prompts()) ||
         head.examples->count() == head.examples->begin_of(training_prompts());
}

void SaapRun::settle(Head& head) {
  const auto c = static_cast<std::size_t>(settings_.clusters);
  const std::int64_t train = head.examples->begin_of(training_prompts());
  head.report = {.layer = head.layer,
                 .head = head.head,
                 .examples = train,
                 .held_out = head.examples->count() - train,
                 .near_only = head.start.networks.empty()};
  SaapNetwork network = {.queries = {}, .selectivity = std::vector<float>(std::bit_width(c), 0.0f)};
  if (head.report.near_only)
    network.queries = new_classifier(head).exported(settings_.type);
  else
    network = head.start.networks.back();
  head.result = assembled(head, std::move(network), std::vector<float>(c, 1.0f / static_cast<float>(c)), 1.0);
  head.result.near_only = head.report.near_only;
  head.examples.reset();
  const std::lock_guard lock(mutex_);
  keep(head);
  if (on_head_) on_head_(head.report);
}

void SaapRun::fit(Head& head, Progress& progress) {
  const Clock::time_point start = Clock::now();
  const std::string prefix = head.prefix() + "net.";
  SaapClassifier classifier = new_classifier(head);
  Adam adam(classifier.module(), {.rate = settings_.rate, .weight_decay = settings_.weight_decay});
  std::vector<float> last_losses;  // of the steps so far among the last kLossSteps
  {
    const std::lock_guard lock(mutex_);
    if (checkpoint_.notes.contains(prefix + "steps"))
      checkpoint_.get(prefix, classifier.module(), &adam, path_.string());
    if (const auto kept = checkpoint_.arrays.find(prefix + "losses"); kept != checkpoint_.arrays.end())
      last_losses = kept->second;
    steps_done_ += adam.steps();
    progress.skip(adam.steps());
  }
  const std::unique_ptr<SaapFit> fit = device_->fit(*head.examples, classifier, adam, settings_.batch);
  const auto keep_state = [&] {
    fit->store();
    checkpoint_.put(prefix, classifier.module(), &adam);
    checkpoint_.arrays[prefix + "losses"] = last_losses;
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
        last_losses.push_back(static_cast<float>(losses[static_cast<std::size_t>(i)]));
    }
    const std::lock_guard lock(mutex_);
    progress.at(steps_done_ += std::ssize(losses));
    if (Clock::now() - saved_ < kCheckpointEvery) continue;
    keep_state();
    save_checkpoint(false);
  }
  fit->store();
  const double loss = std::accumulate(last_losses.begin(), last_losses.end(), 0.0);
  finish(head, classifier.exported(settings_.type),
         loss / static_cast<double>(std::max<std::size_t>(1, last_losses.size())), start);
}

void SaapRun::finish(Head& head, const BucketNet& net, double train_loss, Clock::time_point start) {
  head.report = {.layer = head.layer, .head = head.head, .train_loss = train_loss};
  measure(head, net);
  head.report.seconds = std::chrono::duration<double>(Clock::now() - start).count();
  head.examples.reset();
  const std::lock_guard lock(mutex_);
  keep(head);
  if (on_head_) on_head_(head.report);
}

/// Its report, and its result with this network.
void SaapRun::measure(Head& head, const BucketNet& net) const {
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

SaapHead SaapRun::assembled(const Head& head, SaapNetwork trained, std::vector<float> load,
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
  return SaapRun(std::move(model), options, settings, prompts, checkpoint, progress, on_head).run();
}

}  // namespace lode
