// SPDX-License-Identifier: Apache-2.0
#include "model/delta_net.h"

#include <algorithm>
#include <cmath>

#include "base/threads.h"
#include "kernels/delta_rule.h"
#include "kernels/kernels.h"

namespace lode {

namespace {

constexpr std::int64_t kChannelsAtOnce = 512;

float sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

float softplus(float x) {
  return x > 20.0f ? x : std::log1p(std::exp(x));
}

}  // namespace

/// Each channel's last `kernel` inputs, weighted; those before the first token come from the state.
void DeltaNet::convolve(const DeltaWeights& w, const Rows& rows) {
  const std::int64_t channels = plan_.channels(), kernel = plan_.kernel, past = kernel - 1;
  const std::vector<float> weights = numbers_of(w.conv);  // [channels, kernel]
  const auto input = [&](std::int64_t t) {                // t < 0: of an earlier step
    return t < 0 ? rows.before.data() + (past + t) * channels : inputs_.data() + (rows.first + t) * channels;
  };
  const std::int64_t blocks = (channels + kChannelsAtOnce - 1) / kChannelsAtOnce;
  pool_.for_each(blocks, [&](std::int64_t block, int) {
    const std::int64_t begin = block * kChannelsAtOnce, end = std::min(channels, begin + kChannelsAtOnce);
    for (std::int64_t t = 0; t < rows.count; ++t) {
      float* const to = qkv_.data() + (rows.first + t) * channels;
      for (std::int64_t c = begin; c < end; ++c) {
        float sum = 0;
        for (std::int64_t i = 0; i < kernel; ++i)
          sum += weights[static_cast<std::size_t>(c * kernel + i)] * input(t - past + i)[c];
        to[c] = sum * sigmoid(sum);
      }
    }
    for (std::int64_t i = 0; i < past; ++i)
      std::copy(input(rows.count - past + i) + begin, input(rows.count - past + i) + end,
                rows.after.data() + i * channels + begin);
  });
}

/// q and k of each head to length 1; q by 1 / sqrt(key_dim) beside.
void DeltaNet::normalise_heads(std::int64_t tokens) {
  constexpr float kLeast = 1e-6f;
  const std::int64_t d = plan_.key_dim, channels = plan_.channels(), heads = 2 * plan_.key_heads;
  const float shrink = 1.0f / std::sqrt(static_cast<float>(d));
  pool_.for_each(tokens, [&](std::int64_t t, int) {
    for (std::int64_t h = 0; h < heads; ++h) {
      float* const x = qkv_.data() + t * channels + h * d;
      const float factor = (h < plan_.key_heads ? shrink : 1.0f) / std::sqrt(kernels().dot(x, x, d) + kLeast);
      for (std::int64_t i = 0; i < d; ++i) x[i] *= factor;
    }
  });
}

void DeltaNet::set_gates(const DeltaWeights& w, std::int64_t tokens) {
  const std::vector<float> bias = numbers_of(w.dt_bias);
  std::vector<float> rate = numbers_of(w.decay);
  if (plan_.decay_log)
    for (float& a : rate) a = -std::exp(a);
  const auto heads = static_cast<std::size_t>(plan_.value_heads);
  for (std::size_t i = 0; i < static_cast<std::size_t>(tokens) * heads; ++i) {
    decay_[i] = std::exp(rate[i % heads] * softplus(decay_[i] + bias[i % heads]));
    beta_[i] = sigmoid(beta_[i]);
  }
}

/// Columns of a state do not meet, so that they are divided among threads.
void DeltaNet::recur(std::span<const Rows> rows) {
  const std::int64_t vd = plan_.value_dim, kd = plan_.key_dim, channels = plan_.channels(),
                     values = plan_.values();
  const std::int64_t slices = (vd + kDeltaColumns - 1) / kDeltaColumns, items = plan_.value_heads * slices;
  const std::int64_t conv_floats = (plan_.kernel - 1) * channels;
  pool_.for_each(std::ssize(rows) * items, [&](std::int64_t item, int) {
    const Rows& r = rows[static_cast<std::size_t>(item / items)];
    const std::int64_t head = item % items / slices, first = item % slices * kDeltaColumns;
    const std::int64_t state = conv_floats + head * kd * vd + first;
    const std::int64_t key = std::int64_t{key_head_of(static_cast<int>(head))} * kd;
    const float* const at = qkv_.data() + r.first * channels;
    delta_kernels().delta_rule({.q = at + key,
                                .k = at + plan_.keys() + key,
                                .v = at + 2 * plan_.keys() + head * vd + first,
                                .stride = channels,
                                .decay = decay_.data() + r.first * plan_.value_heads + head,
                                .beta = beta_.data() + r.first * plan_.value_heads + head,
                                .gate_stride = plan_.value_heads,
                                .tokens = r.count,
                                .before = r.before.data() + state,
                                .after = r.after.data() + state,
                                .state_stride = vd,
                                .key_dim = kd,
                                .columns = std::min(kDeltaColumns, vd - first),
                                .o = o_.data() + r.first * values + head * vd + first,
                                .o_stride = values});
  });
}

/// Outputs of each head to a root mean square of 1, times their gains, then SiLU of z.
void DeltaNet::finish_heads(const DeltaWeights& w, std::int64_t tokens) {
  const std::vector<float> gain = numbers_of(w.norm);
  const std::int64_t d = plan_.value_dim;
  pool_.for_each(tokens, [&](std::int64_t t, int) {
    for (std::int64_t h = 0; h < plan_.value_heads; ++h) {
      float* const o = o_.data() + (t * plan_.value_heads + h) * d;
      const float* const z = z_.data() + (t * plan_.value_heads + h) * d;
      const double mean_square = kernels().dot(o, o, d) / static_cast<double>(d);
      const auto inverse = static_cast<float>(1.0 / std::sqrt(mean_square + norm_eps_));
      for (std::int64_t i = 0; i < d; ++i)
        o[i] = o[i] * inverse * gain[static_cast<std::size_t>(i)] * (z[i] * sigmoid(z[i]));
    }
  });
}

void DeltaNet::run(const DeltaWeights& w, const std::vector<float>& h, std::int64_t tokens,
                   std::span<const Rows> rows, std::vector<float>& out) {
  const auto size = [&](std::int64_t cols) { return static_cast<std::size_t>(tokens * cols); };
  for (std::vector<float>* m : {&inputs_, &qkv_}) m->resize(size(plan_.channels()));
  for (std::vector<float>* m : {&z_, &o_}) m->resize(size(plan_.values()));
  for (std::vector<float>* m : {&decay_, &beta_}) m->resize(size(plan_.value_heads));
  linear_(h, {{&w.qkv, nullptr, &inputs_},
              {&w.z, nullptr, &z_},
              {&w.b, nullptr, &beta_, true},
              {&w.a, nullptr, &decay_, true}});
  for (const Rows& r : rows) convolve(w, r);
  normalise_heads(tokens);
  set_gates(w, tokens);
  recur(rows);
  finish_heads(w, tokens);
  linear_(o_, {{&w.out, nullptr, &out}});
}

std::int64_t DeltaNet::scratch_floats() const {
  return 2 * plan_.channels() + 2 * plan_.values() + 2 * std::int64_t{plan_.value_heads};
}

}  // namespace lode
