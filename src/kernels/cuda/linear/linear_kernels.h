// SPDX-License-Identifier: Apache-2.0
// The kernels behind Linear, as host functions that enqueue them.
#pragma once

#include <string>

#include "kernels/cuda/linear/linear_steps.cuh"
#include "lodestone/error.h"

namespace lode::cuda {

inline Vector vector_of(const DeviceWeight& w) {
  return {w.data, w.type};
}
/// Calls body with a null pointer of the weight's type.
template <class Body>
void with_type(DType type, const Body& body) {
  if (type == DType::bf16)
    body(static_cast<const __nv_bfloat16*>(nullptr));
  else if (type == DType::f16)
    body(static_cast<const __half*>(nullptr));
  else if (type == DType::f32)
    body(static_cast<const float*>(nullptr));
  else
    throw RunError("expected weights of type f32, f16 or bf16, found " + std::string(name_of(type)));
}

/// One step for 1 to kFusedRows rows, in float32, any weight type.
template <class Step>
void dot_rows(const Step& step, const StepInput& input, StreamHandle stream);

/// The same for bf16 weights on the matrix unit, every input number as the sum of two bf16 (16 bits of
/// mantissa); a gain may have any type. False, and nothing is enqueued, unless the columns are a multiple of 64
/// and all lies at 16-byte bounds.
template <class Step>
bool stream_rows(const Step& step, const StepInput& input, StreamHandle stream);

/// An operand of a product of many rows.
struct Operand {
  const void* data = nullptr;  // [rows, cols]
  DType type = DType::f32;
  std::int64_t rows = 0, cols = 0;
};
/// y[n, out] = x w^T + bias (+ y) in float32, in ascending order of the columns. Rows of y are `stride` numbers
/// apart, 0: as many as they have.
void gemm_f32(const Operand& x, const Operand& w, const Vector& bias, bool add, float* y, StreamHandle stream,
              std::int64_t stride = 0);

/// to[n, cols] = rms_norm(x), rounded to the type.
void norm_rows(const StepInput& input, void* to, DType type, StreamHandle stream);
/// to[i] = x[i], rounded to the type.
void convert(const float* x, std::int64_t count, void* to, DType type, StreamHandle stream);
/// y[n, cols] += bias
void add_bias(float* y, std::int64_t n, std::int64_t cols, const Vector& bias, StreamHandle stream);
/// Finishes a step whose products another kernel made: rotation and append, or activation(gate) * up.
void finish_qkv(const QkvStep<float>& step, std::int64_t n, const float* q, const float* k, const float* v,
                StreamHandle stream);
/// The same for heads that are normed or queries that grow; a gain of null data: no norm. Heads of up to 512 numbers;
/// v may be k.
struct HeadNorms {
  Vector q_gain, k_gain;  // [d]
  bool values = false;    ///< are normed, without gains
  float eps = 1e-5f;
  float growth = 0.0f;
  std::int64_t growth_start = 1;
};
inline HeadNorms norms_of(const Linear::QkvArguments& a) {
  return {vector_of(a.q_norm), vector_of(a.k_norm), a.v_norm, a.eps, a.growth.factor, a.growth.start};
}
void finish_heads(const QkvStep<float>& step, const HeadNorms& norms, std::int64_t n, const float* q,
                  const float* k, const float* v, StreamHandle stream);
/// x[n, cols] += y as the addition says.
void add_scaled(const float* y, std::int64_t n, std::int64_t cols, const Addition& addition, float* x,
                StreamHandle stream);
void finish_gate_up(const GateUpStep<float>& step, std::int64_t n, const float* gate, const float* up,
                    StreamHandle stream);

/// What the current device is; asked once.
struct DeviceShape {
  int multiprocessors = 0;
  int shared_bytes = 0;  ///< that one block may have
};
const DeviceShape& device_shape();

}  // namespace lode::cuda
