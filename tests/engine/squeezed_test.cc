// SPDX-License-Identifier: Apache-2.0
// Squeezed Attention on the shipped model: thresholds found over all layers answer as before after saving and
// loading, whatever the chunk, and in a context that was appended to.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/file.h"
#include "engine/prefill_log.h"
#include "lodestone/engine.h"
#include "support/lisbon.h"
#include "support/source_dir.h"

namespace lode {
namespace {

const std::filesystem::path kPocket = source_dir() / "models/pocket";

class SqueezedOnPocket : public testing::Test {
 protected:
  std::vector<TokenId> question() const {
    return model_->tokenizer().encode(test::kLisbonQuestion, Tokenizer::Bos::none);
  }
  void prefill(Context& context, const std::string& text) const {
    const bool first = context.tokens() == 0;
    context.prefill(
        model_->tokenizer().encode(text, first ? Tokenizer::Bos::as_template : Tokenizer::Bos::none));
    context.build_indexes();
  }

  std::shared_ptr<const Model> model_ = Model::load(kPocket);
  const GenerateOptions options_ = {.max_new_tokens = 16, .stop = {"\n"}};
};

TEST_F(SqueezedOnPocket, AnswersAfterLoadingAsBeforeWhateverTheChunk) {
  const auto path =
      std::filesystem::temp_directory_path() / ("squeezed-" + std::to_string(getpid()) + ".lode");
  // One sentence over and over: by the share of keys alone, spreads give all of it more than the one fact.
  for (const char* text : {"squeezed:sparsity=0.7,spread=off", "squeezed:sparsity=0.9,spread=off",
                           "squeezed:levels=2,mass=0.95,spread=off", "ideal:sink=0,window=100"}) {
    const Spec spec = parse_spec(text);
    Context context(model_, {.max_tokens = 4096});
    const MethodId method = context.attach(spec);
    prefill(context, test::lisbon_text(0, 120));
    context.save(path, test::lisbon_text(0, 120));
    const Generation before = context.generate(question(), method, options_);
    EXPECT_EQ(before.text, test::kLisbonAnswer) << text;
    EXPECT_LT(before.work.selectivity(), 1.0) << text;

    Context loaded = Context::load(path, model_, {.chunk = 7});
    const Generation after = loaded.generate(question(), loaded.attach(spec), options_);
    EXPECT_EQ(after.tokens, before.tokens) << text;
    EXPECT_EQ(after.work.far_keys, before.work.far_keys) << text;
  }
  std::filesystem::remove(path);
}

/// Wherever it was ended: the queries that thresholds are found on are kept beside the keys.
TEST_F(SqueezedOnPocket, AReadingThatWasEndedGoesOnToTheSameFile) {
  const std::string text = test::lisbon_text(0, 160), id = std::to_string(getpid());
  const auto folder = std::filesystem::temp_directory_path();
  const auto whole = folder / ("whole-" + id + ".lode"), ended = folder / ("ended-" + id + ".lode");
  const std::vector<TokenId> tokens = model_->tokenizer().encode(text, Tokenizer::Bos::as_template);
  ASSERT_GT(std::ssize(tokens), 3000);  // so that several chunks thin the sample
  const auto context_with = [&](const std::string& spec) {
    auto context = std::make_unique<Context>(model_, ContextOptions{.max_tokens = 4096, .chunk = 128});
    context->attach(parse_spec(spec));
    return context;
  };
  /// Reads up to `end` tokens and is gone; or all, and saves.
  const auto read_on = [&](const std::string& spec, std::int64_t end) {
    const auto context = context_with(spec);
    PrefillLog log(PrefillLog::beside(ended), *context);
    const std::int64_t begin = log.restore(*context, tokens);
    context->prefill(
        std::span(tokens).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
    log.save(*context);
    if (end < std::ssize(tokens)) return begin;
    context->build_indexes();
    context->save(ended, text);
    log.remove();
    return begin;
  };
  const std::string spec = "squeezed:sparsity=0.8";
  const auto undisturbed = context_with(spec);
  undisturbed->prefill(tokens);
  undisturbed->build_indexes();
  undisturbed->save(whole, text);
  EXPECT_EQ(read_on(spec, 256), 0);
  EXPECT_EQ(read_on(spec, 2176), 256);
  EXPECT_EQ(read_on(spec, 2944), 2176);
  EXPECT_EQ(read_on(spec, std::ssize(tokens)), 2944);
  EXPECT_EQ(read_file(ended), read_file(whole));
  // Of a log that another method made nothing was heard: enough of the text is read again to hear it.
  read_on("kmeans", 2944);
  EXPECT_LE(read_on(spec, std::ssize(tokens)), std::ssize(tokens) - 2048);
  for (const auto& path : {whole, ended}) std::filesystem::remove(path);
}

TEST_F(SqueezedOnPocket, AnswersFromWhatWasAppended) {
  Context context(model_, {.max_tokens = 4096});
  const MethodId method = context.attach(parse_spec("squeezed:sparsity=0.8"));
  prefill(context, test::lisbon_text(0, 50));
  prefill(context, test::lisbon_text(50, 120));
  const Generation answer = context.generate(question(), method, options_);
  EXPECT_EQ(answer.text, test::kLisbonAnswer);
  EXPECT_LT(answer.work.selectivity(), 1.0);
}

}  // namespace
}  // namespace lode
