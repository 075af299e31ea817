// SPDX-License-Identifier: Apache-2.0
#include "lodestone/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "engine/document.h"
#include "engine/memory.h"
#include "lodestone/error.h"

namespace lode {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// Thrown through a step by a job that was cancelled.
struct Cancelled {};

/// A request, or a document to read.
struct Job {
  std::uint64_t id = 0;
  int priority = 0;
  Clock::time_point submitted = Clock::now();
  std::atomic<bool> cancelled{false};
  Request request;
  std::promise<Answer> answer;

  bool reads = false;
  std::vector<TokenId> tokens;
  std::string text;
  DocumentOptions options;
  std::promise<std::shared_ptr<const Document>> document;

  void fail(std::exception_ptr error) { reads ? document.set_exception(error) : answer.set_exception(error); }
};

}  // namespace

std::string_view name_of(Ending ending) {
  constexpr std::string_view kNames[] = {"stop", "length", "room", "cancelled"};
  return kNames[static_cast<int>(ending)];
}

struct Scheduler::Impl {
  std::shared_ptr<const Model> model;
  SchedulerOptions options;
  std::shared_ptr<const Document> nothing;  // the document of requests that have none

  mutable std::mutex mutex;
  std::condition_variable wake;
  std::deque<std::shared_ptr<Job>> queue;
  std::shared_ptr<Job> running;
  SchedulerStats stats;
  std::uint64_t last_id = 0;
  bool stop = false;
  std::jthread worker;

  Impl(std::shared_ptr<const Model> model_, const SchedulerOptions& options_)
      : model(std::move(model_)), options(options_), nothing(Document::empty(model)) {
    stats.memory = options.memory > 0 ? options.memory : available_memory() / 2;
    worker = std::jthread([this] { work(); });
  }
  ~Impl() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
      for (const auto& job : queue) job->cancelled = true;
      if (running) running->cancelled = true;
    }
    wake.notify_all();
  }

  std::int64_t tail_bytes(const Request& request) const {
    return (std::ssize(request.prompt) + request.options.max_new_tokens) *
           request.document->impl().parts().kv.shape().token_bytes();
  }

  void check(const Request& request) const {
    const Document& document = *request.document;
    if (document.model()->fingerprint() != model->fingerprint())
      throw InputError("expected a document that the scheduler's model has read, found another model's");
    document.impl().method_of(request.attention);
    if (request.prompt.empty()) throw InputError("expected a question of at least one token, found none");
    if (document.tokens() + std::ssize(request.prompt) > document.max_tokens())
      throw InputError(fmt::format(
          "expected at most {} tokens in the context (-c), found {} of the document and {} of the question",
          document.max_tokens(), document.tokens(), request.prompt.size()));
    if (tail_bytes(request) > stats.memory)
      throw InputError(fmt::format(
          "expected a question and answer of at most {} bytes of keys and values, found a need for {}",
          stats.memory, tail_bytes(request)));
  }

  std::uint64_t enqueue(std::shared_ptr<Job> job) {
    const std::lock_guard lock(mutex);
    if (std::ssize(queue) >= options.max_queued)
      throw RunError(
          fmt::format("{} requests are waiting, as many as may wait: try again later", queue.size()));
    job->id = ++last_id;
    const auto behind = std::find_if(queue.begin(), queue.end(),
                                     [&](const auto& other) { return other->priority < job->priority; });
    queue.insert(behind, job);
    wake.notify_all();
    return job->id;
  }

  void work() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock lock(mutex);
        running = nullptr;
        wake.wait(lock, [&] { return stop || !queue.empty(); });
        if (queue.empty()) return;
        running = job = queue.front();
        queue.pop_front();
      }
      try {
        job->reads ? read(*job) : answer(*job);
      } catch (...) {
        job->fail(std::current_exception());
        const std::lock_guard lock(mutex);
        ++stats.failed;
      }
    }
  }

  void answer(Job& job) {
    const Document& document = *job.request.document;
    Context& context = const_cast<Context&>(document.impl().context);
    Answer result;
    result.queued_seconds = seconds_since(job.submitted);
    GenerateOptions wanted = job.request.options;
    std::string text;
    wanted.on_text = [&](std::string_view piece) {
      text += piece;
      if (job.request.options.on_text) job.request.options.on_text(piece);
      if (job.cancelled) throw Cancelled();
    };
    const std::int64_t tokens = context.tokens();
    const auto start = Clock::now();
    try {
      if (job.cancelled) throw Cancelled();
      const MethodId method =
          job.request.attention.name == "full" ? kDense : context.attach(job.request.attention);
      result.generation = context.generate(job.request.prompt, method, wanted,
                                           job.request.want_sources ? &result.sources : nullptr);
      const auto& g = result.generation;
      result.ending = g.stopped                                       ? Ending::stop
                      : std::ssize(g.tokens) == wanted.max_new_tokens ? Ending::length
                                                                      : Ending::room;
      result.first_token_seconds = g.prompt_seconds;
    } catch (const Cancelled&) {
      result.generation.text = text;
      result.ending = Ending::cancelled;
      result.first_token_seconds = seconds_since(start);
    }
    context.roll_back(tokens);
    {
      const std::lock_guard lock(mutex);
      ++(result.ending == Ending::cancelled ? stats.cancelled : stats.answered);
      stats.generated_tokens += std::ssize(result.generation.tokens);
      stats.prompt_tokens += std::ssize(job.request.prompt);
    }
    job.answer.set_value(std::move(result));
  }

  void read(Job& job) {
    const auto told = std::exchange(job.options.progress, {});
    job.options.progress = [&](const ReadProgress& progress) {
      if (told) told(progress);
      if (job.cancelled) throw Interrupted();
    };
    job.document.set_value(Document::read(model, job.tokens, std::move(job.text), job.options));
  }
};

Scheduler::Scheduler(std::shared_ptr<const Model> model, const SchedulerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(model), options)) {}
Scheduler::~Scheduler() = default;

Ticket<Answer> Scheduler::submit(Request request) {
  if (request.document == nullptr) request.document = impl_->nothing;
  impl_->check(request);
  auto job = std::make_shared<Job>();
  job->priority = request.priority;
  job->request = std::move(request);
  Ticket<Answer> ticket = {.result = job->answer.get_future().share()};
  ticket.id = impl_->enqueue(std::move(job));
  return ticket;
}

Ticket<std::shared_ptr<const Document>> Scheduler::read(std::vector<TokenId> tokens, std::string text,
                                                        DocumentOptions options) {
  auto job = std::make_shared<Job>();
  job->reads = true;
  job->tokens = std::move(tokens);
  job->text = std::move(text);
  job->options = std::move(options);
  Ticket<std::shared_ptr<const Document>> ticket = {.result = job->document.get_future().share()};
  ticket.id = impl_->enqueue(std::move(job));
  return ticket;
}

bool Scheduler::cancel(std::uint64_t id) {
  const std::lock_guard lock(impl_->mutex);
  if (impl_->running && impl_->running->id == id) return !impl_->running->cancelled.exchange(true);
  for (const auto& job : impl_->queue)
    if (job->id == id) return !job->cancelled.exchange(true);
  return false;
}

SchedulerStats Scheduler::stats() const {
  const std::lock_guard lock(impl_->mutex);
  SchedulerStats stats = impl_->stats;
  stats.queued = static_cast<int>(impl_->queue.size());
  if (impl_->running) ++(impl_->running->reads ? stats.reading : stats.running);
  return stats;
}

const std::shared_ptr<const Model>& Scheduler::model() const {
  return impl_->model;
}

}  // namespace lode
