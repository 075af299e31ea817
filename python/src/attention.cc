// SPDX-License-Identifier: Apache-2.0
// Attention over given keys, merging of states, and top-k.
#include "lodestone/attention.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <optional>

#include "arrays.h"
#include "attention.h"
#include "gpu_calls.h"
#include "lodestone/attend.h"
#include "module.h"

namespace lode::python {

namespace {

nb::object attend_rows(const ArrayArgument& q_, const ArrayArgument& k_, const ArrayArgument& v_,
                       nb::handle rows, std::optional<float> scale, nb::handle stream, nb::handle out_,
                       bool check) {
  if (const auto gpu = gpu_of(q_)) return gpu_attend(q_, k_, v_, rows, scale, check, {*gpu, stream, out_});
  check_cpu_options(stream, out_);
  const Array q = array_of(q_, "q"), k = array_of(k_, "k"), v = array_of(v_, "v");
  const auto queries = floats(q, 2, "q");
  const auto kv = kv_heads(k, v);
  check_queries(q, k, std::nullopt);
  std::vector<Run> all = {{0, static_cast<Position>(k.shape(1))}};
  std::vector<KeyChoice> choices;
  std::vector<Array> given;
  if (!rows.is_none()) {
    for (const ArrayArgument& r : row_arrays(rows)) given.push_back(array_of(r, "rows"));
    for (const Array& r : given)
      if (r.ndim() == 0)
        throw nb::value_error(
            "rows: expected an int32 array for each KV head or each query head, found one array of numbers; "
            "give a list of arrays");
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
  return nb::cast(to_numpy(std::move(out), {heads}, d));
}

nb::object attend_prompt(const ArrayArgument& q_, const ArrayArgument& k_, const ArrayArgument& v_,
                         std::optional<float> scale, nb::handle stream, nb::handle out_) {
  if (const auto gpu = gpu_of(q_)) return gpu_attend_causal(q_, k_, v_, scale, {*gpu, stream, out_});
  check_cpu_options(stream, out_);
  const Array q = array_of(q_, "q"), k = array_of(k_, "k"), v = array_of(v_, "v");
  const auto queries = floats(q, 3, "q");
  const auto kv = kv_heads(k, v);
  check_queries(q, k, std::nullopt);
  const std::size_t tokens = q.shape(0), heads = q.shape(1), d = k.shape(2);
  Buffers out(tokens * heads, d);
  const auto threads = shared_threads();
  {
    const nb::gil_scoped_release release;
    attend_causal(queries, static_cast<std::int64_t>(tokens), kv, scale_of(scale, d), out.state(d), *threads);
  }
  return nb::cast(to_numpy(std::move(out), {tokens, heads}, d));
}

/// Copies the state number `index` of a merge, alike in shape to the first one's output.
Buffers copied(const StateArgument& given, std::size_t index, const Array& first) {
  const std::string name = "state " + std::to_string(index);
  const Array output = array_of(given.first, name.c_str()), lse = array_of(given.second, name.c_str());
  check_state(output, lse, &first, name.c_str());
  const auto o = floats(output, output.ndim(), name.c_str());
  const auto l = floats(lse, lse.ndim(), name.c_str());
  Buffers copy(l.size(), output.shape(output.ndim() - 1));
  std::copy(o.begin(), o.end(), copy.output.begin());
  std::copy(l.begin(), l.end(), copy.lse.begin());
  return copy;
}

nb::object merge_states(const StateArgument& a, const StateArgument& b, const nb::args& more,
                        nb::handle stream, nb::handle out) {
  std::vector<StateArgument> states = {a, b};
  for (const nb::handle state : more) {
    states.emplace_back();
    if (!nb::try_cast(state, states.back()))
      throw nb::type_error("merge: expected states (output, log-sum-exp), found something else");
  }
  if (const auto gpu = gpu_of(a.first)) return gpu_merge(states, {*gpu, stream, out});
  check_cpu_options(stream, out);
  const Array first = array_of(a.first, "state 0");
  Buffers merged = copied(a, 0, first);
  std::vector<std::size_t> rows = shape_of(first);
  const std::size_t d = rows.back();
  rows.pop_back();
  for (std::size_t i = 1; i < states.size(); ++i)
    merge(merged.state(d), copied(states[i], i, first).state(d));
  return nb::cast(to_numpy(std::move(merged), rows, d));
}

/// Rising indices of the k largest; ties go to the larger index, NaN counts as least.
nb::object top_k(const ArrayArgument& scores_, std::int64_t k, nb::handle stream, nb::handle out) {
  if (const auto gpu = gpu_of(scores_)) return gpu_top_k(scores_, k, {*gpu, stream, out});
  check_cpu_options(stream, out);
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
  return nb::cast(numpy(std::move(order), {count}));
}

/// Guarded by the GIL. Never destroyed: at exit and after a fork its threads are gone already.
std::shared_ptr<ThreadPool>* the_threads = nullptr;

}  // namespace

void check_cpu_options(nb::handle stream, nb::handle out) {
  for (const auto& [name, value] : {std::pair{"stream", stream}, std::pair{"out", out}})
    if (!value.is_none())
      throw nb::value_error(
          (std::string(name) + ": expected None, since the arrays lie in the CPU's memory, found a value")
              .c_str());
}

void check_queries(const Array& q, const Array& k, std::optional<std::size_t> most_heads) {
  const std::size_t kv_heads = k.shape(0), heads = q.shape(q.ndim() - 2);
  if (kv_heads > 0 && heads > 0 && heads % kv_heads == 0 && heads <= most_heads.value_or(heads) &&
      q.shape(q.ndim() - 1) == k.shape(2))
    return;
  throw nb::value_error(("q: expected [" + std::string(q.ndim() == 3 ? "tokens, " : "") + "a multiple of " +
                         std::to_string(kv_heads) + " heads" +
                         (most_heads ? " up to " + std::to_string(*most_heads) : "") + ", " +
                         std::to_string(k.shape(2)) + "] as k has them, found " + shape_text(q))
                            .c_str());
}

std::vector<ArrayArgument> row_arrays(nb::handle rows) {
  std::vector<ArrayArgument> arrays;
  if (!nb::try_cast(rows, arrays))
    throw nb::type_error((std::string("rows: expected a sequence of int32 arrays, found ") +
                          nb::str(rows.type().attr("__name__")).c_str())
                             .c_str());
  return arrays;
}

void check_state(const Array& output, const Array& lse, const Array* first, Name name) {
  std::vector<std::size_t> rows = shape_of(output);
  if (rows.empty())
    throw nb::value_error((std::string(name) + ": expected an output [..., d], found a number").c_str());
  const bool alike = first == nullptr || shape_of(*first) == rows;
  rows.pop_back();
  if (!alike || shape_of(lse) != rows)
    throw nb::value_error((std::string(name) +
                           ": expected output [..., d] and lse [...], in all states alike, found " +
                           shape_text(output) + " and " + shape_text(lse))
                              .c_str());
}

std::string signatures(std::string_view text, std::string_view result) {
  constexpr std::string_view kStream = "lodestone.StreamLike | None";
  const std::string numpy = "numpy.typing.NDArray[numpy." + std::string(result) + "]";
  const std::array<std::array<std::string_view, 5>, 3> kinds = {{
      {"numpy.typing.NDArray[typing.Any]", numpy, "None", "None", "numpy.typing.NDArray[numpy.float32]"},
      {"CudaArray", "CudaArray", kStream, "None", "CudaArray"},
      {"lodestone.ArrayLike", "typing.Any", kStream, "typing.Any", "typing.Any"},
  }};
  constexpr std::array<std::string_view, 5> kNames = {"$array", "$result", "$stream", "$out", "$float32"};
  std::string all;
  for (const auto& kind : kinds) {
    std::string one(text);
    for (std::size_t i = 0; i < kNames.size(); ++i)
      for (std::size_t at; (at = one.find(kNames[i])) != std::string::npos;)
        one.replace(at, kNames[i].size(), kind[i]);
    all += (all.empty() ? "@overload\n" : ": ...\n@typing.overload\n") + one;
  }
  return all;
}

std::string state_signatures(const std::string& arguments, const std::string& by_name) {
  const std::string more = by_name + ", stream: $stream = None, out: $out = None) -> ";
  return signatures(arguments + "return_lse: typing.Literal[False] = False, *" + more + "$result") +
         ": ...\n@typing." +
         signatures(arguments + "*, return_lse: typing.Literal[True]" + more + "tuple[$result, $result]")
             .substr(1);
}

std::shared_ptr<ThreadPool> shared_threads() {
  if (the_threads == nullptr) the_threads = new std::shared_ptr<ThreadPool>(make_threads());
  return *the_threads;
}

void bind_attention(nb::module_& m) {
  m.def("_forget_threads", [] { the_threads = nullptr; });
  m.def(
      "attend", &attend_rows, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("rows") = nb::none(),
      nb::arg("scale") = nb::none(), nb::kw_only(), nb::arg("stream") = nb::none(),
      nb::arg("out") = nb::none(), nb::arg("check") = false,
      nb::sig(signatures("def attend(q: $array, k: lodestone.ArrayLike, v: lodestone.ArrayLike, "
                         "rows: collections.abc.Sequence[lodestone.ArrayLike] | lodestone.ArrayLike | None = "
                         "None, scale: float | None = None, *, stream: $stream = None, out: $out = None, "
                         "check: bool = False) -> tuple[$result, $result]")
                  .c_str()),
      "Attention of one query token over chosen keys.\n\n"
      "q: float32 [Hq, d]; k, v: float32, float16 or bfloat16 [Hkv, S, d], keys after RoPE;\n"
      "rows: one int32 array of rising row numbers for each KV head (or each query head); None = all keys;\n"
      "scale: of q.k, 1/sqrt(d) by default.\n"
      "Returns (output float32 [Hq, d], log-sum-exp float32 [Hq], natural logarithm); the empty set is (0, "
      "-inf).\n"
      "InputError when rows do not rise or do not exist, ValueError when shapes do not fit, TypeError for "
      "other\n"
      "types of number. For lists that several layers share, plan() checks them once.\n\n"
      "On a GPU (all arrays on one): runs in stream, an int or an object with cuda_stream, ptr or "
      "__cuda_stream__ (None:\n"
      "the legacy default stream), waits for nothing, and gives CudaArrays, or fills out=(output, "
      "log-sum-exp). rows may\n"
      "also be one array [Hkv, n] or [Hq, n]. Rows of k and v may have any strides; q is rounded to their "
      "type. "
      "Row numbers\n"
      "are looked at by check=True alone, which waits for the stream: without it a row that does not exist "
      "makes its\n"
      "heads NaN, and one that comes twice counts twice.");
  m.def(
      "attend_causal", &attend_prompt, nb::arg("q"), nb::arg("k"), nb::arg("v"),
      nb::arg("scale") = nb::none(), nb::kw_only(), nb::arg("stream") = nb::none(),
      nb::arg("out") = nb::none(),
      nb::sig(signatures("def attend_causal(q: $array, k: lodestone.ArrayLike, v: lodestone.ArrayLike, "
                         "scale: float | None = None, *, stream: $stream = None, out: $out = None) -> "
                         "tuple[$result, $result]")
                  .c_str()),
      "Causal attention of T query tokens; the last sits at the last row of k.\n\n"
      "q: float32 [T, Hq, d]; k, v: float32, float16 or bfloat16 [Hkv, S, d] with S >= T, keys after RoPE;\n"
      "scale: of q.k, 1/sqrt(d) by default; stream, out and arrays on a GPU: as in attend.\n"
      "Returns (output float32 [T, Hq, d], log-sum-exp float32 [T, Hq], natural logarithm).\n"
      "ValueError when shapes do not fit, TypeError for other types of number.");
  m.def("merge", &merge_states, nb::arg("a"), nb::arg("b"), nb::arg("more"), nb::arg("stream") = nb::none(),
        nb::arg("out") = nb::none(),
        nb::sig(signatures("def merge(a: tuple[$array, $array], "
                           "b: tuple[lodestone.ArrayLike, lodestone.ArrayLike], "
                           "*more: tuple[lodestone.ArrayLike, lodestone.ArrayLike], stream: $stream = None, "
                           "out: $out = None) -> tuple[$result, $result]")
                    .c_str()),
        "Merges attention over disjoint sets of keys, from left to right; no argument changes.\n\n"
        "Each is a state (output float32 [..., d], log-sum-exp float32 [...], natural logarithm), all of one "
        "shape.\n"
        "Returns the state over all of the keys, as exact as float32 is. ValueError for other shapes, "
        "TypeError for\n"
        "what is no pair of arrays. stream, out and states on a GPU: as in attend; out may be one of the "
        "states.");
  m.def(
      "top_k", &top_k, nb::arg("scores"), nb::arg("k"), nb::kw_only(), nb::arg("stream") = nb::none(),
      nb::arg("out") = nb::none(),
      nb::sig(signatures("def top_k(scores: $array, k: int, *, stream: $stream = None, out: $out = None) -> "
                         "$result",
                         "int32")
                  .c_str()),
      "Rising indices, int32, of the k largest of float32 [n], or of all when k > n; ties go to the larger "
      "index, NaN\n"
      "counts as least. ValueError when k < 0. stream, out (int32 [k]) and scores on a GPU: as in attend.");
}

}  // namespace lode::python
