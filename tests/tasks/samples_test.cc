// SPDX-License-Identifier: Apache-2.0
// Samples: length, determinism, where facts stand, that answers are there and unique, held-out words.
#include "lab/tasks/samples.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "fake_meter.h"
#include "lab/tasks/families.h"
#include "lodestone/error.h"

namespace lode {

extern const std::string_view kTaskLanguage;

namespace {

const Language& language() {
  return Language::built_in();
}

const Haystack& haystack() {
  static const Haystack prose = Haystack::prose(7, 400'000, fake_meter());
  return prose;
}

std::vector<Sample> samples(const TaskOptions& options, std::vector<bool>* firsts = nullptr) {
  std::vector<Sample> all;
  make_samples(options, language(), haystack(), [&](const Sample& s, bool first) {
    all.push_back(s);
    if (firsts != nullptr) firsts->push_back(first);
  });
  return all;
}

std::size_t occurrences(std::string_view text, std::string_view part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++count;
  return count;
}

std::string lines(const std::vector<Sample>& all) {
  std::string text;
  for (const Sample& s : all) text += sample_line(s, true) + "\n";
  return text;
}

class EveryTask : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Tasks, EveryTask, testing::ValuesIn(Language::built_in().task_names()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST_P(EveryTask, FitsTheLengthClosely) {
  const TokenMeter meter = fake_meter();
  for (const std::int64_t tokens : {1024, 4096, 8192}) {
    const auto all = samples({.task = GetParam(), .tokens = tokens, .count = 5, .seed = 3, .questions = 3});
    ASSERT_EQ(all.size(), 5u);
    std::map<const std::string*, std::int64_t>
        longest;  // of each context: the bar holds for its longest question
    for (const Sample& s : all) {
      EXPECT_LE(s.length, tokens);
      EXPECT_EQ(s.tokens, tokens);
      EXPECT_LE(meter.prefix + meter.count(*s.context + s.question), tokens);
      longest[s.context.get()] = std::max(longest[s.context.get()], s.length);
    }
    const auto [most, context] = [&] {
      std::int64_t best = 0;
      for (const auto& [c, l] : longest) best = std::max(best, l);
      return std::pair(best, longest.size());
    }();
    // A text of needles alone ends with a whole one.
    const bool needles = GetParam() == "multikey-needles" || GetParam() == "multikey-uuid";
    EXPECT_GE(most, tokens - std::max<std::int64_t>(tokens / 100, needles ? 80 : 12))
        << GetParam() << " " << context;
  }
}

TEST_P(EveryTask, SameSeedSameSamplesAndPrefixesAgree) {
  const TaskOptions options = {.task = GetParam(), .tokens = 2048, .count = 4, .seed = 11, .questions = 2};
  TaskOptions more = options, other = options;
  more.count = 7;
  other.seed = 12;
  const auto few = samples(options);
  EXPECT_EQ(lines(few), lines(samples(options)));
  auto start = samples(more);
  start.resize(few.size());
  EXPECT_EQ(lines(few), lines(start)) << "a longer file begins with the shorter one";
  EXPECT_NE(lines(few), lines(samples(other)));
}

TEST_P(EveryTask, AnswersAreInTheContext) {
  for (const Sample& s :
       samples({.task = GetParam(), .tokens = 4096, .count = 6, .seed = 5, .questions = 2})) {
    if (GetParam() == "vt" || GetParam() == "multiquery" || GetParam() == "count" || GetParam() == "denial")
      continue;  // composed answers: tests of their own below
    for (const std::string& answer : s.answers) EXPECT_GE(occurrences(*s.context, answer), 1u) << answer;
    EXPECT_THAT(s.question, testing::StartsWith(language().prompt().header));
    EXPECT_THAT(s.question, testing::EndsWith("Answer:"));
    EXPECT_EQ(s.question.find('{'), std::string::npos);
  }
}

TEST_P(EveryTask, DrawsHeldOutWordsOnly) {
  std::set<std::string> trained;  // the words of the split lists that training may use
  const Json words = Json::parse(kTaskLanguage).at("words");
  for (const char* list : {"first_names", "last_names", "cities", "adjectives", "nouns"}) {
    for (const Json& word : words.at(list)) {
      if (crc32(word.get<std::string>()) % 4 != 0) trained.insert(word.get<std::string>());
    }
  }
  Rng rng(9);
  std::vector<std::string> texts;
  if (GetParam() == "cwe") {
    texts = make_list(language(), "cwe", 400, Language::Wording::trained, rng).items;
  } else if (GetParam() != "recite" && GetParam() != "fwe" &&
             GetParam() != "qa") {  // qa's small lists share words
    std::set<std::string> names;
    texts = make_material(language(), GetParam(), 64, Language::Wording::trained, rng, names).facts;
  }
  for (const std::string& text : texts) {
    if (text.find("magic") != text.npos) trained.erase("magic");  // an adjective, and part of the wording
    std::string word;
    for (const char c : text + " ") {
      if (is_letter(c)) {
        word += c;
      } else {
        EXPECT_EQ(trained.count(word), 0u) << word << " in " << text;
        word.clear();
      }
    }
  }
}

TEST(Needle, StandsExactlyOnceInASentenceGap) {
  for (const Sample& s : samples({.task = "needle", .tokens = 4096, .count = 30, .seed = 1})) {
    EXPECT_EQ(occurrences(*s.context, s.answers.at(0)), 1u);
    const std::size_t fact = s.context->find(" One of the special magic ");
    ASSERT_NE(fact, std::string::npos);
    EXPECT_TRUE(is_sentence_gap(*s.context, fact));
    EXPECT_EQ(s.match, Match::contains);
    EXPECT_TRUE(s.context_id.empty());
  }
}

TEST(Needle, InNoiseFiveSentencesComeBack) {
  for (const Sample& s : samples({.task = "needle-noise", .tokens = 2048, .count = 4, .seed = 1})) {
    EXPECT_EQ(occurrences(*s.context, s.answers.at(0)), 1u);
    EXPECT_GT(occurrences(*s.context, "Here we go. There and back again."), 50u);
    std::string rest = *s.context;
    const std::size_t fact = rest.find(" One of the special magic numbers for ");
    ASSERT_NE(fact, std::string::npos);
    rest.erase(fact, rest.find('.', fact) + 1 - fact);
    std::string noise = language().noise() + "\n";
    while (noise.size() < 2 * rest.size()) noise += language().noise() + "\n";
    EXPECT_NE(noise.find(rest), std::string::npos) << "and nothing else";
  }
}

TEST(Multikey, ATextOfNeedlesAloneHoldsEachKeyOnce) {
  for (const char* task : {"multikey-needles", "multikey-uuid"}) {
    for (const std::int64_t tokens : {2048, 131072}) {
      const auto all = samples({.task = task, .tokens = tokens, .count = 4, .seed = 3, .questions = 4});
      const std::string& text = *all.at(0).context;
      const std::string lead = "One of the special magic ";
      EXPECT_EQ(text.rfind(lead, 0), 0u);
      std::set<std::string> keys;
      std::size_t needles = 0;
      for (std::size_t at = 0; at < text.size(); ++needles) {
        const std::size_t key = text.find(" for ", at) + 5, colon = text.find(" is: ", at);
        keys.insert(text.substr(key, colon - key));
        at = std::min(text.find(" " + lead, at), text.size() - 1) + 1;
      }
      EXPECT_EQ(needles, occurrences(text, lead));
      EXPECT_EQ(keys.size(), needles) << "so that each question has one answer";
      std::set<double> depths;
      for (const Sample& s : all) {
        EXPECT_EQ(occurrences(text, s.answers.at(0)), 1u);
        const double at = static_cast<double>(text.find(s.answers.at(0))) / static_cast<double>(text.size());
        EXPECT_NEAR(at, *s.depth, 0.1);
        depths.insert(*s.depth);
      }
      EXPECT_EQ(depths.size(), 4u);
    }
  }
}

TEST(Uuids, AreRandomOnesInTheirUsualForm) {
  Rng rng(1);
  std::set<std::string> seen;
  for (int i = 0; i < 200; ++i) {
    const std::string uuid = language().value("uuid", rng);
    EXPECT_THAT(uuid,
                testing::MatchesRegex("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"));
    EXPECT_TRUE(language().string_is_held_out(uuid));
    seen.insert(uuid);
  }
  EXPECT_EQ(seen.size(), 200u);
}

TEST(Needle, DepthsCoverTheContextEvenly) {
  std::vector<int> tenths(10);
  std::vector<double> errors;
  const TokenMeter meter = fake_meter();
  for (const Sample& s : samples({.task = "passkey", .tokens = 2048, .count = 200, .seed = 4})) {
    ASSERT_TRUE(s.depth.has_value());
    ++tenths[std::min<std::size_t>(9, static_cast<std::size_t>(*s.depth * 10))];
    const std::size_t at = s.context->find(" The pass key is");
    const double real = static_cast<double>(meter.count(std::string_view(*s.context).substr(0, at))) /
                        static_cast<double>(meter.count(*s.context));
    EXPECT_NEAR(real, *s.depth, 0.01);
  }
  for (const int n : tenths) EXPECT_THAT(n, testing::AllOf(testing::Ge(12), testing::Le(30)));
}

TEST(Multikey, FactsSpreadUniformly) {
  // Kolmogorov-Smirnov distance of all fact depths from the uniform distribution: 1.63 / sqrt(n) is the 1 %
  // bound.
  std::vector<double> depths;
  for (const Sample& s : samples({.task = "kv", .tokens = 8192, .count = 6, .seed = 2, .questions = 1})) {
    const std::string& text = *s.context;
    for (std::size_t at = text.find(" Key "); at != text.npos; at = text.find(" Key ", at + 1)) {
      depths.push_back(static_cast<double>(at) / static_cast<double>(text.size()));
    }
  }
  std::sort(depths.begin(), depths.end());
  ASSERT_GT(depths.size(), 300u);
  double distance = 0;
  for (std::size_t i = 0; i < depths.size(); ++i) {
    distance =
        std::max(distance, std::abs(depths[i] - static_cast<double>(i) / static_cast<double>(depths.size())));
  }
  EXPECT_LT(distance, 1.63 / std::sqrt(static_cast<double>(depths.size())) + 0.02);
}

TEST(Multikey, QuestionsShareTheirContextAndDiffer) {
  std::vector<bool> firsts;
  const auto all =
      samples({.task = "multikey", .tokens = 4096, .count = 7, .seed = 6, .questions = 3}, &firsts);
  EXPECT_THAT(firsts, testing::ElementsAre(true, false, false, true, false, false, true));
  std::set<std::string> ids, questions;
  for (const Sample& s : all) {
    ids.insert(s.context_id);
    questions.insert(s.question);
    EXPECT_EQ(occurrences(*s.context, s.answers[0]), 1u);
  }
  EXPECT_EQ(ids.size(), 3u);
  EXPECT_EQ(questions.size(), 7u);
  EXPECT_EQ(all[0].context, all[2].context);
}

TEST(Multivalue, AsksForAllValuesOfAKeyWithThree) {
  for (const Sample& s : samples({.task = "multivalue", .tokens = 8192, .count = 6, .seed = 3})) {
    EXPECT_EQ(s.answers.size(), 3u);
    EXPECT_EQ(std::set<std::string>(s.answers.begin(), s.answers.end()).size(), 3u);
    std::vector<std::size_t> places;
    for (const std::string& answer : s.answers) places.push_back(s.context->find(answer));
    EXPECT_TRUE(std::is_sorted(places.begin(), places.end())) << "in the order of the document";
    EXPECT_THAT(s.question, testing::HasSubstr("three"));
  }
}

TEST(Multiquery, AnswersStandInTheOrderOfTheQuestion) {
  for (const Sample& s : samples({.task = "multiquery", .tokens = 4096, .count = 4, .seed = 3})) {
    ASSERT_EQ(s.match, Match::exact);
    EXPECT_EQ(occurrences(s.answers.at(0), ", "), 2u);
    EXPECT_THAT(s.question, testing::HasSubstr(" and "));
  }
}

TEST(VariableTracking, AnswerIsTheChainToldInTheText) {
  for (const Sample& s : samples({.task = "vt", .tokens = 4096, .count = 8, .seed = 8, .questions = 2})) {
    // "D = C = B = A = 48213": each link stands in the context as an assignment.
    std::vector<std::string> names;
    std::string rest = s.answers.at(0);
    for (std::size_t at; (at = rest.find(" = ")) != rest.npos; rest = rest.substr(at + 3))
      names.push_back(rest.substr(0, at));
    ASSERT_EQ(names.size(), 4u);
    EXPECT_EQ(occurrences(*s.context, "VAR " + names[3] + " = " + rest + "."), 1u);
    std::size_t before = s.context->find("VAR " + names[3] + " = " + rest);
    for (std::size_t i = 3; i > 0; --i) {
      const std::size_t now = s.context->find("VAR " + names[i - 1] + " = VAR " + names[i] + ".");
      EXPECT_NE(now, std::string::npos);
      EXPECT_GT(now, before) << "a chain is told in order";
      before = now;
    }
  }
}

TEST(Frequency, WinnerLeadsByTwoAtLeast) {
  for (const std::size_t lines_ : {4, 5, 9, 32, 128}) {
    Rng rng(lines_);
    std::set<std::string> names;
    const Material m = make_material(language(), "freq", lines_, Language::Wording::trained, rng, names);
    ASSERT_EQ(m.facts.size(), lines_);
    for (const Question& q : m.questions) {
      const std::size_t in = q.text.find("in the ") + 7;
      const std::string city = q.text.substr(in, q.text.find(" list") - in);
      std::map<std::string, int> counts;
      for (const std::string& fact : m.facts) {
        const std::string lead = "The " + city + " list: ";
        if (fact.rfind(lead, 0) != 0) continue;
        std::string words = fact.substr(lead.size(), fact.size() - lead.size() - 1);
        for (std::size_t at; !words.empty(); words = at == words.npos ? "" : words.substr(at + 2)) {
          at = words.find(", ");
          ++counts[words.substr(0, at)];
        }
      }
      int most = 0;
      for (const auto& [word, n] : counts) {
        if (word != q.answer) most = std::max(most, n);
      }
      EXPECT_GE(counts[q.answer], most + 2) << city << " " << lines_;
    }
  }
}

TEST(Lists, CommonWordsAreTheMostCommon) {
  for (const char* task : {"cwe", "fwe"}) {
    for (const Sample& s : samples({.task = task, .tokens = 4096, .count = 3, .seed = 4})) {
      std::map<std::string, int> counts;
      const std::string body = s.context->substr(s.context->find('\n') + 1) + " ";
      for (std::size_t at = 0, end; (end = body.find(' ', at)) != body.npos; at = end + 1)
        ++counts[body.substr(at, end - at)];
      std::vector<std::pair<int, std::string>> ranked;
      for (const auto& [word, n] : counts) ranked.push_back({n, word});
      std::sort(ranked.rbegin(), ranked.rend());
      ranked.resize(s.answers.size());
      std::set<std::string> top, want(s.answers.begin(), s.answers.end());
      for (const auto& [n, word] : ranked) top.insert(word);
      EXPECT_EQ(top, want) << task;
    }
  }
}

TEST(Recite, OpeningIsUniqueAndTheAnswerFollowsIt) {
  const TokenMeter meter = fake_meter();
  for (const Sample& s :
       samples({.task = "recite", .tokens = 4096, .count = 12, .seed = 4, .questions = 3})) {
    const std::size_t begin = s.question.find("begins: ") + 8;
    const std::string opening = s.question.substr(begin, s.question.find("\nAnswer:") - begin);
    EXPECT_EQ(occurrences(*s.context, opening), 1u) << opening;
    EXPECT_EQ(occurrences(*s.context, opening + " " + s.answers.at(0)), 1u);
    EXPECT_EQ(meter.count(" " + s.answers[0]), 8);
  }
}

TEST(Samples, TooFewTokensIsAnError) {
  EXPECT_THROW(samples({.task = "needle", .tokens = 10}), InputError);
  EXPECT_THROW(samples({.task = "freq", .tokens = 64}), InputError);
  EXPECT_THROW(samples({.task = "nonsense", .tokens = 4096}), InputError);
}

TEST(Samples, FactsAreAsManyAsWanted) {
  const auto told = [](const TaskOptions& options) {
    const std::vector<Sample> made = samples(options);
    return occurrences(*made.at(0).context, "One of the special magic ");
  };
  EXPECT_EQ(told({.task = "multivalue", .tokens = 8192, .facts = 3}), 3);
  EXPECT_EQ(told({.task = "multivalue", .tokens = 8192}), 16);
  EXPECT_EQ(told({.task = "multikey", .tokens = 8192, .facts = 50}), 50);
  EXPECT_EQ(samples({.task = "multivalue", .tokens = 8192, .facts = 3}).at(0).answers.size(), 3);
  EXPECT_THROW(samples({.task = "multivalue", .tokens = 8192, .facts = 2}), InputError);
  EXPECT_THROW(samples({.task = "vt", .tokens = 8192, .facts = 6}), InputError) << "half a chain";
}

TEST(Samples, AShortHaystackIsRepeated) {
  const Haystack small(
      "One sentence stands here. Another one follows it! Is there a third? \"Yes,\" it says.\n\n",
      fake_meter());
  std::vector<Sample> all;
  make_samples({.task = "needle", .tokens = 1024, .count = 2}, language(), small,
               [&](const Sample& s, bool) { all.push_back(s); });
  EXPECT_GE(all.at(0).length, 1000);
}

TEST(Samples, TextWithoutSentencesStillTakesFacts) {
  std::string numbers;
  for (int i = 0; i < 4000; ++i) numbers += "word" + std::to_string(i) + (i % 9 ? " " : "\n");
  const Haystack table(numbers, fake_meter());
  std::vector<Sample> all;
  make_samples({.task = "kv", .tokens = 4096, .count = 2}, language(), table,
               [&](const Sample& s, bool) { all.push_back(s); });
  EXPECT_EQ(occurrences(*all.at(0).context, all[0].answers[0]), 1u);
}

TEST(SentenceGap, OnlyBetweenSentencesOfOneParagraph) {
  const auto gaps = [](std::string_view text) {
    std::string marked;
    for (std::size_t i = 0; i < text.size(); ++i) marked += is_sentence_gap(text, i) ? '|' : text[i];
    return marked;
  };
  EXPECT_EQ(gaps("Go. Stay! \"Why?\" \"No.\" he said. See 3.5 or e.g. this.\n\nNext. End"),
            "Go.|Stay!|\"Why?\"|\"No.\" he said.|See 3.5 or e.g. this.\n\nNext.|End");
  EXPECT_EQ(gaps("He left (at last.) Then,"), "He left (at last.)|Then,");
  EXPECT_EQ(gaps("We met Ann in Rome."), "We met Ann in Rome.");
  EXPECT_EQ(gaps(""), "");
  EXPECT_EQ(gaps(". "), ". ");
}

TEST(Echo, TheEndComesFromFarBefore) {
  const TokenMeter meter = fake_meter();
  const std::string text = make_echo_text(12'000, 3, language(), haystack());
  const std::int64_t tokens = meter.prefix + meter.count(text);
  EXPECT_LE(tokens, 12'000);
  EXPECT_GE(tokens, 11'880);
  EXPECT_EQ(text, make_echo_text(12'000, 3, language(), haystack()));
  // Most 40-byte pieces of the last 500 tokens stood in the first third, and hardly any in between.
  const std::size_t third = text.size() * 3 / 12, tail = text.size() - text.size() / 24;
  std::size_t far = 0, near = 0, all = 0;
  for (std::size_t at = tail; at + 40 <= text.size(); at += 40, ++all) {
    far += text.substr(0, third).find(text.substr(at, 40)) != text.npos;
    near += text.substr(third, tail - third - 400).find(text.substr(at, 40)) != text.npos;
  }
  EXPECT_GT(far * 10, all * 4);
  EXPECT_LT(near * 10, all) << "the prose itself repeats a little";
  EXPECT_THROW(make_echo_text(9'000, 3, language(), haystack()), InputError);
}

TEST(Echo, ShortTextsComeBackAfterAThirdOfTheirLength) {
  EXPECT_EQ(echo_distance(32'768), kEchoDistance);
  EXPECT_EQ(echo_distance(11'000), kEchoDistance);
  EXPECT_EQ(echo_distance(4096), 4096 / 3);
  EXPECT_THROW(echo_distance(3071), InputError);
  for (const std::int64_t tokens : {3072, 4096, 10'751, 10'752}) {
    const std::string text = make_echo_text(tokens, 3, language(), haystack(), echo_distance(tokens));
    EXPECT_LE(fake_meter().prefix + fake_meter().count(text), tokens);
    EXPECT_GE(fake_meter().prefix + fake_meter().count(text), tokens - 128);
  }
}

TEST(Mixed, OneTextAnswersQuestionsOfAllTasks) {
  for (const std::int64_t tokens : {4096, 16384}) {
    const auto all = samples({.task = std::string(kMixed),
                              .tokens = tokens,
                              .count = 1'000'000,
                              .contexts = 2,
                              .seed = 5,
                              .questions = 8});
    std::map<std::string, int> asked;
    std::set<const std::string*> texts;
    std::set<int> depths;  // of the needles of the first text, in eighths
    for (const Sample& s : all) {
      ++asked[s.task];
      texts.insert(s.context.get());
      EXPECT_LE(s.length, tokens) << s.id;
      if (s.task == "needle" && s.context == all.front().context)
        depths.insert(static_cast<int>(*s.depth * 8.0));
      if (s.task == "needle" || s.task == "kv" || s.task == "multikey" || s.task == "passkey") {
        EXPECT_NE(s.context->find(s.answers.front()), std::string::npos) << s.id;
      }
    }
    EXPECT_EQ(texts.size(), 2u);
    EXPECT_GE(depths.size(), 6u) << "needles lie at all depths";
    for (const std::string& task : mixed_tasks()) {
      const bool single = task == "passkey" || task == "number";
      EXPECT_GE(asked[task], single ? 2 : task == "multivalue" ? 4 : 12) << task << " at " << tokens;
    }
  }
}

TEST(Mixed, FewerTextsAreTheFirstOfMore) {
  const TaskOptions two = {.task = std::string(kMixed),
                           .tokens = 4096,
                           .count = 1'000'000,
                           .contexts = 2,
                           .seed = 5,
                           .questions = 4};
  TaskOptions one = two;
  one.contexts = 1;
  EXPECT_EQ(lines(samples(two)).rfind(lines(samples(one)), 0), 0u);
  EXPECT_THROW(samples({.task = std::string(kMixed), .tokens = 512, .count = 1, .questions = 8}), InputError);
}

TEST(Mixed, NoFactIsToldInsideOfWhatIsRecited) {
  const auto all = samples({.task = std::string(kMixed),
                            .tokens = 8192,
                            .count = 1'000'000,
                            .contexts = 3,
                            .seed = 11,
                            .questions = 8});
  std::size_t recited = 0;
  for (const Sample& s : all) {
    if (s.task != "recite") continue;
    ++recited;
    EXPECT_GE(occurrences(*s.context, s.answers.front()), 1u) << s.id;
    EXPECT_TRUE(s.depth.has_value());
  }
  EXPECT_GE(recited, 12u);
}

}  // namespace
}  // namespace lode
