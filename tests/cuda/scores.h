// SPDX-License-Identifier: Apache-2.0
// What tests of scorers share: queries on the device, and every score against float64.
#pragma once

#include <string>

#include "harness.h"
#include "kernels/cuda/attend/attend.h"
#include "reference.h"
#include "sums.h"

namespace lode::cuda::test {

/// Queries of some tokens, on the device while this lives; q [tokens, heads, d].
class QueriesOnDevice {
 public:
  QueriesOnDevice(const KvLayout& layout, const std::vector<QueryToken>& places, int heads,
                  const std::vector<float>& q, const std::vector<const char*>& bases = {nullptr})
      : places_(places), bases_(bases), q_(q) {
    queries_.tokens = places_.get();
    queries_.bases = bases_.get();
    queries_.layout = layout;
    queries_.count = static_cast<int>(places.size());
    queries_.query_heads = heads;
    queries_.scale = kScale;
    queries_.q = q_.get();
  }
  QueriesOnDevice(QueriesOnDevice&&) = delete;
  const Queries& operator*() const { return queries_; }

  static constexpr float kScale = 0.125f;

 private:
  OnDevice<QueryToken> places_;
  OnDevice<const char*> bases_;
  OnDevice<float> q_;
  Queries queries_;
};

/// A sum in float64, and that of its terms' sizes.
struct Sum {
  double value = 0.0, size = 0.0;
  void add(double term) { value += term, size += std::fabs(term); }
};

/// Scores [tokens * heads, n] over poison: nothing behind the far keys, -inf below the sink, and elsewhere
/// reference(row, key) within `tolerance` of the terms' sizes (NaN and infinities as they are).
template <class Reference>
void expect_scores(const std::vector<float>& found, const std::vector<QueryToken>& places, int heads,
                   const FarKeys& far, double tolerance, const Reference& reference) {
  for (int row = 0; row < std::ssize(places) * heads; ++row) {
    const std::int64_t end = places[static_cast<std::size_t>(row / heads)].position + 1 - far.window;
    for (std::int64_t key = 0; key < far.n; ++key) {
      const float one = found[static_cast<std::size_t>(row * far.n + key)];
      if (key >= end) {
        LODE_CHECK(one == 1e30f);
        continue;
      }
      if (key < far.sink) {
        LODE_CHECK(one == -INFINITY);
        continue;
      }
      const Sum sum = reference(row, key);
      if (std::isnan(sum.value))
        LODE_CHECK(std::isnan(one));
      else if (std::isinf(sum.value))
        LODE_CHECK(one == static_cast<float>(sum.value));
      else
        LODE_CHECK_CLOSE(one, sum.value, tolerance * sum.size);
    }
  }
}

}  // namespace lode::cuda::test
