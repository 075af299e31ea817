// SPDX-License-Identifier: Apache-2.0
// Pages against plain loops: bounds and codes bit for bit, scores in float64, chosen rows by a sort; one page
// and none, ragged ends, equal pages, numbers at the end of their type, NaN, budgets of nothing, all and
// more.
#include <limits>
#include <numeric>
#include <string>

#include "harness.h"
#include "kernels/cuda/baselines/page_bounds.h"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/select/select.h"
#include "scores.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
using Rows = std::vector<std::int32_t>;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int kKvHeads = 2, kLayers = 2;

/// Keys of kLayers layers, with what a model's keys should not have, and their bounds.
struct Store {
  KvLayout layout;
  PageBounds shape;
  std::int64_t tokens = 0, pages = 0;
  std::vector<float> keys, levels;  // as stored, [L, Hkv, low and step, d]
  OnDevice<char> on_device;
  OnDevice<float> levels_on_device;
  OnDevice<char> bounds;

  Store(DType type, int d, int page, int bits, std::int64_t count)
      : layout(layout_of(type, d, count)),
        shape{.capacity = count / page + 3, .sink = 5, .page = page, .bits = bits},
        tokens(count),
        pages((count - shape.sink) / page),
        keys(make_keys(layout, type, count)),
        levels(make_levels(d)),
        on_device(test::encode(keys, type)),
        levels_on_device(levels),
        bounds(std::vector<char>(bounds_bytes(), 0x55)) {}

  static KvLayout layout_of(DType type, int d, std::int64_t count) {
    KvLayout layout = {kKvHeads, d, type, 0};
    layout.layer_stride = layout.layer_bytes(count);
    return layout;
  }
  static std::vector<float> make_keys(const KvLayout& layout, DType type, std::int64_t count) {
    const std::int64_t d = layout.head_dim, rows = kLayers * layout.layer_stride / layout.row_bytes();
    std::vector<float> keys = test::normal(static_cast<std::size_t>(rows * d), 11);
    for (float& x : keys) x = test::rounded(x, type);
    const float most = type == DType::f16 ? 65504.0f : 1e30f;
    for (int layer = 0; layer < kLayers; ++layer) {
      const auto at = [&](int head, std::int64_t token) {
        return keys.begin() +
               (layer * layout.layer_stride + layout.key_offset(head, token)) / layout.row_bytes() * d;
      };
      at(0, 7)[3] = NAN, at(1, 9)[0] = kInf, at(1, 30)[1] = -kInf;  // such keys count as 0
      at(0, 40)[2] = test::rounded(most, type), at(0, 41)[2] = test::rounded(-most, type);
      for (std::int64_t token = count / 2; token < count * 3 / 4; ++token)  // pages that tie
        std::fill(at(1, token), at(1, token) + d, 0.75f);
    }
    return keys;
  }
  static std::vector<float> make_levels(int d) {
    std::vector<float> levels;
    for (int i = 0; i < kLayers * kKvHeads; ++i) {
      for (int c = 0; c < d; ++c) levels.push_back(-2.0f - 0.01f * static_cast<float>(c % 7));
      for (int c = 0; c < d; ++c) levels.push_back(c == 5 ? 0.0f : 0.3f + 0.02f * static_cast<float>(c % 5));
    }
    return levels;
  }
  std::size_t bounds_bytes() const { return static_cast<std::size_t>(kLayers * shape.layer_bytes(layout)); }
  PageBounds on_gpu(int layer) const {
    PageBounds one = shape;
    one.bounds = bounds.get() + layer * shape.layer_bytes(layout);
    one.levels = levels_on_device.get() + layer * kKvHeads * 2 * layout.head_dim;
    return one;
  }
  const float* level(int layer, int head) const {
    return levels.data() + (layer * kKvHeads + head) * 2 * layout.head_dim;
  }
  /// Largest, then least of a page: [2 d].
  std::vector<float> extremes(int layer, int head, std::int64_t page) const {
    const int d = layout.head_dim;
    std::vector<float> both(static_cast<std::size_t>(2 * d), -kInf);
    std::fill(both.begin() + d, both.end(), kInf);
    for (std::int64_t token = 0; token < shape.page; ++token) {
      const std::int64_t offset =
          layer * layout.layer_stride + layout.key_offset(head, shape.sink + page * shape.page + token);
      const float* const key = keys.data() + offset / layout.row_bytes() * d;
      const bool finite = std::all_of(key, key + d, [](float x) { return std::isfinite(x); });
      for (int c = 0; c < d; ++c) {
        const float x = finite ? key[c] : 0.0f;
        both[static_cast<std::size_t>(c)] = std::max(both[static_cast<std::size_t>(c)], x);
        both[static_cast<std::size_t>(d + c)] = std::min(both[static_cast<std::size_t>(d + c)], x);
      }
    }
    return both;
  }
  /// The code of bound b, rounded outwards.
  int code(int layer, int head, int b, float x) const {
    const int d = layout.head_dim, most = (1 << shape.bits) - 1;
    const float* const of = level(layer, head);
    const double step = of[d + b % d];
    if (!(step > 0.0)) return 0;
    const double at = (static_cast<double>(x) - of[b % d]) / step;
    return static_cast<int>(
        std::clamp(b < d ? std::ceil(at) : std::floor(at), 0.0, static_cast<double>(most)));
  }
};

void expect_bounds(const Store& store, const std::vector<char>& found, int layer, int head,
                   std::int64_t page) {
  const std::vector<float> both = store.extremes(layer, head, page);
  const std::int64_t bytes = store.shape.page_bytes(store.layout);
  const char* const own = found.data() + layer * store.shape.layer_bytes(store.layout) +
                          (head * store.shape.capacity + page) * bytes;
  const bool there = page < store.pages;
  if (!there) {
    LODE_CHECK(std::count(own, own + bytes, 0x55) == bytes);
    return;
  }
  if (!store.shape.coded()) {
    const std::vector<char> expected = test::encode(both, store.layout.type);
    LODE_CHECK(std::equal(expected.begin(), expected.end(), own));
    return;
  }
  for (int b = 0; b < static_cast<int>(both.size()); ++b) {
    const int bits = store.shape.bits, each = 8 / bits;
    const int code = static_cast<unsigned char>(own[b / each]) >> bits * (b % each) & ((1 << bits) - 1);
    LODE_CHECK(code == store.code(layer, head, b, both[static_cast<std::size_t>(b)]));
  }
}

struct Form {
  DType type;
  int d, page, bits;
};
const std::vector<Form> kForms = {{DType::bf16, 128, 16, 16}, {DType::f16, 64, 16, 16},
                                  {DType::f32, 64, 16, 16},   {DType::bf16, 256, 7, 16},
                                  {DType::f32, 128, 1, 16},   {DType::f16, 80, 16, 16},
                                  {DType::bf16, 128, 16, 4},  {DType::f16, 64, 5, 2},
                                  {DType::bf16, 32, 64, 2},   {DType::f32, 96, 16, 4}};

LODE_TEST(pages_bounds) {
  for (const Form& form : kForms) {
    const Store store(form.type, form.d, form.page, form.bits, 331);
    Stream stream;
    // In two stretches, and the second layer by itself once more.
    const std::int64_t half = store.pages / 2;
    bound_pages(store.on_device.get(), store.layout, kLayers, 0, half, store.on_gpu(0), stream.get());
    bound_pages(store.on_device.get(), store.layout, kLayers, half, store.pages, store.on_gpu(0),
                stream.get());
    bound_pages(store.on_device.get() + store.layout.layer_stride, store.layout, 1, half, half + 1,
                store.on_gpu(1), stream.get());
    const std::vector<char> found = store.bounds.read(stream);
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < kKvHeads; ++head) {
        for (std::int64_t page = 0; page < store.shape.capacity; ++page)
          expect_bounds(store, found, layer, head, page);
      }
    }
  }
}

/// Bound of a page in float64, and the sum of what it is made of.
std::pair<double, double> bound(const Store& store, int layer, int head, std::int64_t page, const float* q) {
  const std::vector<float> both = store.extremes(layer, head, page);
  const int d = store.layout.head_dim;
  double sum = 0.0, size = 0.0;
  for (int b = 0; b < 2 * d; ++b) {
    const double weight = b < d ? std::max(q[b % d], 0.0f) : std::min(q[b % d], 0.0f);
    const float x = both[static_cast<std::size_t>(b)];
    const double value = store.shape.coded() ? static_cast<double>(store.level(layer, head)[d + b % d]) *
                                                   store.code(layer, head, b, x)
                                             : static_cast<double>(x);
    sum += weight * value, size += std::fabs(weight * value);
  }
  return {sum, size};
}

/// Lets the kernel behind it begin, takes its time, then writes what that one is to read.
__global__ void write_late(const char* from, std::int64_t bytes, char* to) {
  release_successor();
  for (const long long begin = clock64(); clock64() - begin < 300000;) {
  }
  for (std::int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

// Sums of heads with bounds that the launch just before writes.
LODE_TEST(pages_scores) {
  for (const Form& form : kForms) {
    for (const int group : {1, 3, 4, 10}) {
      const Store store(form.type, form.d, form.page, form.bits, 331);
      const int heads = group * kKvHeads, tokens = 3;
      const std::int64_t window = 20, stride = store.shape.capacity;
      const std::vector<QueryToken> places = {{0, 330}, {0, 200}, {0, 3}};
      const auto q = test::normal(static_cast<std::size_t>(tokens * heads * form.d), 3);
      Stream stream;
      bound_pages(store.on_device.get(), store.layout, kLayers, 0, store.pages, store.on_gpu(0),
                  stream.get());
      const test::QueriesOnDevice in(store.layout, places, heads, q);
      for (const bool sum_heads : {false, true}) {
        const int lists = sum_heads ? kKvHeads : heads, each = lists / kKvHeads;
        const OnDevice<float> scores(test::poison(static_cast<std::size_t>(tokens * lists * stride)));
        PageBounds bounds = store.on_gpu(1);
        const OnDevice<char> late(std::vector<char>(store.bounds_bytes(), 0x33));
        if (sum_heads) {
          bounds.fresh = true;
          bounds.bounds = late.get() + (bounds.bounds - store.bounds.get());
          Launch(1, 256, 0, stream.get())(write_late, store.bounds.get(), std::int64_t(store.bounds_bytes()),
                                          late.get());
        }
        score_pages(*in, bounds, sum_heads, window, 331, scores.get(), stride, stream.get());
        const auto found = scores.read(stream);
        for (int t = 0; t < tokens; ++t) {
          const std::int64_t far =
                                 places[static_cast<std::size_t>(t)].position + 1 - window - store.shape.sink,
                             pages = std::max<std::int64_t>(0, far) / form.page;
          for (int list = 0; list < lists; ++list) {
            const int head = list / each;
            for (std::int64_t page = 0; page < stride; ++page) {
              const float one = found[static_cast<std::size_t>((t * lists + list) * stride + page)];
              if (page >= pages) {
                LODE_CHECK(one == 1e30f);
                continue;
              }
              double sum = 0.0, size = 0.0;
              for (int g = 0; g < (sum_heads ? group : 1); ++g) {
                const int query_head = sum_heads ? head * group + g : list;
                const auto [part, of] =
                    bound(store, 1, head, page, q.data() + (t * heads + query_head) * form.d);
                sum += part, size += of;
              }
              LODE_CHECK_CLOSE(one, sum, 2e-6 * size);
            }
          }
        }
      }
    }
  }
}

/// The rows that a sort gives.
Rows best_pages(const float* scores, std::int64_t far, int page, std::int64_t budget, std::int64_t sink) {
  budget = std::min(budget, far);
  const std::int64_t pages = far / page, tail = std::min(far % page, budget);
  std::vector<std::int64_t> order(static_cast<std::size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  const auto rank = [&](std::int64_t i) { return std::isnan(scores[i]) ? -kInf : scores[i]; };
  std::sort(order.begin(), order.end(),
            [&](std::int64_t a, std::int64_t b) { return rank(a) != rank(b) ? rank(a) > rank(b) : a > b; });
  Rows rows;
  std::int64_t left = budget - tail;
  for (std::size_t i = 0; left > 0; ++i) {
    const std::int64_t some = std::min<std::int64_t>(left, page), end = sink + (order[i] + 1) * page;
    for (std::int64_t row = end - some; row < end; ++row) rows.push_back(static_cast<std::int32_t>(row));
    left -= some;
  }
  std::sort(rows.begin(), rows.end());
  for (std::int64_t row = sink + far - tail; row < sink + far; ++row)
    rows.push_back(static_cast<std::int32_t>(row));
  return rows;
}

LODE_TEST(pages_choice) {
  constexpr int kLists = 6;  // of a query token
  const std::int64_t sink = 4, window = 10;
  // Ends of the far keys: none, less than a page, one page, ragged, and more pages than registers hold.
  for (const auto& [page, ends] : std::vector<std::pair<int, std::vector<std::int64_t>>>{
           {16, {0, 9, 16, 17, 1000, 16 * 4000 + 5}}, {1, {700, 150000}}, {48, {48 * 300 + 47}}}) {
    std::int64_t n = 1;
    for (const std::int64_t far : ends) n = std::max(n, far / page);
    for (const std::int64_t far : ends) {
      std::vector<float> scores = test::normal(static_cast<std::size_t>(kLists * n), 21);
      for (std::int64_t i = 0; i < n; ++i) {
        const auto at = [&](int list) -> float& { return scores[static_cast<std::size_t>(list * n + i)]; };
        at(1) = -3.5f;                                            // all tie
        at(2) = i % 3 == 0 ? -0.0f : i % 3 == 1 ? 0.0f : -1.0f;   // two thirds do
        at(3) = i % 2 == 0 ? NAN : i % 5 == 0 ? -kInf : at(3);    // chosen last, not never
        at(4) = i % 7 == 0 ? kInf : i % 7 == 1 ? 3e38f : -3e38f;  // the ends of the type
        at(5) = static_cast<float>(i);                            // rising
      }
      for (const std::int64_t budget : {std::int64_t{0}, std::int64_t{1}, std::int64_t{15}, std::int64_t{100},
                                        far / 3, far - 1, far, far + 50}) {
        if (budget < 0) continue;
        const std::int64_t capacity = std::max<std::int64_t>(1, std::min(budget, far));
        // A second token of another position and budget, so that lists are told apart.
        const auto end = static_cast<std::int32_t>(sink + far + window - 1);
        const OnDevice<QueryToken> tokens({{0, end}, {0, end / 2}});
        const OnDevice<std::int32_t> budgets(
            {static_cast<std::int32_t>(budget), static_cast<std::int32_t>(budget / 2)});
        std::vector<float> both = scores;
        both.insert(both.end(), scores.begin(), scores.end());
        const OnDevice<float> scores_device(both);
        const OnDevice<std::int32_t> rows(Rows(static_cast<std::size_t>(2 * kLists * capacity), -7)),
            counts(Rows(2 * kLists, -7));
        Stream stream;
        top_pages(scores_device.get(), 2 * kLists, n,
                  {.tokens = tokens.get(),
                   .budget = budgets.get(),
                   .lists_of_query = kLists,
                   .page = page,
                   .sink = sink,
                   .window = window},
                  rows.get(), capacity, counts.get(), stream.get());
        const Rows found = rows.read(stream), many = counts.read(stream);
        for (int list = 0; list < 2 * kLists; ++list) {
          const bool second = list >= kLists;
          const std::int64_t own = second ? std::max<std::int64_t>(0, end / 2 + 1 - window - sink) : far;
          const Rows expected =
              best_pages(both.data() + list * n, own, page, second ? budget / 2 : budget, sink);
          const auto begin = found.begin() + list * capacity;
          LODE_CHECK(many[static_cast<std::size_t>(list)] == static_cast<std::int32_t>(expected.size()));
          LODE_CHECK(std::equal(expected.begin(), expected.end(), begin));
          LODE_CHECK(std::count(begin + std::ssize(expected), begin + capacity, -7) ==
                     capacity - std::ssize(expected));
        }
      }
    }
  }
}

}  // namespace
}  // namespace lode::cuda
