// SPDX-License-Identifier: Apache-2.0
// A document: tokens, their keys and values, and indexes over them. It is read once and never changes
// after that, so any number of sequences, threads and processes share it.
//
//   auto document = lode::Document::read(model, tokens, text, {.specs = {lode::parse_spec("kmeans")}});
//   document->save("book.lode");
//   auto again = lode::Document::open("book.lode", model);
//
// scheduler.h asks questions about documents.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/engine.h"

namespace lode {

/// A named piece of text, usually JSON, that travels with a document and its file.
struct Attachment {
  std::string text;
  /// Answers depend on it (a chat template that the question has to continue): a program that knows nothing
  /// of attachments refuses the file instead of ignoring it.
  bool required = false;
};
using Attachments = std::map<std::string, Attachment>;

/// How far the reading of a document is.
struct ReadProgress {
  std::int64_t tokens_done = 0, tokens = 0;     ///< keys and values
  std::int64_t layers_indexed = 0, layers = 0;  ///< indexes, layers times methods
};

struct DocumentOptions {
  std::vector<Spec> specs;  ///< methods to index for; `full` needs no index
  DType kv_type = DType::f16;
  Device device = Device::cpu;        ///< where its keys and values lie and its questions are answered
  std::int64_t gpu_memory = 0;        ///< as in ContextOptions
  std::vector<int> gpus = {};         ///< the same
  std::int64_t chunk = 0;             ///< tokens per prefill chunk; 0 = what suits the device
  std::int64_t max_tokens = 0;        ///< document, question and answer together; 0 = the model's own limit
  std::uint64_t seed = 0;             ///< of the indexes
  std::optional<double> rope_factor;  ///< yarn by this factor
  Attachments attachments;
  /// Also for what `auto` would index (automatic.h), and measures all methods so that it can choose. Of reading.
  bool automatic = false;
  /// Called between chunks and layers from the thread that reads. What it throws ends the reading.
  std::function<void(const ReadProgress&)> progress;
};

class Document {
 public:
  /// Reads tokens with full attention and builds the indexes; `text` is what the tokens were made from (may be
  /// empty). InputError when it does not fit the model.
  static std::shared_ptr<const Document> read(std::shared_ptr<const Model> model,
                                              std::span<const TokenId> tokens, std::string text,
                                              const DocumentOptions& options);
  /// A document of no tokens: what is asked of it is asked of the model alone. Only `full` can be asked.
  static std::shared_ptr<const Document> empty(std::shared_ptr<const Model> model,
                                               const DocumentOptions& options = {});
  /// Maps a `.lode` file, and builds indexes of `options.specs` that it does not hold (none of those that
  /// learn from the prefill: InputError). KV type, seed and attachments are the file's.
  static std::shared_ptr<const Document> open(const std::filesystem::path& path,
                                              std::shared_ptr<const Model> model,
                                              const DocumentOptions& options = {});
  ~Document();
  Document(const Document&) = delete;
  Document& operator=(const Document&) = delete;

  void save(const std::filesystem::path& path) const;

  const std::shared_ptr<const Model>& model() const;
  std::int64_t tokens() const;
  std::span<const TokenId> token_ids() const;
  const std::string& text() const;
  const Attachments& attachments() const;
  /// The text of an attachment; null when there is none of that name.
  const std::string* attachment(std::string_view name) const;

  const std::vector<Spec>& methods() const;  ///< what it is indexed for, besides `full`
  bool answers(const Spec& spec) const;      ///< whether questions may attend by it
  DType kv_type() const;
  std::int64_t max_tokens() const;  ///< room for document, question and answer together
  std::int64_t kv_bytes() const;  ///< of keys and values; shared with other processes when opened from a file
  std::int64_t index_bytes() const;  ///< of all indexes
  /// Of model, tokens, KV type and seed: equal documents give equal answers.
  const std::string& fingerprint() const;

  struct Impl;
  const Impl& impl() const { return *impl_; }

 private:
  explicit Document(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode
