// SPDX-License-Identifier: Apache-2.0
// Selection against a sort: ties, NaN, infinities, zero of both signs, everything and nothing, lists short
// and long; scores and shared scores against float64; assignment against a plain loop.
#include <limits>
#include <numeric>
#include <string>

#include "harness.h"
#include "kernels/cuda/select/select.h"
#include "scores.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
using Rows = std::vector<std::int32_t>;
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Chosen {
  Rows rows, counts;
};

void expect_rows(const Chosen& found, std::int64_t list, std::int64_t capacity, const Rows& expected,
                 const char* what) {
  const auto at = static_cast<std::size_t>(list);
  const auto begin = found.rows.begin() + static_cast<std::ptrdiff_t>(list * capacity);
  if (found.counts[at] != static_cast<std::int32_t>(expected.size()) ||
      !std::equal(expected.begin(), expected.end(), begin))
    test::fail(__FILE__, __LINE__,
               std::string(what) + ", list " + std::to_string(list) + ": expected " +
                   std::to_string(expected.size()) + " rows, found " + std::to_string(found.counts[at]) +
                   " or others");
}

template <class T>
Rows best_of(const T* scores, std::int64_t length, std::int64_t k, bool all_ties, std::size_t capacity) {
  Rows order;
  for (std::int64_t i = 0; i < length; ++i) {
    if (static_cast<float>(scores[i]) > -kInf) order.push_back(static_cast<std::int32_t>(i));
  }
  const auto before = [&](int a, int b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a > b; };
  const std::size_t room = std::min(order.size(), capacity);
  std::size_t count = std::min(room, static_cast<std::size_t>(std::max<std::int64_t>(k, 0)));
  if (count < order.size() && count > 0) {
    const auto rest = order.begin() + static_cast<std::ptrdiff_t>(count);
    std::nth_element(order.begin(), rest - 1, order.end(), before);
    if (all_ties) {
      const auto last = scores[order[count - 1]];
      const auto end = std::partition(rest, order.end(), [&](int i) { return scores[i] == last; });
      std::sort(rest, end, before);
      count = std::min(room, static_cast<std::size_t>(end - order.begin()));
    }
  }
  order.resize(count);
  std::sort(order.begin(), order.end());
  return order;
}

template <class Run>
Chosen chosen_by(std::size_t lists, std::int64_t capacity, Run run) {
  Stream stream;
  const OnDevice<std::int32_t> rows(Rows(lists * static_cast<std::size_t>(capacity), -7)),
      counts(Rows(lists, -7));
  run(rows.get(), counts.get(), stream.get());
  return {rows.read(stream), counts.read(stream)};
}

LODE_TEST(select_top_k) {
  for (const std::int64_t n : {1, 33, 5000, 131072, 200001, 500000}) {
    const std::int64_t lists = 6, capacity = std::min<std::int64_t>(n, 4096);
    std::vector<float> scores = test::normal(static_cast<std::size_t>(lists * n), 5);
    for (std::int64_t i = 0; i < n; ++i) {
      scores[static_cast<std::size_t>(n + i)] = 0.25f;                     // all tie
      scores[static_cast<std::size_t>(2 * n + i)] = i % 2 ? 0.0f : -0.0f;  // so do these
      if (i % 3 == 0) scores[static_cast<std::size_t>(3 * n + i)] = i % 2 ? NAN : -kInf;
      if (i % 5 == 0) scores[static_cast<std::size_t>(4 * n + i)] = kInf;
    }
    const auto size = static_cast<std::int32_t>(n);
    const Rows k = {size / 3, 4096, size / 2, size, 7, 0}, lengths = {size, size, size, size, size, size};
    const Rows shorter = {size, size - 1, size / 2, 0, size, size};
    for (const Rows* length : {&lengths, &shorter}) {
      const OnDevice<float> scores_device(scores);
      const OnDevice<std::int32_t> k_device(k), lengths_device(*length);
      const Chosen found = chosen_by(6, capacity, [&](auto* rows, auto* counts, StreamHandle stream) {
        top_k(scores_device.get(), lists, n, lengths_device.get(), k_device.get(), rows, capacity, counts,
              nullptr, stream);
      });
      for (std::int64_t list = 0; list < lists; ++list) {
        const auto i = static_cast<std::size_t>(list);
        expect_rows(
            found, list, capacity,
            best_of(scores.data() + list * n, (*length)[i], k[i], false, static_cast<std::size_t>(capacity)),
            "top k");
      }
    }
  }
}

/// As many as k - 50 scores from 2.1 on, those that a sample takes among them, a hundred from 2.0 on, others
/// below 1.1: the k-th is one of few keys below all of the sample, in the digit in which that ends.
void put_few_below_the_sample(float* scores, std::int64_t n, std::int64_t k) {
  std::vector<char> is_sampled(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < 128; ++i) is_sampled[static_cast<std::size_t>(i * n / 128)] = 1;
  std::int64_t left = std::max<std::int64_t>(k - 50 - 128, 0), few = 100;
  for (std::int64_t i = 0; i < n; ++i) {
    const float more = static_cast<float>(i % 1000);
    const bool high = is_sampled[static_cast<std::size_t>(i)] != 0 || left-- > 0;
    scores[i] = high ? 2.1f + more * 1e-4f : few-- > 0 ? 2.0f + more * 1e-6f : 1.0f + more * 1e-4f;
  }
}

// The k-th largest is looked for where a sample of one entry in each 128th of a list expects it: lists whose
// sample says too much, too little or nothing, in one block, in registers of many, and longer.
LODE_TEST(select_where_a_sample_misleads) {
  for (const std::int64_t n : {4096, 16384, 131072, 300000}) {
    const std::int64_t lists = 9, capacity = n;
    std::vector<float> scores = test::normal(static_cast<std::size_t>(lists * n), 15);
    const auto list_of = [&](std::int64_t list) { return scores.data() + list * n; };
    for (std::int64_t i = 0; i < 128; ++i) {
      list_of(0)[i * n / 128] = -100.0f;  // the k-th is above all of the sample
      list_of(1)[i * n / 128] = 100.0f;   // or below
      list_of(2)[i * n / 128] = NAN;
    }
    for (std::int64_t i = 0; i < n; ++i) {
      list_of(3)[i] = -static_cast<float>(n - i);                          // rising, no two alike
      list_of(4)[i] = 1.0f + static_cast<float>(i * 7919 % n) * 0x1p-23f;  // one digit of a plain histogram
      list_of(5)[i] = i % 32 == 31 ? 2.0f : 1.0f;                          // two values
      if (i % 2 != 0) list_of(6)[i] = -kInf;                               // not to be chosen
      list_of(7)[i] = 1.0f + static_cast<float>(i * 7919 % n) * 0x1p-20f;  // below all of the sample, and
    }
    for (std::int64_t i = 0; i < 128; ++i) list_of(7)[i * n / 128] = 2.0f;  // in the digit in which that ends
    for (const std::int64_t k : {n / 40, n / 32, n / 3, n - 1}) {
      put_few_below_the_sample(list_of(8), n, k);
      const OnDevice<float> scores_device(scores);
      const OnDevice<std::int32_t> k_device(
          Rows(static_cast<std::size_t>(lists), static_cast<std::int32_t>(k)));
      const Chosen found = chosen_by(static_cast<std::size_t>(lists), capacity,
                                     [&](auto* rows, auto* counts, StreamHandle stream) {
                                       top_k(scores_device.get(), lists, n, nullptr, k_device.get(), rows,
                                             capacity, counts, nullptr, stream);
                                     });
      for (std::int64_t list = 0; list < lists; ++list)
        expect_rows(found, list, capacity,
                    best_of(list_of(list), n, k, false, static_cast<std::size_t>(capacity)), "misled");
    }
  }
}

// Many lists get fewer blocks each, and more than one number of them.
LODE_TEST(select_many_short_lists) {
  for (const std::int64_t lists : {20, 40, 100, 300}) {
    for (const std::int64_t n : {700, 16384, 20000, 40000, 140000}) {
      if (lists > 40 && n > 40000)
        continue;  // 140,000 are more than registers hold: they lie in shared memory
      std::vector<float> scores = test::normal(static_cast<std::size_t>(lists * n), 6);
      for (float& x : scores) x = std::round(x * 64.0f);  // ties
      Rows k;
      for (std::int64_t list = 0; list < lists; ++list) k.push_back(static_cast<std::int32_t>(1 + list * 3));
      const OnDevice<float> scores_device(scores);
      const OnDevice<std::int32_t> k_device(k);
      const std::int64_t capacity = 3 * lists;
      const Chosen found = chosen_by(static_cast<std::size_t>(lists), capacity,
                                     [&](auto* rows, auto* counts, StreamHandle stream) {
                                       top_k(scores_device.get(), lists, n, nullptr, k_device.get(), rows,
                                             capacity, counts, nullptr, stream);
                                     });
      for (const std::int64_t list : {std::int64_t{0}, std::int64_t{1}, lists / 2, lists - 1})
        expect_rows(found, list, capacity,
                    best_of(scores.data() + list * n, n, k[static_cast<std::size_t>(list)], false,
                            static_cast<std::size_t>(capacity)),
                    "many lists");
    }
  }
}

LODE_TEST(select_counting) {
  const std::int64_t n = 70001, lists = 3, capacity = 6000;
  std::mt19937 engine(4);
  const Rows k = {4096, 4096, 1};
  for (const unsigned levels : {33u, 255u, 256u, 1024u}) {  // one pass of 8 bits holds up to 255
    std::vector<std::uint16_t> scores(static_cast<std::size_t>(lists * n));
    for (std::size_t i = 0; i < scores.size(); ++i)
      scores[i] = static_cast<std::uint16_t>(engine() % (i < static_cast<std::size_t>(n) ? 33 : levels));
    for (const bool all_ties : {false, true}) {
      const OnDevice<std::uint16_t> scores_device(scores);
      const OnDevice<std::int32_t> k_device(k);
      const Chosen found = chosen_by(3, capacity, [&](auto* rows, auto* counts, StreamHandle stream) {
        counting_select(scores_device.get(), static_cast<int>(levels), all_ties, lists, n, nullptr,
                        k_device.get(), rows, capacity, counts, nullptr, stream);
      });
      for (std::int64_t list = 0; list < lists; ++list)
        expect_rows(found, list, capacity,
                    best_of(scores.data() + list * n, n, k[static_cast<std::size_t>(list)], all_ties, 6000),
                    "counting");
    }
  }
}

// Lists of every kind at once: all alike, two levels far apart, one level after another and back, scores
// above the last level; one entry, lengths that fill nothing evenly, none, all and more wanted.
LODE_TEST(select_counting_of_every_kind) {
  for (const std::int64_t n : {1, 999, 8192, 70000, 131072, 140001}) {
    const std::int64_t lists = 6, capacity = std::min<std::int64_t>(n, 6000);
    const auto size = static_cast<std::int32_t>(n);
    for (const int levels : {2, 64, 65, 256, 257}) {
      std::mt19937 engine(static_cast<unsigned>(n + levels));
      std::vector<std::uint16_t> scores(static_cast<std::size_t>(lists * n)), clamped;
      const auto random = [&](int below) {
        return static_cast<int>(engine() % static_cast<unsigned>(below));
      };
      for (std::int64_t i = 0; i < n; ++i) {
        const auto step = static_cast<int>(i * levels / n);
        const int of_list[] = {random(levels), levels / 2,        random(2) * (levels - 1),
                               step,           levels - 1 - step, random(3 * levels)};
        for (std::int64_t list = 0; list < lists; ++list)
          scores[static_cast<std::size_t>(list * n + i)] = static_cast<std::uint16_t>(of_list[list]);
      }
      for (const std::uint16_t score : scores)
        clamped.push_back(std::min(score, static_cast<std::uint16_t>(levels - 1)));
      const OnDevice<std::uint16_t> scores_device(scores);
      for (const Rows& k : {Rows{size / 32, size / 32, size / 3, 4096, size / 2, 1},
                            Rows{size, size, 0, size - 1, 1, size + 7}, Rows{0, 1, 5000, 0, 4096, 3000}}) {
        for (const Rows& length : {Rows(6, size), Rows{size - 1, size / 2, 0, 1, size - 7, size - 3}}) {
          const OnDevice<std::int32_t> k_device(k), lengths_device(length);
          for (const bool all_ties : {false, true}) {
            const Chosen found = chosen_by(6, capacity, [&](auto* rows, auto* counts, StreamHandle stream) {
              counting_select(scores_device.get(), levels, all_ties, lists, n, lengths_device.get(),
                              k_device.get(), rows, capacity, counts, nullptr, stream);
            });
            for (std::int64_t list = 0; list < lists; ++list) {
              const auto i = static_cast<std::size_t>(list);
              expect_rows(found, list, capacity,
                          best_of(clamped.data() + list * n, std::max<std::int64_t>(0, length[i]), k[i],
                                  all_ties, static_cast<std::size_t>(capacity)),
                          "counting of every kind");
            }
          }
        }
      }
    }
  }
}

LODE_TEST(select_threshold_and_buckets) {
  const std::int64_t n = 30001, lists = 4;
  std::vector<float> scores = test::normal(static_cast<std::size_t>(lists * n), 8);
  scores[5] = NAN;
  const std::vector<float> threshold = {1.5f, -kInf, NAN, scores[static_cast<std::size_t>(3 * n + 17)]};
  const OnDevice<float> scores_device(scores), threshold_device(threshold);
  const Chosen found = chosen_by(4, n, [&](auto* rows, auto* counts, StreamHandle stream) {
    threshold_select(scores_device.get(), threshold_device.get(), lists, n, nullptr, rows, n, counts, nullptr,
                     stream);
  });
  Rows labels(static_cast<std::size_t>(2 * n));
  for (std::size_t i = 0; i < labels.size(); ++i) labels[i] = static_cast<std::int32_t>(i * 7919 % 100);
  const Rows chosen = {3, 99, -1, 0, 50, 50, 1, 2, 3, -1, -1, -1}, begin = {0, 4, 100, 0},
             end = {30001, 20000, 90, 9};
  const OnDevice<std::int32_t> labels_device(labels), chosen_device(chosen), begin_device(begin),
      end_device(end);
  const Chosen members = chosen_by(4, n, [&](auto* rows, auto* counts, StreamHandle stream) {
    buckets_to_rows(chosen_device.get(), 3, labels_device.get(), 2, 100, lists, n, begin_device.get(),
                    end_device.get(), rows, n, counts, nullptr, stream);
  });
  for (std::size_t list = 0; list < 4; ++list) {
    Rows above, in;
    for (std::int64_t i = 0; i < n; ++i) {
      if (scores[list * static_cast<std::size_t>(n) + static_cast<std::size_t>(i)] >= threshold[list])
        above.push_back(static_cast<std::int32_t>(i));
      const int label = labels[list % 2 * static_cast<std::size_t>(n) + static_cast<std::size_t>(i)];
      if (i >= begin[list] && i < end[list] &&
          std::count(chosen.begin() + static_cast<std::ptrdiff_t>(3 * list),
                     chosen.begin() + static_cast<std::ptrdiff_t>(3 * list + 3), label) > 0)
        in.push_back(static_cast<std::int32_t>(i));
    }
    expect_rows(found, static_cast<std::int64_t>(list), n, above, "threshold");
    expect_rows(members, static_cast<std::int64_t>(list), n, in, "buckets");
  }
}

struct ScoreForm {
  DType type;
  int d, group;
};

// Heads that fill the columns of the matrix unit's products and that do not, and more than one product of
// them; stores and rows that it does not read; queries whose halves are not normal numbers, keys that are
// none.
LODE_TEST(select_scores) {
  const std::int64_t n = 1400, sink = 3, window = 50;
  const std::vector<QueryToken> places = {{0, 1299}, {1, 700}, {1, 20}, {0, 611}};
  const std::vector<ScoreForm> forms = {{DType::bf16, 128, 4}, {DType::f32, 80, 5},  {DType::f16, 128, 4},
                                        {DType::f16, 64, 1},   {DType::bf16, 80, 7}, {DType::f16, 256, 3},
                                        {DType::bf16, 256, 8}, {DType::f16, 96, 10}, {DType::bf16, 20, 16},
                                        {DType::f16, 128, 8},  {DType::bf16, 64, 2}};
  for (const ScoreForm& form : forms) {
    const int d = form.d, heads = 2 * form.group, tokens = static_cast<int>(places.size());
    const KvLayout layout = {2, d, form.type, 0};
    std::vector<float> keys[2];
    std::vector<OnDevice<char>> stores;
    for (unsigned sequence = 0; sequence < 2; ++sequence) {
      keys[sequence] = test::normal(static_cast<std::size_t>(layout.layer_bytes(n) / layout.row_bytes() * d),
                                    2 + sequence);
      for (float& x : keys[sequence]) x = test::rounded(x, form.type);
      for (int head = 0; head < 2; ++head) {
        const auto number = [&](std::int64_t key, int c) -> float& {
          const std::int64_t row = layout.key_offset(head, key) / layout.row_bytes();
          return keys[sequence][static_cast<std::size_t>(row * d + c)];
        };
        number(100, 3) = kInf, number(101, d - 1) = -kInf;
        number(102, 0) = kInf, number(102, 1) = kInf;  // of both signs, or of neither
        number(103, 2) = NAN;
      }
      stores.emplace_back(test::encode(keys[sequence], form.type));
    }
    auto q = test::normal(static_cast<std::size_t>(tokens * heads * d), 3);
    for (int c = 0; c < d; ++c) {
      q[static_cast<std::size_t>(c)] *= 1e-7f;
      q[static_cast<std::size_t>(d + c)] *= 1e6f;
    }
    Stream stream;
    const test::QueriesOnDevice in(layout, places, heads, q, {stores[0].get(), stores[1].get()});
    const OnDevice<float> scores(test::poison(static_cast<std::size_t>(tokens * heads * n)));
    const OnDevice<ExponentialSum> sums(test::poisoned_sums(tokens * heads, n));
    score_keys(*in, sink, window, n, scores.get(), sums.get(), stream.get());
    const auto found = scores.read(stream);
    test::expect_sums(sums.read(stream), found, places, heads, {sink, window, n});
    test::expect_scores(found, places, heads, {sink, window, n}, 4e-6, [&](int row, std::int64_t key) {
      const QueryToken& at = places[static_cast<std::size_t>(row / heads)];
      const auto from =
          static_cast<std::size_t>(layout.key_offset(row % heads / form.group, key) / layout.row_bytes() * d);
      test::Sum sum;
      for (std::size_t c = 0; c < static_cast<std::size_t>(d); ++c)
        sum.add(0.125 * q[static_cast<std::size_t>(row * d) + c] *
                keys[static_cast<std::size_t>(at.sequence)][from + c]);
      return sum;
    });
  }
}

// Heads with a NaN, with nothing but NaN, with one key that leaves the others no weight, with ties, with an
// infinity.
LODE_TEST(select_shared_scores) {
  const std::int64_t n = 5000, sink = 3, window = 50;
  const std::vector<QueryToken> places = {{0, 4999}, {0, 2100}, {0, 52}, {0, 30}};
  for (const int group : {1, 4, 5, 16}) {
    const int heads = 2 * group, tokens = static_cast<int>(places.size());
    std::vector<float> scores = test::normal(static_cast<std::size_t>(tokens * heads * n), 8, 3.0f);
    for (int row = 0; row < tokens * heads; ++row) {
      float* const own = scores.data() + row * n;
      for (std::int64_t i = 0; i < n; ++i) {
        if (i < sink) own[i] = -kInf;
        if (i >= sink && (row % 7 == 1 || i == 40)) own[i] = NAN;
        if (i >= sink && row % 7 == 2) own[i] = 0.5f;
      }
      if (row % 7 == 3) own[sink + 1] = 1000.0f;
      if (row % 7 == 4) own[60] = kInf;
    }
    const auto sums = test::sums_of(scores, places, heads, {sink, window, n});
    Stream stream;
    const test::QueriesOnDevice in({2, 64, DType::f32, 0}, places, heads, {});
    const OnDevice<float> scores_device(scores),
        shared(test::poison(static_cast<std::size_t>(tokens * 2 * n)));
    const OnDevice<ExponentialSum> sums_device(sums);
    share_scores(scores_device.get(), sums_device.get(), *in, sink, window, n, shared.get(), stream.get());
    const auto found = shared.read(stream);
    for (int list = 0; list < 2 * tokens; ++list) {
      const std::int64_t end =
          std::max<std::int64_t>(0, places[static_cast<std::size_t>(list / 2)].position + 1 - window);
      std::vector<double> weight(static_cast<std::size_t>(end), 0.0);
      for (int g = 0; g < group; ++g) {
        const float* const own = scores.data() + (std::int64_t{list} * group + g) * n;
        double peak = -kInf, total = 0.0;
        for (std::int64_t i = 0; i < end; ++i)
          if (std::isfinite(own[i])) peak = std::fmax(peak, own[i]);
        for (std::int64_t i = 0; i < end; ++i)
          if (std::isfinite(own[i])) total += std::exp(own[i] - peak);
        for (std::int64_t i = 0; i < end; ++i)
          if (own[i] > -kInf) weight[static_cast<std::size_t>(i)] += std::exp(own[i] - peak) / total;
      }
      for (std::int64_t i = 0; i < n; ++i) {
        const float one = found[static_cast<std::size_t>(list * n + i)];
        if (i >= end)
          LODE_CHECK(one == 1e30f);
        else if (i < sink)
          LODE_CHECK(one == -kInf);
        else if (std::isinf(weight[static_cast<std::size_t>(i)]))
          LODE_CHECK(one == kInf);
        else if (weight[static_cast<std::size_t>(i)] > 1e-30)
          LODE_CHECK_CLOSE(one, std::log(weight[static_cast<std::size_t>(i)]), 2e-5);
        else
          LODE_CHECK(one > -1e30f && one < -60.0f);
      }
    }
  }
}

LODE_TEST(select_assign) {
  for (const int d : {5, 64, 128}) {
    const std::int64_t n = 333, c = 150;
    auto x = test::normal(static_cast<std::size_t>(n * d), 6),
         centroids = test::normal(static_cast<std::size_t>(c * d), 7);
    std::copy_n(centroids.begin(), d, centroids.begin() + 9 * d);  // a tie: the lower index wins
    std::copy_n(centroids.begin(), d, x.begin() + 4 * d);
    x[static_cast<std::size_t>(2 * d)] = NAN;
    Stream stream;
    const OnDevice<float> x_device(x), centroids_device(centroids),
        best(test::poison(static_cast<std::size_t>(n)));
    const OnDevice<std::int32_t> label(Rows(static_cast<std::size_t>(n), -7));
    assign(x_device.get(), n, centroids_device.get(), c, d, label.get(), best.get(), stream.get());
    const Rows labels = label.read(stream);
    const auto found = best.read(stream);
    for (std::int64_t i = 0; i < n; ++i) {
      const int at = labels[static_cast<std::size_t>(i)];
      if (i == 2) {
        LODE_CHECK(at == 0);
        continue;
      }
      double high = -INFINITY, mine = -INFINITY;
      for (std::int64_t j = 0; j < c; ++j) {
        double s = 0;
        for (int k = 0; k < d; ++k)
          s += static_cast<double>(x[static_cast<std::size_t>(i * d + k)]) *
               centroids[static_cast<std::size_t>(j * d + k)];
        high = std::max(high, s);
        if (j == at) mine = s;
      }
      LODE_CHECK_CLOSE(mine, high, 1e-4);
      LODE_CHECK_CLOSE(found[static_cast<std::size_t>(i)], high, 1e-4);
      LODE_CHECK(at != 9 || d < 5);
    }
  }
}

}  // namespace
}  // namespace lode::cuda
