// SPDX-License-Identifier: Apache-2.0
// A fixed pool of threads for loops over independent items. Passed to whoever computes; never global.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace lode {

class ThreadPool {
 public:
  /// `threads` counts the caller, who works too; 0 = one per core that this process may use.
  explicit ThreadPool(int threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  /// Calls body(item, worker) once for every item in [0, items), worker in [0, size()); returns when all are
  /// done. Items are handed out one by one in rising order, so results may depend on `item`, never on
  /// `worker`. The first exception that a body throws is rethrown here after the others have finished. Several
  /// threads may call at once: their loops take turns in the order of the calls. A body that calls for_each of
  /// the same pool runs its items itself, with its own worker number.
  void for_each(std::int64_t items, const std::function<void(std::int64_t item, int worker)>& body);

  /// Calls body(task) for every task in [0, tasks), up to `at_once` of them on threads of their own whose loops take
  /// turns: while one is in a loop, the others do what is no loop, or wait for a device. In the order of their numbers,
  /// one by one, where the pool has no threads or the caller is in a loop. The first exception is rethrown when all
  /// that had begun have ended; none begins behind it.
  void side_by_side(std::int64_t tasks, int at_once, const std::function<void(std::int64_t task)>& body);

 private:
  struct State;

 public:
  /// While one lives, the loops of the thread that made it give way: between two items, whenever an Urgent
  /// lives (for half a second at most, in case that one waits for this). What they compute is the same.
  class Background {
   public:
    explicit Background(const ThreadPool& pool);
    ~Background();
    Background(const Background&) = delete;
    Background& operator=(const Background&) = delete;

   private:
    State& state_;
    const void* before_;
  };
  /// While one lives, the loops of Background threads stand still. They get the pool for twice its life before the
  /// next Urgent begins, so that neither side waits for long, or for twice the usual life where that is less: a slow step
  /// does not delay the next one, too.
  class Urgent {
   public:
    explicit Urgent(const ThreadPool& pool);
    ~Urgent();
    Urgent(const Urgent&) = delete;
    Urgent& operator=(const Urgent&) = delete;

   private:
    State& state_;
  };
  /// While one lives, the loops of the thread that made it give way to nobody, also within a Background: it makes what
  /// an Urgent may wait for, which would stand still together with it at each loop.
  class Awaited {
   public:
    Awaited();
    ~Awaited();
    Awaited(const Awaited&) = delete;
    Awaited& operator=(const Awaited&) = delete;

   private:
    const void* before_;
  };

 private:
  std::unique_ptr<State> state_;
};

}  // namespace lode
