// SPDX-License-Identifier: Apache-2.0
#include "lab/tasks/whole_text.h"

#include <algorithm>

#include "base/text.h"
#include "lab/tasks/draw.h"

namespace lode {

namespace {

/// Who was seen where: `told[place]` are facts, in the order of the text.
struct World {
  std::vector<std::string> cities, people;  // people by fact
  std::vector<std::size_t> city_of;         // by fact
  std::vector<std::vector<std::size_t>> told;
};

/// Sizes of the places, each in [fewest, most] as far as `facts` allows, that sum up to `facts`.
std::vector<std::size_t> sizes_of(const Json& task, std::size_t facts, Rng& rng) {
  const std::size_t fewest = fewest_people(task), most = task.at("people").at(1).get<std::size_t>();
  std::vector<std::size_t> sizes;
  std::size_t left = facts;
  while (left >= 2 * fewest) {
    const std::size_t top = std::min(most, left - fewest);
    sizes.push_back(fewest + rng.below(top - fewest + 1));
    left -= sizes.back();
  }
  if (left > 0) sizes.push_back(left);
  return sizes;
}

World world_of(const Language& language, const Json& task, std::size_t facts, Rng& rng,
               std::set<std::string>& names) {
  const std::vector<std::size_t> sizes = sizes_of(task, facts, rng);
  World world;
  world.cities = unique(sizes.size(), names, [&] { return language.word("city", rng); });
  world.people = unique_values(language, "person", facts, rng, names);
  for (std::size_t i = 0; i < sizes.size(); ++i) world.city_of.insert(world.city_of.end(), sizes[i], i);
  shuffle(world.city_of, rng);
  world.told.resize(sizes.size());
  for (std::size_t fact = 0; fact < facts; ++fact) world.told[world.city_of[fact]].push_back(fact);
  return world;
}

Question count(const Json& entry, const World& world, std::size_t city) {
  const std::string number = std::to_string(world.told[city].size());
  return {fill(first_of(entry.at("questions_count")), {{"city", world.cities[city]}}),
          number,
          {number},
          world.told[city]};
}

Question listing(const Json& entry, const World& world, std::size_t city) {
  Question q = {.text = fill(first_of(entry.at("questions_listing")), {{"city", world.cities[city]}}),
                .needs = world.told[city]};
  for (const std::size_t fact : world.told[city]) q.answers.push_back(world.people[fact]);
  q.answer = join(q.answers, entry.at("list_separator").get<std::string>());
  return q;
}

/// Of a person who was seen there, or of one who was seen elsewhere.
Question denial(const Json& entry, const World& world, std::size_t city, Rng& rng) {
  const bool seen = rng.below(2) == 0 || world.cities.size() < 2;
  std::size_t fact = world.told[city][rng.below(world.told[city].size())];
  while (!seen && world.city_of[fact] == city) fact = rng.below(world.people.size());
  const std::string answer = entry.at(seen ? "yes" : "no").get<std::string>();
  return {fill(first_of(entry.at("questions_denial")),
               {{"person", world.people[fact]}, {"city", world.cities[city]}}),
          answer,
          {answer},
          {fact}};
}

/// With the next place that has another number of facts, in an order that says nothing.
void compare(const Json& entry, const World& world, std::size_t city, Rng& rng,
             std::vector<Question>& questions) {
  for (std::size_t step = 1; step < world.cities.size(); ++step) {
    const std::size_t other = (city + step) % world.cities.size();
    if (world.told[other].size() == world.told[city].size()) continue;
    std::size_t first = city, second = other;
    if (rng.below(2) == 0) std::swap(first, second);
    const std::string& more = world.cities[world.told[city].size() > world.told[other].size() ? city : other];
    std::vector<std::size_t> needs = world.told[city];
    needs.insert(needs.end(), world.told[other].begin(), world.told[other].end());
    std::sort(needs.begin(), needs.end());
    questions.push_back({fill(first_of(entry.at("questions_comparison")),
                              {{"first", world.cities[first]}, {"second", world.cities[second]}}),
                         more,
                         {more},
                         needs});
    return;
  }
}

}  // namespace

std::size_t fewest_people(const Json& task) {
  return task.at("people").at(0).get<std::size_t>();
}

Material sightings(const Language& language, std::string_view task, std::size_t facts, Language::Wording side,
                   Rng& rng, std::set<std::string>& names) {
  const Json& entry = language.family("sighting");
  const World world = world_of(language, language.task(task), facts, rng, names);
  Material material;
  for (std::size_t fact = 0; fact < facts; ++fact)
    material.facts.push_back(
        fill(language.wording(entry, "facts", side, rng),
             {{"person", world.people[fact]}, {"city", world.cities[world.city_of[fact]]}}));
  for (std::size_t city = 0; city < world.cities.size(); ++city) {
    if (task == "count") material.questions.push_back(count(entry, world, city));
    if (task == "listing") material.questions.push_back(listing(entry, world, city));
    if (task == "denial") material.questions.push_back(denial(entry, world, city, rng));
    if (task == "comparison") compare(entry, world, city, rng, material.questions);
  }
  return material;
}

}  // namespace lode
