// SPDX-License-Identifier: Apache-2.0
// The backend over the engine: a library of documents, and a scheduler for each model.
#pragma once

#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "gpu/backend.h"
#include "lodestone/automatic.h"
#include "serve/backend.h"
#include "serve/engine/library.h"
#include "serve/engine/rank_engine.h"

namespace lode::serve {

struct EngineOptions {
  LibraryOptions library;
  SchedulerOptions scheduler;
  std::map<std::string, std::shared_ptr<const GpuModel>> on_gpu;  ///< by id, whose documents are there, too
  std::int64_t gpu_question_memory = 0;  ///< bytes of GPU memory for the questions of each of these models
  std::string question_template;         ///< with {question}, for models without a chat template
  std::int64_t max_new_tokens = 1024;    ///< of answers whose request does not say
  /// Over several ranks: those, of which this is rank 0; the others have a RankEngine each, and follow. null: alone.
  Communicator* ranks = nullptr;
};

class EngineBackend : public Backend {
 public:
  /// Models by id.
  EngineBackend(const std::vector<std::pair<std::string, std::shared_ptr<const Model>>>& models,
                EngineOptions options);
  /// Cancels what is under way; listeners hear of it first.
  ~EngineBackend() override;

  std::vector<ServedModel> models() override;
  std::vector<ContextInfo> contexts() override { return library_->list(); }
  ContextInfo context(const std::string& name) override { return library_->info(name); }
  std::string text_of(const std::string& name) override { return library_->text_of(name); }
  ContextInfo create(NewContext context) override { return library_->create(std::move(context)); }
  void remove(const std::string& name) override { library_->remove(name); }
  std::optional<Recognised> recognise(std::string_view text, const std::string& model) override {
    return library_->recognise(text, model);
  }
  std::uint64_t ask(Question question, Listener listener) override;
  void cancel(std::uint64_t id) override;
  BackendStats stats() override;
  /// Why nothing can be answered any more; empty while it can.
  std::string failure() const { return ranks_ == nullptr ? std::string() : ranks_->failure(); }

 private:
  struct Job;
  using JobPtr = std::shared_ptr<Job>;

  void load(const std::vector<std::pair<std::string, std::shared_ptr<const Model>>>& models);
  void watch();
  void tell(Job& job) const;
  void end(const Job& job);
  std::shared_future<lode::Answer> neutral_answer(const Library::Opened& opened, const Spec& spec);
  void enqueue(const JobPtr& job);
  JobPtr stop_waiting(std::uint64_t id);
  JobPtr stop_waiting_to_begin(std::uint64_t id);
  void begin_late(std::uint64_t id, const Library::Opened& opened);
  void begin(const JobPtr& job, const Library::Opened& opened);
  Request request_of(Job& job, AutoChoice& chosen);

  EngineOptions options_;
  std::unique_ptr<RankEngine> ranks_;  ///< null: there are none
  std::vector<LoadedModel> models_;
  std::unique_ptr<Library> library_;
  std::int64_t started_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::list<JobPtr> jobs_;  ///< that the schedulers have, or that are to be told that they ended
  std::map<std::uint64_t, JobPtr> waiting_;  ///< for their documents
  std::map<std::uint64_t, JobPtr>
      beginning_;  ///< whose documents have come and that are on their way to the scheduler
  std::uint64_t last_id_ = 0;
  bool stop_ = false;
  std::thread watcher_;
};

}  // namespace lode::serve
