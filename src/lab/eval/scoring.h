// SPDX-License-Identifier: Apache-2.0
// How an output is scored against a sample's answers. Scores are from 0 to 1.
#pragma once

#include <string>
#include <string_view>

#include "lab/tasks/sample_file.h"

namespace lode {

/// contains: the share of the answers that the output contains as whole words, case ignored; with several
///           answers, as for multi-value needles, this is the recall of the set.
/// substring: likewise, within words too (RULER's string match).
/// any:      1 when it contains one of them, case ignored (RULER's match for question answering).
/// exact:    1 when the output, without the space around it, is one of the answers.
/// f1:       the best overlap of words with one of the answers, as in SQuAD: case, punctuation and articles
///           ignored.
/// rouge_l:  ROUGE-L over sentences, words counted once, as the Python package `rouge` has it.
///
/// InfiniteBench:
/// number:   1 when the first digits of the output are an answer (passkey and number).
/// decimal:  1 when its first number, with its fraction, is the answer (Math.Find).
/// word:     1 when an answer is a word of the output, punctuation apart (key-value retrieval).
/// choice:   1 when the option that the output names is an answer (multiple choice).
/// debug:    likewise for answers (name, letter): the output begins with "letter." or "letter:", or names
///           one of them behind "answer is:", "is:" or "answer:" (Code.Debug).
/// values:   the share of the answers, from the first on, that the output's numbers are in order (Math.Calc).
/// last_number: 1 when the output's last word is the answer, a whole number (Code.Run).
/// speaker:  1 when the first answer, in capitals, is a word of the output, case ignored (En.Dia).
/// rouge_lsum: ROUGE-L over lines, of letters and digits of ASCII alone, as the Python package `rouge_score`
///           has it without stems (En.Sum).
/// characters: the best overlap of characters with one of the answers, case and punctuation ignored (Zh.QA).
///
/// LongBench:
/// classes:  1 / labels that the output contains, when the right one is among them.
/// count:    the share of the numbers in the output that are the answer.
/// passage:  the same for an answer "Paragraph N".
/// code:     likeness of the output's first line of code and the answer: 1 - insertions and deletions over
///           the length of both, in whole percent (its edit similarity).
/// rouge_l_characters: rouge_l of characters, words of ASCII whole; its authors score words of Chinese.
double score(std::string_view output, const Sample& sample);

}  // namespace lode
