// SPDX-License-Identifier: Apache-2.0
// Keys and values of any stored type for the kernel tests, on pages whose neighbours cannot be read.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <vector>

#include "base/rng.h"
#include "kernels/kernels.h"
#include "kernels/q4_rows.h"

namespace lode::test {

/// Bytes that end where an unreadable page begins, so that reading one byte past the end kills the test.
class GuardedBytes {
 public:
  explicit GuardedBytes(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    size_ = (bytes + page - 1) / page * page + page;
    base_ = static_cast<std::byte*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + size_ - page, page, PROT_NONE);
    data_ = base_ + size_ - page - bytes;
  }
  ~GuardedBytes() { munmap(base_, size_); }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte *base_, *data_;
  std::size_t size_;
};

/// Rows of K and V of one type. The generator gives element (row, column) of K (part 0) or V (part 1).
class RandomKv {
 public:
  using Generator = std::function<float(int part, std::int64_t row, int column)>;

  RandomKv(DType type, std::int64_t rows, int d, const Generator& generator)
      : k_(static_cast<std::size_t>(rows * row_bytes_of(type, d))),
        v_(static_cast<std::size_t>(rows * row_bytes_of(type, d))),
        k_scale_(static_cast<std::size_t>(rows) * sizeof(float)),
        v_scale_(static_cast<std::size_t>(rows) * sizeof(float)) {
    view_ = {type,
             k_.data(),
             v_.data(),
             reinterpret_cast<float*>(k_scale_.data()),
             reinterpret_cast<float*>(v_scale_.data()),
             rows,
             d};
    for (std::int64_t i = 0; i < rows; ++i) {
      fill(type, d, i, k_.data(), reinterpret_cast<float*>(k_scale_.data()),
           [&](int c) { return generator(0, i, c); });
      fill(type, d, i, v_.data(), reinterpret_cast<float*>(v_scale_.data()),
           [&](int c) { return generator(1, i, c); });
    }
  }
  RandomKv(DType type, std::int64_t rows, int d, std::uint64_t seed = 1)
      : RandomKv(type, rows, d, normal(seed)) {}

  const KvRows& view() const { return view_; }

  static Generator normal(std::uint64_t seed) {
    return [rng = Rng(seed)](int, std::int64_t, int) mutable { return static_cast<float>(rng.normal()); };
  }

 private:
  static void fill(DType type, int d, std::int64_t row, std::byte* to, float* scales,
                   const std::function<float(int)>& f) {
    std::vector<float> x(static_cast<std::size_t>(d));
    for (int c = 0; c < d; ++c) x[static_cast<std::size_t>(c)] = f(c);
    if (type == DType::q4) return narrow_q4(x.data(), d, to + row * row_bytes_of(type, d));
    if (type == DType::q8) {
      float most = 0.0f;
      for (const float e : x) most = std::max(most, std::abs(e));
      scales[row] = most / 127.0f;
      for (float& e : x) e = most > 0.0f ? e / scales[row] : 0.0f;
    }
    std::byte* at = to + row * d * bytes_of(type);
    for (int c = 0; c < d; ++c) {
      const float e = x[static_cast<std::size_t>(c)];
      if (type == DType::f32) std::memcpy(at + c * 4, &e, 4);
      if (type == DType::q8) at[c] = static_cast<std::byte>(static_cast<std::int8_t>(std::lrint(e)));
      if (type == DType::f16) {
        const f16 h = to_f16(e);
        std::memcpy(at + c * 2, &h, 2);
      }
      if (type == DType::bf16) {
        const bf16 h = to_bf16(e);
        std::memcpy(at + c * 2, &h, 2);
      }
    }
  }

  GuardedBytes k_, v_, k_scale_, v_scale_;
  KvRows view_;
};

/// Normal numbers times `size`.
inline std::vector<float> random_floats(std::int64_t n, std::uint64_t seed, float size = 1.0f) {
  Rng rng(seed);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& e : x) e = size * static_cast<float>(rng.normal());
  return x;
}

}  // namespace lode::test
