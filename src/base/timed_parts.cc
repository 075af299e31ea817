// SPDX-License-Identifier: Apache-2.0
#include "base/timed_parts.h"

#include <algorithm>
#include <mutex>

namespace lode {

namespace {

using Clock = std::chrono::steady_clock;

const Clock::time_point began = Clock::now();

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::mutex mutex;
std::vector<std::pair<std::string, double>>& noted() {
  static std::vector<std::pair<std::string, double>> all;
  return all;
}

}  // namespace

double seconds_since_start() {
  return seconds_since(began);
}

TimedPart::~TimedPart() {
  const double seconds = seconds_since(start_);
  const std::lock_guard lock(mutex);
  const auto found = std::ranges::find(noted(), name_, &std::pair<std::string, double>::first);
  try {
    if (found != noted().end())
      found->second += seconds;
    else
      noted().emplace_back(std::move(name_), seconds);
  } catch (const std::bad_alloc&) {  // a figure less
  }
}

std::vector<std::pair<std::string, double>> timed_parts() {
  const std::lock_guard lock(mutex);
  return noted();
}

}  // namespace lode
