// SPDX-License-Identifier: Apache-2.0
// Questions about several documents whose far keys one launch chooses.
#include <gtest/gtest.h>

#include "support/asked_together.h"

namespace lode {
namespace {

constexpr const char* kSpec = "hyperplanes:budget=1/8,sink=1,window=64";

std::vector<TokenId> part_of(const std::vector<TokenId>& tokens, std::int64_t from, std::int64_t to) {
  return {tokens.begin() + from, tokens.begin() + to};
}

/// A question about a document of these tokens of the story, and three tokens behind it.
AskedTogether asked_about(std::int64_t from, std::int64_t tokens, std::int64_t room, DType type) {
  const std::vector<TokenId> all = story(901);
  return {.document = Document::read(
              pocket(), part_of(all, from, from + tokens), "",
              {.specs = {parse_spec(kSpec)}, .kv_type = type, .device = Device::cuda, .max_tokens = room}),
          .spec = kSpec,
          .question = part_of(all, 800, 807),
          .given = part_of(all, 801, 804)};
}

/// Alone, among documents of other lengths and rooms, and where another selector's lists lead.
TEST(GpuBatch, JoinedDocumentsGiveEachItsOwnBits) {
  NEEDS_GPU();
  for (const DType type : {DType::f32, DType::bf16}) {
    const std::vector<AskedTogether> asked = {
        asked_about(0, 700, 1024, type), asked_about(100, 384, 600, type), asked_about(40, 500, 4096, type),
        asked_about(10, 90, 2048, type), asked_about(300, 601, 2048, type)};
    const auto together = logits_of(asked);
    for (std::size_t i = 0; i < asked.size(); ++i) {
      EXPECT_EQ(logits_of({asked[i]}).front(), together[i]) << i;
      EXPECT_EQ(logits_of({asked[(i + 2) % 5], asked[i]}).back(), together[i]) << i;
    }
    EXPECT_NE(together[0], together[2]);
  }
}

}  // namespace
}  // namespace lode
