// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/found_answers.h"

#include <algorithm>

namespace lode {

FoundAnswers::FoundAnswers(const std::vector<bool>& found, const std::vector<bool>& right) {
  bool apart = true;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (!right[i]) apart = true;
    if (!found[i]) continue;
    if (apart) answers_.emplace_back();
    answers_.back().push_back(i);
    apart = false;
  }
}

std::optional<double> FoundAnswers::kept(const std::vector<bool>& right) const {
  if (answers_.empty()) return std::nullopt;
  const auto stays = [&](const std::vector<std::size_t>& answer) {
    return std::ranges::all_of(answer, [&](std::size_t token) { return right[token]; });
  };
  return static_cast<double>(std::ranges::count_if(answers_, stays)) / static_cast<double>(answers_.size());
}

}  // namespace lode
