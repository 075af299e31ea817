// SPDX-License-Identifier: Apache-2.0
// Squeezed Attention on the shipped model: thresholds found over all layers answer as before after saving and
// loading, whatever the chunk, and in a context that was appended to.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

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
