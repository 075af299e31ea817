// SPDX-License-Identifier: Apache-2.0
#include "lab/eval/scoring.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <map>
#include <set>
#include <vector>

#include "text/utf8.h"

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

/// Whether a word goes on between two characters: of ASCII alone, since not every script parts words.
bool joined(char before, char after) {
  const auto in_word = [](char c) { return is_ascii(c) && std::isalnum(static_cast<unsigned char>(c)) != 0; };
  return in_word(before) && in_word(after);
}

bool contains(std::string_view text, std::string_view answer, bool within_words) {
  for (std::size_t at = text.find(answer); at != std::string_view::npos; at = text.find(answer, at + 1)) {
    const std::size_t end = at + answer.size();
    const bool whole = (at == 0 || !joined(text[at - 1], text[at])) &&
                       (end == text.size() || !joined(text[end - 1], text[end]));
    if (whole || within_words) return true;
  }
  return false;
}

double share_contained(std::string_view output, const std::vector<std::string>& answers, bool within_words) {
  const std::string text = lower(output);
  const auto found = std::count_if(answers.begin(), answers.end(), [&](const std::string& a) {
    return contains(text, lower(a), within_words);
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

template <class Key>
int total(const std::map<Key, int>& words) {
  int sum = 0;
  for (const auto& [word, n] : words) sum += n;
  return sum;
}

template <class Key>
double f1(const std::map<Key, int>& have, const std::map<Key, int>& want) {
  if (have.empty() || want.empty()) return 0.0;  // both, too: no word is common
  int common = 0;
  for (const auto& [word, n] : have) {
    const auto other = want.find(word);
    if (other != want.end()) common += std::min(n, other->second);
  }
  return 2.0 * common / (total(have) + total(want));
}

std::vector<std::string> split(std::string_view text, std::string_view separators, bool keep_empty = false) {
  std::vector<std::string> parts;
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find_first_of(separators, at), text.size());
    if (keep_empty || end > at) parts.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

std::vector<std::string> numbers_in(std::string_view text) {
  std::vector<std::string> numbers;
  std::string digits;
  for (const char c : std::string(text) + " ") {
    if (c >= '0' && c <= '9') {
      digits += c;
    } else if (!digits.empty()) {
      numbers.push_back(std::move(digits));
      digits.clear();
    }
  }
  return numbers;
}

double share_equal(const std::vector<std::string>& numbers, const std::string& wanted) {
  if (numbers.empty()) return 0.0;
  return static_cast<double>(std::count(numbers.begin(), numbers.end(), wanted)) /
         static_cast<double>(numbers.size());
}

/// A whole number with a sign only where it is negative, without zeros in front; empty where the text is none.
std::string whole_number(std::string_view text) {
  const bool negative = text.starts_with('-');
  if (negative || text.starts_with('+')) text.remove_prefix(1);
  if (text.empty() || text.find_first_not_of("0123456789") != std::string_view::npos) return {};
  text.remove_prefix(std::min(text.find_first_not_of('0'), text.size() - 1));
  return (negative && text != "0" ? "-" : "") + std::string(text);
}

double share_in_order(std::string_view output, const std::vector<std::string>& answers) {
  const auto numbers = numbers_in(output);
  std::size_t right = 0;
  while (right < answers.size() && right < numbers.size() &&
         whole_number(numbers[right]) == whole_number(answers[right]))
    ++right;
  return static_cast<double>(right) / static_cast<double>(answers.size());
}

bool ends_with_number(std::string_view output, const std::string& answer) {
  const auto words = split(output, " \t\r\n.`'\":");
  if (words.empty()) return false;
  const std::string number = whole_number(words.back());
  return !number.empty() && number == whole_number(answer);
}

/// Of a sentence, the words between its marks.
std::vector<std::string> marked_words(std::string_view text) {
  return split(text, " \t\r\n:\"'.,?!{}");
}

bool names_speaker(std::string_view output, const std::string& answer) {
  std::string capitals(output);
  for (char& c : capitals)
    if (is_ascii(c)) c = static_cast<char>(std::toupper(c));
  const auto words = marked_words(capitals);
  return std::find(words.begin(), words.end(), answer) != words.end();
}

/// The option that an output names: its first letter, what follows "answer is" and the like, or its first
/// letter that stands alone.
bool chooses(std::string_view output, const std::vector<std::string>& answers) {
  const auto is_answer = [&](const std::string& text) {
    return std::find(answers.begin(), answers.end(), text) != answers.end();
  };
  const auto is_option = [](char c) { return c >= 'A' && c <= 'D'; };
  const std::string_view trimmed = trim(output);
  if (trimmed.empty()) return false;
  if (is_option(trimmed.front())) return is_answer(std::string(1, trimmed.front()));
  if (is_answer(std::string(trimmed))) return true;
  std::string text;
  for (const std::string& word : split(trimmed, " \n\"'.,?!{}")) text += (text.empty() ? "" : " ") + word;
  for (const char* lead : {"answer is:", "answer:", "answer is", "option is"}) {
    const std::size_t at = text.find(lead);
    if (at == std::string::npos) continue;
    const std::string after(trim(std::string_view(text).substr(at + std::string_view(lead).size())));
    return !after.empty() && std::any_of(answers.begin(), answers.end(),
                                         [&](const std::string& a) { return after.starts_with(a); });
  }
  for (const std::string& word : split(text, " ")) {
    if (word.size() == 1 && is_option(word.front())) return is_answer(word);
  }
  return false;
}

/// Code.Debug: what begins the output counts with its mark alone, what stands behind a lead in either form.
bool names_the_bug(std::string_view output, const std::vector<std::string>& answers) {
  const std::string& letter = answers.back();
  output = trim(output);
  if (output.starts_with(letter + ".") || output.starts_with(letter + ":")) return true;
  std::string text(output);
  for (const char* word : {"Option", "option"}) {
    for (std::size_t at; (at = text.find(word)) != std::string::npos;) text.replace(at, 6, " ");
  }
  std::string plain;
  for (const std::string& word : split(text, " \n`'\"-*")) plain += (plain.empty() ? "" : " ") + word;
  for (const std::string_view lead : {"answer is:", "is:", "answer:"}) {
    const std::size_t at = plain.find(lead);
    if (at == std::string::npos) continue;
    const std::string after = plain.substr(std::min(plain.size(), at + lead.size() + 1));
    return !after.empty() &&
           std::any_of(answers.begin(), answers.end(), [&](const auto& a) { return after.starts_with(a); });
  }
  return false;
}

/// Digits, and a fraction if digits follow the point.
std::string first_decimal(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789";
  const std::size_t begin = text.find_first_of(kDigits);
  if (begin == std::string_view::npos) return {};
  std::size_t end = std::min(text.find_first_not_of(kDigits, begin), text.size());
  if (end + 1 < text.size() && text[end] == '.' && kDigits.find(text[end + 1]) != std::string_view::npos)
    end = std::min(text.find_first_not_of(kDigits, end + 1), text.size());
  return std::string(text.substr(begin, end - begin));
}

/// A whole number is no number with a fraction, as its authors' int() has it; the other way round it may be.
bool is_decimal(const std::string& found, const std::string& answer) {
  if (found.empty() || (answer.find('.') == std::string::npos && found.find('.') != std::string::npos))
    return false;
  return std::strtod(found.c_str(), nullptr) == std::strtod(answer.c_str(), nullptr);
}

/// Lengths of the longest common subsequences of all beginnings of a and b, [a + 1, b + 1].
template <class List>
std::vector<std::vector<int>> common_lengths(const List& a, const List& b) {
  std::vector<std::vector<int>> table(a.size() + 1, std::vector<int>(b.size() + 1));
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j)
      table[i][j] =
          a[i - 1] == b[j - 1] ? table[i - 1][j - 1] + 1 : std::max(table[i - 1][j], table[i][j - 1]);
  }
  return table;
}

/// Sentences end at full stops. One of spaces alone is an empty word, as the package has it.
std::vector<std::vector<std::string>> sentences_of(std::string_view text) {
  std::vector<std::vector<std::string>> sentences;
  for (const std::string& sentence : split(text, ".")) {
    sentences.push_back(split(sentence, " \t\r\n"));
    if (sentences.back().empty()) sentences.back().emplace_back();
  }
  return sentences;
}

/// On the way back through a table of common lengths: where two ways are as long, whose last element is left out.
enum class Ties { of_a, of_b };

/// Calls found(i) for the elements of a, from the last to the first, that are its longest common subsequence with b.
template <class List, class Found>
void for_each_common(const List& a, const List& b, Ties ties, const Found& found) {
  const auto table = common_lengths(a, b);
  for (std::size_t i = a.size(), j = b.size(); i > 0 && j > 0;) {
    const int without_a = table[i - 1][j], without_b = table[i][j - 1];
    if (a[i - 1] == b[j - 1]) {
      found(i - 1);
      --i;
      --j;
    } else if (without_a > without_b || (without_a == without_b && ties == Ties::of_a)) {
      --i;
    } else {
      --j;
    }
  }
}

double rouge_l(std::string_view output, std::string_view answer) {
  const auto have = sentences_of(output), want = sentences_of(answer);
  std::set<std::string> have_words, want_words, common;
  for (const auto& s : have) have_words.insert(s.begin(), s.end());
  for (const auto& s : want) want_words.insert(s.begin(), s.end());
  if (have_words.empty() || want_words.empty()) return 0.0;
  for (const auto& reference : want) {
    for (const auto& sentence : have)
      for_each_common(reference, sentence, Ties::of_b, [&](std::size_t i) { common.insert(reference[i]); });
  }
  const auto n = static_cast<double>(common.size());
  return 2.0 * n / static_cast<double>(have_words.size() + want_words.size());
}

/// The words of each line, of letters and digits of ASCII in lower case.
std::vector<std::vector<std::string>> lines_of(std::string_view text) {
  std::vector<std::vector<std::string>> lines;
  for (std::string& line : split(lower(text), "\n")) {
    for (char& c : line)
      if (!is_ascii(c) || std::isalnum(static_cast<unsigned char>(c)) == 0) c = ' ';
    lines.push_back(split(line, " "));
  }
  return lines;
}

std::map<std::string, int> counted(const std::vector<std::vector<std::string>>& lines) {
  std::map<std::string, int> words;
  for (const auto& line : lines)
    for (const std::string& word : line) ++words[word];
  return words;
}

/// A word of the answer's lines counts as often as both texts have it.
double rouge_lsum(std::string_view output, std::string_view answer) {
  const auto have = lines_of(output), want = lines_of(answer);
  auto have_words = counted(have), want_words = counted(want);
  const int all = total(have_words) + total(want_words);
  int common = 0;
  for (const auto& reference : want) {
    std::set<std::size_t> found;
    for (const auto& line : have)
      for_each_common(reference, line, Ties::of_a, [&](std::size_t i) { found.insert(i); });
    for (const std::size_t i : found) {
      int &of_output = have_words[reference[i]], &of_answer = want_words[reference[i]];
      if (of_output == 0 || of_answer == 0) continue;
      --of_output;
      --of_answer;
      ++common;
    }
  }
  return all == 0 ? 0.0 : 2.0 * common / all;
}

/// Labels in the output, without those that are parts of the right one.
double class_score(std::string_view output, const std::string& answer,
                   const std::vector<std::string>& classes) {
  double named = 0, right = 0;
  for (const std::string& label : classes) {
    if (output.find(label) == std::string_view::npos) continue;
    if (label != answer && answer.find(label) != std::string::npos) continue;
    named += 1;
    right += label == answer ? 1 : 0;
  }
  return named == 0 ? 0.0 : right / named;
}

std::u32string characters_of(std::string_view text) {
  const std::string valid = replace_invalid_utf8(text);
  std::u32string characters;
  for (std::size_t at = 0; at < valid.size();) {
    const CodePoint next = first_code_point(std::string_view(valid).substr(at));
    characters += next.value;
    at += next.bytes;
  }
  return characters;
}

bool is_space(char32_t c) {
  return c == ' ' || (c >= 0x09 && c <= 0x0d) || (c >= 0x1c && c <= 0x1f) || c == 0x85 || c == 0xa0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
         c == 0x205f || c == 0x3000;
}

/// The punctuation of ASCII, and what the authors take for that of Chinese: an opening angle bracket is none, a closing
/// double one is.
bool is_mark(char32_t c) {
  constexpr std::pair<char32_t, char32_t> kMarks[] = {
      {0x2013, 0x2014}, {0x2018, 0x2019}, {0x201b, 0x201f}, {0x2026, 0x2027}, {0x3001, 0x3003},
      {0x300b, 0x3011}, {0x3014, 0x301f}, {0x3030, 0x3030}, {0x303e, 0x303f}, {0xfe4f, 0xfe4f},
      {0xff01, 0xff0d}, {0xff0f, 0xff0f}, {0xff1a, 0xff20}, {0xff3b, 0xff40}, {0xff5b, 0xff64}};
  if (c < 0x80) return std::ispunct(static_cast<int>(c)) != 0;
  return std::any_of(std::begin(kMarks), std::end(kMarks),
                     [&](const auto& range) { return c >= range.first && c <= range.second; });
}

/// Characters in lower case, without space and marks.
std::map<char32_t, int> bare_characters(std::string_view text) {
  std::map<char32_t, int> characters;
  for (char32_t c : characters_of(lower(text))) {
    if (c >= U'\uff21' && c <= U'\uff3a') c += 0x20;  // wide letters
    if (!is_space(c) && !is_mark(c)) ++characters[c];
  }
  return characters;
}

/// Characters parted by spaces, words of ASCII whole.
std::string spaced_characters(std::string_view text) {
  std::string spaced;
  for (std::size_t at = 0; at < text.size();) {
    const CodePoint next = first_code_point(text.substr(at));
    if (is_space(next.value)) {
      spaced += ' ';
    } else {
      if (at > 0 && !joined(text[at - 1], text[at])) spaced += ' ';
      spaced += text.substr(at, next.bytes);
    }
    at += next.bytes;
  }
  return spaced;
}

double code_likeness(std::string_view output, const std::string& answer) {
  std::string line;
  output.remove_prefix(std::min(output.size(), output.find_first_not_of('\n')));
  for (const std::string& candidate : split(output, "\n", /*keep_empty=*/true)) {
    if (candidate.find_first_of("`#") != std::string::npos || candidate.find("//") != std::string::npos)
      continue;
    line = candidate;
    break;
  }
  const std::u32string have = characters_of(line), want = characters_of(answer);
  if (have.empty() && want.empty()) return 1.0;
  const double common = common_lengths(have, want).back().back();
  return std::round(100 * 2 * common / static_cast<double>(have.size() + want.size())) / 100;
}

/// Against one answer.
double score_one(std::string_view output, const std::string& answer, const Sample& sample) {
  switch (sample.match) {
    case Match::f1:
      return f1(words_of(output), words_of(answer));
    case Match::characters:
      return f1(bare_characters(output), bare_characters(answer));
    case Match::any:
      return lower(output).find(lower(answer)) != std::string::npos ? 1.0 : 0.0;
    case Match::number: {
      const auto numbers = numbers_in(output);
      return !numbers.empty() && numbers.front() == answer ? 1.0 : 0.0;
    }
    case Match::decimal:
      return is_decimal(first_decimal(output), answer) ? 1.0 : 0.0;
    case Match::word: {
      const auto words = marked_words(output);
      return std::find(words.begin(), words.end(), answer) != words.end() ? 1.0 : 0.0;
    }
    case Match::last_number:
      return ends_with_number(output, answer) ? 1.0 : 0.0;
    case Match::rouge_l:
      return rouge_l(output, answer);
    case Match::rouge_l_characters:
      return rouge_l(spaced_characters(replace_invalid_utf8(output)), spaced_characters(answer));
    case Match::rouge_lsum:
      return rouge_lsum(output, answer);
    case Match::classes:
      return class_score(output, answer, sample.classes);
    case Match::count:
      return share_equal(numbers_in(output), answer);
    case Match::passage: {
      const auto wanted = numbers_in(answer);
      return wanted.empty() ? 0.0 : share_equal(numbers_in(output), wanted.front());
    }
    case Match::code:
      return code_likeness(output, answer);
    default:
      return trim(output) == trim(answer) ? 1.0 : 0.0;
  }
}

}  // namespace

double score(std::string_view output, const Sample& sample) {
  const auto is_empty = [](const std::string& answer) { return answer.empty(); };
  if (std::all_of(sample.answers.begin(), sample.answers.end(), is_empty)) return 0;
  if (sample.first_line) {
    output.remove_prefix(std::min(output.size(), output.find_first_not_of('\n')));
    output = output.substr(0, output.find('\n'));
  }
  if (sample.match == Match::contains || sample.match == Match::substring)
    return share_contained(output, sample.answers, sample.match == Match::substring);
  if (sample.match == Match::debug) return names_the_bug(output, sample.answers) ? 1.0 : 0.0;
  if (sample.match == Match::choice) return chooses(output, sample.answers) ? 1.0 : 0.0;
  if (sample.match == Match::values) return share_in_order(output, sample.answers);
  if (sample.match == Match::speaker) return names_speaker(output, sample.answers.front()) ? 1.0 : 0.0;
  double best = 0;
  for (const std::string& answer : sample.answers) best = std::max(best, score_one(output, answer, sample));
  return best;
}

}  // namespace lode
