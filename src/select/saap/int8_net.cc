// SPDX-License-Identifier: Apache-2.0
#include "select/saap/int8_net.h"

#include <algorithm>
#include <limits>

#include "kernels/int8_product.h"
#include "kernels/kernels.h"

namespace lode {

namespace {

constexpr int kMostCode = 127;

/// The largest number of a vector's codes, so that no sum of `columns` products leaves 32 bits.
int limit_for(std::int64_t columns) {
  constexpr std::int64_t kMostSum = std::numeric_limits<std::int32_t>::max(),
                         kMostInt16 = std::numeric_limits<std::int16_t>::max();
  return static_cast<int>(std::clamp<std::int64_t>(kMostSum / (kMostCode * columns), 1, kMostInt16));
}

}  // namespace

Int8Net::Product::Product(const std::vector<std::byte>& weights, DType type, std::int64_t inputs_)
    : inputs(inputs_), columns((inputs_ + kInt8Columns - 1) / kInt8Columns * kInt8Columns) {
  const std::int64_t row_bytes = inputs * bytes_of(type), rows = std::ssize(weights) / row_bytes;
  std::vector<float> row(static_cast<std::size_t>(inputs));
  std::vector<std::int16_t> wide(row.size());
  codes.assign(static_cast<std::size_t>((rows + kInt8Rows - 1) / kInt8Rows * kInt8Rows * columns), 0);
  for (std::int64_t r = 0; r < rows; ++r) {
    kernels().widen(weights.data() + r * row_bytes, type, inputs, row.data());
    scales.push_back(int8_product_kernels().encode(row.data(), inputs, kMostCode, wide.data()));
    const std::int64_t piece = r / kInt8Rows * kInt8Rows * columns + r % kInt8Rows * kInt8Columns;
    for (std::int64_t i = 0; i < inputs; ++i) {
      const std::int64_t at = piece + i / kInt8Columns * kInt8Columns * kInt8Rows + i % kInt8Columns;
      codes[static_cast<std::size_t>(at)] = static_cast<std::int8_t>(wide[static_cast<std::size_t>(i)]);
    }
  }
}

Int8Net::Int8Net(const BucketNet& net)
    : inputs_(net.inputs),
      hidden_(net.hidden),
      buckets_(net.buckets),
      hidden_bias_(net.hidden_bias),
      bias_(net.bias) {
  if (hidden_ > 0) {
    first_ = Product(net.hidden_weight, net.type, inputs_);
    output_ = Product(net.output_weight, net.type, hidden_);
  }
  if (!net.linear_weight.empty()) linear_ = Product(net.linear_weight, net.type, inputs_);
}

std::int64_t Int8Net::bytes() const {
  std::int64_t bytes = (std::ssize(hidden_bias_) + std::ssize(bias_)) * std::int64_t{sizeof(float)};
  for (const Product* w : {&first_, &output_, &linear_})
    bytes += std::ssize(w->codes) + w->rows() * std::int64_t{sizeof(float)};
  return bytes;
}

void Int8Net::multiply(const Product& w, const float* x, int vectors, bool add, Scratch& scratch, float* y) {
  const Int8ProductKernels& table = int8_product_kernels();
  const std::int64_t rows = w.rows();
  scratch.codes.assign(static_cast<std::size_t>(vectors * w.columns), 0);
  scratch.scales.resize(static_cast<std::size_t>(vectors));
  scratch.sums.resize(static_cast<std::size_t>(vectors * rows));
  for (int m = 0; m < vectors; ++m)
    scratch.scales[static_cast<std::size_t>(m)] =
        table.encode(x + m * w.inputs, w.inputs, limit_for(w.columns), scratch.codes.data() + m * w.columns);
  table.products(scratch.codes.data(), vectors, w.codes.data(), rows, w.columns, scratch.sums.data());
  for (int m = 0; m < vectors; ++m) {
    const float scale = scratch.scales[static_cast<std::size_t>(m)];
    const std::int32_t* const sums = scratch.sums.data() + m * rows;
    const float* const scales = w.scales.data();
    float* const out = y + m * rows;
    for (std::int64_t r = 0; r < rows; ++r) {
      const float value = static_cast<float>(sums[r]) * (scale * scales[r]);
      out[r] = add ? out[r] + value : value;
    }
  }
}

void Int8Net::scores(const float* x, std::int64_t n, Scratch& scratch, float* y) const {
  const auto add_bias = [](std::span<const float> bias, float* out) {
    for (std::size_t i = 0; i < bias.size(); ++i) out[i] += bias[i];
  };
  for (std::int64_t at = 0; at < n; at += kMostInt8Vectors) {
    const auto vectors = static_cast<int>(std::min<std::int64_t>(kMostInt8Vectors, n - at));
    const float* const in = x + at * inputs_;
    float* const out = y + at * buckets_;
    if (hidden_ > 0) {
      scratch.hidden.resize(static_cast<std::size_t>(vectors * hidden_));
      multiply(first_, in, vectors, false, scratch, scratch.hidden.data());
      for (int m = 0; m < vectors; ++m) {
        float* const h = scratch.hidden.data() + m * hidden_;
        add_bias(hidden_bias_, h);
        // A NaN stays: what comes of it must not look like a choice.
        for (std::int64_t i = 0; i < hidden_; ++i) h[i] = h[i] < 0.0f ? 0.0f : h[i];
      }
      multiply(output_, scratch.hidden.data(), vectors, false, scratch, out);
    }
    if (linear_.rows() > 0) multiply(linear_, in, vectors, hidden_ > 0, scratch, out);
    for (int m = 0; m < vectors; ++m) add_bias(bias_, out + m * buckets_);
  }
}

}  // namespace lode
