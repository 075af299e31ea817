// SPDX-License-Identifier: Apache-2.0
// Keys with a large share of the attention, against float64: groups, types, a seam, positions inside a block, and what
// hurts.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <type_traits>

#include "harness.h"
#include "kernels/cuda/attend/large_masses.h"

namespace lode::cuda {
namespace {

struct Shape {
  int count = 5, query_heads = 6, kv_heads = 2, d = 64;
  std::int64_t seam = 256, position = 300;
  float least = 0.05f;
};

float noise(std::int64_t i) {
  const auto x = static_cast<std::uint32_t>(i) * 2654435761u;
  return static_cast<float>((x ^ x >> 15) % 20011u) / 10005.0f - 1.0f;
}
template <class T>
float rounded(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else if constexpr (std::is_same_v<T, __half>)
    return __half2float(__float2half_rn(x));
  else
    return __bfloat162float(__float2bfloat16_rn(x));
}
template <class T>
T stored(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}
template <class T>
constexpr DType kType = std::is_same_v<T, float>    ? DType::f32
                        : std::is_same_v<T, __half> ? DType::f16
                                                    : DType::bf16;

using Found = std::map<std::tuple<int, int, int>, float>;  // mass of (token, KV head, row)

/// One case: numbers of queries and keys by index, so that a test may plant what hurts.
template <class T>
struct Case {
  Shape shape;
  std::vector<float> q, k;  // [N, Hq, d], [keys, Hkv, d]

  explicit Case(const Shape& s) : shape(s) {
    q.resize(static_cast<std::size_t>(s.count) * s.query_heads * s.d);
    k.resize(static_cast<std::size_t>(s.position + s.count) * s.kv_heads * s.d);
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = 3.0f * noise(static_cast<std::int64_t>(i));
    for (std::size_t i = 0; i < k.size(); ++i)
      k[i] = rounded<T>(2.0f * noise(static_cast<std::int64_t>(i) + 7919));
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape.d)); }

  Found exactly(float least) const {
    Found all;
    const int group = shape.query_heads / shape.kv_heads;
    for (int t = 0; t < shape.count; ++t)
      for (int kv = 0; kv < shape.kv_heads; ++kv) {
        const std::int64_t keys = shape.position + t + 1;
        std::vector<double> mass(static_cast<std::size_t>(keys), 0.0), top(mass);
        for (int g = 0; g < group; ++g) {
          std::vector<double> s(static_cast<std::size_t>(keys));
          double peak = -INFINITY, sum = 0;
          for (std::int64_t i = 0; i < keys; ++i) {
            double dot = 0;
            for (int c = 0; c < shape.d; ++c)
              dot += static_cast<double>(q[((t * shape.query_heads + kv * group + g) * shape.d) + c]) *
                     k[(i * shape.kv_heads + kv) * shape.d + c];
            s[i] = dot * scale(), peak = std::max(peak, s[i]);
          }
          for (const double x : s) sum += std::exp(x - peak);
          for (std::int64_t i = 0; i < keys; ++i) {
            const double own = std::exp(s[i] - peak) / sum;
            mass[i] += own, top[i] = std::max(top[i], own);
          }
        }
        for (std::int64_t i = 0; i < keys; ++i)
          if (top[i] >= least) all[{t, kv, static_cast<int>(i)}] = static_cast<float>(mass[i]);
      }
    return all;
  }

  Found found() const {
    Stream stream;
    MassQuery query = {.count = shape.count, .query_heads = shape.query_heads, .scale = scale()};
    query.layout = {.kv_heads = shape.kv_heads, .head_dim = shape.d, .type = kType<T>};
    query.seam = shape.seam, query.position = shape.position, query.least = shape.least;
    const std::int64_t keys = shape.position + shape.count;
    const auto side = [&](std::int64_t begin, std::int64_t end) {
      std::vector<char> bytes(
          static_cast<std::size_t>(query.layout.layer_bytes(std::max<std::int64_t>(1, end - begin))));
      for (std::int64_t i = begin; i < end; ++i)
        for (int h = 0; h < shape.kv_heads; ++h)
          for (int c = 0; c < shape.d; ++c)
            reinterpret_cast<T*>(bytes.data() + query.layout.key_offset(h, i - begin))[c] =
                stored<T>(k[(i * shape.kv_heads + h) * shape.d + c]);
      Buffer there(std::ssize(bytes), "a test");
      copy(there.as<void>(), bytes.data(), std::ssize(bytes), stream.get());
      stream.synchronize();
      return there;
    };
    const Buffer document = side(0, shape.seam), behind = side(shape.seam, keys);
    Buffer queries(std::ssize(q) * 4, "a test");
    copy(queries.as<void>(), q.data(), std::ssize(q) * 4, stream.get());
    query.q = queries.as<float>(), query.document = document.as<char>(), query.behind = behind.as<char>();
    Buffer workspace(large_masses_workspace_bytes(shape.count, shape.query_heads, shape.d, keys), "a test");
    Buffer list(query.most_found() * std::int64_t{sizeof(LargeMass)}, "a test"), counter(4, "a test");
    find_large_masses(query, workspace.as<void>(), list.as<LargeMass>(), counter.as<std::int32_t>(),
                      stream.get());
    std::int32_t count = -1;
    copy(&count, counter.as<void>(), 4, stream.get());
    stream.synchronize();
    LODE_CHECK(count >= 0 && count <= query.most_found());
    std::vector<LargeMass> masses(static_cast<std::size_t>(count));
    copy(masses.data(), list.as<void>(), count * std::int64_t{sizeof(LargeMass)}, stream.get());
    stream.synchronize();
    Found result;
    for (const LargeMass& m : masses) {
      const bool fresh = result.insert({{m.token, m.kv_head, m.row}, m.mass}).second;
      LODE_CHECK(fresh);
    }
    return result;
  }
};

/// How far masses may be from float64's, as a share: of 16 bits the kernel rounds queries.
template <class T>
constexpr float kApart = std::is_same_v<T, float>    ? 1e-4f
                         : std::is_same_v<T, __half> ? 1e-2f
                                                     : 8e-2f;

/// A share near the least may fall on either side.
template <class T>
void check_alike(const Case<T>& all) {
  const Found surely = all.exactly(all.shape.least * (1 + kApart<T>)),
              perhaps = all.exactly(all.shape.least * (1 - kApart<T>)), found = all.found();
  LODE_CHECK(!surely.empty());
  for (const auto& [key, mass] : surely) LODE_CHECK(found.contains(key));
  for (const auto& [key, mass] : found) {
    LODE_CHECK(perhaps.contains(key));
    if (perhaps.contains(key)) LODE_CHECK_CLOSE(mass, perhaps.at(key), kApart<T> * mass);
  }
}

template <class T>
void check(const Shape& shape) {
  check_alike(Case<T>(shape));
}

LODE_TEST(large_masses_are_those_of_float64) {
  for (const Shape& shape :
       {Shape{}, Shape{.count = 1, .query_heads = 4, .kv_heads = 4, .seam = 0, .position = 0},
        Shape{.count = 33, .query_heads = 16, .kv_heads = 1, .d = 128, .seam = 512, .position = 512},
        Shape{.count = 7, .query_heads = 5, .kv_heads = 1, .d = 256, .seam = 0, .position = 700},
        Shape{.count = 40, .query_heads = 8, .kv_heads = 1, .d = 512, .seam = 512, .position = 700},
        Shape{.count = 64, .query_heads = 8, .kv_heads = 2, .d = 80, .seam = 1024, .position = 1151}}) {
    check<float>(shape);
    check<__half>(shape);
    check<__nv_bfloat16>(shape);
  }
}

LODE_TEST(one_huge_logit_takes_all_the_mass) {
  Case<float> hard(Shape{.count = 2, .seam = 128, .position = 400});
  for (int c = 0; c < hard.shape.d; ++c)  // of KV head 0, for all queries
    for (const std::size_t row : {200u})
      hard.k[row * 2 * 64 + static_cast<std::size_t>(c)] =
          200.0f * (hard.q[static_cast<std::size_t>(c)] > 0 ? 1.0f : -1.0f);
  check_alike(hard);
}

LODE_TEST(equal_keys_share_and_none_is_large) {
  Case<float> flat(Shape{.count = 1, .seam = 256, .position = 300});
  std::ranges::fill(flat.k, 0.5f);
  LODE_CHECK(flat.found().empty());
}

LODE_TEST(what_is_not_a_number_finds_nothing_and_does_not_spread) {
  Case<float> bad(Shape{.count = 1});
  const Found before = bad.found();
  bad.q[0] = NAN;  // a head of the first group
  const Found after = bad.found();
  for (const auto& [key, mass] : before)
    if (std::get<1>(key) == 1) LODE_CHECK(after.contains(key) && after.at(key) == mass);
  for (const auto& [key, mass] : after) LODE_CHECK(std::get<1>(key) == 1);
}

}  // namespace
}  // namespace lode::cuda
