// SPDX-License-Identifier: Apache-2.0
#include "base/threads.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lodestone/error.h"

namespace lode {

namespace {

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

/// How long an idle worker looks for work before it sleeps: about a gap between two loops of a decode step,
/// so that a step of hundreds of loops does not pay a wake-up for each.
constexpr std::chrono::microseconds kSpinTime(50);
/// A background loop stands still for so long at most.
constexpr std::chrono::milliseconds kLongestPause(500);

/// Whose item this thread is running, and as which worker.
struct Running {
  const void* pool = nullptr;
  int worker = 0;
};
thread_local Running running;
/// The pool whose loops this thread runs in the background.
thread_local const void* background_pool = nullptr;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

/// Spins until `done` or for kSpinTime; whether it was done. A pause lasts 10 to 140 cycles, by CPU: the
/// clock counts, not the turns.
template <class Condition>
bool spin_until(const Condition& done) {
  constexpr int kPausesPerLook = 16;
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return done();
}

/// The gate of a loop in one word: [round | open: 1 bit | workers inside: 16 bits]. A worker enters while it
/// is open; the caller closes it and waits for those inside, never for one that is still asleep.
constexpr std::uint64_t kInside = 0xffff, kOpen = 0x10000;
constexpr int kRoundShift = 17;
constexpr std::uint64_t round_of(std::uint64_t gate) {
  return gate >> kRoundShift;
}

}  // namespace

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable wake;

  const std::function<void(std::int64_t, int)>* body = nullptr;
  std::int64_t items = 0;
  std::exception_ptr failure;  // of the first body that threw; guarded by mutex
  std::atomic<bool> stop{false};
  alignas(64) std::atomic<std::uint64_t> gate{0};
  alignas(64) std::atomic<std::int64_t> next{0};  // the first item not handed out
  /// Callers take turns, loop by loop, in the order in which they came.
  alignas(64) std::atomic<std::uint64_t> last_turn{0};
  alignas(64) std::atomic<std::uint64_t> turn{0};
  bool yields = false;              // the running loop is one in the background
  std::atomic<bool> paused{false};  // background loops; set under `pause`
  std::mutex pause;
  std::condition_variable resumed;
  int urgent = 0, background = 0;  // that live; guarded by pause
  std::chrono::steady_clock::time_point urgent_since, background_until;
  std::chrono::steady_clock::duration usual_life{};  // of an Urgent, lately; guarded by pause
  std::vector<std::jthread> workers;                 // joined before the rest goes

  ~State() {
    {
      const std::lock_guard lock(mutex);
      stop.store(true);
    }
    wake.notify_all();
  }

  void run_items(int worker, const void* pool) {
    const Running outer = std::exchange(running, {pool, worker});
    for (std::int64_t item; !gives_way() && (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      try {
        (*body)(item, worker);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next.store(items, std::memory_order_relaxed);  // nobody starts another item
      }
    }
    running = outer;
  }

  bool gives_way() const { return yields && paused.load(std::memory_order_relaxed); }
  /// False when it goes on for so long that an Urgent thread may be waiting for what this one holds: then one
  /// loop is run all the same.
  bool wait_for_pause_to_end() {
    std::unique_lock lock(pause);
    return resumed.wait_for(lock, kLongestPause, [&] { return urgent == 0; });
  }

  /// Enters the loop that is open, if it is another than `seen`.
  bool enter(std::uint64_t& seen) {
    std::uint64_t now = gate.load(std::memory_order_relaxed);
    while ((now & kOpen) != 0 && round_of(now) != seen) {
      if (gate.compare_exchange_weak(now, now + 1, std::memory_order_acquire, std::memory_order_relaxed)) {
        seen = round_of(now);
        return true;
      }
    }
    return false;
  }

  void work(int worker, const void* pool) {
    std::uint64_t seen = 0;
    for (;;) {
      bool inside = false;
      const auto called = [&] { return stop.load(std::memory_order_relaxed) || (inside = enter(seen)); };
      if (!spin_until(called)) {
        std::unique_lock lock(mutex);
        wake.wait(lock, called);
      }
      if (!inside) return;
      run_items(worker, pool);
      gate.fetch_sub(1, std::memory_order_release);
    }
  }

  void open() {
    const std::lock_guard lock(mutex);  // a worker is either before its test or asleep: no lost wake-up
    const std::uint64_t round = round_of(gate.load(std::memory_order_relaxed)) + 1;
    gate.store(round << kRoundShift | kOpen, std::memory_order_release);
  }

  void close() {
    gate.fetch_and(~kOpen, std::memory_order_acquire);
    const auto empty = [&] { return (gate.load(std::memory_order_acquire) & kInside) == 0; };
    while (!spin_until(empty)) std::this_thread::yield();
  }
};

namespace {

/// Holds the pool for one loop of one caller.
class Turn {
 public:
  Turn(std::atomic<std::uint64_t>& last, std::atomic<std::uint64_t>& now) : now_(now) {
    const std::uint64_t mine = last.fetch_add(1, std::memory_order_relaxed);
    for (std::uint64_t at; (at = now_.load(std::memory_order_acquire)) != mine;) now_.wait(at);
  }
  ~Turn() {
    now_.fetch_add(1, std::memory_order_release);
    now_.notify_all();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic<std::uint64_t>& now_;
};

}  // namespace

ThreadPool::ThreadPool(int threads) : state_(std::make_unique<State>()) {
  const int size = std::min(threads > 0 ? threads : usable_cores(), static_cast<int>(kInside));
  try {
    for (int worker = 1; worker < size; ++worker)
      state_->workers.emplace_back([this, worker] { state_->work(worker, this); });
  } catch (const std::system_error& e) {
    throw RunError(std::string("cannot start a thread: ") + e.what() + "; --threads 1 needs none");
  }
}

ThreadPool::~ThreadPool() = default;

int ThreadPool::size() const {
  return static_cast<int>(state_->workers.size()) + 1;
}

void ThreadPool::for_each(std::int64_t items, const std::function<void(std::int64_t, int)>& body) {
  State& s = *state_;
  const bool nested = running.pool == this;
  if (nested || s.workers.empty() || items == 1) {
    // A nested loop keeps its worker's number: scratch memory by worker stays its own.
    const bool yields = !nested && background_pool == this;
    for (std::int64_t item = 0; item < items; ++item) {
      if (yields && s.paused.load(std::memory_order_relaxed)) s.wait_for_pause_to_end();
      body(item, nested ? running.worker : 0);
    }
    return;
  }
  bool yields = background_pool == this;
  for (std::int64_t done = 0; done < items;) {
    if (yields && s.paused.load(std::memory_order_relaxed)) yields = s.wait_for_pause_to_end();
    const Turn turn(s.last_turn, s.turn);
    s.body = &body;
    s.items = items;
    s.yields = yields;
    s.next.store(done, std::memory_order_relaxed);
    s.open();
    s.wake.notify_all();
    s.run_items(0, this);
    s.close();
    if (s.failure) std::rethrow_exception(std::exchange(s.failure, nullptr));
    done = s.next.load(std::memory_order_relaxed);  // every item before it has been run
  }
}

void ThreadPool::side_by_side(std::int64_t tasks, int at_once,
                              const std::function<void(std::int64_t)>& body) {
  const bool alone = running.pool == this || state_->workers.empty() || tasks == 1 || at_once <= 1;
  if (alone) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  std::atomic<std::int64_t> next{0};
  std::mutex first;
  std::exception_ptr failure;
  const auto run = [&, yields_to = background_pool] {
    background_pool = yields_to;
    try {
      for (std::int64_t task; (task = next.fetch_add(1)) < tasks;) body(task);
    } catch (...) {
      next = tasks;
      const std::lock_guard lock(first);
      if (failure == nullptr) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    try {
      while (std::ssize(threads) + 1 < std::min<std::int64_t>(tasks, at_once)) threads.emplace_back(run);
    } catch (const std::system_error&) {  // as many as the system allows
    }
    run();
  }
  if (failure != nullptr) std::rethrow_exception(failure);
}

ThreadPool::Background::Background(const ThreadPool& pool)
    : state_(*pool.state_), before_(std::exchange(background_pool, &pool)) {
  const std::lock_guard lock(state_.pause);
  ++state_.background;
}

ThreadPool::Background::~Background() {
  background_pool = before_;
  {
    const std::lock_guard lock(state_.pause);
    --state_.background;
  }
  state_.resumed.notify_all();
}

ThreadPool::Awaited::Awaited() : before_(std::exchange(background_pool, nullptr)) {}

ThreadPool::Awaited::~Awaited() {
  background_pool = before_;
}

ThreadPool::Urgent::Urgent(const ThreadPool& pool) : state_(*pool.state_) {
  std::unique_lock lock(state_.pause);
  const auto may_start = [&] { return state_.urgent > 0 || state_.background == 0; };
  while (!may_start() && std::chrono::steady_clock::now() < state_.background_until)
    state_.resumed.wait_until(lock, state_.background_until);
  if (state_.urgent++ == 0) state_.urgent_since = std::chrono::steady_clock::now();
  state_.paused.store(true);
}

ThreadPool::Urgent::~Urgent() {
  {
    const std::lock_guard lock(state_.pause);
    if (--state_.urgent == 0) {
      const auto now = std::chrono::steady_clock::now();
      const auto life = now - state_.urgent_since;
      auto& usual = state_.usual_life;
      usual = usual.count() == 0 ? life : usual + (life - usual) / 8;
      state_.background_until = now + 2 * std::min(life, usual);
      state_.paused.store(false);
    }
  }
  state_.resumed.notify_all();
}

}  // namespace lode
