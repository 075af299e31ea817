// SPDX-License-Identifier: Apache-2.0
#include "lab/report/toml.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

namespace {

bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\r';
}

bool is_key_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

class Parser {
 public:
  Parser(std::string_view text, std::string_view where) : text_(text), where_(where) {}

  std::vector<TomlTable> parse() {
    std::vector<TomlTable> tables(1);
    tables.back().file = where_;
    while (skip_space_and_lines()) {
      if (text_[at_] == '[') {
        TomlTable& table = tables.emplace_back();
        table.line = line_;
        table.file = where_;
        table.name = header();
      } else {
        entry(tables.back());
      }
      end_of_line();
    }
    return tables;
  }

 private:
  [[noreturn]] void fail(const std::string& expected) const {
    const std::size_t end = std::min(text_.find('\n', at_), text_.size());
    const std::string_view rest = text_.substr(at_, end - at_);
    throw InputError(fmt::format("{} line {}: expected {}, found {}", where_, line_, expected,
                                 rest.empty() ? "the end of the line" : "'" + excerpt(rest, 40) + "'"));
  }

  bool done() const { return at_ >= text_.size(); }
  bool next_is(char c) const { return !done() && text_[at_] == c; }

  void skip_blanks() {
    while (!done() && is_blank(text_[at_])) ++at_;
  }

  /// Over blank lines and comments; false at the end of the text.
  bool skip_space_and_lines() {
    while (!done()) {
      skip_blanks();
      if (next_is('#')) at_ = std::min(text_.find('\n', at_), text_.size());
      if (!next_is('\n')) return !done();
      ++at_;
      ++line_;
    }
    return false;
  }

  void end_of_line() {
    skip_blanks();
    if (done() || next_is('\n') || next_is('#')) return;
    fail("the end of the line or a comment");
  }

  std::string word(const char* what) {
    const std::size_t begin = at_;
    while (!done() && is_key_character(text_[at_])) ++at_;
    if (at_ == begin) fail(what);
    return std::string(text_.substr(begin, at_ - begin));
  }

  std::string header() {
    if (!text_.substr(at_).starts_with("[[")) fail("a header of two brackets such as [[run]]");
    at_ += 2;
    std::string name = word("a table's name");
    if (!text_.substr(at_).starts_with("]]")) fail("']]'");
    at_ += 2;
    return name;
  }

  void entry(TomlTable& table) {
    const int line = line_;
    const std::string key = word("a key or a header");
    skip_blanks();
    if (!next_is('=')) fail(fmt::format("'=' after '{}'", key));
    ++at_;
    skip_blanks();
    const bool is_new = table.entries.emplace(key, TomlTable::Entry{value(), line}).second;
    if (!is_new) throw InputError(fmt::format("{} line {}: the key '{}' occurs twice", where_, line, key));
  }

  TomlTable::Value value() {
    if (next_is('[')) return list();
    if (next_is('"')) return string();
    return number();
  }

  std::string string() {
    std::string out;
    for (++at_; !done() && text_[at_] != '"'; ++at_) {
      char c = text_[at_];
      if (c == '\n') break;
      if (c == '\\') {
        const char escaped = at_ + 1 < text_.size() ? text_[at_ + 1] : '\n';
        if (escaped != '"' && escaped != '\\' && escaped != 'n') fail(R"(one of \" \\ \n)");
        c = escaped == 'n' ? '\n' : escaped;
        ++at_;
      }
      out += c;
    }
    if (!next_is('"')) fail("a closing quote");
    ++at_;
    return out;
  }

  double number() {
    double value = 0;
    const char* last = text_.data() + text_.size();
    const auto [end, error] = std::from_chars(text_.data() + at_, last, value);
    if (error != std::errc() || !std::isfinite(value)) fail("a string in double quotes, a number or a list");
    at_ = static_cast<std::size_t>(end - text_.data());
    return value;
  }

  std::vector<std::string> list() {
    std::vector<std::string> items;
    ++at_;
    while (skip_space_and_lines() && text_[at_] != ']') {
      if (next_is('"')) {
        items.push_back(string());
      } else {
        items.push_back(fmt::format("{}", number()));
      }
      skip_space_and_lines();
      if (next_is(',')) {
        ++at_;
      } else if (!next_is(']')) {
        fail("',' or ']'");
      }
    }
    if (!next_is(']')) fail("']'");
    ++at_;
    return items;
  }

  std::string_view text_;
  std::string where_;
  std::size_t at_ = 0;
  int line_ = 1;
};

[[noreturn]] void wrong_type(const TomlTable& table, std::string_view key, std::string_view expected) {
  throw InputError(fmt::format("{}: '{}': expected {}", table.where(key), key, expected));
}

}  // namespace

const TomlTable::Entry* TomlTable::find(std::string_view key) const {
  asked_.emplace_back(key);
  const auto found = entries.find(std::string(key));
  if (found == entries.end()) return nullptr;
  found->second.used = true;
  return &found->second;
}

std::optional<std::string> TomlTable::text(std::string_view key) const {
  const Entry* entry = find(key);
  if (entry == nullptr) return std::nullopt;
  if (const auto* value = std::get_if<std::string>(&entry->value)) return *value;
  wrong_type(*this, key, "a string in double quotes");
}

std::optional<double> TomlTable::number(std::string_view key, double low, double high) const {
  const Entry* entry = find(key);
  if (entry == nullptr) return std::nullopt;
  const auto* value = std::get_if<double>(&entry->value);
  if (value != nullptr && *value >= low && *value <= high) return *value;
  wrong_type(*this, key, fmt::format("a number from {} to {}", low, high));
}

std::optional<std::int64_t> TomlTable::integer(std::string_view key, std::int64_t low,
                                               std::int64_t high) const {
  const auto value = number(key, static_cast<double>(low), static_cast<double>(high));
  if (value && *value != std::floor(*value)) wrong_type(*this, key, "a whole number");
  if (!value) return std::nullopt;
  return static_cast<std::int64_t>(*value);
}

std::optional<std::vector<std::string>> TomlTable::list(std::string_view key) const {
  const Entry* entry = find(key);
  if (entry == nullptr) return std::nullopt;
  if (const auto* value = std::get_if<std::vector<std::string>>(&entry->value)) return *value;
  if (const auto* value = std::get_if<std::string>(&entry->value)) return std::vector<std::string>{*value};
  wrong_type(*this, key, "a list");
}

std::string TomlTable::where(std::string_view key) const {
  const auto found = entries.find(std::string(key));
  return fmt::format("{} line {}", file, found == entries.end() ? line : found->second.line);
}

void TomlTable::check_all_used() const {
  for (const auto& [key, entry] : entries) {
    if (entry.used) continue;
    std::vector<std::string> valid = asked_;
    std::sort(valid.begin(), valid.end());
    valid.erase(std::unique(valid.begin(), valid.end()), valid.end());
    throw InputError(
        fmt::format("{}: expected one of the keys {}; found '{}'", where(key), join(valid), key));
  }
}

std::vector<TomlTable> parse_toml(std::string_view text, std::string_view where) {
  const std::size_t bad = invalid_utf8(text);
  if (bad != std::string::npos)
    throw InputError(fmt::format("{}: expected UTF-8, found an invalid byte at offset {}", where, bad));
  return Parser(text, where).parse();
}

}  // namespace lode
