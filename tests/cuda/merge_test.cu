// SPDX-License-Identifier: Apache-2.0
// Merging two states on the device: against float64, and with sides that are empty or not numbers.
#include <cuda_runtime.h>

#include <vector>

#include "harness.h"
#include "kernels/cuda/attend/merge_states.h"

namespace lode::cuda {
namespace {

constexpr int kDim = 80;

std::vector<float> merged(const std::vector<float>& a, const std::vector<float>& a_lse,
                          const std::vector<float>& b, const std::vector<float>& b_lse) {
  Stream stream;
  const auto on_device = [&](const std::vector<float>& x) {
    Buffer buffer(std::ssize(x) * 4, "a test");
    copy(buffer.as<void>(), x.data(), std::ssize(x) * 4, stream.get());
    return buffer;
  };
  const Buffer o = on_device(a), lse = on_device(a_lse), other = on_device(b), other_lse = on_device(b_lse);
  merge_states(o.as<float>(), lse.as<float>(), other.as<float>(), other_lse.as<float>(), std::ssize(a_lse),
               kDim, stream.get());
  std::vector<float> result(a.size());
  copy(result.data(), o.as<float>(), std::ssize(a) * 4, stream.get());
  stream.synchronize();
  return result;
}

LODE_TEST(states_merge_as_in_float64_and_empty_sides_change_nothing) {
  const float none = -INFINITY;
  const std::vector<float> a_lse = {0.5f, none, 3.0f, none, 200.0f, -300.0f},
                           b_lse = {1.5f, 2.0f, none, none, 199.0f, 300.0f};
  std::vector<float> a(a_lse.size() * kDim), b(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = std::sin(float(i)), b[i] = std::cos(float(i));
  const std::vector<float> found = merged(a, a_lse, b, b_lse);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const std::size_t row = i / kDim;
    const double peak = std::fmax(a_lse[row], b_lse[row]);
    const double wa = a_lse[row] == none ? 0.0 : std::exp(a_lse[row] - peak);
    const double wb = b_lse[row] == none ? 0.0 : std::exp(b_lse[row] - peak);
    LODE_CHECK_CLOSE(found[i], wa + wb == 0.0 ? a[i] : (a[i] * wa + b[i] * wb) / (wa + wb), 1e-6);
  }
}

LODE_TEST(what_is_not_a_number_on_one_side_is_not_hidden_by_the_other) {
  const std::vector<float> a(kDim, 1.0f), bad(kDim, NAN);
  LODE_CHECK(std::isnan(merged(a, {0.0f}, bad, {NAN})[0]));
  LODE_CHECK(std::isnan(merged(bad, {NAN}, a, {0.0f})[0]));
}

}  // namespace
}  // namespace lode::cuda
