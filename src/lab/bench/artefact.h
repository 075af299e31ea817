// SPDX-License-Identifier: Apache-2.0
// Artefacts of trained methods for the benches, where the spec names none.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "lab/bench/common.h"
#include "lodestone/spec.h"
#include "model/config.h"

namespace lode {

/// A file's name that no other process uses; the file goes when this goes.
class TemporaryFile {
 public:
  TemporaryFile();
  ~TemporaryFile();
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// `hash` without a file of functions gets random ones for every layer, in `file`; other specs stay as they
/// are.
Spec with_made_up_hash(const Spec& spec, const ModelConfig& config, std::string_view fingerprint,
                       const TemporaryFile& file);
/// `saap` without a file of networks gets, for layer geometry.layer and those before it, centroids of keys that `keys`
/// makes and classifiers of random weights, in `file`; other specs stay as they are.
Spec with_made_up_saap(const Spec& spec, const LayerGeometry& geometry, std::string_view fingerprint,
                       VectorMaker& keys, const TemporaryFile& file);

/// saap: centroids of keys that `keys` makes, a classifier of random weights in f16. hash: random weights.
/// Other methods, and specs that name a file, are made as they say; null for `full`. `largest` above 0: one bucket of saap
/// holds this share of the keys, and every query attends it.
std::unique_ptr<Selector> make_bench_selector(const Spec& spec, const LayerGeometry& geometry,
                                              std::string_view fingerprint, VectorMaker& keys,
                                              double largest);

}  // namespace lode
