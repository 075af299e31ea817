// SPDX-License-Identifier: Apache-2.0
// Small helpers that the makers of facts and of lists share.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "lab/tasks/language.h"

namespace lode {

/// A whole number of a task's entry, at least 1; InputError otherwise.
std::size_t count_of(const Json& entry, std::string_view key);
/// A number of a task's entry, in [low, high]; InputError otherwise.
double number_of(const Json& entry, std::string_view key, double low, double high);
std::string first_of(const Json& list);

/// `count` different draws that are not in `known`, which takes them in; InputError when the words do not
/// give so many.
std::vector<std::string> unique(std::size_t count, std::set<std::string>& known,
                                const std::function<std::string()>& draw);
/// The same of values of one kind.
std::vector<std::string> unique_values(const Language& language, std::string_view kind, std::size_t count,
                                       Rng& rng, std::set<std::string>& known);

}  // namespace lode
