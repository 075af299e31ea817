// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <cmath>
#include <utility>
#include <vector>

#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::size_t kMaxDepth = 64;
constexpr std::size_t kMaxValues = std::size_t{1} << 23;  // the largest tokenizers have two millions

[[noreturn]] void wrong(std::string_view where, std::string_view key, const std::string& expected,
                        const std::string& found) {
  throw InputError(std::string(where) + ": '" + std::string(key) + "': expected " + expected + ", found " +
                   found);
}

const Json& member(const Json& object, std::string_view key, std::string_view where, const char* expected) {
  if (!object.is_object())
    throw InputError(std::string(where) + ": expected an object, found " + object.type_name());
  const auto at = object.find(key);
  if (at == object.end()) wrong(where, key, expected, "nothing");
  return *at;
}

/// What was found, short enough for a message and never deep.
std::string shown(const Json& value) {
  if (value.is_structured()) return value.type_name();
  return excerpt(value.dump(-1, ' ', false, Json::error_handler_t::replace), 60);
}

/// Builds the value from the parser's events. The library's own way to look at keys while it parses, a
/// callback, walks over all members of the parent at the end of each object: quadratic time.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(std::string_view where) : where_(where) {}
  Json take() { return std::move(root_); }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t& value) override { return put(std::move(value)); }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    const auto [at, fresh] = open_.back()->get_ref<Json::object_t&>().emplace(std::move(name), nullptr);
    if (!fresh) {
      throw InputError(where_ + ": the key '" + excerpt(at->first) + "' stands twice in one object");
    }
    member_ = &at->second;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& e) override {
    // The library's number of the fault, "[json.exception.parse_error.101] ", is of no use to anybody.
    const std::string_view said = e.what();
    const std::size_t begin = said.find("] ");
    throw InputError(where_ + ": not valid JSON: " +
                     excerpt(said.substr(begin == std::string_view::npos ? 0 : begin + 2), 200));
  }

 private:
  /// A value takes two bytes of text and many times that in memory.
  void count() {
    if (++values_ > kMaxValues)
      throw InputError(where_ + ": expected JSON of at most " + std::to_string(kMaxValues) +
                       " values, found more");
  }
  /// Where the next value belongs. It stays there as long as it is open: its parent does not grow meanwhile.
  Json& place() {
    count();
    if (open_.empty()) return root_;
    if (open_.back()->is_object()) return *member_;
    return open_.back()->emplace_back();
  }
  template <class Value>
  bool put(Value&& value) {
    place() = std::forward<Value>(value);
    return true;
  }
  bool open(Json&& value) {
    if (open_.size() == kMaxDepth) {
      throw InputError(where_ + ": expected JSON at most " + std::to_string(kMaxDepth) +
                       " levels deep, found more");
    }
    Json& at = place();
    at = std::move(value);
    open_.push_back(&at);
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string where_;
  Json root_;
  std::size_t values_ = 0;
  std::vector<Json*> open_;  // objects and arrays that are not at their end, from the outermost
  Json* member_ = nullptr;   // of the innermost object, which the last key named
};

}  // namespace

Json parse_json(std::string_view text, std::string_view where) {
  // The parser takes a NUL for the end of its input and would overlook what follows.
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    throw InputError(std::string(where) + ": not valid JSON: a NUL at byte " + std::to_string(nul));
  }
  Builder builder(where);
  Json::sax_parse(text, &builder);
  return builder.take();
}

std::int64_t json_int(const Json& object, std::string_view key, std::string_view where, std::int64_t low,
                      std::int64_t high) {
  const std::string expected = "a whole number from " + std::to_string(low) + " to " + std::to_string(high);
  const Json& value = member(object, key, where, expected.c_str());
  if (!value.is_number_integer()) wrong(where, key, expected, shown(value));
  // An unsigned number beyond int64 would turn negative when read as one.
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX)) {
    wrong(where, key, expected, shown(value));
  }
  const auto number = value.get<std::int64_t>();
  if (number < low || number > high) wrong(where, key, expected, shown(value));
  return number;
}

double json_number(const Json& object, std::string_view key, std::string_view where, double low,
                   double high) {
  const std::string expected = "a number from " + Json(low).dump() + " to " + Json(high).dump();
  const Json& value = member(object, key, where, expected.c_str());
  if (!value.is_number()) wrong(where, key, expected, shown(value));
  const auto number = value.get<double>();
  if (!std::isfinite(number) || number < low || number > high) wrong(where, key, expected, shown(value));
  return number;
}

std::string json_string(const Json& object, std::string_view key, std::string_view where) {
  const Json& value = member(object, key, where, "a string");
  if (!value.is_string()) wrong(where, key, "a string", shown(value));
  return value.get<std::string>();
}

bool json_bool(const Json& object, std::string_view key, std::string_view where) {
  const Json& value = member(object, key, where, "true or false");
  if (!value.is_boolean()) wrong(where, key, "true or false", shown(value));
  return value.get<bool>();
}

const Json& json_member(const Json& object, std::string_view key) {
  static const Json null;
  if (!object.is_object()) return null;
  const auto at = object.find(key);
  return at == object.end() ? null : *at;
}

bool json_has(const Json& object, std::string_view key) {
  return !json_member(object, key).is_null();
}

}  // namespace lode
