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
#include "lodestone/scheduler.h"
#include "lodestone/sources.h"
#include "serve/backend.h"
#include "serve/engine/prompting.h"
#include "serve/engine/text_finder.h"

namespace lode::serve {

/// A model that is served, and what answers with it.
struct LoadedModel {
  std::string id;
  std::shared_ptr<const Model> model;
  std::shared_ptr<Scheduler> scheduler;
  std::shared_ptr<Prompting> prompting;
  Device device = Device::cpu;  ///< of its documents, where their keys and values are of a type that it takes
};

struct LibraryOptions {
  std::filesystem::path folder;
  std::vector<Spec> specs;  ///< that new documents are indexed for, unless their upload says otherwise
  bool automatic = true;    ///< also for what `auto` takes, and measured so that it can choose
  DType kv_type = DType::f16;
  std::int64_t memory = 0;        ///< bytes of keys, values and indexes of open documents
  std::size_t most_waiting = 64;  ///< documents that wait to be read; more are refused
  ReadOptions reading;            ///< limits of files that are converted
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
    std::shared_ptr<const Document> document;
    const LoadedModel* model = nullptr;
    std::shared_ptr<Neutral> neutral;
  };
  /// The document, indexed for `spec`. ApiError 404, 409 while it is read or when its file is damaged, 400 when there
  /// is no index for the spec and none can be made.
  Opened open(const std::string& name, const Spec& spec);
  void count(BackendStats& stats);

 private:
  struct Entry;
  using EntryPtr = std::shared_ptr<Entry>;

  EntryPtr find(const std::string& name);  // holds mutex_
  const LoadedModel& model_named(const std::string& id) const;
  const LoadedModel* model_of_fingerprint(const std::string& fingerprint) const;
  std::filesystem::path path_of(const std::string& name) const;
  std::string without_folder(std::string sentence) const;

  void scan();  ///< takes in files that came, and forgets those that went
  void look_into(Entry& entry);
  void keep_house();  ///< the thread: reads, and now and then scans and expires
  void read(const EntryPtr& entry);
  SourceText convert(const EntryPtr& entry);
  void set_step(const EntryPtr& entry, const char* step);
  DocumentOptions reading_options(const EntryPtr& entry, const IndexedText& text);
  void keep(const EntryPtr& entry, const Document& document);
  void expire();
  Device device_for(const Entry& entry) const;
  std::shared_ptr<const Document> load(const Entry& entry, const std::shared_ptr<const Document>& before,
                                       const Spec& spec) const;
  void evict(const EntryPtr& keep);  // holds mutex_

  const std::vector<LoadedModel> models_;
  const LibraryOptions options_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::map<std::string, EntryPtr> entries_;
  std::deque<EntryPtr> waiting_;
  TextFinder finder_;
  std::filesystem::file_time_type scanned_{};
  std::uint64_t uses_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace lode::serve
