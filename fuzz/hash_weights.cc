// SPDX-License-Identifier: Apache-2.0
// Any bytes as a file of HashAttention's functions: refused, or functions that sign keys and queries.
#include "fuzz/target.h"
#include "select/hash/weights.h"
#include "support/memory_file.h"

LODE_FUZZ_TARGET(hash_weights) {
  const lode::LayerGeometry geometry = {.layer = 0, .query_heads = 4, .kv_heads = 2, .head_dim = 4};
  const lode::test::MemoryFile file(input);
  const lode::HashWeights weights = lode::read_hash_weights(file.path(), geometry, "model");
  LODE_ASSERT(weights.query.size() == 4 && std::ssize(weights.key) == weights.scheme.signatures(geometry));
  const auto sign = [&](const lode::HashNet& net, std::int64_t inputs) {
    const std::vector<float> x(static_cast<std::size_t>(3 * inputs), 1e30f);                  // [3, inputs]
    std::vector<std::uint32_t> bits(static_cast<std::size_t>(3 * weights.scheme.bits / 32));  // [3, words]
    lode::HashNet::Scratch scratch;
    net.encode(x.data(), 3, bits.data(), scratch);
  };
  for (const lode::HashNet& net : weights.query) sign(net, geometry.head_dim);
  for (const lode::HashNet& net : weights.key) sign(net, weights.scheme.key_inputs(geometry.head_dim));
}
