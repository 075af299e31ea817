// SPDX-License-Identifier: Apache-2.0
// The chooser: which method and parameters each KV head needs so that the fewest bytes are read within a
// bound on what is lost against full attention. Found on some texts, checked on others.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lab/bench/decode.h"
#include "lab/eval/probe.h"
#include "lab/studies/step_log.h"
#include "select/plan/file.h"

namespace lode {

/// What a plan may lose.
struct TuneTarget {
  enum class Kind {
    error,      ///< relative output error, root of the mean square over heads
    loss,       ///< nats per token more than full attention's
    agreement,  ///< share of tokens whose likeliest next token is full attention's
    kept,  ///< share of the answers that stay, of those that full attention finds in the far past (ProbeRow)
    recovered  ///< share of what full attention predicts better than sink and window alone
  };
  Kind kind = Kind::agreement;
  double bound = 0.99;

  /// "error=0.05", "loss=0.01", "agreement=0.99", "kept=0.99", "recovered=0.98"; InputError otherwise.
  static TuneTarget parse(std::string_view text);
  double measure(const ProbeRow& row, const ProbeRow& full) const;
  /// The same target with room for chance: what must be met on so many counted tokens or answers for the target to
  /// hold on others. A standard error for shares of them, a tenth of what may be lost for the rest.
  TuneTarget with_margin(std::int64_t counted) const;
  /// A bound that what measured so much on so many counted tokens or answers keeps, margin included.
  double looser_than(double measured, std::int64_t counted) const;
  /// Whether it is told by what the model predicts, not by outputs of heads.
  bool of_predictions() const { return kind != Kind::error; }
  /// Whether it counts tokens alone that need their far past.
  bool of_far_past() const { return kind == Kind::kept || kind == Kind::recovered; }
  bool more_is_better() const { return kind == Kind::agreement || of_far_past(); }
  bool met_by(double measured) const { return more_is_better() ? measured >= bound : measured <= bound; }
  double divergence(const ProbeRow& row) const { return of_far_past() ? row.gap_divergence : row.divergence; }
  std::string_view name() const;  ///< as in "name=bound"
  std::string str() const;
};

/// What a plan is to have little of: bytes read, time, or both alike. Each counts from 0, sink and window
/// alone, to 1, full attention.
enum class TuneCost { bytes, time, both };
/// "bytes", "time" or "both"; InputError otherwise.
TuneCost parse_tune_cost(std::string_view text);

struct TuneOptions {
  ProbeOptions probe;  ///< its dense parts become the plan's
  TuneTarget target;
  TuneCost cost = TuneCost::both;
  std::int64_t time_at = 0;  ///< tokens over which candidates and plan are timed; 0 = those of the texts
  /// Where the plan is timed against full attention; without a value 4k, 16k and 64k as far as the model
  /// goes.
  std::optional<std::vector<std::int64_t>> lengths;
  std::function<void(const Plan&)> on_plan;  ///< called once it is chosen, before it is checked and timed
  StepLog* log = nullptr;                    ///< steps that are done are found there; may be null
};

/// One way to attend, on the texts that the plan was not made for: means over them.
struct TunedRow {
  std::string attention;
  double measured = 0;  ///< in the target's terms
  bool met = false;
  double density = 1, selectivity = 1, loss = 0, agreement = 1;
  double error = 0;    ///< 0 where the target counts tokens that need their far past
  double step_ms = 0;  ///< of a decode step over as many made-up keys
};

struct TuneReport {
  std::string model;
  TuneTarget target;
  Plan plan;
  bool times_told = true;      ///< false: time was to count, but steps were too near one another
  std::vector<TunedRow> rows;  ///< full, the plan, then the single methods
  struct Timing {
    std::int64_t context = 0;
    double full_ms = 0, plan_ms = 0;  ///< of a decode step
    std::optional<double> single_ms;  ///< of the best single method
  };
  std::vector<Timing> timings;
  std::vector<std::string> left_out;  ///< methods for which a GPU cannot choose within a plan
  std::int64_t counted = 0;           ///< tokens or answers that the target counts, of the texts to choose on
  std::int64_t checked = 0;           ///< the same of the texts to check on
  /// What a method reads, and how long a step takes, at the plan's own loss on the check text, between its
  /// two nearest parameters, linear in the logarithm; none when no parameter that was tried comes as near to
  /// full attention.
  struct AtEqualLoss {
    std::string method;
    std::optional<double> density, ms;
  };
  std::vector<AtEqualLoss> at_equal_loss() const;
  bool plan_met() const { return rows[1].met; }
  /// The single method that reads the fewest bytes and meets the target; null when none does.
  const TunedRow* best_single() const;
  /// The single method that comes nearest to full attention in the target's terms; null when there is none.
  const TunedRow* nearest_single() const;
  /// Whether to use the plan, from which length on, and why; in whole sentences.
  std::string verdict() const;
  Json json() const;
  std::string table() const;

 private:
  std::optional<double> of_method(const std::string& name, double TunedRow::*cost) const;
  std::string verdict_of_full() const;
  std::string verdict_of_plan() const;
};

/// Specs that the chooser tries when none are named: those whose artefacts, if any, lie in the model's
/// folder.
std::vector<std::string> usual_candidates(const Model& model);

/// InputError when a text is too short, as for probe, when a length that is named is too long for the model,
/// or when a text has too few tokens that need the far past that the target is about.
TuneReport tune(const std::shared_ptr<const Model>& model, const std::vector<std::string>& texts,
                const std::vector<std::string>& check_texts, const std::vector<NamedSpec>& candidates,
                const TuneOptions& options);

}  // namespace lode
