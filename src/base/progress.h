// SPDX-License-Identifier: Apache-2.0
// One line on stderr that says how far long work is, how fast, and when it will end.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace lode {

/// On a terminal: a bar redrawn at most 10 times a second. Elsewhere: one line per 10 %. Silent when quiet.
class Progress {
 public:
  enum class Mode { automatic, quiet };
  /// `unit` is what is counted, e.g. "tokens".
  Progress(std::string title, std::int64_t total, std::string unit, Mode mode = Mode::automatic);
  ~Progress();  ///< ends the line
  void at(std::int64_t done);

 private:
  void draw(std::int64_t done, bool last);
  std::string title_, unit_;
  std::int64_t total_, done_ = 0, last_tenth_ = -1;
  bool quiet_, terminal_, drawn_ = false;
  std::chrono::steady_clock::time_point start_, last_draw_;
};

}  // namespace lode
