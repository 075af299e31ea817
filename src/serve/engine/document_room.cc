// SPDX-License-Identifier: Apache-2.0
#include "serve/engine/document_room.h"

#include <algorithm>

#include "lodestone/error.h"

namespace lode::serve {

namespace {

/// What took long to open stays open for long, up to so many times the patience.
constexpr double kLongestTurn = 5;

}  // namespace

bool DocumentRoom::enter(Key key) {
  const auto found = held_.find(key);
  if (found == held_.end() || found->second.state != State::open) return false;
  Held& held = found->second;
  if (held.retired || held.yielding) return false;
  ++held.uses;
  held.used = ++uses_;
  return true;
}

void DocumentRoom::end_use(Key key) {
  Held& held = held_.at(key);
  LODE_ASSERT(held.uses > 0);
  --held.uses;
  held.used = ++uses_;
}

bool DocumentRoom::waits(Key key) const {
  return std::ranges::any_of(queue_, [&](const Wait& wait) { return wait.key == key; });
}

void DocumentRoom::wait(Key key, std::int64_t need, double now) {
  LODE_ASSERT(need <= bytes_);
  for (Wait& wait : queue_)
    if (wait.key == key) return static_cast<void>(wait.need = std::max(wait.need, need));
  queue_.push_back({key, need, now});
}

void DocumentRoom::wait_in_front(Key key, std::int64_t need, double now) {
  LODE_ASSERT(need <= bytes_);
  leave(key);
  queue_.push_front({key, need, now});
}

void DocumentRoom::leave(Key key) {
  std::erase_if(queue_, [&](const Wait& wait) { return wait.key == key; });
}

void DocumentRoom::retire(Key key) {
  if (const auto found = held_.find(key); found != held_.end()) found->second.retired = true;
}

/// Bytes that will be free without anybody else being asked to go.
std::int64_t DocumentRoom::coming() const {
  std::int64_t bytes = bytes_ - used_;
  for (const auto& [key, held] : held_)
    if (held.state == State::closing || held.retired || held.yielding) bytes += held.bytes;
  return bytes;
}

/// Has documents in use take no more questions, until so many bytes will come of it.
void DocumentRoom::ask_to_yield(std::int64_t missing, double now) {
  std::vector<Held*> some;
  for (auto& [key, held] : held_)
    if (held.state == State::open && !held.retired && !held.yielding && now - held.since >= held.turn)
      some.push_back(&held);
  std::ranges::sort(some, {}, [](const Held* held) { return held->since; });
  for (Held* const held : some) {
    if (missing <= 0) return;
    held->yielding = true;
    missing -= held->bytes;
  }
}

std::vector<DocumentRoom::Key> DocumentRoom::to_close(double now) {
  std::vector<std::pair<Key, Held*>> unused;
  std::vector<Key> close;
  const auto go = [&](Key key, Held& held) {
    held.state = State::closing;
    close.push_back(key);
  };
  for (auto& [key, held] : held_) {
    if (queue_.empty()) held.yielding = false;
    if (held.state == State::open && held.uses == 0) unused.emplace_back(key, &held);
  }
  std::ranges::sort(unused, {}, [](const auto& one) { return one.second->used; });
  for (const auto& [key, held] : unused)
    if (held->retired) go(key, *held);
  if (queue_.empty() || holds(queue_.front().key)) return close;
  const Wait& front = queue_.front();
  for (const auto& [key, held] : unused) {
    if (held->state == State::closing) continue;
    if (!held->yielding && coming() >= front.need) continue;
    go(key, *held);
  }
  if (const std::int64_t missing = front.need - coming(); missing > 0 && now - front.since >= patience_)
    ask_to_yield(missing, now);
  return close;
}

std::optional<DocumentRoom::Key> DocumentRoom::to_open(double now) {
  if (queue_.empty()) return std::nullopt;
  const Wait front = queue_.front();
  if (const auto found = held_.find(front.key); found != held_.end()) {
    Held& held = found->second;
    if (held.state != State::open || held.retired) return std::nullopt;  // once it is closed
    held.yielding = false;  // it was to go, and now has its next turn
    held.since = now;
    queue_.pop_front();
    return front.key;
  }
  if (front.need > bytes_ - used_) return std::nullopt;
  queue_.pop_front();
  held_[front.key] = {.bytes = front.need, .since = now};
  used_ += front.need;
  return front.key;
}

void DocumentRoom::opened(Key key, std::int64_t bytes, double now) {
  Held& held = held_.at(key);
  LODE_ASSERT(held.state == State::opening);
  held.turn = std::clamp(now - held.since, patience_, kLongestTurn * patience_);
  held.state = State::open;
  held.since = now;
  held.used = ++uses_;
  const std::int64_t counted = std::min(bytes, held.bytes + bytes_ - used_);
  used_ += counted - held.bytes;
  held.bytes = counted;
}

std::int64_t DocumentRoom::closed(Key key) {
  const auto found = held_.find(key);
  LODE_ASSERT(found != held_.end() && found->second.uses == 0 && found->second.state != State::open);
  const std::int64_t bytes = found->second.bytes;
  used_ -= bytes;
  held_.erase(found);
  return bytes;
}

bool DocumentRoom::in_use(Key key) const {
  const auto found = held_.find(key);
  return found != held_.end() && found->second.uses > 0;
}

bool DocumentRoom::open(Key key) const {
  const auto found = held_.find(key);
  return found != held_.end() && found->second.state == State::open;
}

}  // namespace lode::serve
