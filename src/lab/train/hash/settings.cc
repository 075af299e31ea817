// SPDX-License-Identifier: Apache-2.0
#include "lab/train/hash/settings.h"

#include <array>

namespace lode {

Json HashSettings::json() const {
  constexpr std::array<const char*, 3> kValues = {"off", "norm", "vector"};
  return {{"bits", scheme.bits},
          {"rope", scheme.roped ? "on" : "off"},
          {"keys", scheme.per_query_head ? "query-head" : "kv-head"},
          {"values", kValues[static_cast<std::size_t>(scheme.values)]},
          {"activation", scheme.activation == HashNet::Activation::silu ? "silu" : "relu"},
          {"widths", widths},
          {"loss", loss == PivotalLoss::bce ? "bce" : "softmax"},
          {"target", by_value ? "value" : "logits"},
          {"top", top},
          {"sink", dense.sink},
          {"window", dense.window},
          {"alpha", alpha},
          {"beta", beta},
          {"draw", draw == Draw::prompt ? "prompt" : "chunk"},
          {"steps", steps},
          {"queries", queries},
          {"late", late},
          {"late_tokens", late_tokens},
          {"shift", shift},
          {"further", further},
          {"apart", apart},
          {"from", from.string()},
          {"others", others},
          {"rate", rate},
          {"linear_start", linear_start},
          {"gamma", gamma},
          {"type", std::string(name_of(type))},
          {"seed", seed}};
}

}  // namespace lode
