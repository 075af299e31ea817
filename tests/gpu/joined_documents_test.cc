// SPDX-License-Identifier: Apache-2.0
// Questions about several documents whose far keys one launch chooses.
#include <gtest/gtest.h>

#include "engine/batch.h"
#include "engine/document.h"
#include "support/gpu.h"

namespace lode {
namespace {

constexpr const char* kSpec = "hyperplanes:budget=1/8,sink=1,window=64";

std::shared_ptr<const Document> document_of(std::int64_t from, std::int64_t tokens, std::int64_t room,
                                            DType type) {
  const std::vector<TokenId> all = story(from + tokens);
  return Document::read(
      pocket(), std::vector<TokenId>(all.begin() + from, all.end()), "",
      {.specs = {parse_spec(kSpec)}, .kv_type = type, .device = Device::cuda, .max_tokens = room});
}

/// Logits of each document's sequence for a question and three tokens behind it.
std::vector<std::vector<float>> logits_of(const std::vector<std::shared_ptr<const Document>>& documents) {
  const std::vector<TokenId> tokens = story(900);
  BatchRunner runner(pocket());
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (const auto& document : documents)
    sequences.push_back(std::make_unique<Sequence>(document, parse_spec(kSpec), 40));
  std::vector<std::vector<float>> all(documents.size());
  for (std::size_t step = 0; step < 4; ++step) {
    std::vector<BatchRow> rows;
    for (const auto& sequence : sequences)
      rows.push_back({.sequence = sequence.get(),
                      .tokens = std::span(tokens).subspan(800 + step, step == 0 ? 7 : 1),
                      .phase = step == 0 ? Phase::question : Phase::generation});
    runner.run(rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].error) std::rethrow_exception(rows[i].error);
      all[i].insert(all[i].end(), rows[i].logits.begin(), rows[i].logits.end());
    }
  }
  return all;
}

/// Alone, among documents of other lengths and rooms, and where another selector's lists lead.
TEST(GpuBatch, JoinedDocumentsGiveEachItsOwnBits) {
  NEEDS_GPU();
  for (const DType type : {DType::f32, DType::bf16}) {
    const std::vector<std::shared_ptr<const Document>> documents = {
        document_of(0, 700, 1024, type), document_of(100, 384, 600, type), document_of(40, 500, 4096, type),
        document_of(10, 90, 2048, type), document_of(300, 601, 2048, type)};
    const auto together = logits_of(documents);
    for (std::size_t i = 0; i < documents.size(); ++i) {
      EXPECT_EQ(logits_of({documents[i]}).front(), together[i]) << i;
      EXPECT_EQ(logits_of({documents[(i + 2) % 5], documents[i]}).back(), together[i]) << i;
    }
    EXPECT_NE(together[0], together[2]);
  }
}

}  // namespace
}  // namespace lode
