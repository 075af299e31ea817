// SPDX-License-Identifier: Apache-2.0
#include "serve/engine/open_documents.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "base/out_of_memory.h"
#include "base/text.h"
#include "base/unison.h"
#include "engine/memory.h"
#include "lodestone/error.h"
#include "select/spec_list.h"

namespace lode::serve {

namespace {

using Clock = std::chrono::steady_clock;
using Key = DocumentRoom::Key;

constexpr std::chrono::milliseconds kIdle(1000), kWhileSomeWait(50);
constexpr int kRetryNever =
    60;  ///< seconds: what does not fit today may fit after a restart with other flags

double now() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

bool has(const std::vector<Spec>& specs, const Spec& spec) {
  return spec.name == "full" || holds(specs, spec);
}

std::vector<Spec> with(std::vector<Spec> specs, const Spec& spec) {
  if (!has(specs, spec)) specs.push_back(spec);
  return specs;
}

std::string never_fits(std::int64_t need, std::int64_t room) {
  return fmt::format(
      "expected a document of at most {} of GPU memory, which is what --cache-memory and the room of "
      "questions "
      "leave for documents, found a need for {}: a smaller --kv-type, a larger --cache-memory or --device "
      "cpu "
      "would serve it",
      human_bytes(room), human_bytes(need));
}

ApiError no_room(const std::string& sentence) {
  ApiError error(503, sentence, "no_room");
  error.retry_seconds = kRetryNever;
  return error;
}

}  // namespace

/// What those who hold a document need when they give it back, which may be after everything else has gone.
struct OpenDocuments::Shared {
  explicit Shared(const Rooms& r) : host(r.host, r.patience), gpu(r.gpu, r.patience) {}

  struct Claimed {
    Device device = Device::cpu;
    bool granted = false;
  };
  mutable std::mutex mutex;  // of all that follows, and of what is private in an Openable
  std::condition_variable wake, claim_granted;
  bool stirred = false, stop = false;
  DocumentRoom host, gpu;
  std::map<Key, std::shared_ptr<Openable>> documents;  ///< that are open, or that somebody waits for
  std::map<Key, Claimed> claims;
  Key last_key = 0;

  DocumentRoom& room(Device device) { return device == Device::cuda ? gpu : host; }
  void stir() {
    stirred = true;
    wake.notify_all();
  }
  void end_use(Device device, Key key) {
    const std::lock_guard lock(mutex);
    room(device).end_use(key);
    stir();
  }
  /// What is counted for so many bytes: on the host at most all there is.
  std::int64_t counted(Device device, std::int64_t bytes) {
    return device == Device::cuda ? bytes : std::min(bytes, host.bytes());
  }
};

class OpenDocuments::Claim {
 public:
  Claim(std::shared_ptr<Shared> shared, Device device, Key key)
      : shared_(std::move(shared)), device_(device), key_(key) {}
  ~Claim() {
    const std::lock_guard lock(shared_->mutex);
    DocumentRoom& room = shared_->room(device_);
    room.leave(key_);
    if (room.holds(key_)) room.closed(key_);
    shared_->claims.erase(key_);
    shared_->stir();
  }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

 private:
  std::shared_ptr<Shared> shared_;
  Device device_;
  Key key_;
};

OpenDocuments::OpenDocuments(const Rooms& rooms)
    : shared_(std::make_shared<Shared>(rooms)), thread_([this] { run(); }) {}

OpenDocuments::~OpenDocuments() {
  stop();
}

void OpenDocuments::stop() {
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stop = true;
    shared_->stir();
  }
  shared_->claim_granted.notify_all();
  if (thread_.joinable()) thread_.join();
  openers_.stop();
}

std::shared_ptr<Openable> OpenDocuments::add(DocumentSource source) {
  const std::lock_guard lock(shared_->mutex);
  return std::make_shared<Openable>(std::move(source), ++shared_->last_key);
}

/// A spec that could not be had is not tried again for a while: each trial would close the document for all others.
void Openable::refuse(const Spec& spec, const ApiError& why, double now) {
  constexpr std::size_t kMost = 64;
  if (refused_.size() >= kMost) refused_.clear();
  refused_.insert_or_assign(spec.str(), Refusal{why, now});
}

void Openable::expect_not_refused(const Spec& spec, double now) const {
  constexpr double kRemembered = 60;  // seconds
  const auto found = refused_.find(spec.str());
  if (found != refused_.end() && now - found->second.at < kRemembered) throw found->second.why;
}

// ---- Those who ask. ---------------------------------------------------------------------------------------------

/// Of a document that has been entered. As all that has no lock of its own here, under shared_->mutex.
OpenDocuments::Lease OpenDocuments::lease(const Openable& document) {
  return {document.document_.get(), [shared = shared_, device = document.source_.device, key = document.key_,
                                     open = document.document_](const Document*) mutable {
            open.reset();
            shared->end_use(device, key);
          }};
}

std::int64_t OpenDocuments::counted(const Openable& document, const std::vector<Spec>& specs) const {
  return shared_->counted(document.source_.device, document.source_.need(specs));
}

/// What a document is opened with for one spec: also with what others asked for before, where there is room for that.
std::vector<Spec> OpenDocuments::specs_for(const Openable& document, const Spec& wanted) const {
  std::vector<Spec> all = with(document.methods_, wanted);
  const bool fit = counted(document, all) <= shared_->room(document.source_.device).bytes();
  return fit ? all : with({}, wanted);
}

/// Puts a document for which somebody waits into its place in the queue.
void OpenDocuments::wait_for(const Openable& document) {
  DocumentRoom& room = shared_->room(document.source_.device);
  const Spec& wanted = document.waiters_.front().spec;
  if (document.document_ != nullptr && !document.document_->answers(wanted)) room.retire(document.key_);
  const std::int64_t need = counted(document, specs_for(document, wanted));
  room.wait(document.key_, std::min(need, room.bytes()), now());
  shared_->stir();
}

/// A document that is open without this index would be closed for all others, to be opened with it. Where that shows
/// to be in vain, it stays open.
void OpenDocuments::expect_index(const std::shared_ptr<Openable>& document, const Spec& spec) {
  {
    const std::lock_guard lock(shared_->mutex);
    if (document->document_ == nullptr || document->document_->answers(spec)) return;
    document->expect_not_refused(spec, now());
  }
  try {
    document->source_.check(spec);
  } catch (const ApiError& why) {
    const std::lock_guard lock(shared_->mutex);
    document->refuse(spec, why, now());
    throw;
  }
}

OpenDocuments::Lease OpenDocuments::get(const std::shared_ptr<Openable>& document, DocumentWaiter waiter) {
  expect_index(document, waiter.spec);
  const std::lock_guard lock(shared_->mutex);
  if (document->forgotten_) throw *document->forgotten_;
  document->expect_not_refused(waiter.spec, now());
  const Device device = document->source_.device;
  DocumentRoom& room = shared_->room(device);
  const bool answers = document->document_ != nullptr && document->document_->answers(waiter.spec);
  if (answers && room.enter(document->key_)) return lease(*document);
  const std::int64_t need = counted(*document, specs_for(*document, waiter.spec));
  if (need > room.bytes()) throw no_room(never_fits(need, room.bytes()));
  document->waiters_.push_back(std::move(waiter));
  shared_->documents[document->key_] = document;
  if (document->document_ != nullptr && !answers) room.retire(document->key_);
  wait_for(*document);
  return nullptr;
}

/// Lets those in who wait for an open document; `always` is the one that it was opened for. Others may need an index
/// that it does not have: it is opened anew once nobody uses it.
OpenDocuments::Served OpenDocuments::admit(Openable& document, std::uint64_t always) {
  DocumentRoom& room = shared_->room(document.source_.device);
  Served served;
  std::deque<DocumentWaiter> left;
  for (DocumentWaiter& waiter : document.waiters_) {
    const bool answers = waiter.id == always || document.document_->answers(waiter.spec);
    if (answers && room.enter(document.key_))
      served.emplace_back(std::move(waiter), lease(document));
    else
      left.push_back(std::move(waiter));
  }
  document.waiters_ = std::move(left);
  document.waiters_.empty() ? room.leave(document.key_) : wait_for(document);
  return served;
}

/// All who wait for a document, or those who want it indexed for one spec.
std::deque<DocumentWaiter> OpenDocuments::take_waiters(Openable& document, const std::optional<Spec>& of) {
  std::deque<DocumentWaiter> taken, left;
  for (DocumentWaiter& waiter : document.waiters_)
    (!of || waiter.spec.str() == of->str() ? taken : left).push_back(std::move(waiter));
  document.waiters_ = std::move(left);
  if (document.waiters_.empty()) shared_->room(document.source_.device).leave(document.key_);
  shared_->stir();
  return taken;
}

bool OpenDocuments::stop_waiting(std::uint64_t id) {
  DocumentWaiter gone;  // destroyed without the lock
  const std::lock_guard lock(shared_->mutex);
  for (const auto& [key, document] : shared_->documents) {
    std::deque<DocumentWaiter>& waiters = document->waiters_;
    const auto at = std::ranges::find(waiters, id, &DocumentWaiter::id);
    if (at == waiters.end()) continue;
    gone = std::move(*at);
    waiters.erase(at);
    if (waiters.empty()) shared_->room(document->source_.device).leave(key);
    shared_->stir();
    return true;
  }
  return false;
}

void OpenDocuments::forget(const std::shared_ptr<Openable>& document, const ApiError& why) {
  std::deque<DocumentWaiter> refused;
  {
    const std::lock_guard lock(shared_->mutex);
    document->forgotten_ = why;
    shared_->room(document->source_.device).retire(document->key_);
    refused = take_waiters(*document, {});
  }
  if (refused.empty()) return;
  openers_.post([refused, why] {
    for (const DocumentWaiter& waiter : refused) waiter.refused(why);
  });
}

bool OpenDocuments::is_open(const Openable& document) const {
  const std::lock_guard lock(shared_->mutex);
  return document.document_ != nullptr;
}

std::optional<std::string> OpenDocuments::text_of(const Openable& document) const {
  const std::lock_guard lock(shared_->mutex);
  if (document.document_ == nullptr) return std::nullopt;
  return document.document_->text();
}

void OpenDocuments::count(BackendStats& stats) const {
  const std::lock_guard lock(shared_->mutex);
  for (const auto& [key, document] : shared_->documents) {
    stats.documents_in_memory += document->document_ != nullptr ? 1 : 0;
    stats.document_bytes += document->document_ != nullptr ? document->bytes_ : 0;
  }
  stats.document_room += shared_->host.bytes() + shared_->gpu.bytes();
}

std::shared_ptr<OpenDocuments::Claim> OpenDocuments::claim(Device device, std::int64_t bytes,
                                                           const std::function<void()>& poll) {
  std::unique_lock lock(shared_->mutex);
  DocumentRoom& room = shared_->room(device);
  const std::int64_t counted = shared_->counted(device, bytes);
  if (counted > room.bytes()) throw InputError(never_fits(bytes, room.bytes()));
  const Key key = ++shared_->last_key;
  shared_->claims[key] = {.device = device};
  room.wait(key, counted, now());
  shared_->stir();
  lock.unlock();
  auto claim = std::make_shared<Claim>(shared_, device, key);
  lock.lock();
  while (!shared_->claims.at(key).granted) {
    lock.unlock();
    poll();
    lock.lock();
    if (shared_->stop) throw Interrupted();
    if (!shared_->claims.at(key).granted) shared_->claim_granted.wait_for(lock, kWhileSomeWait);
  }
  return claim;
}

// ---- The one who opens and closes. ------------------------------------------------------------------------------

void OpenDocuments::run() {
  auto looked = Clock::now();
  for (;;) {
    {
      std::unique_lock lock(shared_->mutex);
      const bool some_wait = shared_->host.waiting() + shared_->gpu.waiting() > 0;
      shared_->wake.wait_for(lock, some_wait ? kWhileSomeWait : kIdle,
                             [&] { return shared_->stirred || shared_->stop; });
      if (shared_->stop) return;
      shared_->stirred = false;
    }
    if (Clock::now() - looked >= kIdle) {
      close_large();
      looked = Clock::now();
    }
    turn_over(Device::cpu);
    turn_over(Device::cuda);
  }
}

/// Does what the room says until nothing is left to do.
void OpenDocuments::turn_over(Device device) {
  for (bool done = false; !done;) {
    std::vector<Key> to_close;
    {
      const std::lock_guard lock(shared_->mutex);
      if (shared_->stop) return;
      DocumentRoom& room = shared_->room(device);
      to_close = room.to_close(now());
      done = to_close.empty();
      if (const std::optional<Key> next = done ? room.to_open(now()) : std::nullopt; next) {
        grant(*next);
        done = false;
      }
    }
    for (const Key key : to_close) close(key);
  }
}

void OpenDocuments::close(Key key) {
  std::shared_ptr<Openable> openable;
  std::shared_ptr<const Document> document;
  {
    const std::lock_guard lock(shared_->mutex);
    openable = shared_->documents.at(key);
    document = std::move(openable->document_);
  }
  document.reset();  // its memory is free before it is counted as free
  const std::lock_guard lock(shared_->mutex);
  shared_->room(openable->source_.device).closed(key);
  if (openable->waiters_.empty()) shared_->documents.erase(key);
}

/// What is larger than all the room (on the host alone) is not kept when nobody asks it.
void OpenDocuments::close_large() {
  const std::lock_guard lock(shared_->mutex);
  for (const auto& [key, document] : shared_->documents) {
    DocumentRoom& room = shared_->room(document->source_.device);
    if (document->document_ != nullptr && document->bytes_ > room.bytes() && !room.in_use(key))
      room.retire(key);
  }
}

/// It is this document's turn. Under the lock, so that it cannot be closed before those who wait for it are in.
void OpenDocuments::grant(Key key) {
  if (const auto claimed = shared_->claims.find(key); claimed != shared_->claims.end()) {
    claimed->second.granted = true;
    return shared_->claim_granted.notify_all();
  }
  const std::shared_ptr<Openable>& document = shared_->documents.at(key);
  if (document->document_ == nullptr) return openers_.post([this, document] { open(document); });
  openers_.post([served = admit(*document, 0)] {
    for (const auto& [waiter, lease] : served) waiter.ready(lease);
  });
}

void OpenDocuments::open(const std::shared_ptr<Openable>& document) {
  std::optional<Spec> wanted;
  std::vector<Spec> specs;
  std::uint64_t first = 0;
  {
    const std::lock_guard lock(shared_->mutex);
    if (document->waiters_.empty() || shared_->stop) {  // all have gone meanwhile
      shared_->room(document->source_.device).closed(document->key_);
      shared_->documents.erase(document->key_);
      return shared_->stir();
    }
    first = document->waiters_.front().id;
    wanted = document->waiters_.front().spec;
    specs = specs_for(*document, *wanted);
  }
  std::shared_ptr<const Document> opened;
  try {
    try {
      opened = document->source_.load(specs);
    } catch (const ApiError& error) {  // what others asked for before is not this question's fault
      const std::vector<Spec> alone = with({}, *wanted);
      if (error.status != 400 || specs.size() == alone.size()) throw;
      {
        const std::lock_guard lock(shared_->mutex);
        document->methods_.clear();
      }
      opened = document->source_.load(alone);
    }
  } catch (const OutOfDeviceMemory& error) {
    return opened_in_vain(document, error.what());
  } catch (const RankOutOfMemory& error) {
    return opened_in_vain(document, std::string(error.what()) + " while the document was opened");
  } catch (const std::bad_alloc&) {
    return opened_in_vain(document, "out of memory while the document was opened");
  } catch (const ApiError& error) {  // 400: this spec cannot be had, others may be
    return failed(document, error, error.status == 400 ? wanted : std::nullopt);
  } catch (const std::exception& error) {
    return failed(document, ApiError(500, error.what()), {});
  }
  Served served;
  {
    const std::lock_guard lock(shared_->mutex);
    document->bytes_ = held_bytes(*opened);
    document->methods_ = opened->methods();
    document->document_ = std::move(opened);
    shared_->room(document->source_.device).opened(document->key_, document->bytes_, now());
    served = admit(*document, first);
    shared_->stir();
  }
  for (auto& [waiter, lease] : served) waiter.ready(std::move(lease));
}

/// It could not be opened. Refuses all who wait for it, or those who want it indexed for one spec; the others go on
/// waiting, in front.
void OpenDocuments::failed(const std::shared_ptr<Openable>& document, const ApiError& why,
                           const std::optional<Spec>& of) {
  std::deque<DocumentWaiter> refused;
  {
    const std::lock_guard lock(shared_->mutex);
    DocumentRoom& room = shared_->room(document->source_.device);
    const std::int64_t counted = room.closed(document->key_);
    if (of) document->refuse(*of, why, now());
    refused = take_waiters(*document, of);
    if (document->waiters_.empty())
      shared_->documents.erase(document->key_);
    else
      room.wait_in_front(document->key_, counted, now());
  }
  for (const DocumentWaiter& waiter : refused) waiter.refused(why);
}

/// The device had less room than was counted: it is tried again with less beside it, at last alone, with all the room
/// counted for it.
void OpenDocuments::opened_in_vain(const std::shared_ptr<Openable>& document, const std::string& why) {
  std::int64_t all = 0;
  std::deque<DocumentWaiter> refused;
  {
    const std::lock_guard lock(shared_->mutex);
    DocumentRoom& room = shared_->room(document->source_.device);
    all = room.bytes();
    const std::int64_t counted = room.closed(document->key_);
    if (counted < all && !document->waiters_.empty()) {
      room.wait_in_front(document->key_, std::min(all, counted + counted / 4 + 1), now());
      return shared_->stir();
    }
    refused = take_waiters(*document, {});
    shared_->documents.erase(document->key_);
  }
  const ApiError never = no_room(
      fmt::format("the document '{}' does not fit the {} of memory for documents though no other is open: {}",
                  document->source_.name, human_bytes(all), why));
  for (const DocumentWaiter& waiter : refused) waiter.refused(never);
}

}  // namespace lode::serve
