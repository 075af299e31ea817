// SPDX-License-Identifier: Apache-2.0
// One threshold for all layers and heads (Squeezed Attention, section 3.2): targets, the search for it, and
// what it was found to achieve on queries that it was not calibrated on.
//
// Thresholds are in units of the uniform weight: a cluster is kept when S N > tau, S being the softmax
// estimate of one of its keys and N the number of keys under the index. Over a fixed context that is S > T
// with T = tau / N; when the context grows, T falls with it, as the weights do.
#pragma once

#include <array>
#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "lodestone/spec.h"

namespace lode {

class SectionReader;
class SectionWriter;

/// What a method is asked to reach: a share of keys left out, a share of the attention kept, or an error of
/// the output.
struct Target {
  enum class Kind { sparsity, mass, error };
  Kind kind = Kind::sparsity;
  double value = 0.9;

  /// From the keys `sparsity`, `mass`, `error`; InputError when more than one is given.
  static Target of(const Spec& spec);
  /// Nothing may be left out.
  bool is_everything() const { return kind == Kind::mass ? value >= 1.0 : value <= 0.0; }
  std::string text() const;  ///< "sparsity 0.9"
};

/// Weights over log score, fine enough that a quantile is off by less than 1 % of the score. Whole-number
/// weights add up exactly, so the order of adding does not matter.
class ScoreHistogram {
 public:
  // Log scores from -40 (a weight of exp(-40) of the uniform one is none) to 24.
  static constexpr double kLowest = -40.0, kBinsPerUnit = 128.0;
  static constexpr std::size_t kBins = 64 * 128;

  void add(double score, double weight);
  /// Weights by bin, [kBins].
  void add(std::span<const std::uint64_t> weights);
  void add(const ScoreHistogram& other);
  /// The largest threshold above which at least `wanted` of the weight lies; 0 when only everything is
  /// enough.
  double threshold_for(double wanted) const;
  double total() const;

 private:
  std::vector<double> weights_;  // [bins], empty until the first add
};

/// Means over queries, heads and layers.
struct Achieved {
  double sparsity = 0;  ///< share of the indexed keys left out
  double mass = 1;      ///< share of full attention's probability on attended keys, the window's included
  double error = 0;     ///< |output - full attention's output| / |full attention's output|
};

/// Queries that choose together are averaged; those of the answer choose one by one.
enum class QueryKind { together, alone };
inline constexpr std::array<QueryKind, 2> kQueryKinds = {QueryKind::together, QueryKind::alone};

/// By level. The more tokens choose together, the more clusters some of them give a high score, and the
/// higher the threshold that leaves out as many: a power of their number, between two numbers that are
/// calibrated. It does not grow for ever: above the larger number the threshold stays.
struct Thresholds {
  static constexpr std::int64_t kFew = 16;  ///< tokens that `at` is for, where they choose together
  /// Tokens that have nothing in common give a root of their number.
  static constexpr double kMostPower = 0.5;

  std::array<std::vector<double>, 2> at;  // [QueryKind][levels]
  std::vector<double> power;              // [levels], where they choose together
  std::int64_t most = kFew;               ///< tokens, the larger number

  std::int64_t levels() const { return std::ssize(at[0]); }
  /// 0 keeps everything.
  double of(QueryKind kind, std::int64_t tokens, int level) const;
};

struct Calibration {
  /// Queries calibrated on, at most.
  static constexpr std::int64_t kMost = 128;

  std::int64_t queries = 0;  ///< calibrated on; 0 = never calibrated
  Thresholds thresholds;
  std::array<Achieved, 2> held_out;  // [QueryKind]

  void save(SectionWriter& out, const Target& target) const;
  static Calibration load(const SectionReader& in);  ///< InputError when it cannot be one
};

}  // namespace lode
