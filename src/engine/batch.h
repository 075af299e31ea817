// SPDX-License-Identifier: Apache-2.0
// One forward step of any number of sequences.
#pragma once

#include <exception>
#include <span>
#include <vector>

#include "engine/sequence.h"
#include "model/llama.h"

namespace lode {

/// New tokens of one sequence, and what came of them.
struct BatchRow {
  Sequence* sequence = nullptr;
  std::span<const TokenId> tokens;  // [T]
  Phase phase = Phase::generation;
  bool sparse = true;  ///< by the sequence's method; else with full attention
  LogitRows rows = LogitRows::last_of_each;
  const ForwardHooks* hooks = nullptr;  ///< it then has a step of its own
  Audit* audit = nullptr;               ///< layers that fell back attend fully; beside hooks

  std::span<float> logits = {};  // [rows, V] until the next step
  ForwardWork work = {};
  std::exception_ptr error = nullptr;  ///< why it has no logits; its sequence is as it was
};

class BatchRunner {
 public:
  explicit BatchRunner(std::shared_ptr<const Model> model);

  /// Runs all rows and appends their tokens to their sequences. What goes wrong with one ends up in its row; the
  /// others are as if it had not been there. Interrupted is thrown, and nothing has changed.
  void run(std::span<BatchRow> rows);

 private:
  void run_together(std::span<BatchRow* const> rows);
  void finish(std::span<BatchRow* const> rows, std::vector<float>& logits);

  std::shared_ptr<const Model> model_;
  Llama llama_;
  std::vector<float> logits_;
  std::vector<std::vector<float>> apart_;  // logits of rows that ran alone
};

}  // namespace lode
