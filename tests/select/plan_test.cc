// SPDX-License-Identifier: Apache-2.0
// Plans: a head chooses what its method alone would choose for it, whichever heads are beside it; files that
// do not fit are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "select/made_for_length.h"
#include "select/methods.h"
#include "select/plan/file.h"
#include "support/forged_index.h"
#include "support/hash_file.h"
#include "support/refusal.h"
#include "support/saap.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

constexpr WorldShape kShape = {.kv_heads = 3, .group = 2, .d = 64, .dense = {2, 20}};

Plan plan_of(const std::vector<std::string>& heads) {
  return {.model_fingerprint = "model",
          .note = "by hand",
          .chosen_on = "",
          .dense = kShape.dense,
          .heads = std::vector<std::vector<std::string>>(4, heads)};
}

/// World's queries of the context, then its index.
void index(Selector& selector, World& world) {
  tell(selector, world, world.tokens());
  selector.build(0, world.store().layer(0));
}

// Artefacts, seeds and captured queries are those of the head's number in the layer.
TEST(Plan, EachHeadChoosesWhatItsMethodAloneWouldChoose) {
  ThreadPool pool(2);
  World world(kShape);
  const LayerGeometry geometry = world.geometry(pool);
  const TestFolder folder;
  world.write(260);
  const std::string saap = "saap:probes=3,weights=" + SaapFiles::of({.kv_heads = 3}),
                    hash = "hash:budget=9,weights=" + write_hash_file(geometry, {}).string(),
                    per_head = "hyperplanes:budget=9,per=query-head";
  const std::vector<std::vector<std::string>> plans = {
      {"full", "streaming", "topk:k=5"},
      {saap, hash, saap},
      {"kmeans:clusters=9,probes=2", saap, "kmeans:clusters=9,probes=2"},
      {"retrieval:k=6,beam=8,warm=off", per_head, "retrieval:k=6,beam=8,warm=off"},
      {"random:fraction=9", hash, hash}};
  for (const auto& heads : plans) {
    write_plan(folder / "plan.json", plan_of(heads));
    const auto planned = make("plan:" + (folder / "plan.json").string(), geometry);
    index(*planned, world);
    const std::vector<FarSet> found = select(*planned, world.block(240, 12), geometry);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      const auto alone = heads[h] == "full" ? make_full_selector(geometry) : make(heads[h], geometry);
      index(*alone, world);
      const std::vector<FarSet> expected = select(*alone, world.block(240, 12), geometry);
      for (std::size_t q = 0; q < expected.size(); ++q) {
        if (q % 6 / 2 == h) {
          EXPECT_EQ(found[q], expected[q]) << heads[h] << " in head " << h << ", query " << q;
        }
      }
    }
  }
}

TEST(Plan, TheFileSaysTheDensePartsUnlessTheSpecDoes) {
  const TestFolder folder;
  const std::string path = (folder / "plan.json").string();
  write_plan(path, plan_of({"full", "full", "full"}));
  EXPECT_EQ(parse_spec("plan:" + path).dense.window, 20);
  EXPECT_EQ(parse_spec("plan:" + path).str(), "plan:file=" + path);
  EXPECT_EQ(parse_spec("plan:" + path + ",window=64").dense.window, 64);
  EXPECT_EQ(parse_spec(parse_spec("plan:" + path).str()).dense.sink, 2);
}

TEST(Plan, SaysWhatItWasChosenOnAndWhatIsUnlikeIt) {
  ThreadPool pool(1);
  World world(kShape);
  const TestFolder folder;
  const std::string path = (folder / "plan.json").string();
  const auto selector_of = [&](const std::string& chosen_on) {
    Plan plan = plan_of({"full", "topk:k=5", "full"});
    plan.chosen_on = chosen_on;
    write_plan(path, plan);
    EXPECT_EQ(read_plan(path).chosen_on, chosen_on);
    return make("plan:" + path, world.geometry(pool));
  };
  const std::string texts = R"({"kv_type":"f16","longest":400,"prompts":2,"tokens":500})";
  const auto like = selector_of(texts);
  EXPECT_EQ(like->notice(0), "");
  EXPECT_EQ(remark_on_length(like.get(), 800), "");
  EXPECT_THAT(remark_on_length(like.get(), 801),
              testing::AllOf(testing::HasSubstr("801"), testing::HasSubstr("400")));
  EXPECT_THAT(selector_of(R"({"rope_fingerprint":"another"})")->notice(0),
              testing::HasSubstr("another RoPE"));
  const auto silent = selector_of("");
  EXPECT_EQ(silent->notice(0) + remark_on_length(silent.get(), 1 << 20), "");
}

TEST(Plan, FilesThatDoNotFitAreRefused) {
  ThreadPool pool(1);
  World world(kShape);
  const LayerGeometry geometry = world.geometry(pool);
  const TestFolder folder;
  const std::string path = (folder / "plan.json").string();
  const auto refused = [&](std::string_view what, const std::string& text) {
    folder.write("plan.json", text);
    expect_refused(what, [&] { make("plan:" + path, geometry); });
  };
  expect_refused("plan", [] { parse_spec("plan"); });
  expect_refused("/nowhere/plan.json", [] { parse_spec("plan:/nowhere/plan.json"); });
  refused("plan.json", "{");
  refused("lodestone_plan", "{}");
  refused("lodestone_plan", R"({"lodestone_plan": 2})");
  const std::string head = R"({"lodestone_plan": 1, "model_fingerprint": "model", "sink": 1, "window": 9, )";
  refused("layers", head + R"("layers": []})");
  refused("layer 0", head + R"("layers": [[]]})");
  refused("layer 0", head + R"("layers": ["full"]})");
  refused("layer 0", head + R"("layers": [[1]]})");
  refused("layer 1", head + R"("layers": [["full", "full"], ["full"]]})");
  refused("nosuch", head + R"("layers": [["nosuch"]]})");
  // A plan that names itself is not read for ever.
  refused("plan inside", head + R"("layers": [["plan:)" + path + R"("]]})");
  refused("probes", head + R"("layers": [["kmeans:probes=0"]]})");
  refused("layer 3", head + R"("layers": [["full", "full", "full"]]})");
  refused("layers of 2",
          head + R"("layers": [["full","full"],["full","full"],["full","full"],["full","full"]]})");
  Plan other = plan_of({"full", "full", "full"});
  other.model_fingerprint = "another";
  write_plan(path, other);
  expect_refused("another", [&] { make("plan:" + path, geometry); });
}

TEST(Plan, AFileIsAPlanAsFarAsItsReaderTakesIt) {
  const TestFolder folder;
  const std::string plan =
      "{\"lodestone_plan\": 1, \"model_fingerprint\": \"model\", \"sink\": 1, \"window\": 9, "
      "\"layers\": [[\"full\"]]}";
  for (const char* space : {"", "\n", " \t\r\n"}) {
    folder.write("plan.json", space + plan);
    EXPECT_NO_THROW(read_plan(folder / "plan.json"));
    EXPECT_TRUE(is_plan(folder / "plan.json"));
  }
  for (const std::string text :
       {"", " ", "[]", "{}", "LODE\"lodestone_plan\"", "x {\"lodestone_plan\": 1}"}) {
    folder.write("plan.json", text);
    EXPECT_FALSE(is_plan(folder / "plan.json")) << text;
  }
}

TEST(Plan, AnIndexOfAnotherPlanIsRefused) {
  ThreadPool pool(2);
  World world(kShape);
  const LayerGeometry geometry = world.geometry(pool);
  const TestFolder folder;
  world.write(200);
  const std::string path = (folder / "plan.json").string();
  write_plan(path, plan_of({"kmeans:clusters=9,probes=2", "full", "full"}));
  const auto before = make("plan:" + path, geometry);
  before->build(0, world.store().layer(0));
  const IndexSections saved = saved_sections(*before);
  load_sections(*make("plan:" + path, geometry), saved, world.store().layer(0));
  write_plan(path, plan_of({"full", "kmeans:clusters=9,probes=2", "full"}));
  expect_refused("plan file has changed",
                 [&] { load_sections(*make("plan:" + path, geometry), saved, world.store().layer(0)); });
  write_plan(path, plan_of({"kmeans:clusters=9,probes=2", "full", "full"}));
  LayerGeometry wider = geometry;
  wider.dense.window += 1;
  expect_refused("plan file has changed",
                 [&] { load_sections(*make("plan:" + path, wider), saved, world.store().layer(0)); });
}

}  // namespace
}  // namespace lode::test
