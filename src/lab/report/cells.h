// SPDX-License-Identifier: Apache-2.0
// Raw results, one JSON object a line, {"key": {...}, "result": ...}: what a report has measured and need not
// measure again.
#pragma once

#include <cstdio>
#include <filesystem>
#include <map>
#include <string>

#include "base/json.h"

namespace lode {

class ResultCache {
 public:
  /// A last line that was cut short is dropped; any other fault is an InputError.
  explicit ResultCache(const std::filesystem::path& path);
  ~ResultCache();
  ResultCache(const ResultCache&) = delete;
  ResultCache& operator=(const ResultCache&) = delete;

  const Json* find(const Json& key) const;  ///< null when there is none
  /// By the key's text.
  const std::map<std::string, Json>& all() const { return results_; }
  /// RunError when the file cannot take it.
  const Json& add(const Json& key, Json result);

 private:
  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
  std::map<std::string, Json> results_;
};

}  // namespace lode
