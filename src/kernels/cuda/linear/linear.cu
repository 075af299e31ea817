// SPDX-License-Identifier: Apache-2.0
// Which kernel computes which step.
#include <algorithm>
#include <string>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/linear/linear_cublaslt.h"
#include "kernels/cuda/linear/linear_kernels.h"

namespace lode::cuda {

namespace {

Vector vector_of(const DeviceWeight& w) {
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
template <class T>
const T* as(const DeviceWeight& w, const T*) {
  return static_cast<const T*>(w.data);
}

struct Widths {
  std::int64_t rows = 0, operand = 0, products = 0;  ///< columns of the two scratch matrices
};
Widths widths(std::int64_t rows, std::int64_t hidden, std::int64_t intermediate, std::int64_t q_cols,
              std::int64_t kv_cols) {
  return {rows, std::max({hidden, intermediate, q_cols}), std::max(q_cols + 2 * kv_cols, 2 * intermediate)};
}
std::int64_t operand_bytes(const Widths& w) {
  return (w.rows * w.operand * 4 + 255) / 256 * 256;
}
std::int64_t bytes_of_scratch(const Widths& w) {
  return operand_bytes(w) + w.rows * w.products * 4;
}

template <class W>
QkvStep<W> qkv_step(const Linear::QkvArguments& a, const Queries& where) {
  QkvStep<W> s;
  s.q = static_cast<const W*>(a.q.data);
  s.k = static_cast<const W*>(a.k.data);
  s.v = static_cast<const W*>(a.v.data);
  s.cols = a.q.cols;
  s.q_bias = vector_of(a.q_bias);
  s.k_bias = vector_of(a.k_bias);
  s.v_bias = vector_of(a.v_bias);
  s.query_heads = where.query_heads;
  s.kv_heads = where.layout.kv_heads;
  s.half = where.layout.head_dim / 2;
  s.frequencies = a.frequencies;
  s.rope_scale = a.rope_scale;
  s.q_out = a.q_out;
  s.q_unrotated = a.q_unrotated;
  s.k_out = a.k_out;
  s.k_unrotated = a.k_unrotated;
  s.v_out = a.v_out;
  s.tokens = where.tokens;
  s.bases = where.bases;
  s.layer_offset = where.layer_offset;
  s.layout = where.layout;
  return s;
}

}  // namespace

struct Linear::Impl {
  StreamHandle stream = nullptr;
  Precision precision = Precision::exact;
  std::string library = "not needed: float32 products are our own";
  std::unique_ptr<CublasLt> lt;
  Buffer scratch;
  Widths size;

  void* operand() const { return scratch.as<char>(); }
  float* products() const { return reinterpret_cast<float*>(scratch.as<char>() + operand_bytes(size)); }
  void need(std::int64_t n, std::int64_t operand_cols, std::int64_t product_cols) const {
    if (n <= size.rows && operand_cols <= size.operand && product_cols <= size.products) return;
    throw RunError("expected scratch reserved for " + std::to_string(n) + " rows of " +
                   std::to_string(std::max(operand_cols, product_cols)) + " numbers, found " +
                   std::to_string(size.rows) + " rows of " +
                   std::to_string(std::max(size.operand, size.products)));
  }

  /// The type to which the input of a product of many rows is rounded.
  DType operand_type(const DeviceWeight& w) const { return lt == nullptr ? DType::f32 : w.type; }

  template <class Step>
  void one_kernel(const Step& step, const StepInput& input) const {
    if constexpr (std::is_same_v<typename Step::Weight, __nv_bfloat16>) {
      if (precision == Precision::fast && stream_rows(step, input, stream)) return;
    }
    dot_rows(step, input, stream);
  }

  /// h = rms_norm(x) in the scratch.
  Operand normalised(const float* x, std::int64_t n, const DeviceWeight& norm, float eps, DType type) const {
    need(n, norm.cols, 0);
    norm_rows({x, vector_of(norm), eps, n, norm.cols}, operand(), type, stream);
    return {operand(), type, n, norm.cols};
  }
  Operand rounded(const float* x, std::int64_t n, std::int64_t cols, DType type) const {
    if (type == DType::f32) return {x, type, n, cols};
    need(n, cols, 0);
    convert(x, n * cols, operand(), type, stream);
    return {operand(), type, n, cols};
  }
  /// y = x w^T (+ y) + bias
  void product(const Operand& x, const DeviceWeight& w, const Vector& bias, bool add, float* y) const {
    const Operand weight{w.data, w.type, w.rows, w.cols};
    if (lt != nullptr && x.type == w.type && lt->multiply(x, weight, add, y, stream)) {
      add_bias(y, x.rows, w.rows, bias, stream);
    } else {
      gemm_f32(x, weight, bias, add, y, stream);
    }
  }
};

Linear::Linear(StreamHandle stream, Precision precision) : impl_(new Impl) {
  impl_->stream = stream;
  impl_->precision = precision;
  if (precision == Precision::fast) impl_->lt = CublasLt::open(impl_->library);
}
Linear::~Linear() {
  delete impl_;
}

const std::string& Linear::library() const {
  return impl_->library;
}

void Linear::multiply(const float* x, std::int64_t n, const DeviceWeight& w, const DeviceWeight& bias,
                      float* y, bool add) {
  const Impl& m = *impl_;
  if (n > kFusedRows) {
    m.product(m.rounded(x, n, w.cols, m.operand_type(w)), w, vector_of(bias), add, y);
    return;
  }
  with_type(w.type, [&](auto type) {
    m.one_kernel(PlainStep{as(w, type), w.rows, w.cols, vector_of(bias), y, add}, {x, {}, 0.0f, n, w.cols});
  });
}

void Linear::qkv(const QkvArguments& a, const Queries& where) {
  const Impl& m = *impl_;
  const std::int64_t n = where.count;
  if (n <= kFusedRows && a.q.type == a.k.type && a.q.type == a.v.type) {
    with_type(a.q.type, [&](auto type) {
      using W = std::remove_cv_t<std::remove_pointer_t<decltype(type)>>;
      m.one_kernel(qkv_step<W>(a, where), {a.x, vector_of(a.norm), a.eps, n, a.q.cols});
    });
    return;
  }
  m.need(n, a.q.cols, a.q.rows + a.k.rows + a.v.rows);
  float* q = m.products();
  float* k = q + n * a.q.rows;
  float* v = k + n * a.k.rows;
  const struct {
    const DeviceWeight& w;
    float* y;
  } parts[] = {{a.q, q}, {a.k, k}, {a.v, v}};
  Operand h;
  for (const auto& part : parts) {
    const DType type = m.operand_type(part.w);
    if (h.data == nullptr || h.type != type) h = m.normalised(a.x, n, a.norm, a.eps, type);
    m.product(h, part.w, {}, false, part.y);
  }
  finish_qkv(qkv_step<float>(a, where), n, q, k, v, m.stream);
}

void Linear::project_out(const float* attention, std::int64_t n, const DeviceWeight& w,
                         const DeviceWeight& bias, float* x) {
  multiply(attention, n, w, bias, x, true);
}

void Linear::mlp(const MlpArguments& a, std::int64_t n, float* x) {
  const Impl& m = *impl_;
  if (n <= kFusedRows && a.gate.type == a.up.type) {
    m.need(n, a.gate.rows, 0);
    float* act = static_cast<float*>(m.operand());
    with_type(a.gate.type, [&](auto type) {
      m.one_kernel(GateUpStep{as(a.gate, type), as(a.up, type), a.gate.rows, a.gate.cols,
                              vector_of(a.gate_bias), vector_of(a.up_bias), act, DType::f32},
                   {x, vector_of(a.norm), a.eps, n, a.gate.cols});
    });
    multiply(act, n, a.down, a.down_bias, x, true);
    return;
  }
  m.need(n, std::max(a.gate.cols, a.gate.rows), 2 * a.gate.rows);
  float* gate = m.products();
  float* up = gate + n * a.gate.rows;
  Operand h = m.normalised(x, n, a.norm, a.eps, m.operand_type(a.gate));
  m.product(h, a.gate, {}, false, gate);
  if (m.operand_type(a.up) != h.type) h = m.normalised(x, n, a.norm, a.eps, m.operand_type(a.up));
  m.product(h, a.up, {}, false, up);
  GateUpStep<float> step;
  step.rows = a.gate.rows;
  step.gate_bias = vector_of(a.gate_bias);
  step.up_bias = vector_of(a.up_bias);
  step.act = m.operand();
  step.act_type = m.operand_type(a.down);
  finish_gate_up(step, n, gate, up, m.stream);
  m.product({m.operand(), step.act_type, n, a.down.cols}, a.down, vector_of(a.down_bias), true, x);
}

void Linear::head(const float* x, std::int64_t n, const DeviceWeight& norm, float eps,
                  const DeviceWeight& output, float* logits) {
  const Impl& m = *impl_;
  if (n > kFusedRows) {
    m.product(m.normalised(x, n, norm, eps, m.operand_type(output)), output, {}, false, logits);
    return;
  }
  with_type(output.type, [&](auto type) {
    m.one_kernel(PlainStep{as(output, type), output.rows, output.cols, Vector{}, logits, false},
                 {x, vector_of(norm), eps, n, output.cols});
  });
}

std::int64_t Linear::scratch_bytes(std::int64_t rows, std::int64_t hidden, std::int64_t intermediate,
                                   std::int64_t q_cols, std::int64_t kv_cols) {
  return bytes_of_scratch(widths(rows, hidden, intermediate, q_cols, kv_cols));
}
void Linear::reserve(std::int64_t rows, std::int64_t hidden, std::int64_t intermediate, std::int64_t q_cols,
                     std::int64_t kv_cols) {
  Impl& m = *impl_;
  m.scratch = Buffer();
  m.size = widths(rows, hidden, intermediate, q_cols, kv_cols);
  m.scratch = Buffer(bytes_of_scratch(m.size), "the layers' scratch");
}

}  // namespace lode::cuda
