// SPDX-License-Identifier: Apache-2.0
// What work costs, in tokens at the beginning of a prefill, as the shipped model was measured with on a CPU:
// for what to do first and how long it will take, nothing else.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "lab/eval/eval.h"

namespace lode {

std::int64_t prefill_cost(std::int64_t tokens);
/// Of so many tokens; `first` = no other method of this name has indexed the text.
std::int64_t index_cost(const std::string& method, std::int64_t tokens, bool first);
/// Of the indexes of methods on one text.
std::int64_t indexes_cost(std::span<const std::string> methods, std::int64_t tokens);
/// Of so many methods' answers to one question.
std::int64_t answers_cost(const Protocol& protocol, std::int64_t tokens, std::int64_t methods);

}  // namespace lode
