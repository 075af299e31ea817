// SPDX-License-Identifier: Apache-2.0
#include "select/rank_choice.h"

#include <algorithm>
#include <array>
#include <functional>

#include "kernels/score_order.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::size_t kSplitters = 32;

/// What a rank says of a choice that is still open.
struct Offer {
  std::int64_t taken = 0;  ///< its keys that are chosen for sure
  std::int64_t open = 0;   ///< those that may be
  std::array<std::uint64_t, kSplitters> splitters = {};

  /// How many of the open keys lie before splitter i, falling.
  std::int64_t before(std::size_t i) const {
    const auto n = static_cast<std::int64_t>(kSplitters);
    return open <= n ? static_cast<std::int64_t>(i) : open * static_cast<std::int64_t>(i) / n;
  }
  std::size_t count() const { return static_cast<std::size_t>(std::min<std::int64_t>(open, kSplitters)); }
  bool complete() const { return open <= static_cast<std::int64_t>(kSplitters); }
};

/// The open keys of a choice on this rank: [begin, end) of its falling numbers.
struct OpenRange {
  std::size_t choice = 0;
  std::int64_t begin = 0, end = 0;
};

Offer offer_of(const RankedKeys& choice, const OpenRange& range) {
  Offer offer = {.taken = range.begin, .open = range.end - range.begin};
  for (std::size_t i = 0; i < offer.count(); ++i)
    offer.splitters[i] = choice.keys[static_cast<std::size_t>(range.begin + offer.before(i))];
  return offer;
}

/// How many open keys are at least `key`: bounds.
struct Bounds {
  std::int64_t low = 0, high = 0;
};
Bounds at_least(std::span<const Offer> offers, std::uint64_t key) {
  Bounds bounds;
  for (const Offer& offer : offers) {
    const auto first = offer.splitters.begin(), last = first + static_cast<std::ptrdiff_t>(offer.count());
    // Splitters from here on are below the key.
    const auto below =
        static_cast<std::size_t>(std::lower_bound(first, last, key, std::greater_equal<>()) - first);
    const std::int64_t low = below == 0 ? 0 : offer.before(below - 1) + 1;
    const bool exact = below > 0 && offer.splitters[below - 1] == key;
    bounds.low += low;
    bounds.high += exact ? low : below == offer.count() ? offer.open : offer.before(below);
  }
  return bounds;
}

/// Where the last chosen key lies: from `low` on, and below `high`.
struct Bracket {
  std::uint64_t low = 0, high = ~std::uint64_t{0};
};
Bracket narrow(std::span<const Offer> offers, std::int64_t wanted) {
  Bracket bracket;
  for (const Offer& offer : offers) {
    for (std::size_t i = 0; i < offer.count(); ++i) {
      const std::uint64_t key = offer.splitters[i];
      const Bounds bounds = at_least(offers, key);
      if (bounds.low >= wanted) bracket.low = std::max(bracket.low, key);
      if (bounds.high < wanted) bracket.high = std::min(bracket.high, key);
    }
  }
  return bracket;
}

/// Of keys that are all known: the wanted one from above.
std::uint64_t pick(std::span<const Offer> offers, std::int64_t wanted) {
  std::vector<std::uint64_t> keys;
  for (const Offer& offer : offers)
    keys.insert(keys.end(), offer.splitters.begin(),
                offer.splitters.begin() + static_cast<std::ptrdiff_t>(offer.count()));
  LODE_ASSERT(wanted > 0 && wanted <= std::ssize(keys));
  std::nth_element(keys.begin(), keys.begin() + (wanted - 1), keys.end(), std::greater<>());
  return keys[static_cast<std::size_t>(wanted - 1)];
}

/// Everybody's offers: [ranks, open choices].
std::vector<std::vector<Offer>> gather(Communicator& ranks, std::vector<Offer> own) {
  std::vector<std::vector<Offer>> all(static_cast<std::size_t>(ranks.size()), std::vector<Offer>(own.size()));
  all[static_cast<std::size_t>(ranks.rank())] = std::move(own);
  std::vector<std::span<std::byte>> parts;
  for (std::vector<Offer>& offers : all) parts.push_back(std::as_writable_bytes(std::span(offers)));
  ranks.all_gather(parts);
  return all;
}

/// Keeps what lies inside the bracket.
void cut(const RankedKeys& choice, const Bracket& bracket, OpenRange& range) {
  const auto at = [&](std::int64_t i) { return choice.keys.begin() + i; };
  // Numbers fall: first those from `high` on, which are chosen, then those that stay open, then what is too small.
  const auto first = std::lower_bound(at(range.begin), at(range.end), bracket.high, std::greater_equal<>());
  const auto last = std::lower_bound(first, at(range.end), bracket.low, std::greater_equal<>());
  range.begin = first - choice.keys.begin();
  range.end = last - choice.keys.begin();
}

}  // namespace

std::uint64_t ranked_key(float score, Position row) {
  return std::uint64_t{ordered(score)} << 32 | static_cast<std::uint32_t>(row);
}

Position row_of(std::uint64_t key) {
  return static_cast<Position>(key & 0xffff'ffffu);
}

float score_of_key(std::uint64_t key) {
  return score_of(static_cast<std::uint32_t>(key >> 32));
}

std::vector<ChosenKeys> choose_over_ranks(Communicator& ranks, std::span<const RankedKeys> choices) {
  std::vector<ChosenKeys> chosen(choices.size());
  std::vector<OpenRange> open;
  for (std::size_t c = 0; c < choices.size(); ++c) {
    LODE_ASSERT(choices[c].budget > 0);
    open.push_back({.choice = c, .begin = 0, .end = std::ssize(choices[c].keys)});
  }
  for (bool first_round = true; !open.empty(); first_round = false) {
    std::vector<Offer> own;
    for (const OpenRange& range : open) own.push_back(offer_of(choices[range.choice], range));
    const std::vector<std::vector<Offer>> all = gather(ranks, std::move(own));
    std::vector<OpenRange> left;
    for (std::size_t i = 0; i < open.size(); ++i) {
      std::vector<Offer> offers;
      for (const std::vector<Offer>& of_rank : all) offers.push_back(of_rank[i]);
      const RankedKeys& choice = choices[open[i].choice];
      ChosenKeys& keys = chosen[open[i].choice];
      std::int64_t wanted = choice.budget, there = 0;
      for (const Offer& offer : offers) {
        wanted -= offer.taken;
        there += offer.open;
        if (first_round && offer.open > 0) keys.best = std::max(keys.best, offer.splitters[0]);
      }
      if (first_round && there <= wanted) continue;  // all of them
      if (std::ranges::all_of(offers, &Offer::complete)) {
        keys.last = pick(offers, wanted);
        continue;
      }
      cut(choice, narrow(offers, wanted), open[i]);
      left.push_back(open[i]);
    }
    open = std::move(left);
  }
  return chosen;
}

}  // namespace lode
