// SPDX-License-Identifier: Apache-2.0
#include "serve/schema/constraint.h"

#include <algorithm>
#include <limits>

namespace lode::serve {

namespace {

constexpr std::size_t kMostAllowed = 64, kMostPlaces = 4096;  // that are remembered: some megabytes

std::size_t shared_bytes(std::string_view a, std::string_view b) {
  return static_cast<std::size_t>(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

}  // namespace

TokenOrder::TokenOrder(const Tokenizer& tokenizer) {
  const std::span<const TokenId> gaps = tokenizer.gaps();
  for (TokenId id = 0; id < tokenizer.vocab(); ++id) {
    if (std::binary_search(gaps.begin(), gaps.end(), id) || tokenizer.is_special(id)) continue;
    if (const std::string_view bytes = tokenizer.bytes_of(id); !bytes.empty())
      entries_.push_back({id, bytes, 0});
  }
  std::sort(entries_.begin(), entries_.end(),
            [](const Entry& a, const Entry& b) { return a.bytes < b.bytes; });
  for (std::size_t i = 1; i < entries_.size(); ++i)
    entries_[i].shared = shared_bytes(entries_[i - 1].bytes, entries_[i].bytes);
}

Places::Places(const SchemaGrammar& grammar) {
  number_of(Matcher(grammar.grammar, grammar.start));
}

Places::Place Places::number_of(Matcher matcher) {
  const auto [at, fresh] = by_key_.try_emplace(matcher.key(), static_cast<Place>(matchers_.size()));
  if (fresh) {
    matchers_.push_back(std::move(matcher));
    next_.emplace_back().fill(kUnknown);
  }
  return at->second;
}

Places::Place Places::behind(Place place, unsigned char byte) {
  const auto from = static_cast<std::size_t>(place);
  if (next_[from][byte] != kUnknown) return next_[from][byte];
  Matcher matcher = matchers_[from];
  const Place found = matcher.accept(byte) ? number_of(std::move(matcher)) : kNowhere;
  return next_[from][byte] = found;
}

Constraint::Constraint(std::shared_ptr<const SchemaGrammar> grammar, std::shared_ptr<const TokenOrder> order,
                       const Tokenizer& tokenizer, std::vector<TokenId> ends)
    : grammar_(std::move(grammar)),
      order_(std::move(order)),
      tokenizer_(tokenizer),
      ends_(std::move(ends)),
      places_(*grammar_),
      taken_places_{places_.start()} {}

/// Walks all tokens in the order of their bytes. `path[n]` is the place behind the first n bytes of the entry at hand.
Constraint::Allowed Constraint::allowed(Places::Place place) {
  Allowed allowed;
  allowed.tokens.assign(static_cast<std::size_t>(tokenizer_.vocab()), false);
  const auto allow = [&](TokenId id) {
    allowed.tokens[static_cast<std::size_t>(id)] = true;
    allowed.any = true;
  };
  std::vector<Places::Place> path = {place};
  std::size_t refused =
      std::numeric_limits<std::size_t>::max();  // bytes of the entry before that cannot come
  for (const TokenOrder::Entry& entry : order_->entries()) {
    if (entry.shared >= refused) continue;
    refused = std::numeric_limits<std::size_t>::max();
    path.resize(std::min(path.size() - 1, entry.shared) + 1);
    while (path.size() <= entry.bytes.size()) {
      const Places::Place next =
          places_.behind(path.back(), static_cast<unsigned char>(entry.bytes[path.size() - 1]));
      if (next == Places::kNowhere) {
        refused = path.size();
        break;
      }
      path.push_back(next);
    }
    if (refused > entry.bytes.size()) allow(entry.id);
  }
  if (places_.at(place).complete())
    for (const TokenId end : ends_) allow(end);
  return allowed;
}

Places::Place Constraint::behind(Places::Place place, std::string_view bytes) {
  for (const char byte : bytes) {
    if (place == Places::kNowhere) return place;
    place = places_.behind(place, static_cast<unsigned char>(byte));
  }
  return place;
}

Places::Place Constraint::place_behind(std::span<const TokenId> answer) {
  const auto same = static_cast<std::size_t>(
      std::mismatch(taken_.begin(), taken_.end(), answer.begin(), answer.end()).first - taken_.begin());
  taken_.resize(same);
  taken_places_.resize(same + 1);
  for (const TokenId token : answer.subspan(same)) {
    taken_places_.push_back(behind(taken_places_.back(), tokenizer_.bytes_of(token)));
    taken_.push_back(token);
  }
  return taken_places_.back();
}

void Constraint::forget() {
  places_ = Places(*grammar_);
  taken_.clear();
  taken_places_ = {places_.start()};
  allowed_.clear();
}

bool Constraint::apply(std::span<const TokenId> answer, std::span<float> logits) {
  if (places_.size() > kMostPlaces) forget();
  const Places::Place place = place_behind(answer);
  if (place == Places::kNowhere) return false;  // tokens that were not asked of this filter
  if (allowed_.size() >= kMostAllowed) allowed_.clear();
  auto [at, fresh] = allowed_.try_emplace(place);
  if (fresh) at->second = allowed(place);
  const std::vector<bool>& tokens = at->second.tokens;
  for (std::size_t id = 0; id < logits.size(); ++id)
    if (id >= tokens.size() || !tokens[id]) logits[id] = -std::numeric_limits<float>::infinity();
  const Matcher& matcher = places_.at(place);
  return at->second.any && (matcher.may_go_on() || !matcher.complete());
}

}  // namespace lode::serve
