// SPDX-License-Identifier: Apache-2.0
// Questions that are asked in one batch, and what came of them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "engine/document.h"
#include "support/gpu.h"

namespace lode {

/// What a sequence is asked: a question, then tokens that are given.
struct AskedTogether {
  std::shared_ptr<const Document> document;
  std::string spec = "full";
  std::vector<TokenId> question, given;
};

/// Logits of each sequence after the question and each given token, all of them in one batch.
/// `work`: that of each, if it is wanted.
inline std::vector<std::vector<float>> logits_of(const std::vector<AskedTogether>& asked,
                                                 std::shared_ptr<const Model> model = pocket(),
                                                 std::vector<ForwardWork>* work = nullptr) {
  if (work != nullptr) work->assign(asked.size(), {});
  BatchRunner runner(std::move(model));
  std::vector<std::unique_ptr<Sequence>> sequences;
  for (const AskedTogether& a : asked)
    sequences.push_back(std::make_unique<Sequence>(a.document, parse_spec(a.spec),
                                                   std::ssize(a.question) + std::ssize(a.given)));
  std::vector<std::vector<float>> all(asked.size());
  for (std::size_t step = 0; step <= asked.front().given.size(); ++step) {
    std::vector<BatchRow> rows;
    for (std::size_t i = 0; i < asked.size(); ++i)
      rows.push_back({.sequence = sequences[i].get(),
                      .tokens = step == 0 ? std::span<const TokenId>(asked[i].question)
                                          : std::span<const TokenId>(&asked[i].given[step - 1], 1),
                      .phase = step == 0 ? Phase::question : Phase::generation});
    runner.run(rows);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      if (rows[i].error) std::rethrow_exception(rows[i].error);
      if (work != nullptr) (*work)[i].attend += rows[i].work.attend;
      all[i].insert(all[i].end(), rows[i].logits.begin(), rows[i].logits.end());
    }
  }
  return all;
}

}  // namespace lode
