// SPDX-License-Identifier: Apache-2.0
// What ranks do together ends alike on all of them, so that they can go on after a failure: a program that answers
// one request after another is not to end because one of them was at fault.
#pragma once

#include <exception>
#include <functional>
#include <new>
#include <span>
#include <string>

#include "base/communicator.h"

namespace lode {

/// Another rank has no memory left.
class RankOutOfMemory : public std::bad_alloc {
 public:
  explicit RankOutOfMemory(int rank) : what_("rank " + std::to_string(rank) + ": out of memory") {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

/// Of one thread of each rank. All ranks call run() and pause() in the same order.
class Unison {
 public:
  explicit Unison(Communicator& ranks) : ranks_(ranks) {}
  Unison(const Unison&) = delete;
  Unison& operator=(const Unison&) = delete;

  Communicator& ranks() const { return ranks_; }
  /// Runs `body` on all ranks. Where it fails on some, on whatever line, it ends on all, which throw what the first of
  /// these has thrown: an InputError, Interrupted, bad_alloc (of another rank, a RankOutOfMemory), or a RunError. RankLost when they cannot go on.
  void run(const std::function<void()>& body);
  /// From inside of `body`, on all ranks at the same place: lets them do something else together. What `between` throws
  /// it has to throw on all ranks alike.
  void pause(const std::function<void()>& between);

 private:
  void meet();
  [[noreturn]] void end_alike(const std::exception_ptr& own);

  Communicator& ranks_;
  bool running_ = false;
};

/// `unison->run(body)`, or body alone where there are no ranks.
void run_alike(Unison* unison, const std::function<void()>& body);

/// What has come of one of several things that all ranks have done.
struct Outcome {
  std::string result;
  std::exception_ptr failure = nullptr;
};
/// What failed on some ranks has failed on all, with the reason of the first of them. RankLost where they have come to
/// different results: what they would do from then on is of no use.
void agree(Communicator& ranks, std::span<Outcome> outcomes);

}  // namespace lode
