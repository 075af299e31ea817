// SPDX-License-Identifier: Apache-2.0
#include "text/jinja/natives.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"

namespace lode::jinja {

namespace {

/// "filter 'trim'" and the like would need to know who asks; the name alone says enough.
class Bound : public Object {
 public:
  Bound(const Native& native, Value self) : native_(native), self_(std::move(self)) {}
  std::string name() const override { return "function '" + std::string(native_.name) + "'"; }
  bool callable() const override { return true; }
  Value call(Machine& machine, Arguments arguments) override {
    return run_native(machine, native_, self_, std::move(arguments));
  }

 private:
  const Native& native_;
  Value self_;
};

[[noreturn]] void fail_unknown(const Machine& machine, const char* what, const std::string& name,
                               std::initializer_list<std::span<const Native>> known) {
  std::vector<std::string> names;
  for (const auto natives : known)
    for (const Native& native : natives) names.emplace_back(native.name);
  const std::string near = nearest_name(name, names);
  machine.fail(fmt::format("expected a {} that chat templates have, found '{}'{}", what, excerpt(name),
                           near.empty() ? "" : "; did it mean '" + near + "'?"));
}

}  // namespace

Given::Given(Machine& machine, const Native& native, Arguments arguments)
    : machine_(machine), native_(native), values_(native.parameters.size()) {
  if (native.parameters.size() == 1 && native.parameters[0] == "...") {
    rest_ = std::move(arguments);
    return;
  }
  if (arguments.positional.size() > values_.size())
    machine.fail(fmt::format("{}: expected at most {} arguments, found {}", native.name, values_.size(),
                             arguments.positional.size()));
  for (std::size_t i = 0; i < arguments.positional.size(); ++i)
    values_[i] = std::move(arguments.positional[i]);
  for (auto& [name, value] : arguments.named) {
    const auto at = std::find(native.parameters.begin(), native.parameters.end(), name);
    if (at == native.parameters.end())
      machine.fail(fmt::format("{}: expected no argument '{}', found one", native.name, excerpt(name)));
    values_[static_cast<std::size_t>(at - native.parameters.begin())] = std::move(value);
  }
}

const Value& Given::value(std::size_t i) const {
  if (!values_[i])
    machine_.fail(
        fmt::format("{}: expected the argument '{}', found none", native_.name, native_.parameters[i]));
  return *values_[i];
}

const Text& Given::text(std::size_t i) const {
  return machine_.text(value(i), native_.name);
}

std::int64_t Given::whole(std::size_t i) const {
  return machine_.whole(value(i), native_.name);
}

Value Given::named_or(std::string_view name, Value otherwise) const {
  for (const auto& [known, value] : rest_.named)
    if (known == name) return value;
  return otherwise;
}

const Native* find_native(std::span<const Native> natives, std::string_view name) {
  const auto at =
      std::find_if(natives.begin(), natives.end(), [&](const Native& n) { return n.name == name; });
  return at == natives.end() ? nullptr : &*at;
}

Value run_native(Machine& machine, const Native& native, const Value& self, Arguments arguments) {
  machine.spend(1);
  return native.run(machine, self, Given(machine, native, std::move(arguments)));
}

Value bound(const Native& native, Value self) {
  return std::shared_ptr<Object>(std::make_shared<Bound>(native, std::move(self)));
}

Value Machine::filter(const std::string& name, const Value& input, Arguments arguments) {
  const Native* found = find_native(text_filters(), name);
  if (found == nullptr) found = find_native(list_filters(), name);
  if (found == nullptr) fail_unknown(*this, "filter", name, {text_filters(), list_filters()});
  return run_native(*this, *found, input, std::move(arguments));
}

bool Machine::test(const std::string& name, const Value& input, Arguments arguments) {
  const Native* const found = find_native(tests(), name);
  if (found == nullptr) fail_unknown(*this, "test", name, {tests()});
  return run_native(*this, *found, input, std::move(arguments)).truthy();
}

}  // namespace lode::jinja
