// SPDX-License-Identifier: Apache-2.0
// One line on stderr that says how far long work is, how fast, and when it will end.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

namespace lode {

/// Predicts the time of work whose units become dearer: the cost of a unit is fitted, by least squares, as
/// a + b x (units done), a and b >= 0. Until two different steps were seen it is taken as even.
class GrowingCost {
 public:
  /// So many units more were done by an earlier run, which says nothing of the cost.
  void skip(std::int64_t units) { done_ += static_cast<double>(units); }
  /// `done` units in all were done `seconds` after the start.
  void add(std::int64_t done, double seconds);
  /// Seconds from the last step to `total` units.
  double left(std::int64_t total) const;

 private:
  double done_ = 0, seconds_ = 0;
  // Sums over steps, weighted by their units: 1, x, y, x x, x y; x = the middle of a step, y = its seconds a
  // unit.
  double w_ = 0, wx_ = 0, wy_ = 0, wxx_ = 0, wxy_ = 0;
};

/// On a terminal: a bar redrawn at most 10 times a second. Elsewhere: one line per 10 %. Silent when quiet.
class Progress {
 public:
  enum class Mode { automatic, quiet };
  /// How the cost of one unit develops: `growing` is a prefill, whose every token attends all before it.
  enum class Cost { even, growing };
  /// `unit` is what is counted, e.g. "tokens".
  Progress(std::string title, std::int64_t total, std::string unit, Mode mode = Mode::automatic,
           Cost cost = Cost::even);
  ~Progress();  ///< ends the line
  void at(std::int64_t done);
  /// So much more of what at() will be told was done by an earlier run: it says nothing of this one's speed.
  void skip(std::int64_t done) {
    skipped_ += done;
    if (growing_) growing_->skip(done);
  }

 private:
  void draw(std::int64_t done, bool last);
  double seconds() const;
  std::string title_, unit_;
  std::int64_t total_, done_ = 0, skipped_ = 0, last_tenth_ = -1;
  bool quiet_, terminal_, drawn_ = false;
  std::optional<GrowingCost> growing_;
  std::chrono::steady_clock::time_point start_, last_draw_;
};

}  // namespace lode
