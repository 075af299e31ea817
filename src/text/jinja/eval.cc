// SPDX-License-Identifier: Apache-2.0
// Expressions.
#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "lodestone/error.h"
#include "text/jinja/machine.h"
#include "text/jinja/natives.h"
#include "text/utf8.h"

namespace lode::jinja {

namespace {

/// Where a slice begins, and in which steps it goes on, as Python has it.
struct Steps {
  std::int64_t start, stop, step;
};

Steps steps_of(std::int64_t count, std::optional<std::int64_t> start, std::optional<std::int64_t> stop,
               std::int64_t step) {
  const std::int64_t low = step < 0 ? -1 : 0, high = step < 0 ? count - 1 : count;
  const auto placed = [&](std::int64_t i) {
    return std::clamp(i < 0 ? std::max(i, -count - 1) + count : i, low, high);
  };
  return {start ? placed(*start) : (step < 0 ? high : low), stop ? placed(*stop) : (step < 0 ? low : high),
          step};
}

}  // namespace

Value Machine::made(Text text) {
  take(text.size() + 64);
  return text;
}

Value Machine::made(std::vector<Value> items, bool tuple) {
  take(items.size() * sizeof(Value) + 64);
  return Value::list(std::move(items), tuple);
}

Text Machine::str(const Value& value) {
  spend_bytes(value.weight());
  if (!value.is(Kind::string)) take(value.weight());
  return jinja::str(value);
}

const Text& Machine::text(const Value& value, std::string_view what) {
  if (!value.is(Kind::string)) fail(fmt::format("{}: expected a string, found {}", what, value.type_name()));
  return value.text();
}

std::int64_t Machine::whole(const Value& value, std::string_view what) {
  if (!value.is_whole()) fail(fmt::format("{}: expected a whole number, found {}", what, value.type_name()));
  return value.whole();
}

std::vector<Value> Machine::elements(const Value& value) {
  std::vector<Value> result;
  if (value.is(Kind::undefined)) return result;
  if (value.is(Kind::list)) {
    result = value.items().items;
  } else if (value.is(Kind::mapping)) {
    for (const auto& [key, item] : value.entries().entries) result.push_back(key);
  } else if (value.is(Kind::string)) {
    const std::vector<std::size_t> ends = character_ends(*this, value.text());
    take(ends.size() * 128);
    for (std::size_t i = 1; i < ends.size(); ++i)
      result.emplace_back(value.text().part(ends[i - 1], ends[i]));
  } else {
    fail(fmt::format("expected a list, a mapping or a string to go through, found {}", value.type_name()));
  }
  spend(result.size() + 1);
  take(result.size() * sizeof(Value));
  return result;
}

Value Machine::attribute(const Value& object, const std::string& name) {
  if (object.is(Kind::undefined)) fail(fmt::format("'{}' is undefined", object.undefined_name()));
  if (object.is(Kind::object)) return object.object().attribute(name).value_or(Value::undefined(name));
  const auto methods = object.is(Kind::string)    ? string_methods()
                       : object.is(Kind::list)    ? list_methods()
                       : object.is(Kind::mapping) ? mapping_methods()
                                                  : std::span<const Native>();
  if (const Native* method = find_native(methods, name)) return bound(*method, object);
  if (!object.is(Kind::mapping)) return Value::undefined(name);
  spend(object.entries().entries.size() / 8 + 1);
  const Value* const found = object.entries().find_name(name);
  return found == nullptr ? Value::undefined(name) : *found;
}

Value Machine::item(const Value& object, const Value& key) {
  if (object.is(Kind::undefined)) fail(fmt::format("'{}' is undefined", object.undefined_name()));
  if (object.is(Kind::mapping)) {
    spend(object.entries().entries.size() / 8 + 1);
    if (const Value* const found = object.entries().find(key)) return *found;
  }
  if (object.is(Kind::list) && key.is_whole()) {
    const auto count = static_cast<std::int64_t>(object.items().items.size());
    const std::int64_t at = key.whole() < 0 ? key.whole() + count : key.whole();
    if (at >= 0 && at < count) return object.items().items[static_cast<std::size_t>(at)];
  }
  if (object.is(Kind::string) && key.is_whole()) {
    const std::vector<std::size_t> ends = character_ends(*this, object.text());
    const auto count = static_cast<std::int64_t>(ends.size()) - 1;
    const std::int64_t at = key.whole() < 0 ? key.whole() + count : key.whole();
    if (at >= 0 && at < count)
      return made(
          object.text().part(ends[static_cast<std::size_t>(at)], ends[static_cast<std::size_t>(at + 1)]));
  }
  if (key.is(Kind::string) && !object.is(Kind::none)) return attribute(object, key.text().bytes());
  return Value::undefined(key.is(Kind::string) ? key.text().bytes() : str(key).bytes());
}

Value Machine::attribute_path(const Value& object, const Value& path, const Value* otherwise) {
  const auto step = [&](const Value& from, const Value& key) {
    const Value found = item(from, key);
    return found.is(Kind::undefined) && otherwise != nullptr ? *otherwise : found;
  };
  if (path.is_whole()) return step(object, path);
  Value value = object;
  std::string_view rest = text(path, "attribute").view();
  for (;;) {
    const std::string part(rest.substr(0, rest.find('.')));
    const bool number =
        !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == part.npos;
    value = step(value, number ? Value(std::stoi(part)) : Value(part));
    if (part.size() == rest.size()) return value;
    rest.remove_prefix(part.size() + 1);
  }
}

Value Machine::call(const Value& callee, Arguments arguments) {
  if (callee.is(Kind::undefined))
    fail(fmt::format("expected a function, found '{}', which is undefined", callee.undefined_name()));
  if (!callee.is(Kind::object)) fail(fmt::format("expected a function, found {}", callee.type_name()));
  return callee.object().call(*this, std::move(arguments));
}

Value Machine::eval(const Expr& expr, Scope* scope) {
  spend(1);
  line_ = expr.line;
  if (++depth_ > limits_.depth)
    fail(fmt::format("expected calls at most {} deep, found more", limits_.depth));
  struct Up {
    int& depth;
    ~Up() { --depth; }
  } up{depth_};
  return eval_node(expr, scope);
}

Value Machine::eval_node(const Expr& expr, Scope* scope) {
  const auto part = [&](std::size_t i) { return eval(*expr.parts[i], scope); };
  switch (expr.kind) {
    case Expr::Kind::constant:
      return expr.value;
    case Expr::Kind::name:
      return eval_name(expr, scope);
    case Expr::Kind::list:
    case Expr::Kind::tuple:
      return made(eval_all(expr.parts, scope), expr.kind == Expr::Kind::tuple);
    case Expr::Kind::mapping:
      return eval_mapping(expr, scope);
    case Expr::Kind::unary:
      return eval_unary(expr, scope);
    case Expr::Kind::negation:
      return !part(0).truthy();
    case Expr::Kind::binary: {
      const Value left = part(0);
      return binary(expr.text, left, part(1));
    }
    case Expr::Kind::concat:
      return eval_concat(expr, scope);
    case Expr::Kind::compare:
      return eval_compare(expr, scope);
    case Expr::Kind::both: {
      const Value left = part(0);
      return left.truthy() ? part(1) : left;
    }
    case Expr::Kind::either: {
      const Value left = part(0);
      return left.truthy() ? left : part(1);
    }
    case Expr::Kind::conditional:
      if (part(0).truthy()) return part(1);
      return expr.parts[2] == nullptr ? Value::undefined("the value of an 'if' without 'else'") : part(2);
    case Expr::Kind::attribute:
      return attribute(part(0), expr.text);
    case Expr::Kind::item: {
      const Value object = part(0);
      return item(object, part(1));
    }
    case Expr::Kind::slice:
      return eval_slice(expr, scope);
    case Expr::Kind::call:
      return eval_call(expr, scope);
    case Expr::Kind::filter:
      return eval_filter(expr, scope, nullptr);
    case Expr::Kind::test:
      break;
  }
  const Value input = part(0);
  return test(expr.text, input, eval_arguments(expr, scope));
}

Value Machine::eval_name(const Expr& expr, Scope* scope) {
  if (const Value* const value = scope->find(expr.text)) return *value;
  if (const Native* const function = find_native(functions(), expr.text)) return bound(*function, {});
  return Value::undefined(expr.text);
}

std::vector<Value> Machine::eval_all(const std::vector<ExprPtr>& parts, Scope* scope) {
  std::vector<Value> values;
  values.reserve(parts.size());
  for (const ExprPtr& part : parts) values.push_back(eval(*part, scope));
  return values;
}

/// Of equal keys the last value counts, at the first one's place.
Value Machine::eval_mapping(const Expr& expr, Scope* scope) {
  std::vector<Value::Entry> entries;
  for (std::size_t i = 0; i < expr.parts.size(); i += 2) {
    const Value key = eval(*expr.parts[i], scope);
    Value value = eval(*expr.parts[i + 1], scope);
    if (key.is(Kind::list) || key.is(Kind::mapping))
      fail(fmt::format("expected a string or a number as a key, found {}", key.type_name()));
    spend(entries.size() / 8 + 1);
    const auto known = std::find_if(entries.begin(), entries.end(),
                                    [&](const Value::Entry& e) { return equal(e.first, key); });
    if (known != entries.end())
      known->second = std::move(value);
    else
      entries.emplace_back(key, std::move(value));
  }
  take(entries.size() * sizeof(Value::Entry) + 64);
  return Value::mapping(std::move(entries));
}

Value Machine::eval_concat(const Expr& expr, Scope* scope) {
  Text out;
  for (const ExprPtr& part : expr.parts) print(out, str(eval(*part, scope)));
  return out;
}

Value Machine::eval_compare(const Expr& expr, Scope* scope) {
  Value left = eval(*expr.parts[0], scope);
  for (std::size_t i = 0; i < expr.ops.size(); ++i) {
    Value right = eval(*expr.parts[i + 1], scope);
    if (!compare(expr.ops[i], left, right)) return false;
    left = std::move(right);
  }
  return true;
}

Value Machine::eval_unary(const Expr& expr, Scope* scope) {
  const Value value = eval(*expr.parts[0], scope);
  if (expr.text == "+") return binary("+", 0, value);
  return binary("-", 0, value);
}

Value Machine::eval_slice(const Expr& expr, Scope* scope) {
  const Value object = eval(*expr.parts[0], scope);
  const auto bound = [&](std::size_t i) -> std::optional<std::int64_t> {
    if (expr.parts[i] == nullptr) return std::nullopt;
    const Value value = eval(*expr.parts[i], scope);
    if (value.is(Kind::none)) return std::nullopt;
    return whole(value, "a slice");
  };
  const auto start = bound(1), stop = bound(2);
  const std::int64_t step = bound(3).value_or(1);
  if (step == 0) fail("expected a step other than 0 in a slice, found 0");
  if (object.is(Kind::undefined)) fail(fmt::format("'{}' is undefined", object.undefined_name()));
  if (object.is(Kind::string) && step == 1) {
    const std::vector<std::size_t> ends = character_ends(*this, object.text());
    const Steps s = steps_of(static_cast<std::int64_t>(ends.size()) - 1, start, stop, 1);
    return made(
        object.text().part(ends[static_cast<std::size_t>(s.start)], ends[static_cast<std::size_t>(s.stop)]));
  }
  if (!object.is(Kind::string) && !object.is(Kind::list))
    fail(fmt::format("expected a string or a list to slice, found {}", object.type_name()));
  const std::vector<Value> all = elements(object);
  const Steps s = steps_of(std::ssize(all), start, stop, step);
  std::vector<Value> chosen;
  // Steps may be as long as numbers go: what is left is compared, never added to.
  for (std::int64_t at = s.start; step > 0 ? at < s.stop : at > s.stop;) {
    chosen.push_back(all[static_cast<std::size_t>(at)]);
    if (step > 0 ? s.stop - at <= step : s.stop - at >= step) break;
    at += step;
  }
  if (object.is(Kind::string)) return made(join(*this, chosen, {}));
  return made(std::move(chosen), object.items().tuple);
}

Arguments Machine::eval_arguments(const Expr& expr, Scope* scope) {
  Arguments arguments;
  for (std::size_t i = 1; i < expr.parts.size(); ++i)
    arguments.positional.push_back(eval(*expr.parts[i], scope));
  for (const auto& [name, value] : expr.named) arguments.named.emplace_back(name, eval(*value, scope));
  return arguments;
}

Value Machine::eval_call(const Expr& expr, Scope* scope) {
  const Value callee = eval(*expr.parts[0], scope);
  Arguments arguments = eval_arguments(expr, scope);
  line_ = expr.line;
  return call(callee, std::move(arguments));
}

/// `block`: what a filter without an input of its own is applied to.
Value Machine::eval_filter(const Expr& expr, Scope* scope, const Value* block) {
  spend(1);
  const Expr* const inner = expr.parts[0].get();
  const bool chained = block != nullptr && inner != nullptr && inner->kind == Expr::Kind::filter;
  const Value input = inner == nullptr ? *block
                      : chained        ? eval_filter(*inner, scope, block)
                                       : eval(*inner, scope);
  Arguments arguments = eval_arguments(expr, scope);
  line_ = expr.line;
  return filter(expr.text, input, std::move(arguments));
}

}  // namespace lode::jinja
