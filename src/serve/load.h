// SPDX-License-Identifier: Apache-2.0
// Load on a server of OpenAI's interface: clients that ask one question after the other, and how long they waited.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lode::serve {

struct LoadQuestion {
  std::string question, context;  ///< context: a stored one; empty = none
};

struct LoadOptions {
  std::string url;  ///< http://HOST:PORT
  std::string key;  ///< empty = none
  std::string model, attention;
  bool sources = true;  ///< of the answers are wanted
  int clients = 1;
  std::int64_t requests = 0;  ///< in all, the questions over and over
  std::int64_t max_new_tokens = 64;
  double timeout_seconds = 600;  ///< of one answer
};

struct LoadResult {
  std::int64_t answered = 0, failed = 0;
  std::string failure;  ///< the first
  double seconds = 0;   ///< from the first request to the last answer
  std::int64_t tokens = 0;
  std::vector<double> first_token, whole;  ///< seconds, of each answer, rising
};

/// InputError when the URL is none, RunError when nobody listens there.
LoadResult put_load(const LoadOptions& options, const std::vector<LoadQuestion>& questions);

/// The value that `share` of them do not exceed; 0 of none. `sorted` rises.
double percentile(const std::vector<double>& sorted, double share);

}  // namespace lode::serve
