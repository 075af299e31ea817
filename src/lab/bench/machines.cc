// SPDX-License-Identifier: Apache-2.0
// The messages are those of cluster/merge_states, cluster/rank_prefill and select/rank_choice.
#include "lab/bench/machines.h"

#include <algorithm>
#include <cmath>

namespace lode {

namespace {

constexpr double kChunk = 512;       // tokens of a rank's piece in prefill
constexpr double kOfferBytes = 272;  // of one choice in one round
constexpr double kOfferKeys = 32;    // that end a choice
constexpr double kNarrowing = 16;    // of what is open, each round
constexpr double kSumBytes = 32;     // of a step's work

}  // namespace

/// Every rank sends its queries to all others, and each of them the states that it has for their queries; when all is
/// read, rows move once.
MachinesModel::Prefill MachinesModel::prefill(std::int64_t tokens) const {
  const auto n = static_cast<double>(tokens);
  const double others = machines_ - 1, d = parts_.head_dim;
  const double compute =
      (n * parts_.token_seconds + parts_.layers * parts_.pair_seconds * n * n / 2) / machines_;
  if (machines_ == 1) return {compute, 0};
  const double chunks = std::ceil(n / (kChunk * machines_)), own = n / chunks / machines_;
  const double queries = heads_bytes(own * d) * others, states = heads_bytes(own * (d + 1)) * others;
  const double layers =
      parts_.layers * chunks * (link_.exchange(machines_, queries) + link_.exchange(machines_, states));
  const double moved = n / machines_ * static_cast<double>(parts_.token_bytes) * others / machines_;
  const double all = layers + moved / link_.bytes_per_second;
  return {compute + all, all};
}

double MachinesModel::step_communication(const StepMessages& step) const {
  if (machines_ == 1) return 0;
  const auto rows = static_cast<double>(step.tokens);
  const double others = machines_ - 1, share = others / machines_, d = parts_.head_dim;
  const double merged = link_.exchange(machines_, heads_bytes(rows * (d + 1)) * share),
               gathered = link_.exchange(machines_, heads_bytes(rows * d) * share);
  double choice = 0;
  if (step.chooses) {
    const double open = std::max(1.0, step.budget / kOfferKeys);
    const double rounds = 1 + std::ceil(std::log(open) / std::log(kNarrowing));
    choice = rounds * link_.exchange(machines_, rows * parts_.query_heads * kOfferBytes * others);
  }
  return parts_.layers * (merged + gathered + choice) + link_.exchange(machines_, kSumBytes * others);
}

}  // namespace lode
