// SPDX-License-Identifier: Apache-2.0
// What stands around attention over latent rows (model/layer_plan.h, LatentPlan): products of each head with a matrix of
// its own, and how queries and rows are put together, turned and stored.
#pragma once

#include "kernels/cuda/attend/attend.h"
#include "kernels/cuda/linear/linear.h"

namespace lode::cuda {

/// A row's numbers lie so that RoPE turns the first numbers of its two halves: in each half `rope / 2` that turn, then
/// latent ones.
struct LatentShape {
  int kv_rank = 0, rope = 0, nope = 0;
  bool interleaved = true;  ///< neighbours turn together; else the two halves of the turning part

  LODE_HD int row() const { return kv_rank + rope; }
  /// Latent numbers of the first half.
  LODE_HD int in_half() const { return (kv_rank + rope) / 2 - rope / 2; }
};

/// Of each head `split` numbers of its input from `first` on, then the others from `second` on.
struct HeadInput {
  const float* x = nullptr;  // [n, heads, stride]
  std::int64_t stride = 0;
  int first = 0, split = 0, second = 0;

  LODE_HD int place(int column) const { return column < split ? first + column : second + column - split; }
};

/// y[t, h, :] = x[t, h, :] w_h^T for every token and head.
struct HeadProduct {
  HeadInput input;
  std::int64_t tokens = 0;
  int heads = 0;
  DeviceWeight w;      // [heads * rows, cols], the heads' matrices behind one another; not in tiles
  float* y = nullptr;  // [n, heads, rows]
  std::int64_t rows() const { return w.rows / heads; }
};

/// In float32, each matrix read once for up to eight tokens. The bits of a token do not depend on the others.
void multiply_heads_few(const HeadProduct& product, StreamHandle stream);
/// For many tokens: on the matrix unit where the weights have 16 bits, the precision is fast and columns are a multiple
/// of 8; else in float32. The bits of a token do not depend on the others.
void multiply_heads(const HeadProduct& product, Precision precision, void* scratch, StreamHandle stream);
/// Scratch of multiply_heads for matrices of up to so many columns.
std::int64_t heads_scratch_bytes(std::int64_t tokens, int heads, std::int64_t most_cols);

/// Queries and rows of some tokens, before RoPE and before the row's norm.
struct LatentRows {
  LatentShape shape;
  const float* q = nullptr;       // [N, Hq, nope + rope], of which the last numbers turn
  const float* folded = nullptr;  // [N, Hq, kv_rank] the others, behind W_k
  const float* kv = nullptr;      // [N, kv_rank + rope]
  DeviceWeight kv_norm;           // [1, kv_rank] of the latent part
  float eps = 1e-5f;
  const float* frequencies = nullptr;                                // [row / 2]
  float rope_scale = 1.0f;                                           ///< multiplies turned pairs (yarn)
  float *q_out = nullptr, *q_unrotated = nullptr;                    // [N, Hq, row]; the second may be null
  float *k_out = nullptr, *k_unrotated = nullptr, *v_out = nullptr;  // [N, Hkv, row] or null; v_out is k_out
};
/// Puts queries together, and rows into their place in the KV range: `where` gives tokens, bases, layer offset and
/// layout, whose rows all heads share.
void put_latent_rows(const LatentRows& rows, const Queries& where, StreamHandle stream);

}  // namespace lode::cuda
