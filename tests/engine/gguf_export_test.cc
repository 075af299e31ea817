// SPDX-License-Identifier: Apache-2.0
// Models written as GGUF files and read again: they answer as they did, and random ones of every type run.
#include "model/gguf_export.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "base/threads.h"
#include "lodestone/engine.h"
#include "lodestone/error.h"
#include "model/config.h"
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
  export_gguf(kPocket, f16, {.type = WeightType::f16}, pool_);
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

TEST_F(GgufExportTest, WhatCannotBeWrittenIsSaid) {
  EXPECT_THROW(export_gguf(kPocket, path("x"), {.type = WeightType::iq4_nl}, pool_), InputError);
  EXPECT_THROW(export_random_gguf("huge", kPocket, path("x"), {}, pool_), InputError);
  EXPECT_THROW(export_gguf(kPocket / "none", path("x"), {.type = WeightType::q8_0}, pool_), InputError);
  EXPECT_FALSE(std::filesystem::exists(path("x")));
}

}  // namespace
}  // namespace lode
