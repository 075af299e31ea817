// SPDX-License-Identifier: Apache-2.0
#include "model/linear.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/text.h"
#include "kernels/blocks/matmul_blocks.h"
#include "kernels/blocks/matmul_tiled.h"
#include "kernels/dequantise.h"
#include "kernels/kernels.h"
#include "kernels/matmul_narrow.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// LODESTONE_ACTIVATIONS keeps the inputs of products from being rounded further than it says, slowly: what rounded
/// ones are compared with. f32: not at all. int16: to 16 bits, for block-quantised weights. Empty: as is quickest.
std::string_view wanted_activations() {
  const char* const wanted = std::getenv("LODESTONE_ACTIVATIONS");
  const std::string_view name = wanted == nullptr ? "" : wanted;
  if (!name.empty() && name != "f32" && name != "int16")
    throw InputError("LODESTONE_ACTIVATIONS: expected f32 or int16, found '" + excerpt(name) + "'");
  return name;
}

void multiply(const float* x, const Weight& w, std::int64_t rows, float* out, bool narrow, ThreadPool& pool) {
  const auto product = narrow ? matmul_narrow : matmul;
  product({x, rows, w.cols}, w.data, plain_dtype(w.type), w.rows, {out, rows, w.rows}, pool);
}

}  // namespace

std::vector<float> numbers_of(const Weight& vector) {
  std::vector<float> numbers(static_cast<std::size_t>(vector.rows * vector.cols));
  dequantise(vector.type, vector.data, std::ssize(numbers), numbers.data());
  return numbers;
}

void normalise_rows(const Weight& gain, double eps, std::int64_t rows, std::int64_t stride,
                    std::vector<float>& x) {
  const std::vector<float> gains = numbers_of(gain);
  const std::int64_t n = gain.cols;
  for (std::int64_t t = 0; t < rows; ++t) {
    float* const row = x.data() + t * stride;
    const double mean_square = kernels().dot(row, row, n) / static_cast<double>(n);
    const auto inverse = static_cast<float>(1.0 / std::sqrt(mean_square + eps));
    for (std::int64_t i = 0; i < n; ++i) row[i] *= inverse * gains[static_cast<std::size_t>(i)];
  }
}

void add_bias(const Weight& bias, std::int64_t rows, std::vector<float>& to) {
  if (bias.data == nullptr) return;
  const std::vector<float> b = numbers_of(bias);
  for (std::int64_t t = 0; t < rows; ++t) {
    for (std::int64_t i = 0; i < bias.cols; ++i)
      to[static_cast<std::size_t>(t * bias.cols + i)] += b[static_cast<std::size_t>(i)];
  }
}

LinearLayers::LinearLayers(ThreadPool& pool)
    : pool_(pool),
      exact_(wanted_activations() == "f32"),
      has_bf16_(wanted_activations().empty() && bf16_product_kernels() != nullptr) {}

void LinearLayers::add_rows(std::int64_t count, bool narrow, bool exact) {
  if (narrow && !rows_.empty() && rows_.back().narrow) {
    rows_.back().count += count;
    return;
  }
  const bool bf16 = has_bf16_ && !narrow && !exact;
  rows_.push_back({rows_.empty() ? 0 : rows_.back().first + rows_.back().count, count, narrow, bf16});
}

void LinearLayers::multiply_plain(const std::vector<float>& x, const Projection& p) {
  const Weight& w = *p.w;
  for (const Rows& r : rows_)
    if (!in_bf16(r, p))
      multiply(x.data() + r.first * w.cols, w, r.count, p.out->data() + r.first * w.rows, r.narrow, pool_);
}

Bf16Product LinearLayers::bf16_product(const Weight& w, const Matrix<float>& y, std::int64_t first) {
  if (has_tiles(w)) return {&tiles_of(w), nullptr, y, first};
  return {nullptr, reinterpret_cast<const std::uint16_t*>(w.data), y, first};
}

void LinearLayers::multiply_neighbours(const std::vector<float>& x, const Rows& rows,
                                       std::span<const Projection> projections) {
  std::vector<Bf16Product> rounded;
  std::vector<TiledProduct> tiled;
  Matrix<const float> input;
  for (const Projection& p : projections) {
    const Weight& w = *p.w;
    input = {x.data() + rows.first * w.cols, rows.count, w.cols};
    const Matrix<float> to{p.out->data() + rows.first * w.rows, rows.count, w.rows};
    if (in_bf16(rows, p))
      rounded.push_back(bf16_product(w, to));
    else if (has_tiles(w))
      tiled.push_back({&tiles_of(w), to});
    else if (!is_plain(w.type))
      matmul_blocks(input, w.data, w.type, to, pool_);
  }
  if (!rounded.empty()) matmul_bf16(input, rounded, bf16_, pool_);
  if (!tiled.empty()) matmul_tiled(input, tiled, rounded_, pool_);
}

/// In float32 plain weights are multiplied by each entry of rows_ apart. In bf16, and of block-quantised weights, a row has
/// the same bits in any company, so that neighbours share a product.
void LinearLayers::operator()(const std::vector<float>& x, std::initializer_list<Projection> projections) {
  for (const Projection& p : projections)
    if (is_plain(p.w->type)) multiply_plain(x, p);
  for (std::size_t i = 0; i < rows_.size();) {
    Rows neighbours{.first = rows_[i].first, .bf16 = rows_[i].bf16};
    for (; i < rows_.size() && rows_[i].bf16 == neighbours.bf16; ++i) neighbours.count += rows_[i].count;
    multiply_neighbours(x, neighbours, projections);
  }
  const std::int64_t n = rows_.empty() ? 0 : rows_.back().first + rows_.back().count;
  for (const Projection& p : projections)
    if (p.bias != nullptr) add_bias(*p.bias, n, *p.out);
}

void LinearLayers::make_ready(const Weight& w) {
  if (has_tiles(w)) tiles_of(w);
}

void LinearLayers::grouped(const std::vector<float>& x, std::int64_t n, std::span<const RowsProduct> products,
                           std::span<const std::int64_t> order) {
  std::vector<TiledProduct> tiled;
  std::vector<Bf16Product> in_bf16;
  const Weight* last = nullptr;  // of these
  std::int64_t cols = 0;
  const float* input = nullptr;  // of products without tiles
  for (const RowsProduct& p : products) {
    const Weight& w = *p.w;
    if (p.rows == 0) continue;
    cols = w.cols;
    const Matrix<float> to{p.out, p.rows, w.rows};
    if (p.bf16 && takes_bf16(w)) {
      // An expert's rows of several sequences: tiles of one would not be full, and the weight is unpacked once.
      Bf16Product* const before = in_bf16.empty() || last != &w ? nullptr : &in_bf16.back();
      if (before != nullptr && before->first + before->y.rows == p.first &&
          before->y[before->y.rows].data() == p.out)
        before->y.rows += p.rows;
      else
        in_bf16.push_back(bf16_product(w, to, p.first));
      last = &w;
      continue;
    }
    if (has_tiles(w)) {
      tiled.push_back({&tiles_of(w), to, p.first});
      continue;
    }
    if (input == nullptr) input = order.empty() ? x.data() : put_in_order(x, order, cols);
    const float* const rows = input + p.first * cols;
    if (is_plain(w.type))
      multiply(rows, w, p.rows, p.out, p.narrow, pool_);
    else
      matmul_blocks({rows, p.rows, cols}, w.data, w.type, to, pool_);
  }
  if (!tiled.empty()) matmul_tiled({x.data(), n, cols}, tiled, rounded_, pool_, order);
  if (!in_bf16.empty()) matmul_bf16({x.data(), n, cols}, in_bf16, bf16_, pool_, order);
}

const float* LinearLayers::put_in_order(const std::vector<float>& x, std::span<const std::int64_t> order,
                                        std::int64_t cols) {
  in_order_.resize(order.size() * static_cast<std::size_t>(cols));
  for (std::size_t i = 0; i < order.size(); ++i)
    std::copy_n(x.begin() + order[i] * cols, cols, in_order_.begin() + static_cast<std::ptrdiff_t>(i) * cols);
  return in_order_.data();
}

}  // namespace lode
