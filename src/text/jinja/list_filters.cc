// SPDX-License-Identifier: Apache-2.0
// Filters of lists and mappings. Where Jinja gives a generator these give a list.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "text/jinja/natives.h"

namespace lode::jinja {

namespace {

Value length(Machine& m, const Value& self, const Given&) {
  return static_cast<std::int64_t>(length_of(m, self));
}

Value first(Machine& m, const Value& self, const Given&) {
  const std::vector<Value> items = m.elements(self);
  return items.empty() ? Value::undefined("the first of nothing") : items.front();
}

Value last(Machine& m, const Value& self, const Given&) {
  const std::vector<Value> items = m.elements(self);
  return items.empty() ? Value::undefined("the last of nothing") : items.back();
}

Value to_list(Machine& m, const Value& self, const Given&) {
  return m.made(m.elements(self));
}

Value reverse(Machine& m, const Value& self, const Given&) {
  std::vector<Value> items = m.elements(self);
  std::reverse(items.begin(), items.end());
  return self.is(Kind::string) ? m.made(join(m, items, {})) : m.made(std::move(items));
}

std::vector<Value> attributes_of(Machine& m, std::vector<Value> items, const Value& path) {
  if (!path.is(Kind::none))
    for (Value& item : items) item = m.attribute_path(item, path);
  return items;
}

Value join_items(Machine& m, const Value& self, const Given& given) {
  const std::vector<Value> items = attributes_of(m, m.elements(self), given.value_or(1, Value::none()));
  return m.made(join(m, items, m.str(given.value_or(0, ""))));
}

std::vector<Value> pairs_of(Machine& m, const Value& self) {
  std::vector<Value> pairs;
  for (const auto& [key, value] : self.entries().entries) pairs.push_back(m.made({key, value}, true));
  return pairs;
}

Value items(Machine& m, const Value& self, const Given&) {
  if (self.is(Kind::undefined)) return m.made(std::vector<Value>());
  if (!self.is(Kind::mapping)) m.fail(fmt::format("items: expected a mapping, found {}", self.type_name()));
  return m.made(pairs_of(m, self));
}

/// Strings are alike in upper and lower case unless `exact`.
Value sort_key(const Value& value, bool exact) {
  return exact || !value.is(Kind::string) ? value : Value(lower(value.text().view()));
}

Value sort(Machine& m, const Value& self, const Given& given) {
  std::vector<Value> items = m.elements(self);
  std::vector<Value> keys = attributes_of(m, items, given.value_or(2, Value::none()));
  for (Value& key : keys) key = sort_key(key, given.flag_or(1, false));
  sort_by(m, items, keys, given.flag_or(0, false));
  return m.made(std::move(items));
}

Value dictsort(Machine& m, const Value& self, const Given& given) {
  if (!self.is(Kind::mapping))
    m.fail(fmt::format("dictsort: expected a mapping, found {}", self.type_name()));
  const std::string by = given.has(1) ? given.text(1).bytes() : "key";
  if (by != "key" && by != "value") m.fail("dictsort: expected 'key' or 'value', found another");
  std::vector<Value> pairs = pairs_of(m, self), keys;
  for (const auto& [key, value] : self.entries().entries)
    keys.push_back(sort_key(by == "key" ? key : value, given.flag_or(0, false)));
  sort_by(m, pairs, keys, given.flag_or(2, false));
  return m.made(std::move(pairs));
}

Value unique(Machine& m, const Value& self, const Given& given) {
  std::vector<Value> kept, seen;
  for (const Value& item : m.elements(self)) {
    const Value key =
        sort_key(given.has(1) ? m.attribute_path(item, given.value(1)) : item, given.flag_or(0, false));
    if (std::any_of(seen.begin(), seen.end(), [&](const Value& s) { return m.same(s, key); })) continue;
    seen.push_back(key);
    kept.push_back(item);
  }
  return m.made(std::move(kept));
}

Value extreme(Machine& m, const Value& self, const Given& given, bool largest) {
  const std::vector<Value> items = m.elements(self);
  std::vector<Value> keys = attributes_of(m, items, given.value_or(1, Value::none()));
  for (Value& key : keys) key = sort_key(key, given.flag_or(0, false));
  if (items.empty()) return Value::undefined("the extreme of nothing");
  std::size_t best = 0;
  for (std::size_t i = 1; i < keys.size(); ++i)
    if (largest ? m.less(keys[best], keys[i]) : m.less(keys[i], keys[best])) best = i;
  return items[best];
}

Value smallest(Machine& m, const Value& self, const Given& given) {
  return extreme(m, self, given, false);
}
Value greatest(Machine& m, const Value& self, const Given& given) {
  return extreme(m, self, given, true);
}

Value sum(Machine& m, const Value& self, const Given& given) {
  Value total = given.value_or(1, 0);
  for (const Value& item : attributes_of(m, m.elements(self), given.value_or(0, Value::none())))
    total = m.binary("+", total, item);
  return total;
}

/// map('filter', ...) or map(attribute='name', default=...).
Value map(Machine& m, const Value& self, const Given& given) {
  std::vector<Value> items = m.elements(self);
  const Value path = given.named_or("attribute", Value::none());
  if (!path.is(Kind::none)) {
    const Value otherwise = given.named_or("default", Value::none());
    for (Value& item : items)
      item = m.attribute_path(item, path, otherwise.is(Kind::none) ? nullptr : &otherwise);
    return m.made(std::move(items));
  }
  Arguments arguments = given.rest();
  if (arguments.positional.empty()) m.fail("map: expected the name of a filter or an attribute, found none");
  const std::string name = m.text(arguments.positional.front(), "map").bytes();
  arguments.positional.erase(arguments.positional.begin());
  for (Value& item : items) item = m.filter(name, item, arguments);
  return m.made(std::move(items));
}

/// The elements that pass a test, or whose attribute does; without one, those that are true.
Value chosen(Machine& m, const Value& self, const Given& given, bool by_attribute, bool wanted) {
  Arguments arguments = given.rest();
  Value path;
  if (by_attribute) {
    if (arguments.positional.empty()) m.fail("expected the name of an attribute to select by, found none");
    path = arguments.positional.front();
    arguments.positional.erase(arguments.positional.begin());
  }
  std::string test;
  if (!arguments.positional.empty()) {
    test = m.text(arguments.positional.front(), "the name of a test").bytes();
    arguments.positional.erase(arguments.positional.begin());
  }
  std::vector<Value> kept;
  for (const Value& item : m.elements(self)) {
    const Value looked_at = by_attribute ? m.attribute_path(item, path) : item;
    if ((test.empty() ? looked_at.truthy() : m.test(test, looked_at, arguments)) == wanted)
      kept.push_back(item);
  }
  return m.made(std::move(kept));
}

Value select(Machine& m, const Value& self, const Given& given) {
  return chosen(m, self, given, false, true);
}
Value reject(Machine& m, const Value& self, const Given& given) {
  return chosen(m, self, given, false, false);
}
Value selectattr(Machine& m, const Value& self, const Given& given) {
  return chosen(m, self, given, true, true);
}
Value rejectattr(Machine& m, const Value& self, const Given& given) {
  return chosen(m, self, given, true, false);
}

/// Of what is no mapping; a mapping has its methods alone.
Value attribute(Machine& m, const Value& self, const Given& given) {
  if (self.is(Kind::mapping) && find_native(mapping_methods(), given.text(0).view()) == nullptr)
    return Value::undefined(given.text(0).bytes());
  return m.attribute(self, given.text(0).bytes());
}

/// Lists of so many elements each, the last one filled up if there is something to fill it with.
Value batch(Machine& m, const Value& self, const Given& given) {
  const std::int64_t size = given.whole(0);
  if (size < 1 || size > 1 << 20) m.fail("batch: expected a size of at least 1, found another");
  std::vector<Value> batches, part;
  const auto put = [&] {
    batches.push_back(m.made(std::move(part)));
    part.clear();
  };
  for (const Value& item : m.elements(self)) {
    if (std::ssize(part) == size) put();
    part.push_back(item);
  }
  if (part.empty()) return m.made(std::move(batches));
  while (given.has(1) && !given.value(1).is(Kind::none) && std::ssize(part) < size) {
    m.take(sizeof(Value));
    part.push_back(given.value(1));
  }
  put();
  return m.made(std::move(batches));
}

/// Pairs (value, elements that have it), sorted by value.
Value groupby(Machine& m, const Value& self, const Given& given) {
  std::vector<Value> items = m.elements(self), keys;
  for (const Value& item : items) {
    Value key = m.attribute_path(item, given.value(0));
    if (key.is(Kind::undefined)) key = given.value_or(1, key);
    keys.push_back(sort_key(key, given.flag_or(2, false)));
  }
  std::vector<Value> order;
  for (std::size_t i = 0; i < items.size(); ++i) order.emplace_back(static_cast<std::int64_t>(i));
  sort_by(m, order, keys, false);
  std::vector<Value> groups, members;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const auto at = [&](std::size_t place) { return static_cast<std::size_t>(order[place].whole()); };
    members.push_back(items[at(i)]);
    if (i + 1 < order.size() && m.same(keys[at(i)], keys[at(i + 1)])) continue;
    const Value name = m.attribute_path(members.front(), given.value(0));
    groups.push_back(m.made(
        {name.is(Kind::undefined) ? given.value_or(1, name) : name, m.made(std::move(members))}, true));
    members.clear();
  }
  return m.made(std::move(groups));
}

}  // namespace

void sort_by(Machine& machine, std::vector<Value>& items, const std::vector<Value>& keys, bool reverse) {
  std::vector<std::size_t> order(items.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return reverse ? machine.less(keys[b], keys[a]) : machine.less(keys[a], keys[b]);
  });
  std::vector<Value> sorted;
  for (const std::size_t i : order) sorted.push_back(items[i]);
  items = std::move(sorted);
}

std::span<const Native> list_filters() {
  static const std::array kFilters = {
      Native{"length", {}, length},
      Native{"count", {}, length},
      Native{"first", {}, first},
      Native{"last", {}, last},
      Native{"list", {}, to_list},
      Native{"reverse", {}, reverse},
      Native{"join", {"d", "attribute"}, join_items},
      Native{"items", {}, items},
      Native{"sort", {"reverse", "case_sensitive", "attribute"}, sort},
      Native{"dictsort", {"case_sensitive", "by", "reverse"}, dictsort},
      Native{"unique", {"case_sensitive", "attribute"}, unique},
      Native{"min", {"case_sensitive", "attribute"}, smallest},
      Native{"max", {"case_sensitive", "attribute"}, greatest},
      Native{"sum", {"attribute", "start"}, sum},
      Native{"map", {"..."}, map},
      Native{"select", {"..."}, select},
      Native{"reject", {"..."}, reject},
      Native{"selectattr", {"..."}, selectattr},
      Native{"rejectattr", {"..."}, rejectattr},
      Native{"attr", {"name"}, attribute},
      Native{"batch", {"linecount", "fill_with"}, batch},
      Native{"groupby", {"attribute", "default", "case_sensitive"}, groupby},
  };
  return kFilters;
}

}  // namespace lode::jinja
