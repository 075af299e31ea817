// SPDX-License-Identifier: Apache-2.0
// What a spec of double-sparsity says, and what a device asks of its selector that chooses in its place.
#pragma once

#include "lodestone/spec.h"
#include "select/baselines/label_cache.h"

namespace lode {

struct DoubleSparsityOptions {
  std::int64_t channels = 0;  // 0: one of so many that the authors' "group factor" says
  int bits = 4;
  Amount budget = {1.0 / 16, true};  // section 5.1
  bool per_kv_head = false;

  static DoubleSparsityOptions of(const Spec& spec);
  int channels_for(int head_dim) const;
};

/// A selector that labels keys by channels and levels which it takes from a text when it is indexed.
class KeyLabeller {
 public:
  struct Labels {
    std::int64_t version = 0;           ///< another one: other channels and levels
    const LabelCache* cache = nullptr;  ///< whose channels() and levels() they are; null: there are none yet
  };
  virtual ~KeyLabeller() = default;
  virtual Labels key_labels() const = 0;  ///< of sequence 0
};

}  // namespace lode
