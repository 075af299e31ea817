// SPDX-License-Identifier: Apache-2.0
// JSON with limits, and getters that name the file and the field when something is off.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace lode {

using Json = nlohmann::json;

/// Parses strictly: depth at most 64, 2^23 values, no duplicate keys, valid UTF-8. `where` names the source in
/// errors (InputError).
Json parse_json(std::string_view text, std::string_view where);

/// Typed members of an object. Missing, of another type, out of [low, high] or not finite: InputError naming
/// `where` and key.
std::int64_t json_int(const Json& object, std::string_view key, std::string_view where, std::int64_t low,
                      std::int64_t high);
double json_number(const Json& object, std::string_view key, std::string_view where, double low, double high);
std::string json_string(const Json& object, std::string_view key, std::string_view where);
bool json_bool(const Json& object, std::string_view key, std::string_view where);
/// The member, or null when there is none or `object` is not an object. Lives as long as `object`.
const Json& json_member(const Json& object, std::string_view key);
/// True when the key is there and not null.
bool json_has(const Json& object, std::string_view key);

}  // namespace lode
