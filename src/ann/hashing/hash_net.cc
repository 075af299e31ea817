// SPDX-License-Identifier: Apache-2.0
#include "ann/hashing/hash_net.h"

#include <algorithm>

#include "kernels/kernels.h"
#include "kernels/select/signature.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kRows = 8;  // of one gemv call

void pack(const float* outputs, std::int64_t words, std::uint32_t* signature) {
  for (std::int64_t w = 0; w < words; ++w) {
    std::uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= std::uint32_t{outputs[w * 32 + i] > 0.0f} << i;
    signature[w] = bits;
  }
}

}  // namespace

HashNet::HashNet(std::vector<HashLayer> layers, Activation activation)
    : layers_(std::move(layers)), activation_(activation) {
  LODE_ASSERT(!layers_.empty());
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const HashLayer& layer = layers_[i];
    LODE_ASSERT(layer.in > 0 && layer.out > 0 && (i == 0 || layer.in == layers_[i - 1].out));
    LODE_ASSERT(std::ssize(layer.weight) == layer.in * layer.out * bytes_of(layer.type));
    LODE_ASSERT(layer.bias.empty() || std::ssize(layer.bias) == layer.out);
    widest_ = std::max(widest_, layer.out);
  }
  const std::int64_t bits = layers_.back().out;
  LODE_ASSERT(bits == 32 || bits == 64 || bits == 128);
}

std::int64_t HashNet::bytes() const {
  std::size_t bytes = 0;
  for (const HashLayer& layer : layers_) bytes += layer.weight.size() + layer.bias.size() * sizeof(float);
  return static_cast<std::int64_t>(bytes);
}

void HashNet::encode(const float* x, std::int64_t n, std::uint32_t* signatures, Scratch& scratch) const {
  for (std::vector<float>* buffer : {&scratch.a, &scratch.b})
    buffer->resize(std::max(buffer->size(), static_cast<std::size_t>(kRows * widest_)));
  for (std::int64_t first = 0; first < n; first += kRows) {
    const std::int64_t rows = std::min(kRows, n - first);
    const float* input = x + first * inputs();
    float *output = scratch.a.data(), *other = scratch.b.data();
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const HashLayer& layer = layers_[i];
      kernels().gemv(input, static_cast<int>(rows), layer.weight.data(), layer.type, layer.in, 0, layer.out,
                     output, layer.out);
      if (!layer.bias.empty()) {
        for (std::int64_t r = 0; r < rows; ++r) {
          for (std::int64_t j = 0; j < layer.out; ++j)
            output[r * layer.out + j] += layer.bias[static_cast<std::size_t>(j)];
        }
      }
      if (i + 1 < layers_.size()) {
        if (activation_ == Activation::silu) {
          signature_kernels().silu(output, rows * layer.out);
        } else {
          for (std::int64_t j = 0; j < rows * layer.out; ++j) output[j] = output[j] < 0.0f ? 0.0f : output[j];
        }
      }
      input = output;
      std::swap(output, other);
    }
    for (std::int64_t r = 0; r < rows; ++r)
      pack(input + r * layers_.back().out, words(), signatures + (first + r) * words());
  }
}

}  // namespace lode
