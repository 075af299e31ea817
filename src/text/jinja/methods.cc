// SPDX-License-Identifier: Apache-2.0
// Methods of strings, lists and mappings, as Python has them; those that would change a list or a mapping are left out,
// as Jinja's immutable sandbox refuses them.
#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "text/jinja/lexer.h"
#include "text/jinja/natives.h"
#include "text/utf8.h"

namespace lode::jinja {

namespace {

/// At blanks, runs of which count as one; at most `most` cuts, from the end if `from_end`.
std::vector<Text> words_of(Machine& m, const Text& text, std::int64_t most, bool from_end) {
  std::vector<Text> parts;
  Text rest = stripped(text, nullptr, !from_end, from_end);
  while (!rest.empty() && most != 0) {
    m.spend_bytes(rest.size());
    m.take(rest.size() + sizeof(Value));
    std::string_view view = rest.view();
    std::size_t cut = from_end ? view.size() : 0;
    if (from_end) {
      while (cut > 0 && leading_space(view.substr(cut - last_code_point(view.substr(0, cut)).bytes)) == 0)
        cut -= last_code_point(view.substr(0, cut)).bytes;
      parts.push_back(rest.part(cut, rest.size()));
      rest = stripped(rest.part(0, cut), nullptr, false, true);
    } else {
      while (cut < view.size() && leading_space(view.substr(cut)) == 0)
        cut += first_code_point(view.substr(cut)).bytes;
      parts.push_back(rest.part(0, cut));
      rest = stripped(rest.part(cut, rest.size()), nullptr, true, false);
    }
    --most;
  }
  if (!rest.empty()) parts.push_back(rest);
  if (from_end) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<Text> parts_of(Machine& m, const Text& text, const Text& separator, std::int64_t most,
                           bool from_end) {
  if (separator.empty()) m.fail("split: expected a separator, found an empty one");
  std::vector<std::size_t> cuts;
  m.spend_bytes(text.size());
  for (std::size_t at = 0; (at = find_text(text.view(), separator.view(), at)) != std::string::npos;) {
    m.spend(1);
    cuts.push_back(at);
    at += separator.size();
  }
  const auto count = most < 0 ? cuts.size() : std::min(cuts.size(), static_cast<std::size_t>(most));
  m.take(text.size() + (count + 1) * 128);
  if (from_end) cuts.erase(cuts.begin(), cuts.end() - static_cast<std::ptrdiff_t>(count));
  std::vector<Text> parts;
  std::size_t begin = 0;
  for (std::size_t i = 0; i < count; begin = cuts[i++] + separator.size())
    parts.push_back(text.part(begin, cuts[i]));
  parts.push_back(text.part(begin, text.size()));
  return parts;
}

Value split_at(Machine& m, const Value& self, const Given& given, bool from_end) {
  const std::int64_t most = given.whole_or(1, -1);
  const bool blanks = !given.has(0) || given.value(0).is(Kind::none);
  const std::vector<Text> parts = blanks ? words_of(m, self.text(), most, from_end)
                                         : parts_of(m, self.text(), given.text(0), most, from_end);
  return m.made(std::vector<Value>(parts.begin(), parts.end()));
}

Value split(Machine& m, const Value& self, const Given& given) {
  return split_at(m, self, given, false);
}
Value rsplit(Machine& m, const Value& self, const Given& given) {
  return split_at(m, self, given, true);
}

Value splitlines(Machine& m, const Value& self, const Given& given) {
  std::vector<Value> lines;
  const Text& text = self.text();
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.view().find_first_of("\r\n\v\f", begin), text.size());
    const std::size_t mark = end == text.size() ? 0 : text.view().substr(end).starts_with("\r\n") ? 2 : 1;
    m.take(end - begin + 128);
    lines.emplace_back(text.part(begin, end + (given.flag_or(0, false) ? mark : 0)));
    begin = end + mark;
  }
  return m.made(std::move(lines));
}

template <bool left, bool right>
Value strip(Machine& m, const Value& self, const Given& given) {
  m.spend_bytes(self.text().size());
  const bool any = !given.has(0) || given.value(0).is(Kind::none);
  return m.made(stripped(self.text(), any ? nullptr : &given.text(0), left, right));
}

/// A string, or one of a tuple of them.
template <class F>
Value any_of(Machine& m, const Given& given, F matches) {
  const Value& wanted = given.value(0);
  if (!wanted.is(Kind::list)) return matches(given.text(0).view());
  for (const Value& one : wanted.items().items)
    if (matches(m.text(one, "startswith").view())) return true;
  return false;
}

Value startswith(Machine& m, const Value& self, const Given& given) {
  return any_of(m, given, [&](std::string_view word) { return self.text().view().starts_with(word); });
}
Value endswith(Machine& m, const Value& self, const Given& given) {
  return any_of(m, given, [&](std::string_view word) { return self.text().view().ends_with(word); });
}

Value removeprefix(Machine& m, const Value& self, const Given& given) {
  const Text &text = self.text(), &word = given.text(0);
  return m.made(text.part(text.view().starts_with(word.view()) ? word.size() : 0, text.size()));
}
Value removesuffix(Machine& m, const Value& self, const Given& given) {
  const Text &text = self.text(), &word = given.text(0);
  return m.made(text.part(0, text.size() - (text.view().ends_with(word.view()) ? word.size() : 0)));
}

template <std::string (*change)(std::string_view)>
Value changed(Machine& m, const Value& self, const Given&) {
  m.spend_bytes(self.text().size());
  return m.made(self.text().rewritten(change(self.text().view())));
}

std::string swapped(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::size_t bytes = first_code_point(text).bytes;
    const std::string up = upper(text.substr(0, bytes));
    result += up == text.substr(0, bytes) ? lower(text.substr(0, bytes)) : up;
    text.remove_prefix(bytes);
  }
  return result;
}

/// Letters behind letters are lower case, all others upper.
std::string titled(std::string_view text) {
  std::string result;
  bool begins = true;
  while (!text.empty()) {
    const std::size_t bytes = first_code_point(text).bytes;
    const std::string_view one = text.substr(0, bytes);
    const bool letter = upper(one) != lower(one);
    result += !letter ? std::string(one) : begins ? upper(one) : lower(one);
    begins = !letter;
    text.remove_prefix(bytes);
  }
  return result;
}

Value replace(Machine& m, const Value& self, const Given& given) {
  return m.made(replaced(m, self.text(), given.text(0), given.text(1), given.whole_or(2, -1)));
}

std::int64_t place_of(Machine& m, const Text& text, const Text& word, bool last) {
  m.spend_bytes(text.size() + word.size());
  std::size_t at = find_text(text.view(), word.view(), 0);
  for (std::size_t next = at; last && next != std::string::npos;
       next = find_text(text.view(), word.view(), next + 1)) {
    m.spend_bytes(word.size());
    at = next;
  }
  return at == std::string::npos ? -1 : static_cast<std::int64_t>(length_of(m, Value(text.part(0, at))));
}

Value find(Machine& m, const Value& self, const Given& given) {
  return place_of(m, self.text(), given.text(0), false);
}
Value rfind(Machine& m, const Value& self, const Given& given) {
  return place_of(m, self.text(), given.text(0), true);
}
Value index(Machine& m, const Value& self, const Given& given) {
  const std::int64_t at = place_of(m, self.text(), given.text(0), false);
  if (at < 0) m.fail("index: expected a string that is there, found none");
  return at;
}

Value count(Machine& m, const Value& self, const Given& given) {
  return static_cast<std::int64_t>(parts_of(m, self.text(), given.text(0), -1, false).size()) - 1;
}

Value join_with(Machine& m, const Value& self, const Given& given) {
  const std::vector<Value> items = m.elements(given.value(0));
  for (const Value& item : items) m.text(item, "join");
  return m.made(join(m, items, self.text()));
}

/// "{}", "{0}" and "{name}", without formats of numbers.
Value format(Machine& m, const Value& self, const Given& given) {
  const Text& text = self.text();
  const std::string_view view = text.view();
  Text out;
  std::size_t next = 0;
  for (std::size_t at = 0; at < view.size();) {
    const std::size_t brace = std::min(view.find_first_of("{}", at), view.size());
    out.append_part(text, at, brace);
    at = brace;
    if (at == view.size()) break;
    if (at + 1 < view.size() && view[at + 1] == view[at]) {
      out.append(view.substr(at, 1));
      at += 2;
      continue;
    }
    const std::size_t end = view.find('}', at);
    if (view[at] == '}' || end == view.npos) m.fail("format: expected braces in pairs, found one alone");
    const std::string name(view.substr(at + 1, end - at - 1));
    const bool number = name.size() < 6 && name.find_first_not_of("0123456789") == name.npos;
    const std::size_t place = name.empty() ? next++ : number ? std::stoul(name) : SIZE_MAX;
    const auto& values = given.rest().positional;
    const Value value = place < values.size() ? values[place] : given.named_or(name, Value::undefined(name));
    if (value.is(Kind::undefined))
      m.fail(fmt::format("format: expected a value for '{{{}}}', found none", name));
    const Text part = m.str(value);
    m.take(part.size());
    out.append(part);
    at = end + 1;
  }
  return m.made(std::move(out));
}

template <class F>
bool all_characters(Machine& m, const Text& text, F is) {
  m.spend_bytes(text.size());
  std::string_view rest = text.view();
  while (!rest.empty()) {
    const CodePoint c = first_code_point(rest);
    if (!is(utf8proc_category(static_cast<utf8proc_int32_t>(c.value)), c.value)) return false;
    rest.remove_prefix(c.bytes);
  }
  return !text.empty();
}

bool is_letter(utf8proc_category_t c) {
  return c == UTF8PROC_CATEGORY_LU || c == UTF8PROC_CATEGORY_LL || c == UTF8PROC_CATEGORY_LT ||
         c == UTF8PROC_CATEGORY_LM || c == UTF8PROC_CATEGORY_LO;
}

Value isdigit(Machine& m, const Value& self, const Given&) {
  return all_characters(m, self.text(),
                        [](utf8proc_category_t c, char32_t) { return c == UTF8PROC_CATEGORY_ND; });
}
Value isalpha(Machine& m, const Value& self, const Given&) {
  return all_characters(m, self.text(), [](utf8proc_category_t c, char32_t) { return is_letter(c); });
}
Value isalnum(Machine& m, const Value& self, const Given&) {
  return all_characters(m, self.text(), [](utf8proc_category_t c, char32_t) {
    return is_letter(c) || c == UTF8PROC_CATEGORY_ND;
  });
}
Value isspace(Machine& m, const Value& self, const Given&) {
  return !self.text().empty() &&
         without_leading_space((m.spend_bytes(self.text().size()), self.text().view())).empty();
}
Value isupper(Machine& m, const Value& self, const Given& given) {
  return changed<upper>(m, self, given).text().view() == self.text().view() &&
         lower(self.text().view()) != self.text().view();
}
Value islower(Machine& m, const Value& self, const Given& given) {
  return changed<lower>(m, self, given).text().view() == self.text().view() &&
         upper(self.text().view()) != self.text().view();
}

Value get(Machine& m, const Value& self, const Given& given) {
  m.spend(self.entries().entries.size() / 8 + 1);
  const Value* const found = self.entries().find(given.value(0));
  return found != nullptr ? *found : given.value_or(1, Value::none());
}
Value items(Machine& m, const Value& self, const Given&) {
  return m.filter("items", self, {});
}
Value keys(Machine& m, const Value& self, const Given&) {
  return m.made(m.elements(self));
}
Value values(Machine& m, const Value& self, const Given&) {
  std::vector<Value> all;
  for (const auto& [key, value] : self.entries().entries) all.push_back(value);
  return m.made(std::move(all));
}
Value copy(Machine&, const Value& self, const Given&) {
  return self;
}

Value list_index(Machine& m, const Value& self, const Given& given) {
  const auto& items = self.items().items;
  for (std::size_t i = 0; i < items.size(); ++i)
    if (m.same(items[i], given.value(0))) return static_cast<std::int64_t>(i);
  m.fail("index: expected an element that is there, found none");
}
Value list_count(Machine& m, const Value& self, const Given& given) {
  const auto& items = self.items().items;
  return static_cast<std::int64_t>(std::count_if(
      items.begin(), items.end(), [&](const Value& item) { return m.same(item, given.value(0)); }));
}
Value no_change(Machine& m, const Value&, const Given&) {
  m.fail("expected a template that changes no list or mapping, found one that does");
}

}  // namespace

std::span<const Native> string_methods() {
  static const std::array kMethods = {
      Native{"split", {"sep", "maxsplit"}, split},
      Native{"rsplit", {"sep", "maxsplit"}, rsplit},
      Native{"splitlines", {"keepends"}, splitlines},
      Native{"strip", {"chars"}, strip<true, true>},
      Native{"lstrip", {"chars"}, strip<true, false>},
      Native{"rstrip", {"chars"}, strip<false, true>},
      Native{"startswith", {"prefix"}, startswith},
      Native{"endswith", {"suffix"}, endswith},
      Native{"removeprefix", {"prefix"}, removeprefix},
      Native{"removesuffix", {"suffix"}, removesuffix},
      Native{"upper", {}, changed<upper>},
      Native{"lower", {}, changed<lower>},
      Native{"capitalize", {}, changed<capitalized>},
      Native{"title", {}, changed<titled>},
      Native{"swapcase", {}, changed<swapped>},
      Native{"replace", {"old", "new", "count"}, replace},
      Native{"find", {"sub"}, find},
      Native{"rfind", {"sub"}, rfind},
      Native{"index", {"sub"}, index},
      Native{"count", {"sub"}, count},
      Native{"join", {"iterable"}, join_with},
      Native{"format", {"..."}, format},
      Native{"isdigit", {}, isdigit},
      Native{"isnumeric", {}, isdigit},
      Native{"isdecimal", {}, isdigit},
      Native{"isalpha", {}, isalpha},
      Native{"isalnum", {}, isalnum},
      Native{"isspace", {}, isspace},
      Native{"isupper", {}, isupper},
      Native{"islower", {}, islower},
  };
  return kMethods;
}

std::span<const Native> list_methods() {
  static const std::array kMethods = {
      Native{"index", {"value"}, list_index},
      Native{"count", {"value"}, list_count},
      Native{"copy", {}, copy},
      Native{"append", {"..."}, no_change},
      Native{"extend", {"..."}, no_change},
      Native{"insert", {"..."}, no_change},
      Native{"pop", {"..."}, no_change},
      Native{"remove", {"..."}, no_change},
      Native{"reverse", {"..."}, no_change},
      Native{"sort", {"..."}, no_change},
  };
  return kMethods;
}

std::span<const Native> mapping_methods() {
  static const std::array kMethods = {
      Native{"get", {"key", "default"}, get},
      Native{"items", {}, items},
      Native{"keys", {}, keys},
      Native{"values", {}, values},
      Native{"copy", {}, copy},
      Native{"update", {"..."}, no_change},
      Native{"pop", {"..."}, no_change},
      Native{"setdefault", {"..."}, no_change},
  };
  return kMethods;
}

}  // namespace lode::jinja
