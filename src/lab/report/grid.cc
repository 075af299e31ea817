// SPDX-License-Identifier: Apache-2.0
#include "lab/report/grid.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <set>
#include <utility>

#include "base/cancel.h"
#include "base/hash.h"
#include "base/out_of_memory.h"
#include "engine/context.h"
#include "lab/bench/attention.h"
#include "lab/bench/decode.h"
#include "lab/eval/probe.h"
#include "lab/eval/settings.h"
#include "lab/eval/work_cost.h"
#include "lab/report/grid_group.h"
#include "lab/studies/cluster_map.h"
#include "lab/studies/recall.h"
#include "lab/tasks/samples.h"
#include "lodestone/error.h"
#include "model/config.h"
#include "select/artefacts.h"

namespace lode {

namespace {

constexpr double kBenchSeconds = 0.5;  ///< of measuring, per method and length
// Enough to learn whether a method can be measured at all.
constexpr std::int64_t kTrialKeys = 4096;
constexpr double kTrialSeconds = 0.01;

void quiet(std::string_view) {}

std::filesystem::path raw_folder(const GridOptions& options) {
  std::filesystem::create_directories(options.folder / "raw");
  return options.folder / "raw";
}

/// Sums the time of layers' attention, projections to queries, keys and values included.
class LayerClock {
 public:
  ForwardHooks hooks() {
    ForwardHooks hooks;
    hooks.attended = [this](const auto&...) { attention_ += lap(); };
    hooks.layer_done = [this](int, std::span<const float>) { lap(); };
    return hooks;
  }
  double attention() const { return attention_; }  ///< microseconds

 private:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double, std::micro>(now - std::exchange(last_, now)).count();
  }
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
  double attention_ = 0;
};

/// Which of a kind's runs refuse alike.
std::string setting_of(const SuiteRun& run) {
  if (run.kind == RunKind::attention) return "at the shape " + run.shape;
  return run.kind == RunKind::probe ? "in a probe with the dense parts '" + run.dense + "'" : "";
}

/// A probe gives all methods one sink and window: what names others would be measured as something else.
std::optional<std::string> probe_refusal(const SuiteRun& run, const Spec& spec) {
  const LocalWindow dense = dense_parts(run.dense, ProbeOptions().dense);
  const bool other_sink = spec.given.contains("sink") && spec.dense.sink != dense.sink;
  const bool other_window = spec.given.contains("window") && spec.dense.window != dense.window;
  if (!other_sink && !other_window) return std::nullopt;
  return fmt::format("expected the probe's sink {} and window {}, which all its methods get, found {} and {}",
                     dense.sink, dense.window, spec.dense.sink, spec.dense.window);
}

}  // namespace

MeasurementRunner::MeasurementRunner(std::shared_ptr<const Model> model, std::span<const Suite> suites,
                                     const GridOptions& options)
    : model_(std::move(model)),
      options_(options),
      cells_(raw_folder(options) / "cells.jsonl"),
      effort_(raw_folder(options) / "effort.jsonl") {
  if (!options_.haystack.empty()) {
    haystack_ =
        std::make_shared<Haystack>(Haystack::read(options_.haystack, make_meter(model_->tokenizer())));
    haystack_hash_ = hash_hex(haystack_->text());
  }
  find_methods(suites);
  try_host_tier(suites);
  plan_groups(suites);
}

MeasurementRunner::~MeasurementRunner() = default;

/// Why this run cannot measure a method that others can, if it cannot.
std::optional<std::string> MeasurementRunner::refusal(const SuiteRun& run, const Spec& spec) const {
  if (run.kind == RunKind::clusters && spec.name != "squeezed")
    return "expected a method that clusters the text's keys, found " + spec.name;
  return run.kind == RunKind::probe ? probe_refusal(run, spec) : bench_refusal(run, spec);
}

/// Whether the method can be measured at this run's shape: an artefact may have been trained for another, and
/// the GPU may not choose by it. Says why not.
std::optional<std::string> MeasurementRunner::bench_refusal(const SuiteRun& run, const Spec& spec) const {
  const bool on_gpu = options_.context.device == Device::cuda;
  if (run.kind != RunKind::attention || (!on_gpu && !find_method(spec.name).trained)) return std::nullopt;
  SuiteRun trial = run;
  if (!on_gpu) trial.batch = trial.query_tokens = 1;
  try {
    const Json rows = measure_attention(trial, kTrialKeys + trial.query_tokens, {&spec, 1}, kTrialSeconds);
    if (spec.name != "full" && rows.size() < 2)
      return fmt::format("{} query tokens do not choose together on the GPU", trial.query_tokens);
  } catch (const InputError& error) {
    return error.what();
  }
  return std::nullopt;
}

/// Every spec is parsed and attached to an empty context once: what cannot be run is known before hours of
/// work.
void MeasurementRunner::find_methods(std::span<const Suite> suites) {
  std::set<std::string> seen;
  ContextOptions small = options_.context;
  small.max_tokens = 1024;
  Context empty(model_, small);
  for (const Suite& suite : suites) {
    for (const SuiteRun& run : suite.runs) {
      for (const SuiteMethod& method : run.methods) {
        if (!seen.insert(method.spec).second) continue;
        try {
          const Spec spec = parse_spec(method.spec);
          if (spec.name != "full") empty.attach(spec);
          specs_.emplace(method.spec, spec);
          files_.emplace(spec.str(), files_hash(spec, model_->path()));
        } catch (const InputError& error) {
          skipped_.push_back({method.spec, error.what()});
        }
      }
      for (const GridMethod& m : methods(run)) {
        const auto why = refusal(run, m.named.spec);
        if (why && refused_.insert({setting_of(run), m.named.name}).second)
          skipped_.push_back({m.named.name + " " + setting_of(run), *why});
      }
    }
  }
}

/// Not every model's keys can: what cannot is known before hours of work, and measured where they lie by themselves.
void MeasurementRunner::try_host_tier(std::span<const Suite> suites) {
  const auto asks = [](const SuiteRun& run) { return run.kv_tier == KvTier::host; };
  const bool asked = std::any_of(suites.begin(), suites.end(), [&](const Suite& suite) {
    return std::any_of(suite.runs.begin(), suite.runs.end(), asks);
  });
  if (!asked || options_.context.device != Device::cuda) return;
  if (options_.so_far) {  // nothing is measured: what there is says itself
    has_host_tier_ = true;
    return;
  }
  ContextOptions on_host = options_.context;
  on_host.max_tokens = 1024;
  on_host.kv_tier = KvTier::host;
  try {
    Context trial(model_, on_host);
    has_host_tier_ = true;
  } catch (const InputError& error) {
    skipped_.push_back({"kv_tier = host", error.what()});
  } catch (const RunError& error) {
    skipped_.push_back({"kv_tier = host", error.what()});
  }
}

bool MeasurementRunner::is_on_host(const SuiteRun& run) const {
  return has_host_tier_ && run.kv_tier == KvTier::host;
}

std::vector<GridMethod> MeasurementRunner::methods(const SuiteRun& run) const {
  std::vector<GridMethod> methods;
  std::set<std::string> seen;
  for (const SuiteMethod& m : run.methods) {
    const auto spec = specs_.find(m.spec);
    if (spec == specs_.end() || !seen.insert(spec->second.str()).second) continue;
    const std::string name = spec->second.str();
    if (refused_.contains({setting_of(run), name})) continue;
    methods.push_back({m.label, {name, spec->second, files_.at(name)}});
  }
  return methods;
}

std::shared_ptr<const Haystack> MeasurementRunner::haystack(std::uint64_t seed, std::int64_t length) const {
  if (haystack_) return haystack_;
  return std::make_shared<Haystack>(Haystack::prose_for(seed, length, make_meter(model_->tokenizer())));
}

/// What takes little comes first: a look at the page so far has it, and so has a run that is cut off.
std::vector<MeasurementRunner::Part> MeasurementRunner::plan_parts() {
  std::vector<Part> parts;
  planned_.clear();
  plan_probes(parts);
  for (const SuiteRun& run : runs_) {
    if (run.kind == RunKind::recall) plan_recall(run, parts);
    if (run.kind == RunKind::clusters) plan_clusters(run, parts);
    if (!has_methods(run.kind)) plan_study(run, parts);
    if (run.kind == RunKind::attention || run.kind == RunKind::decode) plan_bench(run, parts);
  }
  plan_answers(parts);
  std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.cost < b.cost; });
  return parts;
}

void MeasurementRunner::run() {
  if (options_.so_far) return;
  const std::vector<Part> parts = plan_parts();
  std::int64_t total = 0, done = 0;
  for (const Part& part : parts) total += part.cost;
  Progress progress("report", total, "tokens", options_.progress);
  for (const Part& part : parts) {
    check_cancel();
    timed(part.name, [&] {
      part.work([&](std::int64_t of_part) { progress.at(done + std::min(of_part, part.cost)); });
    });
    progress.at(done += part.cost);
  }
}

bool MeasurementRunner::is_new(const Json& key) {
  return cells_.find(key) == nullptr && planned_.insert(key.dump()).second;
}

Json MeasurementRunner::base_key(std::string_view kind) const {
  Json key = run_settings(*model_, options_.context);
  key["kind"] = kind;
  return key;
}

/// Of what is measured of one method on a text.
Json MeasurementRunner::text_key(const SuiteRun& run, const NamedSpec& spec) const {
  Json key = base_key(name_of(run.kind));
  key.update({{"seed", run.seed}, {"spec", spec.name}, {"files", spec.files}, {"haystack", haystack_hash_}});
  return key;
}

Json MeasurementRunner::probe_key(const SuiteRun& run, std::int64_t length, const NamedSpec& spec) const {
  Json key = text_key(run, spec);
  key.update({{"tokens", length}, {"dense", run.dense}});
  return key;
}

std::string MeasurementRunner::probe_text(const SuiteRun& run, std::int64_t length) const {
  // In shorter texts than three times the usual distance the returns come from a third of the length.
  return make_echo_text(length, run.seed, Language::built_in(), *haystack(run.seed, length),
                        std::min(kEchoDistance, length / 3));
}

/// Runs that look at the same text with the same dense parts share its prefill.
void MeasurementRunner::plan_probes(std::vector<Part>& parts) {
  for (const SuiteRun& run : runs_) {
    if (run.kind != RunKind::probe) continue;
    const LocalWindow dense = dense_parts(run.dense, ProbeOptions().dense);
    for (const std::int64_t length : run.lengths) {
      std::vector<std::pair<NamedSpec, Json>> pending;  // and its key
      std::vector<std::string> names;
      for (const SuiteRun& other : runs_) {
        const LocalWindow others = dense_parts(other.dense, ProbeOptions().dense);
        if (other.kind != RunKind::probe || other.seed != run.seed || others.sink != dense.sink ||
            others.window != dense.window ||
            std::find(other.lengths.begin(), other.lengths.end(), length) == other.lengths.end())
          continue;
        for (const GridMethod& m : methods(other)) {
          const Json key = probe_key(other, length, m.named);
          if (!is_new(key)) continue;
          pending.emplace_back(m.named, key);
          names.push_back(m.named.spec.name);
        }
      }
      if (pending.empty()) continue;
      const std::int64_t measured = ProbeOptions().last * (std::ssize(pending) + 2);
      parts.push_back({.name = effort_name(run, length),
                       .cost = prefill_cost(length) + indexes_cost(names, length) + measured,
                       .work = [this, &run, length, dense, pending = std::move(pending)](const auto&) {
                         probe_cells(run, length, dense, pending);
                       }});
    }
  }
}

void MeasurementRunner::probe_cells(const SuiteRun& run, std::int64_t length, const LocalWindow& dense,
                                    std::span<const std::pair<NamedSpec, Json>> pending) {
  ProbeOptions options;
  options.context = options_.context;
  options.dense = dense;
  options.progress = options_.progress;
  std::vector<NamedSpec> specs;
  for (const auto& [spec, key] : pending) specs.push_back(spec);
  // A cell as soon as it is measured: one text may keep all methods for minutes.
  std::vector<bool> added(pending.size(), false);
  lode::probe(model_, probe_text(run, length), specs, options, [&](const ProbeReport& so_far) {
    for (std::size_t i = 0; i < pending.size(); ++i) {
      if (added[i] || so_far.row_of[i] >= so_far.rows.size()) continue;
      Json row = so_far.json_of(so_far.rows[so_far.row_of[i]]);
      row["gap_tokens"] = so_far.gap_tokens;
      cells_.add(pending[i].second, std::move(row));
      added[i] = true;
    }
  });
}

std::vector<Json> MeasurementRunner::probe(const SuiteRun& run, std::int64_t length) const {
  std::vector<Json> rows;
  for (const GridMethod& m : methods(run)) {
    const Json* found = cells_.find(probe_key(run, length, m.named));
    rows.push_back(found == nullptr ? Json() : *found);
  }
  return rows;
}

Json MeasurementRunner::recall_key(const SuiteRun& run, const NamedSpec& spec) const {
  Json key = text_key(run, spec);
  // Not "queries": those of older folders were heard before the index was built.
  key.update({{"lengths", run.lengths}, {"dense", run.dense}, {"top", run.top}, {"asking", run.queries}});
  return key;
}

void MeasurementRunner::plan_recall(const SuiteRun& run, std::vector<Part>& parts) {
  std::vector<NamedSpec> pending;
  std::vector<std::string> names;
  for (const GridMethod& m : methods(run)) {
    if (m.named.spec.name == "full" || !is_new(recall_key(run, m.named))) continue;
    pending.push_back(m.named);
    names.push_back(m.named.spec.name);
  }
  if (pending.empty()) return;
  std::int64_t cost = 0;
  for (const std::int64_t length : run.lengths) cost += prefill_cost(length) + indexes_cost(names, length);
  parts.push_back({.name = effort_name(run, run.lengths.back()),
                   .cost = cost,
                   .work = [this, &run, pending](const auto&) { measure_recall(run, pending); }});
}

void MeasurementRunner::measure_recall(const SuiteRun& run, const std::vector<NamedSpec>& pending) {
  RecallOptions options = {.context = options_.context, .lengths = run.lengths};
  options.dense = dense_parts(run.dense, options.dense);
  options.top = run.top;
  options.queries = run.queries;
  options.progress = options_.progress;
  // A text may come out a few tokens shorter than asked for.
  const std::int64_t tokens = run.lengths.back() + run.lengths.back() / 64 + 64;
  const Json json = recall_by_length(model_, probe_text(run, tokens), pending, options).json();
  for (const NamedSpec& spec : pending) {
    Json rows = Json::array();
    for (const Json& row : json.at("results")) {
      if (row.at("attention") == spec.name) rows.push_back(row);
    }
    cells_.add(recall_key(run, spec), std::move(rows));
  }
}

std::vector<Json> MeasurementRunner::recall(const SuiteRun& run, const GridMethod& method) const {
  const Json* found = cells_.find(recall_key(run, method.named));
  return found == nullptr ? std::vector<Json>() : found->get<std::vector<Json>>();
}

Json MeasurementRunner::clusters_key(const SuiteRun& run, std::int64_t length, const NamedSpec& spec) const {
  Json key = text_key(run, spec);
  key["tokens"] = length;
  return key;
}

void MeasurementRunner::plan_clusters(const SuiteRun& run, std::vector<Part>& parts) {
  for (const std::int64_t length : run.lengths) {
    std::vector<NamedSpec> pending;
    for (const GridMethod& m : methods(run)) {
      if (is_new(clusters_key(run, length, m.named))) pending.push_back(m.named);
    }
    if (pending.empty()) continue;
    const std::int64_t clustered = std::ssize(pending) * index_cost("squeezed", length, true);
    parts.push_back(
        {.name = effort_name(run, length),
         .cost = prefill_cost(length) + clustered,
         .work = [this, &run, length, pending](const auto&) { measure_clusters(run, length, pending); }});
  }
}

void MeasurementRunner::measure_clusters(const SuiteRun& run, std::int64_t length,
                                         const std::vector<NamedSpec>& pending) {
  const std::vector<Json> maps =
      cluster_maps(model_, probe_text(run, length), pending, {.context = options_.context});
  for (const NamedSpec& spec : pending) {
    Json of_spec = Json::array();
    std::copy_if(maps.begin(), maps.end(), std::back_inserter(of_spec),
                 [&](const Json& map) { return map.at("attention") == spec.name; });
    cells_.add(clusters_key(run, length, spec), std::move(of_spec));
  }
}

std::vector<Json> MeasurementRunner::clusters(const SuiteRun& run, std::int64_t length,
                                              const GridMethod& method) const {
  const Json* found = cells_.find(clusters_key(run, length, method.named));
  return found == nullptr ? std::vector<Json>() : found->get<std::vector<Json>>();
}

Json MeasurementRunner::bench_key(const SuiteRun& run, std::int64_t length) const {
  Json specs = Json::array(), files = Json::array();
  for (const GridMethod& m : methods(run)) {
    specs.push_back(m.named.name);
    files.push_back(m.named.files);
  }
  Json key = base_key(name_of(run.kind));
  if (run.kind == RunKind::attention) key.erase("model");
  key.update({{"context", length},
              {"specs", specs},
              {"files", files},
              {"shape", run.shape},
              {"batch", run.batch},
              {"queries", run.query_tokens},
              {"keep", run.keep ? Json(*run.keep) : Json()},
              {"without_cache", run.without_cache}});
  if (is_on_host(run)) key.update({{"kv_tier", static_cast<int>(KvTier::host)}, {"row_on_gpu", true}});
  return key;
}

/// Rows as `bench attention --json` has them.
Json MeasurementRunner::measure_attention(const SuiteRun& run, std::int64_t length,
                                          std::span<const Spec> specs, double seconds) const {
  const AttentionBenchOptions options = {.shape = named_shape(run.shape),
                                         .context = length,
                                         .batch = run.batch,
                                         .queries = run.query_tokens,
                                         .kv_type = options_.context.kv_type,
                                         .kind = KvKind::clustered,
                                         .keep = run.keep,
                                         .seconds = seconds,
                                         .rotate = seconds > kTrialSeconds,
                                         .fingerprint = model_->fingerprint()};
  const bool on_gpu = options_.context.device == Device::cuda;
  // The model's own artefact fits no other shape: there the bench makes one up, as it does on a GPU.
  const ModelConfig &of = model_->config(), &at = options.shape;
  const bool own =
      at.query_heads == of.query_heads && at.kv_heads == of.kv_heads && at.head_dim == of.head_dim;
  std::vector<Spec> complete;
  std::vector<std::string> names = {"full"};  // of the rows: complete specs name files
  for (const Spec& spec : specs) {
    if (spec.name == "full") continue;
    complete.push_back(on_gpu || !own ? spec : with_artefact(spec, model_->path(), model_->fingerprint()));
    names.push_back(spec.str());
  }
  const auto measured =
      (on_gpu ? bench_attention_gpu : bench_attention)(options, complete, model_->pool(), quiet);
  Json rows = Json::array();
  for (const AttentionBenchRow& r : measured) {
    // The GPU leaves out what it does not choose for many tokens.
    rows.push_back({{"attention", on_gpu ? r.attention : names.at(rows.size())},
                    {"selectivity", r.selectivity},
                    {"median_us", r.median_us},
                    {"apart_us", r.apart_us},
                    {"select_us", r.select_us},
                    {"attend_us", r.attend_us},
                    {"merge_us", r.merge_us},
                    {"bytes", r.bytes},
                    {"limit_us", r.limit_us},
                    {"build_seconds", r.build_seconds}});
  }
  return rows;
}

/// A token when nothing is cached: everything before it is computed again. What of its time is attention is
/// told on a CPU, where somebody can look inside.
Json MeasurementRunner::row_without_cache(std::int64_t length) const {
  constexpr int kMostTimes = 5;
  ContextOptions options = options_.context;
  options.max_tokens = length;
  Context context(model_, options);
  std::vector<TokenId> tokens;
  for (std::int64_t i = 0; i < length; ++i)
    tokens.push_back(static_cast<TokenId>(i * 7919 % model_->config().vocab));
  std::vector<double> times, attention;  // microseconds
  for (double sum = 0; times.empty() || (sum < kBenchSeconds && std::ssize(times) < kMostTimes);
       sum += 1e-6 * times.back()) {
    context.roll_back(0);
    LayerClock clock;
    const ForwardHooks hooks = clock.hooks();
    if (options.device == Device::cpu) context.impl().hooks = &hooks;
    times.push_back(microseconds([&] { context.prefill(tokens); }));
    context.impl().hooks = nullptr;
    attention.push_back(clock.attention());
  }
  Json row = {{"attention", "full (without cache)"}, {"median_us", median(times)}, {"kv_bytes", 0}};
  if (options.device == Device::cpu) row["attention_us"] = median(attention);
  return row;
}

Json MeasurementRunner::measure_decode(const SuiteRun& run, std::int64_t length,
                                       std::span<const Spec> specs) const {
  const DecodeBenchOptions options = {.context = length,
                                      .kv_type = options_.context.kv_type,
                                      .device = options_.context.device,
                                      .gpu_memory = options_.context.gpu_memory,
                                      .kv_tier = is_on_host(run) ? KvTier::host : options_.context.kv_tier,
                                      .active_memory = options_.context.active_memory};
  Json rows = Json::array();
  for (const DecodeBenchRow& r : bench_decode(model_, options, specs, quiet)) {
    rows.push_back({{"attention", r.attention},
                    {"median_us", 1e3 * r.median_ms},
                    {"density", r.density},
                    {"selectivity", r.selectivity},
                    {"build_seconds", r.build_seconds},
                    {"kv_bytes", kv_bytes(length)}});
  }
  return rows;
}

/// Full attention with its keys and values on the GPU; without a time where they do not fit.
Json MeasurementRunner::row_on_gpu(std::int64_t length) const {
  Json row = {{"attention", "full (keys on the GPU)"}};
  const DecodeBenchOptions options = {.context = length,
                                      .kv_type = options_.context.kv_type,
                                      .device = options_.context.device,
                                      .gpu_memory = options_.context.gpu_memory,
                                      .kv_tier = KvTier::gpu};
  try {
    const DecodeBenchRow full = bench_decode(model_, options, {}, quiet).front();
    row.update({{"median_us", 1e3 * full.median_ms}, {"density", 1}, {"kv_bytes", kv_bytes(length)}});
  } catch (const InputError& error) {
    row["does_not_fit"] = error.what();
  } catch (const OutOfDeviceMemory& error) {
    row["does_not_fit"] = error.what();
  }
  return row;
}

Json MeasurementRunner::measure_bench(const SuiteRun& run, std::int64_t length,
                                      std::span<const Spec> specs) const {
  if (run.kind == RunKind::attention) return measure_attention(run, length, specs, kBenchSeconds);
  Json rows = measure_decode(run, length, specs);
  if (is_on_host(run)) rows.push_back(row_on_gpu(length));
  if (run.without_cache) rows.push_back(row_without_cache(length));
  return rows;
}

/// All methods of a length are measured in one run, for only times of one run compare.
void MeasurementRunner::plan_bench(const SuiteRun& run, std::vector<Part>& parts) {
  std::vector<Spec> specs;
  std::vector<std::string> names;
  for (const GridMethod& m : methods(run)) {
    specs.push_back(m.named.spec);
    names.push_back(m.named.spec.name);
  }
  for (const std::int64_t length : run.lengths) {
    const Json key = bench_key(run, length);
    if (!is_new(key)) continue;
    constexpr std::int64_t kTokensOfSecond = 1000;
    const std::int64_t measured = static_cast<std::int64_t>(
        kBenchSeconds * static_cast<double>((std::ssize(specs) + 1) * kTokensOfSecond));
    parts.push_back(
        {.name = effort_name(run, length),
         .cost = measured + indexes_cost(names, length) + (run.without_cache ? prefill_cost(length) : 0),
         .work = [this, &run, length, key, specs](const auto&) {
           cells_.add(key, measure_bench(run, length, specs));
         }});
  }
}

std::vector<Json> MeasurementRunner::bench(const SuiteRun& run, std::int64_t length) const {
  const Json* found = cells_.find(bench_key(run, length));
  return found == nullptr ? std::vector<Json>() : found->get<std::vector<Json>>();
}

/// Also of work that is interrupted.
void MeasurementRunner::timed(const std::string& name, const std::function<void()>& work) {
  const EffortClock clock;
  const auto began = std::chrono::system_clock::now().time_since_epoch();
  const auto note = [&] {
    effort_.add(
        {{"of", name}, {"began", std::chrono::duration_cast<std::chrono::milliseconds>(began).count()}},
        clock.effort().json());
  };
  try {
    work();
  } catch (const Interrupted&) {
    note();
    throw;
  }
  note();
}

namespace {

/// Without the suite: as folders have it that were written before times were told apart by suites.
std::string plain_effort_name(const SuiteRun& run, std::int64_t length) {
  const std::string name = fmt::format("{} {}", name_of(run.kind), length);
  return run.kind != RunKind::attention
             ? name
             : name + fmt::format(", {}, {} x {} queries", run.shape, run.batch, run.query_tokens);
}

}  // namespace

std::string MeasurementRunner::effort_name(const SuiteRun& run, std::int64_t length) {
  const std::string name = plain_effort_name(run, length);
  // Texts of one length serve all suites, times are each suite's own.
  const bool timed = run.kind == RunKind::attention || run.kind == RunKind::decode;
  return timed ? fmt::format("{} ({})", name, run.suite) : name;
}

std::int64_t MeasurementRunner::kv_bytes(std::int64_t tokens) const {
  const ModelConfig& config = model_->config();
  const DType type = options_.context.kv_type;
  const std::int64_t row = row_bytes_of(type, config.head_dim) + (type == DType::q8 ? 4 : 0);  // its scale
  return 2 * tokens * config.layers * config.kv_heads * row;
}

std::map<std::string, CostLog> MeasurementRunner::efforts() const {
  std::map<std::string, CostLog> efforts;
  for (const auto& [key, result] : effort_.all())
    efforts[Json::parse(key).value("of", "")] += CostLog::of(result);
  return efforts;
}

std::optional<CostLog> MeasurementRunner::effort_of(const SuiteRun& run, std::int64_t length) const {
  const std::map<std::string, CostLog> all = efforts();
  for (const std::string& name : {effort_name(run, length), plain_effort_name(run, length)})
    if (const auto found = all.find(name); found != all.end()) return found->second;
  return std::nullopt;
}

LocalWindow dense_parts(std::string_view text, LocalWindow otherwise) {
  if (text.empty()) return otherwise;
  const Spec spec = parse_spec("streaming:" + std::string(text));
  return spec.dense;
}

}  // namespace lode
