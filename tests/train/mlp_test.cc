// SPDX-License-Identifier: Apache-2.0
// Layers against plain loops in double, gradients against finite differences of those loops, training that
// resumes to the bit.
#include "lab/train/mlp.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <optional>

#include "lab/train/adam.h"
#include "lab/train/checkpoint.h"
#include "lab/train/loss.h"
#include "lodestone/error.h"

namespace lode::test {
namespace {

using Doubles = std::vector<double>;

std::vector<float> normals(std::int64_t count, std::uint64_t seed, double scale = 1.0) {
  Rng rng(seed);
  std::vector<float> x(static_cast<std::size_t>(count));
  for (float& value : x) value = static_cast<float>(scale * rng.normal());
  return x;
}

/// What one layer should do in training, in double.
struct Oracle {
  std::vector<Doubles> parameters;  // as visit lists the trained ones
  virtual ~Oracle() = default;
  virtual Doubles run(const Doubles& x, std::size_t n) const = 0;
};

struct LinearOracle : Oracle {
  std::size_t in, out;
  LinearOracle(std::size_t in_, std::size_t out_) : in(in_), out(out_) {}
  Doubles run(const Doubles& x, std::size_t n) const override {
    Doubles y(n * out);
    for (std::size_t r = 0; r < n; ++r) {
      for (std::size_t o = 0; o < out; ++o) {
        y[r * out + o] = parameters[1][o];
        for (std::size_t i = 0; i < in; ++i) y[r * out + o] += x[r * in + i] * parameters[0][o * in + i];
      }
    }
    return y;
  }
};

struct BatchNormOracle : Oracle {
  Doubles run(const Doubles& x, std::size_t n) const override {
    const std::size_t width = parameters[0].size();
    Doubles y(x.size());
    for (std::size_t i = 0; i < width; ++i) {
      double mean = 0, variance = 0;
      for (std::size_t r = 0; r < n; ++r) mean += x[r * width + i] / static_cast<double>(n);
      for (std::size_t r = 0; r < n; ++r)
        variance += (x[r * width + i] - mean) * (x[r * width + i] - mean) / static_cast<double>(n);
      for (std::size_t r = 0; r < n; ++r) {
        y[r * width + i] =
            (x[r * width + i] - mean) / std::sqrt(variance + 1e-5) * parameters[0][i] + parameters[1][i];
      }
    }
    return y;
  }
};

struct ActivationOracle : Oracle {
  Activation::Kind kind;
  explicit ActivationOracle(Activation::Kind kind_) : kind(kind_) {}
  Doubles run(const Doubles& x, std::size_t) const override {
    Doubles y;
    for (const double v : x) {
      y.push_back(kind == Activation::Kind::relu   ? std::max(v, 0.0)
                  : kind == Activation::Kind::tanh ? std::tanh(v)
                                                   : v / (1 + std::exp(-v)));
    }
    return y;
  }
};

/// Residual(Linear -> silu -> Linear, Linear or nothing).
struct ResidualOracle : Oracle {
  std::size_t in, hidden, out;
  ResidualOracle(std::size_t in_, std::size_t hidden_, std::size_t out_)
      : in(in_), hidden(hidden_), out(out_) {}
  Doubles run(const Doubles& x, std::size_t n) const override {
    LinearOracle first(in, hidden), second(hidden, out), side(in, out);
    first.parameters = {parameters[0], parameters[1]};
    second.parameters = {parameters[2], parameters[3]};
    Doubles y = second.run(ActivationOracle(Activation::Kind::silu).run(first.run(x, n), n), n);
    Doubles other = x;
    if (parameters.size() > 4) {
      side.parameters = {parameters[4], parameters[5]};
      other = side.run(x, n);
    }
    for (std::size_t i = 0; i < y.size(); ++i) y[i] += other[i];
    return y;
  }
};

/// The scalar sum(y * weights), its gradients by central differences in double, beside those of the module.
void check_gradients(Module& module, Oracle& oracle, std::int64_t n) {
  const std::vector<float> x = normals(n * module.inputs(), 1), weights = normals(n * module.outputs(), 2);
  std::vector<Parameter*> trained;
  module.visit("", [&](const std::string&, Parameter& p) {
    if (!p.trained()) return;
    for (float& v : p.value) v += 0.3f * v + 0.1f;  // nothing at its start, where gains are 1 and biases 0
    trained.push_back(&p);
    oracle.parameters.emplace_back(p.value.begin(), p.value.end());
  });
  std::vector<float> y(weights.size()), dx(x.size());
  const Matrix<const float> in(x.data(), n, module.inputs());
  module.forward(in, {y.data(), n, module.outputs()}, true);
  module.zero_gradients();
  const Matrix<const float> dy(weights.data(), n, module.outputs());
  module.backward(dy, {dx.data(), n, module.inputs()});

  Doubles input(x.begin(), x.end());
  const auto value = [&] {
    const Doubles out = oracle.run(input, static_cast<std::size_t>(n));
    double sum = 0;
    for (std::size_t i = 0; i < out.size(); ++i) sum += out[i] * weights[i];
    return sum;
  };
  const Doubles expected = oracle.run(input, static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < y.size(); ++i)
    ASSERT_NEAR(y[i], expected[i], 1e-4 * (1 + std::abs(expected[i])));
  const auto slope = [&](double& at) {
    constexpr double kStep = 1e-5;
    const double was = at;
    at = was + kStep;
    const double above = value();
    at = was - kStep;
    const double below = value();
    at = was;
    return (above - below) / (2 * kStep);
  };
  for (std::size_t i = 0; i < input.size(); ++i)
    ASSERT_NEAR(dx[i], slope(input[i]), 2e-4 * (1 + std::abs(dx[i]))) << "input " << i;
  for (std::size_t p = 0; p < trained.size(); ++p) {
    for (std::size_t i = 0; i < trained[p]->value.size(); ++i) {
      const double expected_slope = slope(oracle.parameters[p][i]);
      ASSERT_NEAR(trained[p]->gradient[i], expected_slope, 2e-4 * (1 + std::abs(expected_slope)))
          << "parameter " << p << " " << i;
    }
  }
  // Gradients add up, and that of the input may be left out.
  const std::vector<float> once = trained.empty() ? std::vector<float>() : trained[0]->gradient;
  module.backward(dy, {});
  for (std::size_t i = 0; i < once.size(); ++i)
    EXPECT_NEAR(trained[0]->gradient[i], 2 * once[i], 1e-4 * (1 + std::abs(once[i])));
}

TEST(Gradients, OfALinearLayer) {
  Rng rng(3);
  for (const auto& [in, out, n] : {std::tuple{1, 1, 1}, {5, 3, 4}, {17, 33, 9}, {64, 1, 2}}) {
    Linear layer(in, out, rng);
    LinearOracle oracle(static_cast<std::size_t>(in), static_cast<std::size_t>(out));
    check_gradients(layer, oracle, n);
  }
}

TEST(Gradients, OfABatchNorm) {
  for (const auto& [width, n] : {std::pair{1, 2}, {7, 3}, {33, 20}}) {
    BatchNorm layer(width);
    BatchNormOracle oracle;
    check_gradients(layer, oracle, n);
  }
}

TEST(Gradients, OfActivations) {
  for (const auto kind : {Activation::Kind::relu, Activation::Kind::silu, Activation::Kind::tanh}) {
    Activation layer(11, kind);
    ActivationOracle oracle(kind);
    check_gradients(layer, oracle, 5);
  }
}

TEST(Gradients, OfResiduals) {
  for (const bool projected : {false, true}) {
    Rng rng(4);
    const int out = projected ? 4 : 6;
    auto inner = std::make_unique<Sequential>();
    inner->add<Linear>(6, 9, rng);
    inner->add<Activation>(9, Activation::Kind::silu);
    inner->add<Linear>(9, out, rng);
    Residual layer(std::move(inner), projected ? std::make_unique<Linear>(6, out, rng) : nullptr);
    ResidualOracle oracle(6, 9, static_cast<std::size_t>(out));
    check_gradients(layer, oracle, 5);
  }
}

TEST(Gradients, OfTheDivergence) {
  const std::int64_t n = 4, width = 7;
  std::vector<float> logits = normals(n * width, 5, 3.0), targets = normals(n * width, 6, 2.0);
  softmax_rows({targets.data(), n, width});
  std::fill(targets.begin(), targets.begin() + width, 0.0f);  // a row without a target
  targets[width] = 0.0f;                                      // not quite 1
  std::vector<float> gradient(logits.size());
  const double loss =
      kl_divergence({logits.data(), n, width}, {targets.data(), n, width}, {gradient.data(), n, width});
  Doubles z(logits.begin(), logits.end());
  const auto value = [&] {
    double total = 0;
    for (std::size_t r = 0; r < 4; ++r) {
      double sum = 0;
      for (std::size_t i = 0; i < 7; ++i) sum += std::exp(z[r * 7 + i]);
      for (std::size_t i = 0; i < 7; ++i) {
        const double t = targets[r * 7 + i];
        if (t > 0) total += t * (std::log(t) - (z[r * 7 + i] - std::log(sum)));
      }
    }
    return total / 4;
  };
  EXPECT_NEAR(loss, value(), 1e-6);
  for (std::size_t i = 0; i < z.size(); ++i) {
    const double was = z[i];
    z[i] = was + 1e-5;
    const double above = value();
    z[i] = was - 1e-5;
    EXPECT_NEAR(gradient[i], (above - value()) / 2e-5, 1e-6);
    z[i] = was;
  }
  // Logits of any size: no overflow.
  std::vector<float> huge = {3e38f, -3e38f, 0.0f}, target = {1.0f, 0.0f, 0.0f};
  EXPECT_EQ(kl_divergence({huge.data(), 1, 3}, {target.data(), 1, 3}, {}), 0.0);
}

/// The formula of loss.h, in double.
double partition_loss_of(const Doubles& keys, const Doubles& queries, const Doubles& attention,
                         const Doubles& weights, std::size_t c) {
  const auto softmax = [&](const Doubles& z, std::size_t row) {
    Doubles p(z.begin() + static_cast<std::ptrdiff_t>(row * c),
              z.begin() + static_cast<std::ptrdiff_t>((row + 1) * c));
    double sum = 0;
    for (double& x : p) sum += x = std::exp(x);
    for (double& x : p) x /= sum;
    return p;
  };
  const std::size_t n_k = keys.size() / c, n_q = queries.size() / c;
  Doubles sizes(c, 1.0);
  double all = static_cast<double>(c), loss = 0;
  for (std::size_t k = 0; k < n_k; ++k) {
    const Doubles shares = softmax(keys, k);
    for (std::size_t i = 0; i < c; ++i) sizes[i] += weights[k] * shares[i];
    all += weights[k];
  }
  for (std::size_t q = 0; q < n_q; ++q) {
    const Doubles p = softmax(queries, q);
    for (std::size_t k = 0; k < n_k; ++k) {
      const Doubles shares = softmax(keys, k);
      for (std::size_t i = 0; i < c; ++i)
        loss -=
            attention[q * n_k + k] * shares[i] * std::log(p[i] * all / sizes[i]) / static_cast<double>(n_q);
    }
  }
  return loss;
}

TEST(Gradients, OfAPartition) {
  for (const auto& [n_k, n_q, c] : {std::tuple{1, 1, 2}, {6, 4, 5}, {33, 7, 17}}) {
    const std::vector<float> z_k = normals(n_k * c, 7, 2.0), z_q = normals(n_q * c, 8, 2.0);
    std::vector<float> attention = normals(n_q * n_k, 9, 2.0), weights = normals(n_k, 10);
    softmax_rows({attention.data(), n_q, n_k});
    for (float& w : weights) w = 1 + w * w;
    std::vector<float> of_keys(z_k.size()), of_queries(z_q.size());
    const double loss =
        partition_loss({z_k.data(), n_k, c}, {z_q.data(), n_q, c}, {attention.data(), n_q, n_k}, weights,
                       {of_keys.data(), n_k, c}, {of_queries.data(), n_q, c});
    Doubles keys(z_k.begin(), z_k.end()), queries(z_q.begin(), z_q.end());
    const Doubles a(attention.begin(), attention.end()), w(weights.begin(), weights.end());
    const auto value = [&, c = c] {
      return partition_loss_of(keys, queries, a, w, static_cast<std::size_t>(c));
    };
    EXPECT_NEAR(loss, value(), 1e-5);
    const auto check = [&](Doubles& z, const std::vector<float>& gradient) {
      for (std::size_t i = 0; i < z.size(); ++i) {
        const double was = z[i];
        z[i] = was + 1e-5;
        const double above = value();
        z[i] = was - 1e-5;
        ASSERT_NEAR(gradient[i], (above - value()) / 2e-5, 2e-6) << i;
        z[i] = was;
      }
    };
    check(keys, of_keys);
    check(queries, of_queries);
  }
}

/// Where it leads: one bucket for all keys gains nothing; with hard assignments it is equation 1's gradient
/// by the queries, and logits of any size are finite.
TEST(PartitionLoss, OfOneBucketAndOfHardAssignments) {
  const std::int64_t n_k = 8, n_q = 3, c = 4;
  std::vector<float> attention = normals(n_q * n_k, 1), queries = normals(n_q * c, 2), weights(8, 1.0f);
  softmax_rows({attention.data(), n_q, n_k});
  std::vector<float> one(static_cast<std::size_t>(n_k * c), -1e4f), hard(one),
      sure(static_cast<std::size_t>(n_q * c), -1e4f);
  for (std::size_t k = 0; k < 8; ++k) one[k * 4 + 2] = 1e4f, hard[k * 4 + k / 2] = 3e38f;
  for (std::size_t q = 0; q < 3; ++q) sure[q * 4 + 2] = 1e4f;
  std::vector<float> of_keys(one.size()), of_queries(queries.size());
  const auto loss = [&](const std::vector<float>& keys, const std::vector<float>& by) {
    return partition_loss({keys.data(), n_k, c}, {by.data(), n_q, c}, {attention.data(), n_q, n_k}, weights,
                          {of_keys.data(), n_k, c}, {of_queries.data(), n_q, c});
  };
  EXPECT_NEAR(loss(one, sure), -std::log(12.0 / 9.0), 1e-6);  // but for the one key more of each bucket
  loss(hard, queries);
  std::vector<float> targets(static_cast<std::size_t>(n_q * c), 0.0f), expected(targets.size());
  for (std::size_t q = 0; q < 3; ++q)
    for (std::size_t k = 0; k < 8; ++k) targets[q * 4 + k / 2] += attention[q * 8 + k];
  kl_divergence({queries.data(), n_q, c}, {targets.data(), n_q, c}, {expected.data(), n_q, c});
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(of_queries[i], expected[i], 1e-6);
  for (const float g : of_keys) EXPECT_TRUE(std::isfinite(g));
}

TEST(BatchNorm, InferenceIsTheFoldedAffineMap) {
  BatchNorm layer(3);
  for (int step = 0; step < 200; ++step) {
    std::vector<float> x = normals(3 * 50, static_cast<std::uint64_t>(step), 4.0);
    for (std::size_t i = 0; i < x.size(); i += 3) x[i] += 100.0f;
    std::vector<float> y(x.size());
    layer.forward({x.data(), 50, 3}, {y.data(), 50, 3}, true);
  }
  EXPECT_NEAR(layer.mean.value[0], 100.0, 0.5);
  EXPECT_NEAR(layer.variance.value[1], 16.0, 1.5);
  const auto [scale, shift] = layer.affine();
  std::vector<float> x = {101.0f, 2.0f, -3.0f}, y(3);
  layer.forward({x.data(), 1, 3}, {y.data(), 1, 3}, false);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(y[i], scale[i] * x[i] + shift[i]);
}

/// A classifier of quadrants.
struct Task {
  Sequential net;
  std::optional<Adam> adam;
  Task() {
    Rng rng(9);
    net.add<Linear>(8, 32, rng);
    net.add<BatchNorm>(32);
    net.add<Activation>(32, Activation::Kind::relu);
    net.add<Linear>(32, 4, rng);
    adam.emplace(net, AdamOptions{.rate = 1e-2, .weight_decay = 1e-3});
  }
  double step(std::int64_t at) {
    std::vector<float> x = normals(64 * 8, hash_seed(1, at)), targets(64 * 4, 0.0f), y(64 * 4), dy(64 * 4);
    for (std::size_t r = 0; r < 64; ++r) {
      const bool a = x[r * 8] > 0, b = x[r * 8 + 1] > 0;
      targets[r * 4 + (a ? 1u : 0u) + (b ? 2u : 0u)] = 1.0f;
    }
    net.forward({x.data(), 64, 8}, {y.data(), 64, 4}, true);
    const double loss = kl_divergence({y.data(), 64, 4}, {targets.data(), 64, 4}, {dy.data(), 64, 4});
    net.zero_gradients();
    net.backward({dy.data(), 64, 4}, {});
    adam->step(cosine_decay(at, 200));
    return loss;
  }
};

TEST(Adam, LearnsAndResumesToTheBit) {
  const std::filesystem::path path =
      std::filesystem::path(testing::TempDir()) / ("adam-" + std::to_string(getpid()));
  Task whole, first, second;
  double loss = 0;
  for (int at = 0; at < 200; ++at) loss = whole.step(at);
  EXPECT_LT(loss, 0.15);
  for (int at = 0; at < 77; ++at) first.step(at);
  Checkpoint saved;
  saved.put("head.0.", first.net, &*first.adam);
  saved.notes["stage"] = "classifier";
  saved.write(path);
  const Checkpoint read = Checkpoint::read(path);
  EXPECT_EQ(read.notes.at("stage"), "classifier");
  read.get("head.0.", second.net, &*second.adam, path.string());
  for (int at = 77; at < 200; ++at) second.step(at);
  std::vector<std::vector<float>> values[2];
  whole.net.visit("", [&](const std::string&, Parameter& p) { values[0].push_back(p.value); });
  second.net.visit("", [&](const std::string&, Parameter& p) { values[1].push_back(p.value); });
  EXPECT_EQ(values[0], values[1]);
  std::filesystem::remove(path);
}

// One step of the published update, by hand.
TEST(Adam, FirstStepMovesByTheRate) {
  Rng rng(1);
  Linear layer(1, 1, rng);
  Adam adam(layer, {.rate = 0.5, .epsilon = 1e-8});
  const float before = layer.weight.value[0];
  layer.weight.gradient[0] = -3.0f;
  adam.step();
  EXPECT_NEAR(layer.weight.value[0], before + 0.5f, 1e-5);
  layer.weight.gradient[0] = 1.0f;
  adam.step(0.1);
  const double m = (0.9 * 0.1 * -3 + 0.1 * 1) / (1 - 0.81),
               v = (0.999 * 0.001 * 9 + 0.001 * 1) / (1 - 0.998001);
  EXPECT_NEAR(layer.weight.value[0], before + 0.5 - 0.05 * m / std::sqrt(v), 1e-5);
}

TEST(Checkpoints, ThatDoNotFitAreRefused) {
  const std::filesystem::path path =
      std::filesystem::path(testing::TempDir()) / ("checkpoint-" + std::to_string(getpid()));
  Rng rng(1);
  Linear small(2, 3, rng), large(2, 4, rng);
  Adam adam(small, {});
  Checkpoint saved;
  saved.put("a.", small);
  EXPECT_THROW(saved.get("a.", large, nullptr, "x"), InputError);
  EXPECT_THROW(saved.get("b.", small, nullptr, "x"), InputError);
  EXPECT_THROW(saved.get("a.", small, &adam, "x"), InputError);
  saved.put("a.", small, &adam);
  saved.get("a.", small, &adam, "x");
  saved.notes["a.steps"] = "-1";
  EXPECT_THROW(saved.get("a.", small, &adam, "x"), InputError);
  saved.notes["a.steps"] = "12x";
  EXPECT_THROW(saved.get("a.", small, &adam, "x"), InputError);
  saved.put("ab.", small);
  saved.erase("a.");
  EXPECT_EQ(saved.arrays.size(), 2u);
  EXPECT_TRUE(saved.notes.empty());
  std::ofstream(path) << "not a checkpoint";
  EXPECT_THROW(Checkpoint::read(path), InputError);
  std::filesystem::remove(path);
  EXPECT_THROW(Checkpoint::read(path), InputError);
}

}  // namespace
}  // namespace lode::test
