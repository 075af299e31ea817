// SPDX-License-Identifier: Apache-2.0
// Samples and their files: one JSON object a line.
//   {"id", "task", "tokens", "context", "question", "answers": [...], "match": "contains" | "substring" |
//   "exact" | "f1" |
//   ..., "depth"?, "classes"?, "max_new"?,
//   "first_line"?, "verbatim"?}
// Several questions about one context share it by "context_id": the first carries the context, later ones
// only its id.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace lode {

/// How an output is scored; see lab/eval/scoring.h.
enum class Match {
  contains,
  substring,
  exact,
  f1,
  any,
  number,
  decimal,
  word,
  choice,
  debug,
  rouge_l,
  classes,
  count,
  passage,
  code,
  values,
  last_number,
  speaker,
  rouge_lsum,
  characters,
  rouge_l_characters
};
std::string_view name_of(Match match);

struct Sample {
  std::string id, task;
  std::int64_t tokens = 0;                     ///< the length asked for; results are grouped by it
  std::string context_id;                      ///< empty when the context has one question only
  std::shared_ptr<const std::string> context;  ///< shared by the samples of one context_id
  std::string question;                        ///< read right after the context
  std::vector<std::string> answers;            ///< what is looked for, at least one
  std::string written = {};  ///< the whole answer as a model writes it; of samples that were made, in no file
  Match match = Match::contains;
  std::optional<double> depth;       ///< where the earliest fact stands that the answer needs: 0 start, 1 end
  std::vector<std::string> classes;  ///< of Match::classes: all labels
  /// Tokens to generate, over lines; 0 = as many as the answers need, up to the end of the line.
  std::int64_t max_new = 0;
  bool first_line = false;  ///< only the output's first line that is not empty is scored
  bool verbatim = false;    ///< in no chat template, also where others are
  std::int64_t length = 0;  ///< tokens of context, question and longest answer; 0 = unknown
};

/// One line without its end; `with_context` is off for later samples of a context_id.
std::string sample_line(const Sample& sample, bool with_context);

/// All samples of a file, at most `limit` of each task and length (0 = all). InputError names the file, the
/// line and what is wrong with it.
std::vector<Sample> read_samples(const std::filesystem::path& path, std::int64_t limit = 0);
/// The same of text that is already in memory.
std::vector<Sample> parse_samples(std::string_view text, std::string_view where, std::int64_t limit = 0);

/// Calls body(line, "WHERE line N") for every line that is not blank.
void for_each_line(std::string_view text, std::string_view where,
                   const std::function<void(std::string_view, const std::string&)>& body);

}  // namespace lode
