// SPDX-License-Identifier: Apache-2.0
// Named documents: each is one `.lode` file NAME.lode in a folder, found there again after a restart, and opened when
// it is asked. Reading happens one document after the other in a thread of its own, beside answers.
#pragma once

#include <condition_variable>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/progress.h"
#include "lodestone/document.h"
#include "lodestone/sources.h"
#include "serve/backend.h"
#include "serve/engine/loaded_model.h"
#include "serve/engine/open_documents.h"
#include "serve/engine/text_finder.h"

namespace lode::serve {

class RankEngine;  // serve/engine/rank_engine.h

struct LibraryOptions {
  std::filesystem::path folder;
  std::vector<Spec> specs;  ///< that new documents are indexed for, unless their upload says otherwise
  bool automatic = true;    ///< also for what `auto` takes, and measured so that it can choose
  DType kv_type = DType::f16;
  std::int64_t memory = 0;  ///< bytes of keys, values and indexes of open documents on the host
  /// Bytes of all that open documents and those that are being read take on the GPU.
  std::int64_t gpu_memory = 0;
  std::size_t most_waiting = 64;  ///< documents that wait to be read; more are refused
  ReadOptions reading;            ///< limits of files that are converted
  RankEngine* ranks = nullptr;    ///< who read and open documents together; null: this process does
};

class Library {
 public:
  Library(std::vector<LoadedModel> models, LibraryOptions options);
  ~Library();
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  std::vector<ContextInfo> list();
  ContextInfo info(const std::string& name);
  std::string text_of(const std::string& name);
  ContextInfo create(NewContext context);
  void remove(const std::string& name);
  std::optional<Recognised> recognise(std::string_view text, const std::string& model);

  /// What a neutral question attends to in a document, by method; asked when first needed.
  struct Neutral {
    std::mutex mutex;
    std::map<std::string, std::shared_future<lode::Answer>> by_spec;
  };
  struct Opened {
    std::shared_ptr<const Document> document;  ///< in use for as long as somebody holds it
    const LoadedModel* model = nullptr;
    std::shared_ptr<Neutral> neutral;
  };
  /// Whoever waits for a document. One of the two is called, once, from a thread of the library.
  struct Waiter {
    std::uint64_t id = 0;  ///< of no other waiter
    std::function<void(const Opened&)> ready;
    std::function<void(const ApiError&)> refused;
  };
  /// The document, indexed for `spec`; none where the waiter will hear of it, once it is open. ApiError, now or then:
  /// 404, 409 while it is read or when its file is damaged, 400 when there is no index for the spec and none can be
  /// made, 503 when there can be no room for it.
  std::optional<Opened> open(const std::string& name, const Spec& spec, Waiter waiter);
  /// True when this waiter waited, and now hears nothing.
  bool stop_waiting(std::uint64_t id) { return open_.stop_waiting(id); }
  void stop();  ///< ends reading and opening; who waits hears nothing
  void count(BackendStats& stats);

 private:
  struct Entry;
  using EntryPtr = std::shared_ptr<Entry>;

  EntryPtr find(const std::string& name);  // holds mutex_
  const LoadedModel* model_of_fingerprint(const std::string& fingerprint) const;
  std::filesystem::path path_of(const std::string& name) const;
  std::string without_folder(std::string sentence) const;

  void scan();  ///< takes in files that came, and forgets those that went
  void look_into(Entry& entry);
  void keep_house();    ///< a thread: now and then scans and expires
  void read_waiting();  ///< a thread: reads
  void read(const EntryPtr& entry);
  void tell_read(const EntryPtr& entry);
  static void fail(Entry& entry, const std::string& why);
  SourceText convert(const EntryPtr& entry);
  void set_step(const EntryPtr& entry, const char* step);
  DocumentOptions reading_options(const EntryPtr& entry, const IndexedText& text);
  void read_over_ranks(const EntryPtr& entry, SourceText source, IndexedText text,
                       const DocumentOptions& options);
  void keep(const EntryPtr& entry, const Document& document);
  void take_in(const EntryPtr& entry, const DocumentOptions& read, const std::vector<Spec>& methods);
  void expire();
  static Device device_for(const LoadedModel& model, DType kv_type);
  DocumentSource source_of(const Entry& entry) const;
  std::shared_ptr<const Document> load(const std::string& name, const LoadedModel& model,
                                       const DocumentOptions& options,
                                       const std::vector<Spec>& in_file) const;
  /// A document that was read. Its memory is free before the claim to it is given back.
  struct Read {
    std::shared_ptr<OpenDocuments::Claim> claim;  ///< none on the host
    std::shared_ptr<const Document> document;
  };
  Read read_in_turn(const EntryPtr& entry, const std::vector<TokenId>& tokens, const std::string& text,
                    const DocumentOptions& options);
  void forget(const Entry& entry, const ApiError& why);

  const std::vector<LoadedModel> models_;
  const LibraryOptions options_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<std::string, EntryPtr> entries_;
  std::deque<EntryPtr> waiting_;
  TextFinder finder_;
  std::filesystem::file_time_type scanned_{};
  bool stop_ = false;
  OpenDocuments open_;
  std::thread house_, reader_;
};

}  // namespace lode::serve
