// SPDX-License-Identifier: Apache-2.0
// What an answer attends to. A model often goes on after the answer proper, at length and about something else. So each
// sentence has one vote, whatever its length, which counts half of the vote of the sentence before.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/sentences.h"

namespace lode {

class AnswerMass {
 public:
  explicit AnswerMass(std::size_t tokens = 0) : sentence_(tokens, 0.0), sum_(tokens, 0.0) {}

  /// `text` is the answer up to its next token.
  void follow(std::string_view text);
  /// What the `i`-th token of the answer attended to; i does not fall.
  void add(std::size_t i, std::size_t token, double mass);
  /// Forgets what was attended to so far: those were thoughts.
  void restart();
  /// [tokens], those of the whole answer.
  std::vector<double> finish();

 private:
  void end_sentence();

  std::size_t begin_ = 0;         ///< of the sentence that is followed, bytes of the answer
  std::vector<bool> begins_;      ///< [tokens of the answer] a sentence
  std::size_t next_ = 0;          ///< of the answer's tokens: up to it, sentences are ended
  std::vector<double> sentence_;  ///< [tokens] attended to by the sentence
  std::vector<double> sum_;       ///< [tokens] of the sentences before
  double vote_ = 1;
};

inline void AnswerMass::follow(std::string_view text) {
  constexpr std::size_t kNumber = 3;  // bytes: "1." of a list belongs to the item behind it
  const SourceText rest = {.text = std::string(text.substr(std::min(begin_, text.size())))};
  const std::vector<Sentence> sentences = sentences_of(rest);
  begins_.push_back(sentences.size() >= 2 &&
                    sentences[sentences.size() - 2].end - sentences.front().begin > kNumber);
  if (begins_.back()) begin_ += sentences.back().begin;
}

inline void AnswerMass::add(std::size_t i, std::size_t token, double mass) {
  for (; next_ <= i && next_ < begins_.size(); ++next_)
    if (begins_[next_]) end_sentence();
  sentence_[token] += mass;
}

inline void AnswerMass::restart() {
  std::fill(sentence_.begin(), sentence_.end(), 0.0);
  std::fill(sum_.begin(), sum_.end(), 0.0);
  vote_ = 1;
}

inline void AnswerMass::end_sentence() {
  const double total = std::accumulate(sentence_.begin(), sentence_.end(), 0.0);
  if (total <= 0) return;
  for (std::size_t i = 0; i < sum_.size(); ++i) sum_[i] += vote_ * sentence_[i] / total;
  std::fill(sentence_.begin(), sentence_.end(), 0.0);
  vote_ /= 2;
}

inline std::vector<double> AnswerMass::finish() {
  end_sentence();
  return std::move(sum_);
}

}  // namespace lode
