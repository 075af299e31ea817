// SPDX-License-Identifier: Apache-2.0
// Models written as GGUF files and read again: they answer as they did, and random ones of every type run.
#include "model/gguf_export.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/file.h"
#include "base/json.h"
#include "base/threads.h"
#include "io/gguf.h"
#include "kernels/dequantise.h"
#include "lodestone/engine.h"
#include "lodestone/error.h"
#include "model/config.h"
#include "support/family_folder.h"
#include "support/gguf_file.h"
#include "support/refusal.h"
#include "support/source_dir.h"

namespace lode {
namespace {

const std::filesystem::path kPocket = source_dir() / "models/pocket";
constexpr std::string_view kText =
    "The ferry came in late that evening, and the harbour master wrote 48213 into his book.";

class GgufExportTest : public testing::Test {
 protected:
  std::filesystem::path path(const std::string& name) const {
    return std::filesystem::path(testing::TempDir()) / (name + std::to_string(getpid()) + ".gguf");
  }
  /// Logits of a short text, kept in float32.
  static std::vector<float> logits_of(const std::shared_ptr<const Model>& model,
                                      std::span<const TokenId> ids) {
    Context context(model, {.kv_type = DType::f32, .max_tokens = 64});
    return context.forward(ids, kDense);
  }
  static double relative_error(std::span<const float> x, std::span<const float> y) {
    double error = 0, size = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
      error += std::pow(double{x[i]} - double{y[i]}, 2);
      size += std::pow(double{x[i]}, 2);
    }
    return std::sqrt(error / size);
  }
  ThreadPool pool_{2};
};

TEST_F(GgufExportTest, AModelAnswersAsItDid) {
  const auto original = Model::load(kPocket, 2);
  const std::vector<TokenId> ids = original->tokenizer().encode(kText, Tokenizer::Bos::as_template);
  const std::vector<float> expected = logits_of(original, ids);
  // From a folder, and from the file that came of it.
  const auto f16 = path("f16"), q8 = path("q8"), again = path("again");
  const MatrixTypes of_f16 = export_gguf(kPocket, f16, {.type = WeightType::f16}, pool_);
  EXPECT_EQ(of_f16, (MatrixTypes{{"F16", 43}}));
  export_gguf(kPocket, q8, {.type = WeightType::q8_0}, pool_);
  export_gguf(f16, again, {.type = WeightType::q8_0}, pool_);
  for (const auto& [file, most] : {std::pair{f16, 1e-3}, {q8, 3e-2}, {again, 3e-2}}) {
    const auto model = Model::load(file, 2);
    EXPECT_EQ(model->tokenizer().encode(kText, Tokenizer::Bos::as_template), ids);
    EXPECT_EQ(model->config().head_dim, original->config().head_dim);
    EXPECT_EQ(model->config().rope_theta, original->config().rope_theta);
    EXPECT_LT(relative_error(expected, logits_of(model, ids)), most) << file;
  }
  for (const auto& file : {f16, q8, again}) std::filesystem::remove(file);
}

TEST_F(GgufExportTest, AFileOfAnotherAlignmentIsReadAgain) {
  const auto from = path("aligned"), to = path("usual");
  for (const std::size_t more : {0, 32}) {  // one of them ends the head where only the usual alignment does
    test::GgufBuilder b{.data = std::string(256, '\1'), .alignment = 64};
    b.number("general.alignment", 64).text("general.name", std::string(1 + more, 'n'));
    b.tensor("a.weight", {32}, 0, 0).tensor("b.weight", {32}, 0, 128);
    std::ofstream(from, std::ios::binary) << b.file();
    export_gguf(from, to, {.type = WeightType::f32}, pool_);
    const GgufModel model = GgufModel::open(to);
    for (const auto& [name, tensor] : model.tensors)
      EXPECT_EQ(tensor.bytes.back(), std::byte{1}) << name << " " << more;
    EXPECT_EQ(model.tensors.at("a.weight").bytes.front(), std::byte{1}) << more;
  }
  for (const auto& file : {from, to}) std::filesystem::remove(file);
}

TEST_F(GgufExportTest, RandomModelsOfEveryTypeComeCloseToFloat32Activations) {
  for (const WeightLayout& layout : weight_layouts()) {
    const auto file = path(std::string(layout.name));
    export_random_gguf("L2q4kv2d64", kPocket, file, {.type = layout.type}, pool_);
    const auto model = Model::load(file, 2);
    const std::vector<TokenId> ids = model->tokenizer().encode(kText, Tokenizer::Bos::as_template);
    const std::vector<float> rounded = logits_of(model, ids);
    setenv("LODESTONE_ACTIVATIONS", "f32", 1);
    const std::vector<float> exact = logits_of(model, ids);
    unsetenv("LODESTONE_ACTIVATIONS");
    EXPECT_LT(relative_error(exact, rounded), 2e-2) << layout.name;
    std::filesystem::remove(file);
  }
}

/// A tokenizer of 64 letters in the form that GGUF files can say.
Json letters_with_blanks() {
  Json json = letters_tokenizer();
  json["model"]["byte_fallback"] = json["model"]["fuse_unk"] = true;
  json["normalizer"] = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\xe2\x96\x81"}};
  return json;
}

/// A tiny model of a family, written as a file and read again.
class FamilyExport : public GgufExportTest, public testing::WithParamInterface<std::string> {
 protected:
  FamilyExport() { std::ofstream(folder_.path() / "tokenizer.json") << letters_with_blanks().dump(); }
  ~FamilyExport() override { std::filesystem::remove(file_); }

  FamilyFolder folder_{GetParam()};
  std::filesystem::path file_ = path(GetParam());
};

/// GGUF has no words for these: windows of Mistral and Qwen2, and gpt-oss with another limit than 7.
const std::set<std::string> kNotWritten = {"mistral-window", "qwen2-window", "gpt-oss"};

TEST_P(FamilyExport, AnswersAsItsFolder) {
  if (kNotWritten.contains(GetParam())) {
    test::expect_refused("no words for",
                         [&] { export_gguf(folder_.path(), file_, {.type = WeightType::f32}, pool_); });
    EXPECT_FALSE(std::filesystem::exists(file_));
    return;
  }
  const FamilyTokens golden(GetParam());
  const std::vector<float> expected = logits_of(folder_.load(), golden.ids);
  // Eight bits make some tokens choose other experts.
  for (const auto& [type, most] : {std::pair{WeightType::f32, 1e-5}, {WeightType::q8_0, 0.5}}) {
    export_gguf(folder_.path(), file_, {.type = type}, pool_);
    EXPECT_LT(relative_error(expected, logits_of(Model::load(file_, 2), golden.ids)), most) << name_of(type);
  }
}

std::vector<double> numbers_of(const GgufMetadata& m, const std::string& key) {
  const GgufValue& value = m.values().find(key)->second;
  if (value.type == GgufType::array) {
    const auto list = m.integers(key, 0, 1 << 30);
    return {list.begin(), list.end()};
  }
  return {m.number(key, -1e30, 1e30)};
}

/// All that the golden file says of the model, and no tensor more or less.
TEST_P(FamilyExport, SaysWhatConvertersSay) {
  const auto path = kFamilies / GetParam() / "model.gguf";
  if (!std::filesystem::exists(path) || GetParam() == "qwen3-vl" || GetParam() == "glm")
    GTEST_SKIP() << "no golden file, or one of another architecture, or of the first models' joined matrices";
  export_gguf(folder_.path(), file_, {.type = WeightType::f32}, pool_);
  const GgufModel golden = GgufModel::open(path), written = GgufModel::open(file_);
  const GgufMetadata& m = written.metadata();
  EXPECT_EQ(m.text("general.architecture"), golden.metadata().text("general.architecture"));
  for (const auto& [key, value] : golden.metadata().values()) {
    if (key.starts_with("general.") || key == "qwen35moe.feed_forward_length") continue;  // of no layer
    const bool nothing = value.type == GgufType::f32 && golden.metadata().number(key, -1e30, 1e30) == 0;
    if (nothing && !m.has(key)) continue;
    ASSERT_TRUE(m.has(key)) << key;
    if (value.type == GgufType::string) {
      EXPECT_EQ(m.text(key), golden.metadata().text(key)) << key;
      continue;
    }
    const auto found = numbers_of(m, key), wanted = numbers_of(golden.metadata(), key);
    ASSERT_EQ(found.size(), wanted.size()) << key;
    for (std::size_t i = 0; i < found.size(); ++i)
      EXPECT_NEAR(found[i], wanted[i], 1e-6 * std::abs(wanted[i])) << key;
  }
  EXPECT_EQ(written.tensors.size(), golden.tensors.size());
  for (const auto& [name, tensor] : golden.tensors) {
    ASSERT_TRUE(written.tensors.contains(name)) << name;
    const GgufTensor& found = written.tensors.at(name);
    EXPECT_EQ(found.type, tensor.type) << name;
    EXPECT_EQ(found.shape, tensor.shape) << name;
    ASSERT_EQ(found.bytes.size(), tensor.bytes.size()) << name;
    const auto floats = [&](const GgufTensor& t) {
      std::vector<float> x(t.bytes.size() / bytes_of(t.type, layout_of(t.type).block) *
                           static_cast<std::size_t>(layout_of(t.type).block));
      dequantise(t.type, t.bytes.data(), std::ssize(x), x.data());
      return x;
    };
    EXPECT_LT(relative_error(floats(tensor), floats(found)), 1e-6) << name;
  }
}

std::vector<std::string> family_names() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(kFamilies))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

INSTANTIATE_TEST_SUITE_P(Models, FamilyExport, testing::ValuesIn(family_names()), [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

TEST_F(GgufExportTest, ExpertsInMxfp4StayAsTheyAre) {
  const FamilyFolder folder("gpt-oss-mxfp4");
  std::ofstream(folder.path() / "tokenizer.json") << letters_with_blanks().dump();
  const auto file = path("mxfp4");
  export_gguf(folder.path(), file, {.type = WeightType::f16}, pool_);
  const GgufModel written = GgufModel::open(file),
                  golden = GgufModel::open(kFamilies / "gpt-oss-mxfp4/model.gguf");
  for (const char* part : {"gate", "up", "down"}) {
    const std::string name = std::string("blk.1.ffn_") + part + "_exps.weight";
    const GgufTensor &is = written.tensors.at(name), &wanted = golden.tensors.at(name);
    EXPECT_EQ(is.type, WeightType::mxfp4);
    EXPECT_TRUE(std::ranges::equal(is.bytes, wanted.bytes)) << name;
  }
  std::filesystem::remove(file);
}

TEST_F(GgufExportTest, WhatFilesHaveNoWordsForIsSaid) {
  const auto refused = [&](std::string_view what, const char* family, const char* key, Json value) {
    const FamilyFolder folder(family);
    std::ofstream(folder.path() / "tokenizer.json") << letters_with_blanks().dump();
    const auto config = folder.path() / "config.json";
    Json json = parse_json(read_file(config), "config.json");
    json[key] = std::move(value);
    std::filesystem::remove(config);
    std::ofstream(config) << json.dump();
    test::expect_refused(what,
                         [&] { export_gguf(folder.path(), path("x"), {.type = WeightType::f32}, pool_); });
  };
  refused("a Qwen3 with a kind of RoPE scaling", "qwen3", "rope_parameters",
          {{"rope_type", "dynamic"}, {"rope_theta", 10000.0}, {"factor", 2.0}});
  refused("layers without RoPE", "smollm3", "no_rope_layers", {1, 0, 1, 1});
  refused("sliding windows", "mixtral", "sliding_window", 8);
  refused("feed-forward", "llama", "hidden_act", "gelu_pytorch_tanh");
  refused("multipliers", "gemma3", "query_pre_attn_scalar", 24);
  EXPECT_FALSE(std::filesystem::exists(path("x")));
}

TEST_F(GgufExportTest, WhatCannotBeWrittenIsSaid) {
  EXPECT_THROW(export_gguf(kPocket, path("x"), {.type = WeightType::iq4_nl}, pool_), InputError);
  EXPECT_THROW(export_random_gguf("huge", kPocket, path("x"), {}, pool_), InputError);
  EXPECT_THROW(export_gguf(kPocket / "none", path("x"), {.type = WeightType::q8_0}, pool_), InputError);
  EXPECT_FALSE(std::filesystem::exists(path("x")));
}

}  // namespace
}  // namespace lode
