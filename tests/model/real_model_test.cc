// SPDX-License-Identifier: Apache-2.0
// The tokens that a real model's tokenizer makes of a text, for tests/scenarios/real_model_test.py, and its logits,
// for tests/long/real_model_logits.py: they name model, input and output in the environment and know what must come.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <fstream>

#include "base/file.h"
#include "base/threads.h"
#include "lodestone/tokenizer.h"
#include "model/kv_shape.h"
#include "model/llama.h"
#include "model/source.h"

namespace lode {
namespace {

TEST(RealModel, TokensOfAText) {
  const char* const model = std::getenv("LODESTONE_REAL_MODEL");
  const char* const text = std::getenv("LODESTONE_REAL_TEXT");
  const char* const output = std::getenv("LODESTONE_REAL_TOKENS");
  if (model == nullptr || text == nullptr || output == nullptr) GTEST_SKIP() << "no model is named";
  const Tokenizer tokenizer = Tokenizer::read(model);
  const std::string bytes = read_file(text);
  const auto tokens = tokenizer.encode(bytes, Tokenizer::Bos::none);
  EXPECT_EQ(tokenizer.decode(tokens), bytes);
  std::ofstream(output, std::ios::binary)
      .write(reinterpret_cast<const char*>(tokens.data()),
             std::ssize(tokens) * std::int64_t{sizeof(TokenId)});
}

/// TOKENS are read, LODESTONE_REAL_KV names the type of keys and values.
TEST(RealModel, LogitsOfTokens) {
  const char* const model = std::getenv("LODESTONE_REAL_MODEL");
  const char* const input = std::getenv("LODESTONE_REAL_TOKENS");
  const char* const output = std::getenv("LODESTONE_REAL_LOGITS");
  const char* const type = std::getenv("LODESTONE_REAL_KV");
  if (model == nullptr || input == nullptr || output == nullptr) GTEST_SKIP() << "no model is named";
  const std::string bytes = read_file(input);
  std::vector<TokenId> ids(bytes.size() / sizeof(TokenId));
  std::memcpy(ids.data(), bytes.data(), ids.size() * sizeof(TokenId));
  ThreadPool pool(0);
  ModelSource source = ModelSource::open(model);
  const ModelConfig config = source.config();
  const ModelWeights weights = ModelWeights::read(source.take_weights(), config);
  Llama llama(config, weights, pool);
  const auto tokens = std::ssize(ids);
  KvStore kv(kv_shape(config, parse_dtype(type == nullptr ? "f16" : type), tokens));
  const SequenceTokens all = {ids, &kv, 0};
  std::vector<float> logits;
  llama.forward({.sequences = {&all, 1}}, Rope(config, tokens), LogitRows::all, logits);
  std::ofstream(output, std::ios::binary)
      .write(reinterpret_cast<const char*>(logits.data()), std::ssize(logits) * std::int64_t{sizeof(float)});
}

}  // namespace
}  // namespace lode
