// SPDX-License-Identifier: Apache-2.0
// f_q while it is trained, and its export with the batch norm folded.
#pragma once

#include <memory>

#include "lab/train/mlp.h"
#include "select/saap/bucket_net.h"

namespace lode {

class SaapClassifier {
 public:
  /// Linear(d, H), batch norm, ReLU, Linear(H, C) (section 6.1); `residual` adds a linear path, see
  /// start_linear.
  SaapClassifier(std::int64_t d, std::int64_t hidden, std::int64_t buckets, bool residual,
                 std::uint64_t seed);
  /// From an exported network, without a batch norm: for further training.
  explicit SaapClassifier(const BucketNet& net);

  Module& module() { return *module_; }
  /// Lets the linear path start at these weights.
  void start_linear(std::span<const float> weight /*[C, d]*/);
  BucketNet exported(DType type) const;

  /// Its layers, for who computes their steps elsewhere; `norm` and `linear` may be null.
  struct Layers {
    Linear *first = nullptr, *second = nullptr, *linear = nullptr;
    BatchNorm* norm = nullptr;
  };
  Layers layers() const { return {first_, second_, linear_, norm_}; }

 private:
  void assemble(std::int64_t d, std::int64_t hidden, std::int64_t buckets, bool norm, bool residual, Rng rng);

  std::unique_ptr<Module> module_;
  Linear *first_ = nullptr, *second_ = nullptr, *linear_ = nullptr;  // of module_; linear_ may be null
  BatchNorm* norm_ = nullptr;                                        // may be null
};

}  // namespace lode
