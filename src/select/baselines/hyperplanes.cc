// SPDX-License-Identifier: Apache-2.0
// hyperplanes: signatures of random directions, the floor under learned ones (the "LSH" baseline of the
// HashAttention authors' program; SAAP, appendix B, equation 2).
//
//   bit i of x = [ r_i . x > 0 ],  r_i ~ N(0, I), the same for keys and queries of one KV head
//
// Keys are attended as in `hash`; one signature a KV head.

#include <array>

#include "base/rng.h"
#include "select/methods.h"
#include "select/shared/signature_selector.h"

namespace lode {

namespace {

struct Options {
  SignatureOptions signatures;
  HashScheme scheme;

  static Options of(const Spec& spec) {
    constexpr std::array<std::string_view, 3> kBits = {"32", "64", "128"};
    constexpr std::array<std::string_view, 2> kRope = {"on", "off"};
    return {.signatures = SignatureOptions::of(spec),
            .scheme = {.bits = std::stoi(spec.choice("bits", kBits[0], kBits)),
                       .roped = spec.choice("rope", kRope[0], kRope) == "on"}};
  }
};

std::unique_ptr<Selector> make_hyperplanes(const Spec& spec, const LayerGeometry& geometry,
                                           std::string_view) {
  const Options options = Options::of(spec);
  HashWeights weights = {.scheme = options.scheme, .query = {}, .key = {}};
  for (int head = 0; head < geometry.kv_heads; ++head) {
    Rng rng(hash_seed(geometry.seed, geometry.layer, geometry.kv_head_in_layer(head)));
    std::vector<float> directions(static_cast<std::size_t>(options.scheme.bits * geometry.head_dim));
    for (float& x : directions) x = static_cast<float>(rng.normal());
    const auto bytes = std::as_bytes(std::span(directions));
    HashLayer layer = {.in = geometry.head_dim,
                       .out = options.scheme.bits,
                       .type = DType::f32,
                       .weight = {bytes.begin(), bytes.end()},
                       .bias = {}};
    weights.key.emplace_back(std::vector{std::move(layer)}, options.scheme.activation);
    weights.query.insert(weights.query.end(), static_cast<std::size_t>(geometry.group()), weights.key.back());
  }
  return make_signature_selector(geometry, options.signatures, std::move(weights));
}

}  // namespace

MethodInfo hyperplanes_method() {
  std::vector<SpecKey> keys = SignatureOptions::keys();
  keys.push_back({"bits", "directions, and bits of a signature: 32, 64 or 128", "32"});
  keys.push_back({"rope", "whether signatures are taken after RoPE: on or off", "on"});
  return {.name = "hyperplanes",
          .aliases = {},
          .source = "signatures of random hyperplanes (LSH)",
          .keys = std::move(keys),
          .dense = {},
          .dense_layers = 0,
          .make = make_hyperplanes,
          .index_bytes =
              [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
                const Options options = Options::of(spec);
                return signature_bytes(options.signatures, options.scheme, geometry, tokens);
              },
          .validate = check_of<Options>};
}

}  // namespace lode
