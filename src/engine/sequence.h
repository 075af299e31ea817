// SPDX-License-Identifier: Apache-2.0
// What is asked and answered behind a text: as a branch of a document, with keys and values of its own behind the
// document's, or in place, at the end of a context that holds nothing else.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/document.h"
#include "gpu/batch_backend.h"
#include "lodestone/scheduler.h"

namespace lode {

class Sequence {
 public:
  /// A branch with room for `room` tokens of its own. InputError when the document has no index for `attention`.
  Sequence(std::shared_ptr<const Document> document, const Spec& attention, std::int64_t room);
  /// In place: its tokens become the context's. The context outlives it and is changed by nobody else meanwhile.
  Sequence(Context::Impl& context, MethodId method);
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  bool in_place() const { return document_ == nullptr; }
  const Document::Impl& document() const { return document_->impl(); }  ///< of a branch
  Context::Impl& context() const { return context_; }  ///< the document's, or that it is at the end of
  bool on_gpu() const { return context_.gpu != nullptr; }
  const AttachedMethod* method() const { return method_; }  ///< null: full
  MethodId method_id() const;                               ///< of the context
  std::int64_t begin() const { return begin_; }             ///< tokens in front of its own
  std::int64_t tokens() const { return in_place() ? context_.tokens() : begin_ + std::ssize(ids); }
  /// Question tokens that choose their keys together (Selector): 1 = each for itself, 0 = all.
  std::int64_t joint_tokens() const;
  /// Whether its document is on a GPU, which attends to keys that the host chooses by the method.
  bool host_chooses() const { return host_chooses_; }
  /// Whether a prompt that is known before its answer decides which keys the answer attends to (Branches). Not in branches whose
  /// document is on a GPU, where selectors know no branches, and not where ranks share the keys.
  bool chooses_by_prompt() const;
  /// Its next tokens are such a prompt's: rows of it are told.
  void begin_prompt();
  /// All of the prompt is there.
  void choose_by_prompt();
  /// [L] selectors that a prompt is told to.
  std::vector<std::vector<Selector*>> prompt_listeners() const;
  /// Back to so many tokens, those in front of its own included.
  void roll_back(std::int64_t tokens);
  /// Back to the longest beginning that `prompt` has, too, but for its last token, which is to be read again; says
  /// how many tokens of the prompt that leaves.
  std::int64_t keep_beginning(std::span<const TokenId> prompt);
  /// Holds what was read behind the same document. In place the context does, and goes back to where that ended.
  void begin_with(const ReadPrompt& read);

  /// The bytes of keys and values that such a branch takes.
  static std::int64_t bytes(const Document& document, std::int64_t room);

  // Of a branch:
  std::vector<TokenId> ids;           // behind the document
  std::optional<KvStore> tail;        ///< of `ids`; empty where the document is on a GPU
  std::unique_ptr<GpuTail> gpu_tail;  ///< the same there; made for the first step
  std::int64_t room = 0;              ///< tokens that it may come to hold
  std::int32_t id = 0;                ///< for selectors that know branches; 0 when none does
  std::vector<std::uint8_t> by_id;    // [L] whether this layer's does
  Position far_limit = QueryBlock::kNoLimit;

 private:
  std::shared_ptr<const Document> document_;
  Context::Impl& context_;
  const AttachedMethod* method_ = nullptr;
  std::int64_t begin_ = 0;
  bool host_chooses_ = false;
};

/// A prompt whose tokens all attended densely, for the answers of several methods.
struct ReadPrompt {
  std::unique_ptr<Sequence> sequence;
  std::int64_t end = 0;       ///< tokens with the prompt
  std::vector<float> logits;  // [V] of its last token
  double seconds = 0;         ///< that its reading took
};

struct SequenceCache::Impl {
  std::mutex mutex;
  std::unique_ptr<Sequence> sequence;
};

}  // namespace lode
