// SPDX-License-Identifier: Apache-2.0
#include "kernels/delta_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "base/rng.h"

namespace lode {
namespace {

/// Tokens of one head with `columns` columns, as a layer's buffers have them.
struct Head {
  Head(std::int64_t tokens_, std::int64_t key_dim_, std::int64_t columns_)
      : tokens(tokens_), key_dim(key_dim_), columns(columns_), stride(2 * key_dim_ + columns_ + 3) {
    Rng rng(static_cast<std::uint64_t>(key_dim));
    const auto fill = [&](std::int64_t n, auto next) {
      std::vector<float> x(static_cast<std::size_t>(n));
      for (float& v : x) v = static_cast<float>(next());
      return x;
    };
    const auto normal = [&] { return rng.normal() / std::sqrt(static_cast<double>(key_dim)); };
    qkv = fill(tokens * stride, normal);
    state = fill(key_dim * (columns + 1), normal);
    decay = fill(tokens, [&] { return rng.uniform(); });
    beta = fill(tokens, [&] { return rng.uniform(); });
    decay[0] = 0;  // forgets everything
    decay[static_cast<std::size_t>(tokens - 1)] = 1;
  }
  DeltaCall call(std::int64_t first, std::int64_t count, const std::vector<float>& before,
                 std::vector<float>& after, std::vector<float>& o) const {
    const float* const at = qkv.data() + first * stride;
    return {.q = at,
            .k = at + key_dim,
            .v = at + 2 * key_dim,
            .stride = stride,
            .decay = decay.data() + first,
            .beta = beta.data() + first,
            .gate_stride = 1,
            .tokens = count,
            .before = before.data(),
            .after = after.data(),
            .state_stride = columns + 1,
            .key_dim = key_dim,
            .columns = columns,
            .o = o.data() + first * columns,
            .o_stride = columns};
  }
  /// The rule as written, in double.
  std::vector<double> oracle() const {
    std::vector<double> s(static_cast<std::size_t>(key_dim * columns)), o;
    const auto at = [&](std::int64_t i, std::int64_t c) -> double& {
      return s[static_cast<std::size_t>(i * columns + c)];
    };
    for (std::int64_t i = 0; i < key_dim; ++i)
      for (std::int64_t c = 0; c < columns; ++c)
        at(i, c) = static_cast<double>(state[static_cast<std::size_t>(i * (columns + 1) + c)]);
    for (std::int64_t t = 0; t < tokens; ++t) {
      const float* const x = qkv.data() + t * stride;
      const auto moment = static_cast<std::size_t>(t);
      for (std::int64_t c = 0; c < columns; ++c) {
        double had = 0, out = 0;
        for (std::int64_t i = 0; i < key_dim; ++i)
          had += (at(i, c) *= static_cast<double>(decay[moment])) * static_cast<double>(x[key_dim + i]);
        const double change =
            static_cast<double>(beta[moment]) * (static_cast<double>(x[2 * key_dim + c]) - had);
        for (std::int64_t i = 0; i < key_dim; ++i)
          out += (at(i, c) += static_cast<double>(x[key_dim + i]) * change) * static_cast<double>(x[i]);
        o.push_back(out);
      }
    }
    return o;
  }
  std::int64_t tokens, key_dim, columns, stride;
  std::vector<float> qkv, state, decay, beta;
};

TEST(DeltaRule, EqualsItsFormulaOnEveryInstructionSet) {
  for (const DeltaKernels* const kernels : supported_delta_kernels())
    for (const auto& [key_dim, columns] : {std::pair{1, 1}, {7, 5}, {64, 32}, {128, 31}, {512, 17}}) {
      SCOPED_TRACE(testing::Message() << kernels->name << " " << key_dim << " x " << columns);
      const Head head(37, key_dim, columns);
      std::vector<float> after(head.state.size()), o(static_cast<std::size_t>(head.tokens * columns));
      kernels->delta_rule(head.call(0, head.tokens, head.state, after, o));
      const std::vector<double> want = head.oracle();
      for (std::size_t i = 0; i < o.size(); ++i) ASSERT_NEAR(o[i], want[i], 2e-5) << i;
    }
}

TEST(DeltaRule, BitsDoNotDependOnHowTokensAreCut) {
  const Head head(29, 48, 20);
  for (const DeltaKernels* const kernels : supported_delta_kernels()) {
    std::vector<float> whole(head.state.size()), o(static_cast<std::size_t>(head.tokens * head.columns));
    kernels->delta_rule(head.call(0, head.tokens, head.state, whole, o));
    for (const std::int64_t step : {1, 4, 28}) {
      std::vector<float> state = head.state, next(state.size()), parts(o.size());
      for (std::int64_t t = 0; t < head.tokens; t += step) {
        next = state;
        kernels->delta_rule(head.call(t, std::min(step, head.tokens - t), state, next, parts));
        state = next;
      }
      EXPECT_EQ(parts, o) << kernels->name << " " << step;
    }
  }
}

}  // namespace
}  // namespace lode
