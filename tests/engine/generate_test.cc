// SPDX-License-Identifier: Apache-2.0
// The text of an answer: what its tokens say, however it ends, and the same piece by piece.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/context.h"
#include "eval/tiny_model.h"

namespace lode {
namespace {

class GenerateTest : public testing::Test {
 protected:
  Generation answer(TokenId first, const GenerateOptions& options, std::vector<TokenId> eos = {}) const {
    Context context(model_, {.max_tokens = 256});
    context.impl().config.eos = std::move(eos);
    context.prefill(std::vector<TokenId>{0, first, 40, 50});
    context.build_indexes();
    return context.generate(std::vector<TokenId>{60}, kDense, options);
  }
  std::string text_of(std::span<const TokenId> tokens) const { return model_->tokenizer().decode(tokens); }

  const std::shared_ptr<const Model> model_ = tiny_model();
};

// The model's tokens are bytes, so that answers end inside of characters.
TEST_F(GenerateTest, AnEndTokenInsideOfACharacterLosesNoneOfIt) {
  int ended_inside = 0;
  for (TokenId first = 2; first < 258; ++first) {
    const Generation free = answer(first, {.max_new_tokens = 6});
    ASSERT_EQ(free.tokens.size(), 6u);
    EXPECT_EQ(free.text, text_of(free.tokens));
    const TokenId end = free.tokens.back();
    const auto before = std::find(free.tokens.begin(), free.tokens.end(), end);
    std::string streamed;
    const Generation ended = answer(
        first, {.max_new_tokens = 6, .on_text = [&](std::string_view piece) { streamed += piece; }}, {end});
    const std::span<const TokenId> said(free.tokens.begin(), before);
    EXPECT_EQ(ended.text, text_of(said)) << first;
    EXPECT_EQ(streamed, ended.text);
    EXPECT_TRUE(ended.stopped);
    ended_inside += ended.text.ends_with("\xEF\xBF\xBD") ? 1 : 0;
  }
  EXPECT_GT(ended_inside, 0);
}

TEST_F(GenerateTest, AStopStringCutsWhatIsBehindItAndIsNeverShown) {
  for (TokenId first = 2; first < 60; ++first) {
    const Generation free = answer(first, {.max_new_tokens = 12});
    if (free.text.size() < 6) continue;
    const std::string stop = free.text.substr(3, 2);
    std::string streamed;
    const Generation cut =
        answer(first, {.max_new_tokens = 12, .stop = {stop}, .on_text = [&](std::string_view piece) {
                         streamed += piece;
                       }});
    EXPECT_EQ(cut.text, free.text.substr(0, free.text.find(stop))) << first;
    EXPECT_EQ(streamed, cut.text);
  }
}

// Two stop strings that end with the same token: the answer ends where the first of them begins, whichever was named first.
TEST_F(GenerateTest, OfStopStringsThatEndTogetherTheOneThatBeginsFirstCuts) {
  int apart = 0;
  for (TokenId first = 2; first < 60; ++first) {
    const Generation free = answer(first, {.max_new_tokens = 12});
    if (free.text.size() < 6) continue;
    const std::string shorter = free.text.substr(4, 1), longer = free.text.substr(2, 3);
    const std::size_t cut = free.text.find(longer);
    if (free.text.find(shorter) != cut + 2) continue;  // it is there earlier, and ends the answer by itself
    for (const std::vector<std::string>& stop : {std::vector{shorter, longer}, {longer, shorter}})
      EXPECT_EQ(answer(first, {.max_new_tokens = 12, .stop = stop}).text, free.text.substr(0, cut)) << first;
    ++apart;
  }
  EXPECT_GT(apart, 0);
}

// A tokenizer without one of the bytes that the model would say.
TEST_F(GenerateTest, IdsThatNoTokenHasAreNeverChosen) {
  TokenId wanted = 0;
  for (TokenId first = 2; wanted < 2 || wanted > 256; ++first) {
    ASSERT_LT(first, 258);
    wanted = answer(first, {.max_new_tokens = 1}).tokens.front();
  }
  const test::TestFolder folder;
  for (const char* name : {"config.json", "model.safetensors"})
    std::filesystem::copy_file(model_->path() / name, folder / name);
  Json tokenizer = Json::parse(test::bytes_of_file(model_->path() / "tokenizer.json"));
  Json& vocab = tokenizer.at("model").at("vocab");
  const auto found =
      std::find_if(vocab.begin(), vocab.end(), [&](const Json& id) { return id.get<TokenId>() == wanted; });
  ASSERT_NE(found, vocab.end());
  vocab.erase(found);
  folder.write("tokenizer.json", tokenizer.dump());
  const auto model = Model::load(folder.path());
  ASSERT_EQ(model->tokenizer().gaps().size(), 1u);
  EXPECT_EQ(model->tokenizer().gaps()[0], wanted);
  for (const double temperature : {0.0, 5.0}) {
    for (TokenId first = 2; first < 258; ++first) {
      if (first == wanted) continue;
      Context context(model, {.max_tokens = 64});
      context.prefill(std::vector<TokenId>{0, first, 40, 50});
      context.build_indexes();
      const Generation said = context.generate(
          std::vector<TokenId>{60}, kDense,
          {.max_new_tokens = 8,
           .sampling = {.temperature = temperature, .seed = static_cast<std::uint64_t>(first)}});
      EXPECT_EQ(std::count(said.tokens.begin(), said.tokens.end(), wanted), 0) << first;
    }
  }
}

}  // namespace
}  // namespace lode
