// SPDX-License-Identifier: Apache-2.0
// The part of TOML that suites are written in: comments, `key = value`, and `[[table]]` headers. Values are
// strings in double quotes, numbers, and lists of strings or numbers that may span lines. Everything else is
// an InputError that names file and line.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace lode {

/// One table of a file: what stands before the first header (name empty), or below one [[name]].
class TomlTable {
 public:
  using Value = std::variant<std::string, double, std::vector<std::string>>;
  struct Entry {
    Value value;
    int line = 0;
    mutable bool used = false;
  };

  std::string name;
  int line = 1;
  std::string file;
  std::map<std::string, Entry> entries;

  /// Typed getters: InputError when the key has another type or lies outside [low, high]; nothing when it is
  /// missing.
  std::optional<std::string> text(std::string_view key) const;
  std::optional<double> number(std::string_view key, double low, double high) const;
  std::optional<std::int64_t> integer(std::string_view key, std::int64_t low, std::int64_t high) const;
  /// A list of strings; a single string is a list of one.
  std::optional<std::vector<std::string>> list(std::string_view key) const;
  /// "FILE line N", of the key where there is one, else of the table.
  std::string where(std::string_view key = {}) const;
  /// InputError for a key that no getter asked for.
  void check_all_used() const;

 private:
  const Entry* find(std::string_view key) const;
  mutable std::vector<std::string> asked_;
};

/// The tables of a file in order; the first is the unnamed one.
std::vector<TomlTable> parse_toml(std::string_view text, std::string_view where);

}  // namespace lode
