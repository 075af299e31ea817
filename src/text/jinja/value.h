// SPDX-License-Identifier: Apache-2.0
// What a template computes with: Python's values as far as chat templates see them. Lists and mappings never change
// once made, so values are shared, not copied.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "text/jinja/text.h"

namespace lode::jinja {

class Machine;
class Value;

/// A message or a tool, keys in the order in which they were written.
using OrderedJson = nlohmann::ordered_json;

/// What stands between the parentheses of a call.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
};

/// Things with behaviour: functions, macros, `loop`, namespaces.
class Object {
 public:
  virtual ~Object() = default;
  virtual std::string name() const = 0;  ///< as errors and printing show it
  virtual std::optional<Value> attribute(std::string_view name) const;
  virtual bool callable() const { return false; }
  virtual Value call(Machine& machine, Arguments arguments);
};

enum class Kind { undefined, none, boolean, integer, real, string, list, mapping, object };

class Value {
 public:
  struct List {
    std::vector<Value> items;
    bool tuple = false;
    int depth = 1;  ///< of lists in lists
    std::size_t weight = 0;
  };
  using Entry = std::pair<Value, Value>;
  struct Mapping {
    std::vector<Entry> entries;
    int depth = 1;
    std::size_t weight = 0;
    const Value* find(const Value& key) const;  ///< null when it is missing
    const Value* find_name(std::string_view key) const;
  };
  static constexpr int kDeepest = 100;

  Value() = default;                         ///< undefined
  static Value undefined(std::string what);  ///< `what` names it in errors
  static Value none();
  Value(bool b) : data_(b) {}
  Value(std::int64_t i) : data_(i) {}
  Value(int i) : data_(std::int64_t{i}) {}
  Value(double d) : data_(d) {}
  Value(Text text);
  Value(std::string text) : Value(Text(std::move(text))) {}
  Value(const char* text) : Value(Text(text)) {}
  template <class T>
  requires std::is_base_of_v<Object, T> Value(std::shared_ptr<T> object)
      : data_(std::shared_ptr<Object>(std::move(object))) {}
  /// InputError beyond kDeepest lists in lists; `depth` levels are counted in what holds them.
  static Value list(std::vector<Value> items, bool tuple = false);
  static Value mapping(std::vector<Entry> entries);  ///< keys apart
  /// Strings get this origin; null becomes none.
  static Value of(const OrderedJson& json, Origin origin);

  Kind kind() const { return static_cast<Kind>(data_.index()); }
  bool is(Kind k) const { return kind() == k; }
  bool is_number() const { return is(Kind::boolean) || is(Kind::integer) || is(Kind::real); }
  bool is_whole() const { return is(Kind::boolean) || is(Kind::integer); }
  /// Each only of its kind.
  const std::string& undefined_name() const { return std::get<0>(data_).what; }
  bool boolean() const { return std::get<bool>(data_); }
  std::int64_t whole() const;  ///< of a boolean, too
  double number() const;       ///< of any number
  const Text& text() const { return *std::get<std::shared_ptr<const Text>>(data_); }
  const List& items() const { return *std::get<std::shared_ptr<const List>>(data_); }
  const Mapping& entries() const { return *std::get<std::shared_ptr<const Mapping>>(data_); }
  Object& object() const { return *std::get<std::shared_ptr<Object>>(data_); }

  bool truthy() const;
  int depth() const;
  /// About the bytes that it is printed as, and the time that comparing it takes: what stands in it twice counts twice.
  std::size_t weight() const;
  std::string_view type_name() const;  ///< "a string", as errors say it

 private:
  struct Undefined {
    std::string what;
  };
  std::variant<Undefined, std::monostate, bool, std::int64_t, double, std::shared_ptr<const Text>,
               std::shared_ptr<const List>, std::shared_ptr<const Mapping>, std::shared_ptr<Object>>
      data_;
};

/// Python's ==.
bool equal(const Value& a, const Value& b);
/// Python's str(): how a value is printed. repr() quotes strings, as within a list.
Text str(const Value& value);
void append_repr(Text& out, const Value& value);
std::string real_text(double value);  ///< Python's repr of a float

}  // namespace lode::jinja
