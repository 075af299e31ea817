// SPDX-License-Identifier: Apache-2.0
// How an output is scored against a sample's answers. Scores are from 0 to 1.
#pragma once

#include <string>
#include <string_view>

#include "tasks/sample_file.h"

namespace lode {

/// contains: the share of the answers that the output contains, case ignored (RULER's string match; with
/// several answers,
///           as for multi-value needles, this is the recall of the set).
/// exact:    1 when the output, without the space around it, is one of the answers.
/// f1:       the best overlap of words with one of the answers, as in SQuAD: case, punctuation and articles
/// ignored.
double score(std::string_view output, const Sample& sample);

}  // namespace lode
