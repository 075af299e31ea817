// SPDX-License-Identifier: Apache-2.0
// A branch of a document: its own tokens, keys and values behind the document's, and how it attends.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/document.h"
#include "gpu/batch_backend.h"

namespace lode {

class Sequence {
 public:
  /// Room for `room` tokens of its own. InputError when the document has no index for `attention`.
  Sequence(std::shared_ptr<const Document> document, const Spec& attention, std::int64_t room);
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  const Document::Impl& document() const { return document_->impl(); }
  bool on_gpu() const { return document().parts().gpu != nullptr; }
  const AttachedMethod* method() const { return method_; }  ///< null: full
  std::int64_t tokens() const { return document_->tokens() + std::ssize(ids); }
  /// Question tokens that choose their keys together (Selector): 1 = each for itself, 0 = all.
  std::int64_t joint_tokens() const;
  /// Back to so many tokens, the document's included.
  void roll_back(std::int64_t tokens);

  /// The bytes of keys and values that such a branch takes.
  static std::int64_t bytes(const Document& document, std::int64_t room);

  std::vector<TokenId> ids;           // behind the document
  KvStore tail;                       ///< of `ids`; empty where the document is on a GPU
  std::unique_ptr<GpuTail> gpu_tail;  ///< the same there; made for the first step
  std::int64_t room = 0;              ///< tokens that it may come to hold
  std::int32_t id = 0;                ///< for selectors that know branches; 0 when none does
  std::vector<std::uint8_t> by_id;    // [L] whether this layer's does
  Position far_limit = QueryBlock::kNoLimit;

 private:
  std::shared_ptr<const Document> document_;
  const AttachedMethod* method_;
};

}  // namespace lode
