// SPDX-License-Identifier: Apache-2.0
#include "kernels/sgemm.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <oneapi/dnnl/dnnl.h>

#include "base/hold_signals.h"
#include "lodestone/error.h"

namespace lode {
namespace {

/// oneDNN asks OpenMP of the calling thread how many threads to use. The symbol is looked up because only
/// libdnnl links OpenMP.
void use_one_openmp_thread() {
  using SetThreads = void (*)(int);
  static const auto set_threads = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (set_threads) set_threads(1);
}

}  // namespace

void sgemm(std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand a, GemmOperand b, float beta, float* c,
           std::int64_t stride) {
  use_one_openmp_thread();
  const HoldSignals held;
  const dnnl_status_t status = dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', m, n, k, 1.0f,
                                          a.data, a.stride, b.data, b.stride, beta, c, stride);
  if (status != dnnl_success) throw RunError(fmt::format("oneDNN refused a {} x {} x {} product", m, n, k));
}

}  // namespace lode
