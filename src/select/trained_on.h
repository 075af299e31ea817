// SPDX-License-Identifier: Apache-2.0
// What an artefact says of the run that made it, and what is to be said of a context that is unlike it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lodestone/selector.h"

namespace lode {

struct TrainedOn {
  bool said = false;  ///< whether there is anything about its training
  /// Tokens of a training prompt on average, and how much further queries were shifted; 0 = not said.
  std::int64_t reach = 0;
  std::int64_t longest = 0;  ///< tokens of the longest training prompt; 0 = not said
  std::string rope;          ///< rope_fingerprint() of the training contexts; empty = not said
  std::string kv_type;       ///< of their keys and values; empty = not said

  /// The artefact's "training", a JSON object; of anything else nothing is known.
  static TrainedOn parse(std::string_view training);
  /// Why `what` ("an artefact of hash") may miss keys in contexts of this RoPE and type of keys; empty when nothing
  /// speaks against it.
  std::string remark(std::string_view what, const LayerGeometry& geometry) const;
};

/// Of frequencies and attention scaling.
std::string rope_fingerprint(const Rope& rope);

}  // namespace lode
