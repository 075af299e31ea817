// SPDX-License-Identifier: Apache-2.0
// Attention over given keys, merging of states, and top-k.
#include "lodestone/attention.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "arrays.h"
#include "lodestone/attend.h"
#include "module.h"

namespace lode::python {

namespace {

using State = std::pair<nb::ndarray<nb::numpy, float>, nb::ndarray<nb::numpy, float>>;

/// Buffers of a state until they become NumPy arrays.
struct Buffers {
  std::vector<float> output, lse;
  Buffers(std::int64_t rows, std::int64_t d)
      : output(static_cast<std::size_t>(rows * d)), lse(static_cast<std::size_t>(rows)) {}
  AttentionState state(std::int64_t d) {
    return {output.data(), lse.data(), static_cast<std::int64_t>(lse.size()), d};
  }
};

float scale_of(std::optional<float> scale, int d) {
  return scale ? *scale : 1.0f / std::sqrt(static_cast<float>(d));
}

/// Row numbers, int32 [n] in C order.
std::span<const std::int32_t> row_numbers(const Array& array) {
  if (array.dtype() != nb::dtype<std::int32_t>())
    throw nb::type_error("rows: expected int32, found another type of number");
  if (array.ndim() != 1 || (array.shape(0) > 1 && array.stride(0) != 1))
    throw nb::value_error(("rows: expected contiguous arrays [n], found " + shape_text(array)).c_str());
  return {static_cast<const std::int32_t*>(array.data()), array.shape(0)};
}

State attend_rows(const ArrayArgument& q_, const ArrayArgument& k_, const ArrayArgument& v_,
                  const std::optional<std::vector<ArrayArgument>>& rows, std::optional<float> scale) {
  const Array q = array_of(q_, "q"), k = array_of(k_, "k"), v = array_of(v_, "v");
  const auto queries = floats(q, 2, "q");
  const auto kv = kv_heads(k, v);
  std::vector<Run> all = {{0, static_cast<Position>(k.shape(1))}};
  std::vector<KeyChoice> choices;
  std::vector<Array> given;
  if (rows) {
    for (const ArrayArgument& r : *rows) given.push_back(array_of(r, "rows"));
    for (const Array& r : given) choices.push_back({.runs = {}, .rows = row_numbers(r), .log_weights = {}});
  } else {
    for (std::size_t h = 0; h < kv.size(); ++h)
      choices.push_back({.runs = all, .rows = {}, .log_weights = {}});
  }
  const std::size_t heads = q.shape(0), d = k.shape(2);
  Buffers out(static_cast<std::int64_t>(heads), static_cast<std::int64_t>(d));
  const auto threads = shared_threads();
  {
    const nb::gil_scoped_release release;
    attend(queries, kv, choices, scale_of(scale, static_cast<int>(d)),
           out.state(static_cast<std::int64_t>(d)), *threads);
  }
  return {numpy(std::move(out.output), {heads, d}), numpy(std::move(out.lse), {heads})};
}

State attend_prompt(const ArrayArgument& q_, const ArrayArgument& k_, const ArrayArgument& v_,
                    std::optional<float> scale) {
  const Array q = array_of(q_, "q"), k = array_of(k_, "k"), v = array_of(v_, "v");
  const auto queries = floats(q, 3, "q");
  const auto kv = kv_heads(k, v);
  const std::size_t tokens = q.shape(0), heads = q.shape(1), d = k.shape(2);
  Buffers out(static_cast<std::int64_t>(tokens * heads), static_cast<std::int64_t>(d));
  const auto threads = shared_threads();
  {
    const nb::gil_scoped_release release;
    attend_causal(queries, static_cast<std::int64_t>(tokens), kv, scale_of(scale, static_cast<int>(d)),
                  out.state(static_cast<std::int64_t>(d)), *threads);
  }
  return {numpy(std::move(out.output), {tokens, heads, d}), numpy(std::move(out.lse), {tokens, heads})};
}

/// Copies a state and checks that output [rows, d] and lse [rows] fit.
Buffers copied(const Array& output, const Array& lse, Name name) {
  const auto o = floats(output, 2, name);
  const auto l = floats(lse, 1, name);
  if (output.shape(0) != lse.shape(0))
    throw nb::value_error((std::string(name) + ": expected output [rows, d] and lse [rows], found " +
                           shape_text(output) + " and " + shape_text(lse))
                              .c_str());
  Buffers copy(static_cast<std::int64_t>(lse.shape(0)), static_cast<std::int64_t>(output.shape(1)));
  std::copy(o.begin(), o.end(), copy.output.begin());
  std::copy(l.begin(), l.end(), copy.lse.begin());
  return copy;
}

using StateArgument = std::pair<ArrayArgument, ArrayArgument>;

State merge_states(const StateArgument& a_, const StateArgument& b_) {
  const Array a = array_of(a_.first, "first state"), b = array_of(b_.first, "second state");
  Buffers left = copied(a, array_of(a_.second, "first state"), "first state"),
          right = copied(b, array_of(b_.second, "second state"), "second state");
  if (a.shape(0) != b.shape(0) || a.shape(1) != b.shape(1))
    throw nb::value_error(
        ("merge: expected states of one shape, found " + shape_text(a) + " and " + shape_text(b)).c_str());
  const auto d = static_cast<std::int64_t>(a.shape(1));
  merge(left.state(d), right.state(d));
  const std::size_t rows = a.shape(0);
  return {numpy(std::move(left.output), {rows, static_cast<std::size_t>(d)}),
          numpy(std::move(left.lse), {rows})};
}

/// Rising indices of the k largest; ties go to the larger index, NaN counts as least.
nb::ndarray<nb::numpy, std::int32_t> top_k(const ArrayArgument& scores_, std::int64_t k) {
  const Array scores = array_of(scores_, "scores");
  const auto s = floats(scores, 1, "scores");
  if (k < 0) throw nb::value_error("k: expected 0 or more");
  const auto value = [&](std::int32_t i) {
    const float x = s[static_cast<std::size_t>(i)];
    return std::isnan(x) ? -std::numeric_limits<float>::infinity() : x;
  };
  std::vector<std::int32_t> order(s.size());
  std::iota(order.begin(), order.end(), 0);
  const auto count = std::min<std::size_t>(static_cast<std::size_t>(k), order.size());
  const auto better = [&](std::int32_t a, std::int32_t b) {
    return value(a) != value(b) ? value(a) > value(b) : a > b;
  };
  std::nth_element(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(count), order.end(), better);
  order.resize(count);
  std::sort(order.begin(), order.end());
  return numpy(std::move(order), {count});
}

/// Guarded by the GIL. Never destroyed: at exit and after a fork its threads are gone already.
std::shared_ptr<ThreadPool>* the_threads = nullptr;

}  // namespace

std::shared_ptr<ThreadPool> shared_threads() {
  if (the_threads == nullptr) the_threads = new std::shared_ptr<ThreadPool>(make_threads());
  return *the_threads;
}

void bind_attention(nb::module_& m) {
  m.def("_forget_threads", [] { the_threads = nullptr; });
  m.def(
      "attend", &attend_rows, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("rows") = nb::none(),
      nb::arg("scale") = nb::none(),
      "Attention of one query token over chosen keys.\n\n"
      "q: float32 [Hq, d]; k, v: float32, float16 or bfloat16 [Hkv, S, d], keys after RoPE;\n"
      "rows: one int32 array of rising row numbers for each KV head (or each query head); None = all keys;\n"
      "scale: of q.k, 1/sqrt(d) by default.\n"
      "Returns (output float32 [Hq, d], log-sum-exp float32 [Hq]); the empty set is (0, -inf).");
  m.def("attend_causal", &attend_prompt, nb::arg("q"), nb::arg("k"), nb::arg("v"),
        nb::arg("scale") = nb::none(),
        "Causal attention of T query tokens; the last sits at the last row of k.\n\n"
        "q: float32 [T, Hq, d]; k, v: [Hkv, S, d] with S >= T.\n"
        "Returns (output float32 [T, Hq, d], log-sum-exp float32 [T, Hq]).");
  m.def("merge", &merge_states, nb::arg("a"), nb::arg("b"),
        "Merges the states (output [rows, d], log-sum-exp [rows]) of disjoint sets of keys. Exact.");
  m.def("top_k", &top_k, nb::arg("scores"), nb::arg("k"),
        "Rising indices of the k largest of float32 [n]; ties go to the larger index, NaN counts as least.");
}

}  // namespace lode::python
