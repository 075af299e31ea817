// SPDX-License-Identifier: Apache-2.0
// Attention over given keys, merging of states, and top-k.
#include "lodestone/attention.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "arrays.h"
#include "attention.h"
#include "lodestone/attend.h"
#include "module.h"

namespace lode::python {

namespace {

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
    for (const Array& r : given)
      choices.push_back({.runs = {}, .rows = int32s(r, 1, "rows"), .log_weights = {}});
  } else {
    for (std::size_t h = 0; h < kv.size(); ++h)
      choices.push_back({.runs = all, .rows = {}, .log_weights = {}});
  }
  const std::size_t heads = q.shape(0), d = k.shape(2);
  Buffers out(heads, d);
  const auto threads = shared_threads();
  {
    const nb::gil_scoped_release release;
    attend(queries, kv, choices, scale_of(scale, d), out.state(d), *threads);
  }
  return to_numpy(std::move(out), {heads}, d);
}

State attend_prompt(const ArrayArgument& q_, const ArrayArgument& k_, const ArrayArgument& v_,
                    std::optional<float> scale) {
  const Array q = array_of(q_, "q"), k = array_of(k_, "k"), v = array_of(v_, "v");
  const auto queries = floats(q, 3, "q");
  const auto kv = kv_heads(k, v);
  const std::size_t tokens = q.shape(0), heads = q.shape(1), d = k.shape(2);
  Buffers out(tokens * heads, d);
  const auto threads = shared_threads();
  {
    const nb::gil_scoped_release release;
    attend_causal(queries, static_cast<std::int64_t>(tokens), kv, scale_of(scale, d), out.state(d), *threads);
  }
  return to_numpy(std::move(out), {tokens, heads}, d);
}

using StateArgument = std::pair<ArrayArgument, ArrayArgument>;

std::vector<std::size_t> shape_of(const Array& array) {
  std::vector<std::size_t> shape;
  for (std::size_t i = 0; i < array.ndim(); ++i) shape.push_back(array.shape(i));
  return shape;
}

/// Copies the state number `index` of a merge; its log-sum-exp must be of `rows`, its output of [rows..., d].
Buffers copied(const StateArgument& given, std::size_t index, const std::vector<std::size_t>& rows,
               std::size_t d) {
  const std::string name = "state " + std::to_string(index);
  const Array output = array_of(given.first, name.c_str()), lse = array_of(given.second, name.c_str());
  std::vector<std::size_t> outputs = rows;
  outputs.push_back(d);
  if (shape_of(output) != outputs || shape_of(lse) != rows)
    throw nb::value_error((name + ": expected output [..., d] and lse [...], in all states alike, found " +
                           shape_text(output) + " and " + shape_text(lse))
                              .c_str());
  const auto o = floats(output, output.ndim(), name.c_str());
  const auto l = floats(lse, lse.ndim(), name.c_str());
  Buffers copy(l.size(), d);
  std::copy(o.begin(), o.end(), copy.output.begin());
  std::copy(l.begin(), l.end(), copy.lse.begin());
  return copy;
}

State merge_states(const StateArgument& a, const StateArgument& b, const nb::args& more) {
  std::vector<StateArgument> states = {a, b};
  for (const nb::handle state : more) {
    states.emplace_back();
    if (!nb::try_cast(state, states.back()))
      throw nb::type_error("merge: expected states (output, log-sum-exp), found something else");
  }
  const Array first = array_of(a.first, "state 0");
  std::vector<std::size_t> rows = shape_of(first);
  if (rows.empty()) throw nb::value_error("state 0: expected an output [..., d], found a number");
  const std::size_t d = rows.back();
  rows.pop_back();
  Buffers merged = copied(a, 0, rows, d);
  for (std::size_t i = 1; i < states.size(); ++i)
    merge(merged.state(d), copied(states[i], i, rows, d).state(d));
  return to_numpy(std::move(merged), rows, d);
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
      "Returns (output float32 [Hq, d], log-sum-exp float32 [Hq], natural logarithm); the empty set is (0, "
      "-inf).\n"
      "InputError when rows do not rise or do not exist, ValueError when shapes do not fit, TypeError for "
      "other\n"
      "types of number. For lists that several layers share, plan() checks them once.");
  m.def(
      "attend_causal", &attend_prompt, nb::arg("q"), nb::arg("k"), nb::arg("v"),
      nb::arg("scale") = nb::none(),
      "Causal attention of T query tokens; the last sits at the last row of k.\n\n"
      "q: float32 [T, Hq, d]; k, v: float32, float16 or bfloat16 [Hkv, S, d] with S >= T, keys after RoPE;\n"
      "scale: of q.k, 1/sqrt(d) by default.\n"
      "Returns (output float32 [T, Hq, d], log-sum-exp float32 [T, Hq], natural logarithm).\n"
      "ValueError when shapes do not fit, TypeError for other types of number.");
  m.def("merge", &merge_states, nb::arg("a"), nb::arg("b"), nb::arg("more"),
        nb::sig("def merge(a: tuple[lodestone.ArrayLike, lodestone.ArrayLike], "
                "b: tuple[lodestone.ArrayLike, lodestone.ArrayLike], "
                "*more: tuple[lodestone.ArrayLike, lodestone.ArrayLike]) -> "
                "tuple[numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32]]"),
        "Merges attention over disjoint sets of keys, from left to right; no argument changes.\n\n"
        "Each is a state (output float32 [..., d], log-sum-exp float32 [...], natural logarithm), all of one "
        "shape.\n"
        "Returns the state over all of the keys, as exact as float32 is. ValueError for other shapes, "
        "TypeError for\n"
        "what is no pair of arrays.");
  m.def("top_k", &top_k, nb::arg("scores"), nb::arg("k"),
        "Rising indices, int32, of the k largest of float32 [n], or of all when k > n; ties go to the larger "
        "index, NaN\n"
        "counts as least. ValueError when k < 0.");
}

}  // namespace lode::python
