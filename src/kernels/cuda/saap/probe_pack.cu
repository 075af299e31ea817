// SPDX-License-Identifier: Apache-2.0
// The networks of the bucket classifier as its kernel takes them: integers with a scale for each row.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/cuda/saap/probe_parts.cuh"

namespace lode::cuda {

namespace {

/// One matrix [rows, columns] to its layout at `to`; its scales and biases behind it.
void pack(const NetLayout& layout, std::span<const float> weight, std::span<const float> bias, int rows,
          int columns, std::byte* to) {
  const int all = NetLayout::padded_rows(rows), chunks = NetLayout::padded_columns(columns) / kChunk;
  auto* const scales = reinterpret_cast<float*>(to + layout.weight_bytes(rows, columns));
  for (int r = 0; r < rows; ++r) {
    const std::span<const float> row = weight.subspan(static_cast<std::size_t>(r) * columns, columns);
    float most = 0.0f;
    for (const float x : row) most = std::max(most, std::abs(x));
    const float limit = layout.planes == 2 ? kMost : 127.0f, inverse = most > 0.0f ? limit / most : 0.0f;
    scales[r] = most / limit;
    scales[all + r] = bias.empty() ? 0.0f : bias[static_cast<std::size_t>(r)];
    for (int c = 0; c < columns; ++c) {
      const int whole = static_cast<int>(std::lrint(row[static_cast<std::size_t>(c)] * inverse));
      const int upper = layout.planes == 2 ? (whole + 128) >> 8 : whole, lower = whole - upper * 256;
      const int lane = r % 8 * 4 + c % kChunk / 16;
      const std::int64_t piece = (std::int64_t{r / 16} * chunks + c / kChunk) * layout.planes;
      for (int plane = 0; plane < layout.planes; ++plane) {
        const std::int64_t place = (((piece + plane) * 2 + r % 16 / 8) * 32 + lane) * 16 + c % 16;
        to[place] = static_cast<std::byte>(static_cast<signed char>(plane == 0 ? upper : lower));
      }
    }
  }
}

/// Mean over the rows of their largest number.
double mean_peak(std::span<const float> weight, int rows) {
  const std::size_t columns = weight.size() / static_cast<std::size_t>(rows);
  double sum = 0.0;
  for (int r = 0; r < rows; ++r) {
    float most = 0.0f;
    for (const float x : weight.subspan(static_cast<std::size_t>(r) * columns, columns))
      most = std::max(most, std::abs(x));
    sum += most;
  }
  return sum / rows;
}

/// By which W3 is larger than W2.
float factor_between(const NetLayout& layout, std::span<const float> output,
                     std::span<const float> residual) {
  const double of_output = mean_peak(output, layout.buckets),
               of_residual = mean_peak(residual, layout.buckets);
  return of_output > 0.0 && of_residual > 0.0 ? static_cast<float>(of_residual / of_output) : 1.0f;
}

/// [W2, W3 / factor], W3 where the layout has it.
std::vector<float> side_by_side(const NetLayout& layout, std::span<const float> output,
                                std::span<const float> residual, float factor) {
  const auto columns = static_cast<std::size_t>(layout.columns_of_output()),
             h = static_cast<std::size_t>(layout.hidden), d = static_cast<std::size_t>(layout.inputs);
  std::vector<float> both(static_cast<std::size_t>(layout.buckets) * columns);
  for (std::size_t r = 0; r < static_cast<std::size_t>(layout.buckets); ++r) {
    std::copy_n(output.begin() + static_cast<std::ptrdiff_t>(r * h), h, both.data() + r * columns);
    for (std::size_t c = 0; c < d; ++c)
      both[r * columns + static_cast<std::size_t>(layout.residual_column()) + c] =
          residual[r * d + c] / factor;
  }
  return both;
}

}  // namespace

std::vector<std::byte> pack_net(const NetLayout& layout, std::span<const float> hidden_weight,
                                std::span<const float> hidden_bias, std::span<const float> output_weight,
                                std::span<const float> residual_weight, std::span<const float> bias) {
  std::vector<std::byte> packed(static_cast<std::size_t>(layout.bytes()));
  if (layout.hidden > 0)
    pack(layout, hidden_weight, hidden_bias, layout.hidden, layout.inputs, packed.data());
  std::vector<float> both;
  if (layout.residual) {
    const float factor = factor_between(layout, output_weight, residual_weight);
    std::memcpy(packed.data() + layout.factor_offset(), &factor, sizeof factor);
    both = side_by_side(layout, output_weight, residual_weight, factor);
  }
  pack(layout, layout.residual ? both : output_weight, bias, layout.buckets, layout.columns_of_output(),
       packed.data() + layout.output_offset());
  return packed;
}

}  // namespace lode::cuda
