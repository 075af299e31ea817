// SPDX-License-Identifier: Apache-2.0
// Which kernel computes which step.
#include <algorithm>
#include <string>
#include <vector>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/linear/linear_cublaslt.h"
#include "kernels/cuda/linear/linear_kernels.h"
#include "kernels/cuda/linear/qkv_step.h"
#include "kernels/cuda/linear/tile_linear.h"

namespace lode::cuda {

namespace {

template <class T>
const T* as(const DeviceWeight& w, const T*) {
  return static_cast<const T*>(w.data);
}

struct Widths {
  std::int64_t rows = 0, operand = 0, products = 0;  ///< columns of the two scratch matrices
};
Widths widths(std::int64_t rows, std::int64_t hidden, std::int64_t intermediate, std::int64_t q_cols,
              std::int64_t kv_cols) {
  return {rows, std::max({hidden, intermediate, q_cols}),
          std::max({q_cols + 2 * kv_cols, 2 * intermediate, hidden})};
}
std::int64_t operand_bytes(const Widths& w) {
  return (w.rows * w.operand * 4 + 255) / 256 * 256;
}
std::int64_t bytes_of_scratch(const Widths& w) {
  return operand_bytes(w) + w.rows * w.products * 4;
}

/// Whether no weight is in tiles and all have one type.
bool same_type(std::initializer_list<const DeviceWeight*> all) {
  return std::all_of(all.begin(), all.end(),
                     [&](const DeviceWeight* w) { return !w->tiled() && w->type == (*all.begin())->type; });
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
  s.kv_heads = a.k.data == nullptr ? 0 : where.layout.kv_heads;
  s.half = where.layout.head_dim / 2;
  s.frequencies = a.frequencies;
  s.turning = a.turning < 0 ? s.half : a.turning;
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

QkvStep<float> qkv_step_of(const Linear::QkvArguments& a, const Queries& where) {
  return qkv_step<float>(a, where);
}

struct Linear::Impl {
  StreamHandle stream = nullptr;
  Precision precision = Precision::exact;
  std::string library = "not needed: float32 products are our own";
  std::unique_ptr<CublasLt> lt;
  Buffer scratch, panel;
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

  /// The type to which the input of a product of many rows is rounded, and tiles are unpacked.
  DType operand_type(const DeviceWeight& w) const {
    return lt == nullptr ? DType::f32 : w.tiled() ? DType::bf16 : w.type;
  }
  /// Whether so many rows go through the kernels that stream this weight.
  bool streams(std::int64_t n, const DeviceWeight& w) const {
    return w.tiled() ? precision == Precision::fast && n <= kTiledRows && streams_tiles(w) : n <= kFusedRows;
  }
  bool streams(std::int64_t n, std::initializer_list<const DeviceWeight*> all) const {
    return std::all_of(all.begin(), all.end(), [&](const DeviceWeight* w) { return streams(n, *w); });
  }

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
  /// y = x w^T (+ y), rows of y `stride` numbers apart
  void dense_product(const Operand& x, const Operand& w, bool add, float* y, std::int64_t stride) const {
    if (lt != nullptr && x.type == w.type && lt->multiply(x, w, add, y, stream, stride)) return;
    gemm_f32(x, w, {}, add, y, stream, stride);
  }
  /// y = x w^T (+ y) + bias
  void product(const Operand& x, const DeviceWeight& w, const Vector& bias, bool add, float* y) const {
    const Operand weight{w.data, w.type, w.rows, w.cols};
    if (w.tiled()) {
      for_panels(
          w, x.type, panel.as<void>(), panel.bytes(), stream,
          [&](const Operand& rows, std::int64_t first) { dense_product(x, rows, add, y + first, w.rows); });
      add_bias(y, x.rows, w.rows, bias, stream);
    } else if (lt != nullptr && x.type == w.type && lt->multiply(x, weight, add, y, stream)) {
      add_bias(y, x.rows, w.rows, bias, stream);
    } else {
      gemm_f32(x, weight, bias, add, y, stream);
    }
  }
  /// x += y, [n, cols].
  void add(std::int64_t n, std::int64_t cols, const Addition& addition, const float* y, float* x) const {
    add_scaled(y, n, cols, addition, x, stream);
  }
  /// act = activation(gate) * up where the two are products of their own.
  void gate_and_up(const MlpArguments& a, const StepInput& input, const GateUpStep<float>& step) const {
    float* const gate = products();
    float* const up = gate + input.n * a.gate.rows;
    Operand h;
    const auto multiply = [&](const DeviceWeight& w, float* y) {
      if (streams(input.n, w)) return few_rows(w, {}, input, y, false);
      if (h.data == nullptr || operand_type(w) != h.type)
        h = normalised(input.x, input.n, a.norm, a.eps, operand_type(w));
      product(h, w, {}, false, y);
    };
    multiply(a.gate, gate);
    multiply(a.up, up);
    finish_gate_up(step, input.n, gate, up, stream);
  }
  /// One product of few rows, normalised where the input has a gain.
  void few_rows(const DeviceWeight& w, const Vector& bias, const StepInput& input, float* y, bool add) const {
    if (w.tiled()) return stream_product(w, bias, input, y, add, stream);
    with_type(w.type, [&](auto type) {
      one_kernel(PlainStep{as(w, type), w.rows, w.cols, bias, y, add}, input);
    });
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
  if (m.streams(n, w)) return m.few_rows(w, vector_of(bias), {x, {}, 0.0f, n, w.cols}, y, add);
  m.product(m.rounded(x, n, w.cols, m.operand_type(w)), w, vector_of(bias), add, y);
}

void Linear::multiply_stream(const float* x, std::int64_t n, const DeviceWeight& w, float* y) {
  const Impl& m = *impl_;
  if (m.streams(n, w) || m.operand_type(w) != DType::f16) return multiply(x, n, w, {}, y, false);
  m.product({x, DType::f32, n, w.cols}, w, {}, false, y);
}

void Linear::qkv(const QkvArguments& a, const Queries& where) {
  const Impl& m = *impl_;
  const std::int64_t n = where.count;
  const StepInput input = {a.x, vector_of(a.norm), a.eps, n, a.q.cols};
  const bool apart = a.finishes_heads(), few = !apart && m.streams(n, {&a.q, &a.k, &a.v}),
             tiled = a.q.tiled() && a.k.tiled() && a.v.tiled();
  const QkvStep<float> finish = qkv_step<float>(a, where);
  if (few && tiled && streams_heads(finish)) return stream_qkv(finish, a.q, a.k, a.v, input, m.stream);
  if (few && same_type({&a.q, &a.k, &a.v})) {
    with_type(a.q.type, [&](auto type) {
      using W = std::remove_cv_t<std::remove_pointer_t<decltype(type)>>;
      m.one_kernel(qkv_step<W>(a, where), input);
    });
    return;
  }
  m.need(n, a.q.cols, a.q.rows + a.k.rows + a.v.rows);
  float* q = m.products();
  float* k = q + n * a.q.rows;
  float* v = a.v.data == nullptr ? k : k + n * a.k.rows;
  struct Part {
    DeviceWeight w;
    float* y;
  };
  std::vector<Part> parts = {{a.q, q}};
  for (const Part& next : {Part{a.k, k}, Part{a.v, v}}) {
    if (next.w.data == nullptr) continue;
    if (n == 1 && parts.back().w.rows % kTileRows == 0 && continues(parts.back().w, next.w))
      parts.back().w.rows += next.w.rows;  // as one matrix, whose outputs of one row lie side by side
    else
      parts.push_back(next);
  }
  Operand h;
  for (const Part& part : parts) {
    if (m.streams(n, part.w)) {
      m.few_rows(part.w, {}, input, part.y, false);
      continue;
    }
    const DType type = m.operand_type(part.w);
    if (h.data == nullptr || h.type != type) h = m.normalised(a.x, n, a.norm, a.eps, type);
    m.product(h, part.w, {}, false, part.y);
  }
  if (!apart) return finish_qkv(finish, n, q, k, v, m.stream);
  finish_heads(finish, norms_of(a), n, q, k, v, m.stream);
}

void Linear::project_out(const float* attention, std::int64_t n, const DeviceWeight& w,
                         const DeviceWeight& bias, float* x, const Addition& addition) {
  if (addition.plain()) return multiply(attention, n, w, bias, x, true);
  impl_->need(n, 0, w.rows);
  multiply(attention, n, w, bias, impl_->products(), false);
  impl_->add(n, w.rows, addition, impl_->products(), x);
}

void Linear::mlp(const MlpArguments& a, std::int64_t n, float* x) {
  const Impl& m = *impl_;
  const StepInput input = {x, vector_of(a.norm), a.eps, n, a.gate.cols};
  const bool down_streams = m.streams(n, a.down);
  m.need(n, std::max(a.gate.cols, a.gate.rows), 2 * a.gate.rows);
  GateUpStep<float> step;
  step.rows = a.gate.rows;
  step.cols = a.gate.cols;
  step.gate_bias = vector_of(a.gate_bias);
  step.up_bias = vector_of(a.up_bias);
  step.activation = a.activation;
  step.act = m.operand();
  step.act_type = down_streams ? DType::f32 : m.operand_type(a.down);
  if (m.streams(n, {&a.gate, &a.up}) && a.gate.tiled() && a.gate.format == a.up.format) {
    stream_gate_up(step, a.gate, a.up, input, m.stream);
  } else if (m.streams(n, {&a.gate, &a.up}) && same_type({&a.gate, &a.up})) {
    with_type(a.gate.type, [&](auto type) {
      m.one_kernel(GateUpStep{as(a.gate, type), as(a.up, type), step.rows, step.cols, step.gate_bias,
                              step.up_bias, step.act, step.act_type, step.activation},
                   input);
    });
  } else {
    m.gate_and_up(a, input, step);
  }
  const bool plain = a.addition.plain() && a.to == nullptr;
  float* const y = a.to != nullptr ? a.to : plain ? x : m.products();
  if (down_streams)
    multiply(static_cast<const float*>(step.act), n, a.down, a.down_bias, y, plain);
  else
    m.product({step.act, step.act_type, n, a.down.cols}, a.down, vector_of(a.down_bias), plain, y);
  if (!plain && a.to == nullptr) m.add(n, a.down.rows, a.addition, m.products(), x);
}

void Linear::add(const float* y, std::int64_t n, std::int64_t hidden, const Addition& addition, float* x) {
  impl_->add(n, hidden, addition, y, x);
}

void Linear::head(const float* x, std::int64_t n, const DeviceWeight& norm, float eps,
                  const DeviceWeight& output, float* logits) {
  const Impl& m = *impl_;
  if (m.streams(n, output))
    return m.few_rows(output, {}, {x, vector_of(norm), eps, n, output.cols}, logits, false);
  m.product(m.normalised(x, n, norm, eps, m.operand_type(output)), output, {}, false, logits);
}

std::int64_t Linear::panel_bytes(std::int64_t rows, std::int64_t cols, Precision precision) {
  // A whole matrix of most models; the products of half a matrix fill the GPU as well.
  constexpr std::int64_t kMost = std::int64_t{128} << 20;
  const std::int64_t row = cols * (precision == Precision::exact ? 4 : 2),
                     all = (rows + kTileRows - 1) / kTileRows * kTileRows;
  return std::max(std::min(all * row, kMost), kTileRows * cols * 4);
}
void Linear::reserve_panel(std::int64_t bytes) {
  if (impl_->panel.bytes() < bytes) impl_->panel = Buffer(bytes, "a panel of unpacked weights");
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
