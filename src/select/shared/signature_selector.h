// SPDX-License-Identifier: Apache-2.0
// Selection by Hamming distance of signatures: what `hash` and `hyperplanes` share. They differ in where the
// functions come from.
#pragma once

#include <memory>
#include <vector>

#include "ann/hashing/counting_select.h"
#include "lodestone/spec.h"
#include "select/hash/weights.h"

namespace lode {

struct SignatureOptions {
  NearRule::Mode mode = NearRule::Mode::count;
  Amount budget = {1.0 / 32, true};
  std::int64_t depth = 4;  ///< mismatches beyond the nearest key's, for each head that takes part
  bool per_query_head = false;
  bool all_ties = false;
  enum class Tables { automatic, on, off };
  Tables tables = Tables::automatic;  ///< over the signatures; the choice is the same with any

  static SignatureOptions of(const Spec& spec);
  static std::vector<SpecKey> keys();
};

std::unique_ptr<Selector> make_signature_selector(const LayerGeometry& geometry,
                                                  const SignatureOptions& options, HashWeights weights);

/// The functions of a selector that make_signature_selector made; null for any other.
const HashWeights* signature_weights(const Selector& selector);

/// Bytes of the signatures of that many tokens in one layer, in lists that grow by doubling, and of tables
/// over them.
std::int64_t signature_bytes(const SignatureOptions& options, const HashScheme& scheme,
                             const LayerGeometry& geometry, std::int64_t tokens);

}  // namespace lode
