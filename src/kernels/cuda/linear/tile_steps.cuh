// SPDX-License-Identifier: Apache-2.0
// The steps of a layer over weights in tiles. A block multiplies two tiles at a time, 8 pairs of rows: rows a
// and rows b. What becomes of a pair's two products is the business of the steps of 16-bit weights
// (linear_steps.cuh). The kind of step is known when the kernel runs: one warp finishes rows, and a kernel for
// each kind would be compiled for every format.
#pragma once

#include "kernels/cuda/experts/routing.h"
#include "kernels/cuda/linear/linear_steps.cuh"
#include "kernels/cuda/linear/tile_codec.cuh"

namespace lode::cuda {

/// y = x w^T + bias (+ y); rows 16 i to 16 i + 7 are rows a, the next eight rows b.
struct TileRows {
  std::int64_t rows = 0;
  Vector bias;         // [rows]
  float* y = nullptr;  // [n, rows]
  bool add = false;
};

/// A step over the matrices of experts that lie behind one another. Outputs go to slots (routing.h).
struct ExpertTiles {
  Routing routing;
  std::int64_t stride = 0;  ///< bytes from an expert's tiles to the next one's
  int most_groups = 0;      ///< experts that can be chosen; 0: a matrix of all tokens
  bool by_slot = false;     ///< inputs are those of slots, not of tokens
  bool known = false;       ///< the routing was there before the kernel in front released this one
};

struct TileStep {
  enum class Kind { rows, gate_up, qkv };
  Kind kind = Kind::rows;
  TileFormat format = TileFormat::none;
  const char* matrices[3] = {};  // w; gate, up; q, k, v
  unsigned row_tile_bytes = 0;   // of the tiles of 8 rows, all columns
  unsigned heads_factor = 0;     // 2^32 over the tiles of half a head, rounded up
  int first = 0, count = 0;      // twins: tiles of rows a and b
  TileRows plain;
  GateUpStep<float> gate_up;
  QkvStep<float> qkv;
  ExpertTiles experts;

  /// The tiles of rows a and b of a twin. b is a where there are no rows b.
  __device__ void tiles(int twin, const char*& a, const char*& b) const {
    int at = twin, other = twin;
    const char *m = matrices[0], *n = matrices[0];
    if (kind == Kind::rows) {
      at = 2 * twin;
      other = (at + 1) * kTileRows < plain.rows ? at + 1 : at;
    } else if (kind == Kind::gate_up) {
      n = matrices[1];
    } else {
      const int each = qkv.half / kTileRows,
                head = static_cast<int>(__umulhi(static_cast<unsigned>(twin), heads_factor));
      int local = head;
      if (head >= qkv.query_heads) local -= qkv.query_heads, m = matrices[1];
      if (head >= qkv.query_heads + qkv.kv_heads) local -= qkv.kv_heads, m = matrices[2];
      at = local * 2 * each + (twin - head * each);
      other = at + each;
      n = m;
    }
    a = m + std::uint64_t{static_cast<unsigned>(at)} * row_tile_bytes;
    b = n + std::uint64_t{static_cast<unsigned>(other)} * row_tile_bytes;
  }

  struct Before {
    PlainStep<float>::Before plain;
    GateUpStep<float>::Before gate_up;
    QkvStep<float>::Before qkv;
  };
  __device__ bool inside(int twin, int i) const {
    if (kind == Kind::rows) return std::int64_t{twin} * 16 + i < plain.rows;
    return kind == Kind::qkv || std::int64_t{twin} * kTileRows + i < gate_up.rows;
  }
  /// Biases of experts lie behind one another.
  __device__ Before before(int twin, int i, std::int64_t n, int expert) const {
    Before known;
    if (kind == Kind::rows) {
      const std::int64_t row = std::int64_t{twin} * 16 + i, other = row + kTileRows;
      const bool both = other < plain.rows;
      known.plain.bias_a = plain.bias.or_zero(expert * plain.rows + row);
      if (both) known.plain.bias_b = plain.bias.or_zero(expert * plain.rows + other);
      if (plain.add) known.plain.a = plain.y[n * plain.rows + row];
      if (plain.add && both) known.plain.b = plain.y[n * plain.rows + other];
    } else if (kind == Kind::gate_up) {
      known.gate_up = gate_up.before(expert * gate_up.rows + std::int64_t{twin} * kTileRows + i, n);
    } else {
      known.qkv = qkv.before(std::int64_t{twin} * kTileRows + i, n);
    }
    return known;
  }
  __device__ void finish(int twin, int i, std::int64_t n, float a, float b, const Before& known) const {
    if (kind == Kind::gate_up)
      return gate_up.finish(std::int64_t{twin} * kTileRows + i, n, a, b, known.gate_up);
    if (kind == Kind::qkv) return qkv.finish(std::int64_t{twin} * kTileRows + i, n, a, b, known.qkv);
    const std::int64_t row = std::int64_t{twin} * 16 + i;
    float* const to = plain.y + n * plain.rows + row;
    const auto& at = known.plain;
    to[0] = plain.add ? at.a + (a + at.bias_a) : a + at.bias_a;
    if (row + kTileRows < plain.rows) to[kTileRows] = plain.add ? at.b + (b + at.bias_b) : b + at.bias_b;
  }
};

/// Rows of one step whose inputs fit into shared memory with the rings, of 8, 4 and 1; 0 where not even one
/// does.
int tile_rows_at_once(std::int64_t cols, TileFormat format);
/// One step for up to tile_rows_at_once() rows.
void stream_tiles(const TileStep& step, const StepInput& input, StreamHandle stream);

}  // namespace lode::cuda
