// SPDX-License-Identifier: Apache-2.0
// A report from end to end on a random model: every kind of run, what is skipped, and that nothing is
// measured twice.
#include "lab/report/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "base/file.h"
#include "eval/tiny_model.h"
#include "lodestone/error.h"
#include "support/asking.h"
#include "support/refusal.h"

namespace lode {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

constexpr const char* kSuite = R"(
title = "Everything"
ranking = "yes"
[[run]]
kind = "probe"
lengths = ["4k"]
methods = ["streaming", "topk:k=4", "topk:k=64", "saap"]
show = ["table", "recovered-density", "error-density", "error-selectivity", "mass-selectivity", "head-maps"]
[[run]]
kind = "eval"
tasks = ["kv", "needle"]
lengths = ["900", "1200"]
methods = ["full", "topk:k=4", "topk:k=16"]
dense = "sink=1,window=64"
protocols = ["context-dense", "decode-sparse"]
samples = 3
questions = 2
show = ["table", "score-density", "score-selectivity", "score-tasks", "score-length", "score-time", "far-keys-table", "far-keys-budget", "needle-map"]
[[run]]
kind = "recall"
lengths = ["2k", "4k"]
methods = ["topk:k=32", "kmeans:clusters=16"]
dense = "sink=1,window=64"
top = 8
show = ["table", "recall-length", "keys-length"]
[[run]]
kind = "clusters"
lengths = ["4k"]
methods = ["squeezed:metric=cosine"]
show = ["table", "cluster-map"]
[[run]]
kind = "key-query"
lengths = ["4k"]
show = ["table", "axes", "dot-products", "cluster-shares", "search", "distance"]
[[run]]
kind = "drift"
lengths = ["4k"]
texts = 2
show = ["table", "deviations"]
[[run]]
kind = "training"
lengths = ["4k"]
texts = 3
steps = 2
variants = ["long-range", "causal"]
show = ["table", "captured"]
)";

std::size_t occurrences(std::string_view text, std::string_view what) {
  std::size_t count = 0;
  for (std::size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++count;
  return count;
}

class ReportTest : public testing::Test {
 protected:
  ReportTest() : suites_{parse_suite(kSuite, "all.toml", "all", false)} {
    options_.folder = folder_ / "report";
    options_.context.kv_type = DType::f32;
    options_.context.rope_factor =
        2.0;  // the text that needs its far past is longer than the model's context
    options_.progress = Progress::Mode::quiet;
  }

  Page make() {
    MeasurementRunner grid(tiny_model(), suites_, options_);
    grid.run();
    skipped_ = grid.skipped();
    return make_report(grid, suites_, {"lodestone report", "-m tiny", "abc", "here", "today", "tiny"});
  }
  std::string raw(const char* name) const { return read_file(options_.folder / "raw" / name); }

  /// Puts results of our choice into a file of raw results.
  void rewrite(const char* name, const std::function<void(Json&)>& change) const {
    std::string told;
    for_each_line(raw(name), name, [&](std::string_view text, const std::string&) {
      Json line = Json::parse(text);
      change(line);
      told += line.dump() + "\n";
    });
    AtomicFile file(options_.folder / "raw" / name);
    file.write(std::as_bytes(std::span(std::string_view(told))));
    file.commit();
  }

  std::vector<Suite> suites_;
  const test::TestFolder folder_;
  GridOptions options_;
  std::vector<Skipped> skipped_;
};

TEST_F(ReportTest, MeasuresEveryKindOnceAndNamesWhatItSkips) {
  const Page page = make();
  const std::string text = page.markdown();
  ASSERT_EQ(skipped_.size(), 1u) << "a method without its artefact";
  EXPECT_THAT(text, HasSubstr("- `saap"));
  EXPECT_THAT(text, HasSubstr("Recovered gap by bytes read"));
  EXPECT_THAT(text,
              HasSubstr("All methods at equal bytes, by the recovered gap at 10 % of full attention's"));
  EXPECT_THAT(text, HasSubstr("| probe 4096 |")) << "what the work took";
  EXPECT_THAT(text, HasSubstr("Needles found, by depth and length, decode-sparse"));
  EXPECT_THAT(text, HasSubstr("Recall of the true top 8 keys"));
  EXPECT_THAT(text, HasSubstr("Keys of the 10 largest of "));
  EXPECT_THAT(text, HasSubstr("commit abc, here, seed 7"));
  for (const char* figure :
       {"kv: score by far keys attended in layers that choose", "attended in layers that choose, by task",
        "topk: far keys by budget", "Attention captured, sink and window included",
        "Keys and queries on two axes", "Dot products of queries and keys",
        "Clusters of the keys, and where queries fall", "What an inverted file finds", "Distance to the keys",
        "Deviation of bucket sizes, layer 1", "Variants of training, 3 texts of 4k tokens, 2 steps"})
    EXPECT_THAT(text, HasSubstr(figure));
  EXPECT_THAT(text, HasSubstr("| bytes measured | exact bytes | selector bytes | update bytes |"));
  EXPECT_THAT(text,
              HasSubstr("| kv 900 (context-dense) | needle 900 (context-dense) | kv 1200 (context-dense) |"))
      << "the ranking mixes no lengths";
  const std::string html = page.html();
  const std::size_t chart = html.find("<title>Score by time of a question");
  ASSERT_NE(chart, html.npos);
  EXPECT_EQ(occurrences(html.substr(chart, html.find("</svg>", chart) - chart), ">full</text>"), 1u);
  const std::string cells = raw("cells.jsonl"), answers = raw("answers-context-dense.jsonl");
  EXPECT_EQ(make().markdown(), text) << "the same page from what is on disk";
  EXPECT_EQ(raw("cells.jsonl"), cells);
  EXPECT_EQ(raw("answers-context-dense.jsonl"), answers);
}

TEST_F(ReportTest, TimesOfAnOlderFolderKeepTheirWarning) {
  const auto line = [](const char* of, double others) {
    const Json result = {{"wall_s", 1}, {"processor_s", 1}, {"others_s", others}, {"room_s", 2}};
    return Json{{"key", {{"of", of}, {"began", 1}}}, {"result", result}}.dump() + "\n";
  };
  const std::string lines = line("decode 512", 1) + line("attention 512, pocket, 1 x 1 queries (mine)", 0.5);
  fs::create_directories(options_.folder / "raw");
  AtomicFile file(options_.folder / "raw" / "effort.jsonl");
  file.write(std::as_bytes(std::span(lines)));
  file.commit();
  suites_[0].runs.resize(1);
  const MeasurementRunner grid(tiny_model(), suites_, options_);
  SuiteRun run = {.kind = RunKind::decode, .suite = "mine"};
  ASSERT_TRUE(grid.effort_of(run, 512).has_value()) << "written before suites' times were told apart";
  EXPECT_NEAR(grid.effort_of(run, 512)->others_share(), 0.5, 1e-12);
  EXPECT_FALSE(grid.effort_of(run, 1024).has_value());
  run.kind = RunKind::attention;
  EXPECT_NEAR(grid.effort_of(run, 512)->others_share(), 0.25, 1e-12);
}

TEST_F(ReportTest, AtAnotherShapeThanTheModelsAnArtefactIsMadeUp) {
  suites_ = {
      parse_suite("title = \"t\"\n[[run]]\nkind = \"attention\"\nshape = \"L1q4kv2d32\"\nlengths = [\"6k\"]\n"
                  "methods = [\"saap:probes=32\", \"saap:probes=32,preset=paper\"]\n",
                  "t.toml", "t", false)};
  options_.context.rope_factor.reset();
  MeasurementRunner grid(test::pocket(), suites_, options_);
  ASSERT_EQ(grid.methods(suites_[0].runs[0]).size(), 2u)
      << "the one that lies beside the model is of its own heads";
  grid.run();
  const std::vector<Json> rows = grid.bench(suites_[0].runs[0], 6 * 1024);
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_LT(rows[1].at("selectivity"), 0.5);
}

TEST_F(ReportTest, AWholeStepTellsWhatNoCacheCosts) {
  suites_ = {
      parse_suite("title = \"t\"\n[[run]]\nkind = \"decode\"\nlengths = [\"300\"]\nmethods = "
                  "[\"streaming\"]\nwithout_cache = \"yes\"\nkv_tier = \"host\"\n",
                  "t.toml", "t", false)};
  MeasurementRunner grid(tiny_model(), suites_, options_);
  grid.run();
  const std::vector<Json> rows = grid.bench(suites_[0].runs[0], 300);
  ASSERT_EQ(rows.size(), 3u) << "a CPU has no tiers";
  EXPECT_FALSE(grid.is_on_host(suites_[0].runs[0]));
  EXPECT_EQ(rows[0].at("kv_bytes"), 2 * 300 * 2 * 2 * 8 * 4) << "L2, 2 KV heads, d 8, float32";
  EXPECT_EQ(rows[2].at("kv_bytes"), 0);
  EXPECT_GT(rows[2].at("attention_us").get<double>(), 0.0);
  EXPECT_LT(rows[2].at("attention_us").get<double>(), rows[2].at("median_us").get<double>());
  skipped_.clear();
  EXPECT_THAT(make().markdown(), HasSubstr("| the rest ms |"));
}

TEST_F(ReportTest, GoesOnWhereItStopped) {
  const std::string text = make().markdown();
  const std::string cells = raw("cells.jsonl"), answers = raw("answers-decode-sparse.jsonl");
  const auto cut = [&](const char* name, const std::string& whole) {
    fs::resize_file(options_.folder / "raw" / name, whole.size() / 2);
  };
  cut("cells.jsonl", cells);
  cut("answers-decode-sparse.jsonl", answers);
  const std::string again = make().markdown();
  EXPECT_EQ(raw("cells.jsonl").size(), cells.size());
  EXPECT_THAT(again, HasSubstr("Recovered gap by bytes read"));
}

TEST_F(ReportTest, ASpecGetsItsOwnRowOfTheProbe) {
  suites_[0].ranking = false;
  suites_[0].runs.resize(1);
  SuiteRun& run = suites_[0].runs[0];
  run.methods.clear();
  for (const char* spec : {"kmeans", "kmeans:probes=1", "topk:k=4", "topk:k=4,sink=1,window=63", "full"})
    run.methods.push_back({spec, spec});
  MeasurementRunner grid(tiny_model(), suites_, options_);
  grid.run();
  const std::vector<Json> rows = grid.probe(run, run.lengths[0]);
  ASSERT_EQ(rows.size(), 5u);
  EXPECT_LT(rows[1].at("density"), rows[0].at("density")) << "one bucket of many";
  EXPECT_EQ(rows[2].at("density"), rows[3].at("density")) << "the same method, written twice";
  EXPECT_EQ(rows[4].at("density"), 1.0);
}

TEST_F(ReportTest, WhatCannotBeMeasuredIsRefusedWithItsPlaceBeforeAnythingIs) {
  const auto refusal = [&] {
    try {
      MeasurementRunner(tiny_model(), suites_, options_);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  suites_[0].runs[0].lengths = {2048};
  EXPECT_THAT(refusal(), HasSubstr("all.toml line 4: echo: expected a text of at least"));
  suites_[0].runs[0].lengths = {4096};
  suites_[0].runs[1].tasks = {"cars"};
  EXPECT_THAT(refusal(), HasSubstr("all.toml line 9: expected a task"));
}

TEST_F(ReportTest, CentroidsThatNobodyMadeYetAreLeftOutWithTheWayToMakeThem) {
  suites_[0].ranking = false;
  suites_[0].runs.resize(1);
  suites_[0].runs[0].methods = {{"kmeans", "kmeans"},
                                {"kmeans:weights", "kmeans:weights=nowhere.safetensors"}};
  const std::string text = make().markdown();
  ASSERT_EQ(skipped_.size(), 1u);
  EXPECT_EQ(skipped_[0].reason,
            "nowhere.safetensors: expected centroids, which `lodestone train kmeans -m MODEL -f TEXT -o "
            "nowhere.safetensors` makes, found no such file");
  EXPECT_THAT(text,
              HasSubstr("`kmeans:weights=nowhere.safetensors`: nowhere.safetensors: expected centroids"));
  EXPECT_THAT(text, HasSubstr("| `kmeans` |"));
}

TEST_F(ReportTest, AProbeRefusesADifferentSinkOrWindow) {
  suites_[0].ranking = false;
  suites_[0].runs.resize(1);
  suites_[0].runs[0].dense = "sink=1,window=63";
  suites_[0].runs[0].methods = {{"a", "topk:k=4,sink=1,window=63"}, {"b", "topk:k=4,sink=1,window=500"}};
  MeasurementRunner grid(tiny_model(), suites_, options_);
  ASSERT_EQ(grid.skipped().size(), 1u);
  EXPECT_THAT(grid.skipped()[0].spec, HasSubstr("topk:k=4,sink=1,window=500"));
  EXPECT_THAT(grid.skipped()[0].reason, HasSubstr("sink 1 and window 63"));
  EXPECT_EQ(grid.methods(suites_[0].runs[0]).size(), 1u);
}

TEST_F(ReportTest, TakesOverNothingThatWasMeasuredUnderOtherSettings) {
  suites_[0].ranking = false;
  suites_[0].runs.resize(1);
  suites_[0].runs[0].methods = {{"topk:k=4", "topk:k=4"}};
  const fs::path hay = folder_ / "hay.txt";
  const auto write_hay = [&](const std::string& word) {
    AtomicFile file(hay);
    std::string text;
    for (int i = 0; i < 2000; ++i) text += "The " + word + " went on to the next. ";
    file.write(std::as_bytes(std::span(std::string_view(text))));
    file.commit();
  };
  const auto cells = [&] {
    MeasurementRunner(tiny_model(), suites_, options_).run();
    const std::string text = raw("cells.jsonl");
    return std::count(text.begin(), text.end(), '\n');
  };
  EXPECT_EQ(cells(), 1);
  options_.context.rope_factor = 3.0;
  EXPECT_EQ(cells(), 2) << "another RoPE";
  write_hay("boat");
  options_.haystack = hay;
  EXPECT_EQ(cells(), 3) << "another haystack";
  write_hay("cart");
  EXPECT_EQ(cells(), 4) << "the same file with other contents";
  EXPECT_EQ(cells(), 4) << "nothing new";
  fs::remove(hay);
}

TEST_F(ReportTest, UsersOwnSamplesStandInForTheTasks) {
  options_.samples = parse_samples(
      R"({"id":"a","task":"mine","tokens":0,"context":"The colour is blue. Words and words.","question":" What colour?","answers":["blue"],"match":"contains"})"
      "\n",
      "mine.jsonl");
  suites_[0].runs = {suites_[0].runs[1]};
  suites_[0].ranking = false;
  const std::string text = make().markdown();
  EXPECT_THAT(text, HasSubstr("| attention | mine | mean |"));
  EXPECT_THAT(
      text,
      HasSubstr("Needles found, by depth and length, context-dense: none of the samples tells the depth"));
}

TEST_F(ReportTest, ScoresSayHowFarBelowFullTheyAreAndHowSurely) {
  std::string lines;
  for (const char* sample : {"a0", "b0", "a1", "a2", "a3"}) {
    const std::string id = sample;
    const Json line = {{"id", id},
                       {"task", id.substr(0, 1)},
                       {"tokens", 0},
                       {"context", "This is text " + id.substr(1) + ". It is short."},
                       {"question", " Which text?"},
                       {"answers", {id.substr(1)}},
                       {"match", "contains"}};
    lines += line.dump() + "\n";
  }
  options_.samples = parse_samples(lines, "mine.jsonl");
  suites_[0].runs = {suites_[0].runs[1]};
  suites_[0].ranking = false;
  suites_[0].runs[0].methods = {{"topk:k=4", "topk:k=4"}};
  suites_[0].runs[0].protocols.resize(1);
  suites_[0].runs[0].show = {Show::table};
  make();
  rewrite("answers-context-dense.jsonl", [](Json& line) {
    if (!line.contains("score")) return;
    line["score"] =
        line.at("attention") != "full" && (line.at("id") == "a0" || line.at("id") == "a3") ? 0 : 1;
  });
  const std::string text = make().markdown();
  EXPECT_THAT(text, HasSubstr("| attention | a | b | mean | less full |"));
  EXPECT_THAT(text, HasSubstr("| `full` | 100.0 | 100.0 | 100.0 |  |"));
  // Texts are worth -62.5, 0, 0 and -62.5 points of 2, 1, 1 and 1 questions; t is 3.182.
  EXPECT_THAT(text, HasSubstr("| `topk:k=4` | 50.0 | 100.0 | 75.0 | -25.0 ± 39.0 |"));
  EXPECT_THAT(text, testing::Not(HasSubstr("no interval can be told")));
  options_.samples.erase(options_.samples.begin() + 3, options_.samples.end());
  const std::string few = make().markdown();
  EXPECT_THAT(few, HasSubstr("| `topk:k=4` | 50.0 | 100.0 | 75.0 | - |"));
  EXPECT_THAT(few, HasSubstr("Of fewer than 3 texts no interval can be told"));
}

TEST_F(ReportTest, TheSuiteThatRanksComesFirstBehindWhatCameOut) {
  suites_[0].runs.resize(1);
  suites_[0].runs[0].show = {Show::table};
  suites_.insert(suites_.begin(), suites_[0]);
  suites_[0].title = "Plain";
  suites_[0].name = suites_[0].given = "plain";
  suites_[0].ranking = false;
  make();
  rewrite("cells.jsonl", [](Json& cell) {
    const bool best = cell.at("key").at("spec").get<std::string>().find("k=4") != std::string::npos;
    cell["result"].update({{"density", 0.07}, {"recovered", best ? 0.95 : 0.3}, {"selector_share", 0.05}});
  });
  const std::string html = make().html();
  const std::string outcome =
      "<p><a href=\"#all\">Everything</a> compares 2 methods that read a part of what full attention reads. "
      "<code>topk:k=4</code> keeps 95 % of what far context is worth to the model (the recovered gap) and "
      "reads "
      "7.0 % of full attention&#39;s bytes (5.0 % to choose, 2.0 % to attend): no method keeps 90 % for "
      "fewer. "
      "With up to 20 % of the bytes, <code>streaming</code> (30 %) keeps less than half.</p>";
  EXPECT_THAT(html, HasSubstr("</h1>\n" + outcome));
  EXPECT_LT(html.find("<h2>Everything"), html.find("<h2>Plain"));
  EXPECT_THAT(html, HasSubstr("<pre>lodestone report plain all -m tiny</pre>")) << "as it was asked for";
  EXPECT_THAT(html, HasSubstr("<a href=\"#Left-out\">the end of this page</a>"));
}

TEST_F(ReportTest, SoFarItSaysWhatIsNotMeasuredYet) {
  MeasurementRunner(tiny_model(), suites_, options_);  // writes what an empty folder has
  options_.so_far = true;
  const Page page = make();
  const std::string text = page.markdown();
  EXPECT_THAT(text, testing::Not(HasSubstr(".svg")));
  EXPECT_THAT(text, HasSubstr("Recall of the true top 8 keys by length, by weight a: not measured yet."));
  EXPECT_THAT(text, HasSubstr("All methods at equal bytes: not measured yet."));
  EXPECT_THAT(text, testing::Not(testing::ContainsRegex("\\|---[^\n]*\n\n"))) << "a table without a row";
}

TEST_F(ReportTest, SoFarItSaysOnHowManyQuestionsMeansRest) {
  make();
  std::string kept;
  for_each_line(raw("answers-decode-sparse.jsonl"), "answers",
                [&](std::string_view text, const std::string&) {
                  const Json line = Json::parse(text);
                  if (line.value("id", "").find("kv-900-") == std::string::npos) kept += line.dump() + "\n";
                });
  AtomicFile file(options_.folder / "raw" / "answers-decode-sparse.jsonl");
  file.write(std::as_bytes(std::span(std::string_view(kept))));
  file.commit();
  options_.so_far = true;
  const std::string text = make().markdown();
  const std::string so_far = "So far means rest on 3 of 6 questions and 1 of 2 tasks at 900 tokens.";
  EXPECT_THAT(text, HasSubstr("# Everything\n\nThis page shows what has been measured so far"));
  EXPECT_THAT(text, HasSubstr("3 about 3 texts at 900 tokens; 6 about 5 texts at 1200 tokens. " + so_far));
  EXPECT_THAT(text, HasSubstr("\n\nTasks kv, needle. " + so_far)) << "above the ranking";
  EXPECT_THAT(text, HasSubstr("Score by share of the bytes read, 900 tokens, context-dense. " + so_far));
  EXPECT_THAT(text, HasSubstr("Score by share of the bytes read, 1200 tokens, context-dense. `")) << "whole";
}

TEST_F(ReportTest, ARunOfNothingButMethodsThatAreLeftOutSaysSo) {
  suites_[0].ranking = false;
  std::vector<SuiteRun> runs = {suites_[0].runs[0], suites_[0].runs[2], suites_[0].runs[3]};
  for (SuiteRun& run : runs) run.methods = {{"saap", "saap"}};
  suites_[0].runs = runs;
  const std::string text = make().markdown();
  EXPECT_THAT(text, testing::Not(HasSubstr("ot measured yet")));
  EXPECT_EQ(occurrences(text, "All of its methods are left out."), 3u);
}

TEST_F(ReportTest, DamagedRawResultsAreAnError) {
  fs::create_directories(options_.folder / "raw");
  for (const char* line : {"{\"key\":1,\"result\":2}\n", "nonsense\n", "{\"key\":{}}\n"}) {
    AtomicFile file(options_.folder / "raw" / "cells.jsonl");
    file.write(std::as_bytes(std::span(std::string_view(line))));
    file.commit();
    EXPECT_THROW(MeasurementRunner(tiny_model(), suites_, options_), InputError) << line;
  }
}

TEST_F(ReportTest, RunsThatShareTextsAskAboutTheSameOnes) {
  suites_[0].ranking = false;
  suites_[0].runs = {suites_[0].runs[1]};
  SuiteRun& first = suites_[0].runs[0];
  first.tasks = {"kv", "vt"};
  first.lengths = {2200};
  first.samples = 5;
  first.shared = kSharedAll;
  first.protocols.resize(1);
  first.show = {Show::table};
  suites_[0].runs.push_back(first);
  SuiteRun& second = suites_[0].runs[1];
  second.tasks = {"needle"};
  second.shared = 2200;
  second.samples = 16;
  MeasurementRunner grid(tiny_model(), suites_, options_);
  grid.run();
  const std::vector<Sample> of_first = grid.samples(suites_[0].runs[0]),
                            of_second = grid.samples(suites_[0].runs[1]);
  ASSERT_EQ(of_first.size(), 10u) << "five of each task, of as many texts as they need";
  ASSERT_EQ(of_second.size(), 2u) << "those of one text";
  EXPECT_EQ(of_first[0].context, of_second[0].context);
  EXPECT_NE(of_first[0].context, of_first[2].context);
  EXPECT_EQ(grid.eval(suites_[0].runs[1], Protocol()).rows.front().n, 2);
}

}  // namespace
}  // namespace lode
