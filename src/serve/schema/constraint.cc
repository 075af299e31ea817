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
      matcher_(grammar_->grammar, grammar_->start) {}

/// Walks all tokens in the order of their bytes. `path[n]` is the place behind the first n bytes of the entry at hand.
std::vector<bool> Constraint::allowed() {
  std::vector<bool> allowed(static_cast<std::size_t>(tokenizer_.vocab()), false);
  std::vector<Matcher> path = {matcher_};
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
    allowed[static_cast<std::size_t>(entry.id)] = refused > entry.bytes.size();
  }
  if (matcher_.complete())
    for (const TokenId end : ends_) allowed[static_cast<std::size_t>(end)] = true;
  return allowed;
}

void Constraint::apply(std::span<const TokenId> generated, std::span<float> logits) {
  for (; seen_ < generated.size(); ++seen_)
    for (const char byte : tokenizer_.bytes_of(generated[seen_]))
      matcher_.accept(static_cast<unsigned char>(byte));
  if (known_.size() >= kMostKnown) known_.clear();
  auto [at, fresh] = known_.try_emplace(matcher_.key());
  if (fresh) at->second = allowed();
  for (std::size_t id = 0; id < logits.size(); ++id)
    if (id >= at->second.size() || !at->second[id]) logits[id] = -std::numeric_limits<float>::infinity();
}

}  // namespace lode::serve
