// SPDX-License-Identifier: Apache-2.0
#include "eval/scoring.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <vector>

namespace lode {

namespace {

bool is_ascii(char c) {
  return (static_cast<unsigned char>(c) & 0x80) == 0;
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (is_ascii(c)) c = static_cast<char>(std::tolower(c));
  }
  return out;
}

std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n";
  const std::size_t begin = text.find_first_not_of(kSpace);
  return begin == std::string_view::npos ? "" : text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

double share_contained(std::string_view output, const std::vector<std::string>& answers) {
  const std::string text = lower(output);
  const auto found = std::count_if(answers.begin(), answers.end(), [&](const std::string& a) {
    return text.find(lower(a)) != std::string::npos;
  });
  return static_cast<double>(found) / static_cast<double>(answers.size());
}

/// Words in lower case without punctuation; "a", "an" and "the" are left out.
std::map<std::string, int> words_of(std::string_view text) {
  std::map<std::string, int> words;
  std::string word;
  for (const char c : lower(text) + " ") {
    if (is_ascii(c) && std::isspace(c) != 0) {
      if (!word.empty() && word != "a" && word != "an" && word != "the") ++words[word];
      word.clear();
    } else if (!is_ascii(c) || std::ispunct(c) == 0) {
      word += c;
    }
  }
  return words;
}

int total(const std::map<std::string, int>& words) {
  int sum = 0;
  for (const auto& [word, n] : words) sum += n;
  return sum;
}

double f1(std::string_view output, std::string_view answer) {
  const auto have = words_of(output), want = words_of(answer);
  if (have.empty() || want.empty()) return have.empty() && want.empty() ? 1.0 : 0.0;
  int common = 0;
  for (const auto& [word, n] : have) {
    const auto other = want.find(word);
    if (other != want.end()) common += std::min(n, other->second);
  }
  return 2.0 * common / (total(have) + total(want));
}

}  // namespace

double score(std::string_view output, const Sample& sample) {
  if (sample.match == Match::contains) return share_contained(output, sample.answers);
  double best = 0;
  for (const std::string& answer : sample.answers) {
    best = std::max(best, sample.match == Match::f1      ? f1(output, answer)
                          : trim(output) == trim(answer) ? 1.0
                                                         : 0.0);
  }
  return best;
}

}  // namespace lode
