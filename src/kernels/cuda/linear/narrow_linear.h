// SPDX-License-Identifier: Apache-2.0
// The steps of a layer for generated tokens of many sequences: up to kNarrowRows rows, whose bits do not depend
// on how many there are. 16-bit weights are read once for all of them, through cuBLASLt: every input number is
// the sum of two bf16, x = high + low (16 bits of mantissa, as with few rows), and the two halves are rows of one
// product of fixed shape. Other weights go through Linear's kernels for few rows, eight rows at a time.
#pragma once

#include <memory>

#include "kernels/cuda/linear/linear.h"

namespace lode::cuda {

inline constexpr int kNarrowRows = 16;

class NarrowLinear {
 public:
  /// `linear` is of the same stream and precision, has scratch reserved for kFusedRows rows, and outlives this.
  NarrowLinear(Linear& linear, StreamHandle stream, Precision precision);
  ~NarrowLinear();
  NarrowLinear(const NarrowLinear&) = delete;
  NarrowLinear& operator=(const NarrowLinear&) = delete;

  struct Sizes {
    std::int64_t hidden = 0, intermediate = 0, q_cols = 0, kv_cols = 0, vocab = 0;
  };
  static std::int64_t scratch_bytes(const Sizes& sizes);
  void reserve(const Sizes& sizes);

  // As Linear's, of `where.count` or n rows, at most kNarrowRows. `next`: the norm of the step behind, which is
  // then made on the way, where products are made for all rows together.
  void qkv(const Linear::QkvArguments& arguments, const Queries& where);
  void project_out(const float* attention, std::int64_t n, const DeviceWeight& w, const DeviceWeight& bias,
                   float* x, const Addition& addition, const DeviceWeight& next);
  void mlp(const Linear::MlpArguments& arguments, std::int64_t n, float* x, const DeviceWeight& next);
  /// y [n, w.rows] = x w^T
  void multiply(const float* x, std::int64_t n, const DeviceWeight& w, float* y);
  void head(const float* x, std::int64_t n, const DeviceWeight& norm, float eps, const DeviceWeight& output,
            float* logits);
  /// Where project_out's input may be put in the place of `attention`, [kNarrowRows, w.cols] of high parts, then
  /// low parts, all of its rows; null where it takes float32.
  void* halves_for(const DeviceWeight& w);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode::cuda
