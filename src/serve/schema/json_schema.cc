// SPDX-License-Identifier: Apache-2.0
#include "serve/schema/json_schema.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "base/text.h"
#include "serve/backend.h"

namespace lode::serve {

namespace {

using Ordered = nlohmann::ordered_json;  // properties come in the order in which the schema has them
using Rule = Grammar::Rule;
using Sequence = Grammar::Sequence;

constexpr int kMostIndent = 16, kMostDigits = 15, kMostRepeats = 1024, kDeepest = 128;
constexpr std::size_t kMostElements = 200'000, kMostProperties = 256, kMostChoices = 1024;

[[noreturn]] void refuse(const std::string& where, const std::string& what) {
  throw ApiError(400, fmt::format("the schema{}: {}", excerpt(where, 120), what));
}

Sequence operator+(Sequence a, const Sequence& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class Compiler {
 public:
  Compiler(SchemaGrammar& out, const Ordered& root) : out_(out), g_(out.grammar), root_(root) {
    const Rule indent = g_.repeat({Grammar::any_of(" ")}, 0, kMostIndent);
    blank_ = g_.choice({{}, Grammar::literal(" "), {Grammar::any_of("\n"), Grammar::of(indent)}});
    make_string_character();
  }

  void compile() {
    const Rule value = rule_of(root_, "");
    // Models often begin an answer with a blank.
    out_.start = g_.choice({{Grammar::of(value)}, {Grammar::any_of(" "), Grammar::of(value)}});
    if (!g_.can_end(out_.start))
      refuse("", "expected one that some text meets, found a $ref that never ends");
  }
  void compile_object() {
    out_.start = g_.choice({{Grammar::of(any_object())}, {Grammar::any_of(" "), Grammar::of(any_object())}});
  }

 private:
  Sequence ref(Rule rule) const { return {Grammar::of(rule)}; }
  Sequence blank() const { return ref(blank_); }
  /// Of a text that the schema holds, which may be a long one.
  Sequence literal(const std::string& text, const std::string& where) const {
    if (g_.size() + text.size() > kMostElements) refuse(where, "expected a smaller schema");
    return Grammar::literal(text);
  }

  /// Well-formed UTF-8 without control characters, quotes and backslashes, or an escape.
  void make_string_character() {
    const auto range = [](int first, int last) {
      return Grammar::between(static_cast<unsigned char>(first), static_cast<unsigned char>(last));
    };
    const Grammar::Element more = range(0x80, 0xbf), hex = Grammar::any_of("0123456789abcdefABCDEF");
    Grammar::Element plain = range(0x20, 0x7e);
    plain.bytes.reset('"').reset('\\');
    const Grammar::Element backslash = Grammar::any_of("\\");
    // \u of halves of pairs is left out: characters beyond 16 bits are written as they are.
    character_ = g_.choice(
        {{plain},
         {backslash, Grammar::any_of("\"\\/bfnrt")},
         {backslash, Grammar::any_of("u"), Grammar::any_of("0123456789abcefABCEF"), hex, hex, hex},
         {backslash, Grammar::any_of("u"), Grammar::any_of("dD"), Grammar::any_of("01234567"), hex, hex},
         {range(0xc2, 0xdf), more},
         {range(0xe0, 0xe0), range(0xa0, 0xbf), more},
         {range(0xe1, 0xec), more, more},
         {range(0xed, 0xed), range(0x80, 0x9f), more},
         {range(0xee, 0xef), more, more},
         {range(0xf0, 0xf0), range(0x90, 0xbf), more, more},
         {range(0xf1, 0xf3), more, more, more},
         {range(0xf4, 0xf4), range(0x80, 0x8f), more, more}});
  }

  Rule string(int least, int most) {
    const Rule inside = g_.repeat(ref(character_), least, most);
    return g_.choice({Grammar::literal("\"") + ref(inside) + Grammar::literal("\"")});
  }

  Rule number(bool whole) {
    const Sequence digit = {Grammar::between('0', '9')};
    const Rule more = g_.repeat(digit, 0, kMostDigits - 1), fraction = g_.repeat(digit, 1, kMostDigits);
    const Rule magnitude =
        g_.choice({Grammar::literal("0"), Sequence{Grammar::between('1', '9'), Grammar::of(more)}});
    const Rule sign = g_.optional(Grammar::literal("-"));
    if (whole) return g_.choice({ref(sign) + ref(magnitude)});
    const Rule point = g_.optional(Grammar::literal(".") + ref(fraction));
    const Rule exponent_sign = g_.optional({Grammar::any_of("+-")});
    const Rule exponent = g_.optional(Sequence{Grammar::any_of("eE"), Grammar::of(exponent_sign)} +
                                      ref(g_.repeat(digit, 1, 2)));
    return g_.choice({ref(sign) + ref(magnitude) + ref(point) + ref(exponent)});
  }

  /// "open item, item close" with blanks, or nothing between the brackets where `least` is 0.
  Rule list(char open, const Sequence& item, char close, int least, int most) {
    const Sequence first = blank() + item;
    const Rule rest =
        g_.repeat(Grammar::literal(",") + blank() + item, std::max(0, least - 1), most < 0 ? -1 : most - 1);
    const Sequence begin = Grammar::literal({&open, 1}), end = Grammar::literal({&close, 1});
    const Rule whole = g_.declare();
    if (most != 0) g_.add(whole, begin + first + ref(rest) + blank() + end);
    if (least == 0) g_.add(whole, begin + blank() + end);
    return whole;
  }

  Rule any_value() {
    if (any_ != kNone) return any_;
    any_ = g_.declare();
    for (const Rule one : {string(0, -1), number(false), any_object(), list('[', ref(any_), ']', 0, -1)})
      g_.add(any_, ref(one));
    for (const char* word : {"true", "false", "null"}) g_.add(any_, Grammar::literal(word));
    return any_;
  }
  Rule any_object() {
    if (object_ != kNone) return object_;
    object_ = g_.declare();
    const Sequence member = ref(string(0, -1)) + Grammar::literal(":") + blank() + ref(any_value());
    g_.add(object_, ref(list('{', member, '}', 0, -1)));
    return object_;
  }

  static int bound(const Ordered& schema, const char* key, int fallback, const std::string& where) {
    if (!schema.contains(key)) return fallback;
    const Ordered& value = schema[key];
    if (!value.is_number_integer() || value.get<std::int64_t>() < 0 ||
        value.get<std::int64_t>() > kMostRepeats)
      refuse(where + "." + key, fmt::format("expected a whole number from 0 to {}", kMostRepeats));
    return static_cast<int>(value.get<std::int64_t>());
  }

  static void expect_known(const Ordered& schema, const std::string& where) {
    static constexpr std::string_view kKnown[] = {
        "type",      "properties",  "required", "additionalProperties",
        "items",     "minItems",    "maxItems", "minLength",
        "maxLength", "enum",        "const",    "anyOf",
        "oneOf",     "$ref",        "$defs",    "definitions",
        "title",     "description", "default",  "examples",
        "$schema",   "$id",         "$comment", "strict"};
    for (const auto& [key, value] : schema.items())
      if (std::find(std::begin(kKnown), std::end(kKnown), key) == std::end(kKnown))
        refuse(where, fmt::format("the keyword '{}' is not supported", excerpt(key, 40)));
  }

  Rule rule_of(const Ordered& schema, const std::string& where) {
    if (g_.size() > kMostElements) refuse(where, "expected a smaller schema");
    if (depth_ == kDeepest)
      refuse(where, fmt::format("expected schemas at most {} deep in each other", kDeepest));
    ++depth_;
    const Rule rule = rule_of_one(schema, where);
    --depth_;
    return rule;
  }

  Rule rule_of_one(const Ordered& schema, const std::string& where) {
    if (schema.is_boolean() && schema.get<bool>()) return any_value();
    if (!schema.is_object()) refuse(where, "expected an object");
    expect_known(schema, where);
    expect_alone(schema, where);
    if (schema.contains("$ref")) return referred(schema["$ref"], where);
    for (const char* key : {"anyOf", "oneOf"})
      if (schema.contains(key)) return any_of(schema[key], where + "." + key);
    if (schema.contains("const"))
      return enumerated(schema, Ordered::array({schema["const"]}), where + ".const");
    if (schema.contains("enum")) return enumerated(schema, schema["enum"], where + ".enum");
    if (schema.contains("type") && schema["type"].is_array()) {
      if (schema["type"].size() > kMostChoices) refuse(where + ".type", "expected each type once");
      std::vector<Sequence> choices;
      for (const Ordered& type : schema["type"]) choices.push_back(ref(typed(schema, type, where)));
      if (choices.empty()) refuse(where + ".type", "expected a type, found none");
      return g_.choice(choices);
    }
    if (schema.contains("type")) return typed(schema, schema["type"], where);
    // What constrains values of one type alone is kept to by a value of that type.
    if (has_any(schema, {"properties", "required", "additionalProperties"})) return object(schema, where);
    if (has_any(schema, {"items", "minItems", "maxItems"})) return array(schema, where);
    if (has_any(schema, {"minLength", "maxLength"})) return typed(schema, "string", where);
    return any_value();
  }

  static bool has_any(const Ordered& schema, std::initializer_list<const char*> keys) {
    return std::any_of(keys.begin(), keys.end(), [&](const char* key) { return schema.contains(key); });
  }

  /// Keywords that say the whole of a schema stand in it alone: others beside them would not be kept to.
  static void expect_alone(const Ordered& schema, const std::string& where) {
    for (const std::string whole : {"$ref", "anyOf", "oneOf", "const", "enum"}) {
      if (!schema.contains(whole)) continue;
      for (const std::string other :
           {"$ref", "anyOf", "oneOf", "const", "enum", "type", "properties", "required",
            "additionalProperties", "items", "minItems", "maxItems", "minLength", "maxLength"}) {
        const bool both_kept = other == "type" && (whole == "const" || whole == "enum");
        if (other != whole && !both_kept && schema.contains(other))
          refuse(where, fmt::format("expected '{}' without '{}' beside it", whole, other));
      }
    }
  }

  Rule typed(const Ordered& schema, const Ordered& type, const std::string& where) {
    if (type == "object") return object(schema, where);
    if (type == "array") return array(schema, where);
    if (type == "string") {
      const int least = bound(schema, "minLength", 0, where), most = bound(schema, "maxLength", -1, where);
      if (most >= 0 && most < least) refuse(where, "expected maxLength of at least minLength");
      return string(least, most);
    }
    if (type == "number" || type == "integer") return number(type == "integer");
    if (type == "boolean") return g_.choice({Grammar::literal("true"), Grammar::literal("false")});
    if (type == "null") return g_.choice({Grammar::literal("null")});
    refuse_type(where);
  }
  [[noreturn]] static void refuse_type(const std::string& where) {
    refuse(where + ".type", "expected string, number, integer, boolean, null, object or array");
  }

  static bool is_of(const Ordered& value, const Ordered& type, const std::string& where) {
    if (type.is_array())
      return std::any_of(type.begin(), type.end(),
                         [&](const Ordered& one) { return is_of(value, one, where); });
    if (type == "object") return value.is_object();
    if (type == "array") return value.is_array();
    if (type == "string") return value.is_string();
    if (type == "number") return value.is_number();
    if (type == "integer") return value.is_number_integer();
    if (type == "boolean") return value.is_boolean();
    if (type == "null") return value.is_null();
    refuse_type(where);
  }

  Rule any_of(const Ordered& list, const std::string& where) {
    if (!list.is_array() || list.empty() || list.size() > kMostChoices)
      refuse(where, "expected a list of schemas");
    std::vector<Sequence> choices;
    for (std::size_t i = 0; i < list.size(); ++i)
      choices.push_back(ref(rule_of(list[i], fmt::format("{}[{}]", where, i))));
    return g_.choice(choices);
  }

  /// Those of the values that are of the schema's type, if it names one.
  Rule enumerated(const Ordered& schema, const Ordered& list, const std::string& where) {
    if (!list.is_array() || list.empty() || list.size() > kMostChoices)
      refuse(where, "expected a list of values");
    const Rule rule = g_.declare();
    bool any = false;
    for (const Ordered& value : list) {
      if (schema.contains("type") && !is_of(value, schema["type"], where)) continue;
      g_.add(rule, literal(value.dump(), where));
      any = true;
    }
    if (!any) refuse(where, "expected a value of its type, found none");
    return rule;
  }

  Rule array(const Ordered& schema, const std::string& where) {
    const int least = bound(schema, "minItems", 0, where), most = bound(schema, "maxItems", -1, where);
    if (most >= 0 && most < least) refuse(where, "expected maxItems of at least minItems");
    const Rule item = schema.contains("items") ? rule_of(schema["items"], where + ".items") : any_value();
    return list('[', ref(item), ']', least, most);
  }

  /// Properties in their order; those that are not required may be missing.
  Rule object(const Ordered& schema, const std::string& where) {
    const std::vector<std::string> required = required_of(schema, where);
    if (!schema.contains("properties") || schema["properties"] == Ordered::object())
      return is_open(schema, where) ? any_object()
                                    : g_.choice({Grammar::literal("{") + blank() + Grammar::literal("}")});
    const Ordered& properties = schema["properties"];
    if (!properties.is_object() || properties.size() > kMostProperties)
      refuse(where + ".properties", fmt::format("expected an object of at most {} members", kMostProperties));
    // From the last property on: what may follow when some came before (a comma first), and when none did.
    Rule with_comma = g_.choice({{}}), without = with_comma;
    std::vector<std::pair<std::string, const Ordered*>> all;
    for (const auto& [name, value] : properties.items()) all.emplace_back(name, &value);
    for (auto at = all.rbegin(); at != all.rend(); ++at) {
      const Sequence key = literal(Ordered(at->first).dump() + ":", where + ".properties");
      const Sequence member =
          blank() + key + blank() + ref(rule_of(*at->second, where + ".properties." + at->first));
      const bool needed = std::find(required.begin(), required.end(), at->first) != required.end();
      const Rule comma_here = g_.choice({Grammar::literal(",") + member + ref(with_comma)});
      const Rule first_here = g_.choice({member + ref(with_comma)});
      if (!needed) {
        g_.add(comma_here, ref(with_comma));
        g_.add(first_here, ref(without));
      }
      with_comma = comma_here;
      without = first_here;
    }
    return g_.choice({Grammar::literal("{") + ref(without) + blank() + Grammar::literal("}")});
  }

  /// Whether an object without properties may have any members.
  static bool is_open(const Ordered& schema, const std::string& where) {
    if (!schema.contains("additionalProperties")) return true;
    const Ordered& additional = schema["additionalProperties"];
    if (!additional.is_boolean() && additional != Ordered::object())
      refuse(where + ".additionalProperties", "expected true or false");
    return additional != false;
  }

  static std::vector<std::string> required_of(const Ordered& schema, const std::string& where) {
    std::vector<std::string> required;
    if (!schema.contains("required")) return required;
    if (!schema["required"].is_array() || schema["required"].size() > kMostProperties)
      refuse(where + ".required", fmt::format("expected a list of at most {} names", kMostProperties));
    const bool any = schema.contains("properties") && schema["properties"].is_object();
    for (const Ordered& name : schema["required"]) {
      if (!name.is_string() || !any || !schema["properties"].contains(name.get<std::string>()))
        refuse(where + ".required", "expected names of properties");
      required.push_back(name.get<std::string>());
    }
    return required;
  }

  Rule referred(const Ordered& reference, const std::string& where) {
    if (!reference.is_string()) refuse(where + ".$ref", "expected a string");
    const auto path = reference.get<std::string>();
    const auto [at, fresh] = references_.try_emplace(path, kNone);
    if (!fresh) return at->second;
    const Rule rule = at->second = g_.declare();
    const Ordered* target = path == "#" ? &root_ : nullptr;
    for (const char* holder : {"$defs", "definitions"}) {
      const std::string prefix = fmt::format("#/{}/", holder);
      if (!path.starts_with(prefix) || !root_.contains(holder) || !root_[holder].is_object()) continue;
      const auto found = root_[holder].find(path.substr(prefix.size()));
      if (found != root_[holder].end()) target = &*found;
    }
    if (target == nullptr)
      refuse(where + ".$ref", fmt::format("there is nothing at '{}'", excerpt(path, 60)));
    if (target->is_object() && target->contains("$ref"))
      refuse(where + ".$ref", "expected a schema behind it, found another $ref");
    g_.add(rule, ref(rule_of(*target, path)));
    return rule;
  }

  static constexpr Rule kNone = static_cast<Rule>(-1);
  SchemaGrammar& out_;
  Grammar& g_;
  const Ordered& root_;
  std::map<std::string, Rule> references_;
  Rule blank_ = 0, character_ = 0, any_ = kNone, object_ = kNone;
  int depth_ = 0;  ///< of schemas that are being compiled, in each other
};

}  // namespace

SchemaGrammar grammar_of_schema(std::string_view schema) {
  SchemaGrammar result;
  const Ordered root = Ordered::parse(schema);
  Compiler(result, root).compile();
  return result;
}

SchemaGrammar grammar_of_object() {
  SchemaGrammar result;
  const Ordered none;
  Compiler(result, none).compile_object();
  return result;
}

}  // namespace lode::serve
