// SPDX-License-Identifier: Apache-2.0
// Facts and questions of every task, as text. Where the facts stand in a document is for samples.cc.
// The definitions are those of RULER (Hsieh et al. 2024, arXiv 2404.06654) and, for passkey, number and kv,
// of InfiniteBench (Zhang et al. 2024, arXiv 2402.13718), in the task language's own wordings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "lab/tasks/language.h"

namespace lode {

struct Question {
  std::string text;
  std::string answer;                ///< as the model was taught to write it
  std::vector<std::string> answers;  ///< what is scored: the values of a recall task, else `answer` alone
  std::vector<std::size_t> needs;    ///< facts that the answer rests on, rising; empty when it rests on all
  std::string task = {};             ///< in a document of several tasks
};

/// Facts in the order in which the document tells them, and every question that they allow.
struct Material {
  std::vector<std::string> facts;
  std::vector<Question> questions;
};

/// Whether a document may hold as many facts of a task as one likes, from fewest_facts on.
bool facts_vary(const Language& language, std::string_view task);
std::size_t fewest_facts(const Language& language, std::string_view task);
/// InputError, in the words of --facts, for a number of facts that such a task cannot ask about.
void expect_facts(const Language& language, std::string_view task, std::int64_t facts);
/// How many facts a document of `tokens` tokens holds for a task of the haystack kind.
std::size_t fact_count(const Language& language, std::string_view task, std::int64_t tokens);
/// Facts and questions of one document of a haystack task (not recite, which takes its question from the
/// haystack). Keys of the magic family and the cities of lists are none of `names`, which takes them in.
Material make_material(const Language& language, std::string_view task, std::size_t facts,
                       Language::Wording side, Rng& rng, std::set<std::string>& names);

/// A list that is the whole document: cwe and fwe.
struct ListMaterial {
  std::string intro;
  std::vector<std::string> items;
  std::string separator;
  Question question;
};
ListMaterial make_list(const Language& language, std::string_view task, std::size_t items,
                       Language::Wording side, Rng& rng);

}  // namespace lode
