// SPDX-License-Identifier: Apache-2.0
// Any text as config.json: refused, or numbers that the rest can compute with.
#include "model/config.h"

#include <cmath>

#include "fuzz/target.h"
#include "kernels/rope.h"

LODE_FUZZ_TARGET(config) {
  const lode::ModelConfig config = lode::parse_config(input, "fuzz");
  LODE_ASSERT(config.query_heads % config.kv_heads == 0 && config.head_dim % 2 == 0);
  for (const std::int64_t tokens : {std::int64_t{1}, std::int64_t{1} << 20}) {
    const lode::Rope rope(config, tokens);
    for (const float frequency : rope.frequencies()) LODE_ASSERT(std::isfinite(frequency));
    LODE_ASSERT(std::isfinite(rope.attention_scaling()) && rope.attention_scaling() > 0);
  }
}
