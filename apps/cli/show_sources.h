// SPDX-License-Identifier: Apache-2.0
// Passages that an answer rests on, as programs and people read them.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "lodestone/sources.h"

namespace lode::cli {

inline constexpr std::size_t kShownSources = 3;
/// What a model attends to when it is asked nothing in particular.
inline constexpr const char* kNeutralQuestion = "What does the text say?";

/// Citations in Anthropic's shapes (page_location, char_location), and what is ours: line, weight, positions.
Json sources_json(const std::vector<Citation>& citations);
/// A line for each of them, or one that says that nothing stands out.
std::string sources_text(const Json& sources);

}  // namespace lode::cli
