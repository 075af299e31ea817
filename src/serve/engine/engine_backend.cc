// SPDX-License-Identifier: Apache-2.0
#include "serve/engine/engine_backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>

#include "base/out_of_memory.h"
#include "base/text.h"
#include "engine/document.h"
#include "lodestone/automatic.h"
#include "lodestone/error.h"
#include "model/config.h"
#include "serve/engine/source_places.h"
#include "serve/prompt_text.h"
#include "serve/specs.h"
#include "text/blanks.h"

namespace lode::serve {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kPassages = 12;
constexpr const char* kNeutralQuestion = "What does the text say?";
constexpr std::int64_t kNeutralTokens = 8;
constexpr int kRetrySeconds = 2;
constexpr auto kWatchInterval = std::chrono::milliseconds(1), kIdleInterval = std::chrono::milliseconds(100);

template <class Future>
bool is_ready(const Future& future) {
  return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

/// Why what an answer attended to cannot be known; empty when it can.
std::string why_no_sources(const Document& document) {
  const Context::Impl& context = document.impl().parts();
  if (document.impl().distributed != nullptr)
    return "there are no passages: several ranks answer, each of which sees its own part of the text";
  if (context.gpu == nullptr || context.rereads_for_sources()) return {};
  return "there are no passages: expected heads of 64 to 512 dimensions and no recurrent layers, "
         "for which the GPU finds what an answer attends to";
}

}  // namespace

/// A question under way.
struct EngineBackend::Job {
  std::uint64_t id = 0;  ///< ours; the scheduler's own is the ticket's
  Question question;
  std::optional<AutoSpec> automatic;  ///< asked for in place of a spec
  bool usual = false;                 ///< nothing was asked for
  Spec spec = parse_spec("full");
  const LoadedModel* model = nullptr;
  Library::Opened opened;
  Ticket<lode::Answer> ticket;
  Listener listener;
  BlankTrimmer trimmer;           ///< of the scheduler's thread
  std::string text;               ///< what the listener has got; of the scheduler's thread until it is done
  Answer answer;                  ///< what is known of it beforehand
  std::vector<std::string> stop;  ///< the request's own
  std::shared_future<lode::Answer> neutral;  ///< where sources are wanted
  bool want_sources = false;
  std::string no_sources;  ///< why there are none though they are wanted
  Clock::time_point since = Clock::now();
  double waited = 0;       ///< seconds until its document was open
  bool waits = false;      ///< for its document; the backend's lock is over this and what follows
  bool cancelled = false;  ///< before the scheduler had it

  bool over() const {
    return cancelled || (is_ready(ticket.result) && (!neutral.valid() || is_ready(neutral)));
  }
};

EngineBackend::EngineBackend(const std::vector<std::pair<std::string, std::shared_ptr<const Model>>>& models,
                             EngineOptions options)
    : options_(std::move(options)), started_(std::time(nullptr)) {
  load(models);
  options_.library.ranks = ranks_.get();
  library_ = std::make_unique<Library>(models_, options_.library);
  watcher_ = std::thread([this] { watch(); });
}

void EngineBackend::load(const std::vector<std::pair<std::string, std::shared_ptr<const Model>>>& models) {
  if (options_.ranks != nullptr) {
    ranks_ =
        std::make_unique<RankEngine>(*options_.ranks, models, options_.scheduler, options_.question_template);
    models_ = ranks_->models();
    return;
  }
  for (const auto& [id, model] : models) {
    const auto there = options_.on_gpu.find(id);
    SchedulerOptions scheduler = options_.scheduler;
    if (there != options_.on_gpu.end()) {
      scheduler.device = Device::cuda;
      scheduler.memory = options_.gpu_question_memory;
    }
    models_.push_back({.id = id,
                       .model = model,
                       .scheduler = std::make_shared<Scheduler>(model, scheduler),
                       .prompting = std::make_shared<Prompting>(model, options_.question_template),
                       .on_gpu = there != options_.on_gpu.end() ? there->second : nullptr});
  }
}

EngineBackend::~EngineBackend() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    for (const auto& job : jobs_)
      if (!job->cancelled) end(*job);
    for (const auto& [id, job] : waiting_) {
      job->cancelled = true;
      jobs_.push_back(job);
    }
    waiting_.clear();
  }
  wake_.notify_all();
  watcher_.join();
  library_->stop();  // what it opens comes to nobody
  library_.reset();
}

std::vector<ServedModel> EngineBackend::models() {
  std::vector<ServedModel> all;
  for (const LoadedModel& model : models_)
    all.push_back({model.id, model.model->config().max_positions, started_});
  return all;
}

BackendStats EngineBackend::stats() {
  BackendStats all;
  library_->count(all);
  {
    const std::lock_guard lock(mutex_);
    all.queued += static_cast<int>(waiting_.size());
  }
  for (const LoadedModel& model : models_) {
    const SchedulerStats one = model.scheduler->stats();
    all.queued += one.queued;
    all.running += one.running;
    all.memory += one.memory;
    all.memory_used += one.memory_used;
  }
  return all;
}

namespace {

/// Why a document of one model cannot be asked by another.
void expect_model(const Question& question, const Library::Opened& opened) {
  if (question.model.empty() || question.model == opened.model->id) return;
  throw ApiError(400, fmt::format("the context '{}' was read by the model '{}', not by '{}'",
                                  question.context, opened.model->id, excerpt(question.model)));
}

/// Of a question that names no method, or `auto`.
AutoChoice chosen_method(const std::optional<AutoSpec>& wanted, const Document& document) {
  if (wanted) return choose_attention(*wanted, document);
  AutoChoice choice = usual_attention(document).front();
  if (choice.why.empty() && choice.spec.name != "full")
    choice.why = "the first method that the text was indexed for";
  return choice;
}

GenerateOptions generate_options(const Question& question, const Prompt& prompt, std::int64_t usual) {
  GenerateOptions options;
  options.max_new_tokens = question.max_new_tokens > 0 ? question.max_new_tokens : usual;
  options.max_thought_tokens = question.max_thought_tokens;
  options.stop = question.stop;
  if (question.schema.empty())  // what ends with its schema may have line breaks
    options.stop.insert(options.stop.end(), prompt.stop.begin(), prompt.stop.end());
  options.sampling = question.sampling;
  return options;
}

void add_notice(Answer& answer, const std::string& notice) {
  if (!notice.empty()) answer.notice += (answer.notice.empty() ? "" : "; ") + notice;
}

std::string ending_of(Ending ending) {
  return std::string(lode::name_of(ending));
}

/// Why an answer that was cut off is none, no JSON, or shorter than was allowed, and what would help; empty where nothing is
/// to be said.
std::string why_cut(const Question& question, const Answer& answer, const Generation& generation) {
  if (generation.stopped || answer.ending == ending_of(Ending::cancelled)) return {};
  const bool full = answer.ending == ending_of(Ending::room),
             thinking = answer.thought_tokens > 0 && answer.thought_tokens == answer.answer_tokens;
  if (!thinking && !full && question.schema.empty()) return {};
  const std::string when =
      full ? fmt::format("the context was full, {} tokens behind the question", answer.answer_tokens)
           : fmt::format("its {} tokens were used up", answer.answer_tokens);
  const std::string json =
      question.schema.empty() ? "" : ", so that the answer is not the JSON of its schema";
  const std::string more =
      full ? "shorter messages leave it more room, max_tokens does not" : "allow it more (max_tokens)";
  return fmt::format("{} when {}{}: {}{}",
                     thinking ? "the model was still thinking" : "the answer was cut off", when, json, more,
                     thinking ? ", or fewer of them for thoughts" : "");
}

/// The stop string of the request that ended the answer; empty when something else did.
std::string stop_string(const Generation& generation, const std::vector<std::string>& stops) {
  return std::ranges::find(stops, generation.stop) != stops.end() ? generation.stop : std::string();
}

/// What a neutral question attended to; null when it was not answered.
const SourceMass* mass_of(const std::shared_future<lode::Answer>& neutral) {
  try {
    return neutral.valid() ? &neutral.get().sources : nullptr;
  } catch (const std::exception&) {  // no room for it: nothing is taken off
    return nullptr;
  }
}

}  // namespace

/// Passages that every question attends to say nothing about one of them.
std::shared_future<lode::Answer> EngineBackend::neutral_answer(const Library::Opened& opened,
                                                               const Spec& spec) {
  const std::lock_guard lock(opened.neutral->mutex);
  std::shared_future<lode::Answer>& known = opened.neutral->by_spec[spec.str()];
  if (known.valid()) return known;
  Request request;
  request.document = opened.document;
  request.prompt = opened.model->prompting->behind(*opened.document, {{"user", kNeutralQuestion}}).tokens;
  request.attention = spec;
  request.options.max_new_tokens = kNeutralTokens;
  request.want_sources = true;
  try {
    known = opened.model->scheduler->submit(std::move(request)).result;
  } catch (
      const std::runtime_error&) {  // no room in the document or in the queue: the next question tries again
    return {};
  }
  return known;
}

namespace {

ApiError to_api(const std::exception& error) {
  if (const auto* const known = dynamic_cast<const ApiError*>(&error)) return *known;
  if (dynamic_cast<const OutOfDeviceMemory*>(&error) != nullptr) {  // others may give memory back
    ApiError busy(503, error.what());
    busy.retry_seconds = kRetrySeconds;
    return busy;
  }
  return ApiError(dynamic_cast<const InputError*>(&error) != nullptr ? 400 : 500, error.what());
}

ApiError too_many_wait(const std::string& sentence) {
  ApiError full(429, sentence);
  full.retry_seconds = kRetrySeconds;
  return full;
}

}  // namespace

std::uint64_t EngineBackend::ask(Question question, Listener listener) {
  auto job = std::make_shared<Job>();
  job->model = &model_named(models_, question.model);
  job->listener = std::move(listener);
  job->stop = question.stop;
  const bool has_document = !question.context.empty();
  if (has_document) {
    job->automatic = parse_request_auto(question.attention);
    job->usual = question.attention.empty();
    if (!job->automatic && !job->usual) job->spec = parse_request_spec(question.attention);
  } else if (!question.attention.empty() && question.attention != "auto" && question.attention != "full") {
    throw ApiError(400,
                   fmt::format("'attention': expected 'full' or none without a stored context, found '{}'",
                               excerpt(question.attention)));
  }
  job->question = std::move(question);
  enqueue(job);
  std::optional<Library::Opened> opened = Library::Opened();
  try {
    if (has_document)
      opened = library_->open(job->question.context, job->spec,
                              {.id = job->id,
                               .ready = [this, id = job->id](const auto& there) { begin_late(id, there); },
                               .refused =
                                   [this, id = job->id](const ApiError& why) {
                                     if (const JobPtr gone = stop_waiting(id)) gone->listener.on_failure(why);
                                   }});
    if (opened) {
      if (stop_waiting(job->id) != nullptr) begin(job, *opened);
    } else {
      const std::lock_guard lock(mutex_);
      job->waits = true;
    }
  } catch (...) {
    stop_waiting(job->id);
    throw;
  }
  return job->id;
}

/// A new question may have to wait for its document. ApiError 429 when as many of its model wait as may, for documents
/// or for a place in a step.
void EngineBackend::enqueue(const JobPtr& job) {
  const auto queued = static_cast<std::int64_t>(job->model->scheduler->stats().queued);
  const std::lock_guard lock(mutex_);
  if (stop_) throw ApiError(503, "the server is stopping");
  const std::int64_t waiting = queued + std::ranges::count_if(waiting_, [&](const auto& one) {
                                 return one.second->waits && one.second->model == job->model;
                               });
  if (waiting >= options_.scheduler.max_queued)
    throw too_many_wait(
        fmt::format("{} questions are waiting, as many as may wait (--queue): ask again later", waiting));
  job->id = ++last_id_;
  waiting_.emplace(job->id, job);
}

/// The job, which waits no longer; null when it did not.
EngineBackend::JobPtr EngineBackend::stop_waiting(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = waiting_.find(id);
  if (found == waiting_.end()) return nullptr;
  JobPtr job = found->second;
  waiting_.erase(found);
  return job;
}

/// The same; until the scheduler has it or it has failed it is among those that begin, so that it can be cancelled at
/// every moment.
EngineBackend::JobPtr EngineBackend::stop_waiting_to_begin(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  auto taken = waiting_.extract(id);
  if (taken.empty()) return nullptr;
  return beginning_.insert(std::move(taken)).position->second;
}

/// A question's document has been opened.
void EngineBackend::begin_late(std::uint64_t id, const Library::Opened& opened) {
  const JobPtr job = stop_waiting_to_begin(id);
  if (job == nullptr) return;  // cancelled
  job->waited = std::chrono::duration<double>(Clock::now() - job->since).count();
  try {
    begin(job, opened);
  } catch (const std::exception& error) {
    {
      const std::lock_guard lock(mutex_);
      beginning_.erase(id);
    }
    job->opened.document.reset();
    job->listener.on_failure(to_api(error));
  }
}

/// What the scheduler is asked, of a job whose document is open.
Request EngineBackend::request_of(Job& job, AutoChoice& chosen) {
  const Question& question = job.question;
  const bool has_document = job.opened.document != nullptr;
  if (has_document) {
    if (job.automatic || job.usual) {
      chosen = chosen_method(job.automatic, *job.opened.document);
      job.spec = chosen.spec;
    }
    expect_model(question, job.opened);
    job.model = job.opened.model;
  }
  Prompting& prompting = *job.model->prompting;
  const Thinking thinking = {.on = question.think, .effort = question.effort};
  const Prompt prompt = has_document ? prompting.behind(*job.opened.document, question.turns, thinking)
                                     : prompting.of(question.turns, thinking);
  job.answer.notice = question.notice;
  add_notice(job.answer, prompt.notice);
  const bool wanted = has_document && question.want_sources;
  if (wanted) job.no_sources = why_no_sources(*job.opened.document);
  job.want_sources = wanted && job.no_sources.empty();
  Request request;
  request.document = job.opened.document;
  request.prompt = prompt.tokens;
  if (!question.schema.empty()) request.filter = prompting.filter(question.schema);
  request.attention = job.spec;
  request.exact = question.exact;
  request.full_beside = question.exact ? 0 : chosen.full_beside;
  request.options = generate_options(question, prompt, options_.max_new_tokens);
  request.want_sources = job.want_sources;
  return request;
}

/// Hands a job whose document is open to the scheduler. ApiError, InputError.
void EngineBackend::begin(const JobPtr& job, const Library::Opened& opened) {
  job->opened = opened;
  AutoChoice chosen = {.spec = job->spec, .why = {}};
  Request request = request_of(*job, chosen);
  if (request.want_sources) job->neutral = neutral_answer(job->opened, job->spec);
  Answer& known = job->answer;
  known.model = job->model->id;
  known.context = job->question.context;
  known.attention = job->spec.str();
  known.why = chosen.why;
  known.cached_tokens = request.document != nullptr ? request.document->tokens() : 0;
  known.prompt_tokens = known.cached_tokens + std::ssize(request.prompt);
  if (job->listener.on_prompt) job->listener.on_prompt(known);
  request.options.on_text = [raw = job.get()](std::string_view piece) {  // the job outlives its request
    const std::string ready = raw->trimmer.push(piece);
    raw->text += ready;
    if (!ready.empty()) raw->listener.on_text(ready);
  };
  request.options.on_thought = [raw = job.get()](std::string_view piece) {
    if (raw->listener.on_thought) raw->listener.on_thought(piece);
  };
  const std::lock_guard lock(mutex_);
  if (stop_) throw ApiError(503, "the server is stopping");
  beginning_.erase(job->id);
  if (job->cancelled) {  // meanwhile
    jobs_.push_back(job);
    return wake_.notify_all();
  }
  try {
    job->ticket = ranks_ != nullptr ? ranks_->submit(*job->model, std::move(request), job->question.schema)
                                    : job->model->scheduler->submit(std::move(request));
  } catch (const InputError& error) {
    throw ApiError(400, error.what());
  } catch (const RunError& error) {
    throw too_many_wait(error.what());
  }
  jobs_.push_back(job);
  wake_.notify_all();
}

void EngineBackend::cancel(std::uint64_t id) {
  const JobPtr waited = stop_waiting(id);
  if (waited != nullptr) library_->stop_waiting(id);
  const std::lock_guard lock(mutex_);
  if (waited != nullptr) {
    waited->cancelled = true;
    jobs_.push_back(waited);
    return wake_.notify_all();
  }
  if (const auto begins = beginning_.find(id); begins != beginning_.end()) begins->second->cancelled = true;
  for (const auto& job : jobs_)
    if (job->id == id && !job->cancelled) end(*job);
}

/// Ends a job that the scheduler has.
void EngineBackend::end(const Job& job) {
  if (ranks_ != nullptr) return ranks_->cancel(*job.model, job.ticket.id);
  job.model->scheduler->cancel(job.ticket.id);
}

/// The thread that tells listeners how their questions ended.
void EngineBackend::watch() {
  while (true) {
    std::vector<JobPtr> done;
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kIdleInterval, [&] { return stop_ || !jobs_.empty(); });
      if (jobs_.empty() && stop_) return;
      for (auto at = jobs_.begin(); at != jobs_.end();) {
        const bool over = (*at)->over();
        if (over) done.push_back(*at);
        at = over ? jobs_.erase(at) : std::next(at);
      }
    }
    for (const auto& job : done) tell(*job);
    if (done.empty()) std::this_thread::sleep_for(kWatchInterval);
    done.clear();
  }
}

void EngineBackend::tell(Job& job) const {
  if (job.cancelled) {
    job.answer.ending = ending_of(Ending::cancelled);
    return job.listener.on_answer(job.answer);
  }
  try {
    const lode::Answer& result = job.ticket.result.get();
    const Generation& generation = result.generation;
    Answer& answer = job.answer;
    answer.text = std::move(job.text);
    answer.ending = ending_of(result.ending);
    answer.stop_string = stop_string(generation, job.stop);
    answer.answer_tokens = std::ssize(generation.tokens);
    answer.thoughts = generation.thoughts;
    answer.thought_tokens = generation.thought_tokens;
    const WorkReport& work = generation.work;
    const WorkReport& drafts = result.exact.drafts;
    answer.read_bytes = work.kv_bytes + work.selector_bytes + drafts.kv_bytes + drafts.selector_bytes;
    answer.full_bytes = work.full_bytes;
    answer.density = work.density();
    answer.draft_density = drafts.density();
    answer.drafted = result.exact.drafted;
    answer.accepted = result.exact.accepted;
    answer.dense_steps = result.exact.dense_steps;
    if (!result.attention.empty() && result.attention != answer.attention) {
      answer.attention = result.attention;
      answer.why = "beside others about the same document it is read in full, together";
    }
    if (!generation.work.dense_reason.empty()) answer.why = generation.work.dense_reason;
    add_notice(answer, generation.work.notice);
    add_notice(answer, job.no_sources);
    add_notice(answer, why_cut(job.question, answer, generation));
    answer.queued_seconds = job.waited + result.queued_seconds;
    answer.first_token_seconds = result.first_token_seconds;
    answer.seconds = std::chrono::duration<double>(Clock::now() - job.since).count();
    if (job.want_sources && !result.sources.mass.empty())
      answer.sources = sources_of(*job.opened.document, result.sources, mass_of(job.neutral), kPassages);
    job.opened.document.reset();  // so that it may be closed as soon as its client knows
    job.listener.on_answer(answer);
  } catch (const Interrupted& error) {
    job.listener.on_failure(ranks_ != nullptr ? RankEngine::interrupted() : to_api(error));
  } catch (const std::exception& error) {
    job.listener.on_failure(to_api(error));
  }
}

}  // namespace lode::serve
