// SPDX-License-Identifier: Apache-2.0
// Published data sets, read as they were published and scored as their authors score them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "lab/tasks/sample_file.h"

namespace lode {

/// own:       this project's sample files.
/// ruler:     {"index", "input", "outputs", "length", "answer_prefix"?}; task = the file's folder or name.
/// The input is
///            cut before its last question.
/// infinitebench: {"id", "context", "input", "answer", "options"}; task = the file's name.
/// longbench: {"_id", "context", "input", "answers", "length", "dataset", "language", "all_classes"}.
/// prefixqa:  a list of {"context", "context_id", "question", "answer", "question_id"}, or one of them a
/// line. needle:    one object {"needle", "haystack", "question", "answer", "lengths", "depths"}; haystack is
/// a text file
///            or a folder of them beside the file, lengths are in characters (a sample's in tokens), depths
///            in percent.
enum class DatasetFormat { automatic, own, ruler, infinitebench, longbench, prefixqa, needle };

/// A sample of a data set that cannot be asked.
struct UnreadSample {
  std::string where;   ///< "FILE line 3"
  std::string id;      ///< by which the set names it; empty where it does not or cannot be read
  std::string reason;  ///< what was expected there, and what was found
};

/// "FILE line 3, sample 'ID': what was expected, what was found: left out".
std::string remark_of(const UnreadSample& sample);

struct Dataset {
  std::vector<Sample> samples;
  std::vector<UnreadSample> unread;
};

/// Tokens of a prompt.
using TokenCount = std::function<std::int64_t(std::string_view)>;

/// "auto" and the names above; InputError otherwise.
DatasetFormat parse_dataset_format(std::string_view text);
std::string_view name_of(DatasetFormat format);

/// Samples of a file, at most `limit` of each task and length (0 = all). Without a named format the first line that has
/// the fields of one decides. Prompts are ours: an instruction where a task needs one, else "Question: ...\nAnswer:".
/// `prompts`, when it names a file such as LongBench's dataset2prompt.json, gives a template for each task, with {context},
/// {input} and any other field of its samples but the answers ({question}, {options}, {OPTION_A}). A published data set is
/// read past its bad samples, which `unread` has. InputError where it has no good one, where the file or the prompts are
/// none, and at the first bad line of this project's own samples: later ones may lack its context.
/// `tokens_of` tells the lengths of texts that are asked for in characters; without it they are unknown.
Dataset read_dataset(const std::filesystem::path& path, DatasetFormat format, std::int64_t limit,
                     const std::filesystem::path& prompts = {}, const TokenCount& tokens_of = {});

}  // namespace lode
