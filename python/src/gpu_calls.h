// SPDX-License-Identifier: Apache-2.0
// Attention, merging and top-k over arrays on a GPU: what a build with CUDA does (gpu_calls.cc), and one without
// refuses (no_gpu_calls.cc). Work is enqueued in the caller's stream and nothing waits for it, unless said.
#pragma once

#include <nanobind/stl/pair.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "arrays.h"
#include "lodestone/attend.h"

namespace lode::python {

using StateArgument = std::pair<ArrayArgument, ArrayArgument>;

/// Where a call runs, and into which arrays of the caller's its result goes: None makes new ones.
struct GpuOptions {
  int device = 0;
  nb::handle stream, out;
};

/// Refuses stream and out for arrays in the CPU's memory.
void check_cpu_options(nb::handle stream, nb::handle out);
/// The single lists of `rows`; TypeError for what is no sequence of arrays.
std::vector<ArrayArgument> row_arrays(nb::handle rows);

/// `check`: wait for the row numbers and look at them, as on the CPU.
nb::object gpu_attend(const ArrayArgument& q, const ArrayArgument& k, const ArrayArgument& v, nb::handle rows,
                      std::optional<float> scale, bool check, const GpuOptions& options);
nb::object gpu_attend_causal(const ArrayArgument& q, const ArrayArgument& k, const ArrayArgument& v,
                             std::optional<float> scale, const GpuOptions& options);
nb::object gpu_merge(const std::vector<StateArgument>& states, const GpuOptions& options);
nb::object gpu_top_k(const ArrayArgument& scores, std::int64_t k, const GpuOptions& options);

/// A copy in the CPU's memory of an array that may lie on a GPU; waits for the stream then.
Array host_array(const ArrayArgument& argument, Name name, nb::handle stream);

/// A plan's lists on GPUs, uploaded once for each stream that runs it.
class PlanOnGpu {
 public:
  PlanOnGpu();
  ~PlanOnGpu();
  PlanOnGpu(const PlanOnGpu&) = delete;
  PlanOnGpu& operator=(const PlanOnGpu&) = delete;
  nb::object run(const AttentionPlan& plan, const ArrayArgument& q, const ArrayArgument& k,
                 const ArrayArgument& v, std::optional<float> scale, bool return_lse,
                 const GpuOptions& options);

 private:
  struct Uploads;
  std::unique_ptr<Uploads> uploads_;
};

}  // namespace lode::python
