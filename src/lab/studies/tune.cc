// SPDX-License-Identifier: Apache-2.0
#include "lab/studies/tune.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <map>

#include "base/text.h"
#include "engine/context.h"
#include "lab/eval/settings.h"
#include "lab/studies/probe_once.h"
#include "lab/train/trained_on.h"
#include "lodestone/error.h"
#include "select/artefacts.h"

namespace lode {

namespace {

/// Multipliers of a head's squared error against its bytes, from "bytes alone" to "error alone".
constexpr double kLightest = 1e-2, kHeaviest = 1e5;
constexpr std::int64_t kStepRoom = 64;  // positions for timed steps
const std::vector<std::int64_t> kUsualLengths = {4096, 16384, 65536};
constexpr int kTrials = 8;  ///< plans measured side by side in each of two rounds
/// Tokens on which heads are weighed one by one: that takes a plan for each head and method, and need not be exact.
constexpr std::int64_t kWeighedOn = 1024;
/// Of full attention, which are held to compare with: half a GiB.
constexpr std::int64_t kPredictions = (std::int64_t{512} << 20) / std::int64_t{sizeof(float)};

/// As --target names them.
constexpr std::array<std::pair<std::string_view, TuneTarget::Kind>, 5> kTargets = {
    {{"error", TuneTarget::Kind::error},
     {"loss", TuneTarget::Kind::loss},
     {"agreement", TuneTarget::Kind::agreement},
     {"kept", TuneTarget::Kind::kept},
     {"recovered", TuneTarget::Kind::recovered}}};

/// What a candidate does in one KV head.
struct Choice {
  std::string spec;
  double cost = 0;  ///< bytes read / bytes that full attention reads, time likewise, or their sum
  double squared_error =
      0;                  ///< of the relative output error, mean over the group and the texts; then weighed
  bool measured = false;  ///< not in layers that the method leaves dense
};

/// [L * Hkv] choices of each KV head, `full` first.
using Choices = std::vector<std::vector<Choice>>;

/// Plan files for the time of a measurement.
class TrialFiles {
 public:
  ~TrialFiles() {
    for (const auto& path : paths_) std::filesystem::remove(path);
  }
  NamedSpec add(const Plan& plan) {
    paths_.push_back(std::filesystem::temp_directory_path() /
                     fmt::format("lodestone-tune-{}-{}.json", getpid(), paths_.size()));
    write_plan(paths_.back(), plan);
    return {fmt::format("trial {}", paths_.size()), parse_spec("plan:" + paths_.back().string())};
  }

 private:
  std::vector<std::filesystem::path> paths_;
};

/// Root of the mean square of the heads' errors: large errors of a few heads are what changes an answer.
/// Heads of dense layers have none and count as well, for the bytes that they read are counted.
double error_of(const ProbeRow& row) {
  double sum = 0;
  for (const HeadMeasure& h : row.heads) sum += h.error * h.error;
  return row.heads.empty() ? 0.0
                           : std::sqrt(sum / static_cast<double>(std::ssize(row.heads) + row.dense_heads));
}

/// Time of decoding steps over so many made-up keys: full attention, then `specs`, taking turns.
std::vector<DecodeBenchRow> time_steps(const std::shared_ptr<const Model>& model, std::int64_t tokens,
                                       std::span<const Spec> specs, const TuneOptions& options) {
  return bench_decode(model,
                      {.context = tokens,
                       .kv_type = options.probe.context.kv_type,
                       .device = options.probe.context.device,
                       .gpu_memory = options.probe.context.gpu_memory,
                       .kind = KvKind::clustered,
                       .steps = 16},
                      specs, [](std::string_view) {});
}

/// Time of a step of decoding by each candidate (and "streaming"): 0 = sink and window alone, 1 = full
/// attention. Empty where the two are too near one another to tell.
std::map<std::string, double> step_times(const std::shared_ptr<const Model>& model, std::int64_t tokens,
                                         const std::vector<NamedSpec>& candidates,
                                         const TuneOptions& options) {
  constexpr double kTold = 0.03;  // of a step
  std::vector<Spec> specs = {probe_spec(parse_spec("streaming"), options.probe.dense)};
  for (const NamedSpec& c : candidates) {
    const Spec spec = probe_spec(c.spec, options.probe.dense);
    const auto same = [&](const Spec& s) { return s.str() == spec.str(); };
    if (spec.name != "full" && std::none_of(specs.begin(), specs.end(), same)) specs.push_back(spec);
  }
  const auto rows =
      time_steps(model, std::min(tokens, model->config().max_positions - kStepRoom), specs, options);
  const double full = rows[0].median_ms, least = rows[1].median_ms;
  std::map<std::string, double> times;
  if (full - least < kTold * full) return times;
  for (std::size_t i = 0; i < specs.size(); ++i)
    times[specs[i].str()] = std::max(0.0, (rows[i + 1].median_ms - least) / (full - least));
  return times;
}

std::int64_t longest_of(const Tokenizer& tokenizer, const std::vector<std::string>& texts) {
  std::int64_t most = 0;
  for (const std::string& text : texts)
    most = std::max(most, std::ssize(tokenizer.encode(text, Tokenizer::Bos::as_template)));
  return most;
}

Plan empty_plan(const Model& model, const LocalWindow& dense) {
  Plan plan = {.model_fingerprint = std::string(model.fingerprint()),
               .note = "",
               .chosen_on = "",
               .dense = dense,
               .heads = {}};
  plan.heads.resize(static_cast<std::size_t>(model.config().layers));
  return plan;
}

/// The candidates that a plan on this device can have, and the names of the others: on a GPU the host would choose for
/// them, which takes so long that nobody wants such a plan.
struct Eligible {
  std::vector<NamedSpec> candidates;
  std::vector<std::string> left_out;
};

Eligible eligible(const std::shared_ptr<const Model>& model, const std::vector<std::string>& texts,
                  const std::vector<NamedSpec>& candidates, const ProbeOptions& options) {
  if (options.context.device != Device::cuda) return {candidates, {}};
  ContextOptions context_options = options.context;
  if (context_options.max_tokens == 0) context_options.max_tokens = longest_of(model->tokenizer(), texts);
  Context context(model, context_options);
  TrialFiles files;
  Eligible result;
  for (const NamedSpec& candidate : candidates) {
    Plan plan = empty_plan(*model, options.dense);  // it serves one head
    for (auto& layer : plan.heads) layer.assign(static_cast<std::size_t>(model->config().kv_heads), "full");
    plan.heads.back().front() = candidate.spec.str();
    const auto method = static_cast<std::size_t>(context.attach(files.add(plan).spec));
    if (candidate.spec.name == "full" || context.impl().methods[method].chosen_by != ChosenBy::host)
      result.candidates.push_back(candidate);
    else
      result.left_out.push_back(candidate.name);
  }
  if (!result.candidates.empty()) return result;
  throw InputError(
      fmt::format("tune: expected a method that the GPU can run for a single head of a plan, found only {}: "
                  "name others (-a), or tune on the CPU (--device cpu)",
                  fmt::join(result.left_out, ", ")));
}

/// A step's name with which of how many it is: each has its own progress.
std::string part_of(const std::string& step, std::size_t at, std::size_t parts) {
  return parts == 1 ? step : fmt::format("{} ({} of {})", step, at + 1, parts);
}

class Tuner {
 public:
  /// counted: tokens or answers of all texts that the target counts.
  Tuner(const std::shared_ptr<const Model>& model, const std::vector<std::string>& texts,
        std::int64_t counted, const std::vector<NamedSpec>& candidates, const TuneOptions& options)
      : model_(model),
        texts_(texts),
        candidates_(candidates),
        options_(options),
        target_(options.target.with_margin(counted)) {}

  /// Whether steps took long enough beside one another for time to count; choose() finds out.
  bool times_told() const { return times_told_; }

  /// The plan of least cost among those tried that meets the target on the texts; the most exact one if
  /// none does.
  Plan choose() {
    const Choices choices = weighed(with_times(measure_heads()));
    double low = kLightest, high = kHeaviest;
    Trial best;
    for (int round = 0; round < 2; ++round) {
      const std::vector<Trial> trials = try_weights(choices, low, high);
      std::size_t at = 0;  // the first that meets the target: weights rise, so do bytes
      while (at + 1 < trials.size() && !target_.met_by(trials[at].measured)) ++at;
      if (best.plan.heads.empty() || better(trials[at], best)) best = trials[at];
      low = trials[at > 0 ? at - 1 : 0].weight;
      high = trials[at].weight;
      if (low == high) break;
    }
    for (const auto& [spec, measured] : alone_) {
      Trial trial = single(choices, spec, surely(measured));
      if (target_.met_by(trial.measured) && better(trial, best)) best = std::move(trial);
    }
    return best.plan;
  }

 private:
  struct Trial {
    double weight = 0, measured = 0;
    double cost = 0;  ///< of its heads' choices, which is what plans are to have little of
    Plan plan;
  };

  /// The mean over the texts, worse by as much as its standard error between them is more than the target's margin:
  /// what one text asks for is lost together.
  double surely(const std::vector<double>& measured) const {
    const auto n = static_cast<double>(measured.size());
    double mean = 0, squares = 0;
    for (const double x : measured) mean += x / n;
    for (const double x : measured) squares += (x - mean) * (x - mean);
    if (measured.size() < 2) return mean;
    const double margin = std::abs(target_.bound - options_.target.bound);
    const double worse = std::max(0.0, std::sqrt(squares / (n - 1) / n) - margin);
    return target_.more_is_better() ? mean - worse : mean + worse;
  }

  bool better(const Trial& a, const Trial& b) const {
    const bool a_met = target_.met_by(a.measured), b_met = target_.met_by(b.measured);
    return a_met != b_met ? a_met : a_met ? a.cost < b.cost : a.weight > b.weight;
  }

  /// Each candidate alone, on every text: what it costs and loses in each head, and in the target's terms.
  Choices measure_heads() {
    const ModelConfig& config = model_->config();
    const int group = config.query_heads / config.kv_heads;
    std::map<std::string, std::vector<Choice>> by_spec;  // [L * Hkv]
    const auto heads = static_cast<std::size_t>(config.layers * config.kv_heads);
    for (std::size_t t = 0; t < texts_.size(); ++t) {
      const ProbeReport report = probe_once(options_.log, model_, texts_[t], candidates_,
                                            titled(part_of("methods alone", t, texts_.size())));
      for (std::size_t m = 1; m < report.rows.size(); ++m) {
        const ProbeRow& row = report.rows[m];
        const std::string spec = m == 1 ? "streaming" : spec_of(row.attention);
        alone_[spec].push_back(options_.target.measure(row, report.rows[0]));
        auto& all = by_spec[spec];
        all.resize(heads, {.spec = spec});
        // Those that choose read it among themselves; exact layers have no part in it.
        const auto choosing = static_cast<double>(row.heads.size());
        const double to_choose =
            row.selector_share * (choosing + static_cast<double>(row.dense_heads)) / choosing;
        for (const HeadMeasure& h : row.heads) {
          Choice& choice = all[static_cast<std::size_t>(h.layer * config.kv_heads + h.head / group)];
          const double share = 1.0 / (group * static_cast<double>(texts_.size()));
          choice.cost += share * (h.read + to_choose);
          choice.squared_error += share * h.error * h.error;
          choice.measured = true;
        }
      }
    }
    Choices choices(heads, {{.spec = "full", .cost = 1.0, .squared_error = 0.0}});
    for (const auto& [spec, all] : by_spec)
      for (std::size_t h = 0; h < heads; ++h)
        if (all[h].measured) choices[h].push_back(all[h]);
    return choices;
  }

  /// Measured anew, times would differ, and with them the plans that were tried before.
  std::map<std::string, double> step_times_once(std::int64_t tokens) const {
    if (options_.log == nullptr) return step_times(model_, tokens, candidates_, options_);
    Json specs = Json::array();
    for (const NamedSpec& c : candidates_)
      specs.push_back({probe_spec(c.spec, options_.probe.dense).str(), files_hash(c.spec, model_->path())});
    const Json key = {
        {"run", run_settings(*model_, options_.probe.context)}, {"steps of", tokens}, {"specs", specs}};
    const Json* done = options_.log->find(key);
    if (done == nullptr || !done->is_object())
      done = &options_.log->add(key, step_times(model_, tokens, candidates_, options_));
    return done->get<std::map<std::string, double>>();
  }

  /// Costs as the options want them; `full` costs 1 of each.
  Choices with_times(Choices choices) {
    if (options_.cost == TuneCost::bytes) return choices;
    const std::int64_t tokens =
        options_.time_at > 0 ? options_.time_at : longest_of(model_->tokenizer(), texts_);
    const std::map<std::string, double> times = step_times_once(tokens);
    times_told_ = !times.empty();
    if (!times_told_) return choices;
    for (auto& of_head : choices) {
      for (Choice& choice : of_head) {
        const auto known = times.find(probe_spec(parse_spec(choice.spec), options_.probe.dense).str());
        const double time = known != times.end() ? known->second : choice.spec == "full" ? 1.0 : 0.0;
        choice.cost = options_.cost == TuneCost::time ? time : choice.cost + time;
      }
    }
    return choices;
  }

  /// Squared errors times what such an error of that method does to the model's predictions in that head: their divergence
  /// where the head alone has the method's middle choice and all others attend everything, over its squared error there.
  /// Methods differ: one that finds the right key and little else errs much and misleads little.
  Choices weighed(Choices choices) const {
    if (!options_.target.of_predictions()) return choices;
    std::vector<Plan> plans;
    std::vector<Need> needs;
    for (std::size_t head = 0; head < choices.size(); ++head) {
      for (auto& [method, own] : by_method(choices[head])) {
        const Choice& middle = middle_of(own);
        plans.push_back(all_full_but(choices, head, middle));
        needs.push_back({.method = method, .choices = own, .squared_error = middle.squared_error});
      }
    }
    ProbeOptions options = titled("heads one by one");
    options.last = std::min({options.last, kWeighedOn, kPredictions / model_->config().vocab});
    options.divergence = true;
    const std::vector<Measured> measured = measure(plans, options);
    for (std::size_t i = 0; i < needs.size(); ++i)
      needs[i].weight = measured[i].divergence / needs[i].squared_error;
    settle(needs);
    for (const Need& need : needs)
      for (Choice* choice : need.choices) choice->squared_error *= need.weight;
    return choices;
  }

  /// A method in one head: its choices, and what their squared errors are to be multiplied by.
  struct Need {
    std::string method;
    std::vector<Choice*> choices;
    double squared_error = 0, weight = 0;  // of the middle choice
  };

  /// The choices of a head that have an error, by their method's name.
  static std::map<std::string, std::vector<Choice*>> by_method(std::vector<Choice>& choices) {
    std::map<std::string, std::vector<Choice*>> methods;
    for (Choice& choice : choices)
      if (choice.squared_error > 0) methods[choice.spec.substr(0, choice.spec.find(':'))].push_back(&choice);
    return methods;
  }

  /// The one in the middle by its error.
  static const Choice& middle_of(std::vector<Choice*> choices) {
    const auto middle = choices.begin() + std::ssize(choices) / 2;
    std::nth_element(choices.begin(), middle, choices.end(),
                     [](const Choice* a, const Choice* b) { return a->squared_error < b->squared_error; });
    return **middle;
  }

  Plan all_full_but(const Choices& choices, std::size_t head, const Choice& choice) const {
    Trial trial = empty_trial();
    for (std::size_t h = 0; h < choices.size(); ++h) take(h == head ? choice : choices[h].front(), h, trial);
    return trial.plan;
  }

  /// Half of the method's median at least, for the texts may not ask for what a head knows; one on average.
  static void settle(std::vector<Need>& needs) {
    std::map<std::string, std::vector<double>> of_method;
    for (const Need& need : needs) of_method[need.method].push_back(need.weight);
    double sum = 0;
    for (Need& need : needs) {
      std::vector<double>& weights = of_method[need.method];
      std::sort(weights.begin(), weights.end());
      need.weight = std::max(need.weight, 0.5 * weights[weights.size() / 2]);
      sum += need.weight;
    }
    for (Need& need : needs)
      need.weight = sum > 0 ? need.weight * static_cast<double>(needs.size()) / sum : 1.0;
  }

  ProbeOptions titled(const std::string& step) const {
    ProbeOptions options = options_.probe;
    options.title = step;
    options.errors_alone = true;
    options.of_far_past = options_.target.of_far_past();
    options.kv_error = false;
    return options;
  }

  std::string spec_of(const std::string& name) const {
    for (const NamedSpec& c : candidates_)
      if (c.name == name) return c.spec.str();
    return name;
  }

  Trial empty_trial() const {
    Trial trial;
    trial.plan = empty_plan(*model_, options_.probe.dense);
    return trial;
  }

  void take(const Choice& choice, std::size_t head, Trial& trial) const {
    trial.plan.heads[head / static_cast<std::size_t>(model_->config().kv_heads)].push_back(choice.spec);
    trial.cost += choice.cost;
  }

  /// One spec in every head that it was measured in; layers that it leaves dense stay so.
  Trial single(const Choices& choices, const std::string& spec, double measured) const {
    Trial trial = empty_trial();
    trial.measured = measured;
    for (std::size_t head = 0; head < choices.size(); ++head) {
      const auto own = std::find_if(choices[head].begin(), choices[head].end(),
                                    [&](const Choice& c) { return c.spec == spec; });
      take(own == choices[head].end() ? choices[head].front() : *own, head, trial);
    }
    return trial;
  }

  /// Every head takes the choice of least cost + weight * squared error.
  Trial trial_for(const Choices& choices, double weight) const {
    Trial trial = empty_trial();
    trial.weight = weight;
    for (std::size_t head = 0; head < choices.size(); ++head) {
      const auto best =
          std::min_element(choices[head].begin(), choices[head].end(), [&](const Choice& a, const Choice& b) {
            return a.cost + weight * a.squared_error < b.cost + weight * b.squared_error;
          });
      take(*best, head, trial);
    }
    return trial;
  }

  /// Plans for weights between two, as they turn out on the texts; rising.
  std::vector<Trial> try_weights(const Choices& choices, double low, double high) const {
    std::vector<Trial> trials;
    std::vector<Plan> plans;
    for (int i = 0; i < kTrials; ++i) {
      const double weight = low * std::pow(high / low, i / static_cast<double>(kTrials - 1));
      Trial trial = trial_for(choices, weight);
      if (!plans.empty() && plans.back().heads == trial.plan.heads) continue;
      plans.push_back(trial.plan);
      trials.push_back(std::move(trial));
    }
    const std::vector<Measured> measured = measure(plans, titled("plans"));
    for (std::size_t i = 0; i < trials.size(); ++i) trials[i].measured = measured[i].target;
    return trials;
  }

  /// What a plan loses, on average over the texts: the one or, where it is asked for, the other.
  struct Measured {
    double target = 0;      ///< in the target's terms, as surely() has it
    double divergence = 0;  ///< of the predictions from full attention's
  };

  /// So many side by side, for each holds indexes of its own.
  std::vector<Measured> measure(std::span<const Plan> plans, ProbeOptions options) const {
    if (options_.target.of_predictions()) options.measured = 0;
    const std::size_t parts = (plans.size() + kTrials - 1) / kTrials * texts_.size();
    std::vector<Measured> all;
    for (std::size_t first = 0; first < plans.size(); first += kTrials) {
      const auto some = plans.subspan(first, std::min<std::size_t>(kTrials, plans.size() - first));
      for (const Measured& measured : measure_together(some, options, first / kTrials * texts_.size(), parts))
        all.push_back(measured);
    }
    return all;
  }

  /// On every text, as parts `part` and on of so many.
  std::vector<Measured> measure_together(std::span<const Plan> plans, const ProbeOptions& options,
                                         std::size_t part, std::size_t parts) const {
    TrialFiles files;
    std::vector<NamedSpec> specs;
    for (const Plan& plan : plans) specs.push_back(files.add(plan));
    const double share = 1.0 / static_cast<double>(texts_.size());
    std::vector<Measured> all(plans.size());
    std::vector<std::vector<double>> by_text(plans.size());
    for (const std::string& text : texts_) {
      ProbeOptions named = options;
      named.title = part_of(options.title, part++, parts);
      const ProbeReport report = probe_once(options_.log, model_, text, specs, named);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const ProbeRow& row = report.rows[report.row_of[i]];
        all[i].divergence += share * options_.target.divergence(row);
        if (!options.divergence) by_text[i].push_back(options_.target.measure(row, report.rows[0]));
      }
    }
    if (options.divergence) return all;
    for (std::size_t i = 0; i < all.size(); ++i) all[i].target = surely(by_text[i]);
    return all;
  }

  const std::shared_ptr<const Model>& model_;
  const std::vector<std::string>& texts_;
  const std::vector<NamedSpec>& candidates_;
  const TuneOptions& options_;
  const TuneTarget target_;
  bool times_told_ = true;
  std::map<std::string, std::vector<double>>
      alone_;  // what candidates give in all heads on each text, in the target's terms, by spec
};

/// Steps of all rows (full, the plan, streaming, the other specs), taking turns.
void time_rows(const std::shared_ptr<const Model>& model, std::int64_t tokens,
               std::span<const NamedSpec> specs, const TuneOptions& options, std::vector<TunedRow>& rows) {
  std::vector<Spec> timed = {specs.front().spec, probe_spec(parse_spec("streaming"), options.probe.dense)};
  std::vector<std::size_t> of_row = {0, 1, 2};  // of what is timed, full first
  for (std::size_t i = 3; i < rows.size(); ++i) {
    const auto named = std::find_if(specs.begin(), specs.end(),
                                    [&](const NamedSpec& s) { return s.name == rows[i].attention; });
    timed.push_back(probe_spec(named->spec, options.probe.dense));
    of_row.push_back(timed.size());
  }
  const auto times =
      time_steps(model, std::min(tokens, model->config().max_positions - kStepRoom), timed, options);
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i].step_ms = times[of_row[i]].median_ms;
}

/// Adds what a text's probe found to the rows of all, `share` of it.
void add_measures(const ProbeReport& report, const TuneTarget& target, double share,
                  std::vector<TunedRow>& rows) {
  rows.resize(report.rows.size(), {.density = 0, .selectivity = 0, .agreement = 0});
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const ProbeRow& row = report.rows[i];
    rows[i].attention = i == 2 ? "plan" : row.attention;
    rows[i].measured += share * target.measure(row, report.rows[0]);
    rows[i].density += share * row.density;
    rows[i].selectivity += share * row.selectivity;
    rows[i].error += share * error_of(row);
    rows[i].loss += share * row.loss;
    rows[i].agreement += share * row.agreement;
  }
}

/// The plan and the single methods on the texts that nothing was chosen on.
std::vector<TunedRow> check(const std::shared_ptr<const Model>& model, const std::vector<std::string>& texts,
                            const std::vector<NamedSpec>& candidates, const Plan& plan,
                            const TuneOptions& options) {
  TrialFiles files;
  std::vector<NamedSpec> specs = {files.add(plan)};
  specs.insert(specs.end(), candidates.begin(), candidates.end());
  ProbeOptions probe_options = options.probe;
  probe_options.errors_alone = true;
  probe_options.kv_error = false;
  if (options.target.of_far_past()) probe_options.measured = 0;  // outputs' errors are not told then
  std::vector<TunedRow> rows;
  std::int64_t tokens = 0;
  for (std::size_t t = 0; t < texts.size(); ++t) {
    probe_options.title = part_of("check text", t, texts.size());
    const ProbeReport report = probe_once(options.log, model, texts[t], specs, probe_options);
    add_measures(report, options.target, 1.0 / static_cast<double>(texts.size()), rows);
    tokens = std::max(tokens, report.tokens);
  }
  for (TunedRow& row : rows) row.met = options.target.met_by(row.measured);
  std::rotate(rows.begin() + 1, rows.begin() + 2, rows.begin() + 3);  // full, plan, streaming, ...
  time_rows(model, options.time_at > 0 ? options.time_at : tokens, specs, options, rows);
  return rows;
}

/// Full attention, the plan and the best single method, if there is one, take turns step by step.
std::vector<TuneReport::Timing> time_plan(const std::shared_ptr<const Model>& model, const Plan& plan,
                                          const std::optional<Spec>& single, const TuneOptions& options) {
  TrialFiles files;
  std::vector<Spec> specs = {files.add(plan).spec};
  if (single) specs.push_back(*single);
  std::vector<TuneReport::Timing> timings;
  const std::vector<std::int64_t> lengths = options.lengths.value_or(kUsualLengths);
  Progress progress("timing steps", std::ssize(lengths), "lengths", options.probe.progress);
  for (const std::int64_t length : lengths) {
    progress.at(&length - lengths.data());
    if (length + kStepRoom > model->config().max_positions) continue;
    const auto rows = time_steps(model, length, specs, options);
    timings.push_back({.context = length, .full_ms = rows[0].median_ms, .plan_ms = rows[1].median_ms});
    if (single) timings.back().single_ms = rows[2].median_ms;
  }
  progress.at(std::ssize(lengths));
  return timings;
}

/// What the user names is timed there or refused; the usual lengths are timed as far as the model goes.
void check_lengths(const Model& model, const TuneOptions& options) {
  expect_like_layers(model.config(), "tune");
  const std::int64_t most = model.config().max_positions - kStepRoom;
  const auto check = [&](const char* flag, std::int64_t tokens) {
    if (tokens <= most) return;
    throw InputError(fmt::format(
        "{}: expected at most {} tokens, for the model has {} positions and timed steps take {}, found {}",
        flag, most, model.config().max_positions, kStepRoom, tokens));
  };
  check("--time-at", options.time_at);
  for (const std::int64_t length : options.lengths.value_or(std::vector<std::int64_t>()))
    check("--lengths", length);
}

/// How many tokens or answers of a text the target counts. What a plan is to find in the far past must be there, in every text;
/// that is seen before anything is measured.
std::int64_t check_far_past(const std::shared_ptr<const Model>& model, const std::string& text,
                            const std::string& name, const TuneOptions& options) {
  if (!options.target.of_far_past()) return options.probe.last;
  ProbeOptions probe_options = options.probe;
  probe_options.title = "far past";
  probe_options.measured = 0;
  probe_options.kv_error = false;
  const ProbeReport report = probe_once(options.log, model, text, {}, probe_options);
  const bool kept = options.target.kind == TuneTarget::Kind::kept;
  const std::int64_t found = kept ? report.found_answers : report.gap_tokens, fewest = kept ? 2 : 8;
  if (found >= fewest) return found;
  throw InputError(fmt::format(
      "--target {}: {}: expected at least {} the last {} tokens (--last) that full attention {}, found {}: "
      "give more or other text, longer documents (--tokens), or another --target",
      options.target.name(), name,
      kept ? fmt::format("{} answers among", fewest) : fmt::format("{} of", fewest), options.probe.last,
      kept ? fmt::format("finds with a probability of at least {} and sink and window alone do not",
                         options.probe.sure)
           : fmt::format("predicts better than sink and window alone by {} nats", options.probe.gap),
      found));
}

/// How many heads each spec serves, as "12 x kmeans:probes=8, ...".
std::string summary_of(const Plan& plan) {
  std::map<std::string, int> counts;
  for (const auto& layer : plan.heads)
    for (const std::string& spec : layer) ++counts[spec];
  std::string text;
  for (const auto& [spec, count] : counts)
    text += fmt::format("{}{} x {}", text.empty() ? "" : ", ", count, spec);
  return text;
}

}  // namespace

TuneCost parse_tune_cost(std::string_view text) {
  if (text == "bytes") return TuneCost::bytes;
  if (text == "time") return TuneCost::time;
  if (text == "both") return TuneCost::both;
  throw InputError(fmt::format("--cost: expected bytes, time or both, found '{}'", text));
}

TuneTarget TuneTarget::parse(std::string_view text) {
  const std::size_t equals = std::min(text.find('='), text.size());
  const std::string_view name = text.substr(0, equals);
  const std::string_view number = text.substr(std::min(equals + 1, text.size()));
  const auto known =
      std::find_if(kTargets.begin(), kTargets.end(), [&](const auto& t) { return t.first == name; });
  TuneTarget target;
  if (known != kTargets.end()) target.kind = known->second;
  double bound = 0;
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), bound);
  const double most = target.more_is_better() ? 1.0 : 1e3;
  if (known == kTargets.end() || error != std::errc{} || end != number.data() + number.size() ||
      !(bound > 0 && bound <= most)) {
    throw InputError(fmt::format(
        "--target: expected error=E, loss=NATS, agreement=SHARE, kept=SHARE or recovered=SHARE with a "
        "number above 0, a share of at most 1 (0.98, not 98%), found '{}'",
        text));
  }
  target.bound = bound;
  return target;
}

double TuneTarget::measure(const ProbeRow& row, const ProbeRow& full) const {
  switch (kind) {
    case Kind::error:
      return error_of(row);
    case Kind::loss:
      return row.loss - full.loss;
    case Kind::agreement:
      return row.agreement;
    case Kind::kept:
    case Kind::recovered:
      break;
  }
  const std::optional<double>& of_far = kind == Kind::kept ? row.kept : row.recovered;
  if (!of_far)
    throw InputError(fmt::format(
        "--target {}: expected texts whose last tokens need their far past (--last), found none that "
        "full attention predicts better",
        name()));
  return *of_far;
}

double TuneTarget::looser_than(double measured, std::int64_t counted) const {
  if (!more_is_better()) return 1.2 * measured;
  TuneTarget looser = *this;
  for (int percent = static_cast<int>(100 * measured); percent > 1; --percent) {
    looser.bound = percent / 100.0;
    if (looser.with_margin(counted).met_by(measured)) return looser.bound;
  }
  return 0.01;
}

TuneTarget TuneTarget::with_margin(std::int64_t counted) const {
  TuneTarget strict = *this;
  if (kind == Kind::agreement || kind == Kind::kept)
    strict.bound = std::min(1.0, bound + std::sqrt(bound * (1.0 - bound) / static_cast<double>(counted)));
  else if (kind == Kind::recovered)
    strict.bound = bound + 0.1 * (1.0 - bound);
  else
    strict.bound = 0.9 * bound;
  return strict;
}

std::string_view TuneTarget::name() const {
  return std::find_if(kTargets.begin(), kTargets.end(), [&](const auto& t) { return t.second == kind; })
      ->first;
}

std::string TuneTarget::str() const {
  switch (kind) {
    case Kind::error:
      return fmt::format("an output error of {} at most", bound);
    case Kind::loss:
      return fmt::format("a loss of at most {} nats a token above full attention's", bound);
    case Kind::agreement:
      return fmt::format("full attention's next token in {} of all cases at least", bound);
    case Kind::kept:
      return fmt::format(
          "at least {} of the answers that full attention finds and sink and window alone do not", bound);
    case Kind::recovered:
      break;
  }
  return fmt::format("at least {} of what full attention predicts better than sink and window alone", bound);
}

const TunedRow* TuneReport::best_single() const {
  const TunedRow* best = nullptr;
  for (std::size_t i = 2; i < rows.size(); ++i) {
    if (rows[i].met && (best == nullptr || rows[i].density < best->density)) best = &rows[i];
  }
  return best;
}

const TunedRow* TuneReport::nearest_single() const {
  const TunedRow* nearest = nullptr;
  const auto nearer = [this](double a, double b) { return target.more_is_better() ? a > b : a < b; };
  for (std::size_t i = 3; i < rows.size(); ++i) {
    if (nearest == nullptr || nearer(rows[i].measured, nearest->measured)) nearest = &rows[i];
  }
  return nearest;
}

std::vector<TuneReport::AtEqualLoss> TuneReport::at_equal_loss() const {
  std::vector<std::string> names;
  for (std::size_t i = 3; i < rows.size(); ++i) {
    const std::string name = rows[i].attention.substr(0, rows[i].attention.find(':'));
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  std::vector<AtEqualLoss> all;
  for (const std::string& name : names)
    all.push_back({.method = name,
                   .density = of_method(name, &TunedRow::density),
                   .ms = of_method(name, &TunedRow::step_ms)});
  return all;
}

std::optional<double> TuneReport::of_method(const std::string& name, double TunedRow::*cost) const {
  const auto nearness = [this](const TunedRow& row) {
    return target.more_is_better() ? row.measured : -row.measured;
  };
  std::vector<const TunedRow*> singles;
  for (std::size_t i = 3; i < rows.size(); ++i)
    if (rows[i].attention.substr(0, rows[i].attention.find(':')) == name) singles.push_back(&rows[i]);
  std::stable_sort(singles.begin(), singles.end(),
                   [&](const TunedRow* a, const TunedRow* b) { return a->*cost < b->*cost; });
  const double wanted = nearness(rows[1]);
  const TunedRow* before = nullptr;
  for (const TunedRow* row : singles) {
    if (nearness(*row) < wanted) {
      before = row;
      continue;
    }
    if (before == nullptr) return row->*cost;
    const double share = (wanted - nearness(*before)) / (nearness(*row) - nearness(*before));
    return before->*cost * std::pow(row->*cost / before->*cost, share);
  }
  return std::nullopt;
}

/// What there is to say when no head found a method that is exact enough.
std::string TuneReport::verdict_of_full() const {
  std::string text =
      "The plan is full attention in every head: none of the methods keeps the target with room for chance "
      "on "
      "the texts of -f";
  const TunedRow* nearest = nearest_single();
  if (nearest == nullptr) return text + "; name some with -a.";
  text += fmt::format(". On other text {} comes nearest, with {} {:.3g} at {:.1f} % of the bytes",
                      nearest->attention, target.name(), nearest->measured, 100 * nearest->density);
  if (nearest->met)
    return text + ", and keeps it there; more or longer texts (-f, --documents, --last) may decide it.";
  return text + fmt::format("; try --target {}={:.2g}, or methods that read more (-a).", target.name(),
                            target.looser_than(nearest->measured, counted));
}

std::string TuneReport::verdict() const {
  const std::string untold = times_told ? ""
                                        : " When methods were timed for the choice, full attention took as "
                                          "long as sink and window alone: the plan was "
                                          "chosen by its bytes; --time-at names a longer context.";
  return verdict_of_plan() + untold;
}

std::string TuneReport::verdict_of_plan() const {
  const auto is_full = [](const std::vector<std::string>& layer) {
    return std::all_of(layer.begin(), layer.end(), [](const std::string& spec) { return spec == "full"; });
  };
  if (std::all_of(plan.heads.begin(), plan.heads.end(), is_full)) return verdict_of_full();
  const TunedRow* single = best_single();
  std::string text =
      plan_met() ? fmt::format("The plan reads {:.1f} % of the bytes", 100 * rows[1].density)
                 : fmt::format("The plan misses the target on other text (it reads {:.1f} % of the bytes)",
                               100 * rows[1].density);
  if (plan_met() && single != nullptr && single->density < rows[1].density)
    text += fmt::format(
        "; {}, which meets the target on other text, too, reads less ({:.1f} %): attend by it instead",
        single->attention, 100 * single->density);
  else if (plan_met() && single != nullptr)
    text +=
        fmt::format("; the best single method, {}, reads {:.1f} %", single->attention, 100 * single->density);
  else if (plan_met())
    text += "; no single method meets the target";
  else if (single != nullptr)
    text += fmt::format(
        ": {}, which meets it there and reads {:.1f} %, is the better choice, or more texts to choose on",
        single->attention, 100 * single->density);
  else
    text += ": full attention is the better choice, or texts that are more like it";
  const Timing* first = nullptr;
  for (const Timing& t : timings)
    if (first == nullptr && t.plan_ms < t.full_ms) first = &t;
  if (timings.empty()) return text + ".";
  if (first == nullptr) {
    return text + fmt::format(
                      ". Up to {} tokens full attention is faster on this device: choosing keys costs "
                      "more than reading them.",
                      timings.back().context);
  }
  text += fmt::format(". A step is faster with it from {} tokens on ({:.2f} ms against {:.2f})",
                      first->context, first->plan_ms, first->full_ms);
  if (first != &timings.front())
    text += fmt::format("; at {} full attention is faster, because choosing costs more than it saves",
                        timings.front().context);
  return text + ".";
}

Json TuneReport::json() const {
  Json results = Json::array(), times = Json::array();
  for (const TunedRow& row : rows) {
    results.push_back({{"attention", row.attention},
                       {"measured", row.measured},
                       {"met", row.met},
                       {"density", row.density},
                       {"selectivity", row.selectivity},
                       {"error", target.of_far_past() ? Json() : Json(row.error)},
                       {"loss", row.loss},
                       {"agreement", row.agreement},
                       {"step_ms", row.step_ms}});
  }
  for (const Timing& t : timings)
    times.push_back({{"context", t.context},
                     {"full_ms", t.full_ms},
                     {"plan_ms", t.plan_ms},
                     {"single_ms", t.single_ms ? Json(*t.single_ms) : Json()}});
  Json equal = Json::array();
  for (const AtEqualLoss& at : at_equal_loss())
    equal.push_back({{"method", at.method},
                     {"density", at.density ? Json(*at.density) : Json()},
                     {"step_ms", at.ms ? Json(*at.ms) : Json()}});
  return {{"model", model},       {"target", target.str()}, {"plan", plan.heads},     {"results", results},
          {"timings", times},     {"plan_met", plan_met()}, {"at_equal_loss", equal}, {"left_out", left_out},
          {"verdict", verdict()}, {"counted", counted},     {"checked", checked}};
}

std::string TuneReport::table() const {
  const bool far = target.of_far_past();  // in place of the outputs' error
  std::vector<std::vector<std::string>> lines = {{"attention", "density", "far keys",
                                                  far ? std::string(target.name()) : "error", "loss",
                                                  "agreement", "step ms", "target"}};
  for (const TunedRow& row : rows) {
    lines.push_back({row.attention, fmt::format("{:.4f}", row.density),
                     fmt::format("{:.4f}", row.selectivity),
                     fmt::format("{:.4f}", far ? row.measured : row.error), fmt::format("{:.4f}", row.loss),
                     fmt::format("{:.4f}", row.agreement), fmt::format("{:.3f}", row.step_ms),
                     row.met ? "met" : "missed"});
  }
  const bool answers = target.kind == TuneTarget::Kind::kept;
  std::string text = fmt::format(
      "{}; target: {}\nplan: {}\n\non other text{}\n{}", model, target.str(), summary_of(plan),
      answers ? fmt::format(" ({} answers; chosen on {})", checked, counted) : "", text_table(lines));
  const std::vector<AtEqualLoss> equal = at_equal_loss();
  if (!equal.empty()) text += fmt::format("\nat the plan's {} of {:.4f}\n", target.name(), rows[1].measured);
  lines = {{"attention", "density", "step ms"}};
  if (!equal.empty())
    lines.push_back({"plan", fmt::format("{:.4f}", rows[1].density), fmt::format("{:.3f}", rows[1].step_ms)});
  for (const AtEqualLoss& at : equal) {
    const bool ever = at.density && at.ms;
    lines.push_back({at.method, ever ? fmt::format("{:.4f}", *at.density) : "never",
                     ever ? fmt::format("{:.3f}", *at.ms) : ""});
  }
  if (!equal.empty()) text += text_table(lines);
  if (!left_out.empty())
    text += fmt::format(
        "\nleft out, because for heads of a plan the host would choose their keys, not the GPU: {}\n",
        fmt::join(left_out, ", "));
  if (!timings.empty()) text += "\n  tokens   full ms   plan ms  best single ms\n";
  for (const Timing& t : timings)
    text += fmt::format("{:>8} {:>9.3f} {:>9.3f}  {:>14}\n", t.context, t.full_ms, t.plan_ms,
                        t.single_ms ? fmt::format("{:.3f}", *t.single_ms) : "-");
  return text + "\n" + verdict() + "\n";
}

std::vector<std::string> usual_candidates(const Model& model) {
  std::vector<std::string> specs;
  const auto add = [&](const std::string& format, const std::vector<std::string>& values) {
    for (const std::string& value : values) specs.push_back(format + value);
  };
  const auto has = [&](const char* name) {
    return artefact_of(name, model.path(), model.fingerprint()).has_value();
  };
  add("kmeans:rope=on,probes=", {"4", "8", "16", "32", "64", "128", "256"});
  if (has("saap")) add("saap:probes=", {"4", "8", "16", "32", "64"});
  if (has("hash")) add("hash:budget=", {"1/256", "1/128", "1/64", "1/32", "1/16", "1/8"});
  add("squeezed:sparsity=", {"0.95", "0.9", "0.8", "0.7"});
  return specs;
}

namespace {

/// What the plan says of the texts that it was chosen on.
Json chosen_on(const std::shared_ptr<const Model>& model, const std::vector<std::string>& texts,
               const TuneOptions& options) {
  std::vector<Prompt> prompts;
  for (const std::string& text : texts)
    prompts.push_back({"", model->tokenizer().encode(text, Tokenizer::Bos::as_template)});
  return trained_on(model, options.probe.context, prompts);
}

}  // namespace

TuneReport tune(const std::shared_ptr<const Model>& model, const std::vector<std::string>& texts,
                const std::vector<std::string>& check_texts, const std::vector<NamedSpec>& asked,
                const TuneOptions& options) {
  LODE_ASSERT(!texts.empty() && !check_texts.empty());
  check_lengths(*model, options);
  auto [candidates, left_out] = eligible(model, texts, asked, options.probe);
  std::int64_t counted = 0, checked = 0;
  for (std::size_t i = 0; i < texts.size(); ++i)
    counted += check_far_past(model, texts[i], fmt::format("text {} to choose on", i + 1), options);
  for (const std::string& text : check_texts)
    checked += check_far_past(model, text, "a text to check on", options);
  TuneReport report = {.model = model->path().string(),
                       .target = options.target,
                       .plan = {},
                       .rows = {},
                       .timings = {},
                       .left_out = std::move(left_out),
                       .counted = counted,
                       .checked = checked};
  Tuner tuner(model, texts, counted, candidates, options);
  report.plan = tuner.choose();
  report.times_told = tuner.times_told();
  report.plan.chosen_on = chosen_on(model, texts, options).dump();
  if (options.on_plan) options.on_plan(report.plan);
  report.rows = check(model, check_texts, candidates, report.plan, options);
  const TunedRow* const best = report.best_single();
  std::optional<Spec> single;
  for (const NamedSpec& candidate : candidates)
    if (best != nullptr && candidate.name == best->attention)
      single = probe_spec(candidate.spec, options.probe.dense);
  report.timings = time_plan(model, report.plan, single, options);
  report.plan.note = fmt::format("{}: {}", options.target.str(), report.verdict());
  return report;
}

}  // namespace lode
