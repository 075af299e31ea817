// SPDX-License-Identifier: Apache-2.0
// A function from vectors to binary signatures: a small feed-forward network and a sign (HashAttention,
// equation 4). One linear layer of random directions makes random hyperplanes of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lodestone/types.h"

namespace lode {

/// y = W x + b.
struct HashLayer {
  std::int64_t in = 0, out = 0;
  DType type = DType::f32;        ///< of the weights as they are kept and multiplied: f32, f16 or bf16
  std::vector<std::byte> weight;  // [out, in] of `type`
  std::vector<float> bias;        // [out], or empty for none
};

class HashNet {
 public:
  enum class Activation { silu, relu };

  HashNet() = default;
  /// At least one layer; each takes what the one before gives; the last gives 32, 64 or 128 numbers.
  HashNet(std::vector<HashLayer> layers, Activation activation);

  std::int64_t inputs() const { return layers_.front().in; }
  int words() const { return static_cast<int>(layers_.back().out / 32); }
  std::int64_t bytes() const;  ///< of weights and biases
  const std::vector<HashLayer>& layers() const { return layers_; }
  Activation activation() const { return activation_; }

  struct Scratch {
    std::vector<float> a, b;  // [8, widest layer]
  };
  /// signatures[i] = the signature of x[i]: bit j is set where output j is above 0, so that 0, -0 and NaN
  /// give 0. A vector's signature does not depend on which others share the call.
  void encode(const float* x /*[n, inputs]*/, std::int64_t n, std::uint32_t* signatures /*[n, words]*/,
              Scratch& scratch) const;

 private:
  std::vector<HashLayer> layers_;
  Activation activation_ = Activation::silu;
  std::int64_t widest_ = 0;
};

}  // namespace lode
