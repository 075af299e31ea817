// SPDX-License-Identifier: Apache-2.0
// What a layer computes besides attention, on the GPU. Rows of activations are float32 (the residual
// stream); weights are bf16, f16 or f32 in their file's type, or block-quantised in tiles (tiles.h). Up to
// kFusedRows rows stream each weight once through our own fused kernels; more go through cuBLASLt. Weights in
// tiles are streamed for up to kTiledRows rows, up to eight at a time; for more they are unpacked, panel by
// panel, for the same products as those of 16 bits.
#pragma once

#include <limits>
#include <string>

#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/linear/tiles.h"

namespace lode::cuda {

inline constexpr int kFusedRows = 8, kTiledRows = 32;

/// A weight matrix [rows, cols] (a vector is [1, n]) in device memory; data null when the model has none.
struct DeviceWeight {
  const void* data = nullptr;
  DType type = DType::bf16;  ///< of numbers that are not in tiles
  std::int64_t rows = 0, cols = 0;
  TileFormat format = TileFormat::none;

  bool tiled() const { return format != TileFormat::none; }
  TileMatrix tiles() const { return {data, format, rows, cols}; }
};

/// Queries at position p are multiplied by 1 + factor * ln(1 + floor(p / start)).
struct QueryGrowth {
  float factor = 0.0f;
  std::int64_t start = 1;
};

/// Whether b's rows lie behind those of a as if they were a's.
inline bool continues(const DeviceWeight& a, const DeviceWeight& b) {
  if (a.data == nullptr || a.format != b.format || a.cols != b.cols || (!a.tiled() && a.type != b.type))
    return false;
  const std::int64_t bytes =
      a.tiled() ? tiled_bytes(a.format, a.rows, a.cols) : a.rows * a.cols * bytes_of(a.type);
  return static_cast<const char*>(a.data) + bytes == b.data;
}

/// What the products g and u of gate and up become: gelu_tanh(g) u, or g sigmoid(slope g) (u + offset) with g at most
/// the limit and u within it. As it stands, SiLU.
struct Activation {
  bool gelu = false;
  float slope = 1.0f, limit = std::numeric_limits<float>::infinity(), offset = 0.0f;
};

/// How what a layer computes comes to the stream: x = (x + multiplier * norm(y)) * factor, the norm only where there is
/// one.
struct Addition {
  DeviceWeight norm;
  float eps = 1e-5f, multiplier = 1.0f, factor = 1.0f;
  bool plain() const { return norm.data == nullptr && multiplier == 1.0f && factor == 1.0f; }
};

/// Holds the cuBLASLt handle, its algorithms and workspace. One per stream.
class Linear {
 public:
  Linear(StreamHandle stream, Precision precision);
  ~Linear();
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  /// The cuBLASLt in use, or why there is none: products of many rows then take our own float32 kernel.
  const std::string& library() const;

  /// y[n, out] = x[n, in] w^T + bias (+ y when add). Any n.
  void multiply(const float* x, std::int64_t n, const DeviceWeight& w, const DeviceWeight& bias, float* y,
                bool add);
  /// y[n, out] = x[n, in] w^T of the stream, whose numbers no norm has kept within float16's range.
  void multiply_stream(const float* x, std::int64_t n, const DeviceWeight& w, float* y);

  // The steps of a layer, each one kernel for n <= kFusedRows.

  /// h = rms_norm(x); q, k, v = projections of h; norms and growth where there are any (then as products and a
  /// kernel behind them); then RoPE at each token's position; keys and values go to
  /// their rows of the KV range. q_unrotated / k_unrotated / v are written when not null. Of heads that are normed there
  /// may be no k, then no rows are written, or no v: values are keys before norm and RoPE.
  struct QkvArguments {
    const float* x = nullptr;  // [N, D]
    DeviceWeight norm, q, k, v, q_bias, k_bias, v_bias;
    float eps = 1e-5f;
    const float* frequencies = nullptr;  // [d/2] radians per position
    int turning = -1;                    ///< pairs of a head that turn; -1 = all
    float rope_scale = 1.0f;             ///< multiplies rotated pairs (yarn)
    DeviceWeight q_norm, k_norm;         // [1, d] each head's, before RoPE; or none
    bool v_norm = false;                 ///< values are normed, without gains
    QueryGrowth growth;
    float* q_out = nullptr;        // [N, Hq, d] after RoPE
    float* q_unrotated = nullptr;  // [N, Hq, d] or null
    float* k_unrotated = nullptr;  // [N, Hkv, d] or null
    float* k_out = nullptr;        // [N, Hkv, d] after RoPE, or null
    float* v_out = nullptr;        // [N, Hkv, d] or null
    /// Whether a kernel behind the products finishes heads.
    bool finishes_heads() const {
      return q_norm.data != nullptr || k_norm.data != nullptr || v_norm || growth.factor != 0.0f;
    }
  };
  /// `where` gives tokens, bases, layer offset and layout (its q and o are not used).
  void qkv(const QkvArguments& arguments, const Queries& where);
  /// y = o w^T + bias; x += y, as `addition` says.
  void project_out(const float* attention /*[n, Hq d]*/, std::int64_t n, const DeviceWeight& w,
                   const DeviceWeight& bias, float* x, const Addition& addition = {});
  /// y = down(activation(gate(h)) * up(h)), h = rms_norm(x); x += y, as `addition` says.
  struct MlpArguments {
    DeviceWeight norm, gate, up, down, gate_bias, up_bias, down_bias;
    float eps = 1e-5f;
    Activation activation;
    Addition addition = {};
    float* to = nullptr;  ///< [n, D] where y goes instead of being added, for a sum over GPUs; or null
  };
  void mlp(const MlpArguments& arguments, std::int64_t n, float* x /*[n, D]*/);
  /// x += y, as `addition` says.
  void add(const float* y /*[n, D]*/, std::int64_t n, std::int64_t hidden, const Addition& addition,
           float* x);
  /// logits[n, V] = rms_norm(x) output^T
  void head(const float* x, std::int64_t n, const DeviceWeight& norm, float eps, const DeviceWeight& output,
            float* logits);

  /// Bytes of scratch held for calls of up to so many rows.
  static std::int64_t scratch_bytes(std::int64_t rows, std::int64_t hidden, std::int64_t intermediate,
                                    std::int64_t q_cols, std::int64_t kv_cols);
  /// Allocates it; calls with more rows throw. Must come before capture.
  void reserve(std::int64_t rows, std::int64_t hidden, std::int64_t intermediate, std::int64_t q_cols,
               std::int64_t kv_cols);
  /// Scratch for panels of an unpacked matrix in tiles, for the largest of a model.
  static std::int64_t panel_bytes(std::int64_t rows, std::int64_t cols, Precision precision);
  void reserve_panel(std::int64_t bytes);

 private:
  struct Impl;
  Impl* impl_;
};

/// x[n, :] = multiplier * embedding[token[n], :]
void embed(const std::int32_t* tokens /*[n] device*/, std::int64_t n, const DeviceWeight& embedding, float* x,
           StreamHandle stream, float multiplier = 1.0f);
/// x[i] *= factor; then, with a cap above 0, x[i] = cap * tanh(x[i] / cap).
void scale_and_cap(float* x, std::int64_t count, float factor, float cap, StreamHandle stream);
/// token[n] = index of the largest logit, lowest index wins ties; a NaN gives -1.
void argmax(const float* logits /*[n, V]*/, std::int64_t n, std::int64_t vocab, std::int32_t* token /*[n]*/,
            StreamHandle stream);

}  // namespace lode::cuda
