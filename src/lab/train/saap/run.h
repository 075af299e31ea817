// SPDX-License-Identifier: Apache-2.0
// One run of SAAP's training (saap_trainer.h), over the files of its steps: what is kept of it
// (saap_checkpoint.cc), the partitions of the keys (saap_partitions.cc), the queries that are learned from
// (saap_queries.cc), and the classifiers, with the run itself (saap_trainer.cc).
#pragma once

#include <chrono>
#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/threads.h"
#include "engine/model.h"
#include "kv/store.h"
#include "lab/train/checkpoint.h"
#include "lab/train/saap/classifier.h"
#include "lab/train/saap/keys.h"
#include "lab/train/saap/trainer.h"

namespace lode {

class SaapRun {
 public:
  SaapRun(std::shared_ptr<const Model> model, const ContextOptions& options, const SaapSettings& settings,
          const std::vector<Prompt>& prompts, std::filesystem::path checkpoint, Progress::Mode progress,
          const std::function<void(const SaapHeadReport&)>& on_head);
  SaapResult run();

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kCheckpointEvery = std::chrono::seconds(20);

  /// One head while it is trained.
  struct Head {
    int layer = 0, head = 0;
    SaapHead start;  ///< buckets, and what an artefact to begin with says
    std::unique_ptr<SaapExamples> examples;
    std::vector<std::vector<std::int64_t>> counts;  // [prompts][C] keys behind the sink
    SaapHead result;
    SaapHeadReport report;
    const BucketNet& keys() const { return start.keys; }
    const SaapNetwork& trained() const { return result.networks.back(); }
    /// Of its arrays in the checkpoint.
    std::string prefix() const;
  };

  std::int64_t training_prompts() const {
    return settings_.adapt ? 1 : std::ssize(prompts_) - settings_.held_out;
  }
  std::int64_t bytes_of_head() const {
    return saap_bytes_of_head(settings_, std::ssize(prompts_), config_.head_dim);
  }
  ThreadPool& pool() const { return model_->pool(); }
  float scale_of_scores() const { return 1.0f / std::sqrt(static_cast<float>(config_.head_dim)); }

  // saap_checkpoint.cc
  void open_checkpoint();
  void save_checkpoint(bool now);
  void keep(const Head& head);
  bool restore(Head& head);
  bool restore_keys(Head& head);

  // saap_partitions.cc
  void find_partitions();
  void partitions_by_kmeans();
  void partitions_from_artefact();
  void train_keys(std::span<Head* const> heads);
  void fit_keys(Head& head, std::span<const SaapKeySample> samples, Progress& progress);

  // saap_queries.cc
  /// Queries of a prompt, for how many are wanted of a head, and who takes them and the head's keys.
  struct Reading {
    std::int64_t index = 0, queries = 0;
    SaapFilter filter;
    bool last = true, before = true;  ///< queries among the last `late_tokens`, and those before
    using Take = std::function<void(std::size_t head, const SaapCandidates& candidates, const KvRows& kv)>;
  };
  void collect(std::span<Head* const> heads);
  void read_prompt(Capture& capture, const Reading& reading, std::span<Head* const> heads, Progress& progress,
                   const Reading::Take& take);
  void collect_prompt(Capture& capture, const Reading& reading, std::span<Head* const> heads,
                      Progress& progress);
  SaapFilter test_filter() const;

  // saap_trainer.cc
  void train_heads(std::span<Head* const> all);
  bool goes_on() const { return !settings_.from.empty() && !settings_.add_network; }
  SaapClassifier new_classifier(const Head& head) const;
  /// Whether no prompt has queries of the head that attend far keys: nothing teaches it.
  bool starves(const Head& head) const;
  /// Such a head: sink and window alone, or what the artefact to go on from had.
  void settle(Head& head);
  void fit(Head& head, Progress& progress);
  void finish(Head& head, const BucketNet& net, double train_loss, Clock::time_point start);
  void measure(Head& head, const BucketNet& net) const;
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

}  // namespace lode
