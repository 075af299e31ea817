// SPDX-License-Identifier: Apache-2.0
// SAAP's query classifier trained in several ways on the same texts, tested alike: what its figure 7
// compares.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/progress.h"
#include "lodestone/engine.h"

namespace lode {

struct SaapVariantOptions {
  ContextOptions context;
  std::int64_t tokens = 4096;  ///< of each text
  std::int64_t clusters = 256, hidden = 128, samples = 600, batch = 250, steps = 600;
  std::int64_t window = 511, distance = 256;
  std::uint64_t seed = 0;
  Progress::Mode progress = Progress::Mode::automatic;
};

/// "long-range" (the paper's: two layers, near pairs and queries that look near left out), "short-range"
/// (such queries kept), "residual" (likewise, with a linear path beside the hidden layer) and "causal" (the
/// same, queries see the keys before them only: how the shipped artefact was trained). InputError otherwise.
void check_saap_variant(std::string_view name);

/// The last text is tested on. Of attention on far keys the share that lies in the buckets ranked first,
/// until 2, 5 and 10 % of the far keys are read, means over all heads but the first layer's:
/// {"variant", "shares": [3], "loss": nats, "captured": [3], "centroids": [3] by q . centroid, "best": [3] at
/// most}.
std::vector<Json> saap_variants(const std::shared_ptr<const Model>& model,
                                const std::vector<std::string>& texts,
                                const std::vector<std::string>& variants, const SaapVariantOptions& options);

}  // namespace lode
