// SPDX-License-Identifier: Apache-2.0
// Global functions.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ctime>

#include "base/text.h"
#include "text/jinja/natives.h"
#include "text/jinja/objects.h"
#include "text/utf8.h"

namespace lode::jinja {

namespace {

Value range(Machine& m, const Value&, const Given& given) {
  constexpr std::int64_t kMost = 100000;  // as Jinja's sandbox
  const bool one = !given.has(1);
  const std::int64_t start = one ? 0 : given.whole(0), stop = given.whole(one ? 0 : 1),
                     step = given.whole_or(2, 1);
  if (step == 0) m.fail("range: expected a step other than 0, found 0");
  std::vector<Value> items;
  std::int64_t at = start;
  while (step > 0 ? at < stop : at > stop) {
    if (std::ssize(items) == kMost)
      m.fail(fmt::format("range: expected at most {} numbers, found more", kMost));
    m.spend(1);
    items.emplace_back(at);
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  return m.made(std::move(items));
}

/// Later values take the place of earlier ones.
Value dict(Machine& m, const Value&, const Given& given) {
  std::vector<Value::Entry> entries;
  const auto put = [&](const Value& key, const Value& value) {
    m.spend(entries.size() / 8 + 1);
    const auto known = std::find_if(entries.begin(), entries.end(),
                                    [&](const Value::Entry& e) { return equal(e.first, key); });
    if (known != entries.end())
      known->second = value;
    else
      entries.emplace_back(key, value);
  };
  for (const Value& other : given.rest().positional) {
    if (!other.is(Kind::mapping))
      m.fail(fmt::format("dict: expected a mapping, found {}", other.type_name()));
    for (const auto& [key, value] : other.entries().entries) put(key, value);
  }
  for (const auto& [name, value] : given.rest().named) put(Text(name), value);
  m.take(entries.size() * sizeof(Value::Entry) + 64);
  return Value::mapping(std::move(entries));
}

Value make_namespace(Machine& m, const Value& self, const Given& given) {
  auto space = std::make_unique<Namespace>();
  const Value first = dict(m, self, given);
  for (const auto& [key, value] : first.entries().entries) space->set(m.text(key, "namespace").view(), value);
  return m.keep(std::move(space));
}

/// How templates say that they cannot take these messages.
Value raise(Machine& m, const Value&, const Given& given) {
  m.fail("the template refuses these messages: " + excerpt(m.str(given.value(0)).view(), 300));
}

Value time_text(Machine& m, const Value&, const Given& given) {
  const std::string format = given.text(0).bytes();
  if (format.size() > 200) m.fail("strftime_now: expected a format of at most 200 bytes, found more");
  const std::time_t now = m.now();
  std::tm parts = {};
  localtime_r(&now, &parts);
  std::array<char, 2000> buffer;
  const std::size_t bytes =
      format.empty() ? 0 : std::strftime(buffer.data(), buffer.size(), format.c_str(), &parts);
  return m.made(Text(replace_invalid_utf8({buffer.data(), bytes})));
}

}  // namespace

std::span<const Native> functions() {
  static const std::array kFunctions = {
      Native{"range", {"start", "stop", "step"}, range}, Native{"dict", {"..."}, dict},
      Native{"namespace", {"..."}, make_namespace},      Native{"raise_exception", {"message"}, raise},
      Native{"strftime_now", {"format"}, time_text},
  };
  return kFunctions;
}

}  // namespace lode::jinja
