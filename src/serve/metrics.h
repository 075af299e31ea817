// SPDX-License-Identifier: Apache-2.0
// Counters and histograms in Prometheus's text format. Names that vLLM has are vLLM's, with its meaning.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "serve/backend.h"

namespace lode::serve {

/// Seconds, in buckets from a millisecond to ten minutes.
class Histogram {
 public:
  void add(double seconds);
  void print(std::string& out, const char* name, const char* help) const;

 private:
  static constexpr std::array<double, 16> kBounds = {0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
                                                     1,     2.5,   5,    10,    30,   60,  120,  600};
  std::array<std::uint64_t, kBounds.size() + 1> counts_{};
  double sum_ = 0;
};

class Metrics {
 public:
  void add_request(const std::string& route, int status, double seconds);
  void add_answer(const Answer& answer);
  std::string print(const BackendStats& stats, int connections) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<std::string, int>, std::uint64_t> requests_;  // by route and status
  std::map<std::string, std::uint64_t> endings_;                   // answers by what ended them
  std::uint64_t prompt_tokens_ = 0, cached_tokens_ = 0, answer_tokens_ = 0;
  std::uint64_t read_bytes_ = 0, full_bytes_ = 0;
  std::uint64_t with_document_ = 0;
  Histogram http_seconds_, first_token_, each_token_, whole_, queued_;
};

}  // namespace lode::serve
