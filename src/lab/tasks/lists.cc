// SPDX-License-Identifier: Apache-2.0
// Tasks whose context is one long list: common words (cwe) and frequent words (fwe), as in RULER.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/text.h"
#include "lab/tasks/draw.h"
#include "lab/tasks/families.h"

namespace lode {

namespace {

/// Words that all occur equally often but for `common` ones, which share a part of the list.
ListMaterial common_words(const Language& language, std::size_t items, Language::Wording side, Rng& rng) {
  const Json& entry = language.family("cwe");
  const Json& task = language.task("cwe");
  const std::size_t common = count_of(task, "common");
  std::vector<std::string> pool;
  for (const Json& list : task.at("lists")) {
    const auto& words = language.words(list.get_ref<const std::string&>());
    pool.insert(pool.end(), words.begin(), words.end());
  }
  shuffle(pool, rng);
  const std::vector<std::string> winners(pool.begin(), pool.begin() + static_cast<std::ptrdiff_t>(common));
  const auto of_winners =
      static_cast<std::size_t>(static_cast<double>(items) * number_of(task, "common_share", 0.01, 0.99));
  const std::size_t rest = items - of_winners;
  const std::size_t others =
      std::min(pool.size() - common, std::max<std::size_t>(2, rest / count_of(task, "other_times")));
  std::vector<std::string> words;
  for (std::size_t i = 0; i < of_winners; ++i) words.push_back(winners[i % common]);
  for (std::size_t i = 0; i < rest; ++i) words.push_back(pool[common + i % others]);
  shuffle(words, rng);
  ListMaterial material = {.intro = entry.at("intro").get<std::string>(),
                           .items = {},
                           .separator = entry.at("separator").get<std::string>(),
                           .question = {}};
  const std::string item = entry.at("item").get<std::string>();
  for (std::size_t i = 0; i < words.size(); ++i) {
    material.items.push_back(fill(item, {{"number", std::to_string(i + 1)}, {"word", words[i]}}));
  }
  material.question = {
      fill(language.wording(entry, "questions", side, rng), {{"count", language.count_word(common)}}),
      join(winners, entry.at("list_separator").get<std::string>()),
      winners,
      {}};
  return material;
}

/// Ranks drawn with weight r^-zeta; whole-number weights, so that every machine draws alike.
std::vector<std::size_t> zeta_ranks(std::size_t items, std::size_t ranks, double zeta, Rng& rng) {
  std::vector<std::uint64_t> until(ranks);  // cumulated weights
  std::uint64_t sum = 0;
  for (std::size_t r = 0; r < ranks; ++r) {
    sum += static_cast<std::uint64_t>(std::llround(1e9 * std::pow(static_cast<double>(r + 1), -zeta)));
    until[r] = sum;
  }
  std::vector<std::size_t> drawn(items);
  for (std::size_t& rank : drawn) {
    rank = static_cast<std::size_t>(std::upper_bound(until.begin(), until.end(), rng.below(sum)) -
                                    until.begin());
  }
  return drawn;
}

ListMaterial frequent_words(const Language& language, std::size_t items, Language::Wording side, Rng& rng) {
  const Json& entry = language.family("fwe");
  const Json& task = language.task("fwe");
  const std::size_t answers = count_of(task, "answers"), vocabulary = count_of(task, "vocabulary");
  std::set<std::string> known;
  const auto words = unique_values(language, task.at("values").get<std::string>(), vocabulary, rng, known);
  std::vector<std::size_t> drawn, order(vocabulary);
  for (bool clear = false; !clear;) {  // until the counts of the asked ranks and the next one differ
    drawn = zeta_ranks(std::max(items, 8 * answers), vocabulary, number_of(task, "zeta", 1.0, 8.0), rng);
    std::vector<std::size_t> counts(vocabulary, 0);
    for (const std::size_t rank : drawn) ++counts[rank];
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return counts[a] > counts[b]; });
    clear = true;
    for (std::size_t i = 0; i < answers; ++i) clear = clear && counts[order[i]] > counts[order[i + 1]];
  }
  const std::string& count = language.count_word(answers);
  ListMaterial material = {.intro = fill(entry.at("intro").get<std::string>(), {{"count", count}}),
                           .items = {},
                           .separator = entry.at("separator").get<std::string>(),
                           .question = {}};
  for (const std::size_t rank : drawn) material.items.push_back(words[rank]);
  std::vector<std::string> winners;
  for (std::size_t i = 0; i < answers; ++i) winners.push_back(words[order[i]]);
  material.question = {fill(language.wording(entry, "questions", side, rng), {{"count", count}}),
                       join(winners, entry.at("list_separator").get<std::string>()),
                       winners,
                       {}};
  return material;
}

}  // namespace

ListMaterial make_list(const Language& language, std::string_view task, std::size_t items,
                       Language::Wording side, Rng& rng) {
  return task == "cwe" ? common_words(language, items, side, rng)
                       : frequent_words(language, items, side, rng);
}

}  // namespace lode
