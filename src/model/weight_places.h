// SPDX-License-Identifier: Apache-2.0
// Puts the tensors of a model's files in the places of its plan.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "model/config.h"
#include "model/family.h"
#include "model/weight_files.h"
#include "model/weights.h"

namespace lode {

/// Checks and takes every tensor, by the names of the family and the kind of file; InputError names the first that
/// is missing, has another shape, or has no place. Returns the memory of weights that a file holds in another
/// form.
std::vector<std::unique_ptr<std::byte[]>> take_weights(WeightFiles& files, const ModelConfig& c,
                                                       ModelWeights& m);

/// The weight of a place that a layer keeps as its files have it: none that holds several, and no expert's.
const Weight& weight_in(const LayerWeights& layer, Place place);

/// Calls body(name, weight) for every weight in the order of the data flow.
template <class Model, class Body>
void for_each_weight(Model& m, const Body& body) {
  body("embedding", m.embedding);
  for (const auto& [name, weight] : {std::pair{"input embedding", &m.input_embedding},
                                     {"input projection", &m.input_projection},
                                     {"input projection norm", &m.input_projection_norm}})
    if (weight->rows > 0) body(name, *weight);
  for (std::size_t i = 0; i < m.layers.size(); ++i) {
    auto& w = m.layers[i];
    const auto each = [&](std::initializer_list<std::pair<const char*, decltype(&w.q)>> weights) {
      for (const auto& [name, weight] : weights) body(fmt::format("layer {} {}", i, name), *weight);
    };
    each({{"attention_norm", &w.attention_norm},
          {"q", &w.q},
          {"k", &w.k},
          {"v", &w.v},
          {"q_bias", &w.q_bias},
          {"k_bias", &w.k_bias},
          {"v_bias", &w.v_bias},
          {"o", &w.o},
          {"o_bias", &w.o_bias},
          {"mlp_norm", &w.mlp_norm},
          {"gate", &w.gate},
          {"up", &w.up},
          {"down", &w.down},
          {"gate_bias", &w.gate_bias},
          {"up_bias", &w.up_bias},
          {"down_bias", &w.down_bias}});
    // Models without these keep the fingerprints that their files have.
    for (const auto& [name, weight] : {std::pair{"q_norm", &w.q_norm},
                                       {"k_norm", &w.k_norm},
                                       {"attention_post_norm", &w.attention_post_norm},
                                       {"mlp_post_norm", &w.mlp_post_norm},
                                       {"sinks", &w.sinks},
                                       {"router", &w.router},
                                       {"router_bias", &w.router_bias},
                                       {"choice_bias", &w.choice_bias},
                                       {"shared_gate", &w.shared_gate},
                                       {"attention_gate", &w.attention_gate},
                                       {"delta qkv", &w.delta.qkv},
                                       {"delta z", &w.delta.z},
                                       {"delta b", &w.delta.b},
                                       {"delta a", &w.delta.a},
                                       {"delta conv", &w.delta.conv},
                                       {"delta dt_bias", &w.delta.dt_bias},
                                       {"delta decay", &w.delta.decay},
                                       {"delta norm", &w.delta.norm},
                                       {"delta out", &w.delta.out}}) {
      if (weight->rows > 0) body(fmt::format("layer {} {}", i, name), *weight);
    }
    for (const auto& [name, weight] : {std::pair{"latent q_a", &w.latent.q_a},
                                       {"latent q_a_norm", &w.latent.q_a_norm},
                                       {"latent q_b", &w.latent.q_b},
                                       {"latent kv_a", &w.latent.kv_a},
                                       {"latent kv_a_norm", &w.latent.kv_a_norm}}) {
      if (weight->rows > 0) body(fmt::format("layer {} {}", i, name), *weight);
    }
    for (const auto& [name, weight] : {std::pair{"factor", &w.factor},
                                       {"inputs gate", &w.inputs.gate},
                                       {"inputs out", &w.inputs.out},
                                       {"inputs norm", &w.inputs.norm},
                                       {"dense post norm", &w.apart.dense_post_norm},
                                       {"experts norm", &w.apart.norm},
                                       {"experts post norm", &w.apart.post_norm},
                                       {"router norm", &w.apart.router_norm},
                                       {"expert factors", &w.apart.factors}}) {
      if (weight->rows > 0) body(fmt::format("layer {} {}", i, name), *weight);
    }
    for (std::size_t h = 0; h < w.latent.k_b.size(); ++h) {
      body(fmt::format("layer {} head {} latent k_b", i, h), w.latent.k_b[h]);
      body(fmt::format("layer {} head {} latent v_b", i, h), w.latent.v_b[h]);
    }
    for (std::size_t e = 0; e < w.experts.size(); ++e) {
      auto& x = w.experts[e];
      for (const auto& [name, weight] : {std::pair{"gate", &x.gate},
                                         {"up", &x.up},
                                         {"down", &x.down},
                                         {"gate_bias", &x.gate_bias},
                                         {"up_bias", &x.up_bias},
                                         {"down_bias", &x.down_bias}}) {
        if (weight->rows > 0) body(fmt::format("layer {} expert {} {}", i, e, name), *weight);
      }
    }
  }
  body("final_norm", m.final_norm);
  const bool shared = m.output.data != nullptr && m.output.data == m.embedding.data;
  if (!shared) body("output", m.output);
}

}  // namespace lode
