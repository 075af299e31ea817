// SPDX-License-Identifier: Apache-2.0
// Suites: what they may say, and that whatever else they say is an error that names the line.
#include "lab/report/suite.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "lab/report/toml.h"
#include "lodestone/error.h"
#include "lodestone/spec.h"
#include "support/source_dir.h"

namespace lode {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr const char* kSuite = R"(# a comment
title = "One \"table\""
source = "a paper"   # and another

[[run]]
kind = "eval"
tasks = ["needle", "freq"]
lengths = ["4k", "1M", "300"]
quick_lengths = "4k"
gpu_lengths = ["128k"]
methods = [
  "full",   # a comment in a list
  "topk:k=64",
  "hash:budget=8,window=9",
]
dense = "sink=1,window=511"
protocols = ["context-dense", "last:128"]
samples = 5
quick_samples = 2
gpu_samples = 400
gpu_questions = 8
shared = "32k"
gpu_shared = "all"
show = ["table", "needle-map"]

[[run]]
kind = "probe"
lengths = ["16k"]
methods = ["topk:k=8"]
)";

std::string error_of(const std::string& text, bool quick = false) {
  try {
    parse_suite(text, "a.toml", "a", quick);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Suite, SaysWhatItsFileSays) {
  const Suite suite = parse_suite(kSuite, "a.toml", "a", false);
  EXPECT_EQ(suite.title, "One \"table\"");
  ASSERT_EQ(suite.runs.size(), 2u);
  const SuiteRun& run = suite.runs[0];
  EXPECT_THAT(run.tasks, ElementsAre("needle", "freq"));
  EXPECT_EQ(shared_texts(run, 4096), 8);
  EXPECT_EQ(shared_texts(run, 1 << 20), 1) << "one text at least";
  EXPECT_THAT(run.lengths, ElementsAre(4096, 1 << 20, 300));
  ASSERT_EQ(run.methods.size(), 3u);
  EXPECT_EQ(run.methods[0].spec, "full");
  EXPECT_EQ(run.methods[1].spec, "topk:k=64,sink=1,window=511");
  EXPECT_EQ(run.methods[2].spec, "hash:budget=8,window=9,sink=1") << "a method's own keys stay";
  EXPECT_EQ(run.methods[2].label, "hash:budget=8,window=9");
  EXPECT_EQ(run.protocols[1].str(), "last:128");
  EXPECT_EQ(run.samples, 5);
  EXPECT_EQ(suite.runs[1].kind, RunKind::probe);
}

TEST(Suite, QuickKeysStandInForTheirs) {
  const Suite suite = parse_suite(kSuite, "a.toml", "a", true);
  EXPECT_THAT(suite.runs[0].lengths, ElementsAre(4096));
  EXPECT_EQ(suite.runs[0].samples, 2);
  EXPECT_THAT(suite.runs[0].tasks, ElementsAre("needle", "freq"));
}

TEST(Suite, OnAGpuLengthsAreThoseNamedForIt) {
  EXPECT_THAT(parse_suite(kSuite, "a.toml", "a", false, true).runs[0].lengths, ElementsAre(131072));
  EXPECT_THAT(parse_suite(kSuite, "a.toml", "a", true, true).runs[0].lengths, ElementsAre(4096));
  EXPECT_THAT(parse_suite(kSuite, "a.toml", "a", false, true).runs[1].lengths, ElementsAre(16384));
}

TEST(Suite, OnAGpuNumbersAreThoseNamedForIt) {
  const SuiteRun on_gpu = parse_suite(kSuite, "a.toml", "a", false, true).runs[0];
  EXPECT_EQ(on_gpu.samples, 400);
  EXPECT_EQ(on_gpu.questions, 8);
  EXPECT_EQ(on_gpu.shared, kSharedAll);
  EXPECT_EQ(parse_suite(kSuite, "a.toml", "a", true, true).runs[0].samples, 2) << "quick comes first";
  const SuiteRun on_cpu = parse_suite(kSuite, "a.toml", "a", false).runs[0];
  EXPECT_EQ(on_cpu.questions, 0);
  EXPECT_EQ(on_cpu.shared, 32768);
}

TEST(Suite, SharedTextsAreAsManyAsTheQuestionsNeed) {
  SuiteRun run = {.samples = 400, .questions = 8, .shared = kSharedAll};
  EXPECT_EQ(shared_texts(run, 4096), 50);
  EXPECT_EQ(shared_texts(run, 32768), 50);
  run.samples = 401;
  EXPECT_EQ(shared_texts(run, 4096), 51) << "rounded up";
  run.shared = 32768;
  EXPECT_EQ(shared_texts(run, 4096), 8) << "no more than so many tokens hold";
  run.samples = 16;
  EXPECT_EQ(shared_texts(run, 4096), 2) << "no more than the questions need";
  run.samples = 8;
  EXPECT_EQ(shared_texts(run, 4096), 8) << "tasks of one fact a text find their questions in several";
  run.shared = kSharedAll;
  EXPECT_EQ(shared_texts(run, 4096), 1);
}

TEST(Suite, LongTextsAreAskedAQuarter) {
  SuiteRun run = {.samples = 400, .questions = 8, .shared = kSharedAll};
  EXPECT_EQ(samples_at(run, 32768), 400);
  EXPECT_EQ(samples_at(run, 131072), 100);
  EXPECT_EQ(shared_texts(run, 131072), 13);
  run.samples = 16;
  EXPECT_EQ(samples_at(run, 131072), 8) << "all of one text";
  run.samples = 5;
  EXPECT_EQ(samples_at(run, 131072), 5);
  run.questions = 0;
  EXPECT_EQ(samples_at(run, 131072), 2);
}

TEST(Suite, FaultsNameTheirLine) {
  const std::string top = "title = \"t\"\n[[run]]\n";
  const std::string probe = top + "kind = \"probe\"\nlengths = [\"4k\"]\nmethods = [\"full\"]\n";
  ASSERT_EQ(error_of(probe), "no error");
  EXPECT_THAT(error_of(""), HasSubstr("expected a 'title'"));
  EXPECT_THAT(error_of("title = \"t\"\n"), HasSubstr("at least one [[run]]"));
  EXPECT_THAT(error_of("title = \"t\"\n[[runs]]\n"), HasSubstr("a.toml line 2: expected [[run]]"));
  EXPECT_THAT(error_of(top + "kind = \"evil\"\n"), HasSubstr("line 3: 'kind': expected one of eval, probe"));
  EXPECT_THAT(error_of(probe + "sampels = 3\n"), HasSubstr("line 6: expected one of the keys"));
  EXPECT_THAT(error_of(probe + "show = [\"needle-map\"]\n"),
              HasSubstr("line 6: 'show': expected, for probe"));
  EXPECT_THAT(error_of(probe + "seed = 1.5\n"), HasSubstr("'seed': expected a whole number"));
  EXPECT_THAT(error_of(probe + "seed = \"1\"\n"), HasSubstr("'seed': expected a number"));
  EXPECT_THAT(error_of(probe + "seed = -1\n"), HasSubstr("'seed': expected a number from 0"));
  EXPECT_THAT(error_of(probe + "kind = \"probe\"\n"), HasSubstr("line 6: the key 'kind' occurs twice"));
  EXPECT_THAT(error_of(top + "kind = \"probe\"\nlengths = [\"4q\"]\nmethods = [\"full\"]\n"),
              HasSubstr("found '4q'"));
  EXPECT_THAT(error_of(top + "kind = \"probe\"\nlengths = [\"99999999999M\"]\nmethods = [\"full\"]\n"),
              HasSubstr("at most 1024M"));
  EXPECT_THAT(error_of(top + "kind = \"training\"\nlengths = [\"4k\"]\nvariants = [\"wide\"]\n"),
              HasSubstr("line 5: 'variants': expected one of the variants long-range"));
  EXPECT_THAT(error_of(top + "kind = \"drift\"\nlengths = [\"4k\"]\nmethods = [\"full\"]\n"),
              HasSubstr("line 5: expected one of the keys"))
      << "it measures no methods";
  EXPECT_THAT(error_of(top + "kind = \"probe\"\nlengths = []\nmethods = [\"full\"]\n"),
              HasSubstr("a list 'lengths' that is not empty"));
  EXPECT_THAT(error_of(top + "kind = \"probe\"\nlengths = [\"4k\"]\nmethods = [\"full\", \"full\"]\n"),
              HasSubstr("'full' occurs twice"));
}

TEST(Suite, QuestionsOfSamplesAloneNeedNoTasks) {
  const std::string run = "title = \"t\"\n[[run]]\nmethods = [\"full\"]\nneeds_samples = \"yes\"\n";
  const SuiteRun read = parse_suite(run + "kind = \"eval\"\n", "a.toml", "a", false).runs[0];
  EXPECT_TRUE(read.tasks.empty());
  EXPECT_TRUE(read.lengths.empty());
  EXPECT_THAT(error_of(run + "kind = \"eval\"\ntasks = [\"kv\"]\n"), HasSubstr("'tasks'")) << "of no use";
  EXPECT_THAT(error_of(run + "kind = \"probe\"\nlengths = [\"4k\"]\n"), HasSubstr("'needs_samples'"));
}

TEST(Suite, SpecsThatNobodyCanRunAreFaults) {
  const std::string top = "title = \"t\"\nmethods = [\"topk:kk=4\"]\nquick_methods = [\"topkk\"]\n";
  const std::string run = "[[run]]\nkind = \"probe\"\nlengths = [\"4k\"]\n";
  EXPECT_THAT(error_of(top + run),
              HasSubstr("a.toml line 2: 'methods': attention spec 'topk:kk=4': unknown key 'kk'"));
  EXPECT_THAT(error_of(top + run, true),
              HasSubstr("a.toml line 3: 'methods': unknown attention method 'topkk'"));
  EXPECT_THAT(error_of(top + run + "methods = [\"full\", \"topk:k=0\"]\n"), HasSubstr("line 7: 'methods'"));
  EXPECT_THAT(error_of(top + run + "methods = [\"topk:k=4\"]\ndense = \"wndow=3\"\n"), HasSubstr("'wndow'"));
  EXPECT_THAT(error_of(top + run + "methods = [\"full\", \"plan:nowhere.json\"]\n"),
              AllOf(HasSubstr("a.toml line 7: 'methods'"), HasSubstr("nowhere.json")));
  EXPECT_EQ(error_of("title = \"t\"\n" + run + "methods = [\"saap\"]\n"), "no error")
      << "its artefact is the model's";
}

TEST(Suite, StepsMayHaveTheirKeysInHostMemory) {
  const std::string run = "title = \"t\"\n[[run]]\nlengths = [\"4k\"]\nmethods = [\"full\"]\n";
  const std::string decode = run + "kind = \"decode\"\n";
  EXPECT_EQ(parse_suite(decode, "a.toml", "a", false).runs[0].kv_tier, KvTier::automatic);
  EXPECT_EQ(parse_suite(decode + "kv_tier = \"host\"\n", "a.toml", "a", false).runs[0].kv_tier, KvTier::host);
  EXPECT_THAT(error_of(decode + "kv_tier = \"disk\"\n"),
              AllOf(HasSubstr("a.toml line 6: 'kv_tier'"), HasSubstr("found 'disk'")));
  EXPECT_THAT(error_of(run + "kind = \"probe\"\nkv_tier = \"host\"\n"), HasSubstr("'kv_tier'"));
}

TEST(Suite, FaultsOfValuesNameTheirLineToo) {
  const std::string top = "title = \"t\"\n[[run]]\nlengths = [\"4k\"]\nmethods = [\"full\"]\n";
  EXPECT_THAT(error_of(top + "kind = \"attention\"\nshape = \"lama\"\n"),
              HasSubstr("a.toml line 6: 'shape': expected"));
  const std::string eval = top + "kind = \"eval\"\ntasks = [\"kv\"]\n";
  EXPECT_THAT(error_of(eval + "protocols = [\"dense\"]\n"),
              HasSubstr("a.toml line 7: 'protocols': expected context-dense"));
  EXPECT_THAT(error_of(eval + "shared = \"some\"\n"),
              HasSubstr("a.toml line 7: 'shared', unless it is \"all\": expected lengths"));
  EXPECT_THAT(error_of(eval + "shared = \"all\"\n"),
              HasSubstr("a.toml line 7: 'shared': expected 'questions' beside \"all\""));
  EXPECT_THAT(error_of(eval + "gpu_samples = 0\n"), HasSubstr("line 7: 'gpu_samples': expected a number"));
  EXPECT_EQ(parse_suite(top + "kind = \"probe\"\n", "a.toml", "a", false).runs[0].where, "a.toml line 2");
}

TEST(Toml, RefusesWhatIsNoSuchFile) {
  for (const char* text :
       {"a", "a =", "a = ", "a = b", "a = \"b", "a = [", "a = [1 2]", "a = \"\\q\"", "[a]", "[[a", "[[a]] b",
        "a = 1 2", "= 1", "a = 1e999", "a = nan", "a = \"x\ny\"", "a = [[1]]"}) {
    EXPECT_THROW(parse_toml(text, "a.toml"), InputError) << text;
  }
  EXPECT_THROW(parse_toml("a = \"\xff\"", "a.toml"), InputError);
  const auto tables = parse_toml("a = [ # c\n1,\n2.5 , ]\r\n# end", "a.toml");
  EXPECT_THAT(*tables[0].list("a"), ElementsAre("1", "2.5"));
}

TEST(Suite, PresetsKeepTheirPapersSinkAndWindow) {
  const std::string dense = "sink=1,window=127,dense_layers=0";
  const Spec asked = parse_spec(with_dense("saap:probes=8,preset=paper", dense, RunKind::eval));
  EXPECT_EQ(asked.dense.window, 2047);
  EXPECT_EQ(asked.dense_layers, 1);
  EXPECT_EQ(parse_spec(with_dense("hash:budget=8,preset=paper", dense, RunKind::eval)).dense.sink, 128)
      << "by default";
  EXPECT_EQ(parse_spec(with_dense("saap:preset=paper,window=9", dense, RunKind::eval)).dense.window, 9)
      << "written";
  const Spec probed = parse_spec(with_dense("saap:probes=8,preset=paper", dense, RunKind::probe));
  EXPECT_EQ(probed.dense.window, 127) << "a probe gives all methods one";
  EXPECT_EQ(probed.dense_layers, 1);
  EXPECT_EQ(with_dense("saap:probes=8", dense, RunKind::eval), "saap:probes=8," + dense);
  const std::string squeezed = with_dense("squeezed:sparsity=0.7", dense, RunKind::eval);
  EXPECT_TRUE(parse_spec(squeezed).dense.from_context) << "its window is the text's end";
  EXPECT_EQ(parse_spec(squeezed).dense_layers, 0);
  EXPECT_EQ(parse_spec(with_dense("squeezed", dense, RunKind::probe)).dense.window, 127);
}

/// Shipped suites, of a whole report and of a quick one, on a CPU and on a GPU.
std::vector<Suite> shipped_suites() {
  std::vector<Suite> suites;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(source_dir() / "suites")) {
    if (entry.path().extension() != ".toml") continue;
    for (const bool quick : {false, true})
      for (const bool gpu : {false, true}) suites.push_back(read_suite(entry.path(), quick, gpu));
  }
  return suites;
}

TEST(Suites, ThatMeasureAPapersSystemMeasureItAsItsPaperHasItToo) {
  const auto is_paper = [](const std::string& label) {
    return label.find("preset=paper") != std::string::npos;
  };
  std::size_t runs = 0;
  for (const Suite& suite : shipped_suites()) {
    for (const SuiteRun& run : suite.runs) {
      if (run.kind != RunKind::eval && run.kind != RunKind::probe && run.kind != RunKind::recall) continue;
      std::set<std::string> ours, papers;
      for (const auto& method : run.methods) {
        const std::string name = parse_spec(method.spec).name;
        (is_paper(method.label) ? papers : ours).insert(name);
      }
      for (const char* const system : {"saap", "hash", "squeezed", "retrieval"}) {
        // Its graph for each query head takes longer to build than all other indexes of these texts together.
        if (suite.name == "readme" && system == std::string_view("retrieval")) continue;
        EXPECT_EQ(ours.contains(system), papers.contains(system)) << system << " in " << run.where;
        runs += papers.contains(system) ? 1 : 0;
      }
    }
  }
  EXPECT_GT(runs, 0u);
}

TEST(Suites, ProbesGivePresetsTheSinkAndWindowOfAll) {
  for (const Suite& suite : shipped_suites())
    for (const SuiteRun& run : suite.runs) {
      if (run.kind != RunKind::probe) continue;
      const Spec all = parse_spec("streaming:" + (run.dense.empty() ? "sink=1,window=63" : run.dense));
      for (const auto& method : run.methods) {
        const Spec spec = parse_spec(method.spec);
        // Without its own sink and window the paper's `streaming` is ours.
        if (method.label.find("preset=") == std::string::npos || spec.name == "streaming") continue;
        EXPECT_EQ(spec.dense.sink, all.dense.sink) << run.where << ": others are left out, " << method.label;
        EXPECT_EQ(spec.dense.window, all.dense.window)
            << run.where << ": others are left out, " << method.label;
      }
    }
}

TEST(Suites, PresetsBesideOthersOfTheirMethodAreASeriesOfTheirOwn) {
  for (const Suite& suite : shipped_suites())
    for (const SuiteRun& run : suite.runs)
      for (const auto& method : run.methods)
        EXPECT_THAT(method.label, Not(HasSubstr(":preset="))) << run.where << ": the first key is the budget";
}

TEST(Suites, AllThatAreShippedParseAndEveryTaskIsThere) {
  std::size_t read = 0;
  for (const auto& entry : std::filesystem::directory_iterator(source_dir() / "suites")) {
    if (entry.path().extension() != ".toml") continue;
    for (const bool quick : {false, true}) {
      const Suite suite = read_suite(entry.path(), quick);
      EXPECT_FALSE(suite.title.empty());
      ++read;
    }
  }
  EXPECT_GT(read, 0u);
}

}  // namespace
}  // namespace lode
