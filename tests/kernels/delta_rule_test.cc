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

/// Largest difference from the rule in double, beside its largest number.
double error_of(const DeltaKernels& kernels, const Head& head, const std::vector<double>& want) {
  std::vector<float> after(head.state.size()), o(want.size());
  kernels.delta_rule(head.call(0, head.tokens, head.state, after, o));
  double most = 0, off = 0;
  for (std::size_t i = 0; i < o.size(); ++i) {
    most = std::max(most, std::fabs(want[i]));
    const double here = std::fabs(static_cast<double>(o[i]) - want[i]);
    off = here <= off ? off : here;  // NaN, too
  }
  return off / most;
}

TEST(DeltaRule, GatesAtTheirEndsAndLongTextsRoundAsFloat32Does) {
  for (const float decay : {0.0f, 1e-30f, 1e-6f, 0.999999f, 1.0f})
    for (const float beta : {0.0f, 1e-6f, 1.0f}) {
      Head head(500, 64, 32);
      std::ranges::fill(head.decay, decay), std::ranges::fill(head.beta, beta);
      if (decay < 0.5f) head.decay[0] = 1;  // even with a beta of 0 something is put out
      const std::vector<double> want = head.oracle();
      // A product with a decay near 1 is off to the same side at each token, by half a unit in the last place at most.
      const double most = 3e-6 + static_cast<double>(head.tokens) * 0x1p-24;
      for (const DeltaKernels* const kernels : supported_delta_kernels())
        EXPECT_LE(error_of(*kernels, head, want), most) << kernels->name << " " << decay << " " << beta;
    }
}

TEST(DeltaRule, KeysOfAnyLengthRoundAsFloat32Does) {
  for (const float length : {1e-6f, 30.0f, 1e4f}) {
    Head head(4, 128, 32);  // few tokens: S grows by the square of a long key's length each time
    for (std::int64_t t = 0; t < head.tokens; ++t)
      for (std::int64_t i = 0; i < head.key_dim; ++i)
        head.qkv[static_cast<std::size_t>(t * head.stride + head.key_dim + i)] *= length;
    const std::vector<double> want = head.oracle();
    for (const DeltaKernels* const kernels : supported_delta_kernels())
      EXPECT_LE(error_of(*kernels, head, want), 3e-6) << kernels->name << " " << length;
  }
}

TEST(DeltaRule, BitsDoNotDependOnHowTokensAreCut) {
  for (const auto& [tokens, columns] : {std::pair{29, 20}, {97, 32}})
    for (const DeltaKernels* const kernels : supported_delta_kernels()) {
      const Head head(tokens, 48, columns);
      std::vector<float> whole(head.state.size()), o(static_cast<std::size_t>(head.tokens * head.columns));
      kernels->delta_rule(head.call(0, head.tokens, head.state, whole, o));
      for (const std::int64_t step : {1, 2, 3, 4, 28, 31, 32, 33, 64}) {
        std::vector<float> state = head.state, next(state.size()), parts(o.size());
        for (std::int64_t t = 0; t < head.tokens; t += step) {
          std::ranges::fill(next, 0.0f);
          kernels->delta_rule(head.call(t, std::min(step, head.tokens - t), state, next, parts));
          state = next;
        }
        EXPECT_EQ(parts, o) << kernels->name << " " << step;
        EXPECT_EQ(state, whole) << kernels->name << " " << step;
      }
    }
}

TEST(DeltaRule, BitsDoNotDependOnWhichColumnsComeTogether) {
  const Head head(17, 40, 32);
  for (const DeltaKernels* const kernels : supported_delta_kernels()) {
    std::vector<float> whole(head.state.size()), o(static_cast<std::size_t>(head.tokens * head.columns));
    const DeltaCall all = head.call(0, head.tokens, head.state, whole, o);
    kernels->delta_rule(all);
    for (const std::int64_t first : {1, 7, 16, 31}) {
      std::vector<float> after(whole.size()), parts(o.size());
      for (const auto& [begin, end] : {std::pair{std::int64_t{0}, first}, {first, head.columns}}) {
        DeltaCall some = all;
        some.v += begin, some.before += begin, some.columns = end - begin;
        some.after = after.data() + begin, some.o = parts.data() + begin;
        kernels->delta_rule(some);
      }
      EXPECT_EQ(parts, o) << kernels->name << " " << first;
      EXPECT_EQ(after, whole) << kernels->name << " " << first;
    }
  }
}

TEST(DeltaRule, OfNoTokensAStateStaysAsItIs) {
  const Head head(3, 24, 13);
  for (const DeltaKernels* const kernels : supported_delta_kernels()) {
    std::vector<float> after(head.state.size()), o;
    kernels->delta_rule(head.call(0, 0, head.state, after, o));
    for (std::int64_t i = 0; i < head.key_dim; ++i)
      for (std::int64_t c = 0; c < head.columns; ++c) {
        const auto at = static_cast<std::size_t>(i * (head.columns + 1) + c);
        ASSERT_EQ(after[at], head.state[at]) << kernels->name;
      }
  }
}

}  // namespace
}  // namespace lode
