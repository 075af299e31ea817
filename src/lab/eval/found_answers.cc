// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/found_answers.h"

#include <algorithm>

#include "lodestone/error.h"

namespace lode {

namespace {

bool all_of(const std::vector<bool>& bits, TokenStretch stretch) {
  return std::all_of(bits.begin() + static_cast<std::ptrdiff_t>(stretch.begin),
                     bits.begin() + static_cast<std::ptrdiff_t>(stretch.end), [](bool bit) { return bit; });
}
bool any_of(const std::vector<bool>& bits, TokenStretch stretch) {
  return std::any_of(bits.begin() + static_cast<std::ptrdiff_t>(stretch.begin),
                     bits.begin() + static_cast<std::ptrdiff_t>(stretch.end), [](bool bit) { return bit; });
}

/// From one found token to the next, as long as all between them are right.
std::vector<TokenStretch> together(const std::vector<bool>& found, const std::vector<bool>& right) {
  std::vector<TokenStretch> stretches;
  bool apart = true;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (!right[i]) apart = true;
    if (!found[i]) continue;
    if (apart) stretches.push_back({i, i});
    stretches.back().end = i + 1;
    apart = false;
  }
  return stretches;
}

}  // namespace

std::vector<TokenStretch> answers_between(const AnswerMarks& marks, const Tokenizer& tokenizer,
                                          std::span<const TokenId> tokens) {
  LODE_ASSERT(!marks.before.empty() && !marks.after.empty());
  std::string text;
  std::vector<std::size_t> begins;  // [tokens]: their places in the text
  for (const TokenId token : tokens) {
    begins.push_back(text.size());
    if (!tokenizer.is_special(token)) text += tokenizer.bytes_of(token);
  }
  const auto tokens_before = [&](std::size_t place) {  // that begin there
    return static_cast<std::size_t>(std::ranges::lower_bound(begins, place) - begins.begin());
  };
  std::vector<TokenStretch> answers;
  for (std::size_t at = text.find(marks.before); at != std::string::npos; at = text.find(marks.before, at)) {
    at += marks.before.size();
    const std::size_t end = text.find(marks.after, at);
    if (end == std::string::npos) break;
    if (end > at) answers.push_back({tokens_before(at), tokens_before(end + 1)});
    at = end;
  }
  return answers;
}

FoundAnswers::FoundAnswers(const std::vector<bool>& found, const std::vector<bool>& right,
                           const std::optional<std::vector<TokenStretch>>& answers) {
  for (const TokenStretch& answer : answers ? *answers : together(found, right))
    if (all_of(right, answer) && any_of(found, answer)) answers_.push_back(answer);
}

std::optional<double> FoundAnswers::kept(const std::vector<bool>& right) const {
  if (answers_.empty()) return std::nullopt;
  const auto stays = [&](TokenStretch answer) { return all_of(right, answer); };
  return static_cast<double>(std::ranges::count_if(answers_, stays)) / static_cast<double>(answers_.size());
}

}  // namespace lode
