// SPDX-License-Identifier: Apache-2.0
// Evaluation and probe from end to end on a random model: what must hold whatever the weights are.
#include "lab/eval/eval.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "base/cancel.h"
#include "base/file.h"
#include "lab/eval/probe.h"
#include "lab/studies/tune.h"
#include "lab/tasks/samples.h"
#include "lodestone/error.h"
#include "support/asking.h"
#include "support/refusal.h"
#include "tiny_model.h"

namespace lode {
namespace {

namespace fs = std::filesystem;

std::vector<Sample> some_samples(std::int64_t count, std::int64_t questions) {
  const Haystack prose = Haystack::prose(3, 50'000, make_meter(tiny_model()->tokenizer()));
  std::vector<Sample> samples;
  make_samples({.task = "kv", .tokens = 1200, .count = count, .seed = 2, .questions = questions},
               Language::built_in(), prose, [&](const Sample& s, bool) { samples.push_back(s); });
  return samples;
}

std::vector<NamedSpec> specs(const std::vector<std::string>& texts) {
  std::vector<NamedSpec> named;
  for (const std::string& text : texts) named.push_back({text, parse_spec(text)});
  return named;
}

EvalOptions quiet(const char* protocol = "context-dense") {
  EvalOptions options;
  options.protocol = Protocol::parse(protocol);
  options.context.kv_type = DType::f32;
  options.progress = Progress::Mode::quiet;
  return options;
}

TEST(Protocol, ParsesItsThreeForms) {
  for (const char* text : {"context-dense", "decode-sparse", "last:128"})
    EXPECT_EQ(Protocol::parse(text).str(), text);
  for (const char* text : {"", "last", "last:", "last:0", "last:-1", "last:1x", "dense"}) {
    EXPECT_THROW(Protocol::parse(text), InputError) << text;
  }
}

TEST(Evaluate, SelectingEverythingAgreesWithFullOnEverySample) {
  const auto samples = some_samples(4, 2);
  for (const char* protocol : {"context-dense", "decode-sparse", "last:40", "last:100"}) {
    const EvalReport report = evaluate(
        tiny_model(), samples, specs({"topk:k=100000,window=64", "streaming:window=64"}), quiet(protocol));
    ASSERT_EQ(report.rows.size(), 3u);
    EXPECT_EQ(report.rows[0].attention, "full");
    EXPECT_EQ(report.rows[0].agreement, 1.0);
    EXPECT_EQ(report.rows[0].density, 1.0);
    EXPECT_EQ(report.rows[1].agreement, 1.0) << protocol;
    EXPECT_EQ(report.rows[1].selectivity, 1.0);
    EXPECT_EQ(report.rows[1].difference.mean, 0.0);
    EXPECT_EQ(report.rows[1].difference.documents, 2);
    EXPECT_EQ(report.rows[2].selectivity, 0.0);
    EXPECT_LT(report.rows[2].density, 0.2) << protocol;
    EXPECT_EQ(report.rows[2].n, 4);
  }
}

TEST(Evaluate, SharedContextsGiveWhatSeparateOnesGive) {
  auto samples = some_samples(4, 2);
  const EvalReport shared = evaluate(tiny_model(), samples, specs({"streaming:window=64"}), quiet());
  for (Sample& s : samples) {
    s.context_id.clear();
    s.context = std::make_shared<const std::string>(*s.context);
  }
  const EvalReport separate = evaluate(tiny_model(), samples, specs({"streaming:window=64"}), quiet());
  EXPECT_EQ(shared.rows[1].agreement, separate.rows[1].agreement);
  EXPECT_EQ(shared.rows[1].score, separate.rows[1].score);
  EXPECT_EQ(separate.rows[1].difference.documents, 4);
}

TEST(Evaluate, InAChatTemplateAPromptIsWhatTheTemplateMakesOfIt) {
  std::vector<Sample> samples = some_samples(4, 2);
  for (Sample& s : samples) s.max_new = 6;
  EvalOptions options = quiet();
  options.chat = std::make_shared<const DocumentChat>(
      DocumentChat::Settings{
          .source = "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}[answer]"},
      ChatTokens{.bos = "<s>", .eos = "</s>"}, "template");
  const test::TestFolder folder;
  const auto answers = [&](const char* name) {
    options.records = folder.path() / name;
    evaluate(tiny_model(), samples, specs({"streaming:window=64"}), options);
    std::vector<Json> found;
    std::ifstream file(options.records);
    for (std::string line; std::getline(file, line);)
      if (Json json = Json::parse(line); json.contains("output_ids")) found.push_back(json.at("output_ids"));
    return found;
  };
  const std::vector<Json> in_chat = answers("chat");
  EXPECT_THROW((options.chat = nullptr, answers("chat")), InputError) << "answers of another kind of prompt";
  for (Sample& s : samples) {
    s.context = std::make_shared<const std::string>("[user]" + *s.context);
    s.context_id.clear();
    s.question = "\n\n" + s.question + ";[answer]";
  }
  ASSERT_EQ(in_chat.size(), 8u);
  EXPECT_EQ(answers("verbatim"), in_chat);
  EXPECT_NE(
      template_tokens(*tiny_model(),
                      DocumentChat({.source = "{% for m in messages %}{{ m.content }}{% endfor %}"}, {}, "")),
      0);

  samples = some_samples(1, 1);
  samples[0].context = std::make_shared<const std::string>(" ");
  options.chat = std::make_shared<const DocumentChat>(
      DocumentChat::Settings{.source = "{% for m in messages %}{{ m.content }}{% endfor %}"}, ChatTokens{},
      "template");
  EXPECT_THROW(answers("empty"), InputError);
}

TEST(Evaluate, VerbatimSamplesStandInNoChatTemplateBesideOthersThatDo) {
  std::vector<Sample> samples = some_samples(4, 4);  // about one context
  EvalOptions options = quiet();
  const test::TestFolder folder;
  const auto answers = [&](const char* name) {
    options.records = folder.path() / name;
    evaluate(tiny_model(), samples, {}, options);
    std::map<std::string, Json> found;
    std::ifstream file(options.records);
    for (std::string line; std::getline(file, line);)
      if (Json json = Json::parse(line); json.contains("output_ids"))
        found[json.at("id").get<std::string>()] = json.at("output_ids");
    return found;
  };
  for (Sample& s : samples) s.max_new = 6;
  const auto plain = answers("plain");
  options.chat = std::make_shared<const DocumentChat>(
      DocumentChat::Settings{
          .source = "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}[answer]"},
      ChatTokens{.bos = "<s>", .eos = "</s>"}, "template");
  const auto in_chat = answers("chat");
  samples[0].verbatim = samples[2].verbatim = true;
  const auto mixed = answers("mixed");
  ASSERT_NE(plain, in_chat);
  for (const Sample& s : samples) EXPECT_EQ(mixed.at(s.id), (s.verbatim ? plain : in_chat).at(s.id)) << s.id;
  samples[1].verbatim = true;
  EXPECT_THROW(answers("mixed"), InputError) << "its known answer was to another prompt";
}

TEST(Evaluate, JsonSaysWhyNothingWasSparse) {
  const auto samples = some_samples(2, 1);
  const Json results = evaluate(tiny_model(), samples, specs({"streaming", "streaming:window=64"}), quiet())
                           .json()
                           .at("results");
  ASSERT_EQ(results.size(), 3u);
  EXPECT_FALSE(results[0].contains("dense_because"));
  EXPECT_NE(results[1].at("dense_because").get<std::string>().find("sink + window (1 + 2047)"),
            std::string::npos);
  EXPECT_FALSE(results[2].contains("dense_because"));
}

TEST(Evaluate, MethodsThatShareAReadingOfTheQuestionAnswerAsAlone) {
  const auto samples = some_samples(4, 2);
  const std::vector<std::string> all = {"h2o:heavy_ratio=64,recent_ratio=16,sink=1,window=64",
                                        "kmeans:clusters=16,probes=4,window=64",
                                        "snapkv:max_capacity_prompt=96,sink=1,window=64",
                                        "retrieval:k=8,sink=1,window=64", "topk:k=8,window=64"};
  const EvalReport together = evaluate(tiny_model(), samples, specs(all), quiet("decode-sparse"));
  for (std::size_t m = 0; m < all.size(); ++m) {
    const EvalReport alone = evaluate(tiny_model(), samples, specs({all[m]}), quiet("decode-sparse"));
    EXPECT_EQ(alone.rows.at(1).score, together.rows.at(m + 1).score) << all[m];
    EXPECT_EQ(alone.rows.at(1).agreement, together.rows.at(m + 1).agreement) << all[m];
    EXPECT_EQ(alone.rows.at(1).density, together.rows.at(m + 1).density) << all[m];
    EXPECT_EQ(alone.rows.at(1).selectivity, together.rows.at(m + 1).selectivity) << all[m];
  }
}

// The paper's window is the prompt's end. A question that comes after the choice finds little of what it asks for.
TEST(Evaluate, SnapKvFindsWhatAQuestionAsksForThatIsKnown) {
  const Haystack prose = Haystack::prose(3, 50'000, make_meter(test::pocket()->tokenizer()));
  std::vector<Sample> samples;
  make_samples({.task = "needle", .tokens = 1200, .count = 8, .seed = 2, .questions = 4},
               Language::built_in(), prose, [&](const Sample& s, bool) { samples.push_back(s); });
  const auto snapkv =
      specs({"snapkv:window_size=8,kernel_size=15,pooling=maxpool,max_capacity_prompt=160,sink=1,window=64"});
  const auto scores = [&](const char* protocol) {
    const EvalReport report = evaluate(test::pocket(), samples, snapkv, quiet(protocol));
    return std::pair(report.rows[0].score, report.rows[1].score);
  };
  for (const char* const protocol : {"decode-sparse", "last:8"}) {
    const auto [full, found] = scores(protocol);
    ASSERT_GE(full, 75.0) << protocol;
    EXPECT_GE(found, 0.75 * full) << protocol;
  }
  EXPECT_LT(scores("context-dense").second, 50.0);
}

TEST(Evaluate, AnswersDoNotDependOnHowManyAreAskedAtOnce) {
  const auto samples = some_samples(6, 2);
  const auto all = specs({"h2o:heavy_ratio=64,recent_ratio=16,sink=1,window=64",
                          "snapkv:max_capacity_prompt=96,sink=1,window=64", "topk:k=8,window=64"});
  for (const char* const protocol : {"context-dense", "decode-sparse", "last:8"}) {
    std::vector<Json> reports;
    for (const int together : {1, 5}) {
      EvalOptions options = quiet(protocol);
      options.together = together;
      reports.push_back(evaluate(tiny_model(), samples, all, options).json());
      for (Json& row : reports.back().at("results")) {
        EXPECT_GT(row.at("seconds"), 0.0);
        row.erase("seconds");
      }
    }
    EXPECT_EQ(reports[0], reports[1]) << protocol;
  }
}

TEST(Evaluate, GoesOnFromItsRecords) {
  const test::TestFolder folder;
  const fs::path path = folder / "records.jsonl";
  const auto samples = some_samples(3, 1);
  EvalOptions options = quiet();
  options.records = path;
  evaluate(tiny_model(), {samples[0]}, specs({"streaming:window=64"}), options);
  const std::string first = read_file(path);
  const EvalReport all = evaluate(tiny_model(), samples, specs({"streaming:window=64"}), options);
  EXPECT_THAT(read_file(path), testing::StartsWith(first)) << "finished samples are not done again";
  const std::string whole = read_file(path);
  const EvalReport again = evaluate(tiny_model(), samples, specs({"streaming:window=64"}), options);
  EXPECT_EQ(read_file(path), whole);
  EXPECT_EQ(again.json(), all.json());
  options.protocol = Protocol::parse("decode-sparse");
  EXPECT_THROW(evaluate(tiny_model(), samples, specs({"streaming:window=64"}), options), InputError);
  options.protocol = Protocol::parse("context-dense");
  options.context.rope_factor = 2.0;
  EXPECT_THROW(evaluate(tiny_model(), samples, specs({"streaming:window=64"}), options), InputError)
      << "answers under another RoPE are of another model";
}

TEST(Evaluate, RowsInTheOrderOfClustersAnswerAlike) {
  const test::TestFolder folder;
  const fs::path path = folder / "records.jsonl";
  const auto samples = some_samples(4, 2);
  const std::string method = "kmeans:clusters=16,probes=4,window=64";
  EvalOptions options = quiet();
  const EvalReport plain = evaluate(tiny_model(), samples, specs({method}), options);
  options.order_rows = true;
  options.records = path;
  const EvalReport ordered = evaluate(tiny_model(), samples, specs({method}), options);
  ASSERT_EQ(ordered.rows.size(), 2u);
  for (std::size_t m = 0; m < 2; ++m) {
    EXPECT_EQ(ordered.rows[m].score, plain.rows[m].score);
    EXPECT_EQ(ordered.rows[m].selectivity, plain.rows[m].selectivity);
  }
  EXPECT_LT(ordered.rows[1].density, plain.rows[1].density) << "runs need no list of rows to be read";
  EXPECT_EQ(ordered.rows[1].agreement, plain.rows[1].agreement);
  EXPECT_THROW(evaluate(tiny_model(), samples, specs({method, "topk:k=8,window=64"}), options), InputError)
      << "rows lie in one order";
  options.records.clear();
  EXPECT_THROW(evaluate(tiny_model(), samples, specs({"topk:k=8,window=64"}), options), InputError)
      << "that has no clusters";
  options.records = path;
  options.order_rows = false;
  EXPECT_THROW(evaluate(tiny_model(), samples, specs({method}), options), InputError)
      << "answers of another order differ by rounding";
}

TEST(Evaluate, ReportHasTheFieldsOfTheInterface) {
  const Json json =
      evaluate(tiny_model(), some_samples(3, 1), specs({"streaming:window=64"}), quiet()).json();
  EXPECT_EQ(json.at("protocol"), "context-dense");
  const Json& row = json.at("results").at(1);
  EXPECT_EQ(row.at("attention"), "streaming:window=64");
  EXPECT_EQ(row.at("task"), "kv");
  EXPECT_EQ(row.at("tokens"), 1200);
  EXPECT_EQ(row.at("n"), 3);
  for (const char* key : {"score", "agreement", "density", "selectivity", "difference_low"})
    EXPECT_TRUE(row.at(key).is_number()) << key;
}

TEST(Evaluate, ATooLongSampleIsAnErrorWithNumbers) {
  auto samples = some_samples(1, 1);
  samples[0].context = std::make_shared<const std::string>(std::string(3000, 'x'));
  try {
    evaluate(tiny_model(), samples, specs({"streaming"}), quiet());
    FAIL();
  } catch (const InputError& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr("2048"));
  }
}

TEST(Evaluate, CtrlCStopsIt) {
  set_cancel(true);
  EXPECT_THROW(evaluate(tiny_model(), some_samples(1, 1), specs({"streaming"}), quiet()), Interrupted);
  set_cancel(false);
}

ProbeOptions small_probe() {
  ProbeOptions options;
  options.context.kv_type = DType::f32;
  options.last = 48;
  options.dense = {.sink = 1, .window = 15};
  options.top = 8;
  options.measured = 16;
  options.gap = 0.001;
  options.progress = Progress::Mode::quiet;
  return options;
}

std::string some_text() {
  return *some_samples(1, 1)[0].context;
}

TEST(Probe, SelectingEverythingIsFullAttention) {
  const ProbeReport report =
      probe(tiny_model(), some_text(), specs({"topk:k=100000", "topk:k=8"}), small_probe());
  ASSERT_EQ(report.rows.size(), 4u);
  const ProbeRow &full = report.rows[0], &streaming = report.rows[1], &all = report.rows[2],
                 &few = report.rows[3];
  EXPECT_EQ(full.attention, "full");
  EXPECT_TRUE(full.heads.empty());
  EXPECT_NEAR(all.loss, full.loss, 1e-5);
  EXPECT_EQ(all.heads.size(), 8u);
  EXPECT_NEAR(all.mean().mass, 1.0, 1e-6);
  EXPECT_LT(all.mean().error, 1e-4);
  EXPECT_EQ(all.mean().density, 1.0);
  EXPECT_EQ(few.mean().recall, 1.0) << "exact top 8 holds the top 8";
  EXPECT_EQ(streaming.mean().recall, 0.0);
  EXPECT_GT(few.mean().mass, streaming.mean().mass);
  EXPECT_LT(few.mean().error, streaming.mean().error);
  ASSERT_GT(report.gap_tokens, 0);
  EXPECT_NEAR(*full.recovered, 1.0, 1e-12);
  EXPECT_NEAR(*streaming.recovered, 0.0, 1e-12);
  EXPECT_NEAR(*all.recovered, 1.0, 1e-2);
}

TEST(Probe, DivergenceIsNothingWithAllKeysAndLessWithBetterOnes) {
  ProbeOptions options = small_probe();
  options.divergence = true;
  options.measured = 0;
  const ProbeReport report = probe(tiny_model(), some_text(), specs({"topk:k=100000", "topk:k=8"}), options);
  const ProbeRow &full = report.rows[0], &streaming = report.rows[1], &all = report.rows[2],
                 &few = report.rows[3];
  EXPECT_EQ(full.divergence, 0);
  EXPECT_NEAR(all.divergence, 0, 1e-8);
  EXPECT_GT(few.divergence, 0);
  EXPECT_GT(streaming.divergence, few.divergence);
  EXPECT_GT(streaming.gap_divergence, few.gap_divergence);
  EXPECT_NE(streaming.gap_divergence, streaming.divergence) << "some tokens need the past, others do not";
  EXPECT_TRUE(few.heads.empty()) << "nothing was looked at head by head";
  EXPECT_EQ(few.loss, probe(tiny_model(), some_text(), specs({"topk:k=8"}), small_probe()).rows[2].loss);
}

TEST(Probe, StepsOfTokensThatAreLookedIntoChangeNothing) {
  ProbeOptions options = small_probe();
  const ProbeReport dense = probe(tiny_model(), some_text(), specs({"topk:k=8"}), options);
  options.measured = 2;  // so far apart that each is a step of its own
  const ProbeReport apart = probe(tiny_model(), some_text(), specs({"topk:k=8"}), options);
  options.errors_alone = true;
  const ProbeReport errors = probe(tiny_model(), some_text(), specs({"topk:k=8"}), options);
  for (std::size_t row = 0; row < dense.rows.size(); ++row) {
    EXPECT_NEAR(apart.rows[row].loss, dense.rows[row].loss, 1e-5);
    EXPECT_EQ(errors.rows[row].loss, apart.rows[row].loss);
    ASSERT_EQ(errors.rows[row].heads.size(), apart.rows[row].heads.size());
    for (std::size_t h = 0; h < errors.rows[row].heads.size(); ++h) {
      const HeadMeasure &alone = errors.rows[row].heads[h], &all = apart.rows[row].heads[h];
      EXPECT_EQ(alone.error, all.error);
      EXPECT_EQ(alone.density, all.density);
      EXPECT_EQ(alone.read, all.read);
      EXPECT_GT(all.mass, 0);
      EXPECT_EQ(alone.mass, 0);
    }
  }
  EXPECT_NE(apart.rows[2].heads[0].error, dense.rows[2].heads[0].error) << "2 tokens are not 16";
}

TEST(Probe, LooksAtTokensThatNeedThePastWhereThereAreAny) {
  ProbeOptions options = small_probe();
  options.measured = 1000;
  const ProbeReport all = probe(tiny_model(), some_text(), specs({"topk:k=2", "topk:k=100000"}), options);
  options.of_far_past = true;
  const ProbeReport far = probe(tiny_model(), some_text(), specs({"topk:k=2", "topk:k=100000"}), options);
  ASSERT_GT(far.gap_tokens, 0);
  ASSERT_LT(far.gap_tokens, options.last);
  EXPECT_NE(far.rows[1].heads[0].error, all.rows[1].heads[0].error) << "fewer tokens are looked at";
  EXPECT_NEAR(far.rows[2].loss, all.rows[2].loss, 1e-5);
  options.gap = 1e9;
  const ProbeReport none = probe(tiny_model(), some_text(), specs({"topk:k=2"}), options);
  EXPECT_EQ(none.gap_tokens, 0);
  EXPECT_EQ(none.rows[2].heads[0].error, all.rows[2].heads[0].error) << "then all are looked at";
}

TEST(Probe, KeysAndValuesInFewBitsCostWhatTheirTypeCosts) {
  ProbeOptions options = small_probe();
  EXPECT_FALSE(probe(tiny_model(), some_text(), {}, options).kv_error) << "of 32 bits nothing is said";
  double error_of_q8 = 0;
  for (const DType type : {DType::q8, DType::q4}) {
    options.context.kv_type = DType::f16;
    const ProbeReport wide = probe(tiny_model(), some_text(), {}, options);
    options.context.kv_type = type;
    const ProbeReport report = probe(tiny_model(), some_text(), {}, options);
    ASSERT_TRUE(report.kv_error);
    EXPECT_EQ(report.kv_error->loss, wide.rows.front().loss);
    EXPECT_GT(report.kv_error->logits, 2 * error_of_q8);
    EXPECT_LT(report.kv_error->logits, 0.5);
    EXPECT_GT(report.kv_error->agreement, 0.5);
    EXPECT_EQ(report.json().at("kv_error").at("kv_type"), name_of(type));
    EXPECT_THAT(report.table(false), testing::HasSubstr(std::string(name_of(type)) + " beside f16"));
    error_of_q8 = report.kv_error->logits;
  }
}

// Who keeps rows as they come loses no more than the method that is being measured.
TEST(Probe, RowsAreHandedOverAsTheyAreMeasured) {
  const std::vector<NamedSpec> asked = specs({"topk:k=64", "topk:k=8", "topk:k=4"});
  std::vector<Json> rows;
  const auto keep = [&](const ProbeReport& so_far) { rows.push_back(so_far.json_of(so_far.rows.back())); };
  const Json whole = probe(tiny_model(), some_text(), asked, small_probe(), keep).json();
  ASSERT_EQ(rows.size(), 4u) << "streaming first";
  for (std::size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i], whole.at("results").at(i + 1));
  std::size_t kept = 0;
  EXPECT_THROW(probe(tiny_model(), some_text(), asked, small_probe(),
                     [&](const ProbeReport& so_far) {
                       kept = so_far.rows.size();
                       set_cancel(kept == 3);
                     }),
               Interrupted);
  set_cancel(false);
  EXPECT_EQ(kept, 3u);
}

TEST(Probe, AllMethodsGetTheSameSinkAndWindow) {
  const ProbeReport report =
      probe(tiny_model(), some_text(),
            specs({"streaming:window=500", "random:fraction=0.1,sink=9,window=100"}), small_probe());
  ASSERT_EQ(report.rows.size(), 3u) << "streaming with another window is the same streaming here";
  EXPECT_NEAR(report.rows[1].mean().density, 16.0 / 1170.0, 0.002);
}

TEST(Probe, HeadsOfDenseLayersCountAsExact) {
  const ProbeReport report =
      probe(tiny_model(), some_text(), specs({"streaming", "streaming:dense_layers=1"}), small_probe());
  ASSERT_EQ(report.rows.size(), 3u);
  EXPECT_THAT(report.row_of, testing::ElementsAre(1, 2));
  const ProbeRow &sparse = report.rows[1], &half = report.rows[2];
  EXPECT_EQ(sparse.dense_heads, 0);
  EXPECT_EQ(half.dense_heads, 4);
  ASSERT_EQ(half.heads.size(), 4u);
  double error = 0, mass = 4, recall = 4, density = 4;
  for (const HeadMeasure& h : half.heads) {
    error += h.error;
    mass += h.mass;
    recall += h.recall;
    density += h.density;
  }
  EXPECT_NEAR(half.mean().error, error / 8, 1e-12);
  EXPECT_NEAR(half.mean().mass, mass / 8, 1e-12);
  EXPECT_NEAR(half.mean().recall, recall / 8, 1e-12);
  EXPECT_NEAR(half.mean().density, density / 8, 1e-12);
  EXPECT_NEAR(half.mean().density, half.density, 0.02) << "over the same heads as the bytes read";
}

TEST(TuneTarget, ErrorIsOverAllHeadsThoseOfDenseLayersToo) {
  ProbeRow row;
  row.heads = {{.layer = 1, .head = 0, .error = 0.4}, {.layer = 1, .head = 1, .error = 0.4}};
  EXPECT_NEAR(TuneTarget::parse("error=0.1").measure(row, {}), 0.4, 1e-12);
  row.dense_heads = 6;
  EXPECT_NEAR(TuneTarget::parse("error=0.1").measure(row, {}), 0.2, 1e-12);
}

TEST(Probe, AGroupReadsWhatAnyOfItsHeadsAttends) {
  ProbeOptions options = small_probe();
  options.measured = options.last;
  const ProbeReport report =
      probe(tiny_model(), some_text(), specs({"topk:k=4", "kmeans:clusters=8"}), options);
  for (std::size_t m = 2; m < report.rows.size(); ++m) {
    const ProbeRow& row = report.rows[m];
    double read = 0, attended = 0;
    for (const HeadMeasure& head : row.heads) {
      EXPECT_GE(head.read, head.density - 1e-12) << row.attention;
      EXPECT_LE(head.read, 2 * head.density + 1e-12) << "a group of two";
      read += head.read / static_cast<double>(row.heads.size());
      attended += head.density / static_cast<double>(row.heads.size());
    }
    EXPECT_NEAR(read + row.selector_share, row.density, 0.02 * row.density) << "the bytes that are counted";
    if (m == 2) {
      EXPECT_GT(read, 1.02 * attended) << "topk chooses for each head";
    } else {
      EXPECT_NEAR(read, attended, 1e-9) << "kmeans for the group";
    }
  }
}

TEST(Probe, JsonHasEveryHead) {
  const Json json = probe(tiny_model(), some_text(), specs({"topk:k=4"}), small_probe()).json();
  EXPECT_EQ(json.at("results").at(2).at("heads").size(), 8u);
  EXPECT_EQ(json.at("window"), 15);
  EXPECT_TRUE(json.at("results").at(2).at("recovered").is_number());
}

TEST(Probe, AShortTextIsAnErrorWithNumbers) {
  EXPECT_THROW(probe(tiny_model(), "too short", specs({"topk:k=4"}), small_probe()), InputError);
}

}  // namespace
}  // namespace lode
