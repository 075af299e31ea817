// SPDX-License-Identifier: Apache-2.0
// The loss of one query head, over products z = tanh(F_q(q)) . tanh(F_kv(k)), which lie in [-bits, bits]:
//
//   bce      mean of  w y (-log s(z)) + (1 - y) (-log(1 - s(z))),  s the logistic function, w of equation 8
//   softmax  mean over queries of  -1/|P| sum over pivotal keys P of log softmax(z)
#include "lab/train/hash/head.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/kernels.h"
#include "kernels/sgemm.h"
#include "lodestone/error.h"

namespace lode {

namespace {

Activation::Kind kind_of(HashNet::Activation activation) {
  return activation == HashNet::Activation::silu ? Activation::Kind::silu : Activation::Kind::relu;
}

/// log(1 + e^x) and the logistic function of x, without overflow.
struct Softplus {
  explicit Softplus(float x) {
    const float e = std::exp(-std::abs(x));
    value = std::max(x, 0.0f) + std::log1p(e);
    slope = (x >= 0.0f ? 1.0f : e) / (1.0f + e);
  }
  float value, slope;
};

}  // namespace

HashFunction::HashFunction(std::int64_t inputs, const std::vector<std::int64_t>& widths, std::int64_t bits,
                           HashNet::Activation activation, const AdamOptions& adam, Rng& rng)
    : linears_([&] {
        std::vector<Linear*> linears;
        for (const std::int64_t width : widths) {
          linears.push_back(&net_.add<Linear>(inputs, width, rng));
          net_.add<Activation>(width, kind_of(activation));
          inputs = width;
        }
        linears.push_back(&net_.add<Linear>(inputs, bits, rng));
        net_.add<Activation>(bits, Activation::Kind::tanh);
        return linears;
      }()),
      activation_(activation),
      adam_(net_, adam) {}

Matrix<const float> HashFunction::forward(Matrix<const float> x, bool training) {
  codes_.resize(static_cast<std::size_t>(x.rows * bits()));
  gradient_.assign(codes_.size(), 0.0f);
  const Matrix<float> codes(codes_.data(), x.rows, bits());
  net_.forward(x, codes, training);
  return codes;
}

Matrix<float> HashFunction::gradient() {
  return {gradient_.data(), std::ssize(gradient_) / bits(), bits()};
}

void HashFunction::backward() {
  net_.backward(gradient(), {});
}

bool HashFunction::start_linear(Matrix<const float> directions, std::span<const float> centre) {
  const auto bits = static_cast<std::size_t>(directions.rows);
  for (std::size_t i = 0; i + 1 < linears_.size(); ++i) {
    if (linears_[i]->outputs() < static_cast<std::int64_t>(2 * bits)) return false;
  }
  // a(x) - a(-x) = x for silu and relu alike: units 2b and 2b + 1 of each hidden layer carry x_b and -x_b.
  for (std::size_t layer = 0; layer < linears_.size(); ++layer) {
    Linear& linear = *linears_[layer];
    const auto in = static_cast<std::size_t>(linear.inputs());
    const bool first = layer == 0, last = layer + 1 == linears_.size();
    for (std::size_t bit = 0; bit < bits; ++bit) {
      for (std::size_t side = 0; side < (last ? 1u : 2u); ++side) {
        const std::size_t unit = last ? bit : 2 * bit + side;
        const float sign = side == 0 ? 1.0f : -1.0f;
        float* const row = linear.weight.value.data() + unit * in;
        std::fill_n(row, in, 0.0f);
        double shift = 0.0;
        for (std::size_t i = 0; first && i < in; ++i) {
          row[i] = sign * directions[static_cast<std::int64_t>(bit)][i];
          shift -= static_cast<double>(row[i]) * centre[i];
        }
        if (!first) row[2 * bit] = sign, row[2 * bit + 1] = -sign;
        linear.bias.value[unit] = static_cast<float>(shift);
      }
    }
  }
  return true;
}

bool HashFunction::start_trained(const HashNet& net) {
  bool fits = net.layers().size() == linears_.size();
  for (std::size_t i = 0; fits && i < linears_.size(); ++i) {
    const HashLayer& layer = net.layers()[i];
    fits = layer.in == linears_[i]->inputs() && layer.out == linears_[i]->outputs();
  }
  if (!fits) return false;
  for (std::size_t i = 0; i < linears_.size(); ++i) {
    const HashLayer& layer = net.layers()[i];
    kernels().widen(layer.weight.data(), layer.type, layer.in * layer.out, linears_[i]->weight.value.data());
    std::vector<float>& bias = linears_[i]->bias.value;
    std::fill(bias.begin(), bias.end(), 0.0f);
    std::copy(layer.bias.begin(), layer.bias.end(), bias.begin());
  }
  return true;
}

HashNet HashFunction::finished(DType type) const {
  std::vector<HashLayer> layers;
  for (const Linear* linear : linears_) {
    HashLayer layer = {.in = linear->inputs(),
                       .out = linear->outputs(),
                       .type = type,
                       .weight = {},
                       .bias = linear->bias.value};
    layer.weight.resize(linear->weight.value.size() * static_cast<std::size_t>(bytes_of(type)));
    kernels().narrow(linear->weight.value.data(), std::ssize(linear->weight.value), type,
                     layer.weight.data());
    layers.push_back(std::move(layer));
  }
  return {std::move(layers), activation_};
}

HashHead::HashHead(const Shape& shape) : shape_(shape) {
  const HashScheme& scheme = shape.scheme;
  Rng rng(shape.seed);
  for (int g = 0; g < shape.group; ++g)
    queries_.emplace_back(shape.head_dim, shape.widths, scheme.bits, scheme.activation, shape.adam, rng);
  for (int g = 0; g < (scheme.per_query_head ? shape.group : 1); ++g) {
    keys_.emplace_back(scheme.key_inputs(shape.head_dim), shape.widths, scheme.bits, scheme.activation,
                       shape.adam, rng);
  }
}

double HashHead::loss(const HashExamples& examples, double class1_weight) {
  const std::int64_t bits = shape_.scheme.bits, tokens = examples.tokens, n = examples.keys;
  products_.resize(static_cast<std::size_t>(tokens * n));
  const Matrix<float> products(products_.data(), tokens, n);
  const Matrix<const float> inputs(examples.key_inputs.data(), n, shape_.scheme.key_inputs(shape_.head_dim));
  std::vector<Matrix<const float>> keys;
  for (HashFunction& function : keys_) keys.push_back(function.forward(inputs, true));
  double sum = 0.0;
  for (int g = 0; g < shape_.group; ++g) {
    const auto head = static_cast<std::size_t>(g), set = head % keys.size();
    const Matrix<const float> q =
        queries_[head].forward({examples.queries[head].data(), tokens, shape_.head_dim}, true);
    sgemm(tokens, n, bits, {q.data, bits}, {keys[set].data, bits, true}, 0.0f, products_.data(), n);
    sum += head_loss(products, examples.labels[head], class1_weight);
    sgemm(tokens, bits, n, {products_.data(), n}, {keys[set].data, bits}, 1.0f,
          queries_[head].gradient().data, bits);
    sgemm(n, bits, tokens, {products_.data(), n, true}, {q.data, bits}, 1.0f, keys_[set].gradient().data,
          bits);
    queries_[head].backward();
  }
  for (HashFunction& function : keys_) function.backward();
  return sum / shape_.group;
}

/// The loss of one query head; z becomes its gradient, divided by the group so that heads share one loss.
double HashHead::head_loss(Matrix<float> z, std::span<const std::uint8_t> labels,
                           double class1_weight) const {
  const auto cells = static_cast<std::size_t>(z.rows * z.cols), row = static_cast<std::size_t>(z.cols);
  const auto counted = static_cast<double>(std::count_if(
      labels.begin(), labels.end(), [](auto label) { return label != HashExamples::kLeftOut; }));
  double sum = 0.0;
  if (shape_.loss == PivotalLoss::bce) {
    const auto share = static_cast<float>(1.0 / (std::max(counted, 1.0) * shape_.group));
    for (std::size_t i = 0; i < cells; ++i) {
      const float x = z.data[i], y = labels[i] == HashExamples::kPivotal ? 1.0f : 0.0f;
      const float weight = y > 0.0f ? static_cast<float>(class1_weight) : 1.0f;
      if (labels[i] == HashExamples::kLeftOut) {
        z.data[i] = 0.0f;
        continue;
      }
      const Softplus softplus(x);
      sum += static_cast<double>(weight * (softplus.value - y * x)) / std::max(counted, 1.0);
      z.data[i] = weight * (softplus.slope - y) * share;
    }
    return sum;
  }
  for (std::size_t at = 0; at < cells; at += row) {
    const std::span<const std::uint8_t> own = labels.subspan(at, row);
    const auto pivotal = static_cast<double>(std::count(own.begin(), own.end(), HashExamples::kPivotal));
    double peak = -1e30, total = 0.0;
    for (std::size_t i = 0; i < row; ++i) {
      if (own[i] != HashExamples::kLeftOut) peak = std::max(peak, static_cast<double>(z.data[at + i]));
    }
    for (std::size_t i = 0; i < row; ++i)
      total += own[i] != HashExamples::kLeftOut ? std::exp(z.data[at + i] - peak) : 0.0;
    for (std::size_t i = 0; i < row; ++i) {
      float& x = z.data[at + i];
      const double target = own[i] == HashExamples::kPivotal ? 1.0 / pivotal : 0.0;
      const double log_share = x - peak - std::log(total);
      const bool takes_part = own[i] != HashExamples::kLeftOut && pivotal > 0.0;
      if (takes_part) sum -= target * log_share / static_cast<double>(z.rows);
      x = takes_part ? static_cast<float>((std::exp(log_share) - target) /
                                          (static_cast<double>(z.rows) * shape_.group))
                     : 0.0f;
    }
  }
  return sum;
}

void expect_number(double loss) {
  if (std::isfinite(loss)) return;
  throw RunError(fmt::format("training left the range of numbers (loss {}): a lower --rate may help", loss));
}

double HashHead::step(const HashExamples& examples, double class1_weight, double rate_scale) {
  for (auto* functions : {&queries_, &keys_}) {
    for (HashFunction& function : *functions) function.module().zero_gradients();
  }
  const double value = loss(examples, class1_weight);
  expect_number(value);
  for (auto* functions : {&queries_, &keys_}) {
    for (HashFunction& function : *functions) function.adam().step(rate_scale);
  }
  return value;
}

void HashHead::put(Checkpoint& checkpoint, const std::string& prefix) {
  for (std::size_t g = 0; g < queries_.size(); ++g)
    checkpoint.put(fmt::format("{}query.{}.", prefix, g), queries_[g].module(), &queries_[g].adam());
  for (std::size_t g = 0; g < keys_.size(); ++g)
    checkpoint.put(fmt::format("{}key.{}.", prefix, g), keys_[g].module(), &keys_[g].adam());
}

void HashHead::get(const Checkpoint& checkpoint, const std::string& prefix, const std::string& where) {
  for (std::size_t g = 0; g < queries_.size(); ++g)
    checkpoint.get(fmt::format("{}query.{}.", prefix, g), queries_[g].module(), &queries_[g].adam(), where);
  for (std::size_t g = 0; g < keys_.size(); ++g)
    checkpoint.get(fmt::format("{}key.{}.", prefix, g), keys_[g].module(), &keys_[g].adam(), where);
}

}  // namespace lode
