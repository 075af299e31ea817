// SPDX-License-Identifier: Apache-2.0
// One forward step of any number of sequences.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <span>
#include <vector>

#include "base/unison.h"
#include "engine/sequence.h"
#include "gpu/batch_backend.h"
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
  std::function<void()> again =
      {};  ///< called before a step that failed midway is run again; null: need not be
  bool told =
      false;  ///< to the method's selectors, which choose by this prompt (Branches::chooses_by_prompt)
  bool largest = false;  ///< the largest logit of the only wanted row is all that matters: a GPU finds it

  std::span<float> logits = {};  // [rows, V] until the next step; none where `token` has been found
  TokenId token = -1;            ///< of the largest logit, where it was wanted and a GPU has found it
  ForwardWork work = {};
  TierWork tiers = {};                 ///< in place alone
  std::exception_ptr error = nullptr;  ///< why it has no logits; its sequence is as it was
};

/// Runs a row in place: the one step of a context that no document shares. As BatchRunner::run otherwise.
void run_in_place(BatchRow& row);

/// A model on the GPU, for as long as `model` lives.
struct ModelOnGpu {
  std::shared_ptr<const GpuModel> model;
  std::int64_t step_bytes = 0;  ///< that steps of questions take there, beside their keys and values
};
/// InputError or RunError where questions about documents with keys and values of this type cannot be answered there.
ModelOnGpu put_on_gpu(const Model& model, DType kv_type);

/// Whether a BatchRunner takes questions by this method about a document of the context: on the host all; on a GPU those
/// about keys and values that lie there, by methods that choose by their queries alone, whatever the prompt and the
/// weights of earlier keys. What it does not take can be asked in place.
bool asked_together(const Context::Impl& document, MethodId method);

/// For branches of documents.
class BatchRunner {
 public:
  /// `tail_bytes`: of GPU memory for the tokens of sequences whose documents are there; 0 = half of what is free.
  /// `unison`: of ranks that all run the same rows; null: this process runs its own.
  explicit BatchRunner(std::shared_ptr<const Model> model, std::int64_t tail_bytes = 0,
                       Unison* unison = nullptr);

  /// Runs all rows and appends their tokens to their sequences. What goes wrong with one ends up in its row; the
  /// others are as if it had not been there. Interrupted is thrown, and nothing has changed; so is RankLost.
  void run(std::span<BatchRow> rows);

  /// Takes the memory that a branch of a document on a GPU may come to need; on the host it has it. False: other
  /// branches leave none now. RunError when there never is any; OutOfDeviceMemory.
  bool reserve(Sequence& sequence);

 private:
  void run_or_find_fault(std::span<BatchRow* const> rows, std::vector<float>& logits,
                         const std::function<void(std::span<BatchRow* const>)>& step);
  void run_together(std::span<BatchRow* const> rows);
  void run_on_gpu(std::span<BatchRow* const> rows);
  GpuBatch& gpu_batch(const Sequence& sequence);
  void finish(std::span<BatchRow* const> rows, std::vector<float>& logits);

  std::shared_ptr<const Model> model_;
  Llama llama_;
  std::vector<float> logits_, gpu_logits_;
  std::int64_t tail_bytes_ = 0;
  Unison* unison_ = nullptr;
  std::map<DType, std::unique_ptr<GpuBatch>> gpu_;  ///< made when a document on a GPU is first asked
  std::vector<std::vector<float>> apart_;           // logits of rows that ran alone
};

}  // namespace lode
