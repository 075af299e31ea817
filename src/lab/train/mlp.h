// SPDX-License-Identifier: Apache-2.0
// Small networks: layers with a forward and a backward pass, on the calling thread alone. Training runs many
// heads side by side instead, which keeps every head's numbers independent of the number of threads.
//
//   Sequential net;
//   net.add<Linear>(64, 256, rng);
//   net.add<BatchNorm>(256);
//   net.add<Activation>(256, Activation::Kind::relu);
//   net.add<Linear>(256, 512, rng);
//   net.forward(x, y, true);  loss and dy from y;  net.zero_gradients();  net.backward(dy, {});  adam.step();
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "lodestone/types.h"

namespace lode {

/// A trained array, or a buffer that is kept with the weights (running statistics).
struct Parameter {
  std::vector<std::int64_t> shape;
  std::vector<float> value, gradient;  // [product of shape]; gradient is empty of a buffer
  bool trained() const { return !gradient.empty(); }
};

class Module {
 public:
  virtual ~Module() = default;
  virtual std::int64_t inputs() const = 0;
  virtual std::int64_t outputs() const = 0;
  /// y from x, a row per example, both dense. `training`: batch statistics are used and updated, and x must
  /// live until backward.
  virtual void forward(Matrix<const float> x /*[n, inputs]*/, Matrix<float> y /*[n, outputs]*/,
                       bool training) = 0;
  /// Of the last forward in training: adds to the gradients of the parameters, and writes that of x unless
  /// `dx.data` is null.
  virtual void backward(Matrix<const float> dy /*[n, outputs]*/, Matrix<float> dx /*[n, inputs]*/) = 0;
  /// Calls body(name, parameter) in a fixed order.
  using Visitor = std::function<void(const std::string& name, Parameter&)>;
  virtual void visit(const std::string& prefix, const Visitor& body) = 0;

  void zero_gradients();
};

/// y = x w^T + b.
class Linear final : public Module {
 public:
  /// Weights uniform in +-1/sqrt(inputs), bias 0.
  Linear(std::int64_t inputs, std::int64_t outputs, Rng& rng);
  std::int64_t inputs() const override { return weight.shape[1]; }
  std::int64_t outputs() const override { return weight.shape[0]; }
  void forward(Matrix<const float> x, Matrix<float> y, bool training) override;
  void backward(Matrix<const float> dy, Matrix<float> dx) override;
  void visit(const std::string& prefix, const Visitor& body) override;

  Parameter weight;  // [outputs, inputs]
  Parameter bias;    // [outputs]

 private:
  Matrix<const float> x_;
};

/// y = (x - mean) / sqrt(var + epsilon) * gain + bias: over the batch in training, else by running statistics
/// (Ioffe and Szegedy 2015; the running variance is the unbiased one).
class BatchNorm final : public Module {
 public:
  explicit BatchNorm(std::int64_t width, double momentum = 0.1, double epsilon = 1e-5);
  std::int64_t inputs() const override { return std::ssize(gain.value); }
  std::int64_t outputs() const override { return inputs(); }
  void forward(Matrix<const float> x, Matrix<float> y, bool training) override;
  void backward(Matrix<const float> dy, Matrix<float> dx) override;
  void visit(const std::string& prefix, const Visitor& body) override;
  /// The layer in inference as y = scale x + shift, to be folded into a Linear before it.
  std::pair<std::vector<float>, std::vector<float>> affine() const;
  double momentum() const { return momentum_; }
  double epsilon() const { return epsilon_; }

  Parameter gain, bias;      // [width]
  Parameter mean, variance;  // [width], running

 private:
  double momentum_, epsilon_;
  std::vector<float> normalised_;  // [n, width] of the last training batch
  std::vector<float> inverse_;     // [width] 1 / standard deviation of it
};

/// A function of each number.
class Activation final : public Module {
 public:
  enum class Kind { relu, silu, tanh };
  Activation(std::int64_t width, Kind kind) : width_(width), kind_(kind) {}
  std::int64_t inputs() const override { return width_; }
  std::int64_t outputs() const override { return width_; }
  void forward(Matrix<const float> x, Matrix<float> y, bool training) override;
  void backward(Matrix<const float> dy, Matrix<float> dx) override;
  void visit(const std::string&, const Visitor&) override {}

 private:
  std::int64_t width_;
  Kind kind_;
  Matrix<const float> x_;
};

/// One layer after the other.
class Sequential : public Module {
 public:
  template <class Layer, class... Arguments>
  Layer& add(Arguments&&... arguments) {
    auto layer = std::make_unique<Layer>(std::forward<Arguments>(arguments)...);
    Layer& added = *layer;
    layers_.push_back(std::move(layer));
    return added;
  }
  std::int64_t inputs() const override { return layers_.front()->inputs(); }
  std::int64_t outputs() const override { return layers_.back()->outputs(); }
  void forward(Matrix<const float> x, Matrix<float> y, bool training) override;
  void backward(Matrix<const float> dy, Matrix<float> dx) override;
  void visit(const std::string& prefix, const Visitor& body) override;

 private:
  std::vector<std::unique_ptr<Module>> layers_;
  std::vector<std::vector<float>> between_;   // [layers - 1][n, width] what enters the next layer
  std::vector<std::vector<float>> gradient_;  // [layers - 1], of `between_`
};

/// y = inner(x) + p x with a trained p, or y = inner(x) + x.
class Residual final : public Module {
 public:
  explicit Residual(std::unique_ptr<Module> inner, std::unique_ptr<Linear> projection = nullptr);
  std::int64_t inputs() const override { return inner_->inputs(); }
  std::int64_t outputs() const override { return inner_->outputs(); }
  void forward(Matrix<const float> x, Matrix<float> y, bool training) override;
  void backward(Matrix<const float> dy, Matrix<float> dx) override;
  void visit(const std::string& prefix, const Visitor& body) override;

 private:
  std::unique_ptr<Module> inner_;
  std::unique_ptr<Linear> projection_;
  std::vector<float> other_;  // what the second branch gives, forward and backward
};

}  // namespace lode
