// SPDX-License-Identifier: Apache-2.0
// The tokens that a real model's tokenizer makes of a text, for tests/scenarios/real_model_test.py, which names
// model, text and output in the environment and knows what they must be.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>

#include "base/file.h"
#include "lodestone/tokenizer.h"

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

}  // namespace
}  // namespace lode
