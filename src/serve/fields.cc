// SPDX-License-Identifier: Apache-2.0
#include "serve/fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "lodestone/error.h"
#include "serve/multipart.h"

namespace lode::serve {

namespace {

// Of a body with a schema: members that keep their order are found one by one, so that many would take long.
constexpr std::size_t kMostMembers = 1024, kMostMembersInAll = std::size_t{1} << 18;

std::size_t members_of(const Json& value) {
  if (!value.is_structured()) return 0;
  std::size_t all = value.is_object() ? value.size() : 0;
  if (all > kMostMembers)
    throw ApiError(
        400, fmt::format("the body: expected objects of at most {} members beside a schema, found one of {}",
                         kMostMembers, all));
  for (const Json& one : value) all += members_of(one);
  return all;
}

}  // namespace

Json parse_body(const HttpRequest& request) {
  if (media_type(request.header("content-type")) != "application/json")
    throw ApiError(415, fmt::format("expected 'Content-Type: application/json', found '{}'",
                                    excerpt(request.header("content-type"))));
  try {
    Json body = parse_json(request.body, "the body");
    if (!body.is_object())
      throw ApiError(400, fmt::format("the body: expected a JSON object, found {}", shown(body)));
    return body;
  } catch (const InputError& e) {
    throw ApiError(400, e.what());
  }
}

std::string shown(const Json& value) {
  if (value.is_object()) return value.empty() ? "an empty object" : "an object";
  if (value.is_array()) return value.empty() ? "an empty list" : "a list";
  return excerpt(value.dump(-1, ' ', false, Json::error_handler_t::replace), 60);
}

Fields::Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
  if (!object.is_object())
    throw ApiError(400, fmt::format("'{}': expected an object, found {}", where_, shown(object)));
}

std::string Fields::path_of(const char* key) const {
  return where_.empty() ? key : fmt::format("{}.{}", where_, key);
}

const Json& Fields::member(const char* key) const {
  return json_member(object_, key);
}
std::string Fields::in_order(std::string_view text, const char* pointer) const {
  if (const std::size_t all = members_of(object_); all > kMostMembersInAll)
    throw ApiError(400, fmt::format("the body: expected at most {} members beside a schema, found {}",
                                    kMostMembersInAll, all));
  using Ordered = nlohmann::ordered_json;
  return Ordered::parse(text).at(Ordered::json_pointer(pointer)).dump();
}

bool Fields::has(const char* key) const {
  return !member(key).is_null();
}

void Fields::wrong(const char* key, const std::string& expected) const {
  const auto at = object_.find(key);
  throw ApiError(400, fmt::format("'{}': expected {}, found {}", path_of(key), expected,
                                  at == object_.end() ? "nothing" : shown(*at)));
}

std::optional<std::string> Fields::text(const char* key) const {
  if (!has(key)) return std::nullopt;
  if (!member(key).is_string()) wrong(key, "a string");
  return member(key).get<std::string>();
}

std::optional<bool> Fields::flag(const char* key) const {
  if (!has(key)) return std::nullopt;
  if (!member(key).is_boolean()) wrong(key, "true or false");
  return member(key).get<bool>();
}

std::optional<double> Fields::number(const char* key, double low, double high) const {
  if (!has(key)) return std::nullopt;
  const std::string expected = fmt::format("a number from {:g} to {:g}", low, high);
  if (!member(key).is_number()) wrong(key, expected);
  const auto value = member(key).get<double>();
  if (!std::isfinite(value) || value < low || value > high) wrong(key, expected);
  return value;
}

std::optional<std::int64_t> Fields::integer(const char* key, std::int64_t low, std::int64_t high) const {
  if (!has(key)) return std::nullopt;
  const std::string expected = fmt::format("a whole number from {} to {}", low, high);
  const Json& value = member(key);
  if (!value.is_number_integer()) wrong(key, expected);
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > static_cast<std::uint64_t>(INT64_MAX))
    wrong(key, expected);
  const auto number = value.get<std::int64_t>();
  if (number < low || number > high) wrong(key, expected);
  return number;
}

std::vector<std::string> Fields::texts(const char* key, std::size_t most) const {
  if (!has(key)) return {};
  const Json& value = member(key);
  const std::string expected = fmt::format("a string or a list of at most {} strings", most);
  if (value.is_string()) return {value.get<std::string>()};
  if (!value.is_array() || value.size() > most) wrong(key, expected);
  std::vector<std::string> all;
  for (const Json& one : value) {
    if (!one.is_string()) wrong(key, expected);
    all.push_back(one.get<std::string>());
  }
  return all;
}

void Fields::expect_known(std::initializer_list<const char*> known,
                          std::initializer_list<const char*> ignored) const {
  const auto in = [](std::initializer_list<const char*> list, const std::string& key) {
    return std::any_of(list.begin(), list.end(), [&](const char* one) { return key == one; });
  };
  for (const auto& [key, value] : object_.items()) {
    if (in(known, key) || in(ignored, key)) continue;
    const std::vector<std::string> names(known.begin(), known.end());
    const std::string nearest = nearest_name(key, names);
    throw ApiError(400, fmt::format("'{}': this field is not known{}", excerpt(path_of(key.c_str())),
                                    nearest.empty() ? "" : fmt::format("; did you mean '{}'?", nearest)));
  }
}

}  // namespace lode::serve
