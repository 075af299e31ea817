// SPDX-License-Identifier: Apache-2.0
// The run-time check: on a sample of sparse attention calls, the exact output too, and how far apart they
// are. Where a layer passes the limit that the user set, it falls back to full attention.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lodestone/engine.h"
#include "model/llama.h"

namespace lode {

class Audit {
 public:
  /// Of the sparse calls (one layer, one stretch of tokens) the share `rate` is audited; which ones depends
  /// on seed, layer and position alone.
  Audit(double rate, std::uint64_t seed, int layers);
  /// A layer whose audited outputs of one answer differ by more than `limit` on average falls back for the
  /// rest of it, and the outputs that showed it become the exact ones. None = whatever they differ by.
  void set_limit(std::optional<double> limit) { limit_ = limit; }
  const std::optional<double>& limit() const { return limit_; }

  void set_rate(double rate) { rate_ = rate; }
  bool active() const { return rate_ > 0; }
  /// Hooks that audit into `report` and pass everything on to `next` (may be null); all three outlive them.
  ForwardHooks hooks(const ForwardHooks* next, WorkReport& report);
  /// The selectors [L] of a step without those of layers that fell back; empty when none of them is left.
  /// Until the next call. The very span that was given while no layer fell back: a GPU knows a method by its
  /// address.
  std::span<Selector* const> without_fallen(std::span<Selector* const> selectors);
  const std::vector<int>& fallen_back() const { return fallen_back_; }  ///< layers, rising
  /// Which layers fell back, for people; empty when none did.
  std::string notice() const;
  /// Before a new answer: nothing has been seen.
  void forget();

 private:
  struct Seen {
    double error_sum = 0;
    std::int64_t outputs = 0;
  };
  bool samples(int layer, Position begin) const;
  void compare(const LayerGeometry& geometry, std::span<const QueryBlock> blocks,
               std::span<float* const> outputs, WorkReport& report);
  /// Counts the errors of outputs [rows, d] of a layer; says whether it is now beyond the limit.
  bool count(int layer, std::int64_t d, std::span<const float> outputs, std::span<const float> exact,
             WorkReport& report);
  void fall_back(int layer);

  double rate_;
  std::optional<double> limit_;
  const std::uint64_t seed_;
  std::vector<Seen> seen_;        // [L], of the running answer
  std::vector<int> fallen_back_;  // layers, rising
  std::vector<Selector*> left_;   // [L] of the running step, once layers fell back
};

}  // namespace lode
