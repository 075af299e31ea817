// SPDX-License-Identifier: Apache-2.0
// Tasks whose answer rests on the whole text: counting, listing all, saying what is not there, comparing two
// places. What finds a few passages fails them.
#pragma once

#include <cstddef>
#include <set>
#include <string>

#include "lab/tasks/families.h"

namespace lode {

/// The least number of facts about one place.
std::size_t fewest_people(const Json& task);
/// People seen in places: facts, and the questions of `task` (count, listing, denial or comparison) about each
/// place. Places and people are none of `names`, which takes them in.
Material sightings(const Language& language, std::string_view task, std::size_t facts, Language::Wording side,
                   Rng& rng, std::set<std::string>& names);

}  // namespace lode
