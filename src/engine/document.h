// SPDX-License-Identifier: Apache-2.0
// What a Document holds.
#pragma once

#include <atomic>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/context.h"
#include "lodestone/document.h"

namespace lode {

struct Document::Impl {
  Context context;  ///< read and indexed; its keys, values and indexes never change from then on
  std::string text;
  Attachments attachments;
  std::string fingerprint;
  std::vector<Spec> methods;  ///< that have an index
  std::vector<KvRows> rows;   ///< [L, most_kv_heads] of all tokens; empty when there are none
  /// Selectors keep scratch memory, and what they know of branches: one caller at a time.
  mutable std::mutex choosing;
  mutable std::atomic<std::int32_t> last_branch{0};  ///< ids that selectors know branches by
  /// Attends in place of this process alone, where ranks share the document; set before anything is asked.
  mutable std::shared_ptr<DistributedAttention> distributed;

  Impl(Context context_, std::string text_, Attachments attachments_);
  /// A document of a context that is read and indexed.
  static std::shared_ptr<const Document> share(Context context, std::string text, Attachments attachments);
  /// Document::open; of ranks, each with its share of a text in shards (load_context), which all open it together.
  static std::shared_ptr<const Document> open(const std::filesystem::path& path,
                                              std::shared_ptr<const Model> model,
                                              const DocumentOptions& options, Communicator* ranks);

  /// The context of a document that nobody else holds, to be changed.
  static Context take_back(std::shared_ptr<const Document> document);

  Context::Impl& parts() const { return context.impl(); }
  /// The method that a spec names; null for `full`. InputError that lists the methods when there is no index.
  AttachedMethod* method_of(const Spec& spec) const;
};

/// The keys that are far for a branch of a document of so many tokens end with the document, or with what the
/// index will ever hold of it.
Position far_limit_of(std::int64_t tokens, const AttachedMethod& method);

}  // namespace lode
