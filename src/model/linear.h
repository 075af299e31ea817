// SPDX-License-Identifier: Apache-2.0
// A model's linear layers: products of a batch's rows with weights of any type. The bits of a row depend on its
// sequence alone.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "kernels/blocks/matmul_bf16.h"
#include "kernels/tiled_product.h"
#include "model/weights.h"

namespace lode {

class ThreadPool;

/// Adds a vector to each row of `to` [rows, bias.cols], if there is one.
void add_bias(const Weight& bias, std::int64_t rows, std::vector<float>& to);
/// The first gain.cols numbers of each row of x [rows, stride] to a root mean square of 1, times their gains.
void normalise_rows(const Weight& gain, double eps, std::int64_t rows, std::int64_t stride,
                    std::vector<float>& x);
/// A vector's numbers.
std::vector<float> numbers_of(const Weight& vector);

/// out [rows, w.rows] = x [rows, w.cols] w^T + bias. An output that `linear` is called with is large enough.
struct Projection {
  const Weight *w, *bias;  ///< bias null: none
  std::vector<float>* out;
  bool exact = false;  ///< never in bf16: a few numbers that much depends on
};

/// Some consecutive rows of an input times a weight of their own, as of an expert.
struct RowsProduct {
  const Weight* w = nullptr;
  std::int64_t first = 0, rows = 0;  ///< of the input
  float* out = nullptr;              ///< [rows, w->rows]
  bool narrow = false;               ///< by the kernel for generated tokens
  bool bf16 = false;                 ///< by the matrix unit, where the weight's type allows
};

class LinearLayers {
 public:
  explicit LinearLayers(ThreadPool& pool);

  /// Rows of a batch that go through a product together.
  struct Rows {
    std::int64_t first = 0, count = 0;
    bool narrow = false;  ///< generated tokens: by matmul_narrow
    bool bf16 =
        false;  ///< of a context or question, not exact: by the matrix unit, where the weight's type allows
  };

  /// Forgets the rows of the step before.
  void clear() { rows_.clear(); }
  /// Generated tokens side by side are one entry of rows(), others have one for each sequence. Those are multiplied in
  /// bf16 where the CPU has a matrix unit and they need not be `exact`.
  void add_rows(std::int64_t count, bool narrow, bool exact);
  std::span<const Rows> rows() const { return rows_; }

  /// Projections that share their input; block-quantised weights share its rounding too.
  void operator()(const std::vector<float>& x, std::initializer_list<Projection> projections);
  /// Products of rows of x [n, cols] in one parallel loop, each with a weight of its own; with an `order`, of the rows
  /// of x that it names. A weight whose rows are none is not read.
  void grouped(const std::vector<float>& x, std::int64_t n, std::span<const RowsProduct> products,
               std::span<const std::int64_t> order = {});
  /// Whether a product with w can begin at once; make_ready() does what is left to do.
  bool ready(const Weight& w) const { return !has_tiles(w) || w.tiles->made(); }
  void make_ready(const Weight& w);

 private:
  bool has_tiles(const Weight& w) const { return !exact_ && w.tiles != nullptr; }
  const TiledWeight& tiles_of(const Weight& w) { return w.tiles->get(w.type, w.data, w.rows, w.cols, pool_); }
  const float* put_in_order(const std::vector<float>& x, std::span<const std::int64_t> order,
                            std::int64_t cols);
  bool takes_bf16(const Weight& w) const { return w.type == WeightType::bf16 || has_tiles(w); }
  bool in_bf16(const Rows& rows, const Projection& p) const {
    return rows.bf16 && !p.exact && takes_bf16(*p.w);
  }
  Bf16Product bf16_product(const Weight& w, const Matrix<float>& y, std::int64_t first = 0);
  void multiply_plain(const std::vector<float>& x, const Projection& p);
  /// What multiply_plain leaves of rows side by side that are alike.
  void multiply_neighbours(const std::vector<float>& x, const Rows& rows,
                           std::span<const Projection> projections);

  ThreadPool& pool_;
  RoundedRows rounded_;          // the input of block-quantised products
  Bf16Scratch bf16_;             // of products in bf16
  std::vector<float> in_order_;  // that of others in another order than x
  bool exact_;                   // block-quantised products take float32 inputs instead
  bool has_bf16_;                // rows may be rounded to bf16
  std::vector<Rows> rows_;
};

}  // namespace lode
