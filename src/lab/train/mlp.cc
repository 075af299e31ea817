// SPDX-License-Identifier: Apache-2.0
#include "lab/train/mlp.h"

#include <algorithm>
#include <cmath>

#include "kernels/sgemm.h"
#include "lodestone/error.h"

namespace lode {

namespace {

Parameter parameter(std::vector<std::int64_t> shape, float value, bool trained = true) {
  std::int64_t count = 1;
  for (const std::int64_t n : shape) count *= n;
  Parameter made = {std::move(shape), std::vector<float>(static_cast<std::size_t>(count), value), {}};
  if (trained) made.gradient.assign(made.value.size(), 0.0f);
  return made;
}

Matrix<float> resized(std::vector<float>& buffer, std::int64_t rows, std::int64_t cols) {
  buffer.resize(static_cast<std::size_t>(rows * cols));
  return {buffer.data(), rows, cols};
}

void add_to(Matrix<float> y, const std::vector<float>& x) {
  for (std::size_t i = 0; i < x.size(); ++i) y.data[i] += x[i];
}

float sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

}  // namespace

void Module::zero_gradients() {
  visit("", [](const std::string&, Parameter& p) { std::fill(p.gradient.begin(), p.gradient.end(), 0.0f); });
}

Linear::Linear(std::int64_t inputs, std::int64_t outputs, Rng& rng)
    : weight(parameter({outputs, inputs}, 0.0f)), bias(parameter({outputs}, 0.0f)) {
  const double reach = 1.0 / std::sqrt(static_cast<double>(inputs));
  for (float& w : weight.value) w = static_cast<float>((2.0 * rng.uniform() - 1.0) * reach);
}

void Linear::forward(Matrix<const float> x, Matrix<float> y, bool) {
  LODE_ASSERT(x.cols == inputs() && y.cols == outputs() && x.rows == y.rows);
  x_ = x;
  sgemm(x.rows, outputs(), inputs(), {x.data, x.stride}, {weight.value.data(), inputs(), true}, 0.0f, y.data,
        y.stride);
  for (std::int64_t row = 0; row < y.rows; ++row) {
    const std::span<float> out = y[row];
    for (std::size_t i = 0; i < out.size(); ++i) out[i] += bias.value[i];
  }
}

void Linear::backward(Matrix<const float> dy, Matrix<float> dx) {
  sgemm(outputs(), inputs(), dy.rows, {dy.data, dy.stride, true}, {x_.data, x_.stride}, 1.0f,
        weight.gradient.data(), inputs());
  for (std::int64_t row = 0; row < dy.rows; ++row) {
    const std::span<const float> out = dy[row];
    for (std::size_t i = 0; i < out.size(); ++i) bias.gradient[i] += out[i];
  }
  if (dx.data == nullptr) return;
  sgemm(dy.rows, inputs(), outputs(), {dy.data, dy.stride}, {weight.value.data(), inputs()}, 0.0f, dx.data,
        dx.stride);
}

void Linear::visit(const std::string& prefix, const Visitor& body) {
  body(prefix + "weight", weight);
  body(prefix + "bias", bias);
}

BatchNorm::BatchNorm(std::int64_t width, double momentum, double epsilon)
    : gain(parameter({width}, 1.0f)),
      bias(parameter({width}, 0.0f)),
      mean(parameter({width}, 0.0f, false)),
      variance(parameter({width}, 1.0f, false)),
      momentum_(momentum),
      epsilon_(epsilon) {}

void BatchNorm::forward(Matrix<const float> x, Matrix<float> y, bool training) {
  const auto width = static_cast<std::size_t>(inputs());
  if (!training) {
    const auto [scale, shift] = affine();
    for (std::int64_t row = 0; row < x.rows; ++row) {
      for (std::size_t i = 0; i < width; ++i) y[row][i] = scale[i] * x[row][i] + shift[i];
    }
    return;
  }
  LODE_ASSERT(x.rows >= 2);
  const auto n = static_cast<double>(x.rows);
  std::vector<double> sum(width, 0.0), squares(width, 0.0);
  for (std::int64_t row = 0; row < x.rows; ++row) {
    for (std::size_t i = 0; i < width; ++i) sum[i] += x[row][i];
  }
  for (double& s : sum) s /= n;
  for (std::int64_t row = 0; row < x.rows; ++row) {
    for (std::size_t i = 0; i < width; ++i) {
      const double from_mean = x[row][i] - sum[i];
      squares[i] += from_mean * from_mean;
    }
  }
  inverse_.resize(width);
  for (std::size_t i = 0; i < width; ++i) {
    inverse_[i] = static_cast<float>(1.0 / std::sqrt(squares[i] / n + epsilon_));
    const auto blend = [&](float& running, double now) {
      running = static_cast<float>((1.0 - momentum_) * running + momentum_ * now);
    };
    blend(mean.value[i], sum[i]);
    blend(variance.value[i], squares[i] / (n - 1.0));
  }
  const Matrix<float> normalised = resized(normalised_, x.rows, inputs());
  for (std::int64_t row = 0; row < x.rows; ++row) {
    for (std::size_t i = 0; i < width; ++i) {
      normalised[row][i] = (x[row][i] - static_cast<float>(sum[i])) * inverse_[i];
      y[row][i] = normalised[row][i] * gain.value[i] + bias.value[i];
    }
  }
}

void BatchNorm::backward(Matrix<const float> dy, Matrix<float> dx) {
  const auto width = static_cast<std::size_t>(inputs());
  const Matrix<const float> normalised(normalised_.data(), dy.rows, inputs());
  std::vector<double> sum(width, 0.0), product(width, 0.0);  // of dy; of dy times normalised
  for (std::int64_t row = 0; row < dy.rows; ++row) {
    for (std::size_t i = 0; i < width; ++i) {
      sum[i] += dy[row][i];
      product[i] += static_cast<double>(dy[row][i]) * normalised[row][i];
    }
  }
  for (std::size_t i = 0; i < width; ++i) {
    bias.gradient[i] += static_cast<float>(sum[i]);
    gain.gradient[i] += static_cast<float>(product[i]);
  }
  if (dx.data == nullptr) return;
  const auto n = static_cast<double>(dy.rows);
  std::vector<float> mean_dy(width), mean_product(width);
  for (std::size_t i = 0; i < width; ++i) {
    mean_dy[i] = static_cast<float>(sum[i] / n);
    mean_product[i] = static_cast<float>(product[i] / n);
  }
  for (std::int64_t row = 0; row < dy.rows; ++row) {
    for (std::size_t i = 0; i < width; ++i) {
      dx[row][i] =
          gain.value[i] * inverse_[i] * (dy[row][i] - mean_dy[i] - normalised[row][i] * mean_product[i]);
    }
  }
}

void BatchNorm::visit(const std::string& prefix, const Visitor& body) {
  body(prefix + "gain", gain);
  body(prefix + "bias", bias);
  body(prefix + "mean", mean);
  body(prefix + "variance", variance);
}

std::pair<std::vector<float>, std::vector<float>> BatchNorm::affine() const {
  std::vector<float> scale(gain.value.size()), shift(gain.value.size());
  for (std::size_t i = 0; i < scale.size(); ++i) {
    const double s = gain.value[i] / std::sqrt(static_cast<double>(variance.value[i]) + epsilon_);
    scale[i] = static_cast<float>(s);
    shift[i] = static_cast<float>(bias.value[i] - s * mean.value[i]);
  }
  return {scale, shift};
}

void Activation::forward(Matrix<const float> x, Matrix<float> y, bool) {
  x_ = x;
  for (std::int64_t i = 0; i < x.rows * width_; ++i) {
    const float in = x.data[i];
    y.data[i] = kind_ == Kind::relu   ? std::max(in, 0.0f)
                : kind_ == Kind::silu ? in * sigmoid(in)
                                      : std::tanh(in);
  }
}

void Activation::backward(Matrix<const float> dy, Matrix<float> dx) {
  if (dx.data == nullptr) return;
  for (std::int64_t i = 0; i < dy.rows * width_; ++i) {
    const float in = x_.data[i];
    float slope = in > 0.0f ? 1.0f : 0.0f;
    if (kind_ == Kind::silu) {
      const float s = sigmoid(in);
      slope = s * (1.0f + in * (1.0f - s));
    } else if (kind_ == Kind::tanh) {
      const float t = std::tanh(in);
      slope = 1.0f - t * t;
    }
    dx.data[i] = dy.data[i] * slope;
  }
}

void Sequential::forward(Matrix<const float> x, Matrix<float> y, bool training) {
  between_.resize(layers_.size() - 1);
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const bool last = i + 1 == layers_.size();
    const Matrix<float> out = last ? y : resized(between_[i], x.rows, layers_[i]->outputs());
    layers_[i]->forward(x, out, training);
    x = out;
  }
}

void Sequential::backward(Matrix<const float> dy, Matrix<float> dx) {
  gradient_.resize(layers_.size() - 1);
  for (std::size_t i = layers_.size(); i-- > 0;) {
    const Matrix<float> in = i == 0 ? dx : resized(gradient_[i - 1], dy.rows, layers_[i]->inputs());
    layers_[i]->backward(dy, in);
    dy = in;
  }
}

void Sequential::visit(const std::string& prefix, const Visitor& body) {
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    layers_[i]->visit(prefix + std::to_string(i) + ".", body);
  }
}

Residual::Residual(std::unique_ptr<Module> inner, std::unique_ptr<Linear> projection)
    : inner_(std::move(inner)), projection_(std::move(projection)) {
  LODE_ASSERT(projection_ ? projection_->inputs() == inputs() && projection_->outputs() == outputs()
                          : inputs() == outputs());
}

void Residual::forward(Matrix<const float> x, Matrix<float> y, bool training) {
  inner_->forward(x, y, training);
  if (projection_) {
    projection_->forward(x, resized(other_, x.rows, outputs()), training);
    add_to(y, other_);
  } else {
    for (std::int64_t i = 0; i < x.rows * x.cols; ++i) y.data[i] += x.data[i];
  }
}

void Residual::backward(Matrix<const float> dy, Matrix<float> dx) {
  inner_->backward(dy, dx);
  if (projection_) {
    const bool wanted = dx.data != nullptr;
    projection_->backward(dy, wanted ? resized(other_, dy.rows, inputs()) : Matrix<float>());
    if (wanted) add_to(dx, other_);
  } else if (dx.data != nullptr) {
    for (std::int64_t i = 0; i < dy.rows * dy.cols; ++i) dx.data[i] += dy.data[i];
  }
}

void Residual::visit(const std::string& prefix, const Visitor& body) {
  inner_->visit(prefix + "inner.", body);
  if (projection_) projection_->visit(prefix + "projection.", body);
}

}  // namespace lode
