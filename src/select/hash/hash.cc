// SPDX-License-Identifier: Apache-2.0
// hash: HashAttention. Learned functions map keys and queries to short binary signatures; the far keys whose
// signatures differ least from the query's are attended (equations 3 to 6).
//
//   score(k, q) = -popcount(phi_kv(k) xor phi_q(q))          summed over the heads of a group with
//   per=kv-head mode=count: the budget's best   depth: score >= best - depth   combined: both      (appendix
//   A.1, 9 to 11)
//
// The functions come from `train hash`. Differs from the paper: by default a key has one signature for each
// KV head, not for each query head, and the group chooses together, which takes a group's share of the
// memory; ties at the budget's end go to the newest keys, so that the budget is exact (the paper keeps all:
// ties=all); the signature of 0 is 0, as equation 4 has it, not a third symbol as in the authors' program.
#include <array>

#include "lodestone/error.h"
#include "select/methods.h"
#include "select/shared/signature_selector.h"

namespace lode {

namespace {

constexpr std::int64_t kSink = 128, kWindow = 128;  // section 5, "Baselines"

constexpr std::array<std::string_view, 3> kBits = {"32", "64", "128"};

void validate(const Spec& spec) {
  SignatureOptions::of(spec);
  spec.choice("bits", kBits[0], kBits);
}

std::unique_ptr<Selector> make_hash(const Spec& spec, const LayerGeometry& geometry,
                                    std::string_view fingerprint) {
  const auto file = spec.file("weights");
  if (!file) {
    throw InputError("attention spec '" + spec.str() +
                     "': expected weights=FILE, or hash.safetensors beside the model (lodestone train hash "
                     "makes one), found none of this model");
  }
  HashWeights weights = read_hash_weights(*file, geometry, fingerprint);
  const std::string bits = std::to_string(weights.scheme.bits);
  if (spec.choice("bits", bits, kBits) != bits) {
    throw InputError(*file + ": expected signatures of " + *spec.text("bits") + " bits, as the spec '" +
                     spec.str() + "' says, found " + bits);
  }
  return make_signature_selector(geometry, SignatureOptions::of(spec), std::move(weights));
}

/// Of the file, or, where a spec names none yet, what the spec says.
HashScheme scheme_of(const Spec& spec) {
  if (const auto file = spec.file("weights")) return read_hash_scheme(*file);
  return {.bits = std::stoi(spec.choice("bits", kBits[0], kBits))};
}

}  // namespace

MethodInfo hash_method() {
  std::vector<SpecKey> keys = SignatureOptions::keys();
  keys.insert(keys.begin(),
              {"weights", "file of the learned functions (train hash)", "MODEL/hash.safetensors"});
  keys.push_back({"bits", "of a signature: 32, 64 or 128; must be the file's", "the file's"});
  return {.name = "hash",
          .aliases = {},
          .source = "learned binary signatures (HashAttention)",
          .keys = std::move(keys),
          .dense = {.sink = kSink, .window = kWindow},
          .dense_layers = 0,
          .trained = true,
          .make = make_hash,
          .index_bytes =
              [](const Spec& spec, const LayerGeometry& geometry, std::int64_t tokens) {
                return signature_bytes(SignatureOptions::of(spec), scheme_of(spec), geometry, tokens);
              },
          .validate = validate};
}

}  // namespace lode
