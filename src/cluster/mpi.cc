// SPDX-License-Identifier: Apache-2.0
#include "cluster/mpi.h"

#include <fmt/format.h>
#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <ranges>
#include <system_error>
#include <thread>

#include "base/cancel.h"
#include "lodestone/error.h"

namespace lode {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBeat{250};
constexpr int kMessageTag = 1, kBeatTag = 2;
/// MPI counts in int.
constexpr std::size_t kLargestPiece = std::size_t{1} << 30;

/// A sign of life.
struct Beat {
  std::int32_t failed = 0;
  std::int32_t spoken = 0;
  std::array<char, 504> reason = {};
};

void check(int code, const char* what) {
  if (code == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw RunError(fmt::format("MPI: {} failed: {}", what, text));
}

/// Ends the process with a reason when a call of MPI's has not come back in time: MPI itself waits for ever for a
/// rank that was stopped while it joined or left.
class Deadline {
 public:
  Deadline(std::chrono::milliseconds limit, int exit_code, const std::string& reason)
      : thread_([=](const std::stop_token& stop) {
          std::mutex mutex;
          std::condition_variable_any wake;
          std::unique_lock lock(mutex);
          wake.wait_for(lock, stop, limit, [] { return false; });
          if (stop.stop_requested()) return;
          if (!reason.empty()) fmt::print(stderr, "lodestone: {}\n", reason);
          _exit(exit_code);
        }) {}

 private:
  std::jthread thread_;
};

/// Joining and leaving wait for the slowest machine to load the program, which takes longer than a sign of life.
/// Rank 0 is to speak for all: the others end a little later.
std::chrono::milliseconds meeting_limit(std::chrono::milliseconds patience, int rank) {
  return 4 * patience + std::chrono::milliseconds(rank == 0 ? 0 : 1500);
}

/// What is known of each rank; the background thread writes it, whoever waits reads it.
class Liveness {
 public:
  Liveness(MPI_Comm comm, int rank, int size, std::chrono::milliseconds patience)
      : comm_(comm), rank_(rank), patience_(patience), peers_(static_cast<std::size_t>(size)) {
    for (Peer& peer : peers_) peer.heard = Clock::now();
    for (int r = 0; r < size; ++r)
      if (r != rank) listen(r);
    thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  }

  /// Throws when a rank has failed or is heard no more.
  void expect_all_alive() {
    const std::lock_guard lock(mutex_);
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      if (static_cast<int>(r) == rank_) continue;
      const Peer& peer = peers_[r];
      if (!peer.reason.empty()) fail_for(fmt::format("rank {}: {}", r, peer.reason));
      const auto silent = std::chrono::duration<double>(Clock::now() - peer.heard).count();
      if (Clock::now() - peer.heard > patience_)
        fail_for(
            fmt::format("rank {} has given no sign of life for {:.1f} s (killed, stopped, out of memory, or "
                        "its network is gone): nothing half-written was left behind; start again with the "
                        "ranks that are left",
                        r, silent));
    }
  }
  bool other_failed() const { return other_failed_; }

  void fail(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    own_.failed = 1;
    const std::size_t length = std::min(reason.size(), own_.reason.size() - 1);
    std::copy_n(reason.data(), length, own_.reason.data());
  }

  void tell_spoken() {
    const auto last = Clock::now() + std::chrono::seconds(1);
    std::unique_lock lock(mutex_);
    own_.spoken = 1;
    const auto on_its_way = [&](std::size_t r) {
      return static_cast<int>(r) == rank_ || peers_[r].out.spoken != 0;
    };
    while (Clock::now() < last &&
           !std::ranges::all_of(std::views::iota(std::size_t{0}, peers_.size()), on_its_way)) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      lock.lock();
    }
  }
  bool has_spoken(int r) {
    const std::lock_guard lock(mutex_);
    return peers_[static_cast<std::size_t>(r)].spoken;
  }

  void stop() {
    thread_.request_stop();
    if (thread_.joinable()) thread_.join();
    for (Peer& peer : peers_)
      for (MPI_Request* request : {&peer.receiving, &peer.sending}) {
        if (*request == MPI_REQUEST_NULL) continue;
        MPI_Cancel(request);
        MPI_Request_free(request);
      }
  }

 private:
  struct Peer {
    Clock::time_point heard;
    std::string reason;
    bool spoken = false;
    Beat in, out;
    MPI_Request receiving = MPI_REQUEST_NULL, sending = MPI_REQUEST_NULL;
  };

  [[noreturn]] void fail_for(const std::string& why) {
    other_failed_ = true;
    throw RankLost(why);
  }
  void listen(int r) {
    Peer& peer = peers_[static_cast<std::size_t>(r)];
    MPI_Irecv(&peer.in, sizeof peer.in, MPI_BYTE, r, kBeatTag, comm_, &peer.receiving);
  }

  void run(const std::stop_token& stop) {
    auto next = Clock::now();
    while (!stop.stop_requested()) {
      {
        const std::lock_guard lock(mutex_);
        const bool due = Clock::now() >= next;
        if (due) next = Clock::now() + kBeat;
        for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
          if (r != rank_) visit(r, due);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  void visit(int r, bool due) {
    Peer& peer = peers_[static_cast<std::size_t>(r)];
    int done = 0;
    if (MPI_Test(&peer.receiving, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done != 0) {
      peer.heard = Clock::now();
      if (peer.in.failed != 0) peer.reason = peer.in.reason.data();
      peer.spoken = peer.in.spoken != 0;
      listen(r);
    }
    done = 1;
    if (peer.sending != MPI_REQUEST_NULL) MPI_Test(&peer.sending, &done, MPI_STATUS_IGNORE);
    const bool news = own_.failed != peer.out.failed || own_.spoken != peer.out.spoken;
    if ((!due && !news) || done == 0) return;
    peer.out = own_;
    MPI_Isend(&peer.out, sizeof peer.out, MPI_BYTE, r, kBeatTag, comm_, &peer.sending);
  }

  const MPI_Comm comm_;
  const int rank_;
  const std::chrono::milliseconds patience_;
  std::mutex mutex_;
  Beat own_;
  std::vector<Peer> peers_;
  std::atomic<bool> other_failed_{false};
  std::jthread thread_;
};

/// Whether this host has more ranks than cores that they may run on.
bool ranks_outnumber_cores() {
  MPI_Comm host = MPI_COMM_NULL;
  check(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host), "a communicator");
  int ranks = 0;
  check(MPI_Comm_size(host, &ranks), "the number of ranks");
  cpu_set_t own, all;  // a launcher may have given each rank cores of its own
  CPU_ZERO(&own);
  CPU_ZERO(&all);
  const bool known = sched_getaffinity(0, sizeof own, &own) == 0;
  check(MPI_Allreduce(&own, &all, sizeof own, MPI_BYTE, MPI_BOR, host), "a sum");
  MPI_Comm_free(&host);
  return known && ranks > CPU_COUNT(&all);
}

/// Whether MPI is starting. Where it lacks memory then, a part of it (its scanner of message files) ends the process
/// with a remark of its own, or none.
std::atomic<bool> starting{false};

void explain_exit() {
  if (!starting) return;
  fmt::print(
      stderr,
      "lodestone: MPI ended this rank as it started: out of memory (ulimit -v), or what it says above\n");
}

class MpiRanks final : public Ranks {
 public:
  explicit MpiRanks(std::chrono::milliseconds patience) : patience_(patience) {
    const auto limit = meeting_limit(patience, started_rank());
    const Deadline deadline(
        limit, 1,
        fmt::format(
            "expected all ranks to join within {:.0f} s, found that one has not (killed or stopped as "
            "it started, or its machine is out of reach): start again with the machines that answer; "
            "LODESTONE_RANK_TIMEOUT=SECONDS waits longer",
            std::chrono::duration<double>(limit).count()));
    // Open MPI would yield at each poll, also while it starts; wait_for() says when to.
    setenv("OMPI_MCA_mpi_yield_when_idle", "0", /*overwrite=*/1);
    int provided = 0;
    std::atexit(explain_exit);
    starting = true;
    const int started = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
    starting = false;
    check(started, "the start");
    if (provided < MPI_THREAD_MULTIPLE)
      throw RunError("MPI: expected a library that serves several threads at once, found one that does not");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "the rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &size_), "the number of ranks");
    check(MPI_Comm_dup(MPI_COMM_WORLD, &beats_), "a second communicator");
    MPI_Comm_set_errhandler(beats_, MPI_ERRORS_RETURN);
    crowded_ = ranks_outnumber_cores();
    liveness_ = std::make_unique<Liveness>(beats_, rank_, size_, patience);
  }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void fail(const std::string& reason) noexcept override { liveness_->fail(reason); }
  void expect_alive() override { liveness_->expect_all_alive(); }
  bool other_failed() const override { return liveness_->other_failed(); }
  void tell_spoken() override { liveness_->tell_spoken(); }
  bool first_has_spoken() override { return liveness_->has_spoken(0); }

  void finish() override {
    barrier();  // whoever is still awaited is alive
    liveness_->stop();
    const Deadline deadline(meeting_limit(patience_, rank_), 1,
                            "all is done, but a rank has not ended with the others (killed or stopped)");
    MPI_Finalize();
  }
  [[noreturn]] void abort(int exit_code) override {
    // The launcher, which is to end the others, may be on the far side of a cut link.
    try {
      const Deadline deadline(std::chrono::seconds(2), exit_code, "");
      MPI_Abort(MPI_COMM_WORLD, exit_code);
    } catch (const std::system_error&) {  // no thread to be had: the launcher sees the exit
    }
    _exit(exit_code);
  }

 private:
  /// Messages under way, and of those that are to come, whose they are.
  struct Underway {
    std::vector<MPI_Request> requests;
    std::vector<int> from;             // [requests] -1: this rank's own
    std::vector<int> done;             // scratch
    std::vector<MPI_Status> statuses;  // scratch

    /// Room for so many: where memory ends, it ends before one is under way whose bytes would go.
    explicit Underway(std::size_t most) : done(most), statuses(most) {
      requests.reserve(most);
      from.reserve(most);
    }
    MPI_Request* add(int rank) {
      from.push_back(rank);
      return &requests.emplace_back(MPI_REQUEST_NULL);
    }
  };

  void transfer(std::span<const std::span<const std::byte>> out,
                std::span<const std::span<std::byte>> in) override {
    std::size_t most = 0;
    for (const auto& message : out) most += pieces_in(message.size());
    for (const auto& message : in) most += pieces_in(message.size());
    Underway underway(most);
    for (int r = 0; r < size_; ++r)
      in_pieces(in[static_cast<std::size_t>(r)], [&](std::span<std::byte> piece) {
        check(MPI_Irecv(piece.data(), static_cast<int>(piece.size()), MPI_BYTE, r, kMessageTag,
                        MPI_COMM_WORLD, underway.add(r)),
              "a receive");
      });
    for (int r = 0; r < size_; ++r)
      in_pieces(out[static_cast<std::size_t>(r)], [&](std::span<const std::byte> piece) {
        check(MPI_Isend(piece.data(), static_cast<int>(piece.size()), MPI_BYTE, r, kMessageTag,
                        MPI_COMM_WORLD, underway.add(-1)),
              "a send");
      });
    wait_for(underway);
  }

  void drop_messages() override {
    Underway underway(static_cast<std::size_t>(size_));
    for (int r = 0; r < size_; ++r)
      if (r != rank_)
        check(MPI_Isend(nullptr, 0, MPI_BYTE, r, kMessageTag, MPI_COMM_WORLD, underway.add(-1)), "a send");
    std::vector<std::byte> dropped;
    for (int r = 0; r < size_; ++r) {
      while (r != rank_ && !has_abandoned(r)) {
        dropped.resize(size_of_next(r));
        Underway one(1);
        check(MPI_Irecv(dropped.data(), static_cast<int>(dropped.size()), MPI_BYTE, r, kMessageTag,
                        MPI_COMM_WORLD, one.add(r)),
              "a receive");
        wait_for(one);
      }
    }
    wait_for(underway);
  }

  /// Bytes of a rank's next message, once it has begun to come.
  std::size_t size_of_next(int rank) {
    int bytes = 0;
    wait_until([&] {
      int there = 0;
      MPI_Status status;
      check(MPI_Iprobe(rank, kMessageTag, MPI_COMM_WORLD, &there, &status), "a look for a message");
      if (there != 0) check(MPI_Get_count(&status, MPI_BYTE, &bytes), "a message's size");
      return there != 0;
    });
    return static_cast<std::size_t>(bytes);
  }

  static std::size_t pieces_in(std::size_t bytes) { return (bytes + kLargestPiece - 1) / kLargestPiece; }

  template <class Byte>
  static void in_pieces(std::span<Byte> message, const auto& body) {
    for (std::size_t at = 0; at < message.size(); at += kLargestPiece)
      body(message.subspan(at, std::min(kLargestPiece, message.size() - at)));
  }

  /// When it throws, buffers of requests under way may go: the process ends then, and MPI with it.
  void wait_for(Underway& underway) {
    wait_until([&] {
      int count = 0;
      check(MPI_Testsome(static_cast<int>(underway.requests.size()), underway.requests.data(), &count,
                         underway.done.data(), underway.statuses.data()),
            "a message");
      for (std::size_t i = 0; count != MPI_UNDEFINED && i < static_cast<std::size_t>(count); ++i)
        look_at(underway, static_cast<std::size_t>(underway.done[i]), underway.statuses[i]);
      return std::ranges::all_of(underway.requests, [](MPI_Request r) { return r == MPI_REQUEST_NULL; });
    });
  }

  /// A message that is done. Behind an empty one nothing comes of what else was expected of that rank.
  void look_at(Underway& underway, std::size_t request, const MPI_Status& status) {
    const int rank = underway.from[request];
    int bytes = 0;
    if (rank < 0) return;
    check(MPI_Get_count(&status, MPI_BYTE, &bytes), "a message's size");
    if (bytes > 0) return;
    note_abandoned(rank);
    for (std::size_t i = 0; i < underway.requests.size(); ++i) {
      if (underway.from[i] != rank || underway.requests[i] == MPI_REQUEST_NULL) continue;
      check(MPI_Cancel(&underway.requests[i]), "an end of waiting");
      check(MPI_Wait(&underway.requests[i], MPI_STATUS_IGNORE), "an end of waiting");
    }
  }

  /// Polls, so that a rank that is heard no more is noticed; gives its core to others the longer it takes, for those
  /// that wait for work by the hour most of all. It yields only where ranks outnumber cores, so that the one that is
  /// awaited may run: where other programs run, each yield costs milliseconds, many times a message
  /// (docs/results/cluster.md).
  void wait_until(const auto& done) {
    const auto eager = std::chrono::microseconds(crowded_ ? 20'000 : 200);
    const auto start = Clock::now();
    for (int naps = 0; !done();) {
      if (Clock::now() - start < eager) {
        if (crowded_) std::this_thread::yield();
        continue;
      }
      liveness_->expect_all_alive();
      check_cancel();
      const int longest = Clock::now() - start < std::chrono::seconds(2) ? 500 : 5000;
      std::this_thread::sleep_for(std::chrono::microseconds(std::min(longest, 20 + naps++)));
    }
  }

  const std::chrono::milliseconds patience_;
  int rank_ = 0, size_ = 1;
  bool crowded_ = false;
  MPI_Comm beats_ = MPI_COMM_NULL;
  std::unique_ptr<Liveness> liveness_;
};

}  // namespace

std::unique_ptr<Ranks> connect_ranks(std::chrono::milliseconds patience) {
  return std::make_unique<MpiRanks>(patience);
}

}  // namespace lode
