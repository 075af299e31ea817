// SPDX-License-Identifier: Apache-2.0
// What filters and methods of strings share.
#include <fmt/format.h>
#include <string.h>
#include <utf8proc.h>

#include <algorithm>
#include <cmath>

#include "text/jinja/lexer.h"
#include "text/jinja/natives.h"
#include "text/utf8.h"

namespace lode::jinja {

namespace {

template <class F>
std::string mapped(std::string_view text, F change) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const CodePoint c = first_code_point(text);
    change(c.value, result);
    text.remove_prefix(c.bytes);
  }
  return result;
}

/// Upper case by character; of those that become several, the one that German has.
void append_upper(char32_t c, std::string& out) {
  if (c == 0xdf)
    out += "SS";
  else
    append_utf8(out, static_cast<char32_t>(utf8proc_toupper(static_cast<utf8proc_int32_t>(c))));
}

void append_lower(char32_t c, std::string& out) {
  append_utf8(out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(c))));
}

bool holds(std::string_view characters, char32_t c) {
  while (!characters.empty()) {
    const CodePoint one = first_code_point(characters);
    if (one.value == c) return true;
    characters.remove_prefix(one.bytes);
  }
  return false;
}

/// One %-directive's value.
Text directive(Machine& machine, char kind, std::string_view flags, const Value& value) {
  const std::string format(flags);
  if (kind == 's' && !format.empty()) machine.fail("expected %s without a width, found one");
  if (kind == 's') return machine.str(value);
  Text out;
  if (kind == 'r') {
    machine.take(value.weight());
    append_repr(out, value);
    return out;
  }
  if (!value.is_number())
    machine.fail(fmt::format("expected a number for %{}, found {}", kind, value.type_name()));
  try {
    const bool whole = kind == 'd' || kind == 'i' || kind == 'x';
    if (!whole) return Text(fmt::format(fmt::runtime("{:" + format + kind + "}"), value.number()));
    const Value number = machine.filter("int", value, {});
    return Text(fmt::format(fmt::runtime("{:" + format + (kind == 'x' ? "x" : "d") + "}"), number.whole()));
  } catch (const fmt::format_error&) {
    machine.fail("expected a width and a precision between % and the letter of a format, found '" + format +
                 "'");
  }
}

}  // namespace

std::vector<std::size_t> character_ends(Machine& machine, const Text& text) {
  machine.spend_bytes(text.size());
  machine.take(text.size() * sizeof(std::size_t));
  std::vector<std::size_t> ends = {0};
  for (std::size_t i = 1; i <= text.size(); ++i)
    if (i == text.size() || (static_cast<unsigned char>(text.view()[i]) & 0xc0) != 0x80) ends.push_back(i);
  return ends;
}

std::size_t find_text(std::string_view text, std::string_view word, std::size_t from) {
  if (from > text.size()) return std::string_view::npos;
  if (word.empty()) return from;
  const void* const at = memmem(text.data() + from, text.size() - from, word.data(), word.size());
  return at == nullptr ? std::string_view::npos
                       : static_cast<std::size_t>(static_cast<const char*>(at) - text.data());
}

std::string upper(std::string_view text) {
  return mapped(text, append_upper);
}
std::string lower(std::string_view text) {
  return mapped(text, append_lower);
}
std::string capitalized(std::string_view text) {
  if (text.empty()) return "";
  const std::size_t first = first_code_point(text).bytes;
  return upper(text.substr(0, first)) + lower(text.substr(first));
}

Text stripped(const Text& text, const Text* characters, bool left, bool right) {
  std::string_view view = text.view();
  std::size_t begin = 0;
  if (characters == nullptr) {
    if (right) view = without_trailing_space(view);
    if (left) begin = view.size() - without_leading_space(view).size();
    return text.part(begin, view.size());
  }
  while (left && begin < view.size() && holds(characters->view(), first_code_point(view.substr(begin)).value))
    begin += first_code_point(view.substr(begin)).bytes;
  while (right && view.size() > begin && holds(characters->view(), last_code_point(view).value))
    view.remove_suffix(last_code_point(view).bytes);
  return text.part(begin, view.size());
}

Text join(Machine& machine, const std::vector<Value>& items, const Text& between) {
  Text out;
  for (std::size_t i = 0; i < items.size(); ++i) {
    const Text part = machine.str(items[i]);
    machine.take(part.size() + between.size());
    if (i > 0) out.append(between);
    out.append(part);
  }
  return out;
}

Text replaced(Machine& machine, const Text& text, const Text& old, const Text& fresh, std::int64_t most) {
  machine.spend_bytes(text.size() + old.size());
  Text out;
  std::size_t done = 0;
  const auto put = [&](std::size_t end) {
    machine.take(end - done + fresh.size());
    machine.spend(1);
    out.append_part(text, done, end);
    out.append(fresh);
    done = end + old.size();
  };
  if (old.empty()) {  // Python puts it around every character
    const std::vector<std::size_t> ends = character_ends(machine, text);
    for (std::size_t i = 0; i < ends.size() && most != 0; ++i, --most) put(ends[i]);
  } else {
    for (std::size_t at; most != 0 && (at = find_text(text.view(), old.view(), done)) != std::string::npos;
         --most)
      put(at);
  }
  machine.take(text.size() - done);
  out.append_part(text, done, text.size());
  return out;
}

Text formatted(Machine& machine, const Text& format, const Value& values) {
  const bool several = values.is(Kind::list) && values.items().tuple;
  const std::vector<Value> given = several ? values.items().items : std::vector<Value>{values};
  const std::string_view view = format.view();
  Text out;
  std::size_t next = 0, done = 0;
  for (std::size_t at; (at = view.find('%', done)) != view.npos;) {
    out.append_part(format, done, at);
    std::size_t end = at + 1;
    while (end < view.size() && std::string_view("0123456789.").find(view[end]) != view.npos) ++end;
    if (end == view.size() || std::string_view("%sdirxfeg").find(view[end]) == view.npos)
      machine.fail("expected one of %s, %d, %i, %r, %x, %f, %e, %g and %% in a format, found another");
    if (end - at > 6) machine.fail("expected a width of at most five digits in a format, found more");
    if (view[end] == '%') {
      out.append("%");
    } else {
      if (next == given.size())
        machine.fail(fmt::format("expected a value for each % of a format, found {}", given.size()));
      const Text part = directive(machine, view[end], view.substr(at + 1, end - at - 1), given[next++]);
      machine.take(part.size());
      out.append(part);
    }
    done = end + 1;
  }
  if (several && next != given.size())
    machine.fail(fmt::format("expected {} values for a format, found {}", next, given.size()));
  out.append_part(format, done, format.size());
  return out;
}

std::size_t length_of(Machine& machine, const Value& value) {
  switch (value.kind()) {
    case Kind::undefined:
      return 0;
    case Kind::string:
      machine.spend_bytes(value.text().size());
      return static_cast<std::size_t>(
          std::count_if(value.text().view().begin(), value.text().view().end(),
                        [](char c) { return (static_cast<unsigned char>(c) & 0xc0) != 0x80; }));
    case Kind::list:
      return value.items().items.size();
    case Kind::mapping:
      return value.entries().entries.size();
    default:
      machine.fail(fmt::format("expected something that has a length, found {}", value.type_name()));
  }
}

}  // namespace lode::jinja
