// SPDX-License-Identifier: Apache-2.0
#include "model/families/plans.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

bool flag(const Json& json, const char* key, bool otherwise, std::string_view where) {
  return json_has(json, key) ? json_bool(json, key, where) : otherwise;
}
double number(const Json& json, const char* key, double otherwise, std::string_view where, double low,
              double high) {
  return json_has(json, key) ? json_number(json, key, where, low, high) : otherwise;
}
std::int64_t whole(const Json& json, const char* key, std::int64_t otherwise, std::string_view where,
                   std::int64_t low, std::int64_t high) {
  return json_has(json, key) ? json_int(json, key, where, low, high) : otherwise;
}

ActivationKind activation_of(const Json& json, const char* key, std::string_view usual,
                             std::string_view where) {
  const std::string name = json_has(json, key) ? json_string(json, key, where) : std::string(usual);
  if (name == "silu" || name == "swish") return ActivationKind::silu;
  if (name == "gelu_pytorch_tanh" || name == "gelu_new") return ActivationKind::gelu_tanh;
  throw InputError(
      fmt::format("{}: '{}': expected silu or gelu_pytorch_tanh, found '{}'", where, key, excerpt(name)));
}

void all_biases(const Json& json, ModelConfig& c, std::string_view where) {
  ModelPlan& p = c.plan;
  p.q_bias = p.k_bias = p.v_bias = p.o_bias = flag(json, "attention_bias", false, where);
  p.gate_bias = p.up_bias = p.down_bias = flag(json, "mlp_bias", false, where);
}

std::vector<LayerPlan>& layers_of(ModelConfig& c) {
  c.plan.layers.resize(static_cast<std::size_t>(c.layers));
  return c.plan.layers;
}

std::vector<bool> layers_called(const Json& json, const ModelConfig& c, std::string_view name,
                                std::string_view where, const std::function<bool(int)>& rule) {
  std::vector<bool> called(static_cast<std::size_t>(c.layers));
  if (!json_has(json, "layer_types")) {
    for (int i = 0; i < c.layers; ++i) called[static_cast<std::size_t>(i)] = rule(i);
    return called;
  }
  const Json& types = json["layer_types"];
  if (!types.is_array() || std::ssize(types) != c.layers)
    throw InputError(fmt::format("{}: 'layer_types': expected a list of {} types", where, c.layers));
  for (std::size_t i = 0; i < called.size(); ++i) {
    const std::string type = types[i].is_string() ? types[i].get<std::string>() : types[i].type_name();
    if (type != "full_attention" && type != name)
      throw InputError(fmt::format("{}: 'layer_types': expected full_attention or {}, found '{}'", where,
                                   name, excerpt(type)));
    called[i] = type == name;
  }
  return called;
}

void set_windows(const Json& json, ModelConfig& c, const std::vector<bool>& windowed,
                 std::string_view where) {
  if (std::none_of(windowed.begin(), windowed.end(), [](bool w) { return w; })) return;
  const std::int64_t window = json_int(json, "sliding_window", where, 1, kMaxWindow);
  for (std::size_t i = 0; i < windowed.size(); ++i) layers_of(c)[i].window = windowed[i] ? window : 0;
}

void refuse_window(const Json& json, std::string_view where) {
  if (!json_has(json, "sliding_window")) return;
  throw InputError(fmt::format("{}: 'sliding_window': expected null in this architecture, found {}", where,
                               json_int(json, "sliding_window", where, 0, kMaxWindow)));
}

void qwen_windows(const Json& json, ModelConfig& c, std::string_view where) {
  if (!flag(json, "use_sliding_window", false, where)) return;
  const std::int64_t first = whole(json, "max_window_layers", 28, where, 0, kMaxWindow);
  set_windows(json, c, windowed_layers(json, c, where, [&](int i) { return i >= first; }), where);
}

}  // namespace lode
