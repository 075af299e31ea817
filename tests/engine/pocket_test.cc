// SPDX-License-Identifier: Apache-2.0
// The shipped model end to end: the tokens of transformers, answers that survive saving, sources that hold
// the answer.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "base/file.h"
#include "base/json.h"
#include "base/text.h"
#include "io/safetensors.h"
#include "kernels/kernels.h"
#include "lodestone/engine.h"
#include "lodestone/error.h"
#include "lodestone/sources.h"
#include "support/lisbon.h"
#include "support/source_dir.h"

namespace lode {
namespace {

namespace fs = std::filesystem;

const fs::path kPocket = source_dir() / "models/pocket";

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
  const std::filesystem::path path = source_dir() / "tests/golden/pocket_greedy.json";
  const Json golden = parse_json(read_file(path), path.string());
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
  for (const DType kv_type : {DType::f32, DType::f16, DType::bf16, DType::q8, DType::q4}) {
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
  const std::string text = test::lisbon_text(0, 120);
  set_source(context, read_document(text, "lisbon.txt", {}), std::ssize(model->tokenizer().prefix()));
  context.prefill(model->tokenizer().encode(text, Tokenizer::Bos::as_template));
  context.build_indexes();
  const auto prompt = [&](const std::string& question) {
    return model->tokenizer().encode("\n\nQuestion: " + question + "\nAnswer:", Tokenizer::Bos::none);
  };
  const MethodId method = context.attach(parse_spec("topk:k=32,window=64"));
  SourceMass sources;
  context.generate(prompt("What is the entry code of the Lisbon archive?"), method,
                   {.max_new_tokens = 8, .stop = {"\n"}}, &sources);
  context.roll_back(context.indexed_tokens());
  const auto passages = SourceFinder(context, prompt("What does the text say?")).find(sources, method, 3);
  ASSERT_FALSE(passages.empty());
  EXPECT_NE(passages[0].cited_text.find("48213"), std::string::npos) << passages[0].cited_text;
  EXPECT_EQ(passages[0].document_title, "lisbon.txt");
  EXPECT_EQ(text.substr(static_cast<std::size_t>(passages[0].start_char),
                        static_cast<std::size_t>(passages[0].end_char - passages[0].start_char)),
            passages[0].cited_text);
}

TEST(Pocket, SourcesAreSentencesNotBlanksNorHalvesOfCharacters) {
  const auto model = Model::load(kPocket);
  Context context(model, {.max_tokens = 2048});
  std::string text = "This is how it began. A bell rang.\n";
  for (int i = 0; i < 100; ++i) text += "漢字";
  text += ". And so it ends.\n\n \n";
  set_source(context, read_document(text, "text", {}), std::ssize(model->tokenizer().prefix()));
  context.prefill(model->tokenizer().encode(text, Tokenizer::Bos::as_template));
  context.build_indexes();
  SourceMass sources;
  sources.mass.assign(static_cast<std::size_t>(context.tokens()), 1.0f);
  for (const std::size_t heavy : {40, 41, 42, 43, 44, 45}) {
    sources.mass[heavy] = 9.0f;
    for (const std::size_t count : {std::size_t{1}, std::size_t{9}}) {
      double weights = 0;
      for (const Citation& c : cite(context, sources, {}, count)) {
        weights += c.weight;
        EXPECT_NE(c.cited_text.find_first_not_of(" \n"), std::string::npos);
        EXPECT_EQ(c.cited_text.find_first_of("\n"), std::string::npos) << c.cited_text;
        EXPECT_EQ(invalid_utf8(c.cited_text), std::string::npos) << c.cited_text;
      }
      EXPECT_NEAR(weights, count == 9 ? 1.0 : 0.5, count == 9 ? 1e-6 : 0.5);
    }
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
