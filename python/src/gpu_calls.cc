// SPDX-License-Identifier: Apache-2.0
#include "gpu_calls.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <span>
#include <string>

#include "attention.h"
#include "gpu_arrays.h"
#include "kernels/cuda/attend/attend_strided.h"
#include "kernels/cuda/attend/merge_states.h"
#include "kernels/cuda/device/device_count.h"
#include "kernels/cuda/select/largest.h"
#include "lodestone/error.h"

namespace lode::python {

namespace {

/// Queries of so many dimensions, the last two [Hq, d], with keys and values of a layer.
struct GpuLayer {
  Array q, k, v;
  cuda::Queries queries;
  cuda::StridedKv kv;

  GpuLayer(const ArrayArgument& q_, const ArrayArgument& k_, const ArrayArgument& v_, std::size_t dims,
           std::optional<float> scale, const Caller& caller)
      : q(gpu_array<Array>(q_, "q", caller)),
        k(gpu_array<Array>(k_, "k", caller)),
        v(gpu_array<Array>(v_, "v", caller)) {
    queries.q = floats(q, dims, "q").data();
    const DType type = check_keys_and_values(k, v);
    check_shapes();
    kv = strided(k, v, type);
    queries.layout = {static_cast<int>(k.shape(0)), static_cast<int>(k.shape(2)), type, 0};
    queries.count = dims == 2 ? 1 : static_cast<int>(q.shape(0));
    queries.query_heads = static_cast<int>(heads());
    queries.scale = scale_of(scale, d());
  }

  std::size_t heads() const { return q.shape(q.ndim() - 2); }
  std::size_t d() const { return k.shape(2); }
  std::int64_t workspace_bytes() const {
    // Larger groups go through the plain kernel, which writes no partial results.
    const bool in_parts = queries.query_heads <= 16 * queries.layout.kv_heads;
    return cuda::decode_workspace_bytes(in_parts ? std::min(queries.count, cuda::kMostStrided) : 0,
                                        queries.query_heads, queries.layout.kv_heads,
                                        queries.layout.head_dim);
  }

 private:
  void check_shapes() const {
    constexpr std::size_t kMostDim = 512, kMostHeads = 1024;
    constexpr std::size_t kMostRows = std::numeric_limits<std::int32_t>::max();
    check_queries(q, k, kMostHeads);
    if (d() == 0 || d() > kMostDim || k.shape(1) > kMostRows)
      throw nb::value_error(
          ("k: expected heads of 1 to 512 numbers and less than 2^31 tokens, found " + shape_text(k))
              .c_str());
  }
};

/// Runs `work` on the caller's device without the GIL; returns the state.
template <class Work>
nb::object enqueue_state(const Caller& caller, GpuLayer& layer, StateOut& out, const Work& work) {
  layer.queries.o = out.floats();
  layer.queries.lse = out.lse;
  {
    const nb::gil_scoped_release release;
    const cuda::OnDevice here(caller.at.device);
    work();
    out.record();
  }
  return out.result();
}

/// Row numbers of each list, one by one, or all lists [lists, n] in one array.
struct GpuRows {
  std::vector<Array> arrays;
  cuda::GivenRows given{};
  int lists = 0;

  GpuRows(nb::handle rows, const Caller& caller, std::int64_t end) {
    if (gpu_of({nb::borrow(rows)})) {
      arrays.push_back(gpu_array<Array>({nb::borrow(rows)}, "rows", caller));
      const std::int32_t* const all = int32s(arrays[0], 2, "rows").data();
      for (std::size_t i = 0; i < arrays[0].shape(0); ++i)
        add(all + i * arrays[0].shape(1), arrays[0].shape(1), end);
      return;
    }
    for (const ArrayArgument& list : row_arrays(rows)) {
      arrays.push_back(gpu_array<Array>(list, "rows", caller));
      const auto numbers = int32s(arrays.back(), 1, "rows");
      add(numbers.data(), numbers.size(), end);
    }
  }
  std::int64_t total() const { return std::accumulate(given.counts, given.counts + lists, std::int64_t{0}); }
  int longest() const { return lists == 0 ? 0 : *std::max_element(given.counts, given.counts + lists); }

 private:
  void add(const std::int32_t* rows, std::size_t count, std::int64_t end) {
    if (lists == cuda::GivenRows::kMost)
      throw InputError("rows: expected at most 128 lists on a GPU, found more");
    if (count > static_cast<std::size_t>(end))
      throw InputError("rows: expected rising rows of " + std::to_string(end) + " keys, found a list of " +
                       std::to_string(count));
    given.rows[lists] = rows;
    given.counts[lists++] = static_cast<int>(count);
  }
};

/// What the CPU says of row numbers.
void check_row_numbers(const GpuRows& rows, std::int64_t end, const Caller& caller) {
  for (int list = 0; list < rows.lists; ++list) {
    std::vector<std::int32_t> numbers(static_cast<std::size_t>(rows.given.counts[list]));
    {
      const nb::gil_scoped_release release;
      cuda::copy_and_wait(numbers.data(), rows.given.rows[list], std::ssize(numbers) * 4, caller.at);
    }
    std::int64_t before = -1;
    for (const std::int32_t row : numbers) {
      if (row <= before || row >= end)
        throw InputError("rows: expected rising rows from 0 to " + std::to_string(end - 1) + ", found " +
                         std::to_string(row) + " behind " + std::to_string(before) + " in list " +
                         std::to_string(list));
      before = row;
    }
  }
}

}  // namespace

nb::object gpu_attend(const ArrayArgument& q, const ArrayArgument& k, const ArrayArgument& v, nb::handle rows,
                      std::optional<float> scale, bool check, const GpuOptions& options) {
  const Caller caller(options.device, options.stream);
  GpuLayer layer(q, k, v, 2, scale, caller);
  StateOut out = state_out(caller, {layer.heads()}, layer.d(), true, options.out);
  if (rows.is_none())
    return enqueue_state(caller, layer, out, [&] {
      const cuda::Workspace workspace(layer.workspace_bytes(), caller.at);
      cuda::attend_strided(layer.queries, layer.kv, {}, workspace.data(), caller.at.stream);
    });
  const GpuRows listed(rows, caller, layer.kv.rows);
  if (listed.lists != layer.queries.layout.kv_heads && listed.lists != layer.queries.query_heads)
    throw InputError("rows: expected a list for each of " + std::to_string(layer.queries.layout.kv_heads) +
                     " KV heads or " + std::to_string(layer.queries.query_heads) + " query heads, found " +
                     std::to_string(listed.lists));
  if (check) check_row_numbers(listed, layer.kv.rows, caller);
  return enqueue_state(caller, layer, out, [&] {
    const std::int64_t total = listed.total();
    const cuda::StreamMemory packed((listed.lists + 1) * 8 + total * 8, caller.at);
    auto* const begins = packed.as<std::int64_t>();
    auto* const numbers = reinterpret_cast<std::int32_t*>(begins + listed.lists + 1);
    auto* const weights = reinterpret_cast<float*>(numbers + total);
    cuda::pack_rows(listed.given, listed.lists, layer.kv.rows, begins, numbers, weights, caller.at.stream);
    const cuda::Workspace workspace(layer.workspace_bytes(), caller.at);
    cuda::attend_strided(layer.queries, layer.kv,
                         {.begins = begins,
                          .rows = numbers,
                          .log_weights = weights,
                          .longest = listed.longest(),
                          .per_token = listed.lists},
                         workspace.data(), caller.at.stream);
  });
}

nb::object gpu_attend_causal(const ArrayArgument& q, const ArrayArgument& k, const ArrayArgument& v,
                             std::optional<float> scale, const GpuOptions& options) {
  constexpr int kMostPrefillDim = 256;
  const Caller caller(options.device, options.stream);
  GpuLayer layer(q, k, v, 3, scale, caller);
  if (layer.queries.count > layer.kv.rows)
    throw InputError("attend_causal: expected at most as many query tokens as keys, found " +
                     std::to_string(layer.queries.count) + " and " + std::to_string(layer.kv.rows));
  StateOut out = state_out(caller, {layer.q.shape(0), layer.heads()}, layer.d(), true, options.out);
  return enqueue_state(caller, layer, out, [&] {
    if (layer.queries.count > cuda::kFewStrided && layer.d() > 1 && layer.d() <= kMostPrefillDim)
      return cuda::attend_strided_prefill(layer.queries, layer.kv, caller.at.stream);
    const cuda::Workspace workspace(layer.workspace_bytes(), caller.at);
    cuda::attend_strided(layer.queries, layer.kv, {}, workspace.data(), caller.at.stream);
  });
}

nb::object gpu_merge(const std::vector<StateArgument>& states, const GpuOptions& options) {
  const Caller caller(options.device, options.stream);
  std::vector<Array> arrays;
  std::vector<cuda::StatePart> parts;
  std::vector<std::size_t> rows;
  for (std::size_t i = 0; i < states.size(); ++i) {
    const std::string name = "state " + std::to_string(i);
    const Array output = gpu_array<Array>(states[i].first, name.c_str(), caller),
                lse = gpu_array<Array>(states[i].second, name.c_str(), caller);
    check_state(output, lse, i == 0 ? nullptr : &arrays[0], name.c_str());
    parts.push_back(
        {floats(output, output.ndim(), name.c_str()).data(), floats(lse, lse.ndim(), name.c_str()).data()});
    arrays.push_back(output);
    arrays.push_back(lse);
    rows = shape_of(lse);
  }
  const std::size_t d = arrays[0].shape(arrays[0].ndim() - 1);
  StateOut out = state_out(caller, rows, d, true, options.out);
  {
    const nb::gil_scoped_release release;
    const cuda::OnDevice here(caller.at.device);
    // What was merged is the first part of the next stretch; `out` may be a state of a later one.
    const std::int64_t all_rows = product(rows), numbers = all_rows * static_cast<std::int64_t>(d);
    const cuda::StreamMemory between(
        parts.size() > cuda::kMostMerged ? (numbers + all_rows) * std::int64_t{4} : 0, caller.at);
    float* const so_far = between.as<float>();
    for (std::size_t first = 0; first == 0 || first < parts.size();) {
      const std::size_t count = std::min<std::size_t>(parts.size() - first, cuda::kMostMerged);
      const bool last = first + count == parts.size();
      cuda::merge_parts({parts.data() + first, count}, all_rows, static_cast<int>(d),
                        last ? out.floats() : so_far, last ? out.lse : so_far + numbers, caller.at.stream);
      first += count;
      if (!last) parts[--first] = {so_far, so_far + numbers};
    }
    out.record();
  }
  return out.result();
}

nb::object gpu_top_k(const ArrayArgument& scores_, std::int64_t k, const GpuOptions& options) {
  const Caller caller(options.device, options.stream);
  const Array scores = gpu_array<Array>(scores_, "scores", caller);
  const auto numbers = floats(scores, 1, "scores");
  const auto n = std::ssize(numbers);
  if (k < 0) throw nb::value_error("k: expected 0 or more");
  if (n > std::numeric_limits<std::int32_t>::max())
    throw nb::value_error("scores: expected less than 2^31 numbers");
  const std::vector<std::size_t> shape = {static_cast<std::size_t>(std::min(k, n))};
  std::shared_ptr<CudaMemory> made;
  Written given;
  std::int32_t* rows = nullptr;
  if (options.out.is_none()) {
    const cuda::OnDevice here(caller.at.device);
    made = std::make_shared<CudaMemory>(product(shape) * 4, caller);
    rows = made->memory.as<std::int32_t>();
  } else {
    given = gpu_array<Written>({nb::borrow(options.out)}, "out", caller);
    rows = checked_out<std::int32_t>(given, shape);
  }
  {
    const nb::gil_scoped_release release;
    const cuda::OnDevice here(caller.at.device);
    if (shape[0] > 0) {
      const cuda::StreamMemory chosen(4, caller.at);
      cuda::largest(numbers.data(), n, static_cast<std::int32_t>(shape[0]), rows, chosen.as<std::int32_t>(),
                    caller.at.stream);
    }
    if (made != nullptr) made->record();
  }
  if (made == nullptr) return nb::borrow(options.out);
  return nb::cast(new_array(std::move(made), 0, shape, nb::dtype<std::int32_t>()));
}

Array host_array(const ArrayArgument& argument, Name name, nb::handle stream) {
  const std::optional<int> gpu = gpu_of(argument);
  if (!gpu) return array_of(argument, name);
  const Caller caller(*gpu, stream);
  const Array there = gpu_array<Array>(argument, name, caller);
  if (!in_c_order(there))
    throw nb::value_error((std::string(name) + ": expected a contiguous array").c_str());
  auto* const bytes = new std::vector<std::byte>(there.nbytes());
  const nb::capsule owner(bytes, [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
  {
    const nb::gil_scoped_release release;
    cuda::copy_and_wait(bytes->data(), there.data(), std::ssize(*bytes), caller.at);
  }
  const std::vector<std::size_t> shape = shape_of(there);
  return {bytes->data(), shape.size(), shape.data(), owner, nullptr, there.dtype()};
}

/// For each stream that has run the plan: begins, rows and log-weights, side by side.
struct PlanOnGpu::Uploads {
  struct Lists {
    int device = 0;
    std::uint64_t stream = 0;
    Caller caller;
    cuda::StreamMemory memory;
    cuda::StridedLists lists;
  };
  std::mutex mutex;
  std::vector<Lists> of_streams;

  /// Memory that a list of lists takes is made where the GIL is held: it keeps the stream's object.
  cuda::StridedLists of(const AttentionPlan& plan, const Caller& caller) {
    const cuda::OnDevice here(caller.at.device);
    const std::uint64_t number = cuda::number_of(caller.at.stream);
    const std::lock_guard lock(mutex);
    for (const Lists& has : of_streams)
      if (has.device == caller.at.device && has.stream == number) return has.lists;
    cuda::check_not_captured(caller.at);
    of_streams.push_back(made(plan, caller, number));
    return of_streams.back().lists;
  }

 private:
  static Lists made(const AttentionPlan& plan, const Caller& caller, std::uint64_t number) {
    const PlannedRows planned = plan.planned_rows();
    const std::size_t begins = planned.begins.size() * 8, rows = planned.rows.size() * 4,
                      weights = planned.log_weights.size() * 4;
    std::vector<std::byte> all(begins + rows + weights);
    std::memcpy(all.data(), planned.begins.data(), begins);
    if (rows > 0) std::memcpy(all.data() + begins, planned.rows.data(), rows);
    if (weights > 0) std::memcpy(all.data() + begins + rows, planned.log_weights.data(), weights);
    cuda::StreamMemory memory(std::ssize(all), caller.at);
    cuda::upload(memory.as<void>(), all.data(), std::ssize(all), caller.at);
    const std::byte* const at = memory.as<std::byte>();
    cuda::StridedLists lists = {
        .begins = reinterpret_cast<const std::int64_t*>(at),
        .rows = reinterpret_cast<const std::int32_t*>(at + begins),
        .log_weights = weights > 0 ? reinterpret_cast<const float*>(at + begins + rows) : nullptr,
        .per_token = plan.lists_per_token()};
    for (std::size_t i = 1; i < planned.begins.size(); ++i)
      lists.longest = std::max(lists.longest, planned.begins[i] - planned.begins[i - 1]);
    return {caller.at.device, number, caller, std::move(memory), lists};
  }
};

PlanOnGpu::PlanOnGpu() : uploads_(std::make_unique<Uploads>()) {}
PlanOnGpu::~PlanOnGpu() = default;

nb::object PlanOnGpu::run(const AttentionPlan& plan, const ArrayArgument& q, const ArrayArgument& k,
                          const ArrayArgument& v, std::optional<float> scale, bool return_lse,
                          const GpuOptions& options) {
  const Caller caller(options.device, options.stream);
  GpuLayer layer(q, k, v, 3, scale, caller);
  check_planned_queries(plan, layer.q, layer.d());
  if (layer.queries.layout.kv_heads != plan.kv_heads() || layer.kv.rows < plan.rows())
    throw InputError("plan: expected keys of " + std::to_string(plan.kv_heads()) + " KV heads and " +
                     std::to_string(plan.rows()) + " rows or more, found " + shape_text(layer.k));
  StateOut out = state_out(caller, {layer.q.shape(0), layer.heads()}, layer.d(), return_lse, options.out);
  const cuda::StridedLists lists = uploads_->of(plan, caller);
  return enqueue_state(caller, layer, out, [&] {
    const cuda::Workspace workspace(layer.workspace_bytes(), caller.at);
    cuda::attend_strided(layer.queries, layer.kv, lists, workspace.data(), caller.at.stream);
  });
}

void hold_up(const CudaArray& array, std::uintptr_t stream) {
  const CudaMemory& memory = array.memory();
  constexpr std::uintptr_t kPerThread = 2;  // of each thread another stream
  const auto handle = reinterpret_cast<cuda::StreamHandle>(stream);
  if (handle == memory.caller.at.stream && stream != kPerThread) return;
  const cuda::OnDevice here(array.device());
  memory.filled.hold_up(handle);
}

void download(const CudaArray& array, void* to, nb::handle stream) {
  const Caller caller(array.device(), stream);
  const nb::gil_scoped_release release;
  hold_up(array, reinterpret_cast<std::uintptr_t>(caller.at.stream));
  cuda::copy_and_wait(to, array.data(), static_cast<std::int64_t>(array.bytes()), caller.at);
}

CudaArray upload(const Array& array, int device, nb::handle stream) {
  const Caller caller(device, stream);
  const cuda::OnDevice here(device);
  auto memory = std::make_shared<CudaMemory>(static_cast<std::int64_t>(array.nbytes()), caller);
  {
    const nb::gil_scoped_release release;
    cuda::copy_and_wait(memory->memory.as<void>(), array.data(), static_cast<std::int64_t>(array.nbytes()),
                        caller.at);
  }
  memory->record();
  return new_array(std::move(memory), 0, shape_of(array), array.dtype());
}

int gpu_count() {
  return cuda::device_count();
}

}  // namespace lode::python
