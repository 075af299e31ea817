// SPDX-License-Identifier: Apache-2.0
// What a ranking's numbers say, in words: nothing here is known of a method but what was measured.
#pragma once

#include <string>
#include <vector>

#include "lab/report/ladders.h"

namespace lode {

/// The outcome in a few sentences, for readers who go no further; empty when the probe has measured nothing.
std::vector<std::string> outcome_of(const Ladders& ladders);

/// Why the order is as it is, a sentence each.
std::vector<std::string> explanation_of(const Ladders& ladders);

}  // namespace lode
