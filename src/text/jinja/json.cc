// SPDX-License-Identifier: Apache-2.0
// The filter tojson, as transformers defines it: Python's json.dumps, by default without escapes for other alphabets.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "text/jinja/natives.h"
#include "text/utf8.h"

namespace lode::jinja {

namespace {

class JsonWriter {
 public:
  JsonWriter(Machine& machine, std::int64_t indent, bool sort_keys, bool ascii)
      : machine_(machine), indent_(indent), sort_keys_(sort_keys), ascii_(ascii) {}

  void write(const Value& value, int level);
  Text take() { return {std::move(out_), origin_}; }

 private:
  void put(std::string_view text) {
    machine_.take(text.size());
    out_ += text;
  }
  void put_string(const Text& text);
  void put_escaped(char32_t c);
  void put_break(int level);
  void put_list(const std::vector<Value>& items, int level);
  void put_mapping(const Value::Mapping& mapping, int level);
  static std::string number(const Value& value);

  Machine& machine_;
  std::int64_t indent_;
  bool sort_keys_, ascii_;
  std::string out_;
  Origin origin_ = 0;
};

void JsonWriter::put_escaped(char32_t c) {
  constexpr std::string_view kPlain = "\"\\\b\f\n\r\t", kNames = "\"\\bfnrt";
  if (const std::size_t at = c < 0x80 ? kPlain.find(static_cast<char>(c)) : kPlain.npos; at != kPlain.npos) {
    out_ += '\\';
    out_ += kNames[at];
  } else if (c >= 0x10000) {
    const auto rest = static_cast<std::uint32_t>(c) - 0x10000;
    out_ += fmt::format("\\u{:04x}\\u{:04x}", 0xd800 + (rest >> 10), 0xdc00 + (rest & 0x3ff));
  } else {
    out_ += fmt::format("\\u{:04x}", static_cast<std::uint32_t>(c));
  }
}

void JsonWriter::put_string(const Text& text) {
  if (origin_ == 0) origin_ = text.first_origin();
  machine_.spend_bytes(text.size());
  machine_.take(text.size() + 2);
  out_ += '"';
  for (std::string_view rest = text.view(); !rest.empty();) {
    const CodePoint c = first_code_point(rest);
    if (c.value < 0x20 || c.value == '"' || c.value == '\\' || (ascii_ && c.value >= 0x7f))
      put_escaped(c.value);
    else
      out_ += rest.substr(0, c.bytes);
    rest.remove_prefix(c.bytes);
  }
  out_ += '"';
}

void JsonWriter::put_break(int level) {
  if (indent_ < 0) return;
  machine_.take(static_cast<std::size_t>(indent_) * static_cast<std::size_t>(level) + 1);
  out_ += '\n';
  out_.append(static_cast<std::size_t>(indent_) * static_cast<std::size_t>(level), ' ');
}

void JsonWriter::put_list(const std::vector<Value>& items, int level) {
  if (items.empty()) return put("[]");
  put("[");
  for (std::size_t i = 0; i < items.size(); ++i) {
    if (i > 0) put(indent_ < 0 ? ", " : ",");
    put_break(level + 1);
    write(items[i], level + 1);
  }
  put_break(level);
  put("]");
}

void JsonWriter::put_mapping(const Value::Mapping& mapping, int level) {
  if (mapping.entries.empty()) return put("{}");
  std::vector<const Value::Entry*> entries;
  for (const Value::Entry& entry : mapping.entries) entries.push_back(&entry);
  if (sort_keys_)
    std::stable_sort(entries.begin(), entries.end(),
                     [&](const auto* a, const auto* b) { return machine_.less(a->first, b->first); });
  put("{");
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (i > 0) put(indent_ < 0 ? ", " : ",");
    put_break(level + 1);
    const Value& key = entries[i]->first;
    if (key.is(Kind::string))
      put_string(key.text());
    else if (key.is_number() || key.is(Kind::none))
      put("\"" + number(key) + "\"");
    else
      machine_.fail(fmt::format("tojson: expected a string as a key, found {}", key.type_name()));
    put(": ");
    write(entries[i]->second, level + 1);
  }
  put_break(level);
  put("}");
}

std::string JsonWriter::number(const Value& value) {
  if (value.is(Kind::none)) return "null";
  if (value.is(Kind::boolean)) return value.boolean() ? "true" : "false";
  if (value.is(Kind::integer)) return std::to_string(value.whole());
  const double x = value.number();
  return std::isnan(x) ? "NaN" : std::isinf(x) ? (x < 0 ? "-Infinity" : "Infinity") : real_text(x);
}

void JsonWriter::write(const Value& value, int level) {
  machine_.spend(1);
  if (value.is(Kind::string)) return put_string(value.text());
  if (value.is(Kind::list)) return put_list(value.items().items, level);
  if (value.is(Kind::mapping)) return put_mapping(value.entries(), level);
  if (value.is_number() || value.is(Kind::none)) return put(number(value));
  machine_.fail(fmt::format("tojson: expected a value that JSON has, found {}", value.type_name()));
}

}  // namespace

Text to_json(Machine& machine, const Value& value, std::int64_t indent, bool sort_keys, bool ascii) {
  JsonWriter writer(machine, std::min<std::int64_t>(indent, 1000), sort_keys, ascii);
  writer.write(value, 0);
  return writer.take();
}

}  // namespace lode::jinja
