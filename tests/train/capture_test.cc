// SPDX-License-Identifier: Apache-2.0
// What a capture hands out: every token of a prompt once, before and after RoPE, as the cache has it, and the
// same whatever the chunks.
#include "lab/train/capture.h"

#include <gtest/gtest.h>

#include <cmath>

#include "eval/tiny_model.h"
#include "kernels/kernels.h"
#include "kernels/rope.h"
#include "kv/store.h"
#include "lodestone/error.h"

namespace lode::test {
namespace {

std::string text_of(std::size_t bytes) {
  std::string text;
  Rng rng(8);
  while (text.size() < bytes) text += static_cast<char>('a' + rng.below(26));
  return text;
}

TEST(Prompts, CutATextWithoutLoss) {
  const auto model = tiny_model();
  const std::string text = text_of(1000);
  const std::vector<Prompt> prompts = cut_into_prompts(*model, "book", text, 301);
  ASSERT_EQ(prompts.size(), 3u);  // 300 bytes each behind a BOS; the last 100 are too few
  std::vector<TokenId> joined;
  for (const Prompt& prompt : prompts) {
    EXPECT_EQ(prompt.source, "book");
    EXPECT_EQ(prompt.tokens.size(), 301u);
    EXPECT_EQ(prompt.tokens[0], 0);
    joined.insert(joined.end(), prompt.tokens.begin() + 1, prompt.tokens.end());
  }
  EXPECT_EQ(model->tokenizer().decode(joined), text.substr(0, 900));
  EXPECT_EQ(cut_into_prompts(*model, "book", text, 335).size(), 3u);
  EXPECT_EQ(cut_into_prompts(*model, "book", "ab", 300).size(), 1u);
  EXPECT_TRUE(cut_into_prompts(*model, "book", "", 300).empty());
}

struct Seen {
  std::vector<float> q_unrotated, k_unrotated, q, k, v;  // of layer 1, tokens in order
  int layers = 0;
};

Seen read(std::int64_t chunk, const Prompt& prompt, Capture* reused = nullptr) {
  Capture own(tiny_model(), {.kv_type = DType::f32, .max_tokens = 400, .chunk = chunk});
  Capture& capture = reused != nullptr ? *reused : own;
  Seen seen;
  std::vector<std::int64_t> next(2, 0);
  capture.read(prompt, [&](int layer, const KvWrite& write) {
    EXPECT_EQ(write.begin, next[static_cast<std::size_t>(layer)]);
    EXPECT_EQ(write.phase, Phase::context);
    EXPECT_EQ(std::ssize(write.q), write.tokens * 4 * 8);
    EXPECT_EQ(std::ssize(write.v), write.tokens * 2 * 8);
    next[static_cast<std::size_t>(layer)] += write.tokens;
    seen.layers = std::max(seen.layers, layer + 1);
    if (layer != 1) return;
    const auto take = [](std::vector<float>& to, std::span<const float> from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    take(seen.q_unrotated, write.q_unrotated);
    take(seen.k_unrotated, write.k_unrotated);
    take(seen.q, write.q);
    take(seen.k, write.k);
    take(seen.v, write.v);
  });
  EXPECT_EQ(next[0], std::ssize(prompt.tokens));
  EXPECT_EQ(next[1], std::ssize(prompt.tokens));
  const KvLayer kv = capture.kv().layer(1);
  EXPECT_EQ(kv.tokens, std::ssize(prompt.tokens));
  for (std::int64_t t = 0; t < kv.tokens; ++t) {
    for (int h = 0; h < 2; ++h) {
      const auto* stored = reinterpret_cast<const float*>(kv.heads[static_cast<std::size_t>(h)].k) + t * 8;
      std::vector<float> rotated(seen.k_unrotated.begin() + (t * 2 + h) * 8,
                                 seen.k_unrotated.begin() + (t * 2 + h + 1) * 8);
      capture.rope().rotate(rotated, static_cast<Position>(t));
      for (int i = 0; i < 8; ++i) {
        EXPECT_EQ(stored[i], seen.k[static_cast<std::size_t>((t * 2 + h) * 8 + i)]);
        EXPECT_EQ(stored[i], rotated[static_cast<std::size_t>(i)]);
      }
    }
  }
  return seen;
}

TEST(Capture, HandsOutEveryTokenOnceAsTheCacheHasIt) {
  const std::vector<Prompt> prompts = cut_into_prompts(*tiny_model(), "book", text_of(600), 301);
  ASSERT_EQ(prompts.size(), 2u);
  const Seen whole = read(512, prompts[0]), cut = read(37, prompts[0]);
  EXPECT_EQ(whole.layers, 2);
  ASSERT_EQ(whole.q.size(), cut.q.size());
  for (std::size_t i = 0; i < whole.q.size(); ++i) EXPECT_NEAR(whole.q[i], cut.q[i], 1e-4);
  // A capture that has read another prompt reads this one as a new one does.
  Capture reused(tiny_model(), {.kv_type = DType::f32, .max_tokens = 400, .chunk = 512});
  read(512, prompts[1], &reused);
  EXPECT_EQ(read(512, prompts[0], &reused).q, whole.q);
}

TEST(Capture, OutlivesASinkThatThrows) {
  const std::vector<Prompt> prompts = cut_into_prompts(*tiny_model(), "book", text_of(300), 301);
  Capture capture(tiny_model(), {.kv_type = DType::f32, .max_tokens = 400, .chunk = 64});
  EXPECT_THROW(capture.read(prompts[0], [](int, const KvWrite&) { throw InputError("no more"); }),
               InputError);
  read(64, prompts[0], &capture);
}

}  // namespace
}  // namespace lode::test
