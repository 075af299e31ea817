// SPDX-License-Identifier: Apache-2.0
// Key lists that are planned once a step and run in each layer.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <optional>
#include <string>

#include "arrays.h"
#include "attention.h"
#include "gpu_calls.h"
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

/// A plan, and its lists on the GPUs that ran it.
struct Plan {
  AttentionPlan lists;
  PlanOnGpu on_gpu;

  Plan(const KeyLists& keys, int query_heads, int kv_heads) : lists(keys, query_heads, kv_heads) {}
};

std::unique_ptr<Plan> make_plan(const ArrayArgument& indptr_, const ArrayArgument& indices_, int query_heads,
                                int kv_heads, std::int64_t page_size,
                                const std::optional<ArrayArgument>& last_page_len_,
                                const std::optional<ArrayArgument>& log_weights_, int lists_per_token,
                                nb::handle stream) {
  const Array indptr = host_array(indptr_, "indptr", stream),
              indices = host_array(indices_, "indices", stream);
  KeyLists lists = {
      .indptr = int32s(indptr, 1, "indptr"), .page_size = page_size, .per_token = lists_per_token};
  set_indices(lists, indices);
  Array last_page_len, log_weights;
  if (last_page_len_) {
    last_page_len = host_array(*last_page_len_, "last_page_len", stream);
    lists.last_page_rows = int32s(last_page_len, 1, "last_page_len");
  }
  if (log_weights_) {
    log_weights = host_array(*log_weights_, "log_weights", stream);
    lists.log_weights = floats(log_weights, 1, "log_weights");
  }
  const nb::gil_scoped_release release;
  return std::make_unique<Plan>(lists, query_heads, kv_heads);
}

nb::object run(Plan& plan, const ArrayArgument& q_, const ArrayArgument& k_, const ArrayArgument& v_,
               std::optional<float> scale, bool return_lse, nb::handle stream, nb::handle out_) {
  if (const auto gpu = gpu_of(q_))
    return plan.on_gpu.run(plan.lists, q_, k_, v_, scale, return_lse, {*gpu, stream, out_});
  check_cpu_options(stream, out_);
  const Array q = array_of(q_, "q"), k = array_of(k_, "k"), v = array_of(v_, "v");
  const auto queries = floats(q, 3, "q");
  const auto kv = kv_heads(k, v);
  const std::size_t d = k.shape(2);
  check_planned_queries(plan.lists, q, d);
  Buffers out(q.shape(0) * q.shape(1), d);
  const auto threads = shared_threads();
  {
    const nb::gil_scoped_release release;
    plan.lists.run(queries, kv, scale_of(scale, d), out.state(d), *threads);
  }
  State state = to_numpy(std::move(out), {q.shape(0), q.shape(1)}, d);
  return return_lse ? nb::cast(std::move(state)) : nb::cast(std::move(state.first));
}

}  // namespace

void check_planned_queries(const AttentionPlan& plan, const Array& q, std::size_t d) {
  const auto tokens = static_cast<std::size_t>(plan.tokens()),
             heads = static_cast<std::size_t>(plan.query_heads());
  if (q.shape(0) != tokens || q.shape(1) != heads || q.shape(2) != d)
    throw nb::value_error(("q: expected [" + std::to_string(tokens) + ", " + std::to_string(heads) + ", " +
                           std::to_string(d) + "] as the plan and k have them, found " + shape_text(q))
                              .c_str());
}

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan",
                   "The keys that the query tokens of a step attend to, for any number of layers.\n\n"
                   "Made by plan(). Does not change: threads may share it.")
      .def(
          "run", &run, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("scale") = nb::none(),
          nb::arg("return_lse") = false, nb::kw_only(), nb::arg("stream") = nb::none(),
          nb::arg("out") = nb::none(),
          nb::sig(state_signatures("def run(self, q: $array, k: lodestone.ArrayLike, v: lodestone.ArrayLike, "
                                   "scale: float | None = None, ")
                      .c_str()),
          "Attention of a layer's queries over the planned keys.\n\n"
          "q: float32 [B, Hq, d], after RoPE; k, v: float32, float16 or bfloat16 [Hkv, S, d], S >= rows;\n"
          "scale: of q.k, 1/sqrt(d) by default.\n"
          "Returns the output, float32 [B, Hq, d]; with return_lse=True also the log-sum-exp, float32 [B, "
          "Hq],\n"
          "natural logarithm. A list without keys gives (0, -inf). A token's bits depend on its own lists "
          "alone.\n"
          "ValueError when shapes do not fit the plan; TypeError for other types of number.\n\n"
          "Arrays on a GPU: as in attend; out is the output, or with return_lse=True a pair. The first run "
          "in a stream\n"
          "uploads the lists and may make memory, later ones enqueue kernels alone: a CUDA graph may capture "
          "those with\n"
          "out=.")
      .def_prop_ro(
          "tokens", [](const Plan& plan) { return plan.lists.tokens(); }, "B, the number of query tokens.")
      .def_prop_ro(
          "rows", [](const Plan& plan) { return plan.lists.rows(); },
          "k and v must have this many rows or more.")
      .def_prop_ro(
          "query_heads", [](const Plan& plan) { return plan.lists.query_heads(); }, "Hq")
      .def_prop_ro(
          "kv_heads", [](const Plan& plan) { return plan.lists.kv_heads(); }, "Hkv");
  m.def(
      "plan", &make_plan, nb::arg("indptr"), nb::arg("indices"), nb::arg("query_heads"), nb::arg("kv_heads"),
      nb::arg("page_size") = 1, nb::arg("last_page_len") = nb::none(), nb::arg("log_weights") = nb::none(),
      nb::arg("lists_per_token") = 1, nb::kw_only(), nb::arg("stream") = nb::none(),
      nb::sig(
          "def plan(indptr: lodestone.ArrayLike, indices: lodestone.ArrayLike, query_heads: int, kv_heads: "
          "int, page_size: int = 1, last_page_len: lodestone.ArrayLike | None = None, log_weights: "
          "lodestone.ArrayLike | None = None, lists_per_token: int = 1, *, stream: lodestone.StreamLike | "
          "None = None) -> Plan"),
      "Checks, sorts and joins key lists once, so that each layer of a step only runs them.\n\n"
      "Names are FlashInfer's. Row r of k and v is on page r // page_size.\n"
      "indptr: int32 [B * lists_per_token + 1]; list i has the entries indptr[i] to indptr[i + 1] - 1;\n"
      "indices: int32, in any order: pages [n], which are rows when page_size is 1, or runs of rows [n, 2],\n"
      "each from its first row to one past its last;\n"
      "last_page_len: int32 [lists], rows of each list's last page; None = page_size;\n"
      "log_weights: float32 [n], added to the scores of a page's rows, as Selector.select gives them;\n"
      "lists_per_token: 1, kv_heads or query_heads: who has a list of its own. A token's lists lie side by "
      "side.\n"
      "InputError when a row is twice in a list, an index is negative, or sizes do not fit each other.\n"
      "Lists may lie on a GPU: plan waits for the stream and reads them. Wherever they lie, the plan runs "
      "over "
      "keys in\n"
      "the CPU's memory and on GPUs.");
}

}  // namespace lode::python
