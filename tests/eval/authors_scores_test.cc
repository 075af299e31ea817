// SPDX-License-Identifier: Apache-2.0
// Scores of 200 made-up answers a metric, beside those of the benchmarks' authors' own code
// (tests/golden/make_score_goldens.py).
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "base/file.h"
#include "base/json.h"
#include "lab/eval/scoring.h"
#include "support/source_dir.h"

namespace lode {
namespace {

constexpr Match kMetrics[] = {Match::any,        Match::characters,
                              Match::choice,     Match::classes,
                              Match::code,       Match::count,
                              Match::debug,      Match::decimal,
                              Match::f1,         Match::last_number,
                              Match::number,     Match::passage,
                              Match::rouge_l,    Match::rouge_l_characters,
                              Match::rouge_lsum, Match::speaker,
                              Match::substring,  Match::values,
                              Match::word};

Match match_of(const std::string& name) {
  for (const Match match : kMetrics)
    if (name_of(match) == name) return match;
  ADD_FAILURE() << "no metric is named " << name;
  return Match::exact;
}

TEST(AuthorsScores, AreOurs) {
  std::map<std::string, int> cases;
  const auto compare = [&](std::string_view line, const std::string& where) {
    const Json json = parse_json(line, where);
    Sample sample;
    sample.match = match_of(json["match"].get<std::string>());
    sample.answers = json["answers"].get<std::vector<std::string>>();
    sample.classes = json["classes"].get<std::vector<std::string>>();
    ++cases[json["match"].get<std::string>()];
    // RULER's authors round to hundredths of a per cent.
    EXPECT_NEAR(score(json["output"].get<std::string>(), sample), json["score"].get<double>(), 6e-5)
        << where << ": " << line;
  };
  for (const char* benchmark : {"longbench.jsonl", "infinitebench.jsonl", "ruler.jsonl"})
    for_each_line(read_file(source_dir() / "tests/golden/benchmark_scores" / benchmark), benchmark, compare);
  EXPECT_EQ(cases.size(), std::size(kMetrics));
  for (const auto& [name, n] : cases) EXPECT_GE(n, 200) << name;
}

}  // namespace
}  // namespace lode
