// SPDX-License-Identifier: Apache-2.0
// What templates can call that is written in C++: filters, tests, methods of strings and mappings, global functions.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "text/jinja/machine.h"

namespace lode::jinja {

class Given;

struct Native {
  std::string_view name;
  std::vector<std::string_view> parameters;  ///< "..." alone: as many as are given, in Given::rest()
  Value (*run)(Machine& machine, const Value& self, const Given& given);
};

/// The arguments of a call, by parameter.
class Given {
 public:
  /// InputError for more arguments than parameters, and for names that are none.
  Given(Machine& machine, const Native& native, Arguments arguments);

  bool has(std::size_t i) const { return values_[i].has_value(); }
  const Value& value(std::size_t i) const;  ///< InputError when it is missing
  Value value_or(std::size_t i, Value otherwise) const { return has(i) ? *values_[i] : std::move(otherwise); }
  const Text& text(std::size_t i) const;
  std::int64_t whole(std::size_t i) const;
  std::int64_t whole_or(std::size_t i, std::int64_t otherwise) const { return has(i) ? whole(i) : otherwise; }
  bool flag_or(std::size_t i, bool otherwise) const { return has(i) ? values_[i]->truthy() : otherwise; }
  const Arguments& rest() const { return rest_; }
  Value named_or(std::string_view name, Value otherwise) const;  ///< of rest()

 private:
  Machine& machine_;
  const Native& native_;
  std::vector<std::optional<Value>> values_;  // by parameter
  Arguments rest_;
};

std::span<const Native> text_filters();
std::span<const Native> list_filters();
std::span<const Native> tests();
std::span<const Native> string_methods();
std::span<const Native> list_methods();
std::span<const Native> mapping_methods();
std::span<const Native> functions();

/// Null when there is none of this name.
const Native* find_native(std::span<const Native> natives, std::string_view name);
Value run_native(Machine& machine, const Native& native, const Value& self, Arguments arguments);
/// Native and self as something that can be called later.
Value bound(const Native& native, Value self);

// What several of these share.
Text to_json(Machine& machine, const Value& value, std::int64_t indent, bool sort_keys, bool ascii);
Text join(Machine& machine, const std::vector<Value>& items, const Text& between);
Text formatted(Machine& machine, const Text& format, const Value& values);  ///< Python's %
Text replaced(Machine& machine, const Text& text, const Text& old, const Text& fresh, std::int64_t most);
std::size_t length_of(Machine& machine, const Value& value);
std::vector<std::size_t> character_ends(Machine& machine, const Text& text);  ///< byte offsets, 0 first
std::size_t find_text(std::string_view text, std::string_view word, std::size_t from);  ///< in linear time
std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string capitalized(std::string_view text);
Text stripped(const Text& text, const Text* characters, bool left, bool right);
/// Python's sort: stable, less by `key`.
void sort_by(Machine& machine, std::vector<Value>& items, const std::vector<Value>& keys, bool reverse);

}  // namespace lode::jinja
