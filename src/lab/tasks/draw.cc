// SPDX-License-Identifier: Apache-2.0
#include "lab/tasks/draw.h"

#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::string_view kWhere = "task language, tasks";

}  // namespace

std::size_t count_of(const Json& entry, std::string_view key) {
  return static_cast<std::size_t>(json_int(entry, key, kWhere, 1, 1'000'000));
}

double number_of(const Json& entry, std::string_view key, double low, double high) {
  return json_number(entry, key, kWhere, low, high);
}

std::string first_of(const Json& list) {
  return list.at(0).get<std::string>();
}

std::vector<std::string> unique(std::size_t count, std::set<std::string>& known,
                                const std::function<std::string()>& draw) {
  std::vector<std::string> drawn;
  for (std::size_t tries = 0; drawn.size() < count; ++tries) {
    if (tries > 50 * count + 1000) {
      throw InputError("the task language has words for " + std::to_string(drawn.size()) +
                       " different keys only, " + std::to_string(count) +
                       " are needed; use fewer tokens, or --facts");
    }
    std::string text = draw();
    if (known.insert(text).second) drawn.push_back(std::move(text));
  }
  return drawn;
}

std::vector<std::string> unique_values(const Language& language, std::string_view kind, std::size_t count,
                                       Rng& rng, std::set<std::string>& known) {
  return unique(count, known, [&] { return language.value(kind, rng); });
}

}  // namespace lode
