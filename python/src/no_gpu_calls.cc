// SPDX-License-Identifier: Apache-2.0
// What a package that was built without CUDA says of arrays on a GPU.
#include "cuda_array.h"
#include "gpu_calls.h"
#include "gpu_selector.h"
#include "lodestone/error.h"

namespace lode::python {

struct CudaMemory {};
struct PlanOnGpu::Uploads {};
struct SelectorOnGpu::Layer {};

namespace {

[[noreturn]] void refuse() {
  throw InputError(
      "expected arrays in the CPU's memory, found one on a GPU, and this package was built without CUDA; "
      "copy it "
      "to the CPU, or build the package with CUDA where nvcc is: pip install . -C "
      "cmake.define.LODESTONE_CUDA=ON");
}

}  // namespace

nb::object gpu_attend(const ArrayArgument&, const ArrayArgument&, const ArrayArgument&, nb::handle,
                      std::optional<float>, bool, const GpuOptions&) {
  refuse();
}
nb::object gpu_attend_causal(const ArrayArgument&, const ArrayArgument&, const ArrayArgument&,
                             std::optional<float>, const GpuOptions&) {
  refuse();
}
nb::object gpu_merge(const std::vector<StateArgument>&, const GpuOptions&) {
  refuse();
}
nb::object gpu_top_k(const ArrayArgument&, std::int64_t, const GpuOptions&) {
  refuse();
}
Array host_array(const ArrayArgument& argument, Name name, nb::handle) {
  if (gpu_of(argument)) refuse();
  return array_of(argument, name);
}
PlanOnGpu::PlanOnGpu() = default;
PlanOnGpu::~PlanOnGpu() = default;
nb::object PlanOnGpu::run(const AttentionPlan&, const ArrayArgument&, const ArrayArgument&,
                          const ArrayArgument&, std::optional<float>, bool, const GpuOptions&) {
  refuse();
}

SelectorOnGpu::SelectorOnGpu(const Host& host) : host_(host) {}
SelectorOnGpu::~SelectorOnGpu() = default;
std::int64_t SelectorOnGpu::bytes() const {
  return 0;
}
void SelectorOnGpu::forget() {}
void SelectorOnGpu::roll_back(std::int64_t) {}
void SelectorOnGpu::build(const ArrayArgument&, const ArrayArgument&, const GpuOptions&) {
  refuse();
}
nb::object SelectorOnGpu::attend(const ArrayArgument&, std::int64_t, const Keys&, bool, const GpuOptions&) {
  refuse();
}
nb::object SelectorOnGpu::select(const ArrayArgument&, std::int64_t, const Keys&, const GpuOptions&) {
  refuse();
}
std::pair<NumpyRows, NumpyRows> SelectorOnGpu::rows(nb::handle) {
  throw InputError(kNoRowsOnGpu);
}
void SelectorOnGpu::observe(const ArrayArgument&, std::int64_t, const GpuOptions&) {
  refuse();
}
void SelectorOnGpu::finish(std::span<SelectorOnGpu* const>, int, std::uintptr_t,
                           const std::function<void(const std::function<KvLayer(int)>&)>&) {
  refuse();
}

void hold_up(const CudaArray&, std::uintptr_t) {
  refuse();
}
void download(const CudaArray&, void*, nb::handle) {
  refuse();
}
CudaArray upload(const Array&, int, nb::handle) {
  throw InputError(
      "this package was built without CUDA and has no GPU; build it where nvcc is: pip install . -C "
      "cmake.define.LODESTONE_CUDA=ON");
}
int gpu_count() {
  return 0;
}

}  // namespace lode::python
