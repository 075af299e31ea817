// SPDX-License-Identifier: Apache-2.0
#include "cluster/local_ranks.h"

#include <fmt/format.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "base/cancel.h"
#include "lodestone/error.h"

namespace lode {

namespace {

using Message = std::vector<std::byte>;

/// What ranks share: messages under way, and who has given up.
struct Exchange {
  explicit Exchange(int size) : ranks(static_cast<std::size_t>(size)), queues(ranks * ranks) {}
  std::deque<Message>& queue(std::size_t from, std::size_t to) { return queues[from * ranks + to]; }

  const std::size_t ranks;
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::deque<Message>> queues;  // [from, to]
  std::string failure;                      ///< of the first rank that gave up; empty: none has
  int failed_rank = -1;
};

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(Exchange& shared, int rank, std::chrono::milliseconds patience)
      : shared_(shared), rank_(rank), patience_(patience) {}
  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(shared_.ranks); }

  void fail(const std::string& reason) noexcept override {
    const std::lock_guard lock(shared_.mutex);
    if (shared_.failed_rank >= 0) return;
    shared_.failed_rank = rank_;
    shared_.failure = reason;
    shared_.changed.notify_all();
  }

  void expect_alive() override {
    const std::lock_guard lock(shared_.mutex);
    if (shared_.failed_rank >= 0) throw lost();
  }

 private:
  RankLost lost() const { return RankLost(fmt::format("rank {}: {}", shared_.failed_rank, shared_.failure)); }

  /// The next message of a rank, once it is there. Under the lock.
  Message next(std::unique_lock<std::mutex>& lock, std::size_t from) {
    std::deque<Message>& queue = shared_.queue(from, static_cast<std::size_t>(rank_));
    const bool came = shared_.changed.wait_for(
        lock, patience_, [&] { return !queue.empty() || shared_.failed_rank >= 0 || cancel_requested(); });
    check_cancel();
    if (queue.empty() && shared_.failed_rank >= 0) throw lost();
    if (!came)
      throw RankLost(
          fmt::format("rank {} has given no sign of life for {} ms: ended", from, patience_.count()));
    Message message = std::move(queue.front());
    queue.pop_front();
    return message;
  }

  void transfer(std::span<const std::span<const std::byte>> out,
                std::span<const std::span<std::byte>> in) override {
    const auto self = static_cast<std::size_t>(rank_);
    std::unique_lock lock(shared_.mutex);
    for (std::size_t r = 0; r < out.size(); ++r)
      if (!out[r].empty()) shared_.queue(self, r).emplace_back(out[r].begin(), out[r].end());
    shared_.changed.notify_all();
    for (std::size_t r = 0; r < in.size(); ++r) {
      if (in[r].empty() || has_abandoned(static_cast<int>(r))) continue;
      const Message message = next(lock, r);
      if (message.empty()) {
        note_abandoned(static_cast<int>(r));
        continue;
      }
      LODE_ASSERT(message.size() == in[r].size());
      std::memcpy(in[r].data(), message.data(), message.size());
    }
  }

  void drop_messages() override {
    const auto self = static_cast<std::size_t>(rank_);
    std::unique_lock lock(shared_.mutex);
    for (std::size_t r = 0; r < shared_.ranks; ++r)
      if (r != self) shared_.queue(self, r).emplace_back();
    shared_.changed.notify_all();
    for (int r = 0; r < size(); ++r)
      while (r != rank_ && !has_abandoned(r))
        if (next(lock, static_cast<std::size_t>(r)).empty()) note_abandoned(r);
  }

  Exchange& shared_;
  const int rank_;
  const std::chrono::milliseconds patience_;
};

}  // namespace

void run_local_ranks(int size, const std::function<void(Communicator&)>& body,
                     std::chrono::milliseconds patience) {
  Exchange shared(size);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      LocalCommunicator ranks(shared, rank, patience);
      try {
        body(ranks);
      } catch (const std::exception& error) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        ranks.fail(error.what());
      }
    });
  }
  threads.clear();
  if (first) std::rethrow_exception(first);
}

}  // namespace lode
