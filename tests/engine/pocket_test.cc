// SPDX-License-Identifier: Apache-2.0
// The shipped model end to end: the tokens of transformers, answers that survive saving, sources that hold
// the answer.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "base/file.h"
#include "base/json.h"
#include "engine/sources.h"
#include "io/safetensors.h"
#include "kernels/kernels.h"
#include "lodestone/engine.h"
#include "lodestone/error.h"
#include "support/lisbon.h"

namespace lode {
namespace {

namespace fs = std::filesystem;

const fs::path kPocket = fs::path(LODESTONE_SOURCE_DIR) / "models/pocket";

/// A folder that is removed with all that is in it.
class TemporaryFolder {
 public:
  TemporaryFolder() : path_(fs::temp_directory_path() / ("lodestone-test-" + std::to_string(getpid()))) {
    fs::create_directories(path_);
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  fs::path operator/(const char* name) const { return path_ / name; }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

/// The shipped model with its weights widened to float32, so that every product is computed in float32 on any
/// machine.
void write_f32_copy(const fs::path& folder) {
  for (const char* name :
       {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}) {
    fs::copy_file(kPocket / name, folder / name);
  }
  const MappedFile file(kPocket / "model.safetensors");
  const auto tensors = parse_safetensors(file.bytes(), "model.safetensors");
  std::vector<std::vector<float>> widened;
  std::vector<TensorToWrite> out;
  widened.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    std::vector<float>& values = widened.emplace_back(static_cast<std::size_t>(tensor.elements()));
    kernels().widen(tensor.bytes.data(), float_type(tensor, name, "model"), tensor.elements(), values.data());
    out.push_back(
        {.name = name, .type = DType::f32, .shape = tensor.shape, .bytes = std::as_bytes(std::span(values))});
  }
  write_safetensors(folder / "model.safetensors", out, {});
}

TEST(Pocket, GreedyTokensEqualTransformersOver64Steps) {
  const std::string path = LODESTONE_SOURCE_DIR "/tests/golden/pocket_greedy.json";
  const Json golden = parse_json(read_file(path), path);
  const TemporaryFolder folder;
  write_f32_copy(folder.path());
  const auto model = Model::load(folder.path());
  const auto prompt =
      model->tokenizer().encode(golden["prompt"].get<std::string>(), Tokenizer::Bos::as_template);
  EXPECT_EQ(prompt, golden["prompt_ids"].get<std::vector<TokenId>>());
  Context context(model, {.kv_type = DType::f32, .max_tokens = 1024});
  const Generation g = context.generate(prompt, kDense, {.max_new_tokens = 64, .stop_at_eos = false});
  EXPECT_EQ(g.tokens, golden["greedy_ids"].get<std::vector<TokenId>>());
}

TEST(Pocket, AnswersAfterSavingAndLoadingAsBefore) {
  const TemporaryFolder folder;
  const auto model = Model::load(kPocket);
  const auto question = model->tokenizer().encode(test::kLisbonQuestion, Tokenizer::Bos::none);
  const Spec spec = parse_spec("kmeans:clusters=64,probes=16,window=64");
  const GenerateOptions options = {.max_new_tokens = 16, .stop = {"\n"}};
  for (const DType kv_type : {DType::f32, DType::f16, DType::bf16, DType::q8}) {
    Context context(model, {.kv_type = kv_type, .max_tokens = 4096});
    const MethodId method = context.attach(spec);
    context.prefill(model->tokenizer().encode(test::lisbon_text(0, 120), Tokenizer::Bos::as_template));
    context.build_indexes();
    context.save(folder / "context.lode", test::lisbon_text(0, 120));
    const Generation before = context.generate(question, method, options);

    Context loaded = Context::load(folder / "context.lode", model, {});
    EXPECT_EQ(loaded.tokens(), context.indexed_tokens());
    const Generation after = loaded.generate(question, loaded.attach(spec), options);
    EXPECT_EQ(after.tokens, before.tokens) << name_of(kv_type);
    EXPECT_EQ(after.text, test::kLisbonAnswer) << name_of(kv_type);
    EXPECT_LT(after.work.density(), 1.0);
  }
}

TEST(Pocket, TheHeaviestSourceHoldsTheAnswer) {
  const auto model = Model::load(kPocket);
  Context context(model, {.max_tokens = 4096});
  context.prefill(model->tokenizer().encode(test::lisbon_text(0, 120), Tokenizer::Bos::as_template));
  context.build_indexes();
  const auto question = model->tokenizer().encode(
      "\n\nQuestion: What is the entry code of the Lisbon archive?\nAnswer:", Tokenizer::Bos::none);
  SourceMass sources;
  context.generate(question, context.attach(parse_spec("topk:k=32,window=64")),
                   {.max_new_tokens = 8, .stop = {"\n"}}, &sources);
  const auto passages = top_passages(context, sources, 3);
  ASSERT_FALSE(passages.empty());
  EXPECT_NE(passages[0].text.find("48213"), std::string::npos) << passages[0].text;
}

TEST(Pocket, SourcesAreSentencesNotBlanksNorHalvesOfCharacters) {
  const auto model = Model::load(kPocket);
  Context context(model, {.max_tokens = 2048});
  std::string text = "This is how it began. A bell rang.\n";
  for (int i = 0; i < 100; ++i) text += "漢字";
  text += ". And so it ends.\n\n \n";
  context.prefill(model->tokenizer().encode(text, Tokenizer::Bos::as_template));
  context.build_indexes();
  SourceMass sources;
  sources.mass.assign(static_cast<std::size_t>(context.tokens()), 1.0f);
  for (const std::size_t heavy : {40, 41, 42, 43, 44, 45}) {
    sources.mass[heavy] = 9.0f;
    const auto passages = top_passages(context, sources, 9);
    ASSERT_EQ(passages.size(), 4u);
    double weights = 0;
    for (const Passage& p : passages) {
      weights += p.weight;
      EXPECT_NE(p.text.find_first_not_of(" \n"), std::string::npos);
      EXPECT_EQ(p.text.find("\uFFFD"), std::string::npos) << p.text;
    }
    EXPECT_NEAR(weights, 1.0, 1e-6);
    EXPECT_EQ(std::max_element(passages.begin(), passages.end(),
                               [](const Passage& a, const Passage& b) { return a.token_end < b.token_end; })
                  ->token_end,
              context.tokens());
    sources.mass[heavy] = 1.0f;
  }
}

TEST(Pocket, AContextOfAnotherModelIsRefusedByName) {
  const TemporaryFolder folder;
  const auto model = Model::load(kPocket);
  Context context(model, {.max_tokens = 256});
  context.prefill(model->tokenizer().encode("A short text.", Tokenizer::Bos::as_template));
  context.build_indexes();
  context.save(folder / "context.lode", "A short text.");
  fs::create_directories(folder / "other");
  write_f32_copy(folder / "other");  // other bytes, so another fingerprint
  try {
    Context::load(folder / "context.lode", Model::load(folder / "other"), {});
    FAIL() << "a context of another model was taken";
  } catch (const InputError& e) {
    EXPECT_NE(std::string(e.what()).find("another model"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace lode
