// SPDX-License-Identifier: Apache-2.0
#include "base/json.h"

#include <cmath>
#include <set>
#include <vector>

#include "lodestone/error.h"

namespace lode {

namespace {

constexpr int kMaxDepth = 64;

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
  const std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() > 60 ? text.substr(0, 60) + "..." : text;
}

/// The parser's message repeats what it read, however long and whatever bytes: made short and printable.
std::string printable(std::string_view text) {
  constexpr std::size_t kLongest = 200;
  std::string shown;
  for (const char c : text.substr(0, kLongest)) shown += c >= ' ' && c <= '~' ? c : '?';
  return text.size() > kLongest ? shown + "..." : shown;
}

}  // namespace

Json parse_json(std::string_view text, std::string_view where) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto check = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxDepth) {
      throw InputError(std::string(where) + ": expected JSON at most " + std::to_string(kMaxDepth) +
                       " levels deep, found more");
    }
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
      throw InputError(std::string(where) + ": the key '" + printable(parsed.get<std::string>()) +
                       "' stands twice in one object");
    }
    return true;
  };
  // The parser takes a NUL for the end of its input and would overlook what follows.
  if (const std::size_t nul = text.find('\0'); nul != std::string_view::npos) {
    throw InputError(std::string(where) + ": not valid JSON: a NUL at byte " + std::to_string(nul));
  }
  try {
    return Json::parse(text, check);
  } catch (const Json::exception& e) {
    throw InputError(std::string(where) + ": not valid JSON: " + printable(e.what()));
  }
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
