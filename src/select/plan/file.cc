// SPDX-License-Identifier: Apache-2.0
#include "select/plan/file.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/file.h"
#include "base/json.h"
#include "lodestone/error.h"
#include "lodestone/spec.h"

namespace lode {

namespace {

constexpr std::int64_t kVersion = 1;
constexpr std::size_t kMaxLayers = 1024, kMaxHeads = 1024;
constexpr std::size_t kMaxBytes = 64 << 20;

std::vector<std::string> head_specs(const Json& layer, const std::string& where) {
  if (!layer.is_array() || layer.empty() || layer.size() > kMaxHeads) {
    throw InputError(fmt::format("{}: expected a list of 1 to {} specs, found {}", where, kMaxHeads,
                                 layer.is_array() ? std::to_string(layer.size()) : layer.type_name()));
  }
  std::vector<std::string> specs;
  for (const Json& text : layer) {
    if (!text.is_string())
      throw InputError(fmt::format("{}: expected specs as text, found {}", where, text.type_name()));
    specs.push_back(text.get<std::string>());
    // Before it is parsed: to parse a plan is to read its file, which may be this one.
    if (const std::string& spec = specs.back(); spec.substr(0, spec.find(':')) == "plan")
      throw InputError(fmt::format("{}: expected a method, found a plan inside the plan", where));
    parse_spec(specs.back());
  }
  return specs;
}

}  // namespace

Plan read_plan(const std::filesystem::path& path) {
  const std::string where = path.string();
  const Json json = parse_json(read_file(path, kMaxBytes), where);
  json_int(json, "lodestone_plan", where, kVersion, kVersion);
  Plan plan = {.model_fingerprint = json_string(json, "model_fingerprint", where),
               .note = json_has(json, "note") ? json_string(json, "note", where) : "",
               .chosen_on = json_has(json, "chosen_on") ? json_member(json, "chosen_on").dump() : "",
               .dense = {.sink = json_int(json, "sink", where, 0, 1 << 30),
                         .window = json_int(json, "window", where, 1, 1 << 30)},
               .heads = {}};
  const Json& layers = json_member(json, "layers");
  if (!layers.is_array() || layers.empty() || layers.size() > kMaxLayers)
    throw InputError(fmt::format("{}: 'layers': expected a list of 1 to {} layers", where, kMaxLayers));
  for (std::size_t l = 0; l < layers.size(); ++l) {
    plan.heads.push_back(head_specs(layers[l], fmt::format("{}: layer {}", where, l)));
    if (plan.heads.back().size() != plan.heads.front().size()) {
      throw InputError(fmt::format("{}: layer {}: expected {} KV heads as in layer 0, found {}", where, l,
                                   plan.heads.front().size(), plan.heads.back().size()));
    }
  }
  return plan;
}

bool is_plan(const std::filesystem::path& path) {
  const MappedFile file(path);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()),
                              std::min(file.bytes().size(), kMaxBytes));
  const std::size_t first = text.find_first_not_of(" \t\r\n");  // what read_plan() takes
  return first != text.npos && text[first] == '{' && text.find("\"lodestone_plan\"") != text.npos;
}

std::string plan_text(const Plan& plan) {
  Json json = {{"lodestone_plan", kVersion},  {"model_fingerprint", plan.model_fingerprint},
               {"note", plan.note},           {"sink", plan.dense.sink},
               {"window", plan.dense.window}, {"layers", plan.heads}};
  if (!plan.chosen_on.empty()) json["chosen_on"] = Json::parse(plan.chosen_on);
  return json.dump(1) + "\n";
}

void write_plan(const std::filesystem::path& path, const Plan& plan) {
  AtomicFile file(path);
  const std::string text = plan_text(plan);
  file.write(std::as_bytes(std::span(text)));
  file.commit();
}

}  // namespace lode
