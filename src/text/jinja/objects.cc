// SPDX-License-Identifier: Apache-2.0
#include "text/jinja/objects.h"

#include <algorithm>

namespace lode::jinja {

std::optional<Value> Macro::attribute(std::string_view name) const {
  if (name == "name") return Value(stmt_.text);
  return std::nullopt;
}

Value Macro::call(Machine& machine, Arguments arguments) {
  const auto given = std::find_if(arguments.named.begin(), arguments.named.end(),
                                  [](const auto& argument) { return argument.first == "caller"; });
  std::optional<Value> caller;
  if (given != arguments.named.end()) {
    caller = given->second;
    arguments.named.erase(given);
  }
  return machine.made(machine.run_macro(stmt_, scope_, std::move(arguments), caller ? &*caller : nullptr));
}

std::optional<Value> Namespace::attribute(std::string_view name) const {
  const Value* const value = names_.find(name);
  return value == nullptr ? std::nullopt : std::optional(*value);
}

/// loop.cycle('a', 'b'): each in its turn.
class Loop::Cycle : public Object {
 public:
  explicit Cycle(std::size_t at) : at_(at) {}
  std::string name() const override { return "loop.cycle"; }
  bool callable() const override { return true; }
  Value call(Machine& machine, Arguments arguments) override {
    if (arguments.positional.empty()) machine.fail("loop.cycle: expected at least one value, found none");
    return arguments.positional[at_ % arguments.positional.size()];
  }

 private:
  std::size_t at_;
};

/// loop.changed(x): whether it is another value than the last time.
class Loop::Changed : public Object {
 public:
  explicit Changed(const Loop& loop) : loop_(loop) {}
  std::string name() const override { return "loop.changed"; }
  bool callable() const override { return true; }
  Value call(Machine& machine, Arguments arguments) override {
    std::vector<Value>& last = loop_.last_;
    const bool same =
        std::equal(last.begin(), last.end(), arguments.positional.begin(), arguments.positional.end(),
                   [&](const Value& a, const Value& b) { return machine.same(a, b); });
    last = std::move(arguments.positional);
    return !same || last.empty();
  }

 private:
  const Loop& loop_;
};

std::optional<Value> Loop::attribute(std::string_view name) const {
  const auto count = static_cast<std::int64_t>(items_.size()), at = static_cast<std::int64_t>(at_);
  if (name == "index") return at + 1;
  if (name == "index0") return at;
  if (name == "revindex") return count - at;
  if (name == "revindex0") return count - at - 1;
  if (name == "first") return at == 0;
  if (name == "last") return at + 1 == count;
  if (name == "length") return count;
  if (name == "depth") return level_ + 1;
  if (name == "depth0") return level_;
  if (name == "previtem") return at == 0 ? Value::undefined("loop.previtem") : items_[at_ - 1];
  if (name == "nextitem") return at + 1 == count ? Value::undefined("loop.nextitem") : items_[at_ + 1];
  if (name == "cycle") return Value(std::shared_ptr<Object>(std::make_shared<Cycle>(at_)));
  if (name == "changed") return Value(std::shared_ptr<Object>(std::make_shared<Changed>(*this)));
  return std::nullopt;
}

Value Loop::call(Machine& machine, Arguments arguments) {
  if (!stmt_.recursive) machine.fail("expected a recursive loop to call, found one without 'recursive'");
  if (arguments.positional.size() != 1) machine.fail("expected one list to loop over, found another number");
  return machine.made(machine.run_loop(stmt_, scope_, arguments.positional[0], level_ + 1));
}

}  // namespace lode::jinja
