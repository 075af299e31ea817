// SPDX-License-Identifier: Apache-2.0
// What the tests of the CUDA kernels share: random numbers, device copies of host vectors, and the reference
// in float64.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "harness.h"
#include "kernels/cuda/device/device.h"
#include "lodestone/types.h"

namespace lode::cuda::test {

inline std::vector<float> normal(std::size_t count, unsigned seed, float deviation = 1.0f) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> draw(0.0f, deviation);
  std::vector<float> values(count);
  for (float& x : values) x = draw(engine);
  return values;
}

inline float rounded(float x, DType type) {
  return type == DType::bf16 ? to_float(to_bf16(x)) : type == DType::f16 ? to_float(to_f16(x)) : x;
}

/// The bytes of these numbers in a type.
inline std::vector<char> encode(const std::vector<float>& values, DType type) {
  const auto size = static_cast<std::size_t>(bytes_of(type));
  std::vector<char> bytes(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint16_t half = type == DType::bf16 ? to_bf16(values[i]).bits : to_f16(values[i]).bits;
    const void* from = type == DType::f32 ? static_cast<const void*>(&values[i]) : &half;
    std::copy_n(static_cast<const char*>(from), size, bytes.data() + i * size);
  }
  return bytes;
}

/// A device copy of a host vector; `offset` bytes are left before it, to test addresses that are not aligned.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& values, std::int64_t offset = 0)
      : count_(values.size()), offset_(offset), buffer_(offset + bytes(), "a test") {
    copy(get(), values.data(), bytes(), nullptr);
    cudaDeviceSynchronize();  // the default stream, which no other stream waits for
  }
  T* get() const { return reinterpret_cast<T*>(buffer_.as<char>() + offset_); }
  std::vector<T> read(const Stream& stream) const {
    stream.synchronize();
    std::vector<T> values(count_);
    copy(values.data(), get(), bytes(), nullptr);
    cudaDeviceSynchronize();
    return values;
  }

 private:
  std::int64_t bytes() const { return static_cast<std::int64_t>(count_ * sizeof(T)); }
  std::size_t count_;
  std::int64_t offset_;
  Buffer buffer_;
};

/// Outputs start as these: a number that no test expects, so that a place left unwritten shows.
inline std::vector<float> poison(std::size_t count) {
  return std::vector<float>(count, 1e30f);
}

/// |found - expected| / |expected|, both as whole vectors; NaN where any number is.
inline double relative_error(const std::vector<float>& found, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double gap = static_cast<double>(found[i]) - expected[i];
    difference += gap * gap;
    norm += expected[i] * expected[i];
  }
  return std::sqrt(difference / (norm > 0 ? norm : 1));
}

}  // namespace lode::cuda::test

/// Fails where the relative error is larger than allowed, or no number.
#define LODE_CHECK_ERROR(found, expected, allowed, label)                                                   \
  do {                                                                                                      \
    const double error_ = ::lode::cuda::test::relative_error(found, expected);                              \
    if (!(error_ <= (allowed)))                                                                             \
      ::lode::cuda::test::fail(__FILE__, __LINE__,                                                          \
                               std::string(#found) + ": " + (label) + ": error " + std::to_string(error_)); \
  } while (0)
