// SPDX-License-Identifier: Apache-2.0
// How long the parts of a program's start took, for people who wonder what they wait for.
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lode {

/// Seconds since the program began: since its static objects were made.
double seconds_since_start();

/// Notes what lies between its beginning and its end under a name; of several the sum. From any thread.
class TimedPart {
 public:
  explicit TimedPart(std::string_view name) : name_(name), start_(std::chrono::steady_clock::now()) {}
  ~TimedPart();
  TimedPart(const TimedPart&) = delete;
  TimedPart& operator=(const TimedPart&) = delete;

 private:
  std::string name_;
  std::chrono::steady_clock::time_point start_;
};

/// All that have ended, in the order in which they first did, and their seconds.
std::vector<std::pair<std::string, double>> timed_parts();

}  // namespace lode
