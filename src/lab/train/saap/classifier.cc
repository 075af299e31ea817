// SPDX-License-Identifier: Apache-2.0
#include "lab/train/saap/classifier.h"

#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

void widen_into(const std::vector<std::byte>& raw, DType type, std::vector<float>& to) {
  LODE_ASSERT(raw.size() == to.size() * static_cast<std::size_t>(bytes_of(type)));
  kernels().widen(raw.data(), type, std::ssize(to), to.data());
}

}  // namespace

SaapClassifier::SaapClassifier(std::int64_t d, std::int64_t hidden, std::int64_t buckets, bool residual,
                               std::uint64_t seed) {
  assemble(d, hidden, buckets, true, residual, Rng(seed));
}

SaapClassifier::SaapClassifier(const BucketNet& net) {
  LODE_ASSERT(net.hidden > 0);
  assemble(net.inputs, net.hidden, net.buckets, false, !net.linear_weight.empty(), Rng(0));
  widen_into(net.hidden_weight, net.type, first_->weight.value);
  widen_into(net.output_weight, net.type, second_->weight.value);
  first_->bias.value = net.hidden_bias;
  if (!net.bias.empty()) second_->bias.value = net.bias;
  if (linear_ != nullptr) widen_into(net.linear_weight, net.type, linear_->weight.value);
}

void SaapClassifier::assemble(std::int64_t d, std::int64_t hidden, std::int64_t buckets, bool norm,
                              bool residual, Rng rng) {
  auto chain = std::make_unique<Sequential>();
  first_ = &chain->add<Linear>(d, hidden, rng);
  if (norm) norm_ = &chain->add<BatchNorm>(hidden);
  chain->add<Activation>(hidden, Activation::Kind::relu);
  second_ = &chain->add<Linear>(hidden, buckets, rng);
  module_ = std::move(chain);
  if (!residual) return;
  auto side = std::make_unique<Linear>(d, buckets, rng);
  linear_ = side.get();
  module_ = std::make_unique<Residual>(std::move(module_), std::move(side));
}

void SaapClassifier::start_linear(std::span<const float> weight) {
  LODE_ASSERT(linear_ != nullptr && weight.size() == linear_->weight.value.size());
  linear_->weight.value.assign(weight.begin(), weight.end());
}

BucketNet SaapClassifier::exported(DType type) const {
  std::vector<float> w1 = first_->weight.value, b1 = first_->bias.value, b2 = second_->bias.value;
  if (norm_ != nullptr) {
    const auto [scale, shift] = norm_->affine();
    const auto d = static_cast<std::size_t>(first_->inputs());
    for (std::size_t j = 0; j < b1.size(); ++j) {
      b1[j] = scale[j] * b1[j] + shift[j];
      for (std::size_t i = 0; i < d; ++i) w1[j * d + i] *= scale[j];
    }
  }
  BucketNet::Weights weights = {w1, b1, second_->weight.value, {}, b2};
  if (linear_ != nullptr) {
    for (std::size_t c = 0; c < b2.size(); ++c) b2[c] += linear_->bias.value[c];
    weights.linear_weight = linear_->weight.value;
  }
  return {first_->inputs(), second_->outputs(), weights, type};
}

}  // namespace lode
