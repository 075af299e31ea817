// SPDX-License-Identifier: Apache-2.0
// Key lists that are planned once a step and run in each layer.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <optional>

#include "arrays.h"
#include "attention.h"
#include "lodestone/attend.h"
#include "lodestone/error.h"
#include "module.h"

namespace lode::python {

namespace {

/// Pages [n], or runs of rows [n, 2] in the form of Run.
void set_indices(KeyLists& lists, const Array& indices) {
  constexpr Name kName = "indices";
  if (indices.ndim() != 2) {
    lists.pages = int32s(indices, 1, kName);
    return;
  }
  const std::span<const std::int32_t> ends = int32s(indices, 2, kName);
  if (indices.shape(1) != 2)
    throw nb::value_error(
        ("indices: expected pages [n] or runs [n, 2], found " + shape_text(indices)).c_str());
  static_assert(sizeof(Run) == 2 * sizeof(std::int32_t));
  lists.runs = {reinterpret_cast<const Run*>(ends.data()), indices.shape(0)};
}

AttentionPlan make_plan(const ArrayArgument& indptr_, const ArrayArgument& indices_, int query_heads,
                        int kv_heads, std::int64_t page_size,
                        const std::optional<ArrayArgument>& last_page_len_,
                        const std::optional<ArrayArgument>& log_weights_, int lists_per_token) {
  const Array indptr = array_of(indptr_, "indptr"), indices = array_of(indices_, "indices");
  KeyLists lists = {
      .indptr = int32s(indptr, 1, "indptr"), .page_size = page_size, .per_token = lists_per_token};
  set_indices(lists, indices);
  Array last_page_len, log_weights;
  if (last_page_len_) {
    last_page_len = array_of(*last_page_len_, "last_page_len");
    lists.last_page_rows = int32s(last_page_len, 1, "last_page_len");
  }
  if (log_weights_) {
    log_weights = array_of(*log_weights_, "log_weights");
    lists.log_weights = floats(log_weights, 1, "log_weights");
  }
  const nb::gil_scoped_release release;
  return {lists, query_heads, kv_heads};
}

State run(const AttentionPlan& plan, const ArrayArgument& q_, const ArrayArgument& k_,
          const ArrayArgument& v_, std::optional<float> scale) {
  const Array q = array_of(q_, "q"), k = array_of(k_, "k"), v = array_of(v_, "v");
  const auto queries = floats(q, 3, "q");
  const auto kv = kv_heads(k, v);
  const auto tokens = static_cast<std::size_t>(plan.tokens()),
             heads = static_cast<std::size_t>(plan.query_heads());
  const std::size_t d = k.shape(2);
  if (q.shape(0) != tokens || q.shape(1) != heads || q.shape(2) != d)
    throw nb::value_error(("q: expected [" + std::to_string(tokens) + ", " + std::to_string(heads) + ", " +
                           std::to_string(d) + "] as the plan and k have them, found " + shape_text(q))
                              .c_str());
  Buffers out(tokens * heads, d);
  const auto threads = shared_threads();
  {
    const nb::gil_scoped_release release;
    plan.run(queries, kv, scale_of(scale, d), out.state(d), *threads);
  }
  return to_numpy(std::move(out), {tokens, heads}, d);
}

}  // namespace

void bind_plan(nb::module_& m) {
  nb::class_<AttentionPlan>(
      m, "Plan",
      "The keys that the query tokens of a step attend to, for any number of layers.\n\n"
      "Made by plan(). Does not change: threads may share it.")
      .def(
          "run",
          [](const AttentionPlan& plan, const ArrayArgument& q, const ArrayArgument& k,
             const ArrayArgument& v, std::optional<float> scale,
             Literal<false>) { return run(plan, q, k, v, scale).first; },
          nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("scale") = nb::none(),
          nb::arg("return_lse") = false,
          "Attention of a layer's queries over the planned keys.\n\n"
          "q: float32 [B, Hq, d], after RoPE; k, v: float32, float16 or bfloat16 [Hkv, S, d], S >= rows;\n"
          "scale: of q.k, 1/sqrt(d) by default.\n"
          "Returns the output, float32 [B, Hq, d]; with return_lse=True also the log-sum-exp, float32 [B, "
          "Hq],\n"
          "natural logarithm. A list without keys gives (0, -inf). A token's bits depend on its own lists "
          "alone.\n"
          "ValueError when shapes do not fit the plan; TypeError for other types of number.")
      .def(
          "run",
          [](const AttentionPlan& plan, const ArrayArgument& q, const ArrayArgument& k,
             const ArrayArgument& v, std::optional<float> scale,
             Literal<true>) { return run(plan, q, k, v, scale); },
          nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("scale") = nb::none(), nb::kw_only(),
          nb::arg("return_lse"))
      .def_prop_ro("tokens", &AttentionPlan::tokens, "B, the number of query tokens.")
      .def_prop_ro("rows", &AttentionPlan::rows, "k and v must have this many rows or more.")
      .def_prop_ro("query_heads", &AttentionPlan::query_heads, "Hq")
      .def_prop_ro("kv_heads", &AttentionPlan::kv_heads, "Hkv");
  m.def(
      "plan", &make_plan, nb::arg("indptr"), nb::arg("indices"), nb::arg("query_heads"), nb::arg("kv_heads"),
      nb::arg("page_size") = 1, nb::arg("last_page_len") = nb::none(), nb::arg("log_weights") = nb::none(),
      nb::arg("lists_per_token") = 1,
      "Checks, sorts and joins key lists once, so that each layer of a step only runs them.\n\n"
      "Names are FlashInfer's. Row r of k and v is on page r // page_size.\n"
      "indptr: int32 [B * lists_per_token + 1]; list i has the entries indptr[i] to indptr[i + 1] - 1;\n"
      "indices: int32, in any order: pages [n], which are rows when page_size is 1, or runs of rows [n, 2],\n"
      "each from its first row to one past its last;\n"
      "last_page_len: int32 [lists], rows of each list's last page; None = page_size;\n"
      "log_weights: float32 [n], added to the scores of a page's rows, as Selector.select gives them;\n"
      "lists_per_token: 1, kv_heads or query_heads: who has a list of its own. A token's lists lie side by "
      "side.\n"
      "InputError when a row is twice in a list, an index is negative, or sizes do not fit each other.");
}

}  // namespace lode::python
