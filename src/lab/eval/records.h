// SPDX-License-Identifier: Apache-2.0
// Answers of an evaluation, one JSON object a line, kept so that a run that was stopped can go on.
#pragma once

#include <cstdio>
#include <ctime>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/json.h"
#include "lab/tasks/sample_file.h"
#include "lodestone/engine.h"

namespace lode {

/// In a file's settings: when its run began, of a chat template that says the day.
inline constexpr const char* kBegunAt = "begun_at";
/// What the file at `path` says there, if anything.
std::optional<std::time_t> begun_at(const std::filesystem::path& path);

struct AnswerRecord {
  std::string text;
  std::vector<TokenId> tokens;
  double score = 0, seconds = 0;
  WorkReport work;
  std::vector<int> full_layers;  ///< that went back to full attention, beyond the audit's limit
};

/// All answers so far, by (sample id, attention); also in a file when one is named. Of several under one name
/// the last counts.
class Records {
 public:
  /// `settings` says what the answers depend on; a file written under others is an InputError. A last line
  /// that was cut short is dropped. An empty path keeps everything in memory only.
  Records(const std::filesystem::path& path, const Json& settings);
  ~Records();
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;

  /// Null when there is none, or one by files of other contents (NamedSpec::files); InputError when the file
  /// answers another sample of that id.
  const AnswerRecord* find(const Sample& sample, const std::string& attention,
                           const std::string& files = {}) const;
  /// RunError when the file cannot take it.
  const AnswerRecord& add(const Sample& sample, const std::string& attention, AnswerRecord answer,
                          const std::string& files = {});

 private:
  std::size_t read(const std::string& text, const Json& settings);
  void append(const std::string& line);
  std::string hash_of(const Sample& sample) const;

  std::filesystem::path path_;
  std::FILE* file_ = nullptr;
  struct Entry {
    AnswerRecord answer;
    std::string sample_hash, files;
  };
  std::map<std::pair<std::string, std::string>, Entry> answers_;
  /// Hashes of contexts, each found once; holding them keeps their addresses from being used again.
  mutable std::map<std::shared_ptr<const std::string>, std::string> contexts_;
};

}  // namespace lode
