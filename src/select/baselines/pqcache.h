// SPDX-License-Identifier: Apache-2.0
// What a spec of pqcache says, and what a device asks of its selector that chooses in its place.
#pragma once

#include "lodestone/spec.h"
#include "select/baselines/product_codes.h"

namespace lode {

struct PqCacheOptions {
  int m = 2, bits = 6;  // section 4.1
  int iterations = 10;
  Amount budget = {1.0 / 20, true};  // the retrieved half of the authors' 1/10
  bool per_kv_head = true;

  static PqCacheOptions of(const Spec& spec);
};

/// A selector that codes keys by centroids which it takes from a text when it is indexed.
class KeyCoder {
 public:
  struct Codebooks {
    std::int64_t version = 0;             ///< another one: other centroids
    const ProductCodes* codes = nullptr;  ///< whose quantizer() they are; null: there are none yet
  };
  virtual ~KeyCoder() = default;
  virtual Codebooks codebooks() const = 0;  ///< of sequence 0
};

}  // namespace lode
