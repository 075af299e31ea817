// SPDX-License-Identifier: Apache-2.0
// Choices of keys that lie on several ranks: each rank scores its own, and the best of all ranks are chosen, exactly
// as one machine would choose them.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "base/communicator.h"
#include "lodestone/types.h"

namespace lode {

class Selector;

/// The keys of a document that this process has.
struct KeyShare {
  Communicator* ranks = nullptr;  ///< null: all of them are here
  std::int64_t tokens = 0;        ///< of the document
  Share own;                      ///< tokens whose keys are here
  bool divided() const { return ranks != nullptr; }
};

/// Which of some scored keys are chosen.
struct RankRule {
  std::int64_t budget = 0;                               ///< keys over all ranks
  bool all_ties = false;                                 ///< and all that are as good as the last of these
  float depth = std::numeric_limits<float>::infinity();  ///< but none that is worse by more than the best one
};

/// A key's score and place as one number: the better key has the larger one, of equal scores the newer. No two keys
/// have the same.
std::uint64_t ranked_key(float score, Position row);
Position row_of(std::uint64_t key);
float score_of_key(std::uint64_t key);

/// What one rank can contribute to one choice.
struct RankedKeys {
  std::int64_t budget = 0;          ///< keys that all ranks choose together, at least one
  std::vector<std::uint64_t> keys;  ///< this rank's best, as many as `budget` or all; falling
};
/// The numbers of the best and the last key that are chosen: keys from `last` on, exactly `budget` over all ranks, or
/// all where there are fewer.
struct ChosenKeys {
  std::uint64_t best = 0, last = 0;
};
/// Of each choice. All ranks call it with the same choices in the same order. A round sends some splitters of each
/// choice that is still open; few rounds are needed, as each leaves about one key in sixteen open.
std::vector<ChosenKeys> choose_over_ranks(Communicator& ranks, std::span<const RankedKeys> choices);

/// Tells a selector that it has a share of the keys, before it indexes anything. False when its method cannot choose
/// over ranks: it then needs all keys in one process.
bool divide_keys(Selector* selector, const KeyShare& share);
/// Whether it chooses of its share alone.
bool is_divided(const Selector* selector);

}  // namespace lode
