// SPDX-License-Identifier: Apache-2.0
// lodestone methods: which attention specs there are, with their keys, defaults and sources.
#include <fmt/format.h>

#include "cli.h"
#include "help.h"
#include "lodestone/spec.h"
#include "select/presets.h"

namespace lode::cli {

namespace {

struct MethodsFlags {
  CommonFlags common;
  std::vector<std::string> names;
};

Json json_of(const MethodInfo& method) {
  const Spec spec = {
      .name = method.name, .given = {}, .dense = method.dense, .dense_layers = method.dense_layers};
  Json keys = Json::array();
  for (const SpecKey& key : method.keys)
    keys.push_back({{"key", key.name}, {"meaning", key.meaning}, {"default", key.default_value}});
  Json presets = Json::object();
  for (const Preset& preset : presets_of(method.name))
    presets[std::string(preset.name)] = {{"keys", preset.keys}, {"note", preset.note}};
  Json json = {{"attention", method.name},
               {"aliases", method.aliases},
               {"source", method.source},
               {"trained", method.trained},
               {"keys", keys},
               {"presets", presets}};
  if (method.name != "full") {
    json["sink"] = spec.dense.sink;
    json["window"] = spec.dense.window;
    json["window_of_context"] = spec.dense.from_context;
    json["dense_layers"] = spec.dense_layers;
  }
  return json;
}

constexpr std::size_t kKeys = 23;  // columns before what a key means

std::string preset_text(const Preset& preset) {
  std::string text;
  for (const char c : preset.keys) text += c == ',' ? std::string(", ") : std::string(1, c);
  return fmt::format("{}: {}", text, preset.note);
}

std::string text_of(const MethodInfo& method) {
  std::string text = wrapped(fmt::format("{} - {}", method.name, method.source), 0) + "\n";
  for (const std::string& alias : method.aliases) text += fmt::format("  also called {}\n", alias);
  for (const SpecKey& key : method.keys) {
    const std::string standard =
        key.default_value.empty() ? "" : fmt::format(" [default: {}]", key.default_value);
    text += fmt::format("  {:20} {}\n", key.name, wrapped(key.meaning + standard, kKeys));
  }
  for (const Preset& preset : presets_of(method.name))
    text += fmt::format("  {:20} {}\n", fmt::format("preset={}", preset.name),
                        wrapped(preset_text(preset), kKeys));
  if (method.name != "full") {
    const std::string dense = fmt::format(
        "sink/window/dense_layers [default: {} / {}{} / {}]", method.dense.sink, method.dense.window,
        method.dense.from_context ? " of the context and all after it" : "", method.dense_layers);
    text += "  " + wrapped(dense, 2) + "\n";
  }
  return text;
}

void run(const MethodsFlags& flags) {
  std::vector<const MethodInfo*> shown;
  for (const std::string& name : flags.names) shown.push_back(&find_method(name));
  if (shown.empty())
    for (const MethodInfo& method : methods()) shown.push_back(&method);
  if (flags.common.json) {
    Json results = Json::array();
    for (const MethodInfo* method : shown) results.push_back(json_of(*method));
    return print_json({{"results", results}});
  }
  std::string text =
      wrapped(
          "Specs are name[:key=value,...]. Every method but full takes sink, window (first and last tokens "
          "that are always attended) and dense_layers (first layers left exact). A whole number is a count; "
          "a value with /, % or a point is a share of the far keys.",
          0) +
      "\n";
  for (const MethodInfo* method : shown) text += "\n" + text_of(*method);
  print_text(text);
}

}  // namespace

void add_methods(CLI::App& app) {
  auto flags = std::make_shared<MethodsFlags>();
  CLI::App& verb =
      *app.add_subcommand("methods", "List attention specs: keys, defaults and where they are from");
  add_common_flags(verb, flags->common);
  verb.add_option("NAME", flags->names, "methods to show; none: all");
  verb.callback([flags] { run(*flags); });
}

}  // namespace lode::cli
