// SPDX-License-Identifier: Apache-2.0
// A tiny model of a family and a text of 200 tokens, and what is expected of every family on a GPU.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "engine/context.h"
#include "support/compare.h"
#include "support/family_folder.h"

namespace lode::test {

/// A base of fixtures.
class TinyFamily {
 protected:
  explicit TinyFamily(const std::string& family) : folder_(family) {
    for (TokenId i = 0; i < 200; ++i) ids_.push_back((i * i + 3 * i + i / 7) % 64);
  }
  std::span<const TokenId> ids(std::int64_t begin, std::int64_t count) const {
    return std::span(ids_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(count));
  }
  Context context(Device device = Device::cuda, std::int64_t chunk = 16) const {
    return Context(model_, {.kv_type = DType::f32, .device = device, .max_tokens = 256, .chunk = chunk});
  }
  /// With other options on the GPU.
  Context context_with(ContextOptions options) const {
    options.device = Device::cuda;
    options.max_tokens = 256;
    return Context(model_, options);
  }

  void expect_contexts_answer_as_the_cpus() const {
    std::vector<float> logits[2];
    std::vector<TokenId> answers[2];
    for (const Device device : {Device::cpu, Device::cuda}) {
      Context c = context(device);
      c.prefill(ids(0, 100));
      logits[device == Device::cuda] = c.forward(ids(100, 20), kDense);
      answers[device == Device::cuda] =
          c.generate(ids(120, 9), kDense, {.max_new_tokens = 12, .stop_at_eos = false}).tokens;
    }
    EXPECT_LT(relative_difference(logits[1], logits[0]), 2e-4f);
    EXPECT_EQ(answers[1], answers[0]);
  }

  /// Branches numbered 0 to 4, which `branch` makes, have the same logits in a question and four tokens whoever else is
  /// in the batch.
  void expect_bits_without_company(const std::function<std::unique_ptr<Sequence>(int)>& branch) const {
    const auto together = logits_of_branches(branch, {0, 1, 2, 3, 4});
    for (const int i : {0, 1, 2, 4})
      EXPECT_EQ(logits_of_branches(branch, {i}).front(), together[static_cast<std::size_t>(i)]) << i;
    EXPECT_EQ(logits_of_branches(branch, {3, 1}).back(), together[1]);
  }

  const FamilyFolder folder_;
  std::shared_ptr<const Model> model_ = folder_.load();
  std::vector<TokenId> ids_;

 private:
  std::vector<std::vector<float>> logits_of_branches(
      const std::function<std::unique_ptr<Sequence>(int)>& branch, const std::vector<int>& which) const {
    BatchRunner runner(model_);
    std::vector<std::unique_ptr<Sequence>> sequences;
    std::vector<std::vector<float>> all(which.size());
    for (const int i : which) sequences.push_back(branch(i));
    for (int step = 0; step < 5; ++step) {
      std::vector<BatchRow> rows;
      for (std::size_t i = 0; i < which.size(); ++i)
        rows.push_back({.sequence = sequences[i].get(),
                        .tokens = ids(10 * which[i] + 3 * step, step == 0 ? 5 + 9 * which[i] : 1),
                        .phase = step == 0 ? Phase::question : Phase::generation});
      runner.run(rows);
      for (std::size_t i = 0; i < which.size(); ++i) {
        EXPECT_FALSE(rows[i].error);
        all[i].insert(all[i].end(), rows[i].logits.begin(), rows[i].logits.end());
      }
    }
    return all;
  }
};

}  // namespace lode::test
