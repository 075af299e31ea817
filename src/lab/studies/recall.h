// SPDX-License-Identifier: Apache-2.0
// Recall of the true top keys by context length: figure 5 of HashAttention, for any methods side by side.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/progress.h"
#include "lab/eval/eval.h"
#include "lodestone/engine.h"

namespace lode {

struct RecallOptions {
  ContextOptions context;
  std::vector<std::int64_t> lengths;                 ///< tokens read when queries are looked at, rising
  LocalWindow dense = {.sink = 128, .window = 128};  ///< the same for all methods, whatever their specs say
  std::int64_t top = 32;                             ///< true keys of a query
  std::int64_t queries = 16;                         ///< tokens looked at for each length, the last ones
  Progress::Mode progress = Progress::Mode::automatic;
};

/// Means over the queries of one query head.
struct HeadRecall {
  int layer = 0, head = 0;
  double by_weight = 0;  ///< |chosen and true| / |true|, true: the far keys with the largest a (equation 2)
  double by_value = 0;   ///< the same with the largest a |v| (lemma 4.1)
  double chosen = 0;     ///< share of the far keys that were chosen
};

struct RecallRow {
  std::string attention;
  std::int64_t tokens = 0;
  std::vector<HeadRecall> heads;  ///< [L, Hq]
  HeadRecall mean() const;
};

struct RecallReport {
  std::string model;
  RecallOptions options;
  std::vector<RecallRow> rows;  ///< by length, then in the order of the specs
  Json json() const;
  std::string table() const;
};

/// InputError when a text of so many tokens is too short for the lengths, or one of them leaves no far keys.
void expect_lengths(const RecallOptions& options, std::int64_t tokens, std::string_view where);

/// For each length the model reads the text densely up to there, anew; every method indexes what was read
/// before the queries and chooses for the same ones. InputError when the text is shorter, or a length leaves
/// no far keys.
RecallReport recall_by_length(const std::shared_ptr<const Model>& model, std::string_view text,
                              const std::vector<NamedSpec>& specs, const RecallOptions& options);

}  // namespace lode
