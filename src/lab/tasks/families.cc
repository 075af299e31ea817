// SPDX-License-Identifier: Apache-2.0
#include "lab/tasks/families.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/text.h"
#include "lab/tasks/draw.h"
#include "lab/tasks/whole_text.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Shuffles several materials' facts into one order that keeps each one's own.
Material merge(const std::vector<Material>& parts, Rng& rng) {
  std::vector<std::size_t> owners;
  for (std::size_t i = 0; i < parts.size(); ++i) owners.insert(owners.end(), parts[i].facts.size(), i);
  shuffle(owners, rng);
  std::vector<std::vector<std::size_t>> places(parts.size());
  Material merged;
  for (std::size_t place = 0; place < owners.size(); ++place) {
    const std::size_t owner = owners[place];
    merged.facts.push_back(parts[owner].facts[places[owner].size()]);
    places[owner].push_back(place);
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    for (Question question : parts[i].questions) {
      for (std::size_t& fact : question.needs) fact = places[i][fact];
      merged.questions.push_back(std::move(question));
    }
  }
  return merged;
}

/// One document of the "magic" family: keys and values of one kind each, of those that the task names or else
/// the family, keys with one or several values.
class Magic {
 public:
  Magic(const Language& language, const Json& task, Language::Wording side, Rng& rng,
        std::set<std::string>& names)
      : language_(language),
        entry_(language.family("magic")),
        task_(task),
        side_(side),
        rng_(rng),
        names_(names) {}

  /// `sizes`: values of each key.
  Material tell(const std::vector<std::size_t>& sizes) {
    const Json& kinds = (task_.contains("values") ? task_ : entry_).at("values");
    auto value_kind = kinds.begin();
    std::advance(value_kind, static_cast<std::ptrdiff_t>(rng_.below(kinds.size())));
    kind_ = value_kind.value().get<std::string>();
    const Json& key_kinds = (task_.contains("keys") ? task_ : entry_).at("keys");
    keys_ = unique_values(language_, key_kinds.at(rng_.below(key_kinds.size())).get<std::string>(),
                          sizes.size(), rng_, names_);
    std::vector<std::size_t> owners;
    for (std::size_t i = 0; i < sizes.size(); ++i) owners.insert(owners.end(), sizes[i], i);
    shuffle(owners, rng_);
    const auto values = unique_values(language_, value_kind.key(), owners.size(), rng_, names_);
    told_.assign(sizes.size(), {});
    Material material;
    for (std::size_t place = 0; place < owners.size(); ++place) {
      told_[owners[place]].push_back({place, values[place]});
      const std::string& wording = language_.wording(entry_, "facts", side_, rng_);
      material.facts.push_back(
          fill(wording, {{"kind", kind_}, {"key", keys_[owners[place]]}, {"value", values[place]}}));
    }
    return material;
  }

  std::size_t keys() const { return keys_.size(); }
  std::size_t values_of(std::size_t key) const { return told_[key].size(); }

  Question ask_one(std::size_t key) {
    const std::string& wording = language_.wording(entry_, "questions", side_, rng_);
    const auto& [place, value] = told_[key].front();
    return {fill(wording, {{"kind", kind_}, {"key", keys_[key]}}), value, {value}, {place}};
  }

  /// All values of a key, in the order of the document.
  Question ask_values(std::size_t key) {
    Question question;
    for (const auto& [place, value] : told_[key]) {
      question.needs.push_back(place);
      question.answers.push_back(value);
    }
    question.text = fill(
        first_of(entry_.at("questions_values")),
        {{"kind", kind_}, {"key", keys_[key]}, {"count", language_.count_word(question.answers.size())}});
    question.answer = join(question.answers, entry_.at("list_separator").get<std::string>());
    return question;
  }

  /// The values of several keys of one value each, in the order of the question.
  Question ask_keys(std::vector<std::size_t> keys) {
    std::vector<std::string> names, values;
    Question question;
    for (const std::size_t key : keys) {
      names.push_back(keys_[key]);
      values.push_back(told_[key].front().second);
      question.needs.push_back(told_[key].front().first);
    }
    std::sort(question.needs.begin(), question.needs.end());
    const std::string last = names.back();
    names.pop_back();
    const std::string listed = join(names, entry_.at("key_separator").get<std::string>()) +
                               entry_.at("last_key_separator").get<std::string>() + last;
    question.text = fill(first_of(entry_.at("questions_keys")), {{"kind", kind_}, {"keys", listed}});
    question.answer = join(values, entry_.at("list_separator").get<std::string>());
    question.answers = {question.answer};
    return question;
  }

 private:
  const Language& language_;
  const Json &entry_, &task_;
  Language::Wording side_;
  Rng& rng_;
  std::set<std::string>& names_;
  std::string kind_;  // "number", "word", "code"
  std::vector<std::string> keys_;
  std::vector<std::vector<std::pair<std::size_t, std::string>>>
      told_;  // per key: (fact, value), in document order
};

Material single_keys(const Language& language, const Json& task, std::size_t facts, Language::Wording side,
                     Rng& rng, std::set<std::string>& names) {
  Magic magic(language, task, side, rng, names);
  Material material = magic.tell(std::vector<std::size_t>(facts, 1));
  for (std::size_t key = 0; key < facts; ++key) material.questions.push_back(magic.ask_one(key));
  return material;
}

Material multivalue(const Language& language, std::size_t facts, Language::Wording side, Rng& rng,
                    std::set<std::string>& names) {
  const Json& task = language.task("multivalue");
  const std::size_t asked = count_of(task, "values_per_key");
  const auto others = task.at("other_values_per_key").get<std::vector<std::size_t>>();
  std::vector<std::size_t> sizes = {asked};
  for (std::size_t used = asked; used < facts; used += sizes.back()) {
    sizes.push_back(std::min(others.at(0) + rng.below(others.at(1) - others.at(0) + 1), facts - used));
  }
  Magic magic(language, task, side, rng, names);
  Material material = magic.tell(sizes);
  for (std::size_t key = 0; key < sizes.size(); ++key) {
    if (magic.values_of(key) == asked) material.questions.push_back(magic.ask_values(key));
  }
  return material;
}

Material multiquery(const Language& language, std::size_t facts, Language::Wording side, Rng& rng,
                    std::set<std::string>& names) {
  const Json& task = language.task("multiquery");
  const std::size_t asked = count_of(task, "keys_per_question");
  Magic magic(language, task, side, rng, names);
  Material material = magic.tell(std::vector<std::size_t>(facts, 1));
  std::vector<std::size_t> keys(facts);
  std::iota(keys.begin(), keys.end(), std::size_t{0});
  for (std::size_t question = 0; question < facts; ++question) {
    shuffle(keys, rng);
    material.questions.push_back(
        magic.ask_keys({keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(asked)}));
  }
  return material;
}

/// Keys are (attribute, city, place): many share two of the three.
Material codes(const Language& language, std::size_t facts, Language::Wording side, Rng& rng) {
  const Json& entry = language.family("code");
  const Json& kinds = entry.at("values");
  const std::string kind = kinds.at(rng.below(kinds.size())).get<std::string>();
  std::set<std::string> known;
  Material material;
  while (material.facts.size() < facts) {
    const std::string attribute = language.word("attribute", rng), city = language.word("city", rng),
                      place = language.word("place", rng);
    if (!known.insert(attribute + "|" + city + "|" + place).second) continue;
    const std::string value = language.value(kind, rng);
    const Slots slots = {{"attribute", attribute}, {"city", city}, {"place", place}, {"value", value}};
    material.questions.push_back({fill(language.wording(entry, "questions", side, rng), slots),
                                  value,
                                  {value},
                                  {material.facts.size()}});
    material.facts.push_back(fill(language.wording(entry, "facts", side, rng), slots));
  }
  return material;
}

/// Each fact is one relation of one person; a person has one to six of them.
Material persons(const Language& language, std::size_t facts, Language::Wording side, Rng& rng) {
  const Json& relations = language.family("person").at("relations");
  const std::size_t relation_count = relations.size();
  const std::size_t people =
      std::max({(facts + relation_count - 1) / relation_count, facts / (1 + rng.below(6)), std::size_t{1}});
  std::set<std::string> known;
  const auto names = unique_values(language, "person", people, rng, known);
  std::vector<std::size_t> pairs(people * relation_count);
  std::iota(pairs.begin(), pairs.end(), std::size_t{0});
  shuffle(pairs, rng);
  Material material;
  for (std::size_t i = 0; i < facts; ++i) {
    const std::string& person = names[pairs[i] / relation_count];
    const Json& relation = relations.at(pairs[i] % relation_count);
    const std::string value = pick(language.words(relation.at("values").get_ref<const std::string&>()), rng);
    material.facts.push_back(
        fill(language.wording(relation, "facts", side, rng), {{"person", person}, {"value", value}}));
    material.questions.push_back(
        {fill(language.wording(relation, "questions", side, rng), {{"person", person}}),
         value,
         {value},
         {i}});
  }
  return material;
}

Material key_values(const Language& language, std::size_t facts, Language::Wording side, Rng& rng) {
  const Json& entry = language.family("kv");
  std::set<std::string> known;
  const auto keys = unique_values(language, first_of(entry.at("keys")), facts, rng, known);
  const auto values = unique_values(language, first_of(entry.at("values")), facts, rng, known);
  Material material;
  for (std::size_t i = 0; i < facts; ++i) {
    material.facts.push_back(
        fill(language.wording(entry, "facts", side, rng), {{"key", keys[i]}, {"value", values[i]}}));
    material.questions.push_back({fill(language.wording(entry, "questions", side, rng), {{"key", keys[i]}}),
                                  values[i],
                                  {values[i]},
                                  {i}});
  }
  return material;
}

/// Chains X1 = value, X2 = X1, ... of hops + 1 assignments; the last variable of each is asked for.
Material variables(const Language& language, std::size_t facts, Language::Wording side, Rng& rng) {
  const Json& entry = language.family("vt");
  const std::size_t hops = count_of(language.task("vt"), "hops");
  const std::string link = entry.at("link").get<std::string>();
  std::set<std::string> known;
  const auto names = unique_values(language, first_of(entry.at("variables")), facts, rng, known);
  std::vector<Material> chains;
  const std::size_t length = hops + 1;
  for (std::size_t begin = 0; begin + length <= facts; begin += length) {
    const std::string value = language.value(first_of(entry.at("values")), rng);
    Material chain;
    chain.facts.push_back(
        fill(entry.at("assign_value").get<std::string>(), {{"name", names[begin]}, {"value", value}}));
    std::string answer = names[begin] + link + value;
    for (std::size_t i = begin + 1; i < begin + length; ++i) {
      chain.facts.push_back(fill(entry.at("assign_variable").get<std::string>(),
                                 {{"name", names[i]}, {"source", names[i - 1]}}));
      answer = names[i] + link + answer;
    }
    std::vector<std::size_t> all(length);
    std::iota(all.begin(), all.end(), std::size_t{0});
    const std::string& wording = language.wording(entry, "questions", side, rng);
    chain.questions.push_back({fill(wording, {{"name", names[begin + hops]}}), answer, {answer}, all});
    chains.push_back(std::move(chain));
  }
  return merge(chains, rng);
}

/// The words of one list: the first leads by at least two, the others share the rest evenly.
std::vector<std::string> list_words(const std::vector<std::string>& words, std::size_t total,
                                    double winner_share, Rng& rng) {
  std::size_t winner = std::max<std::size_t>(
      static_cast<std::size_t>(std::ceil(winner_share * static_cast<double>(total))), 2);
  const std::size_t others = words.size() - 1;
  while (winner < total && winner < (total - winner + others - 1) / others + 2) ++winner;
  std::vector<std::string> drawn(winner, words[0]);
  for (std::size_t i = 0; drawn.size() < total; ++i) drawn.push_back(words[1 + i % others]);
  shuffle(drawn, rng);
  return drawn;
}

/// Lines are dealt to the lists in turn.
Material frequencies(const Language& language, std::size_t lines, Language::Wording side, Rng& rng,
                     std::set<std::string>& names) {
  const Json& entry = language.family("freq");
  const Json& task = language.task("freq");
  const std::size_t lists = std::min(count_of(task, "lists"), lines),
                    per_line = count_of(task, "words_per_line");
  const auto cities = unique(lists, names, [&] { return language.word("city", rng); });
  std::vector<std::vector<std::string>> words(lists);
  Material material;
  for (std::size_t i = 0; i < lists; ++i) {
    std::set<std::string> used;
    const auto vocabulary =
        unique(count_of(task, "vocabulary"), used, [&] { return language.word("noun", rng); });
    const std::size_t own_lines = (lines - i + lists - 1) / lists;
    words[i] = list_words(vocabulary, own_lines * per_line, number_of(task, "winner_share", 0.01, 1.0), rng);
    const std::string text = fill(language.wording(entry, "questions", side, rng), {{"city", cities[i]}});
    material.questions.push_back({text, vocabulary[0], {vocabulary[0]}, {}});
  }
  for (std::size_t line = 0; line < lines; ++line) {
    std::vector<std::string>& left = words[line % lists];
    const std::vector<std::string> now(left.end() - static_cast<std::ptrdiff_t>(per_line), left.end());
    left.resize(left.size() - per_line);
    const std::string listed = join(now, entry.at("word_separator").get<std::string>());
    material.facts.push_back(
        fill(entry.at("line").get<std::string>(), {{"city", cities[line % lists]}, {"words", listed}}));
  }
  return material;
}

/// passkey and number: one fact, one question.
Material only_one(const Language& language, std::string_view family, Language::Wording side, Rng& rng) {
  const Json& entry = language.family(family);
  const std::string value = language.value(first_of(entry.at("values")), rng);
  Material material;
  material.facts.push_back(fill(first_of(entry.at("facts")), {{"value", value}}));
  material.questions.push_back({language.wording(entry, "questions", side, rng), value, {value}, {0}});
  return material;
}

}  // namespace

bool facts_vary(const Language& language, std::string_view task) {
  const Json& entry = language.task(task);
  return entry.contains("facts") && !entry.at("facts").is_number();
}

std::size_t fewest_facts(const Language& language, std::string_view task) {
  const Json& entry = language.task(task);
  if (task == "multivalue") return count_of(entry, "values_per_key");
  if (task == "multiquery") return count_of(entry, "keys_per_question");
  if (task == "vt") return count_of(entry, "hops") + 1;
  if (task == "freq") return count_of(entry, "lists");
  if (task == "qa") return 2;  // one of each family
  if (entry.value("family", "") == "sighting") return 2 * fewest_people(entry);
  return 1;
}

void expect_facts(const Language& language, std::string_view task, std::int64_t facts) {
  const auto fewest = static_cast<std::int64_t>(fewest_facts(language, task));
  const bool whole = task != "vt" || facts % fewest == 0;
  if (facts >= fewest && whole) return;
  throw InputError("task " + std::string(task) + ": expected --facts to be " +
                   (whole ? std::to_string(fewest) + " at least, which a question is about"
                          : "a multiple of " + std::to_string(fewest) + ", a chain") +
                   ", found " + std::to_string(facts));
}

std::size_t fact_count(const Language& language, std::string_view task, std::int64_t tokens) {
  const Json& entry = language.task(task);
  const Json& size = entry.contains("lines") ? entry.at("lines") : entry.at("facts");
  if (size.is_number()) return size.get<std::size_t>();
  const std::size_t least = fewest_facts(language, task);
  const std::size_t most = count_of(size, "max"), per_fact = count_of(size, "tokens_per_fact");
  const std::size_t facts = std::min(most, std::max(least, static_cast<std::size_t>(tokens) / per_fact));
  return task == "vt" ? facts / least * least : facts;  // whole chains
}

Material make_material(const Language& language, std::string_view task, std::size_t facts,
                       Language::Wording side, Rng& rng, std::set<std::string>& names) {
  if (task == "multivalue") return multivalue(language, facts, side, rng, names);
  if (task == "multiquery") return multiquery(language, facts, side, rng, names);
  if (task == "kv") return key_values(language, facts, side, rng);
  if (task == "vt") return variables(language, facts, side, rng);
  if (task == "qa") {
    return merge({persons(language, facts - facts / 2, side, rng), codes(language, facts / 2, side, rng)},
                 rng);
  }
  if (task == "freq") return frequencies(language, facts, side, rng, names);
  if (task == "passkey" || task == "number") return only_one(language, task, side, rng);
  if (language.task(task).value("family", "") == "sighting")
    return sightings(language, task, facts, side, rng, names);
  if (const Json& entry = language.task(task); entry.value("family", "") == "magic")
    return single_keys(language, entry, facts, side, rng, names);
  throw InputError("task '" + std::string(task) + "' has no facts to put into a text");
}

}  // namespace lode
