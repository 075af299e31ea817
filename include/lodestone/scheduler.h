// SPDX-License-Identifier: Apache-2.0
// Answers many questions at once: any number of sequences over any number of documents take part in each
// forward step (continuous batching). One worker thread runs the steps.
//
//   lode::Scheduler scheduler(model, {.max_sequences = 16});
//   auto ticket = scheduler.submit({.document = document, .prompt = question, .attention = spec});
//   lode::Answer answer = ticket.result.get();
//
// An answer's bits depend on its own request and document alone, never on what else is asked meanwhile.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lodestone/document.h"
#include "lodestone/engine.h"
#include "lodestone/token_filter.h"

namespace lode {

struct ReadPrompt;  // engine/sequence.h
class Unison;       // base/unison.h

/// Keeps what a request left behind its document, so that the next one of a conversation reads only the tokens that
/// are new. One request at a time uses it. Its keys and values come on top of SchedulerOptions::memory.
class SequenceCache {
 public:
  SequenceCache();
  ~SequenceCache();
  void clear();  ///< the next request reads its whole prompt

  struct Impl;
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// What to ask. Everything is copied when it is submitted.
struct Request {
  std::shared_ptr<const Document> document;  ///< null: of the model alone
  std::vector<TokenId> prompt;               ///< at least one token; it follows the document's tokens
  Spec attention;                            ///< one of the document's methods, or `full`
  GenerateOptions options;                   ///< on_text is called from the scheduler's thread
  int priority = 0;                          ///< higher is admitted first
  bool want_sources = false;  ///< fill Answer::sources: costs time at each token, on a GPU one more
                              ///< reading of the answer under full attention,
                              ///< which a `cache` then keeps
  double sharpness = SourceMass().sharpness;  ///< of these sources
  /// Tokens are drafted under `attention` and verified by full attention, several in one step: greedy answers
  /// are those of `full` to the token, sampled ones are distributed as those of `full`.
  bool exact = false;
  /// When it is admitted as one of so many about the same document, it attends fully, since they read it together:
  /// the one case in which an answer depends on what else is asked. 0 = never.
  int full_beside = 0;
  /// Share of the sparse attention calls (one layer, one stretch of tokens) that are also computed exactly:
  /// Generation::work has the error. Layers whose error is beyond the limit, if there is one, attend fully for the
  /// rest of the answer.
  double audit = 0;
  std::optional<double> audit_limit = {};
  std::shared_ptr<TokenFilter> filter;  ///< which tokens of the answer may come, thoughts apart; null: all
  /// Holds the tokens of an earlier request of the same document and attention; not read again is what the prompt
  /// shares with them. Its room is all that the document leaves. null: all of the prompt is read, and nothing is
  /// kept.
  std::shared_ptr<SequenceCache> cache = {};
  /// The prompt, read before (read_prompt); null: it is read now.
  std::shared_ptr<const ReadPrompt> read = {};
};

/// Why an answer ended.
enum class Ending {
  stop,       ///< a stop string or the model's end of text
  length,     ///< GenerateOptions::max_new_tokens
  room,       ///< the context's last token (Document::max_tokens)
  cancelled,  ///< Scheduler::cancel; what was generated until then is there
};
std::string_view name_of(Ending ending);

/// What drafting has brought to an exact answer.
struct ExactWork {
  std::int64_t drafted = 0, accepted = 0;  ///< tokens
  std::int64_t dense_steps = 0;            ///< in which drafts were verified, or a token generated without
  WorkReport drafts;                       ///< of the steps that drafted; Generation::work has the dense ones
  /// Share of the drafted tokens that were accepted; 0 when none was drafted.
  double accepted_share() const {
    return drafted == 0 ? 0.0 : static_cast<double>(accepted) / static_cast<double>(drafted);
  }
};

struct Answer {
  Generation generation;
  std::string attention;  ///< what it attended by: the request's, or `full` (Request::full_beside)
  ExactWork exact;        ///< zeros unless Request::exact
  Ending ending = Ending::stop;
  std::vector<int> full_layers;    ///< that fell back to full attention (Request::audit_limit), rising
  SourceMass sources;              ///< when wanted: [document + prompt + answer tokens]
  double queued_seconds = 0;       ///< from submit to its first step
  double first_token_seconds = 0;  ///< from its first step to the first generated token
  double step_seconds = 0;         ///< its share, by tokens, of the time of the steps that it took part in
};

/// A job that was handed in. `result.get()` waits; it rethrows what went wrong with this job.
template <class Result>
struct Ticket {
  std::uint64_t id = 0;  ///< for cancel
  std::shared_future<Result> result;
};

struct SchedulerOptions {
  int max_sequences = 16;  ///< that are answered at once; others wait
  int max_queued = 1024;   ///< that wait; more are refused
  std::int64_t memory =
      0;  ///< bytes of keys and values that sequences may hold; 0 = half of what the device has free
  std::int64_t chunk = 0;       ///< tokens of a prompt or document in one step; 0 = what suits the device
  Device device = Device::cpu;  ///< of requests without a document; `memory` is the GPU's for those on one
  /// Of ranks that share documents. The scheduler then has no threads: on all ranks alike, one thread calls take_in(),
  /// cancel() and step(). null: it works by itself.
  Unison* ranks = nullptr;
};

struct SchedulerStats {
  int queued = 0, running = 0, reading = 0;  ///< requests waiting and in work; documents being read
  std::int64_t memory = 0, memory_used = 0;  ///< bytes of keys and values, the documents' own apart
  std::int64_t steps = 0;
  std::int64_t prompt_tokens = 0, generated_tokens = 0;  ///< since the beginning
  std::int64_t answered = 0, failed = 0, cancelled = 0;  ///< requests since the beginning
};

class Scheduler {
 public:
  explicit Scheduler(std::shared_ptr<const Model> model, const SchedulerOptions& options = {});
  /// Cancels what is left and waits for the step that runs.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  /// InputError when the request can never be answered: another model's document, a method that the document
  /// has no index for, no prompt, more tokens than the context takes, more memory than there is (with both
  /// numbers). RunError when the queue is full.
  Ticket<Answer> submit(Request request);
  /// Reads a document, in chunks beside the answers that are being generated.
  Ticket<std::shared_ptr<const Document>> read(std::vector<TokenId> tokens, std::string text,
                                               DocumentOptions options);
  /// Ends a job at the next step at the latest: an answer ends with Ending::cancelled, a reading throws
  /// Interrupted from its ticket. False when there is no such job or it has ended.
  bool cancel(std::uint64_t id);

  SchedulerStats stats() const;
  const std::shared_ptr<const Model>& model() const;

  // Over ranks (SchedulerOptions::ranks); submit() is for one thread at a time then.
  /// A request that was submitted takes part from now on.
  void take_in(std::uint64_t id);
  /// Runs a step of those that take part, if there are any.
  void step();
  /// Ends all requests: the ranks can do nothing together any more.
  void fail(const std::exception_ptr& why);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode
