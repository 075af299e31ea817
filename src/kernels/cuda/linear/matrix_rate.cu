// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <chrono>

#include "kernels/cuda/device/random.h"
#include "kernels/cuda/linear/linear_cublaslt.h"
#include "kernels/cuda/linear/matrix_rate.h"

namespace lode::cuda {

double matrix_rate(std::int64_t n) {
  constexpr int kWarmUp = 2, kMeasured = 10;
  std::string found;
  const auto library = CublasLt::open(found);
  if (library == nullptr) return 0;
  const Stream stream;
  const Buffer x(2 * n * n, "a matrix"), w(2 * n * n, "a matrix"), y(4 * n * n, "a product");
  // Numbers of full entropy: zeros would draw less power, and clocks would be higher than a model's.
  fill_uniform(x.as<void>(), DType::bf16, n * n, 0, 1, 1, stream.get());
  fill_uniform(w.as<void>(), DType::bf16, n * n, 0, 1, 2, stream.get());
  const Operand left = {x.as<void>(), DType::bf16, n, n}, right = {w.as<void>(), DType::bf16, n, n};
  double best = 0;
  for (int i = 0; i < kWarmUp + kMeasured; ++i) {
    stream.synchronize();
    const auto start = std::chrono::steady_clock::now();
    if (!library->multiply(left, right, false, y.as<float>(), stream.get())) return 0;
    stream.synchronize();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    const auto side = static_cast<double>(n);
    if (i >= kWarmUp) best = std::max(best, 2 * side * side * side / seconds);
  }
  return best;
}

}  // namespace lode::cuda
