// SPDX-License-Identifier: Apache-2.0
// Answers of an evaluation, one JSON object a line, kept so that a run that was stopped can go on.
#pragma once

#include <cstdio>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "lodestone/engine.h"
#include "tasks/sample_file.h"

namespace lode {

struct Answer {
  std::string text;
  std::vector<TokenId> tokens;
  double score = 0, seconds = 0;
  WorkReport work;
};

/// All answers so far, by (sample id, attention); also in a file when one is named.
class Records {
 public:
  /// `settings` says what the answers depend on; a file written under others is an InputError. A last line
  /// that was cut short is dropped. An empty path keeps everything in memory only.
  Records(const std::filesystem::path& path, const Json& settings);
  ~Records();
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;

  /// Null when there is none; InputError when the file answers another sample of that id.
  const Answer* find(const Sample& sample, const std::string& attention) const;
  /// RunError when the file cannot take it.
  const Answer& add(const Sample& sample, const std::string& attention, Answer answer);

 private:
  std::size_t read(const std::string& text, const Json& settings);
  void append(const std::string& line);

  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
  struct Entry {
    Answer answer;
    std::string sample_hash;
  };
  std::map<std::pair<std::string, std::string>, Entry> answers_;
};

}  // namespace lode
