// SPDX-License-Identifier: Apache-2.0
// Attention over a set of keys is a pair (output, log-sum-exp). Pairs over disjoint sets merge into the pair
// over the union, exactly: this is what lets sink, window and retrieved keys be attended apart, in any place,
// and joined.
#include <lodestone/attention.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <span>

namespace {

constexpr int kKeys = 6, kDim = 2;
constexpr std::array<float, kKeys> kScores = {0.3f, 2.0f, -1.0f, 0.0f, 4.0f, 1.5f};  // q . k of each key
constexpr std::array<float, kKeys* kDim> kValues = {1, 0, 0, 1, 1, 1, -1, 0, 0, -1, 2, 2};  // [keys, d]

struct State {
  std::array<float, kDim> output = {};  // [1, d]
  std::array<float, 1> lse = {};        // [1]
  lode::AttentionState view() { return {.output = output.data(), .lse = lse.data(), .rows = 1, .d = kDim}; }
};

/// Softmax attention over keys [begin, end), by its definition.
State attend(int begin, int end) {
  State state;
  double sum = 0;
  for (int i = begin; i < end; ++i) sum += std::exp(kScores[i]);
  for (int i = begin; i < end; ++i) {
    for (int j = 0; j < kDim; ++j) state.output[j] += std::exp(kScores[i]) / sum * kValues[i * kDim + j];
  }
  state.lse[0] = static_cast<float>(std::log(sum));
  return state;
}

}  // namespace

int main() {
  State whole = attend(0, kKeys), near = attend(0, 2), far = attend(2, kKeys);
  lode::merge(near.view(), far.view());
  std::printf("whole:  (%.6f, %.6f), log-sum-exp %.6f\n", whole.output[0], whole.output[1], whole.lse[0]);
  std::printf("merged: (%.6f, %.6f), log-sum-exp %.6f\n", near.output[0], near.output[1], near.lse[0]);
  const bool equal = std::abs(whole.output[0] - near.output[0]) < 1e-5f &&
                     std::abs(whole.output[1] - near.output[1]) < 1e-5f &&
                     std::abs(whole.lse[0] - near.lse[0]) < 1e-5f;
  return equal ? 0 : 1;
}
