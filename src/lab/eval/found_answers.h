// SPDX-License-Identifier: Apache-2.0
// Answers that full attention finds in the far past, and how many of them stay under another way to attend: the score of
// questions whose text is known, without asking each of them.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace lode {

class FoundAnswers {
 public:
  /// Both [tokens]: which are found in the far past, and which full attention predicts rightly, as it does those found. What it
  /// does not predict, as a question's first words, stands between two answers.
  FoundAnswers(const std::vector<bool>& found, const std::vector<bool>& right);

  std::size_t count() const { return answers_.size(); }
  /// The share of which every token found is still predicted rightly, for one that is lost spoils an answer. right: [tokens].
  /// No value when there are none.
  std::optional<double> kept(const std::vector<bool>& right) const;

 private:
  std::vector<std::vector<std::size_t>> answers_;  // their tokens that are found
};

}  // namespace lode
