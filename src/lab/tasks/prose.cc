// SPDX-License-Identifier: Apache-2.0
#include "lab/tasks/prose.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "lab/tasks/language.h"

namespace lode {

extern const std::string_view kProse;  // assets/prose.json, put into the program by cmake/assets.cmake

namespace {

using Words = std::vector<std::string>;

/// Hands out 0 ... n-1 in a random order, then in another one, and so on.
class Bag {
 public:
  explicit Bag(std::size_t n) : items_(n) {
    for (std::size_t i = 0; i < n; ++i) items_[i] = i;
  }
  std::size_t draw(Rng& rng) {
    if (next_ == 0) shuffle(items_, rng);
    const std::size_t item = items_[next_];
    next_ = (next_ + 1) % items_.size();
    return item;
  }

 private:
  std::vector<std::size_t> items_;
  std::size_t next_ = 0;
};

struct Person {
  std::string name, trade, work, street;
  bool woman = false;
};

struct Season {
  Words months, weather, sky, crop;
};

/// One kind of paragraph; each kind of sentence is used up before any comes again.
struct Matter {
  struct Sentences {
    Words texts;
    Bag bag{0};
    const std::string& draw(Rng& rng) { return texts[bag.draw(rng)]; }
  };
  Sentences openings, middles, closings;
};

/// The town with its people, fixed by the seed, and the teller's place in the year.
class Chronicle {
 public:
  explicit Chronicle(std::uint64_t seed)
      : rng_(hash_seed(seed, 0x70726f7365u)), matter_bag_(0), person_bag_(0) {
    const Json root = parse_json(kProse, "the built-in prose");
    for (const auto& [name, list] : root.at("lists").items()) lists_.emplace(name, list.get<Words>());
    for (const Json& s : root.at("seasons")) {
      seasons_.push_back({s.at("months").get<Words>(), s.at("weather").get<Words>(), s.at("sky").get<Words>(),
                          s.at("crop").get<Words>()});
    }
    for (const Json& m : root.at("matters")) matters_.push_back(read_matter(m));
    matter_bag_ = Bag(matters_.size());
    fixed_["town"] = pick(root.at("towns").get<Words>(), rng_);
    fixed_["river"] = pick(root.at("rivers").get<Words>(), rng_);
    fixed_["hill"] = pick(root.at("hills").get<Words>(), rng_);
    settle(root);
  }

  std::string paragraph() {
    Matter& matter = matters_[matter_bag_.draw(rng_)];
    const Person& hero = people_[person_bag_.draw(rng_)];
    const Person& friend_ = people_[person_bag_.draw(rng_)];
    const Person& elder = people_[person_bag_.draw(rng_)];
    cast(hero, friend_, elder);
    std::string text = sentence(matter.openings.draw(rng_));
    std::set<std::size_t> middles;  // in the order of the grammar, which is the order in which things happen
    for (const std::uint64_t count = 3 + rng_.below(5); middles.size() < count;) {
      middles.insert(matter.middles.bag.draw(rng_));
    }
    for (const std::size_t i : middles) text.append(" ").append(sentence(matter.middles.texts[i]));
    if (rng_.below(5) > 0) text.append(" ").append(sentence(matter.closings.draw(rng_)));
    if (rng_.below(4) == 0) month_ = (month_ + 1) % 12;
    return text;
  }

 private:
  static Matter::Sentences read_sentences(const Json& list) {
    return {.texts = list.get<Words>(), .bag = Bag(list.size())};
  }
  static Matter read_matter(const Json& m) {
    return {read_sentences(m.at("openings")), read_sentences(m.at("middles")),
            read_sentences(m.at("closings"))};
  }

  /// Forty people, each with a trade and a street; no name is used twice.
  void settle(const Json& root) {
    const Words women = root.at("women"), men = root.at("men"), surnames = root.at("surnames");
    lists_.emplace("street", root.at("streets").get<Words>());
    Bag first_women(women.size()), first_men(men.size()), families(surnames.size()),
        trades(root.at("trades").size());
    for (std::size_t i = 0; i < surnames.size(); ++i) {
      const bool woman = rng_.below(2) == 0;
      const std::string& first = woman ? women[first_women.draw(rng_)] : men[first_men.draw(rng_)];
      const Json& trade = root.at("trades").at(trades.draw(rng_));
      people_.push_back({.name = first + " " + surnames[families.draw(rng_)],
                         .trade = trade.at("name").get<std::string>(),
                         .work = trade.at("work").get<std::string>(),
                         .street = pick(lists_.at("street"), rng_),
                         .woman = woman});
    }
    person_bag_ = Bag(people_.size());
  }

  void cast(const Person& hero, const Person& friend_, const Person& elder) {
    fixed_["hero"] = hero.name;
    fixed_["trade"] = hero.trade;
    fixed_["work"] = hero.work;
    fixed_["he"] = hero.woman ? "she" : "he";
    fixed_["his"] = hero.woman ? "her" : "his";
    fixed_["him"] = hero.woman ? "her" : "him";
    fixed_["He"] = hero.woman ? "She" : "He";
    fixed_["His"] = hero.woman ? "Her" : "His";
    fixed_["friend"] = friend_.name;
    fixed_["friend_trade"] = friend_.trade;
    fixed_["friend_street"] = friend_.street;
    fixed_["elder"] = elder.name;
    home_ = hero.street;
    named_ = false;
  }

  const Words& list(const std::string& name) const {
    const Season& season = seasons_[month_ / 3];
    if (name == "weather") return season.weather;
    if (name == "sky") return season.sky;
    if (name == "crop") return season.crop;
    return lists_.at(name);
  }

  /// The value of a slot. A pronoun stands for a person who has been named in the paragraph, so the first one
  /// becomes the name. Words of lists do not come twice in a row.
  std::string value(const std::string& slot) {
    if (slot == "month") return seasons_[month_ / 3].months[month_ % 3];
    if (slot == "street" && rng_.below(2) == 0) return home_;
    const bool possessive = slot == "his" || slot == "His";
    const bool pronoun = possessive || slot == "he" || slot == "He" || slot == "him";
    if (pronoun && !named_) {
      named_ = true;
      return fixed_["hero"] + (possessive ? "'s" : "");
    }
    named_ = named_ || slot == "hero";
    if (const auto found = fixed_.find(slot); found != fixed_.end()) return found->second;
    const Words& words = list(slot);
    const std::string* word = &pick(words, rng_);
    for (int tries = 0; tries < 8 && std::find(recent_.begin(), recent_.end(), *word) != recent_.end();
         ++tries) {
      word = &pick(words, rng_);
    }
    recent_.push_back(*word);
    if (recent_.size() > 24) recent_.pop_front();
    return *word;
  }

  /// Fills the slots; "{name!}" begins with a capital, and "a" becomes "an" before a vowel.
  std::string sentence(const std::string& pattern) {
    std::string out;
    for (std::size_t at = 0; at < pattern.size();) {
      const std::size_t open = std::min(pattern.find('{', at), pattern.size());
      out.append(pattern, at, open - at);
      if (open == pattern.size()) break;
      const std::size_t close = pattern.find('}', open);
      std::string slot = pattern.substr(open + 1, close - open - 1);
      const bool capital = slot.ends_with('!');
      if (capital) slot.pop_back();
      std::string word = value(slot);
      if (capital && word[0] >= 'a' && word[0] <= 'z') word[0] = static_cast<char>(word[0] - 'a' + 'A');
      const bool article = out == "A " || out.ends_with(" a ") || out.ends_with(" A ");
      if (article && std::string_view("aeiou").find(word[0]) != std::string_view::npos)
        out.back() = 'n', out.push_back(' ');
      out += word;
      at = close + 1;
    }
    return out;
  }

  Rng rng_;
  std::map<std::string, Words> lists_;
  std::vector<Season> seasons_;
  std::vector<Matter> matters_;
  std::vector<Person> people_;
  Bag matter_bag_, person_bag_;
  std::map<std::string, std::string> fixed_;  // slots that keep their value for a paragraph or for good
  std::string home_;                          // street of the paragraph's person
  bool named_ = false;                        // whether the paragraph has named that person
  std::deque<std::string> recent_;            // words drawn last
  std::size_t month_ = 0;                     // 0 = March
};

}  // namespace

std::string make_prose(std::uint64_t seed, std::size_t bytes) {
  Chronicle chronicle(seed);
  std::string text = chronicle.paragraph();
  while (text.size() < bytes) text.append("\n\n").append(chronicle.paragraph());
  return text;
}

}  // namespace lode
