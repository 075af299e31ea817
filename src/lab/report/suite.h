// SPDX-License-Identifier: Apache-2.0
// A suite: which tasks, methods, lengths and protocols reproduce one table or figure. docs/report.md
// describes the file.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lab/eval/eval.h"

namespace lode {

enum class RunKind { eval, probe, recall, clusters, key_query, drift, training, attention, decode };
std::string_view name_of(RunKind kind);
/// Whether its measurements are of methods; others are of the model alone.
bool has_methods(RunKind kind);

/// What a run's results are shown as.
enum class Show {
  table,
  score_density,      ///< eval: mean score over the share of bytes read
  score_selectivity,  ///< eval: mean score over the share of far keys attended
  score_length,       ///< eval: mean score over the length
  score_time,         ///< eval: mean score over the seconds of a question
  score_tasks,        ///< eval: score of each task by itself over the share of far keys attended
  far_keys_table,     ///< eval: the share of far keys attended, by task
  far_keys_budget,    ///< eval: likewise over the method's budget
  needle_map,         ///< eval: score by depth and length, one map a method
  recovered_density,  ///< probe: recovered gap over the share of bytes read
  error_density,      ///< probe: output error over the share of bytes read
  error_selectivity,  ///< probe: output error over the share of far keys attended
  mass_selectivity,   ///< probe: captured mass over the share of far keys attended
  head_maps,          ///< probe: captured mass and density, layer by head
  recall_length,      ///< recall: recall of the true top keys over the length
  keys_length,        ///< recall: keys that a choice takes over the length
  cluster_map,        ///< clusters: keys of the largest clusters of some heads, laid out flat
  axes,               ///< key-query: keys and queries on two principal axes
  dot_products,       ///< key-query: of queries with far keys, recent ones and the first
  cluster_shares,     ///< key-query: share of the queries in a cluster over that of the keys
  search,             ///< key-query: recall over the share of the keys that an inverted file scans
  distance,           ///< key-query: Mahalanobis distances to the keys
  deviations,         ///< drift: unevenness of the buckets by where keys are drawn from
  captured,           ///< training: attention captured over the share of far keys, by variant
  latency_bars,       ///< attention: parts of the time beside the byte limit
  latency_length,     ///< attention, decode: time over the length
};

/// A method of a run: as the suite calls it, and with the run's dense parts written in.
struct SuiteMethod {
  std::string label, spec;
};

/// One grid.
struct SuiteRun {
  RunKind kind = RunKind::eval;
  std::string suite;         ///< its name
  std::string where;         ///< "FILE line N" of its head
  std::string title, dense;  ///< dense: "sink=1,window=511", set for all methods alike
  std::vector<SuiteMethod> methods;
  std::vector<std::string> tasks;  ///< of eval; none where only the user's own samples are asked about
  std::vector<std::int64_t> lengths;
  std::vector<Protocol> protocols;
  std::int64_t samples = 16, questions = 0;
  /// Texts that hold the facts of all tasks serve all runs alike, of each length no more than so many tokens
  /// hold; kSharedAll = no such bound; 0 = each task has texts of its own.
  std::int64_t shared = 0;
  std::uint64_t seed = 7;
  std::vector<Show> show;
  // Of recall.
  std::int64_t top = 32, queries = 16;
  // Of drift and training.
  std::int64_t texts = 10;  ///< that are read
  std::int64_t steps = 600;
  std::vector<std::string> variants;
  // Of attention and decode.
  std::string shape = "pocket";
  std::int64_t batch = 1, query_tokens = 1;
  std::optional<double> keep;
  bool without_cache = false;  ///< decode: also a token's time when the whole text is prefilled for it
  KvTier kv_tier = KvTier::
      automatic;  ///< decode: where a GPU's keys and values lie; automatic = as the report's options say
};

inline constexpr std::int64_t kSharedAll = std::numeric_limits<std::int64_t>::max();
inline constexpr std::int64_t kFullSamples = 32 * 1024;  ///< longer texts are asked about less
/// Questions a task that a run asks at a length: beyond kFullSamples tokens a quarter of its samples, but all
/// that it asks about one text, for reading such a text is nearly all of the work.
std::int64_t samples_at(const SuiteRun& run, std::int64_t length);
/// Texts of a length that a run shares: as many as the questions of a task need where one text has not enough
/// of them, within what `shared` allows; one at least.
std::int64_t shared_texts(const SuiteRun& run, std::int64_t length);

struct Suite {
  std::string name;   ///< of the file, without its ending
  std::string given;  ///< on a command line: the name of a shipped one, the file of another
  std::string title, source, note;
  bool ranking = false;  ///< also a row of each method at equal bytes
  std::vector<SuiteRun> runs;
};

/// `quick` takes the keys that begin with quick_ in place of theirs, `gpu` those with gpu_ where there is no
/// quick one. InputError names the line. Whether a model can run a method is not looked at: a
/// report names those that it cannot.
Suite parse_suite(std::string_view text, std::string_view where, std::string_view name, bool quick,
                  bool gpu = false);
Suite read_suite(const std::filesystem::path& path, bool quick, bool gpu = false);

/// Runs `body`; an InputError of it is told with `where` in front.
void naming(const std::string& where, const std::function<void()>& body);

/// A count with the suffixes k = 1024 and M = 1024^2; InputError otherwise.
std::int64_t parse_length(std::string_view text, std::string_view where);

/// The spec with `dense` keys where it has none of its own; `full` stays as it is. A preset is a paper's, sink, window and exact
/// layers included: it keeps them, but for the sink and window of runs that give all methods the same. In scores a method
/// whose window is the text's end (`squeezed`) keeps its own, too.
std::string with_dense(std::string_view spec, std::string_view dense, RunKind kind);

}  // namespace lode
