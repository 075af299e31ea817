// SPDX-License-Identifier: Apache-2.0
// The task language: the words, values and wordings that the pocket model was taught and is asked with
// (assets/tasks.json; its schema is described in train/pocket/README.md).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/rng.h"

namespace lode {

/// CRC-32 as in zlib (IEEE 802.3): the hash of the rule that holds words back from training.
std::uint32_t crc32(std::string_view bytes);

/// Replaces every "{name}" of a template; a name without a value is an InputError, for it is the template
/// that is wrong.
using Slots = std::initializer_list<std::pair<std::string_view, std::string_view>>;
std::string fill(std::string_view text_template, Slots slots);

/// What stands in front of each answer in a text, and what behind it.
struct AnswerMarks {
  std::string before, after;
};

/// What surrounds a question: the model reads context + header + question and writes a space, the answer, the
/// terminator.
struct PromptForm {
  std::string header, question, answer, terminator, stop;
  AnswerMarks answer_marks() const;
};

/// Draws words and values from one of two sides, and hands out wordings.
class Language {
 public:
  /// Which words and values: those that the pocket model's training never saw, for questions that measure, or
  /// the others, for texts that something is trained on.
  enum class Side { held_out, trained };
  /// Which wordings of facts and questions: those that training used, or those held back from it.
  enum class Wording { trained, held_out };

  /// The language built into the program.
  static const Language& built_in(Side side = Side::held_out);
  /// InputError names the member that is missing or of another type.
  static Language parse(std::string_view json, std::string_view where, Side side = Side::held_out);

  const PromptForm& prompt() const { return prompt_; }
  const Json& family(std::string_view name) const;
  const Json& task(std::string_view name) const;
  /// The tasks' names, in alphabetical order; `echo` is not among them, for it asks nothing.
  std::vector<std::string> task_names() const;

  /// The sentences that, repeated, are a haystack of noise.
  const std::string& noise() const { return noise_; }

  /// The words of a list that may be used: all of a small list, those of the side of a split list.
  const std::vector<std::string>& words(std::string_view list) const;
  /// A word for a template's slot: "city", "place", "attribute", "adjective", "noun", or a value kind.
  std::string word(std::string_view slot, Rng& rng) const;
  /// A string of one of the kinds in "values", from the side.
  std::string value(std::string_view kind, Rng& rng) const;
  /// One of the wordings listed in `entry` under `name` ("facts", "questions", ...).
  const std::string& wording(const Json& entry, std::string_view name, Wording side, Rng& rng) const;
  /// "one", "two", ...; InputError beyond the list.
  const std::string& count_word(std::size_t count) const;

  bool word_is_held_out(std::string_view word) const { return matches(held_words_, crc32(word)); }
  bool string_is_held_out(std::string_view text) const { return matches(held_strings_, crc32(text)); }
  bool number_is_held_out(std::uint64_t number) const { return matches(held_numbers_, number); }
  /// By the file's name without folder.
  bool book_is_held_out(std::string_view file_name) const { return matches(held_books_, crc32(file_name)); }

 private:
  struct Rule {
    std::uint64_t modulus = 1, residue = 0;
  };
  struct Kind {
    std::string type, text_template;
    std::int64_t length = 0, alphabet = 0;
  };
  static bool matches(const Rule& rule, std::uint64_t number) {
    return number % rule.modulus == rule.residue;
  }
  void read_words(const Json& root, std::string_view where);
  void read_kinds(const Json& root, std::string_view where);
  std::string digits(const Kind& kind, Rng& rng) const;
  std::string characters(std::string_view alphabet, std::int64_t length, Rng& rng) const;
  std::string invented(Rng& rng) const;
  std::string uuid(Rng& rng) const;
  std::string of_lists(const Kind& kind, Rng& rng) const;

  /// Whether something that is held out, or is not, is on the side that words are drawn from.
  bool is_ours(bool held_out) const { return held_out == (side_ == Side::held_out); }

  Side side_ = Side::held_out;
  PromptForm prompt_;
  std::string noise_;
  Rule held_words_, held_strings_, held_numbers_, held_books_;
  std::map<std::string, std::vector<std::string>, std::less<>> words_;
  std::map<std::string, Kind, std::less<>> kinds_;
  std::vector<std::string> onsets_, vowels_, codas_;
  std::vector<std::int64_t> syllables_;
  Json families_, tasks_;
};

/// One of the items, each as likely.
template <class T>
const T& pick(const std::vector<T>& items, Rng& rng) {
  return items[rng.below(items.size())];
}

/// Fisher-Yates.
template <class T>
void shuffle(std::vector<T>& items, Rng& rng) {
  for (std::size_t left = items.size(); left > 1; --left) std::swap(items[left - 1], items[rng.below(left)]);
}

}  // namespace lode
