// SPDX-License-Identifier: Apache-2.0
// What the suites ask for, measured once: equal cells of different suites are one cell, a context is
// prefilled once for all methods, protocols and suites that ask about it, and what an earlier run has
// measured is read.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/progress.h"
#include "lab/eval/eval.h"
#include "lab/eval/records.h"
#include "lab/report/cells.h"
#include "lab/report/effort.h"
#include "lab/report/suite.h"
#include "lab/tasks/haystack.h"
#include "lodestone/engine.h"

namespace lode {

struct GridOptions {
  ContextOptions context;
  std::filesystem::path folder;              ///< raw results go to folder/raw
  std::filesystem::path haystack;            ///< text files that tasks are hidden in; empty = built-in prose
  std::vector<Sample> samples;               ///< the user's own, in place of every suite's tasks and lengths
  std::shared_ptr<const DocumentChat> chat;  ///< as EvalOptions has it, for all questions
  Progress::Mode progress = Progress::Mode::automatic;
  bool so_far = false;  ///< measure nothing: what is there is what there is
};

/// A method that a report leaves out, and why.
struct Skipped {
  std::string spec, reason;
};

/// One method of a run that can be run.
struct GridMethod {
  std::string label;  ///< as the suite calls it
  NamedSpec named;    ///< named by its canonical text
};

class MeasurementRunner {
 public:
  MeasurementRunner(std::shared_ptr<const Model> model, std::span<const Suite> suites,
                    const GridOptions& options);
  ~MeasurementRunner();

  /// Measures what is missing. On Interrupted everything so far is kept.
  void run();

  const std::vector<Skipped>& skipped() const { return skipped_; }
  std::vector<GridMethod> methods(const SuiteRun& run) const;

  // What the runs gave; call after run().

  /// Whether questions are the suites' tasks, not the user's samples.
  bool has_own_tasks() const { return options_.samples.empty(); }
  bool so_far() const { return options_.so_far; }
  /// Samples of an eval run, in order; so far, those that all methods have answered under all protocols.
  std::vector<Sample> samples(const SuiteRun& run) const;
  /// Likewise all, answered or not.
  std::vector<Sample> planned_samples(const SuiteRun& run) const;
  /// `full` first.
  EvalReport eval(const SuiteRun& run, const Protocol& protocol) const;
  const AnswerRecord& answer(const Sample& sample, const NamedSpec& spec, const Protocol& protocol) const;
  /// Results of `probe --json`, by method in the run's order; full and streaming too when they are among
  /// them.
  std::vector<Json> probe(const SuiteRun& run, std::int64_t length) const;
  /// Rows of `probe --lengths --json` of one method, by length.
  std::vector<Json> recall(const SuiteRun& run, const GridMethod& method) const;
  /// What cluster_maps gives of one method at one length.
  std::vector<Json> clusters(const SuiteRun& run, std::int64_t length, const GridMethod& method) const;
  /// What a run gave that is of the model alone, of each layer or variant.
  std::vector<Json> study(const SuiteRun& run, std::int64_t length) const;
  /// Rows of `bench --json`, `full` first.
  std::vector<Json> bench(const SuiteRun& run, std::int64_t length) const;
  /// What the parts of the work took, those of earlier runs into this folder included; by name.
  std::map<std::string, CostLog> efforts() const;
  /// Of the work of a bench run at one length, where it is known, or of all answers.
  std::optional<CostLog> effort_of(const SuiteRun& run, std::int64_t length) const;
  /// Whether a decode run has its keys and values in host memory beside a GPU.
  bool is_on_host(const SuiteRun& run) const;
  CostLog effort_of_answers() const;
  const Model& model() const { return *model_; }
  std::int64_t kv_bytes(std::int64_t tokens) const;  ///< of the keys and values of so many tokens

 private:
  struct Group;
  /// A piece of the work that is measured at once.
  struct Part {
    std::string name;
    std::int64_t cost = 0;  ///< lab/eval/work_cost.h
    /// Told how much of its cost is done, where it can tell.
    std::function<void(const std::function<void(std::int64_t)>&)> work;
  };
  std::vector<Part> plan_parts();
  void find_methods(std::span<const Suite> suites);
  void try_host_tier(std::span<const Suite> suites);
  std::optional<std::string> refusal(const SuiteRun& run, const Spec& spec) const;
  void plan_groups(std::span<const Suite> suites);
  void plan_questions(const SuiteRun& run);
  void make_samples_of(Group& group) const;
  std::shared_ptr<const Haystack> haystack(std::uint64_t seed, std::int64_t length) const;
  Records& records(const Protocol& protocol);
  std::string probe_text(const SuiteRun& run, std::int64_t length) const;
  bool is_answered(const SuiteRun& run, const Sample& sample) const;
  void plan_answers(std::vector<Part>& parts);
  void plan_probes(std::vector<Part>& parts);
  void plan_recall(const SuiteRun& run, std::vector<Part>& parts);
  void plan_clusters(const SuiteRun& run, std::vector<Part>& parts);
  void plan_study(const SuiteRun& run, std::vector<Part>& parts);
  void plan_bench(const SuiteRun& run, std::vector<Part>& parts);
  /// Whether a cell is still to be measured, and by no part that was planned before.
  bool is_new(const Json& key);
  void probe_cells(const SuiteRun& run, std::int64_t length, const LocalWindow& dense,
                   std::span<const std::pair<NamedSpec, Json>> pending);
  void measure_recall(const SuiteRun& run, const std::vector<NamedSpec>& pending);
  void measure_clusters(const SuiteRun& run, std::int64_t length, const std::vector<NamedSpec>& pending);
  Json measure_study(const SuiteRun& run, std::int64_t length) const;
  std::vector<std::string> study_texts(const SuiteRun& run, std::int64_t length, std::int64_t count) const;
  std::optional<std::string> bench_refusal(const SuiteRun& run, const Spec& spec) const;
  Json measure_attention(const SuiteRun& run, std::int64_t length, std::span<const Spec> specs,
                         double seconds) const;
  static std::string effort_name(const SuiteRun& run, std::int64_t length);
  void timed(const std::string& name, const std::function<void()>& work);
  Json measure_bench(const SuiteRun& run, std::int64_t length, std::span<const Spec> specs) const;
  Json measure_decode(const SuiteRun& run, std::int64_t length, std::span<const Spec> specs) const;
  Json row_on_gpu(std::int64_t length) const;
  Json row_without_cache(std::int64_t length) const;
  Json base_key(std::string_view kind) const;
  Json text_key(const SuiteRun& run, const NamedSpec& spec) const;
  Json probe_key(const SuiteRun& run, std::int64_t length, const NamedSpec& spec) const;
  Json recall_key(const SuiteRun& run, const NamedSpec& spec) const;
  Json clusters_key(const SuiteRun& run, std::int64_t length, const NamedSpec& spec) const;
  Json study_key(const SuiteRun& run, std::int64_t length) const;
  Json bench_key(const SuiteRun& run, std::int64_t length) const;
  std::string group_name(const SuiteRun& run, const std::string& task) const;
  Group* find_group(const SuiteRun& run, const std::string& task, std::int64_t length) const;  ///< or null

  std::shared_ptr<const Model> model_;
  std::vector<SuiteRun> runs_;
  GridOptions options_;
  ResultCache cells_;
  ResultCache effort_;
  std::map<std::string, std::unique_ptr<Records>> records_;  // by protocol
  std::map<std::string, Spec> specs_;                        // those that can be run, by what suites write
  std::map<std::string, std::string> files_;                 // NamedSpec::files by canonical text
  std::set<std::string> planned_;                            // keys of cells that a part will measure
  std::set<std::pair<std::string, std::string>> refused_;    // (setting, spec) that a run cannot measure
  std::shared_ptr<const Haystack> haystack_;                 // the user's; null = built-in prose
  std::string haystack_hash_;                                // empty = built-in prose
  bool has_host_tier_ = false;  // whether this model's keys may lie in host memory beside a GPU
  std::vector<Skipped> skipped_;
  std::vector<std::unique_ptr<Group>> groups_;
};

/// sink and window of "sink=1,window=63"; what it does not name stays as given.
LocalWindow dense_parts(std::string_view text, LocalWindow otherwise);

}  // namespace lode
