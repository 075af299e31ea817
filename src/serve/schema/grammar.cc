// SPDX-License-Identifier: Apache-2.0
#include "serve/schema/grammar.h"

#include <algorithm>
#include <set>
#include <utility>

#include "lodestone/error.h"

namespace lode::serve {

Grammar::Element Grammar::any_of(std::string_view bytes) {
  Element element;
  for (const char byte : bytes) element.bytes.set(static_cast<unsigned char>(byte));
  return element;
}

Grammar::Element Grammar::between(unsigned char first, unsigned char last) {
  Element element;
  for (int byte = first; byte <= last; ++byte) element.bytes.set(static_cast<std::size_t>(byte));
  return element;
}

Grammar::Sequence Grammar::literal(std::string_view text) {
  Sequence sequence;
  for (const char byte : text) sequence.push_back(any_of({&byte, 1}));
  return sequence;
}

Grammar::Rule Grammar::declare() {
  rules_.emplace_back();
  return static_cast<Rule>(rules_.size() - 1);
}

void Grammar::add(Rule rule, const Sequence& alternative) {
  std::uint32_t first = kEnd;
  for (std::size_t i = alternative.size(); i-- > 0;) {
    elements_.push_back(alternative[i]);
    next_.push_back(first);
    first = static_cast<std::uint32_t>(elements_.size() - 1);
  }
  rules_[rule].push_back(first);
}

Grammar::Rule Grammar::choice(const std::vector<Sequence>& alternatives) {
  const Rule rule = declare();
  for (const Sequence& alternative : alternatives) add(rule, alternative);
  return rule;
}

Grammar::Rule Grammar::repeat(const Sequence& sequence, int least, int most) {
  // From the end: what may follow the n-th.
  Rule rest = declare();
  add(rest, {});
  if (most < 0) {
    Sequence again = sequence;
    again.push_back(of(rest));
    add(rest, again);
  }
  for (int n = most < 0 ? least : most; n > 0; --n) {
    const Rule here = declare();
    Sequence one = sequence;
    one.push_back(of(rest));
    add(here, one);
    if (n > least) add(here, {});
    rest = here;
  }
  return rest;
}

bool Grammar::can_end(Rule rule) const {
  std::vector<bool> ends(rules_.size(), false);
  const auto all_end = [&](std::uint32_t first) {
    for (std::uint32_t at = first; at != kEnd; at = next_[at])
      if (elements_[at].is_rule && !ends[elements_[at].rule]) return false;
    return true;
  };
  // What a rule is made of stands in front of it or, with recursion, behind it: passes in both directions are few.
  bool changed = true;
  for (bool forward = true; std::exchange(changed, false); forward = !forward) {
    for (std::size_t i = 0; i < rules_.size(); ++i) {
      const std::size_t at = forward ? i : rules_.size() - 1 - i;
      if (!ends[at] && std::any_of(rules_[at].begin(), rules_[at].end(), all_end)) ends[at] = changed = true;
    }
  }
  return ends[rule];
}

Matcher::Matcher(const Grammar& grammar, Grammar::Rule start) : grammar_(&grammar) {
  std::vector<Stack> open;
  for (const std::uint32_t first : grammar.rules_[start])
    open.push_back(first == Grammar::kEnd ? Stack() : Stack{first});
  stacks_ = expanded(std::move(open));
}

/// Replaces rules on top by their alternatives until a set of bytes is there, or nothing. A rule in front of the same
/// rest is replaced once: it says nothing new, and may have led to itself.
std::vector<Matcher::Stack> Matcher::expanded(std::vector<Stack> open) const {
  std::vector<Stack> done;
  std::set<std::pair<Grammar::Rule, Stack>> seen;
  while (!open.empty()) {
    Stack stack = std::move(open.back());
    open.pop_back();
    if (stack.empty() || !grammar_->elements_[stack.back()].is_rule) {
      done.push_back(std::move(stack));
      continue;
    }
    const std::uint32_t top = stack.back();
    stack.pop_back();
    // What follows the rule, unless it is the last: so that repetition does not pile up.
    if (grammar_->next_[top] != Grammar::kEnd) stack.push_back(grammar_->next_[top]);
    const Grammar::Rule rule = grammar_->elements_[top].rule;
    if (!seen.emplace(rule, stack).second) continue;
    for (const std::uint32_t first : grammar_->rules_[rule]) {
      open.push_back(stack);
      if (first != Grammar::kEnd) open.back().push_back(first);
    }
  }
  std::sort(done.begin(), done.end());
  done.erase(std::unique(done.begin(), done.end()), done.end());
  return done;
}

bool Matcher::accept(unsigned char byte) {
  std::vector<Stack> open;
  for (Stack& stack : stacks_) {
    if (stack.empty() || !grammar_->elements_[stack.back()].bytes.test(byte)) continue;
    const std::uint32_t behind = grammar_->next_[stack.back()];
    stack.pop_back();
    if (behind != Grammar::kEnd) stack.push_back(behind);
    open.push_back(std::move(stack));
  }
  stacks_ = expanded(std::move(open));
  return !stacks_.empty();
}

bool Matcher::complete() const {
  return std::any_of(stacks_.begin(), stacks_.end(), [](const Stack& stack) { return stack.empty(); });
}

bool Matcher::may_go_on() const {
  return std::any_of(stacks_.begin(), stacks_.end(), [](const Stack& stack) { return !stack.empty(); });
}

std::string Matcher::key() const {
  std::string key;
  for (const Stack& stack : stacks_) {
    key.append(reinterpret_cast<const char*>(stack.data()), stack.size() * sizeof(std::uint32_t));
    key.append("\xff\xff\xff\xff", 4);
  }
  return key;
}

}  // namespace lode::serve
