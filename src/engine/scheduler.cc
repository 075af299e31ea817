// SPDX-License-Identifier: Apache-2.0
// Two threads: one runs steps of all sequences that are being answered; the other reads documents, in the
// background of the thread pool, so that steps interrupt it between two items of a loop. Over ranks there are none: a
// step follows from the calls before it alone, and what one rank finds wrong with a request ends it on all.
#include "lodestone/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "base/out_of_memory.h"
#include "base/text.h"
#include "base/threads.h"
#include "base/unison.h"
#include "engine/memory.h"
#include "engine/running_answer.h"
#include "lodestone/error.h"

namespace lode {

namespace {

using Clock = std::chrono::steady_clock;

struct Reading {
  std::uint64_t id = 0;
  std::atomic<bool> cancelled{false};
  std::vector<TokenId> tokens;
  std::string text;
  DocumentOptions options;
  std::promise<std::shared_ptr<const Document>> result;
};

struct Asked {
  std::uint64_t id = 0;
  std::atomic<bool> cancelled{false};
  Request request;
  std::int64_t bytes = 0;  ///< of keys and values that it may come to hold
  Clock::time_point submitted = Clock::now();
  double queued_seconds = 0, step_seconds = 0;
  std::unique_ptr<RunningAnswer> answering;  ///< once admitted; the worker's alone
  std::promise<Answer> result;
};

double tokens_of(std::span<const BatchRow> rows) {
  std::size_t tokens = 0;
  for (const BatchRow& row : rows) tokens += row.tokens.size();
  return static_cast<double>(tokens);
}

template <class Jobs>
bool cancel_one(const Jobs& jobs, std::uint64_t id) {
  for (const auto& job : jobs)
    if (job != nullptr && job->id == id) return !job->cancelled.exchange(true);
  return false;
}

}  // namespace

std::string_view name_of(Ending ending) {
  constexpr std::string_view kNames[] = {"stop", "length", "room", "cancelled"};
  return kNames[static_cast<int>(ending)];
}

struct Scheduler::Impl {
  std::shared_ptr<const Model> model;
  SchedulerOptions options;
  std::once_flag needs_nothing;
  std::shared_ptr<const Document>
      nothing;  ///< the document of requests that have none, made for the first of them
  BatchRunner runner;

  mutable std::mutex mutex;  // of all that follows
  std::condition_variable wake;
  std::deque<std::shared_ptr<Asked>> arrived;   // over ranks: until they are taken in
  std::deque<std::shared_ptr<Asked>> queue;     // by priority, then as they came
  std::vector<std::shared_ptr<Asked>> running;  // in the order in which they were admitted
  std::deque<std::shared_ptr<Reading>> to_read;
  std::shared_ptr<Reading> reading;
  SchedulerStats stats;
  std::uint64_t last_id = 0;
  bool stop = false;
  bool lacks_tails = false;     ///< a request waits for a place behind its document until another one ends
  std::jthread worker, reader;  // joined before the rest goes

  Impl(std::shared_ptr<const Model> model_, const SchedulerOptions& options_);
  ~Impl();

  void check(const Request& request) const;
  void enqueue(std::shared_ptr<Asked> asked);
  void work();
  void turn(const std::vector<std::shared_ptr<Asked>>& now);
  std::vector<std::shared_ptr<Asked>> take_all();
  std::vector<std::shared_ptr<Asked>> admit();
  void step(const std::vector<std::shared_ptr<Asked>>& now);
  std::exception_ptr run(std::vector<BatchRow>& rows);
  void take(std::span<BatchRow> rows, std::span<Asked* const> of_row, const std::exception_ptr& failed);
  bool start(Asked& asked);
  std::unique_ptr<RunningAnswer> answering(const Asked& asked) const;
  void start_all(const std::vector<std::shared_ptr<Asked>>& now);
  bool reserve(Sequence& sequence);
  void put_back(const std::vector<std::shared_ptr<Asked>>& now);
  /// Admitted requests about the same document, its own included.
  std::int64_t count_beside(const Asked& asked) const {
    const std::lock_guard lock(mutex);
    return std::ranges::count_if(running, [&](const auto& other) {
      return other->request.document == asked.request.document && other->request.document->tokens() > 0;
    });
  }
  const std::shared_ptr<const Document>& empty_document() {
    std::call_once(needs_nothing, [&] { nothing = Document::empty(model, {.device = options.device}); });
    return nothing;
  }
  void count_generated(std::int64_t tokens) {
    const std::lock_guard lock(mutex);
    stats.generated_tokens += tokens;
  }
  void end(Asked& asked, std::exception_ptr error, Ending ending);
  void end_cancelled();
  void read();
};

namespace {

SchedulerOptions complete(SchedulerOptions options) {
  if (options.chunk == 0) options.chunk = kPromptChunk;
  if (options.memory == 0)
    options.memory = (options.device == Device::cuda ? gpu_info().free_bytes : available_memory()) / 2;
  return options;
}

}  // namespace

Scheduler::Impl::Impl(std::shared_ptr<const Model> model_, const SchedulerOptions& options_)
    : model(std::move(model_)),
      options(complete(options_)),
      runner(model, options.device == Device::cuda ? options.memory : options_.memory, options.ranks) {
  if (options.max_sequences < 1)
    throw InputError(fmt::format("expected room for at least one sequence, found {}", options.max_sequences));
  stats.memory = options.memory;
  if (options.ranks != nullptr) return;
  worker = std::jthread([this] { work(); });
  reader = std::jthread([this] { read(); });
}

Scheduler::Impl::~Impl() {
  {
    const std::lock_guard lock(mutex);
    stop = true;
    for (const auto& asked : queue) asked->cancelled = true;
    for (const auto& asked : running) asked->cancelled = true;
    for (const auto& job : to_read) job->cancelled = true;
    if (reading) reading->cancelled = true;
  }
  wake.notify_all();
  if (options.ranks != nullptr)
    for (const auto& asked : take_all()) end(*asked, nullptr, Ending::cancelled);
}

std::vector<std::shared_ptr<Asked>> Scheduler::Impl::take_all() {
  const std::lock_guard lock(mutex);
  std::vector<std::shared_ptr<Asked>> all = std::exchange(running, {});
  for (auto* const waiting : {&queue, &arrived}) {
    all.insert(all.end(), waiting->begin(), waiting->end());
    waiting->clear();
  }
  return all;
}

namespace {

void check_sources(const Request& request) {
  if (!(request.sharpness >= 1e-4 && request.sharpness <= 1))
    throw InputError(
        fmt::format("sharpness of sources: expected a share from 0.0001 to 1, found {}", request.sharpness));
  const Context::Impl& context = request.document->impl().parts();
  if (context.gpu != nullptr && !context.rereads_for_sources())
    throw InputError(
        "sources of answers about a document on a GPU: expected heads of 64 to 512 dimensions, a multiple of "
        "16, and "
        "no recurrent layers, found others: ask without sources, or on the CPU");
}

}  // namespace

void Scheduler::Impl::check(const Request& request) const {
  const Document& document = *request.document;
  if (document.model()->fingerprint() != model->fingerprint())
    throw InputError("expected a document that the scheduler's model has read, found another model's");
  document.impl().method_of(request.attention);
  if (request.prompt.empty()) throw InputError("expected a question of at least one token, found none");
  static_cast<void>(Sampler(request.options.sampling));
  if (request.want_sources) check_sources(request);
  const std::int64_t prompt = std::ssize(request.prompt);
  if (document.tokens() + prompt > document.max_tokens())
    throw InputError(fmt::format(
        "expected at most {} tokens in the context, found {} of the document and {} of the question",
        document.max_tokens(), document.tokens(), prompt));
  const std::int64_t bytes = Sequence::bytes(document, RunningAnswer::room_of(request));
  if (bytes > stats.memory)
    throw InputError(
        fmt::format("expected a question and answer of at most {} of keys and values, found a need for {}",
                    human_bytes(stats.memory), human_bytes(bytes)));
}

void Scheduler::Impl::work() {
  for (;;) {
    std::vector<std::shared_ptr<Asked>> now;
    {
      std::unique_lock lock(mutex);
      wake.wait(lock, [&] { return stop || !queue.empty() || !running.empty(); });
      if (stop && queue.empty() && running.empty()) return;
      now = admit();
    }
    turn(now);
  }
}

void Scheduler::Impl::turn(const std::vector<std::shared_ptr<Asked>>& now) {
  start_all(now);
  end_cancelled();
  step(now);
}

/// Moves requests from the queue while there is room for them, the first ones first. What was cancelled needs
/// none.
std::vector<std::shared_ptr<Asked>> Scheduler::Impl::admit() {
  for (auto it = queue.begin(); it != queue.end();) {
    const bool room = !lacks_tails && std::ssize(running) < options.max_sequences &&
                      stats.memory_used + (*it)->bytes <= stats.memory;
    if (!room && !(*it)->cancelled) {
      if (std::none_of(it, queue.end(), [](const auto& asked) { return asked->cancelled.load(); })) break;
      ++it;
      continue;
    }
    stats.memory_used += (*it)->bytes;
    running.push_back(std::move(*it));
    it = queue.erase(it);
  }
  return running;
}

void Scheduler::Impl::start_all(const std::vector<std::shared_ptr<Asked>>& now) {
  for (const auto& asked : now)
    if (asked->answering == nullptr && !asked->cancelled && !start(*asked)) return put_back(now);
}

/// Those that have not been started wait on, in their order and in front of all others.
void Scheduler::Impl::put_back(const std::vector<std::shared_ptr<Asked>>& now) {
  const std::lock_guard lock(mutex);
  lacks_tails = true;
  for (auto it = now.rbegin(); it != now.rend(); ++it) {
    const std::shared_ptr<Asked>& asked = *it;
    if (asked->answering != nullptr || std::erase(running, asked) == 0) continue;
    stats.memory_used -= asked->bytes;
    queue.push_front(asked);
  }
}

/// Room for an admitted request's tokens on a GPU. What others hold may lie so that no place is long enough for it,
/// though as much is free, and what does not belong to this program may have taken memory: it waits while others run,
/// whose end makes places.
bool Scheduler::Impl::reserve(Sequence& sequence) {
  const auto alone = [&] {
    const std::lock_guard lock(mutex);
    return std::ranges::none_of(running, [](const auto& other) { return other->answering != nullptr; });
  };
  try {
    if (runner.reserve(sequence)) return true;
  } catch (const OutOfDeviceMemory&) {
    if (alone()) throw;
    return false;
  }
  if (!alone()) return false;
  throw OutOfDeviceMemory(
      "expected room on the GPU for a question and answer, found it taken by sequences that are kept: end "
      "some of them");
}

std::unique_ptr<RunningAnswer> Scheduler::Impl::answering(const Asked& asked) const {
  std::unique_ptr<RunningAnswer> answering;
  run_alike(options.ranks,
            [&] { answering = std::make_unique<RunningAnswer>(asked.request, options.chunk); });
  return answering;
}

/// False when it has to wait.
bool Scheduler::Impl::start(Asked& asked) {
  asked.queued_seconds = std::chrono::duration<double>(Clock::now() - asked.submitted).count();
  const Spec usual = asked.request.attention;
  try {
    if (const int most = asked.request.full_beside; most > 0 && count_beside(asked) >= most)
      asked.request.attention = parse_spec("full");
    auto answering = this->answering(asked);
    if (!answering->complete() && !reserve(answering->sequence())) {
      asked.request.attention = usual;  // how many ask beside it is counted anew when there is room
      return false;
    }
    asked.answering = std::move(answering);
    if (asked.answering->complete()) end(asked, nullptr, asked.answering->ending());
  } catch (const RankLost&) {
    throw;
  } catch (...) {
    end(asked, std::current_exception(), Ending::cancelled);
  }
  return true;
}

/// All sequences that generate, and prompts up to a chunk of tokens, the oldest first.
void Scheduler::Impl::step(const std::vector<std::shared_ptr<Asked>>& now) {
  std::vector<BatchRow> rows;
  std::vector<Asked*> of_row;
  std::int64_t prompt_tokens = 0;
  for (const auto& asked : now) {
    if (asked->answering == nullptr || asked->cancelled) continue;
    const bool reads = asked->answering->reading();
    const std::int64_t tokens = asked->answering->next_tokens();
    if (reads && prompt_tokens > 0 && prompt_tokens + tokens > options.chunk) continue;
    if (reads) prompt_tokens += tokens;
    rows.push_back(asked->answering->next());
    of_row.push_back(asked.get());
  }
  if (rows.empty()) return;
  const auto begin = Clock::now();
  const std::exception_ptr failed = run(rows);
  {
    const std::lock_guard lock(mutex);
    ++stats.steps;
    stats.prompt_tokens += prompt_tokens;
  }
  const double token_seconds = std::chrono::duration<double>(Clock::now() - begin).count() / tokens_of(rows);
  for (std::size_t i = 0; i < rows.size(); ++i)
    of_row[i]->step_seconds += token_seconds * static_cast<double>(rows[i].tokens.size());
  take(rows, of_row, failed);
}

/// Ends the answers that the rows complete, and those that failed.
void Scheduler::Impl::take(std::span<BatchRow> rows, std::span<Asked* const> of_row,
                           const std::exception_ptr& failed) {
  std::vector<Outcome> taken(rows.size());
  std::vector<bool> done(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    try {
      if (failed) std::rethrow_exception(failed);
      RunningAnswer& answering = *of_row[i]->answering;
      const std::int64_t before = answering.generated();
      done[i] = answering.take(rows[i]);
      count_generated(answering.generated() - before);
      if (options.ranks != nullptr)
        taken[i].result = fmt::format("token {}{}", answering.last(), done[i] ? ", the last" : "");
    } catch (...) {
      taken[i].failure = std::current_exception();
    }
  }
  if (options.ranks != nullptr) agree(options.ranks->ranks(), taken);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (taken[i].failure)
      end(*of_row[i], taken[i].failure, Ending::cancelled);
    else if (done[i])
      end(*of_row[i], nullptr, of_row[i]->answering->ending());
  }
}

/// Why no row could be run, if so.
std::exception_ptr Scheduler::Impl::run(std::vector<BatchRow>& rows) {
  try {
    const ThreadPool::Urgent urgent(model->pool());
    runner.run(rows);
    return nullptr;
  } catch (const RankLost&) {
    if (options.ranks != nullptr) throw;  // to whoever called for the step
    return std::current_exception();
  } catch (...) {
    return std::current_exception();
  }
}

/// Hands over what a request has come to, and gives back its room.
void Scheduler::Impl::end(Asked& asked, std::exception_ptr error, Ending ending) {
  Answer answer;
  try {
    answer.ending = ending;
    if (!error && asked.answering) answer = asked.answering->finish(ending);
    answer.queued_seconds = asked.queued_seconds;
    answer.step_seconds = asked.step_seconds;
  } catch (...) {  // on_text throws at the last piece of text
    error = std::current_exception();
  }
  asked.answering.reset();
  {
    const std::lock_guard lock(mutex);
    stats.memory_used -= asked.bytes;
    ++(error ? stats.failed : ending == Ending::cancelled ? stats.cancelled : stats.answered);
    // Last, since who waits for the result may look at the stats.
    error ? asked.result.set_exception(error) : asked.result.set_value(std::move(answer));
    std::erase_if(running, [&](const auto& other) { return other.get() == &asked; });
    lacks_tails = false;
  }
}

void Scheduler::Impl::end_cancelled() {
  std::vector<std::shared_ptr<Asked>> cancelled;
  {
    const std::lock_guard lock(mutex);
    for (const auto& asked : running)
      if (asked->cancelled) cancelled.push_back(asked);
  }
  for (const auto& asked : cancelled) end(*asked, nullptr, Ending::cancelled);
}

void Scheduler::Impl::read() {
  for (;;) {
    std::shared_ptr<Reading> job;
    {
      std::unique_lock lock(mutex);
      wake.wait(lock, [&] { return stop || !to_read.empty(); });
      if (to_read.empty()) return;
      reading = job = to_read.front();
      to_read.pop_front();
    }
    try {
      if (job->cancelled) throw Interrupted();
      const auto told = std::exchange(job->options.progress, {});
      job->options.progress = [&](const ReadProgress& progress) {
        if (told) told(progress);
        if (job->cancelled) throw Interrupted();
      };
      job->result.set_value(Document::read(model, job->tokens, std::move(job->text), job->options));
    } catch (...) {
      job->result.set_exception(std::current_exception());
    }
    // `job` dies after the lock: what it holds may wait for other locks as it goes (Python's).
    const std::lock_guard lock(mutex);
    reading = nullptr;
  }
}

Scheduler::Scheduler(std::shared_ptr<const Model> model, const SchedulerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(model), options)) {}
Scheduler::~Scheduler() = default;

Ticket<Answer> Scheduler::submit(Request request) {
  Impl& s = *impl_;
  if (request.document == nullptr) request.document = s.empty_document();
  s.check(request);
  auto asked = std::make_shared<Asked>();
  asked->bytes = Sequence::bytes(*request.document, RunningAnswer::room_of(request));
  asked->request = std::move(request);
  Ticket<Answer> ticket = {.result = asked->result.get_future().share()};
  {
    const std::lock_guard lock(s.mutex);
    const std::size_t waiting = s.queue.size() + s.arrived.size();
    if (static_cast<std::int64_t>(waiting) >= s.options.max_queued)
      throw RunError(fmt::format("{} requests are waiting, as many as may wait: ask again later", waiting));
    ticket.id = asked->id = ++s.last_id;
    s.options.ranks == nullptr ? s.enqueue(std::move(asked)) : s.arrived.push_back(std::move(asked));
  }
  s.wake.notify_all();
  return ticket;
}

/// Under the lock.
void Scheduler::Impl::enqueue(std::shared_ptr<Asked> asked) {
  const auto behind = std::find_if(queue.begin(), queue.end(), [&](const auto& other) {
    return other->request.priority < asked->request.priority;
  });
  queue.insert(behind, std::move(asked));
}

void Scheduler::take_in(std::uint64_t id) {
  const std::lock_guard lock(impl_->mutex);
  const auto found = std::ranges::find(impl_->arrived, id, &Asked::id);
  LODE_ASSERT(found != impl_->arrived.end());
  impl_->enqueue(std::move(*found));
  impl_->arrived.erase(found);
}

void Scheduler::step() {
  LODE_ASSERT(impl_->options.ranks != nullptr);
  std::vector<std::shared_ptr<Asked>> now;
  {
    const std::lock_guard lock(impl_->mutex);
    now = impl_->admit();
  }
  if (!now.empty()) impl_->turn(now);
}

void Scheduler::fail(const std::exception_ptr& why) {
  for (const auto& asked : impl_->take_all()) impl_->end(*asked, why, Ending::cancelled);
}

Ticket<std::shared_ptr<const Document>> Scheduler::read(std::vector<TokenId> tokens, std::string text,
                                                        DocumentOptions options) {
  auto job = std::make_shared<Reading>();
  job->tokens = std::move(tokens);
  job->text = std::move(text);
  job->options = std::move(options);
  Ticket<std::shared_ptr<const Document>> ticket = {.result = job->result.get_future().share()};
  {
    const std::lock_guard lock(impl_->mutex);
    ticket.id = job->id = ++impl_->last_id;
    impl_->to_read.push_back(std::move(job));
  }
  impl_->wake.notify_all();
  return ticket;
}

bool Scheduler::cancel(std::uint64_t id) {
  Impl& s = *impl_;
  bool found = false;
  {
    const std::lock_guard lock(s.mutex);
    found = cancel_one(s.queue, id) || cancel_one(s.running, id) || cancel_one(s.to_read, id) ||
            cancel_one(std::initializer_list<std::shared_ptr<Reading>>{s.reading}, id);
  }
  s.wake.notify_all();
  return found;
}

SchedulerStats Scheduler::stats() const {
  const std::lock_guard lock(impl_->mutex);
  SchedulerStats stats = impl_->stats;
  stats.queued = static_cast<int>(impl_->queue.size() + impl_->arrived.size());
  stats.running = static_cast<int>(impl_->running.size());
  stats.reading = static_cast<int>(impl_->to_read.size()) + (impl_->reading ? 1 : 0);
  return stats;
}

const std::shared_ptr<const Model>& Scheduler::model() const {
  return impl_->model;
}

}  // namespace lode
