// SPDX-License-Identifier: Apache-2.0
// Steps of many sequences on the GPU, as the engine sees them. A document is a GpuContext that holds its keys and
// values and never changes; a sequence has rows of its own behind it.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu/backend.h"
#include "kernels/cuda/device/layout.h"

namespace lode {

/// The place of a sequence's own rows; given back when it is destroyed, at the latest with the batch.
class GpuTail {
 public:
  virtual ~GpuTail() = default;
};

/// New tokens of one sequence.
struct GpuBatchRow {
  GpuContext* document = nullptr;
  GpuTail* tail = nullptr;          ///< made for this document
  std::int64_t earlier = 0;         ///< own tokens whose keys and values are there
  std::span<const TokenId> tokens;  // [T]
  Phase phase = Phase::generation;
  std::span<Selector* const> selectors;  ///< [L] the document's; empty = full attention
  LocalWindow dense;
  Position far_limit = QueryBlock::kNoLimit;
  /// Where the host chooses (GpuContext::chooses): the document's rows there, and by which number the selectors of the
  /// marked layers know the sequence (Branches).
  const KvStore* kv = nullptr;
  std::int32_t id = 0;
  std::span<const std::uint8_t> by_id = {};  // [L]
  LogitRows rows = LogitRows::last_of_each;
  const Rope* rope = nullptr;
  ForwardWork* work = nullptr;  ///< to add to
  /// Of a question's tokens with full attention, or null: only `mass` is called, of what lies above `least_mass`.
  const ForwardHooks* hooks = nullptr;
  /// Of a generated token: where the token of the largest logit goes, instead of logits. RunError where a logit is
  /// not a number.
  TokenId* largest = nullptr;
};

/// Tokens that a branch with so much room takes of GpuBatchOptions::tail_tokens: whole blocks, and in the first of
/// them what the document's last one holds.
inline std::int64_t gpu_tail_tokens(std::int64_t document_tokens, std::int64_t room) {
  const std::int64_t own = document_tokens % cuda::kBlockTokens + std::max<std::int64_t>(room, 1);
  return (own + cuda::kBlockTokens - 1) / cuda::kBlockTokens * cuda::kBlockTokens;
}

struct GpuBatchOptions {
  DType kv_type = DType::f16;
  std::int64_t tail_tokens = 0;  ///< of all sequences together; memory is taken as they come
};

class GpuBatch {
 public:
  virtual ~GpuBatch() = default;
  /// Room for so many own tokens behind a document. Null when other branches leave none now. RunError with both
  /// numbers when there never is; OutOfDeviceMemory when others than branches have taken the GPU's memory.
  virtual std::unique_ptr<GpuTail> branch(GpuContext& document, std::int64_t room) = 0;
  /// Runs all rows and writes the logits [rows, V] that are wanted, in their order. The bits of a row do not
  /// depend on the others: generated tokens share their products, kNarrowRows at a time, padded to so many;
  /// tokens of a question have theirs to themselves. Rows with full attention to one document read it once.
  virtual void forward(std::span<const GpuBatchRow> rows, std::vector<float>& logits) = 0;
};

/// Why a batch on the GPU takes no sequences of the model with keys and values of this type; empty = it takes them.
std::string why_no_gpu_batch(const GpuModel& model, DType kv_type);

/// InputError where why_no_gpu_batch() has a reason.
std::unique_ptr<GpuBatch> make_gpu_batch(const ModelConfig& config, std::shared_ptr<const GpuModel> model,
                                         const GpuBatchOptions& options);

/// Microseconds that a kernel which does nothing else takes to read so many bytes: the floor under a step.
double gpu_read_microseconds(std::int64_t bytes);

}  // namespace lode
