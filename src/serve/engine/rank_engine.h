// SPDX-License-Identifier: Apache-2.0
// A server's engine over several ranks. Rank 0 has the clients and decides; the others know nothing but what it says.
//
// One thread a rank does all that the ranks do together, in turns. In front of each turn rank 0 says what is new
// (questions, cancelled ones, documents to close), whether a document is to be opened or a text to be read, and how it
// goes on; then all do just that and a step of every scheduler. So all ranks have the same sequence of events, whatever
// came first where, and only rank 0 looks at a clock. While a text is read or an index built, turns go on between its
// parts. What fails on one rank fails on all (base/unison.h); when one is lost, all that is under way ends with the
// reason.
#pragma once

#include <chrono>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/unison.h"
#include "lodestone/documents.h"
#include "serve/engine/loaded_model.h"

namespace lode::serve {

class RankEngine {
 public:
  using Models = std::vector<std::pair<std::string, std::shared_ptr<const Model>>>;
  /// On all ranks, with the same models in the same order; `ranks` outlives it. Rank 0 begins to work at once.
  RankEngine(Communicator& ranks, const Models& models, const SchedulerOptions& scheduler,
             const std::string& question_template);
  /// Of rank 0: ends follow() on the others.
  ~RankEngine();
  RankEngine(const RankEngine&) = delete;
  RankEngine& operator=(const RankEngine&) = delete;

  const std::vector<LoadedModel>& models() const { return models_; }

  /// Of the other ranks: works along until rank 0 ends. RankLost.
  void follow();

  // Of rank 0, from any thread. When the ranks can do nothing together any more, they fail with the reason: ApiError 503.
  /// As Scheduler::submit; `schema` is what the request's filter was made from.
  Ticket<lode::Answer> submit(const LoadedModel& model, Request request, const std::string& schema);
  void cancel(const LoadedModel& model, std::uint64_t id);
  /// Of what ends with Interrupted before failure() says why: ranks are interrupted when they are to end.
  static ApiError interrupted();
  /// Opens a file on all ranks, and waits for it; it is open as long as somebody holds it.
  std::shared_ptr<const Document> open(const LoadedModel& model, const std::filesystem::path& path,
                                       const DocumentOptions& options);
  /// A text that all ranks read, and write to `path` in shards.
  struct Reading {
    std::vector<TokenId> tokens;
    DocumentOptions options;  ///< `progress` is called on rank 0; what it throws ends the reading
    SourceText source;
    std::int64_t first_token = 0;
    std::filesystem::path path;
  };
  void read(const LoadedModel& model, Reading reading);
  /// Why the ranks can do nothing together any more; empty while they can.
  std::string failure() const;

 private:
  struct Shared;
  struct Job;
  /// What all ranks do next.
  struct Turn {
    Json said = Json::object();
    std::shared_ptr<Job> job = nullptr;  ///< of rank 0
    bool says(const char* word) const { return said.contains(word); }
  };

  bool leads() const { return unison_.ranks().rank() == 0; }
  const LoadedModel& model_of(const Json& order) const;
  Json number_of(const LoadedModel& model) const;
  void lead();
  void give_up(const std::string& why);
  bool busy() const;
  void wait_for_work();
  Turn next_turn();
  Turn next_turn_between(const Job* job, std::chrono::steady_clock::time_point until);
  Turn told(Turn turn);
  void carry_out(const Turn& turn);
  void obey(const Json& order);
  Request request_of(const Json& order) const;
  Turn turn_between(const Job* job, std::chrono::steady_clock::time_point until);
  void turns_between(Job* job);
  void do_job(const Turn& turn);
  std::shared_ptr<const Document> open_together(const Json& order, Job* job);
  void read_together(const Json& order, Job* job);
  std::shared_ptr<const Document> hand_out(std::shared_ptr<const Document> document, std::uint64_t key) const;
  std::shared_ptr<const Document> do_and_wait(std::shared_ptr<Job> job);

  Unison unison_;
  std::vector<LoadedModel> models_;
  std::map<std::uint64_t, std::shared_ptr<const Document>> documents_;  ///< of the other ranks
  std::shared_ptr<Shared> shared_;                                      ///< of rank 0's threads
  bool reading_ = false, opening_ = false;
  std::chrono::steady_clock::time_point part_began_;
  std::thread thread_;
};

}  // namespace lode::serve
