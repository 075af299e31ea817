// SPDX-License-Identifier: Apache-2.0
// Documents to train selectors on, made from plain texts. Plain text hardly looks further back than a window,
// and teaches a selector nothing about far keys: an artefact of plain books found 33 % where one of documents
// with questions found 88 %. So every document is a stretch of the texts with facts between its sentences
// (names, numbers, codes, lists), and ends with questions about them, sentences to recite and passages copied
// from anywhere in it. Words and values are those that evaluation does not use.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lab/tasks/language.h"
#include "lab/train/capture.h"

namespace lode {

struct LessonOptions {
  std::int64_t tokens = 16384;  ///< of each document
  std::int64_t count = 24;      ///< documents
  std::int64_t held_out = 0;    ///< of them, the last ones: made from the end of the texts alone
  std::uint64_t seed = 0;
  int copies_of_ten =
      3;  ///< of ten things at a document's end so many are passages of it, the others questions
  std::int64_t copied_words = 32;    ///< of a passage, about
  std::string_view given_by = "-f";  ///< the flag that gave the texts, for errors

  static constexpr std::int64_t kFewestTokens = 2048;
  /// Tokens at a document's end that questions take, about.
  std::int64_t question_tokens() const { return tokens / 8; }
};

/// InputError when the texts are shorter than two documents or than the held-out ones need, or documents are
/// too short to hold facts.
std::vector<Prompt> make_lessons(const Tokenizer& tokenizer, const std::vector<std::string>& texts,
                                 const LessonOptions& options);

/// What stands in front of the answers to a document's questions, and what behind them.
AnswerMarks lesson_marks();

/// The documents' text without what the tokenizer puts in front, [prompts]; a character that the last token cut is left
/// out.
std::vector<std::string> texts_of(const Tokenizer& tokenizer, const std::vector<Prompt>& lessons);

/// What should be known of texts before hours are spent on them, a sentence each: that they are short for so
/// many tokens, of one kind, repeat themselves, or have no sentences. Empty when nothing is.
std::vector<std::string> doubts_about(const Tokenizer& tokenizer, const std::vector<std::string>& texts,
                                      std::int64_t wanted_tokens);

}  // namespace lode
