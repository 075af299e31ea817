// SPDX-License-Identifier: Apache-2.0
// Several texts that were read apart, joined: what is equal to one reading of all is so to rounding, what is not is
// measured, and what cannot be joined is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/file.h"
#include "base/json.h"
#include "base/rng.h"
#include "engine/context.h"
#include "engine/join/join_texts.h"
#include "eval/tiny_model.h"
#include "lodestone/documents.h"
#include "lodestone/sources.h"
#include "support/compare.h"
#include "support/refusal.h"

namespace lode {
namespace {

namespace fs = std::filesystem;

std::vector<TokenId> encoded(const Model& model, const std::string& text) {
  return model.tokenizer().encode(text, Tokenizer::Bos::as_template);
}

Context read(const std::shared_ptr<const Model>& model, const std::string& text, const std::string& name,
             ContextOptions options = {}) {
  Context context(model, options);
  set_source(context, read_document(text, name, {}), std::ssize(model->tokenizer().prefix()));
  context.prefill(encoded(*model, text));
  context.build_indexes();
  return context;
}

/// Rows [begin, end) of a layer's keys or values as they are stored.
std::vector<std::vector<std::byte>> rows_of(const Context& c, int layer, KvStore::Part part,
                                            std::int64_t begin, std::int64_t end) {
  std::vector<std::vector<std::byte>> heads;
  const Context::Impl& impl = c.impl();
  for (int head = 0; head < impl.config.kv_heads; ++head) {
    const auto bytes = impl.kv.rows(layer, head, part);
    const auto row = std::ssize(bytes) / c.tokens();
    heads.emplace_back(bytes.begin() + begin * row, bytes.begin() + end * row);
  }
  return heads;
}

std::vector<float> floats_of(const std::vector<std::vector<std::byte>>& heads) {
  std::vector<float> all;
  for (const auto& bytes : heads) {
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), bytes.size());
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

class Joined : public testing::Test {
 protected:
  std::vector<fs::path> saved(const std::shared_ptr<const Model>& model,
                              const std::vector<std::string>& texts, ContextOptions options) {
    std::vector<fs::path> paths;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      paths.push_back(folder_ / ("part" + std::to_string(i) + ".lode"));
      const Context context = read(model, texts[i], "part" + std::to_string(i) + ".txt", options);
      context.save(paths.back(), texts[i]);
    }
    return paths;
  }
  /// The tiny model with another config.json.
  std::shared_ptr<const Model> model_with(const Json& changes) const {
    const fs::path place = folder_ / "model";
    fs::create_directories(place);
    for (const char* name : {"tokenizer.json", "model.safetensors"})
      fs::copy_file(tiny_model()->path() / name, place / name, fs::copy_options::overwrite_existing);
    Json config = Json::parse(read_file(tiny_model()->path() / "config.json"));
    config.update(changes);
    std::ofstream(place / "config.json") << config.dump();
    return Model::load(place, 2);
  }

  const test::TestFolder folder_;
  const std::vector<std::string> texts_ = {"The lamp of the harbour was lit by the widow. ",
                                           "The ship came in at noon. ", "The bell rang thrice."};
  const std::string whole_ = texts_[0] + texts_[1] + texts_[2];
  const ContextOptions exact_ = {.kv_type = DType::f32, .max_tokens = 600};
};

TEST_F(Joined, FirstLayersRowsAreThoseOfOneReading) {
  const auto model = tiny_model();
  const Context one = read(model, whole_, "whole.txt", exact_);
  const JoinedTexts joined = join_texts(saved(model, texts_, exact_), model, {});
  ASSERT_TRUE(std::ranges::equal(joined.context.token_ids(), one.token_ids()));
  const auto rows = [&](const Context& c, KvStore::Part part) {
    return floats_of(rows_of(c, 0, part, 0, one.tokens()));
  };
  EXPECT_LT(relative_difference(rows(joined.context, KvStore::Part::v), rows(one, KvStore::Part::v)), 1e-5f);
  EXPECT_LT(relative_difference(rows(joined.context, KvStore::Part::k), rows(one, KvStore::Part::k)), 1e-5f);
  EXPECT_GT(relative_difference(floats_of(rows_of(joined.context, 1, KvStore::Part::v, 0, one.tokens())),
                                floats_of(rows_of(one, 1, KvStore::Part::v, 0, one.tokens()))),
            1e-3f)
      << "texts that were read apart have not attended to each other";
  ASSERT_EQ(joined.drift.size(), 2u);
  for (const double drift : joined.drift) EXPECT_GT(drift, 1e-3);
}

TEST_F(Joined, TheFirstTextKeepsItsBits) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16, DType::q8}) {
    const ContextOptions options = {.kv_type = type, .max_tokens = 600};
    const auto paths = saved(tiny_model(), texts_, options);
    const Context first = Context::load(paths.front(), tiny_model(), {});
    const JoinedTexts joined = join_texts(paths, tiny_model(), {});
    for (int layer = 0; layer < 2; ++layer)
      for (const KvStore::Part part : {KvStore::Part::k, KvStore::Part::v})
        EXPECT_EQ(rows_of(joined.context, layer, part, 0, first.tokens()),
                  rows_of(first, layer, part, 0, first.tokens()));
  }
}

TEST_F(Joined, IndexesAreBuiltOverAllKeys) {
  JoinedTexts joined = join_texts(saved(tiny_model(), texts_, exact_), tiny_model(), {});
  Context& c = joined.context;
  const std::vector<TokenId> question = {40, 50, 60, 70};
  const std::int64_t tokens = c.tokens();
  const std::vector<float> full = c.forward(question, kDense);
  c.roll_back(tokens);
  for (const char* spec :
       {"topk:k=100000,window=20", "kmeans:clusters=8,probes=8,window=20", "quest:budget=1,window=20"}) {
    const MethodId method = c.attach(parse_spec(spec));
    c.build_indexes();
    EXPECT_EQ(c.forward(question, method), full) << spec;
    c.roll_back(tokens);
  }
  test::expect_refused("learns from the prefill", [&] { c.attach(parse_spec("h2o")); });
}

TEST_F(Joined, PassagesAreFoundInTheirFiles) {
  const auto paths = saved(tiny_model(), {"Same start. One.\nTwo.\n", "Same start. Three.\n"}, exact_);
  const JoinedTexts joined = join_texts(paths, tiny_model(), {});
  const SourceText& source = source_of(joined.context);
  EXPECT_EQ(source.text, "Same start. One.\nTwo.\nSame start. Three.\n");
  ASSERT_EQ(source.files.size(), 2u);
  const Place place = place_of(source, source.text.find("Three"));
  EXPECT_EQ(place.file->path, "part1.txt");
  EXPECT_EQ(place.line, 1);
  EXPECT_EQ(place.character, 12);
  EXPECT_EQ(place_of(source, source.text.find("Two")).line, 2);
}

TEST_F(Joined, FilesThatAreCalledAlikeAreToldApart) {
  const auto paths = saved(tiny_model(), {"One."}, exact_);
  const fs::path copy = folder_ / "copy.lode";
  fs::copy_file(paths.front(), copy);
  const JoinedTexts joined = join_texts(std::vector<fs::path>{paths.front(), copy}, tiny_model(), {});
  const auto& files = source_of(joined.context).files;
  ASSERT_EQ(files.size(), 2u);
  EXPECT_EQ(files[0].path, paths.front().string() + ": part0.txt");
  EXPECT_EQ(files[1].path, copy.string() + ": part0.txt");
}

TEST_F(Joined, WhatCannotBeJoinedIsRefused) {
  const auto model = tiny_model();
  const auto refused = [&](const char* what, const std::vector<fs::path>& paths,
                           ContextOptions options = {}) {
    test::expect_refused(what, [&] { join_texts(paths, model, options); });
  };
  auto paths = saved(model, texts_, exact_);
  refused("fewer than 90 tokens", paths, {.max_tokens = 90});
  read(model, "Other.", "other.txt", {.kv_type = DType::f16}).save(paths[1], "Other.");
  refused("expected keys and values in f32", paths);
  read(model, "Other.", "other.txt", {.kv_type = DType::f32, .rope_factor = 2.0}).save(paths[1], "Other.");
  refused("rotated by the same frequencies", paths);
  paths.pop_back();
  paths[1] = folder_ / "none.lode";
  refused("none.lode", paths);
}

TEST_F(Joined, FrequenciesThatFollowTheLengthAreRefused) {
  const auto model =
      model_with({{"rope_scaling",
                   {{"rope_type", "dynamic"}, {"factor", 4.0}, {"original_max_position_embeddings", 60}}}});
  const ContextOptions options = {.kv_type = DType::f32, .max_tokens = 64};
  const auto paths = saved(model, {texts_[0], texts_[1] + "More."}, options);
  test::expect_refused("'dynamic'", [&] { join_texts(paths, model, {}); });
}

/// Texts of facts about cities between other sentences, and the questions about them.
struct Facts {
  std::string text;
  std::vector<std::pair<std::string, std::string>> questions;  // and the answer
};
Facts facts_about(std::span<const char* const> cities, std::uint64_t seed) {
  const std::array<const char*, 6> who = {"The carter", "A merchant",      "The widow",
                                          "My brother", "The old captain", "A clerk"};
  const std::array<const char*, 6> what = {"went down to the mill", "spoke of the weather",
                                           "wrote a long letter",   "waited at the quay",
                                           "counted the barrels",   "remembered the winter"};
  const std::array<const char*, 4> when = {"in the grey of the morning", "before noon",
                                           "when the bell had rung", "in the rain"};
  Rng rng(seed);
  Facts facts;
  for (const char* city : cities) {
    for (int n = 0; n < 8; ++n)
      facts.text +=
          std::string(who[rng.below(6)]) + " " + what[rng.below(6)] + " " + when[rng.below(4)] + ". ";
    std::string code;
    for (int digit = 0; digit < 5; ++digit) code += static_cast<char>('1' + rng.below(9));
    facts.text += "The entry code of the " + std::string(city) + " archive is " + code + ". ";
    facts.questions.emplace_back("What is the entry code of the " + std::string(city) + " archive?", code);
  }
  return facts;
}

constexpr std::array<const char*, 20> kCities = {
    "Lisbon", "Cairo", "Madrid", "Vienna", "Dublin", "Prague", "Athens", "Warsaw", "Berlin", "London",
    "Paris",  "Rome",  "Geneva", "Boston", "Moscow", "Tokyo",  "Lima",   "Oslo",   "Havana", "Delhi"};

struct Comparison {
  double worst_logit = 0, divergence = 0;  ///< of a question's last token: max |difference|, KL in nats
  std::string answer, joined_answer;
};

Comparison compare(Context& one, Context& joined, const std::vector<TokenId>& question) {
  const GenerateOptions options = {.max_new_tokens = 12, .stop = {"\n"}};
  Comparison c;
  const auto last = [&](Context& context) {
    std::vector<float> logits = context.forward(question, kDense);
    context.roll_back(context.indexed_tokens());
    return std::vector<float>(logits.end() - context.model().config().vocab, logits.end());
  };
  const std::vector<float> a = last(one), b = last(joined);
  const auto log_sum = [](const std::vector<float>& x) {
    const float most = *std::max_element(x.begin(), x.end());
    double sum = 0;
    for (const float value : x) sum += std::exp(value - most);
    return most + std::log(sum);
  };
  const double sum_a = log_sum(a), sum_b = log_sum(b);
  for (std::size_t i = 0; i < a.size(); ++i) {
    c.worst_logit = std::max(c.worst_logit, std::fabs(double{a[i]} - b[i]));
    c.divergence += std::exp(a[i] - sum_a) * ((a[i] - sum_a) - (b[i] - sum_b));
  }
  const auto answer = [&](Context& context) {
    const std::string text = context.generate(question, kDense, options).text;
    context.roll_back(context.indexed_tokens());
    return text;
  };
  c.answer = answer(one);
  c.joined_answer = answer(joined);
  return c;
}

TEST_F(Joined, PocketAnswersAboutBothTextsAsAfterOneReading) {
  const char* const named = std::getenv("LODESTONE_JOIN_MODEL");  // to measure another
  const auto model =
      Model::load(named != nullptr ? fs::path(named) : fs::path(LODESTONE_SOURCE_DIR) / "models/pocket");
  const Facts a = facts_about(std::span(kCities).first(10), 1),
              b = facts_about(std::span(kCities).last(10), 2);
  const ContextOptions options = {.max_tokens = 6000};
  JoinedTexts joined = join_texts(saved(model, {a.text, b.text}, options), model, {});
  Context one = read(model, a.text + b.text, "whole.txt", options);
  int right = 0, joined_right = 0, same = 0;
  double divergence = 0, worst = 0;
  for (const Facts* facts : {&a, &b})
    for (const auto& [question, code] : facts->questions) {
      const auto asked = model->tokenizer().encode(
          "\n\nNow answer the questions about the text above.\n\nQuestion: " + question + "\nAnswer:",
          Tokenizer::Bos::none);
      const Comparison c = compare(one, joined.context, asked);
      right += c.answer.find(code) != std::string::npos;
      joined_right += c.joined_answer.find(code) != std::string::npos;
      same += c.answer == c.joined_answer;
      divergence += c.divergence;
      worst = std::max(worst, c.worst_logit);
    }
  std::printf(
      "tokens %ld, drift %.3f; of 20 answers right: %d after one reading, %d joined, %d the same; "
      "logits: %.4f nats on average, %.2f at most\n",
      static_cast<long>(one.tokens()), joined.drift.front(), right, joined_right, same, divergence / 20,
      worst);
  if (named != nullptr) return;
  EXPECT_GE(right, 18);
  EXPECT_GE(joined_right, right - 1);
}

TEST_F(Joined, KeysOfFourBitsAreRefused) {
  const auto model = Model::load(fs::path(LODESTONE_SOURCE_DIR) / "models/pocket");
  const auto paths = saved(model, {texts_[0], texts_[1]}, {.kv_type = DType::q4, .max_tokens = 600});
  test::expect_refused("q4", [&] { join_texts(paths, model, {}); });
}

}  // namespace
}  // namespace lode
