// SPDX-License-Identifier: Apache-2.0
#include "base/unison.h"

#include <fmt/format.h>

#include <cstddef>
#include <new>
#include <span>
#include <vector>

#include "base/json.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr char kInput = 'i', kRun = 'r', kInterrupted = 'x', kMemory = 'm';

/// A failure as ranks tell it each other; empty when it only follows from another rank's.
std::string told_failure(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const Abandoned&) {
    return {};
  } catch (const InputError& error) {
    return kInput + std::string(error.what());
  } catch (const Interrupted&) {
    return {kInterrupted};
  } catch (const std::bad_alloc&) {
    return {kMemory};
  } catch (const std::exception& error) {
    return kRun + std::string(error.what());
  } catch (...) {
    return kRun + std::string("an unknown failure");
  }
}

/// What a rank has told; names the rank unless it is rank 0, which speaks for all.
std::exception_ptr failure_told(const std::string& told, int rank) {
  const std::string why = (rank == 0 ? "" : fmt::format("rank {}: ", rank)) + told.substr(1);
  switch (told.front()) {
    case kInput:
      return std::make_exception_ptr(InputError(why));
    case kInterrupted:
      return std::make_exception_ptr(Interrupted());
    case kMemory:
      return rank == 0 ? std::make_exception_ptr(std::bad_alloc())
                       : std::make_exception_ptr(RankOutOfMemory(rank));
    default:
      return std::make_exception_ptr(RunError(why));
  }
}

}  // namespace

/// Everybody hears from everybody, so that nobody goes on when one has failed.
void Unison::meet() {
  std::vector<std::byte> here(static_cast<std::size_t>(ranks_.size()));
  std::vector<std::span<std::byte>> parts;
  for (std::byte& one : here) parts.emplace_back(&one, 1);
  ranks_.all_gather(parts);
}

void Unison::run(const std::function<void()>& body) {
  LODE_ASSERT(!running_);
  running_ = true;
  try {
    body();
    meet();
    running_ = false;
  } catch (const RankLost&) {
    running_ = false;
    throw;
  } catch (...) {
    if (!running_) throw;  // while it paused, and on all ranks
    running_ = false;
    end_alike(std::current_exception());
  }
}

void Unison::pause(const std::function<void()>& between) {
  LODE_ASSERT(running_);
  meet();
  running_ = false;
  between();
  running_ = true;
}

void Unison::end_alike(const std::exception_ptr& own) {
  std::vector<std::string> told;
  try {
    ranks_.abandon();
    told = ranks_.all_strings(told_failure(own));
  } catch (const RankLost&) {
    throw;
  } catch (const std::exception& error) {  // this rank knows no longer where the others are
    throw RankLost(fmt::format("a failure could not be told to all ranks: {}", error.what()));
  }
  for (std::size_t r = 0; r < told.size(); ++r)
    if (!told[r].empty()) std::rethrow_exception(failure_told(told[r], static_cast<int>(r)));
  throw RankLost("expected a rank that has failed, found none");
}

void agree(Communicator& ranks, std::span<Outcome> outcomes) {
  Json own = Json::array();
  for (const Outcome& one : outcomes)
    own.push_back({one.result, one.failure ? told_failure(one.failure) : std::string()});
  std::vector<Json> by_rank;
  for (const std::string& one : ranks.all_strings(own.dump(-1, ' ', false, Json::error_handler_t::replace)))
    by_rank.push_back(Json::parse(one));
  for (std::size_t i = 0; i < outcomes.size(); ++i) {
    std::exception_ptr& failure = outcomes[i].failure;
    for (std::size_t r = 0; r < by_rank.size() && !failure; ++r)
      if (const std::string why = by_rank[r].at(i).at(1); !why.empty())
        failure = failure_told(why, static_cast<int>(r));
    for (std::size_t r = 1; r < by_rank.size() && !failure; ++r)
      if (by_rank[r].at(i) != by_rank[0].at(i))
        throw RankLost(fmt::format(
            "expected the same result on all ranks, found '{}' on rank {} and '{}' on rank 0: "
            "start all with the same program, model and files",
            by_rank[r].at(i).at(0).get<std::string>(), r, by_rank[0].at(i).at(0).get<std::string>()));
  }
}

void run_alike(Unison* unison, const std::function<void()>& body) {
  unison == nullptr ? body() : unison->run(body);
}

}  // namespace lode
