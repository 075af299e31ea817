// SPDX-License-Identifier: Apache-2.0
// Sections of a saved calibration: calibration = {queries, levels, thresholds [2, levels], {sparsity, mass,
// error} [2], powers [levels]} float64, and summary, a line of text that `inspect` shows. Files of before
// have no powers: one threshold for questions of any length.
#include "select/shared/calibration.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "io/container.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr double kMostLevels = 16;

}  // namespace

Target Target::of(const Spec& spec) {
  const int given = int{spec.text("sparsity").has_value()} + int{spec.text("mass").has_value()} +
                    int{spec.text("error").has_value()};
  if (given > 1) {
    throw InputError("attention spec '" + spec.str() +
                     "': expected one of the keys sparsity, mass and error, found more");
  }
  if (spec.text("mass")) return {Kind::mass, spec.number("mass", 0.0, 0.01, 1.0)};
  if (spec.text("error")) return {Kind::error, spec.number("error", 0.0, 0.0, 10.0)};
  return {Kind::sparsity, spec.number("sparsity", 0.9, 0.0, 0.999999)};
}

std::string Target::text() const {
  const char* const names[] = {"sparsity", "mass", "error"};
  return fmt::format("{} {}", names[static_cast<std::size_t>(kind)], value);
}

void ScoreHistogram::add(double score, double weight) {
  if (weights_.empty()) weights_.resize(kBins);
  // Not a number, or no weight at all: the lowest bin.
  const double at = score > 0.0 ? (std::log(score) - kLowest) * kBinsPerUnit : 0.0;
  weights_[static_cast<std::size_t>(std::clamp(at, 0.0, static_cast<double>(kBins - 1)))] += weight;
}

void ScoreHistogram::add(std::span<const std::uint64_t> weights) {
  LODE_ASSERT(weights.size() == kBins);
  if (weights_.empty()) weights_.resize(kBins);
  for (std::size_t i = 0; i < weights.size(); ++i) weights_[i] += static_cast<double>(weights[i]);
}

void ScoreHistogram::add(const ScoreHistogram& other) {
  if (weights_.empty()) weights_.resize(kBins);
  for (std::size_t i = 0; i < other.weights_.size(); ++i) weights_[i] += other.weights_[i];
}

double ScoreHistogram::threshold_for(double wanted) const {
  double above = 0.0;
  for (std::size_t bin = weights_.size(); bin-- > 1;) {
    above += weights_[bin];
    if (above >= wanted) return std::exp(kLowest + static_cast<double>(bin) / kBinsPerUnit);
  }
  return 0.0;
}

double ScoreHistogram::total() const {
  return std::accumulate(weights_.begin(), weights_.end(), 0.0);
}

double Thresholds::of(QueryKind kind, std::int64_t tokens, int level) const {
  const auto l = static_cast<std::size_t>(level);
  const double threshold = at[static_cast<std::size_t>(kind)][l];
  if (kind == QueryKind::alone || power[l] == 0.0) return threshold;
  return threshold * std::pow(static_cast<double>(std::min(tokens, most)) / kFew, power[l]);
}

void Calibration::save(SectionWriter& out, const Target& target) const {
  std::vector<double> numbers = {static_cast<double>(queries), static_cast<double>(thresholds.levels())};
  for (const auto& levels : thresholds.at) numbers.insert(numbers.end(), levels.begin(), levels.end());
  for (const Achieved& a : held_out) numbers.insert(numbers.end(), {a.sparsity, a.mass, a.error});
  numbers.insert(numbers.end(), thresholds.power.begin(), thresholds.power.end());
  out.add<double>("calibration", numbers);
  const auto achieved = [](const char* who, const Achieved& a) {
    return fmt::format("{}: sparsity {:.3f}, mass {:.3f}, output error {:.3f}", who, a.sparsity, a.mass,
                       a.error);
  };
  const std::string summary =
      queries == 0 ? fmt::format("target {}; not calibrated", target.text())
                   : fmt::format("target {}; on held-out queries {}; {}", target.text(),
                                 achieved("question", held_out[0]), achieved("answer", held_out[1]));
  out.add("summary", std::as_bytes(std::span(summary)));
}

Calibration Calibration::load(const SectionReader& in) {
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError("index '" + in.prefix() + "': expected " + what + ", found otherwise");
  };
  const auto numbers = in.values<double>("calibration");
  require(numbers.size() >= 2, "a calibration");
  require(std::all_of(numbers.begin(), numbers.end(), [](double x) { return std::isfinite(x) && x >= 0.0; }),
          "finite figures that are not negative in the calibration");
  require(numbers[0] == 0.0 || (numbers[0] >= 1.0 && numbers[0] <= kMost),
          "a calibration on at most 128 queries");
  require(numbers[1] <= kMostLevels && (numbers[0] == 0.0) == (numbers[1] == 0.0),
          "levels with a calibration");
  const auto own = static_cast<std::int64_t>(numbers[1]);
  const std::int64_t before = 2 + 2 * own + 6;  // numbers of a file without powers
  require(std::ssize(numbers) == before || std::ssize(numbers) == before + own,
          "one threshold a level in the calibration");
  Calibration c;
  c.queries = static_cast<std::int64_t>(numbers[0]);
  auto at = numbers.begin() + 2;
  for (auto& thresholds : c.thresholds.at) {
    thresholds.assign(at, at + own);
    at += own;
  }
  for (Achieved& a : c.held_out) {
    a = {at[0], at[1], at[2]};
    at += 3;
  }
  require(std::all_of(at, numbers.end(), [](double x) { return x <= Thresholds::kMostPower; }),
          "powers from 0 to 0.5 in the calibration");
  c.thresholds.power.assign(at, numbers.end());
  c.thresholds.power.resize(static_cast<std::size_t>(own));
  c.thresholds.most = std::max<std::int64_t>(1, c.queries);
  return c;
}

}  // namespace lode
