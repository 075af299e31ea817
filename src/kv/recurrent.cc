// SPDX-License-Identifier: Apache-2.0
#include "kv/recurrent.h"

#include <algorithm>

#include "lodestone/error.h"

namespace lode {

RecurrentStates::RecurrentStates(std::vector<std::int64_t> floats) : floats_(std::move(floats)) {
  for (const std::int64_t n : floats_) {
    begin_.push_back(total_);
    total_ += n;
  }
  if (total_ > 0) first_ = now_ = std::make_shared<std::vector<float>>(static_cast<std::size_t>(total_));
}

std::span<const float> RecurrentStates::before(int layer) const {
  const auto l = static_cast<std::size_t>(layer);
  return std::span<const float>(*now_).subspan(static_cast<std::size_t>(begin_[l]),
                                               static_cast<std::size_t>(floats_[l]));
}

std::span<float> RecurrentStates::after(int layer) {
  if (next_ == nullptr) next_ = std::make_shared<std::vector<float>>(static_cast<std::size_t>(total_));
  const auto l = static_cast<std::size_t>(layer);
  return std::span(*next_).subspan(static_cast<std::size_t>(begin_[l]), static_cast<std::size_t>(floats_[l]));
}

/// The buffer of the step before serves the next one, unless somebody goes back to it.
void RecurrentStates::commit(std::int64_t tokens) {
  if (empty() || tokens == tokens_) return;
  LODE_ASSERT(next_ != nullptr && tokens > tokens_);
  std::swap(now_, next_);
  if (next_.use_count() > 1) next_ = nullptr;
  tokens_ = tokens;
}

void RecurrentStates::keep() {
  if (empty() || tokens_ == 0) return;
  kept_[tokens_] = now_;
  if (kept_.size() <= kMost) return;
  auto closest = std::next(kept_.begin());  // the newest stays
  std::int64_t least = -1;
  for (auto at = kept_.begin(); std::next(at) != kept_.end(); ++at) {
    const std::int64_t before = at == kept_.begin() ? 0 : std::prev(at)->first;
    const std::int64_t span = std::next(at)->first - before;
    if (least >= 0 && span >= least) continue;
    least = span;
    closest = at;
  }
  kept_.erase(closest);
}

std::int64_t RecurrentStates::reachable(std::int64_t tokens) const {
  if (empty()) return tokens;
  if (tokens >= tokens_) return tokens_;
  const auto beyond = kept_.upper_bound(tokens);
  return beyond == kept_.begin() ? 0 : std::prev(beyond)->first;
}

void RecurrentStates::roll_back(std::int64_t tokens) {
  if (empty() || tokens >= tokens_) return;  // beyond: a GPU is ahead
  LODE_ASSERT(reachable(tokens) == tokens);
  const auto kept = kept_.find(tokens);
  now_ = kept != kept_.end() ? kept->second : first_;
  if (next_ != nullptr && next_.use_count() > 1) next_ = nullptr;
  kept_.erase(kept_.upper_bound(tokens), kept_.end());
  tokens_ = tokens;
}

void RecurrentStates::branch_from(const RecurrentStates& other) {
  LODE_ASSERT(floats_ == other.floats_ && tokens_ == 0);
  first_ = now_ = other.now_;
}

std::vector<std::int64_t> RecurrentStates::kept() const {
  std::vector<std::int64_t> all;
  if (empty()) return all;
  for (const auto& [tokens, buffer] : kept_)
    if (tokens > 0 && tokens < tokens_) all.push_back(tokens);
  all.push_back(tokens_);
  return all;
}

std::span<const float> RecurrentStates::at(std::int64_t tokens) const {
  if (tokens == tokens_) return *now_;
  return *kept_.at(tokens);
}

void RecurrentStates::restore(std::int64_t tokens, std::span<const float> states) {
  LODE_ASSERT(!empty() && std::ssize(states) == total_ && tokens >= tokens_);
  now_ = std::make_shared<std::vector<float>>(states.begin(), states.end());
  tokens_ = tokens;
  keep();
}

}  // namespace lode
