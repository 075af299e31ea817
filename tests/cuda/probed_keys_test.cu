// SPDX-License-Identifier: Apache-2.0
// Scores of lists, and of the keys in chosen ones, against float64.
#include <cuda_runtime.h>

#include <cstring>
#include <random>
#include <vector>

#include "harness.h"
#include "kernels/cuda/baselines/probed_keys.h"
#include "reference.h"

namespace lode::cuda {
namespace {

struct Shape {
  DType type = DType::bf16;
  int kv_heads = 2, group = 4, dim = 128, lists = 50, most = 7;
  std::int64_t max_tokens = 5000, sink = 3, window = 10;
  std::vector<QueryToken> tokens;
};

std::vector<float> floats(std::int64_t n, unsigned seed) {
  return test::normal(static_cast<std::size_t>(n), seed);
}

void check(const Shape& s) {
  Stream stream;
  const int heads = s.kv_heads * s.group;
  const std::int64_t rows = std::ssize(s.tokens) * heads, d = s.dim;
  const KvLayout layout = {s.kv_heads, s.dim, s.type, 0};
  constexpr int kSequences = 2;
  std::vector<std::vector<float>> keys;
  std::vector<test::OnDevice<char>> caches;
  std::vector<const char*> bases;
  for (int i = 0; i < kSequences; ++i) {
    keys.push_back(floats(s.kv_heads * s.max_tokens * d, static_cast<unsigned>(i)));  // [Hkv, max_tokens, d]
    std::vector<char> packed(static_cast<std::size_t>(layout.layer_bytes(s.max_tokens)));
    const std::vector<char> encoded = test::encode(keys.back(), s.type);
    for (int head = 0; head < s.kv_heads; ++head) {
      for (std::int64_t key = 0; key < s.max_tokens; ++key)
        std::copy_n(encoded.data() + (head * s.max_tokens + key) * layout.row_bytes(), layout.row_bytes(),
                    packed.data() + layout.key_offset(head, key));
    }
    caches.emplace_back(packed);
    bases.push_back(caches.back().get());
  }
  const std::vector<float> q = floats(rows * d, 11),
                           centroids = floats(std::int64_t{s.kv_heads} * s.lists * d, 12);
  std::vector<std::uint16_t> labels(static_cast<std::size_t>(kSequences * s.kv_heads * s.max_tokens));
  std::mt19937 engine(13);
  for (auto& label : labels) label = static_cast<std::uint16_t>(engine() % static_cast<unsigned>(s.lists));
  std::vector<std::int32_t> probed(static_cast<std::size_t>(rows * s.most), -1), counts;
  for (std::int64_t row = 0; row < rows; ++row) {
    counts.push_back(row == 1 ? 0 : s.most - static_cast<int>(row % 2));
    for (int i = 0; i < counts.back(); ++i)
      probed[static_cast<std::size_t>(row * s.most + i)] =
          (static_cast<int>(row) * 3 + i * (s.lists / s.most)) % s.lists;
  }
  const test::OnDevice<float> q_there(q), centroids_there(centroids);
  const test::OnDevice<std::uint16_t> labels_there(labels);
  const test::OnDevice<std::int32_t> probed_there(probed), counts_there(counts);
  const test::OnDevice<QueryToken> tokens_there(s.tokens);
  const test::OnDevice<const char*> bases_there(bases);
  const Buffer list_scores(rows * s.lists * 4, "a test"), scores(rows * s.max_tokens * 4, "a test"),
      scanned(rows * 4, "a test");
  fill(scores.as<void>(), 0x11, scores.bytes(), stream.get());
  fill(scanned.as<void>(), 0, scanned.bytes(), stream.get());
  const Queries in = {.tokens = tokens_there.get(),
                      .bases = bases_there.get(),
                      .layout = layout,
                      .count = static_cast<int>(std::ssize(s.tokens)),
                      .query_heads = heads,
                      .scale = 0.125f,
                      .q = q_there.get()};
  score_lists(in, centroids_there.get(), s.lists, list_scores.as<float>(), stream.get());
  score_probed_keys(in,
                    {.labels = labels_there.get(),
                     .sequence_stride = s.kv_heads * s.max_tokens,
                     .lists = s.lists,
                     .probed = probed_there.get(),
                     .counts = counts_there.get(),
                     .most = s.most},
                    s.sink, s.window, s.max_tokens, scores.as<float>(), scanned.as<std::int32_t>(),
                    stream.get());
  std::vector<float> of_lists(static_cast<std::size_t>(rows * s.lists)),
      found(static_cast<std::size_t>(rows * s.max_tokens));
  std::vector<std::int32_t> numbers(static_cast<std::size_t>(rows));
  copy(of_lists.data(), list_scores.as<void>(), list_scores.bytes(), stream.get());
  copy(found.data(), scores.as<void>(), scores.bytes(), stream.get());
  copy(numbers.data(), scanned.as<void>(), scanned.bytes(), stream.get());
  stream.synchronize();
  const auto dot = [&](const float* a, const float* b, double& size) {
    double sum = size = 0.0;
    for (std::int64_t c = 0; c < d; ++c) {
      sum += static_cast<double>(a[c]) * b[c];
      size += std::fabs(static_cast<double>(a[c]) * b[c]);
    }
    return sum;
  };
  float untouched;
  std::memset(&untouched, 0x11, 4);
  double size = 0.0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t head = row % heads / s.group;
    const QueryToken token = s.tokens[static_cast<std::size_t>(row / heads)];
    for (int list = 0; list < s.lists; ++list) {
      const double expected = dot(q.data() + row * d, centroids.data() + (head * s.lists + list) * d, size);
      LODE_CHECK_CLOSE(of_lists[static_cast<std::size_t>(row * s.lists + list)], expected, 1e-6 * size);
    }
    std::int32_t all = 0;
    for (std::int64_t key = 0; key < s.max_tokens; ++key) {
      const float score = found[static_cast<std::size_t>(row * s.max_tokens + key)];
      if (key >= token.position + 1 - s.window) {
        LODE_CHECK(score == untouched);
        continue;
      }
      const int label =
          labels[static_cast<std::size_t>((token.sequence * s.kv_heads + head) * s.max_tokens + key)];
      bool wanted = false;
      for (int i = 0; i < counts[static_cast<std::size_t>(row)]; ++i)
        wanted = wanted || probed[static_cast<std::size_t>(row * s.most + i)] == label;
      if (key < s.sink || !wanted) {
        LODE_CHECK(score == -INFINITY);
        continue;
      }
      ++all;
      std::vector<float> k(
          keys[static_cast<std::size_t>(token.sequence)].begin() + (head * s.max_tokens + key) * d,
          keys[static_cast<std::size_t>(token.sequence)].begin() + (head * s.max_tokens + key + 1) * d);
      for (float& x : k) x = test::rounded(x, s.type);
      const double expected = dot(q.data() + row * d, k.data(), size) * 0.125;
      LODE_CHECK_CLOSE(score, expected, 1e-6 * size * 0.125 + 1e-7);
    }
    LODE_CHECK(numbers[static_cast<std::size_t>(row)] == all);
  }
}

LODE_TEST(probed_keys_are_scored_and_no_others) {
  const std::vector<QueryToken> one = {{1, 4998}}, some = {{0, 4000}, {1, 11}, {0, 2100}, {1, 5}};
  check({.tokens = one});
  check({.type = DType::f32, .kv_heads = 3, .group = 1, .dim = 64, .tokens = some});
  check(
      {.type = DType::f16, .kv_heads = 1, .group = 16, .dim = 256, .lists = 900, .most = 40, .tokens = one});
  check({.kv_heads = 2, .group = 7, .dim = 80, .lists = 3, .most = 3, .tokens = some});
  check({.type = DType::f16, .kv_heads = 2, .group = 2, .dim = 4, .lists = 8192, .most = 1, .tokens = some});
}

}  // namespace
}  // namespace lode::cuda
