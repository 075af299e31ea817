// SPDX-License-Identifier: Apache-2.0
// How much memory a context will take, said before it is made.
#pragma once

#include <span>

#include "gpu/backend.h"
#include "lodestone/document.h"
#include "lodestone/engine.h"

namespace lode {

/// Bytes; the sum is what the process will hold at its peak, within a tenth.
struct MemoryPlan {
  std::int64_t weights = 0;  ///< mapped, shared between processes
  std::int64_t kv = 0;
  std::int64_t index = 0;    ///< of all specs, or what they hold while the text is read, if that is more
  std::int64_t scratch = 0;  ///< working memory of a prefill chunk, kernels, tokenizer, the program itself
  std::int64_t total() const { return weights + kv + index + scratch; }
};

MemoryPlan plan_memory(const Model& model, DType kv_type, std::int64_t tokens, std::span<const Spec> specs);

/// Bytes of its device's memory that a document of so many tokens takes, with room for `max_tokens` and indexed for
/// these methods; `gpu`: the model there, null for a document on the host.
std::int64_t document_bytes(const Model& model, const GpuModel* gpu, DType kv_type, std::int64_t tokens,
                            std::int64_t max_tokens, std::span<const Spec> specs);
/// The same of a document that is there.
std::int64_t held_bytes(const Document& document);

/// Bytes that this process could take now without pushing others out; 0 where the system does not say.
std::int64_t available_memory();

}  // namespace lode
