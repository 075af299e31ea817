// SPDX-License-Identifier: Apache-2.0
// Rows of plain arrays reach their blocks whatever their strides, and nothing else is touched; vectors turn back.
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "harness.h"
#include "kernels/cuda/device/arrivals.h"

namespace lode::cuda {
namespace {

/// Rows [3, 200) of arrays [tokens, heads, K or V, d + gap], which begin `shift` bytes behind a multiple of 16; the last of them
/// from an array without those in front.
void check_rows(DType type, int dim, int gap, std::int64_t shift) {
  constexpr std::int64_t kBegin = 3, kSplit = 131, kRows = 200, kHeads = 3;
  const KvLayout layout = {kHeads, dim, type, 0};
  const std::int64_t row = layout.row_bytes(), step = row + gap * bytes_of(type),
                     all = kRows * kHeads * 2 * step, bytes = layout.layer_bytes(kRows);
  std::vector<char> from(static_cast<std::size_t>(all + shift)), expected(static_cast<std::size_t>(bytes), 7),
      found(expected.size());
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<char>(i * 31 + i / 251);
  for (std::int64_t t = kBegin; t < kRows; ++t)
    for (int h = 0; h < kHeads; ++h) {
      const char* const key = from.data() + shift + (t * kHeads + h) * 2 * step;
      char* const to = expected.data() + layout.key_offset(h, t);
      std::memcpy(to, key, static_cast<std::size_t>(row));
      std::memcpy(to + layout.value_offset(), key + step, static_cast<std::size_t>(row));
    }
  Stream stream;
  const Buffer there(std::ssize(from), "a test"), layer(bytes, "a test");
  copy(there.as<void>(), from.data(), there.bytes(), stream.get());
  fill(layer.as<void>(), 7, bytes, stream.get());
  const char* const k = there.as<char>() + shift;
  const StridedKv kv = {k, k + step, 2 * step, 2 * step, 2 * step * kHeads, 2 * step * kHeads, kRows};
  arrive({kv, layout, layer.as<char>(), kBegin, kBegin}, {}, stream.get());
  arrive({kv, layout, layer.as<char>(), kBegin, kSplit}, {}, stream.get());
  const StridedKv behind = {kv.k + kSplit * kv.k_row,
                            kv.v + kSplit * kv.v_row,
                            kv.k_head,
                            kv.v_head,
                            kv.k_row,
                            kv.v_row,
                            kRows - kSplit};
  arrive({behind, layout, layer.as<char>(), kSplit, kRows, kSplit}, {}, stream.get());
  copy(found.data(), layer.as<void>(), bytes, stream.get());
  stream.synchronize();
  LODE_CHECK(found == expected);
}

LODE_TEST(rows_of_any_strides_go_to_their_blocks) {
  check_rows(DType::bf16, 128, 0, 0);
  check_rows(DType::f32, 64, 4, 0);
  check_rows(DType::f32, 6, 1, 4);
  check_rows(DType::f16, 64, 1, 2);
}

LODE_TEST(queries_turn_back_and_know_their_places) {
  constexpr std::int64_t kTokens = 5, kBegin = 1000;
  constexpr int kHeads = 3, kDim = 16, kTurning = 6;
  constexpr float kScaling = 1.25f;
  std::vector<float> plain(kTokens * kHeads * kDim), turned, frequencies(kDim / 2), found(plain.size());
  for (std::size_t i = 0; i < plain.size(); ++i) plain[i] = std::sin(static_cast<float>(i));
  for (std::size_t i = 0; i < frequencies.size(); ++i) frequencies[i] = 0.05f / static_cast<float>(i + 1);
  turned = plain;
  for (std::int64_t row = 0; row < kTokens * kHeads; ++row)
    for (int i = 0; i < kTurning; ++i) {
      float &a = turned[row * kDim + i], &b = turned[row * kDim + i + kDim / 2];
      const double angle = static_cast<double>(kBegin + row / kHeads) * frequencies[i], x = a, y = b;
      a = static_cast<float>((x * std::cos(angle) - y * std::sin(angle)) * kScaling);
      b = static_cast<float>((y * std::cos(angle) + x * std::sin(angle)) * kScaling);
    }
  Stream stream;
  const Buffer x(std::ssize(turned) * 4, "a test"), f(std::ssize(frequencies) * 4, "a test"),
      out(x.bytes(), "a test"), there(kTokens * sizeof(QueryToken), "a test");
  copy(x.as<void>(), turned.data(), x.bytes(), stream.get());
  copy(f.as<void>(), frequencies.data(), f.bytes(), stream.get());
  std::vector<QueryToken> places(kTokens);
  arrive({},
         {.q = x.as<float>(),
          .frequencies = f.as<float>(),
          .begin = kBegin,
          .tokens = kTokens,
          .heads = kHeads,
          .d = kDim,
          .turning = kTurning,
          .attention_scaling = kScaling,
          .plain = out.as<float>(),
          .places = there.as<QueryToken>()},
         stream.get());
  copy(found.data(), out.as<void>(), out.bytes(), stream.get());
  copy(places.data(), there.as<void>(), there.bytes(), stream.get());
  stream.synchronize();
  for (std::int32_t t = 0; t < kTokens; ++t)
    LODE_CHECK(places[static_cast<std::size_t>(t)].sequence == 0 &&
               places[static_cast<std::size_t>(t)].position == kBegin + t);
  for (std::size_t i = 0; i < plain.size(); ++i) LODE_CHECK(std::abs(found[i] - plain[i]) < 1e-4f);
}

/// Queries of a type of 16 bits, whose numbers are these in float32, and go back as they came.
template <class T>
void check_type(DType type, const std::vector<T>& numbers, const std::vector<float>& expected) {
  constexpr std::int64_t kTokens = 3;
  constexpr int kHeads = 2, kDim = 4;
  LODE_CHECK(numbers.size() == kTokens * kHeads * kDim && expected.size() == numbers.size());
  Stream stream;
  const std::int64_t count = std::ssize(numbers);
  const Buffer x(count * 2, "a test"), wide(count * 4, "a test"), plain(count * 4, "a test"),
      back(count * 2, "a test"), f(kDim * 4, "a test");
  std::vector<float> found(numbers.size()), unturned(numbers.size()), none(kDim, 0.5f);
  std::vector<T> same(numbers.size());
  copy(x.as<void>(), numbers.data(), x.bytes(), stream.get());
  copy(f.as<void>(), none.data(), f.bytes(), stream.get());
  for (float* const to : {static_cast<float*>(nullptr), plain.as<float>()}) {
    fill(wide.as<void>(), 7, wide.bytes(), stream.get());
    arrive({},
           {.q = x.as<void>(),
            .type = type,
            .frequencies = f.as<float>(),
            .begin = 9,
            .tokens = kTokens,
            .heads = kHeads,
            .d = kDim,
            .turning = 0,
            .widened = wide.as<float>(),
            .plain = to},
           stream.get());
    copy(found.data(), wide.as<void>(), wide.bytes(), stream.get());
    stream.synchronize();
    LODE_CHECK(std::memcmp(found.data(), expected.data(), expected.size() * 4) == 0);
  }
  depart(wide.as<float>(), 0, nullptr, type, stream.get());
  depart(wide.as<float>(), count, back.as<void>(), type, stream.get());
  copy(unturned.data(), plain.as<void>(), plain.bytes(), stream.get());
  copy(same.data(), back.as<void>(), back.bytes(), stream.get());
  stream.synchronize();
  LODE_CHECK(std::memcmp(unturned.data(), expected.data(), expected.size() * 4) == 0);
  LODE_CHECK(same == numbers);
}

LODE_TEST(queries_of_sixteen_bits_are_widened) {
  std::vector<std::uint16_t> bits;
  std::vector<float> expected;
  const auto add = [&](std::uint16_t number, float value) {
    bits.push_back(number);
    expected.push_back(value);
  };
  const float inf = std::numeric_limits<float>::infinity();
  for (int i = 0; i < 4; ++i) {  // bf16
    add(0x3f80, 1.0f), add(0xbf81, -1.0078125f), add(0x0001, std::ldexp(1.0f, -133));
    add(0x7f80, inf), add(0x8000, -0.0f), add(0x4049, 3.140625f);
  }
  check_type(DType::bf16, bits, expected);
  bits.clear(), expected.clear();
  for (int i = 0; i < 4; ++i) {  // f16
    add(0x3c00, 1.0f), add(0xbc01, -1.0009765625f), add(0x0001, std::ldexp(1.0f, -24));
    add(0xfc00, -inf), add(0x8000, -0.0f), add(0x7bff, 65504.0f);
  }
  check_type(DType::f16, bits, expected);
}

}  // namespace
}  // namespace lode::cuda
