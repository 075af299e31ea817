// SPDX-License-Identifier: Apache-2.0
#include "serve/engine/rank_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <future>
#include <mutex>
#include <optional>

#include "base/cancel.h"
#include "cluster/rank_prefill.h"
#include "cluster/save_shards.h"
#include "cluster/shard_attention.h"
#include "engine/context.h"
#include "engine/context_file.h"
#include "engine/document.h"
#include "engine/memory.h"
#include "lodestone/error.h"
#include "lodestone/sources.h"

namespace lode::serve {

namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLook = std::chrono::milliseconds(250);  ///< for ranks that are lost while nobody asks
constexpr auto kMostBetween = std::chrono::seconds(2);  ///< of turns between two parts of a job

constexpr const char* kEndedByLauncher =
    "the launcher (mpirun) is ending all ranks, because it was told to or because a rank has ended";

ApiError lost(const std::string& why) {
  return ApiError(503, fmt::format("the server's ranks cannot answer any more: {}", why), "ranks_lost");
}

/// A spec as other ranks are told it: they look for its files where this one does.
Json order_of(const Spec& spec) {
  Json folders = Json::array();
  for (const std::filesystem::path& folder : spec.folders) folders.push_back(folder.string());
  return {{"spec", spec.str()}, {"folders", std::move(folders)}};
}

Json order_of(const std::vector<Spec>& specs) {
  Json all = Json::array();
  for (const Spec& spec : specs) all.push_back(order_of(spec));
  return all;
}

Spec spec_of(const Json& order) {
  std::vector<std::filesystem::path> folders;
  for (const Json& folder : order.at("folders")) folders.emplace_back(folder.get<std::string>());
  return parse_spec(order.at("spec").get<std::string>(), folders);
}

std::vector<Spec> specs_of(const Json& order) {
  std::vector<Spec> specs;
  for (const Json& spec : order) specs.push_back(spec_of(spec));
  return specs;
}

/// The least that a rank has, so that none is asked for more.
std::int64_t least_memory(Communicator& ranks, std::int64_t wanted) {
  const std::int64_t own = wanted > 0 ? wanted : available_memory() / 2;
  std::int64_t least = own;
  for (const std::string& one : ranks.all_strings(std::to_string(own)))
    least = std::min<std::int64_t>(least, std::stoll(one));
  return least;
}

void expect_same_models(Communicator& ranks, const RankEngine::Models& models) {
  std::string own;
  for (const auto& [id, model] : models) own += model->fingerprint() + " ";
  const std::vector<std::string> all = ranks.all_strings(own);
  for (std::size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      throw InputError(
          fmt::format("expected the same model on all ranks, found another on rank {} than on rank 0", r));
}

}  // namespace

/// A document that is to be opened, or a text that is to be read.
struct RankEngine::Job {
  Json order;
  std::promise<std::shared_ptr<const Document>> done;
  std::optional<Reading> reading;
  std::exception_ptr stopped = nullptr;  ///< what its progress has thrown

  /// Whoever waits for it hears of it, whatever has become of the turn that was to do it.
  ~Job() {
    try {
      done.set_exception(std::make_exception_ptr(lost("they ended in the middle of what was asked")));
    } catch (const std::future_error&) {  // it was told
    }
  }
};

/// What rank 0's other threads want of it. Whoever closes a document may do so after all else has gone.
struct RankEngine::Shared {
  mutable std::mutex mutex;
  std::condition_variable wake;
  Json orders = Json::array();
  std::deque<std::shared_ptr<Job>> to_open, to_read;
  std::map<const Document*, std::uint64_t> keys;  ///< of open documents
  std::uint64_t last_key = 0;
  std::string failure;
  bool stop = false;

  void expect_no_failure() const {
    if (!failure.empty()) throw lost(failure);
  }
  void add(Json order) {
    orders.push_back(std::move(order));
    wake.notify_all();
  }
};

RankEngine::RankEngine(Communicator& ranks, const Models& models, const SchedulerOptions& scheduler,
                       const std::string& question_template)
    : unison_(ranks), shared_(std::make_shared<Shared>()) {
  expect_same_models(ranks, models);
  SchedulerOptions options = scheduler;
  options.memory = least_memory(ranks, scheduler.memory);
  options.ranks = &unison_;
  for (const auto& [id, model] : models)
    models_.push_back({.id = id,
                       .model = model,
                       .scheduler = std::make_shared<Scheduler>(model, options),
                       .prompting = std::make_shared<Prompting>(model, question_template)});
  if (leads()) thread_ = std::thread([this] { lead(); });
}

RankEngine::~RankEngine() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
  }
  shared_->wake.notify_all();
  if (thread_.joinable()) thread_.join();
}

// ---- What rank 0 is asked. --------------------------------------------------------------------------------------

Json RankEngine::number_of(const LoadedModel& model) const {
  const auto same = [&](const LoadedModel& one) { return one.id == model.id; };
  return std::ranges::find_if(models_, same) - models_.begin();
}

Ticket<lode::Answer> RankEngine::submit(const LoadedModel& model, Request request,
                                        const std::string& schema) {
  const GenerateOptions& options = request.options;
  const Sampling& sampling = options.sampling;
  Json order = {{"do", "ask"},
                {"model", number_of(model)},
                {"prompt", request.prompt},
                {"attention", order_of(request.attention)},
                {"exact", request.exact},
                {"full_beside", request.full_beside},
                {"schema", schema},
                {"most", options.max_new_tokens},
                {"most_thoughts", options.max_thought_tokens},
                {"stop", options.stop},
                {"temperature", sampling.temperature},
                {"top_k", sampling.top_k},
                {"top_p", sampling.top_p},
                {"min_p", sampling.min_p},
                {"seed", sampling.seed}};
  const std::lock_guard lock(shared_->mutex);
  shared_->expect_no_failure();
  order["document"] = request.document == nullptr ? 0 : shared_->keys.at(request.document.get());
  Ticket<lode::Answer> ticket = model.scheduler->submit(std::move(request));
  order["id"] = ticket.id;
  shared_->add(std::move(order));
  return ticket;
}

Request RankEngine::request_of(const Json& order) const {
  const LoadedModel& model = model_of(order);
  Request request;
  if (const std::uint64_t key = order.at("document"); key != 0) request.document = documents_.at(key);
  order.at("prompt").get_to(request.prompt);
  request.attention = spec_of(order.at("attention"));
  request.exact = order.at("exact");
  request.full_beside = order.at("full_beside");
  if (const std::string schema = order.at("schema"); !schema.empty())
    request.filter = model.prompting->filter(schema);
  GenerateOptions& options = request.options;
  options.max_new_tokens = order.at("most");
  options.max_thought_tokens = order.at("most_thoughts");
  order.at("stop").get_to(options.stop);
  options.sampling = {.temperature = order.at("temperature"),
                      .top_k = order.at("top_k"),
                      .top_p = order.at("top_p"),
                      .min_p = order.at("min_p"),
                      .seed = order.at("seed")};
  return request;
}

void RankEngine::cancel(const LoadedModel& model, std::uint64_t id) {
  const std::lock_guard lock(shared_->mutex);
  if (shared_->failure.empty()) shared_->add({{"do", "cancel"}, {"model", number_of(model)}, {"id", id}});
}

std::shared_ptr<const Document> RankEngine::do_and_wait(std::shared_ptr<Job> job) {
  auto done = job->done.get_future();
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->expect_no_failure();
    if (shared_->stop) throw Interrupted();
    (job->reading ? shared_->to_read : shared_->to_open).push_back(std::move(job));
  }
  shared_->wake.notify_all();
  return done.get();
}

std::shared_ptr<const Document> RankEngine::open(const LoadedModel& model, const std::filesystem::path& path,
                                                 const DocumentOptions& options) {
  auto job = std::make_shared<Job>();
  job->order = {{"do", "open"},
                {"model", number_of(model)},
                {"path", path.string()},
                {"room", options.max_tokens},
                {"specs", order_of(options.specs)}};
  return do_and_wait(std::move(job));
}

void RankEngine::read(const LoadedModel& model, Reading reading) {
  auto job = std::make_shared<Job>();
  job->order = {{"do", "read"},
                {"model", number_of(model)},
                {"path", reading.path.string()},
                {"room", reading.options.max_tokens},
                {"specs", order_of(reading.options.specs)},
                {"kv_type", name_of(reading.options.kv_type)},
                {"tokens", std::move(reading.tokens)}};
  job->reading = std::move(reading);
  do_and_wait(std::move(job));
}

ApiError RankEngine::interrupted() {
  return lost(kEndedByLauncher);
}

std::string RankEngine::failure() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->failure;
}

// ---- Turns. -----------------------------------------------------------------------------------------------------

void RankEngine::lead() {
  try {
    for (bool last = false; !last;) {
      wait_for_work();
      const Turn turn = told(next_turn());
      carry_out(turn);
      last = turn.says("last");
    }
  } catch (const std::exception& error) {
    give_up(cancel_requested() ? kEndedByLauncher : error.what());
  }
}

void RankEngine::follow() {
  for (bool last = false; !last;) {
    const Turn turn = told({});
    carry_out(turn);
    last = turn.says("last");
  }
}

/// Whoever waits for something hears why it will not come.
void RankEngine::give_up(const std::string& why) {
  std::deque<std::shared_ptr<Job>> left;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->failure = why;
    for (auto* const jobs : {&shared_->to_open, &shared_->to_read}) {
      left.insert(left.end(), jobs->begin(), jobs->end());
      jobs->clear();
    }
  }
  const auto failure = std::make_exception_ptr(lost(why));
  for (const auto& job : left) job->done.set_exception(failure);
  for (const LoadedModel& model : models_) model.scheduler->fail(failure);
}

bool RankEngine::busy() const {
  return std::ranges::any_of(models_, [](const LoadedModel& model) {
    const SchedulerStats stats = model.scheduler->stats();
    return stats.queued + stats.running > 0;
  });
}

void RankEngine::wait_for_work() {
  std::unique_lock lock(shared_->mutex);
  const auto wanted = [&] {
    return shared_->stop || !shared_->orders.empty() || !shared_->to_open.empty() ||
           !shared_->to_read.empty();
  };
  while (!wanted() && !busy() && !shared_->wake.wait_for(lock, kLook, wanted)) {
    lock.unlock();
    unison_.ranks().expect_alive();
    lock.lock();
  }
}

/// What is new. A document may be opened while a text is read, but one at a time.
RankEngine::Turn RankEngine::next_turn() {
  Turn turn;
  const std::lock_guard lock(shared_->mutex);
  if (!shared_->orders.empty()) turn.said["orders"] = std::exchange(shared_->orders, Json::array());
  auto* const jobs = opening_                    ? nullptr
                     : !shared_->to_open.empty() ? &shared_->to_open
                     : !reading_                 ? &shared_->to_read
                                                 : nullptr;
  if (jobs != nullptr && !jobs->empty()) {
    turn.job = jobs->front();
    jobs->pop_front();
    if (!turn.job->reading) turn.job->order["key"] = ++shared_->last_key;
    turn.said["job"] = turn.job->order;
  } else if (shared_->stop && !reading_ && !opening_) {
    turn.said["last"] = true;
  }
  return turn;
}

/// A turn between two parts of a job, which goes on when nothing is asked, or after as long as its last part took.
RankEngine::Turn RankEngine::next_turn_between(const Job* job, Clock::time_point until) {
  Turn turn = next_turn();
  if (job->stopped)
    turn.said["stop"] = true;
  else if (!turn.job && (Clock::now() >= until || (turn.said.empty() && !busy())))
    turn.said["resume"] = true;
  return turn;
}

/// What rank 0 says of a turn, on all ranks.
RankEngine::Turn RankEngine::told(Turn turn) {
  std::string said;
  if (leads() && !turn.said.empty()) {
    const std::vector<std::uint8_t> bytes = Json::to_msgpack(turn.said);
    said.assign(bytes.begin(), bytes.end());
  }
  said = unison_.ranks().broadcast(std::move(said));
  if (!leads() && !said.empty()) turn.said = Json::from_msgpack(said);
  return turn;
}

const LoadedModel& RankEngine::model_of(const Json& order) const {
  return models_.at(order.at("model").get<std::size_t>());
}

void RankEngine::obey(const Json& order) {
  const std::string what = order.at("do");
  if (what == "close") {
    documents_.erase(order.at("key").get<std::uint64_t>());
    return;
  }
  Scheduler& scheduler = *model_of(order).scheduler;
  const std::uint64_t id = order.at("id");
  if (what == "cancel") {
    scheduler.cancel(id);
    return;
  }
  if (!leads()) {
    const Ticket<lode::Answer> ticket = scheduler.submit(request_of(order));
    LODE_ASSERT(ticket.id == id);
  }
  scheduler.take_in(id);
}

void RankEngine::carry_out(const Turn& turn) {
  if (turn.says("orders"))
    for (const Json& order : turn.said.at("orders")) obey(order);
  for (const LoadedModel& model : models_) model.scheduler->step();
  if (turn.says("job")) do_job(turn);
}

/// What goes wrong with a turn itself is no failure of the job, on which all ranks agree.
RankEngine::Turn RankEngine::turn_between(const Job* job, Clock::time_point until) {
  try {
    Turn turn = told(leads() ? next_turn_between(job, until) : Turn());
    carry_out(turn);
    return turn;
  } catch (const RankLost&) {
    throw;
  } catch (const std::exception& error) {
    throw RankLost(error.what());
  }
}

void RankEngine::turns_between(Job* job) {
  const auto until = Clock::now() + std::min<Clock::duration>(kMostBetween, Clock::now() - part_began_);
  unison_.pause([&] {
    for (bool resume = false; !resume;) {
      const Turn turn = turn_between(job, until);
      if (turn.says("stop")) throw Interrupted();
      resume = turn.says("resume");
    }
  });
  part_began_ = Clock::now();
}

// ---- Documents. -------------------------------------------------------------------------------------------------

void RankEngine::do_job(const Turn& turn) {
  const Json& order = turn.said.at("job");
  Job* const job = turn.job.get();
  const auto began = std::exchange(part_began_, Clock::now());
  try {
    std::shared_ptr<const Document> document;
    order.at("do") == "open" ? static_cast<void>(document = open_together(order, job))
                             : read_together(order, job);
    if (job != nullptr) job->done.set_value(std::move(document));
  } catch (const RankLost& error) {
    if (job != nullptr) job->done.set_exception(std::make_exception_ptr(lost(error.what())));
    throw;
  } catch (const Interrupted&) {
    const auto ended = std::make_exception_ptr(interrupted());
    if (job != nullptr) job->done.set_exception(job->stopped ? job->stopped : ended);
  } catch (...) {
    if (job != nullptr) job->done.set_exception(job->stopped ? job->stopped : std::current_exception());
  }
  part_began_ = began;
}

std::shared_ptr<const Document> RankEngine::open_together(const Json& order, Job* job) {
  std::uint64_t key = 0;
  std::shared_ptr<const Document> document;
  const bool before = std::exchange(opening_, true);
  try {
    unison_.run([&] {  // all that can fail on one rank alone
      DocumentOptions options;
      key = order.at("key");
      options.max_tokens = order.at("room");
      options.specs = specs_of(order.at("specs"));
      options.progress = [&](const ReadProgress&) { turns_between(job); };
      document = Document::Impl::open(order.at("path").get<std::string>(), model_of(order).model, options,
                                      &unison_.ranks());
      share_out(*document, unison_.ranks());
      if (!leads()) documents_.emplace(key, document);
    });
  } catch (...) {
    opening_ = before;
    documents_.erase(key);  // where another rank has failed
    throw;
  }
  opening_ = before;
  return leads() ? hand_out(std::move(document), key) : nullptr;
}

/// The others close it when nobody holds it any more.
std::shared_ptr<const Document> RankEngine::hand_out(std::shared_ptr<const Document> document,
                                                     std::uint64_t key) const {
  const Document* const raw = document.get();
  const std::lock_guard lock(shared_->mutex);
  shared_->keys.emplace(raw, key);
  return {raw, [shared = shared_, key, document = std::move(document)](const Document* raw_) mutable {
            {
              const std::lock_guard held(shared->mutex);
              shared->keys.erase(raw_);
              if (shared->failure.empty()) shared->add({{"do", "close"}, {"key", key}});
            }
            document.reset();
          }};
}

void RankEngine::read_together(const Json& order, Job* job) {
  std::filesystem::path path;
  ReadProgress progress;
  const auto tell = [&] {
    try {
      if (job != nullptr && job->reading->options.progress) job->reading->options.progress(progress);
    } catch (...) {
      job->stopped = std::current_exception();
    }
    turns_between(job);
  };
  const bool before = std::exchange(reading_, true);
  try {
    unison_.run([&] {  // all that can fail on one rank alone
      path = order.at("path").get<std::string>();
      const std::vector<TokenId> tokens = order.at("tokens");
      const std::vector<Spec> specs = specs_of(order.at("specs"));
      const ContextOptions options = {.kv_type = parse_dtype(order.at("kv_type").get<std::string>()),
                                      .max_tokens = order.at("room")};
      progress.tokens = std::ssize(tokens);
      progress.layers = std::ssize(specs) * model_of(order).model->config().layers;
      Context context = read_over_ranks(
          model_of(order).model, options, tokens, specs, unison_.ranks(),
          {.chunk_done = [&](std::int64_t done) { progress.tokens_done = done; }, .layer_done = tell});
      context.build_indexes([&](std::int64_t done) {
        progress.layers_indexed = done;
        tell();
      });
      if (job != nullptr) set_source(context, std::move(job->reading->source), job->reading->first_token);
      save_shards(context, path, job != nullptr ? job->reading->options.attachments : Attachments(),
                  unison_.ranks());
    });
  } catch (...) {
    reading_ = before;
    // What others had written when one failed.
    if (std::error_code none; leads() && !path.empty() && !std::filesystem::exists(path, none))
      remove_shards(path, {}, RemovedShards::all_others);
    throw;
  }
  reading_ = before;
}

}  // namespace lode::serve
