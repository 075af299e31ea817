// SPDX-License-Identifier: Apache-2.0
#include "text/jinja/value.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <cmath>

#include "lodestone/error.h"
#include "text/utf8.h"

namespace lode::jinja {

namespace {

int checked_depth(int inner) {
  if (inner >= Value::kDeepest)
    throw InputError(
        fmt::format("expected at most {} lists or mappings in one another, found more", Value::kDeepest));
  return inner + 1;
}

constexpr std::size_t kOwnWeight = 16;

std::size_t sum_of(std::size_t a, std::size_t b) {
  return std::min<std::size_t>(a + b, SIZE_MAX / 4);
}

bool printable(char32_t c) {
  if (c == ' ') return true;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_ZS:
      return false;
    default:
      return true;
  }
}

std::string escaped(char32_t c) {
  if (c == '\n') return "\\n";
  if (c == '\r') return "\\r";
  if (c == '\t') return "\\t";
  if (c == '\\') return "\\\\";
  const auto code = static_cast<std::uint32_t>(c);
  if (code < 0x100) return fmt::format("\\x{:02x}", code);
  return code < 0x10000 ? fmt::format("\\u{:04x}", code) : fmt::format("\\U{:08x}", code);
}

/// A string as Python writes it in a program.
std::string quoted(std::string_view text) {
  const bool single = text.find('\'') != text.npos, twofold = text.find('"') != text.npos;
  const char quote = single && !twofold ? '"' : '\'';
  std::string result(1, quote);
  while (!text.empty()) {
    const CodePoint c = first_code_point(text);
    if (c.value == static_cast<char32_t>(quote)) result += '\\';
    if (c.value == '\\' || !printable(c.value))
      result += escaped(c.value);
    else
      result += text.substr(0, c.bytes);
    text.remove_prefix(c.bytes);
  }
  return result + quote;
}

void append_items(Text& out, const Value::List& list) {
  out.append(list.tuple ? "(" : "[");
  for (std::size_t i = 0; i < list.items.size(); ++i) {
    if (i > 0) out.append(", ");
    append_repr(out, list.items[i]);
  }
  if (list.tuple && list.items.size() == 1) out.append(",");
  out.append(list.tuple ? ")" : "]");
}

void append_entries(Text& out, const Value::Mapping& mapping) {
  out.append("{");
  for (std::size_t i = 0; i < mapping.entries.size(); ++i) {
    if (i > 0) out.append(", ");
    append_repr(out, mapping.entries[i].first);
    out.append(": ");
    append_repr(out, mapping.entries[i].second);
  }
  out.append("}");
}

bool same_items(const Value::List& a, const Value::List& b) {
  return a.tuple == b.tuple &&
         std::equal(a.items.begin(), a.items.end(), b.items.begin(), b.items.end(), equal);
}

bool same_entries(const Value::Mapping& a, const Value::Mapping& b) {
  return a.entries.size() == b.entries.size() &&
         std::all_of(a.entries.begin(), a.entries.end(), [&](const Value::Entry& entry) {
           const Value* other = b.find(entry.first);
           return other != nullptr && equal(entry.second, *other);
         });
}

}  // namespace

std::optional<Value> Object::attribute(std::string_view) const {
  return std::nullopt;
}
Value Object::call(Machine&, Arguments) {
  throw InputError("expected something that can be called, found " + name());
}

const Value* Value::Mapping::find(const Value& key) const {
  if (key.is(Kind::string)) return find_name(key.text().view());
  if (key.is(Kind::list) || key.is(Kind::mapping)) return nullptr;
  const auto at =
      std::find_if(entries.begin(), entries.end(), [&](const Entry& e) { return equal(e.first, key); });
  return at == entries.end() ? nullptr : &at->second;
}

const Value* Value::Mapping::find_name(std::string_view key) const {
  const auto at = std::find_if(entries.begin(), entries.end(), [&](const Entry& e) {
    return e.first.is(Kind::string) && e.first.text().view() == key;
  });
  return at == entries.end() ? nullptr : &at->second;
}

Value Value::undefined(std::string what) {
  Value value;
  std::get<0>(value.data_).what = std::move(what);
  return value;
}

Value Value::none() {
  Value value;
  value.data_.emplace<1>();
  return value;
}

Value::Value(Text text) : data_(std::make_shared<const Text>(std::move(text))) {}

Value Value::list(std::vector<Value> items, bool tuple) {
  int inner = 0;
  std::size_t weight = kOwnWeight;
  for (const Value& item : items) {
    inner = std::max(inner, item.depth());
    weight = sum_of(weight, item.weight());
  }
  Value value;
  value.data_ = std::shared_ptr<const List>(new List{std::move(items), tuple, checked_depth(inner), weight});
  return value;
}

Value Value::mapping(std::vector<Entry> entries) {
  int inner = 0;
  std::size_t weight = kOwnWeight + entries.size() * entries.size();  // keys are looked for one by one
  for (const auto& [key, item] : entries) {
    inner = std::max({inner, key.depth(), item.depth()});
    weight = sum_of(sum_of(weight, key.weight()), item.weight());
  }
  Value value;
  value.data_ = std::shared_ptr<const Mapping>(new Mapping{std::move(entries), checked_depth(inner), weight});
  return value;
}

Value Value::of(const OrderedJson& json, Origin origin) {
  if (json.is_null()) return none();
  if (json.is_boolean()) return json.get<bool>();
  if (json.is_number_unsigned() && json.get<std::uint64_t>() > INT64_MAX) return json.get<double>();
  if (json.is_number_integer()) return json.get<std::int64_t>();
  if (json.is_number_float()) return json.get<double>();
  if (json.is_string()) return Text(json.get<std::string>(), origin);
  if (json.is_array()) {
    std::vector<Value> items;
    for (const OrderedJson& item : json) items.push_back(of(item, origin));
    return list(std::move(items));
  }
  std::vector<Entry> entries;
  for (const auto& [key, item] : json.items()) entries.emplace_back(Text(key, origin), of(item, origin));
  return mapping(std::move(entries));
}

std::int64_t Value::whole() const {
  return is(Kind::boolean) ? std::int64_t{boolean()} : std::get<std::int64_t>(data_);
}

double Value::number() const {
  return is(Kind::real) ? std::get<double>(data_) : static_cast<double>(whole());
}

bool Value::truthy() const {
  switch (kind()) {
    case Kind::undefined:
    case Kind::none:
      return false;
    case Kind::boolean:
    case Kind::integer:
    case Kind::real:
      return number() != 0;
    case Kind::string:
      return !text().empty();
    case Kind::list:
      return !items().items.empty();
    case Kind::mapping:
      return !entries().entries.empty();
    case Kind::object:
      break;
  }
  return true;
}

int Value::depth() const {
  return is(Kind::list) ? items().depth : is(Kind::mapping) ? entries().depth : 0;
}

std::size_t Value::weight() const {
  if (is(Kind::string)) return kOwnWeight + text().size();
  return is(Kind::list) ? items().weight : is(Kind::mapping) ? entries().weight : kOwnWeight;
}

std::string_view Value::type_name() const {
  switch (kind()) {
    case Kind::undefined:
      return "something undefined";
    case Kind::none:
      return "none";
    case Kind::boolean:
      return "a boolean";
    case Kind::integer:
      return "a whole number";
    case Kind::real:
      return "a number";
    case Kind::string:
      return "a string";
    case Kind::list:
      return "a list";
    case Kind::mapping:
      return "a mapping";
    case Kind::object:
      break;
  }
  return "a function or an object";
}

bool equal(const Value& a, const Value& b) {
  if (a.is_number() && b.is_number())
    return a.is_whole() && b.is_whole() ? a.whole() == b.whole() : a.number() == b.number();
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::string:
      return a.text().view() == b.text().view();
    case Kind::list:
      return same_items(a.items(), b.items());
    case Kind::mapping:
      return same_entries(a.entries(), b.entries());
    case Kind::object:
      return &a.object() == &b.object();
    default:
      return true;  // none, undefined
  }
}

std::string real_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  // The shortest digits that give this number, with the point where Python puts it.
  const std::string scientific = fmt::format("{:e}", value), shortest = fmt::format("{}", value);
  const int exponent = value == 0 ? 0 : std::stoi(scientific.substr(scientific.find('e') + 1));
  if (exponent < -4 || exponent >= 16) return shortest;
  return shortest.find_first_of(".e") == shortest.npos ? shortest + ".0" : shortest;
}

Text str(const Value& value) {
  if (value.is(Kind::undefined)) return {};
  if (value.is(Kind::string)) return value.text();
  Text out;
  append_repr(out, value);
  return out;
}

void append_repr(Text& out, const Value& value) {
  switch (value.kind()) {
    case Kind::undefined:
      return out.append("Undefined");
    case Kind::none:
      return out.append("None");
    case Kind::boolean:
      return out.append(value.boolean() ? "True" : "False");
    case Kind::integer:
      return out.append(std::to_string(value.whole()));
    case Kind::real:
      return out.append(real_text(value.number()));
    case Kind::string:
      return out.append(value.text().rewritten(quoted(value.text().view())));
    case Kind::list:
      return append_items(out, value.items());
    case Kind::mapping:
      return append_entries(out, value.entries());
    case Kind::object:
      return out.append("<" + value.object().name() + ">");
  }
}

}  // namespace lode::jinja
