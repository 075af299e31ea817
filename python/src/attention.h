// SPDX-License-Identifier: Apache-2.0
// What attention gives to Python.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "arrays.h"
#include "lodestone/attend.h"
#include "lodestone/attention.h"

namespace lode::python {

/// Output [..., d] and log-sum-exp [...].
using State = std::pair<nb::ndarray<nb::numpy, float>, nb::ndarray<nb::numpy, float>>;
/// Buffers of a state until they become NumPy arrays.
struct Buffers {
  std::vector<float> output, lse;
  Buffers(std::size_t rows, std::size_t d) : output(rows * d), lse(rows) {}
  AttentionState state(std::size_t d) {
    return {output.data(), lse.data(), static_cast<std::int64_t>(lse.size()), static_cast<std::int64_t>(d)};
  }
};

/// Arrays of `rows` (the log-sum-exp's shape) and [rows..., d].
inline State to_numpy(Buffers buffers, std::vector<std::size_t> rows, std::size_t d) {
  auto lse = numpy(std::move(buffers.lse), rows);
  rows.push_back(d);
  return {numpy(std::move(buffers.output), rows), std::move(lse)};
}

/// 1 / sqrt(d) unless it is given.
inline float scale_of(std::optional<float> scale, std::size_t d) {
  return scale ? *scale : 1.0f / std::sqrt(static_cast<float>(d));
}

/// Queries [Hq, d] or [T, Hq, d] are to fit keys [Hkv, S, d]. ValueError otherwise.
void check_queries(const Array& q, const Array& k, std::optional<std::size_t> most_heads);
/// A state's arrays are to be [..., d] and [...], the first alike to `first` unless that is null.
void check_state(const Array& output, const Array& lse, const Array* first, Name name);
/// Queries [B, Hq, d] are to fit a plan, and d the keys.
void check_planned_queries(const AttentionPlan& plan, const Array& q, std::size_t d);

/// The three signatures that type checkers see of a function: NumPy arrays give NumPy arrays, CudaArrays their like,
/// and arrays of others either, which is left open. `text` has $array for the type of the array that decides, $result
/// for that of an array in the result, of numbers `result`, $float32 for another one, and $stream and $out for those of
/// these arguments.
std::string signatures(std::string_view text, std::string_view result = "float32");
/// Those of a function that gives an output, and with return_lse a state; `arguments` is what is in front of return_lse,
/// `by_name` what else is given by name, in front of the stream.
std::string state_signatures(const std::string& arguments, const std::string& by_name = "");

}  // namespace lode::python
