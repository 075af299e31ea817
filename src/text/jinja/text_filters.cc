// SPDX-License-Identifier: Apache-2.0
// Filters of strings and numbers.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

#include "text/jinja/natives.h"
#include "text/utf8.h"

namespace lode::jinja {

namespace {

Value to_text(Machine& m, const Value& self, const Given&) {
  return m.str(self);
}

Value to_upper(Machine& m, const Value& self, const Given&) {
  const Text text = m.str(self);
  return m.made(text.rewritten(upper(text.view())));
}

Value to_lower(Machine& m, const Value& self, const Given&) {
  const Text text = m.str(self);
  return m.made(text.rewritten(lower(text.view())));
}

Value capitalize(Machine& m, const Value& self, const Given&) {
  const Text text = m.str(self);
  return m.made(text.rewritten(capitalized(text.view())));
}

/// Every word begins in upper case; words are parted by blanks, hyphens and brackets.
Value title(Machine& m, const Value& self, const Given&) {
  const Text text = m.str(self);
  std::string result;
  bool begins = true;
  for (std::string_view rest = text.view(); !rest.empty();) {
    const CodePoint c = first_code_point(rest);
    const std::string_view one = rest.substr(0, c.bytes);
    result += begins ? upper(one) : lower(one);
    begins = c.value < 0x80 &&
             std::string_view(" \t\n\r\v\f-([{<").find(static_cast<char>(c.value)) != std::string_view::npos;
    rest.remove_prefix(c.bytes);
  }
  return m.made(text.rewritten(std::move(result)));
}

Value trim(Machine& m, const Value& self, const Given& given) {
  const Text text = m.str(self);
  const bool any = !given.has(0) || given.value(0).is(Kind::none);
  return m.made(stripped(text, any ? nullptr : &given.text(0), true, true));
}

Value replace(Machine& m, const Value& self, const Given& given) {
  const std::int64_t most = given.has(2) && !given.value(2).is(Kind::none) ? given.whole(2) : -1;
  return m.made(replaced(m, m.str(self), m.str(given.value(0)), m.str(given.value(1)), most));
}

/// Lines but the first, unless `first`, move to the right; blank ones only with `blank`.
Value indent(Machine& m, const Value& self, const Given& given) {
  const Value width = given.value_or(0, 4);
  const Text text = m.str(self);
  std::string margin;
  if (width.is(Kind::string)) {
    margin = width.text().bytes();
  } else {
    const auto columns =
        static_cast<std::size_t>(std::clamp<std::int64_t>(m.whole(width, "indent"), 0, 1 << 16));
    margin.assign(columns, ' ');
  }
  const bool blank = given.flag_or(2, false);
  Text out;
  std::size_t begin = 0;
  for (bool first = true;; first = false) {
    const std::size_t end = std::min(text.view().find('\n', begin), text.size());
    m.spend(1);
    m.take(margin.size() + end - begin + 1);
    if ((first && given.flag_or(1, false)) || (!first && (blank || end > begin))) out.append(margin);
    out.append_part(text, begin, std::min(end + 1, text.size()));
    if (end == text.size()) return out;
    begin = end + 1;
  }
}

Value truncate(Machine& m, const Value& self, const Given& given) {
  const Text text = m.str(self);
  const std::int64_t length = given.whole_or(0, 255), leeway = given.whole_or(3, 5);
  const Text end = given.has(2) ? given.text(2) : Text("...");
  const std::vector<std::size_t> ends = character_ends(m, text);
  const std::int64_t keep = length - static_cast<std::int64_t>(length_of(m, Value(end)));
  if (keep < 0 || leeway < 0)
    m.fail("truncate: expected a length of at least that of what marks the end, found less");
  if (std::ssize(ends) - 1 <= length || std::ssize(ends) - 1 - length <= leeway) return text;
  Text out = text.part(0, ends[static_cast<std::size_t>(keep)]);
  if (!given.flag_or(1, false)) {
    const std::size_t blank = out.view().rfind(' ');
    if (blank != std::string::npos) out = out.part(0, blank);
  }
  out.append(end);
  return m.made(std::move(out));
}

Value center(Machine& m, const Value& self, const Given& given) {
  const Text text = m.str(self);
  const auto length = static_cast<std::int64_t>(length_of(m, Value(text)));
  const std::int64_t room = std::clamp<std::int64_t>(given.whole_or(0, 80) - length, 0, 1 << 20);
  const std::int64_t left = room / 2 + (room & (length + room) & 1);
  Text out(std::string(static_cast<std::size_t>(left), ' '));
  out.append(text);
  out.append(std::string(static_cast<std::size_t>(room - left), ' '));
  return m.made(std::move(out));
}

Value format(Machine& m, const Value& self, const Given& given) {
  if (!given.rest().named.empty()) m.fail("format: expected values by position, found a named one");
  return m.made(formatted(m, m.str(self), m.made(given.rest().positional, true)));
}

Value word_count(Machine& m, const Value& self, const Given&) {
  const Text text = m.str(self);
  std::int64_t words = 0;
  bool inside = false;
  for (const char c : text.view()) {
    const bool word = c == '_' || (c & 0x80) != 0 || std::isalnum(static_cast<unsigned char>(c)) != 0;
    words += word && !inside ? 1 : 0;
    inside = word;
  }
  return words;
}

Value escape(Machine& m, const Value& self, const Given&) {
  Text out;
  const Text text = m.str(self);
  for (const char c : text.view()) {
    const std::string_view entity = c == '&'    ? "&amp;"
                                    : c == '<'  ? "&lt;"
                                    : c == '>'  ? "&gt;"
                                    : c == '"'  ? "&#34;"
                                    : c == '\'' ? "&#39;"
                                                : std::string_view(&c, 1);
    out.append(entity);
  }
  return m.made(text.rewritten(out.bytes()));
}

Value tojson(Machine& m, const Value& self, const Given& given) {
  const Value indent = given.value_or(1, Value::none());
  return to_json(m, self, indent.is(Kind::none) ? -1 : std::max<std::int64_t>(m.whole(indent, "tojson"), 0),
                 given.flag_or(3, false), given.flag_or(0, false));
}

void expect_defined(Machine& m, const Value& self, const char* what) {
  if (self.is(Kind::undefined)) m.fail(fmt::format("{}: '{}' is undefined", what, self.undefined_name()));
}

/// The number that a string holds, all of it but blanks around it.
std::optional<double> number_in(const Text& text) {
  const std::string digits = stripped(text, nullptr, true, true).bytes();
  if (digits.empty() || digits.find_first_of("xXpP") != digits.npos) return std::nullopt;
  char* end = nullptr;
  const double value = std::strtod(digits.c_str(), &end);
  return *end == '\0' ? std::optional(value) : std::nullopt;
}

Value to_whole(Machine& m, const Value& self, const Given& given) {
  expect_defined(m, self, "int");
  if (self.is_whole()) return self.whole();
  std::optional<double> number;
  if (self.is(Kind::real)) number = self.number();
  if (self.is(Kind::string)) number = number_in(self.text());
  if (!number || !(std::abs(*number) < 9e18)) return given.value_or(0, 0);
  if (self.is(Kind::string) && self.text().view().find_first_of(".eE") == std::string::npos)
    return static_cast<std::int64_t>(
        std::strtoll(stripped(self.text(), nullptr, true, true).bytes().c_str(), nullptr, 10));
  return static_cast<std::int64_t>(*number);
}

Value to_real(Machine& m, const Value& self, const Given& given) {
  expect_defined(m, self, "float");
  if (self.is_number()) return self.number();
  const auto number = self.is(Kind::string) ? number_in(self.text()) : std::nullopt;
  return number ? Value(*number) : given.value_or(0, 0.0);
}

Value absolute(Machine& m, const Value& self, const Given&) {
  if (!self.is_number()) m.fail(fmt::format("abs: expected a number, found {}", self.type_name()));
  if (self.is(Kind::real)) return std::abs(self.number());
  return self.whole() < 0 ? m.binary("-", 0, self) : Value(self.whole());
}

Value round(Machine& m, const Value& self, const Given& given) {
  if (!self.is_number()) m.fail(fmt::format("round: expected a number, found {}", self.type_name()));
  const std::int64_t digits = std::clamp<std::int64_t>(given.whole_or(0, 0), -300, 300);
  const std::string method = given.has(1) ? given.text(1).bytes() : "common";
  const double scale = std::pow(10.0, static_cast<double>(digits)), value = self.number();
  if (method == "ceil") return std::ceil(value * scale) / scale;
  if (method == "floor") return std::floor(value * scale) / scale;
  if (method != "common") m.fail("round: expected 'common', 'ceil' or 'floor', found another method");
  // As printed with so many digits, which rounds what the number really is.
  const double rounded = digits < 0 ? std::nearbyint(value * scale) / scale
                                    : std::strtod(fmt::format("{:.{}f}", value, digits).c_str(), nullptr);
  if (self.is_whole() && std::abs(rounded) < 9e15)
    return digits < 0 ? Value(static_cast<std::int64_t>(rounded)) : Value(self.whole());
  return rounded;
}

Value or_default(Machine&, const Value& self, const Given& given) {
  const bool missing = self.is(Kind::undefined) || (given.flag_or(1, false) && !self.truthy());
  return missing ? given.value_or(0, "") : self;
}

Value as_it_is(Machine&, const Value& self, const Given&) {
  return self;
}

}  // namespace

std::span<const Native> text_filters() {
  static const std::array kFilters = {
      Native{"string", {}, to_text},
      Native{"upper", {}, to_upper},
      Native{"lower", {}, to_lower},
      Native{"capitalize", {}, capitalize},
      Native{"title", {}, title},
      Native{"trim", {"chars"}, trim},
      Native{"replace", {"old", "new", "count"}, replace},
      Native{"indent", {"width", "first", "blank"}, indent},
      Native{"truncate", {"length", "killwords", "end", "leeway"}, truncate},
      Native{"center", {"width"}, center},
      Native{"format", {"..."}, format},
      Native{"wordcount", {}, word_count},
      Native{"escape", {}, escape},
      Native{"e", {}, escape},
      Native{"tojson", {"ensure_ascii", "indent", "separators", "sort_keys"}, tojson},
      Native{"int", {"default", "base"}, to_whole},
      Native{"float", {"default"}, to_real},
      Native{"abs", {}, absolute},
      Native{"round", {"precision", "method"}, round},
      Native{"default", {"default_value", "boolean"}, or_default},
      Native{"d", {"default_value", "boolean"}, or_default},
      Native{"safe", {}, as_it_is},
  };
  return kFilters;
}

}  // namespace lode::jinja
