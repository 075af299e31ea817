// SPDX-License-Identifier: Apache-2.0
#include "serve/schema/constraint.h"

#include <algorithm>
#include <limits>

namespace lode::serve {

namespace {

constexpr std::size_t kMostKnown = 256;

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

Constraint::Constraint(std::shared_ptr<const SchemaGrammar> grammar, std::shared_ptr<const TokenOrder> order,
                       const Tokenizer& tokenizer, std::vector<TokenId> ends)
    : grammar_(std::move(grammar)),
      order_(std::move(order)),
      tokenizer_(tokenizer),
      ends_(std::move(ends)),
      places_{Matcher(grammar_->grammar, grammar_->start)} {}

/// Walks all tokens in the order of their bytes. `path[n]` is the place behind the first n bytes of the entry at hand.
Constraint::Allowed Constraint::allowed(const Matcher& place) const {
  Allowed allowed;
  allowed.tokens.assign(static_cast<std::size_t>(tokenizer_.vocab()), false);
  const auto allow = [&](TokenId id) {
    allowed.tokens[static_cast<std::size_t>(id)] = true;
    allowed.any = true;
  };
  std::vector<Matcher> path = {place};
  std::size_t refused =
      std::numeric_limits<std::size_t>::max();  // bytes of the entry before that cannot come
  for (const TokenOrder::Entry& entry : order_->entries()) {
    if (entry.shared >= refused) continue;
    refused = std::numeric_limits<std::size_t>::max();
    path.erase(path.begin() + static_cast<std::ptrdiff_t>(std::min(path.size() - 1, entry.shared)) + 1,
               path.end());
    while (path.size() <= entry.bytes.size()) {
      Matcher next = path.back();
      if (!next.accept(static_cast<unsigned char>(entry.bytes[path.size() - 1]))) {
        refused = path.size();
        break;
      }
      path.push_back(std::move(next));
    }
    if (refused > entry.bytes.size()) allow(entry.id);
  }
  if (place.complete())
    for (const TokenId end : ends_) allow(end);
  return allowed;
}

const Matcher& Constraint::place_behind(std::span<const TokenId> answer) {
  const auto same = static_cast<std::size_t>(
      std::mismatch(taken_.begin(), taken_.end(), answer.begin(), answer.end()).first - taken_.begin());
  taken_.resize(same);
  places_.erase(places_.begin() + static_cast<std::ptrdiff_t>(same) + 1, places_.end());
  for (const TokenId token : answer.subspan(same)) {
    places_.push_back(places_.back());
    for (const char byte : tokenizer_.bytes_of(token))
      places_.back().accept(static_cast<unsigned char>(byte));
    taken_.push_back(token);
  }
  return places_.back();
}

bool Constraint::apply(std::span<const TokenId> answer, std::span<float> logits) {
  const Matcher& place = place_behind(answer);
  if (known_.size() >= kMostKnown) known_.clear();
  auto [at, fresh] = known_.try_emplace(place.key());
  if (fresh) at->second = allowed(place);
  const std::vector<bool>& tokens = at->second.tokens;
  for (std::size_t id = 0; id < logits.size(); ++id)
    if (id >= tokens.size() || !tokens[id]) logits[id] = -std::numeric_limits<float>::infinity();
  return at->second.any && (place.may_go_on() || !place.complete());
}

}  // namespace lode::serve
