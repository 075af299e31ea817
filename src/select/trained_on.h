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
  std::int64_t longest = 0;  ///< tokens of the longest training prompt; 0 = not said
  std::string rope;          ///< rope_fingerprint() of the training contexts; empty = not said

  /// The artefact's "training", a JSON object; of anything else nothing is known.
  static TrainedOn parse(std::string_view training);
  /// Why `what` ("an artefact of hash"), which `maker` ("train hash") makes, may miss keys under this RoPE, which may be
  /// null; empty when nothing speaks against it. The type of the keys is no reason: in 4 bits as many are found.
  std::string rope_remark(std::string_view what, std::string_view maker, const Rope* rope) const;
};

/// Of frequencies and attention scaling.
std::string rope_fingerprint(const Rope& rope);

}  // namespace lode
