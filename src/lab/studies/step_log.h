// SPDX-License-Identifier: Apache-2.0
// Steps of a long study that are done, so that one that was ended goes on where it was: one JSON object a line, beside
// the file that the study makes.
#pragma once

#include <cstdio>
#include <filesystem>
#include <map>
#include <string>

#include "base/json.h"

namespace lode {

class StepLog {
 public:
  /// Keeps steps in memory alone.
  StepLog() = default;
  /// Reads what an earlier run left in a file, which need not exist. InputError when another process writes to it or
  /// when it is something else; a last line that was cut short is dropped, and so are logs of other versions.
  explicit StepLog(const std::filesystem::path& path);
  ~StepLog();
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;

  /// What a step gave, null when it is not done. `key` says all that it depends on.
  const Json* find(const Json& key) const;
  /// RunError when the file cannot take it.
  const Json& add(const Json& key, Json result);
  bool empty() const { return steps_.empty(); }
  const std::filesystem::path& path() const { return path_; }
  /// With the file.
  void remove();

 private:
  void append(const std::string& line);

  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
  std::map<std::string, Json> steps_;  // by the hash of their key
};

}  // namespace lode
