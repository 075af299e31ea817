// SPDX-License-Identifier: Apache-2.0
// Arithmetic and comparison, as Python has them.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "text/jinja/machine.h"
#include "text/jinja/natives.h"

namespace lode::jinja {

namespace {

std::string both_types(const Value& left, const Value& right) {
  return fmt::format("{} and {}", left.type_name(), right.type_name());
}

double floor_mod(double left, double right) {
  const double rest = std::fmod(left, right);
  return rest != 0 && (rest < 0) != (right < 0) ? rest + right : rest;
}

}  // namespace

bool Machine::same(const Value& a, const Value& b) {
  spend_bytes(std::min(a.weight(), b.weight()));
  return equal(a, b);
}

bool Machine::less(const Value& a, const Value& b) {
  spend(1);
  for (const Value* v : {&a, &b})
    if (v->is(Kind::undefined)) fail(fmt::format("'{}' is undefined", v->undefined_name()));
  if (a.is_number() && b.is_number())
    return a.is_whole() && b.is_whole() ? a.whole() < b.whole() : a.number() < b.number();
  if (a.is(Kind::string) && b.is(Kind::string)) {
    spend_bytes(std::min(a.text().size(), b.text().size()));
    return a.text().view() < b.text().view();
  }
  if (a.is(Kind::list) && b.is(Kind::list)) {
    const auto &left = a.items().items, &right = b.items().items;
    for (std::size_t i = 0; i < std::min(left.size(), right.size()); ++i)
      if (!same(left[i], right[i])) return less(left[i], right[i]);
    return left.size() < right.size();
  }
  fail(fmt::format("expected two numbers, strings or lists to compare, found {}", both_types(a, b)));
}

bool Machine::contains(const Value& container, const Value& element) {
  if (container.is(Kind::string)) {
    const std::string& word = text(element, "'in' a string").bytes();
    spend_bytes(container.text().size() + word.size());
    return find_text(container.text().view(), word, 0) != std::string::npos;
  }
  if (container.is(Kind::mapping)) {
    spend(container.entries().entries.size() / 8 + 1);
    return container.entries().find(element) != nullptr;
  }
  if (container.is(Kind::undefined)) return false;
  if (!container.is(Kind::list))
    fail(fmt::format("expected a string, a list or a mapping behind 'in', found {}", container.type_name()));
  const auto& items = container.items().items;
  return std::any_of(items.begin(), items.end(), [&](const Value& item) { return same(item, element); });
}

bool Machine::compare(const std::string& op, const Value& left, const Value& right) {
  if (op == "==") return same(left, right);
  if (op == "!=") return !same(left, right);
  if (op == "in") return contains(right, left);
  if (op == "not in") return !contains(right, left);
  if (op == "<") return less(left, right);
  if (op == ">") return less(right, left);
  const bool numbers = left.is_number() && right.is_number();
  if (numbers && (std::isnan(left.number()) || std::isnan(right.number()))) return false;
  return op == "<=" ? !less(right, left) : !less(left, right);
}

Value Machine::binary(const std::string& op, const Value& left, const Value& right) {
  for (const Value* v : {&left, &right})
    if (v->is(Kind::undefined)) fail(fmt::format("'{}' is undefined", v->undefined_name()));
  if (op == "+" && !left.is_number()) return add(left, right);
  if (op == "*" && !(left.is_number() && right.is_number())) return multiply(left, right);
  if (op == "%" && left.is(Kind::string)) return made(formatted(*this, left.text(), right));
  if (!left.is_number() || !right.is_number())
    fail(fmt::format("expected two numbers for '{}', found {}", op, both_types(left, right)));
  return arithmetic(op, left, right);
}

Value Machine::add(const Value& left, const Value& right) {
  if (left.is(Kind::string) && right.is(Kind::string)) {
    take(left.text().size() + right.text().size() + 64);
    Text sum = left.text();
    sum.append(right.text());
    return sum;
  }
  if (left.is(Kind::list) && right.is(Kind::list) && left.items().tuple == right.items().tuple) {
    std::vector<Value> all = elements(left), more = elements(right);
    all.insert(all.end(), more.begin(), more.end());
    return made(std::move(all), left.items().tuple);
  }
  fail(fmt::format("expected two numbers, strings or lists for '+', found {}", both_types(left, right)));
}

Value Machine::multiply(const Value& left, const Value& right) {
  if (right.is_whole()) return repeated(left, right.whole());
  if (left.is_whole()) return repeated(right, left.whole());
  fail(fmt::format("expected two numbers for '*', or a string or list and a number, found {}",
                   both_types(left, right)));
}

Value Machine::repeated(const Value& value, std::int64_t times) {
  const auto count = static_cast<std::size_t>(std::max<std::int64_t>(times, 0));
  const std::size_t size = value.is(Kind::string) ? value.text().size()
                           : value.is(Kind::list) ? value.items().items.size() * sizeof(Value)
                                                  : 0;
  if (!value.is(Kind::string) && !value.is(Kind::list))
    fail(fmt::format("expected a number, a string or a list for '*', found {}", value.type_name()));
  if (size > 0 && count > (std::size_t{1} << 40) / size) take(SIZE_MAX);
  take(size * count);
  spend(size * count / 64 + (size == 0 ? 0 : count));
  if (value.is(Kind::string)) {
    Text out;
    for (std::size_t i = 0; size > 0 && i < count; ++i) out.append(value.text());
    return out;
  }
  std::vector<Value> items;
  for (std::size_t i = 0; size > 0 && i < count; ++i)
    items.insert(items.end(), value.items().items.begin(), value.items().items.end());
  return Value::list(std::move(items), value.items().tuple);
}

Value Machine::arithmetic(const std::string& op, const Value& left, const Value& right) {
  const bool zero = right.number() == 0;
  if (zero && (op == "/" || op == "//" || op == "%")) fail("expected a divisor other than 0, found 0");
  if (op == "/") return left.number() / right.number();
  const bool whole_power = op != "**" || right.number() >= 0;
  if (left.is_whole() && right.is_whole() && whole_power)
    return whole_arithmetic(op, left.whole(), right.whole());
  const double a = left.number(), b = right.number();
  if (op == "+") return a + b;
  if (op == "-") return a - b;
  if (op == "*") return a * b;
  if (op == "//") return std::floor(a / b);
  return op == "%" ? floor_mod(a, b) : std::pow(a, b);
}

Value Machine::whole_arithmetic(const std::string& op, std::int64_t left, std::int64_t right) {
  std::int64_t result = 0;
  bool fits = true;
  if (op == "+") fits = !__builtin_add_overflow(left, right, &result);
  if (op == "-") fits = !__builtin_sub_overflow(left, right, &result);
  if (op == "*") fits = !__builtin_mul_overflow(left, right, &result);
  if (op == "//" || op == "%") {
    if (right == -1) return op == "%" ? Value(0) : whole_arithmetic("-", 0, left);
    const std::int64_t rest = left % right;
    const bool other_side = rest != 0 && (rest < 0) != (right < 0);
    return op == "%" ? rest + (other_side ? right : 0) : left / right - (other_side ? 1 : 0);
  }
  if (op == "**") {
    result = 1;
    const bool stays = left == 0 || left == 1 || left == -1;
    const std::int64_t times = stays ? (right == 0 ? 0 : 2 - right % 2) : right;
    for (std::int64_t i = 0; fits && i < times; ++i) fits = !__builtin_mul_overflow(result, left, &result);
  }
  if (!fits) fail(fmt::format("expected whole numbers of 63 bits, found more from '{}'", op));
  return result;
}

}  // namespace lode::jinja
