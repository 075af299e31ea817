// SPDX-License-Identifier: Apache-2.0
// What a saved context keeps besides keys: how they were rotated, and its seed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>

#include "base/file.h"
#include "engine/context.h"
#include "engine/next_token.h"
#include "eval/tiny_model.h"
#include "io/container.h"
#include "lodestone/error.h"
#include "model/sampler.h"
#include "support/refusal.h"

namespace lode {
namespace {

class ContextFileTest : public testing::Test {
 protected:
  ContextFileTest() { std::filesystem::copy(tiny_model()->path(), folder_.path() / "model"); }

  /// The tiny model with other lines in config.json.
  std::shared_ptr<const Model> model_with(const Json& changes) const {
    Json config = Json::parse(read_file(tiny_model()->path() / "config.json"));
    config.update(changes);
    std::ofstream(folder_.path() / "model" / "config.json") << config.dump();
    return Model::load(folder_.path() / "model", 1);
  }
  std::string file(const char* name) const { return (folder_.path() / name).string(); }

  const test::TestFolder folder_;
  const std::vector<TokenId> text_ = [] {
    std::vector<TokenId> ids(300);
    std::iota(ids.begin(), ids.end(), TokenId{0});
    for (TokenId& id : ids) id = 2 + id * 7 % 256;
    return ids;
  }();
  const std::vector<TokenId> question_ = {40, 50, 60};
};

TEST_F(ContextFileTest, KeysOfDynamicScalingKeepTheirFrequenciesHoweverOftenSaved) {
  const auto model =
      model_with({{"rope_scaling",
                   {{"rope_type", "dynamic"}, {"factor", 4.0}, {"original_max_position_embeddings", 128}}}});
  Context made(model, {.max_tokens = 400});
  made.prefill(text_);
  made.build_indexes();
  made.save(file("first"), "");
  const std::vector<float> wanted = made.forward(question_, kDense);
  Context::load(file("first"), model, {.max_tokens = 2048}).save(file("second"), "");
  Context loaded = Context::load(file("second"), model, {});
  EXPECT_EQ(loaded.forward(question_, kDense), wanted);
}

/// The same sections with other settings, under checksums that fit.
void rewrite_meta(const std::string& from, const std::string& to, const Json& changes) {
  const ContainerReader file(from);
  ContainerWriter out(to);
  for (const SectionInfo& section : file.sections()) {
    const auto bytes = file.bytes(section.name);
    if (section.name != "meta") {
      out.add(section.name, bytes);
      continue;
    }
    Json meta = parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, "meta");
    meta.update(changes);
    const std::string text = meta.dump();
    out.add("meta", std::as_bytes(std::span(text)));
  }
  out.finish();
}

TEST_F(ContextFileTest, RopeFactorsThatShrinkTheContextAreRefused) {
  Context made(tiny_model(), {.max_tokens = 400});
  made.prefill(text_);
  made.build_indexes();
  made.save(file("made"), "");
  rewrite_meta(file("made"), file("same"), {{"rope_factor", 1.0}});
  EXPECT_NO_THROW(Context::load(file("same"), tiny_model(), {}));
  for (const double factor : {1e-9, 1e-300, 0.5, 0.999}) {
    rewrite_meta(file("made"), file("forged"), {{"rope_factor", factor}});
    test::expect_refused("'rope_factor'", [&] { Context::load(file("forged"), tiny_model(), {}); });
  }
  for (const double factor : {1e-9, -4.0, 0.0, 1025.0, std::nan(""), std::numeric_limits<double>::infinity()})
    test::expect_refused("--rope-factor", [&] { Context(tiny_model(), {.rope_factor = factor}); });
}

TEST_F(ContextFileTest, LessRoomThanItWasIndexedWithIsKeptToAndChangesNothingElse) {
  Context made(tiny_model(), {.max_tokens = 400});
  made.prefill(text_);
  made.build_indexes();
  made.save(file("roomy"), "");
  Context loaded = Context::load(file("roomy"), tiny_model(), {.max_tokens = 304});
  EXPECT_EQ(loaded.forward(question_, kDense), made.forward(question_, kDense));
  EXPECT_THROW(loaded.forward(question_, kDense), InputError);  // 303 + 3
  EXPECT_NO_THROW(made.forward(question_, kDense));
}

TEST_F(ContextFileTest, AContextThatGrewPastTheRoomItWasIndexedWithIsReadAgain) {
  Context made(tiny_model(), {.max_tokens = 310});
  made.prefill(text_);
  made.build_indexes();
  made.save(file("tight"), "");
  Context grown = Context::load(file("tight"), tiny_model(), {.max_tokens = 800});
  grown.prefill(text_);
  grown.build_indexes();
  grown.save(file("grown"), "");
  const std::vector<float> wanted = grown.forward(question_, kDense);
  EXPECT_EQ(Context::load(file("grown"), tiny_model(), {.max_tokens = 800}).forward(question_, kDense),
            wanted);
  EXPECT_EQ(Context::load(file("grown"), tiny_model(), {}).tokens(), 600);
}

TEST_F(ContextFileTest, SeedsHave64Bits) {
  Context made(tiny_model(), {.max_tokens = 400, .seed = 0x9000000000000001});
  made.prefill(text_);
  made.build_indexes();
  made.save(file("seed"), "");
  EXPECT_EQ(Context::load(file("seed"), tiny_model(), {}).impl().options.seed, 0x9000000000000001);
}

TEST_F(ContextFileTest, AFactorOfTheUsersNeverReplacesAModelsOwnScaling) {
  const auto scaled = model_with({{"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}}});
  const auto logits = [&](const ContextOptions& options) {
    Context context(scaled, options);
    context.prefill(text_);
    return context.forward(question_, kDense);
  };
  EXPECT_EQ(logits({.max_tokens = 400, .rope_factor = 1.0}), logits({.max_tokens = 400}));
  EXPECT_THROW(logits({.max_tokens = 400, .rope_factor = 2.0}), InputError);
}

TEST_F(ContextFileTest, WhatAFactorStretchesMustBeAsLong) {
  const auto model = model_with(Json::object());
  Context made(model, {.max_tokens = 400, .rope_factor = 2.0});
  made.prefill(text_);
  made.build_indexes();
  made.save(file("stretched"), "");
  EXPECT_NO_THROW(Context::load(file("stretched"), model, {}));
  EXPECT_THROW(Context::load(file("stretched"), model_with({{"max_position_embeddings", 1024}}), {}),
               InputError);
}

TEST_F(ContextFileTest, IdsBehindTheTokenizersAreNeverChosen) {
  const auto model = model_with(Json::object());
  std::vector<float> logits(258 + 40, 0.0f);  // as if padded: logits that would win
  std::fill(logits.begin() + 258, logits.end(), 1e30f);
  Sampler sampler({});
  EXPECT_LT(next_token(*model, sampler, logits), 258);
}

}  // namespace
}  // namespace lode
