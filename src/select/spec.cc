// SPDX-License-Identifier: Apache-2.0
// Parsing of attention specs. Every error is one sentence that names the spec, what was found, and what is
// valid.
#include "lodestone/spec.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/text.h"
#include "lodestone/error.h"
#include "select/methods.h"
#include "select/presets.h"

namespace lode {

namespace {

constexpr std::int64_t kMaxCount = std::int64_t{1} << 30;
constexpr std::array<std::string_view, 3> kFileKeys = {"weights", "file", "folder"};  // of whatever method
constexpr std::size_t kMaxSpec = 400;  // bytes; specs are parts of the section names of .lode files

/// The whole text as a number, or nothing. NaN, infinities, signs of plus and blanks are no numbers here.
template <class T>
std::optional<T> parse_all(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  if constexpr (std::is_floating_point_v<T>) {
    if (!std::isfinite(value)) return std::nullopt;
  }
  return value;
}

/// "0.05", "5%", "1/20"; nothing when it is none of these.
std::optional<double> parse_number(std::string_view text) {
  if (text.ends_with('%')) {
    const auto percent = parse_all<double>(text.substr(0, text.size() - 1));
    return percent ? std::optional(*percent / 100.0) : std::nullopt;
  }
  const std::size_t slash = text.find('/');
  if (slash == std::string_view::npos) return parse_all<double>(text);
  const auto above = parse_all<double>(text.substr(0, slash)),
             below = parse_all<double>(text.substr(slash + 1));
  if (!above || !below || *below == 0.0) return std::nullopt;
  const double ratio = *above / *below;
  return std::isfinite(ratio) ? std::optional(ratio) : std::nullopt;
}

[[noreturn]] void bad_value(const Spec& spec, std::string_view key, std::string_view expected) {
  throw InputError(fmt::format("attention spec '{}': key '{}': expected {}, found '{}'", spec.str(), key,
                               expected, excerpt(spec.given.find(std::string(key))->second)));
}

const std::string* find_given(const Spec& spec, std::string_view key) {
  const auto found = spec.given.find(std::string(key));
  return found == spec.given.end() ? nullptr : &found->second;
}

/// Words are mistyped, numbers are meant.
std::string suggestion(std::string_view word, std::span<const std::string> names) {
  if (parse_number(word)) return {};
  const std::string near = nearest_name(word, names);
  return near.empty() ? std::string() : fmt::format(" (did you mean '{}'?)", near);
}

std::vector<std::string> key_names(const MethodInfo& method) {
  std::vector<std::string> names;
  for (const SpecKey& key : method.keys) names.push_back(key.name);
  if (!presets_of(method.name).empty()) names.emplace_back("preset");
  if (method.name != "full") names.insert(names.end(), {"sink", "window", "dense_layers"});
  return names;
}

void add_key(Spec& spec, const MethodInfo& method, std::string_view item, std::string_view text) {
  const std::size_t equals = item.find('=');
  const std::string key(item.substr(0, equals));
  const std::vector<std::string> names = key_names(method);
  const std::string valid = names.empty() ? fmt::format("'{}' takes no keys", method.name)
                                          : fmt::format("'{}' takes the keys {}", method.name, join(names));
  if (equals == std::string_view::npos && !item.empty() && !method.plain_key.empty()) {
    return add_key(spec, method, fmt::format("{}={}", method.plain_key, item), text);
  }
  if (equals == std::string_view::npos || equals + 1 == item.size()) {
    throw InputError(
        fmt::format("attention spec '{}': expected key=value, found '{}'; {}", text, excerpt(item), valid));
  }
  if (std::find(names.begin(), names.end(), key) == names.end()) {
    throw InputError(fmt::format("attention spec '{}': unknown key '{}'{}; {}", text, excerpt(key),
                                 suggestion(key, names), valid));
  }
  if (!spec.given.emplace(key, item.substr(equals + 1)).second) {
    throw InputError(fmt::format("attention spec '{}': key '{}' is given twice", text, excerpt(key)));
  }
}

const MethodInfo* method_or_none(std::string_view name) {
  for (const MethodInfo& method : methods())
    if (method.name == name ||
        std::find(method.aliases.begin(), method.aliases.end(), name) != method.aliases.end())
      return &method;
  return nullptr;
}

/// `other`: a word that some callers take in a method's place.
std::string unknown_method(std::string_view name, const std::optional<std::string>& other,
                           std::string_view where) {
  std::vector<std::string> names, shown;
  for (const MethodInfo& method : methods()) {
    names.push_back(method.name);
    names.insert(names.end(), method.aliases.begin(), method.aliases.end());
    shown.push_back(method.aliases.empty() ? method.name
                                           : fmt::format("{} (also {})", method.name, join(method.aliases)));
  }
  if (other) names.push_back(*other);
  return fmt::format("unknown attention method '{}'{}; valid are {}{}", excerpt(name),
                     suggestion(name, names), join(shown), where);
}

/// Whoever takes `auto` has looked for it before (parse_auto), so that it comes here where no document was measured.
const MethodInfo& method_of_spec(std::string_view name) {
  if (const MethodInfo* const method = method_or_none(name)) return *method;
  if (name == "auto")
    throw InputError(unknown_method(name, {}, "; auto chooses where a document is indexed or asked"));
  throw InputError(unknown_method(name, "auto", ", and auto where a document is indexed or asked"));
}

}  // namespace

std::int64_t Amount::of(std::int64_t n) const {
  const double wanted = is_share ? std::ceil(value * static_cast<double>(n) - 1e-6) : value;
  return static_cast<std::int64_t>(std::clamp(wanted, 0.0, static_cast<double>(n)));
}

std::int64_t Spec::integer(std::string_view key, std::int64_t fallback, std::int64_t low,
                           std::int64_t high) const {
  const std::string* const text = find_given(*this, key);
  if (text == nullptr) return fallback;
  const auto value = parse_all<std::int64_t>(*text);
  if (!value || *value < low || *value > high)
    bad_value(*this, key, fmt::format("a whole number from {} to {}", low, high));
  return *value;
}

double Spec::number(std::string_view key, double fallback, double low, double high) const {
  const std::string* const text = find_given(*this, key);
  if (text == nullptr) return fallback;
  const auto value = parse_number(*text);
  if (!value || *value < low || *value > high) {
    // The least positive number stands for an open range.
    const bool open = low == std::numeric_limits<double>::min();
    bad_value(*this, key,
              open ? fmt::format("a number above 0 up to {}", high)
                   : fmt::format("a number from {} to {}", low, high));
  }
  return *value;
}

Amount Spec::amount(std::string_view key, Amount fallback) const {
  const std::string* const text = find_given(*this, key);
  if (text == nullptr) return fallback;
  if (const auto count = parse_all<std::int64_t>(*text); count && *count >= 1 && *count <= kMaxCount) {
    return {static_cast<double>(*count), false};
  }
  const auto share = text->find_first_of("/%.eE") == std::string::npos ? std::nullopt : parse_number(*text);
  if (share && *share > 0.0 && *share <= 1.0) return {*share, true};
  bad_value(
      *this, key,
      fmt::format("a count from 1 to {}, or a share above 0 up to 1 such as 1/32, 5% or 0.05", kMaxCount));
}

std::string Spec::choice(std::string_view key, std::string_view fallback,
                         std::span<const std::string_view> valid) const {
  const std::string* const text = find_given(*this, key);
  if (text == nullptr) return std::string(fallback);
  if (std::find(valid.begin(), valid.end(), *text) == valid.end()) {
    const std::vector<std::string> names(valid.begin(), valid.end());
    bad_value(*this, key, fmt::format("one of {}{}", join(names), suggestion(*text, names)));
  }
  return *text;
}

std::optional<std::string> Spec::text(std::string_view key) const {
  const std::string* const text = find_given(*this, key);
  return text == nullptr ? std::nullopt : std::optional(*text);
}

std::optional<std::string> Spec::file(std::string_view key) const {
  namespace fs = std::filesystem;
  const std::string* const given_path = find_given(*this, key);
  if (given_path == nullptr) return std::nullopt;
  const fs::path path = fs::path(*given_path).lexically_normal(),
                 last = path.has_filename() ? path.filename() : path.parent_path().filename();
  const auto there = [&](const fs::path& at) {
    std::error_code unreadable;  // counts as missing
    return key == "folder" ? fs::is_directory(at, unreadable) : fs::is_regular_file(at, unreadable);
  };
  if (path.is_relative())
    for (const fs::path& folder : folders)
      if (there(folder / path)) return (folder / path).string();
  if (there(path)) return *given_path;
  for (const fs::path& folder : folders)
    if (!last.empty() && last != "." && last != ".." && there(folder / last)) return (folder / last).string();
  return *given_path;
}

std::string Spec::str() const {
  std::string out = name;
  for (const auto& [key, value] : given)
    out += fmt::format("{}{}={}", out.size() == name.size() ? ":" : ",", key, value);
  return out;
}

const MethodInfo& find_method(std::string_view name) {
  if (const MethodInfo* const method = method_or_none(name)) return *method;
  throw InputError(unknown_method(name, {}, ""));
}

void expect_not_both(const Spec& spec, std::string_view one, std::string_view other) {
  if (spec.text(one) && spec.text(other)) {
    throw InputError(fmt::format("attention spec '{}': expected one of the keys {} and {}, found both",
                                 spec.str(), one, other));
  }
}

bool same_method(const Spec& a, const Spec& b) {
  const auto one_file = [&](const std::string& key) {
    if (std::ranges::find(kFileKeys, key) == kFileKeys.end()) return false;
    std::error_code unreadable;
    const auto place = [&](const Spec& spec) {
      return std::filesystem::weakly_canonical(*spec.file(key), unreadable);
    };
    return place(a) == place(b) && !unreadable;
  };
  return a.name == b.name && std::ranges::equal(a.given, b.given, [&](const auto& mine, const auto& other) {
           return mine.first == other.first && (mine.second == other.second || one_file(mine.first));
         });
}

std::vector<std::filesystem::path> starts_of_files(const Spec& spec) {
  namespace fs = std::filesystem;
  const auto given = [&](std::string_view key) { return spec.text(key).has_value(); };
  if (std::ranges::none_of(kFileKeys, given)) return {};
  if (spec.folders.empty()) return {fs::current_path()};
  std::vector<fs::path> starts = spec.folders;
  for (const std::string_view key : kFileKeys)  // found by its name alone, perhaps
    if (const auto found = spec.file(key)) starts.push_back(fs::absolute(*found).parent_path());
  return starts;
}

Spec parse_spec(std::string_view text, const std::vector<std::filesystem::path>& folders) {
  if (excerpt(text, kMaxSpec) != text) {
    throw InputError(
        fmt::format("attention spec: expected at most {} bytes of printable text, found {} bytes, '{}'",
                    kMaxSpec, text.size(), excerpt(text)));
  }
  const std::size_t colon = text.find(':');
  const MethodInfo& method = method_of_spec(text.substr(0, colon));
  Spec spec;
  spec.name = method.name;
  spec.folders = folders;
  std::string_view rest = colon == std::string_view::npos ? std::string_view{} : text.substr(colon + 1);
  for (bool more = colon != std::string_view::npos; more;) {
    const std::size_t comma = rest.find(',');
    add_key(spec, method, rest.substr(0, comma), text);
    more = comma != std::string_view::npos;
    if (more) rest.remove_prefix(comma + 1);
  }
  apply_preset(method.name, text, spec.given);
  const LocalWindow dense = method.dense_of ? method.dense_of(spec) : method.dense;
  // A window of 0 would leave a token without itself, and with no key at all at position 0.
  spec.dense.sink = spec.integer("sink", dense.sink, 0, kMaxCount);
  spec.dense.window = spec.integer("window", dense.window, 1, kMaxCount);
  spec.dense.from_context = dense.from_context && !spec.text("window");  // a window asked for slides
  spec.dense_layers = static_cast<int>(spec.integer("dense_layers", method.dense_layers, 0, 1 << 16));
  if (method.validate) method.validate(spec);
  return spec;
}

}  // namespace lode
