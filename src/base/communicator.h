// SPDX-License-Identifier: Apache-2.0
// What ranks (processes that share one document) tell each other: messages whose sizes both sides know, nothing
// else. cluster/mpi.h carries them between processes and machines, cluster/local_ranks.h between threads of one process.
//
// All ranks call the same collective operations in the same order. What goes wrong on one ends the call on all
// others with its reason: a RankLost that names the rank. Ranks that are to go on after that use base/unison.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "lodestone/error.h"

namespace lode {

/// Another rank is heard no more or has given up: the ranks do nothing together from now on.
class RankLost : public RunError {
 public:
  using RunError::RunError;
};

/// Another rank has called Communicator::abandon, and so must this one.
class Abandoned : public std::exception {
 public:
  const char* what() const noexcept override { return "another rank has abandoned what all do together"; }
};

/// Messages that one rank has sent to others.
struct Traffic {
  std::int64_t messages = 0, bytes = 0;
  Traffic& operator+=(const Traffic& other) {
    messages += other.messages;
    bytes += other.bytes;
    return *this;
  }
  friend Traffic operator-(Traffic a, const Traffic& b) {
    return {a.messages - b.messages, a.bytes - b.bytes};
  }
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Tells the others why this rank gives up. What they wait for ends with it.
  virtual void fail(const std::string& reason) noexcept = 0;
  /// RankLost when another rank is known to be lost. Exchanges look by themselves.
  virtual void expect_alive() = 0;

  /// Sends out[r] to rank r and receives its message into in[r], whose size is what r sends. Empty ones are not
  /// sent. Returns when all have come.
  void exchange(std::span<const std::span<const std::byte>> out /*[size]*/,
                std::span<const std::span<std::byte>> in /*[size]*/);
  /// Everybody gets everybody's bytes, parts[r] those of rank r; parts[rank()] is filled in by the caller.
  void all_gather(std::span<const std::span<std::byte>> parts /*[size]*/);
  /// Everybody gets the bytes of rank `root`.
  void broadcast(std::span<std::byte> bytes, int root = 0);
  std::string broadcast(std::string text, int root = 0);
  /// Everybody's string, by rank.
  std::vector<std::string> all_strings(const std::string& own);
  /// The sum over all ranks of each number.
  void sum(std::span<std::int64_t> values);
  /// Returns when all ranks have called it.
  void barrier();

  /// Ends what all ranks do together in the middle of it: where another rank waits for this one its call throws
  /// Abandoned, and it calls this, too. Messages under way are dropped. Returns when all ranks have called it; what
  /// they say next is of something new.
  void abandon();

  const Traffic& sent() const { return sent_; }

 protected:
  /// Of a rank that has abandoned what all do, its last message is empty: no other message is.
  void note_abandoned(int rank);
  bool has_abandoned(int rank) const;

 private:
  /// The exchange with other ranks; out[rank()] and in[rank()] are empty. Notes who has abandoned it.
  virtual void transfer(std::span<const std::span<const std::byte>> out,
                        std::span<const std::span<std::byte>> in) = 0;
  /// Sends an empty message to every other rank, and drops what each sends until its own.
  virtual void drop_messages() = 0;
  Traffic sent_;
  std::vector<bool> abandoned_;  // [size()], or empty: no rank has
};

/// Consecutive items [begin, end) of `count` that one of `size` ranks has: as many as the others, give or take
/// one, in the order of the ranks.
struct Share {
  std::int64_t begin = 0, end = 0;
  std::int64_t count() const { return end - begin; }
  friend bool operator==(const Share&, const Share&) = default;
};
Share share_of(std::int64_t count, int rank, int size);
/// The same for the tokens of a text: where a share is long, it begins at a multiple of 1,024, so that pages of a
/// file can be mapped as they lie.
Share token_share(std::int64_t tokens, int rank, int size);

}  // namespace lode
