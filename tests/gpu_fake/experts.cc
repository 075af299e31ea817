// SPDX-License-Identifier: Apache-2.0
// The played GPU's mixtures of experts: chosen as the CPU's forward pass chooses, and a token at a time.
#include "kernels/cuda/experts/experts.h"

#include "gpu_fake/play.h"
#include "model/experts.h"

namespace lode::cuda {

namespace {

ExpertPlan plan_of(const RouterPlan& p) {
  ExpertPlan plan = {.count = p.count, .used = p.used};
  plan.score = p.sigmoid ? ExpertPlan::Score::sigmoid : ExpertPlan::Score::softmax;
  plan.score_chosen = p.score_chosen;
  plan.normalise = p.normalise;
  plan.scale = static_cast<double>(p.scale);
  plan.groups = p.groups, plan.groups_used = p.groups_used, plan.group_best = p.group_best;
  return plan;
}

/// x [cols] times one expert's matrix, with its bias.
std::vector<float> expert_product(const float* x, const ExpertMatrices& m, int expert) {
  DeviceWeight one = m.all;
  one.rows = m.rows();
  const std::int64_t bytes = one.tiled() ? 4 : bytes_of(one.type);
  one.data = static_cast<const char*>(m.all.data) + expert * one.rows * one.cols * bytes;
  auto y = product(x, 1, one, {});
  for (std::size_t i = 0; m.bias != nullptr && i < y.size(); ++i)
    y[i] += m.bias[expert * std::ssize(y) + static_cast<std::int64_t>(i)];
  return y;
}

std::vector<float> mixed(const ExpertArguments& a, const float* x) {
  const auto h = normed(x, 1, a.norm, a.eps);
  const auto routed = a.router_norm.data == nullptr ? h : normed(x, 1, a.router_norm, a.eps);
  auto logits = product(routed.data(), 1, a.router, {});
  for (std::size_t e = 0; a.router_bias != nullptr && e < logits.size(); ++e) logits[e] += a.router_bias[e];
  std::vector<float> sum(h.size(), 0.0f), dense;
  if (a.shared.gate.data != nullptr) {
    sum = fed_forward(a.shared, 1, x);
    const float gate = a.shared_gate.data == nullptr ? INFINITY : product(h.data(), 1, a.shared_gate, {})[0];
    for (float& y : sum) y *= 1.0f / (1.0f + std::exp(-gate));
  }
  const std::span<const float> bias(a.choice_bias, a.choice_bias == nullptr ? 0 : logits.size());
  if (a.post_norm.data != nullptr) {
    dense = normed(sum.data(), 1, a.shared_post_norm, a.eps);
    std::ranges::fill(sum, 0.0f);
  }
  for (const Choice& c : choose_experts(plan_of(a.plan), logits, bias, 1)) {
    auto gate = expert_product(h.data(), a.gate, c.expert);
    const auto up = expert_product(h.data(), a.up, c.expert);
    for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = activated(a.activation, gate[i], up[i]);
    const auto y = expert_product(gate.data(), a.down, c.expert);
    const float weight = a.factors == nullptr ? c.weight : c.weight * a.factors[c.expert];
    for (std::size_t i = 0; i < y.size(); ++i) sum[i] += weight * y[i];
  }
  if (a.post_norm.data != nullptr) {
    sum = normed(sum.data(), 1, a.post_norm, a.eps);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += dense[i];
  }
  if (a.addition.norm.data != nullptr) sum = normed(sum.data(), 1, a.addition.norm, a.addition.eps);
  return sum;
}

}  // namespace

Experts::Experts(Linear& linear, StreamHandle stream, Precision precision)
    : linear_(linear), stream_(stream), precision_(precision) {}
std::int64_t Experts::scratch_bytes(const ExpertSizes&, std::int64_t, Precision) {
  return 0;
}
void Experts::reserve(const ExpertSizes&, std::int64_t) {}
void Experts::add(const ExpertArguments& a, std::int64_t n, float* x) {
  enqueue(stream_, [=] {
    for (std::int64_t t = 0; t < n; ++t) {
      float* const row = x + t * a.norm.cols;
      const auto y = mixed(a, row);
      for (std::size_t i = 0; i < y.size(); ++i)
        row[i] = (row[i] + a.addition.multiplier * y[i]) * a.addition.factor;
    }
  });
}

}  // namespace lode::cuda
