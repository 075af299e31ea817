// SPDX-License-Identifier: Apache-2.0
// What an artefact says of the run that made it, and what is to be said of a context that is unlike it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lode {

class Rope;

struct TrainedOn {
  bool said = false;  ///< whether there is anything about its training
  /// Tokens of a training prompt on average, and how much further queries were shifted; 0 = not said.
  std::int64_t reach = 0;
  std::string rope;  ///< rope_fingerprint() of the training contexts; empty = not said

  /// The artefact's "training", a JSON object; of anything else nothing is known.
  static TrainedOn parse(std::string_view training);
  /// Why an artefact of `method` may miss keys under this RoPE; empty when nothing speaks against it.
  std::string rope_remark(std::string_view method, const Rope* rope) const;
};

/// Of frequencies and attention scaling.
std::string rope_fingerprint(const Rope& rope);

}  // namespace lode
