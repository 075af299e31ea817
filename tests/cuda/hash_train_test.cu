// SPDX-License-Identifier: Apache-2.0
// The training of HashAttention's functions, kernel by kernel, against float64: products of many pairs with
// counted dimensions and parts, pivotal keys with ties and numbers that are none, slopes, losses and Adam.
#include <algorithm>
#include <numeric>

#include "harness.h"
#include "kernels/cuda/hash/train.h"
#include "kernels/cuda/linear/many_products.h"
#include "reference.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Rows = std::vector<std::int32_t>;

std::size_t size(std::int64_t n) {
  return static_cast<std::size_t>(n);
}

/// The largest difference, relative to the largest number.
double off(const Floats& found, const Doubles& expected) {
  double most = 1e-30, worst = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    if (std::isnan(expected[i])) continue;
    most = std::max(most, std::abs(expected[i]));
    worst = std::isnan(found[i]) ? INFINITY : std::max(worst, std::abs(found[i] - expected[i]));
  }
  return worst / most;
}

LODE_TEST(hash_many_products) {
  Stream stream;
  const std::int64_t outer = 3, inner = 2;
  const std::int64_t shapes[][3] = {{1, 1, 1},      {24, 33, 65},   {96, 700, 64}, {130, 129, 40},
                                    {200, 32, 128}, {96, 32, 1300}, {65, 65, 1030}};
  for (const auto& [m, n, k] : shapes) {
    const Rows counts = {static_cast<std::int32_t>(std::max(m, std::max(n, k))), 1, 0};
    const Floats a = test::normal(size(outer * inner * m * k), 1),
                 b = test::normal(size(outer * inner * k * n), 2);
    const OnDevice<float> da(a), db(b);
    for (int way = 0; way < 32; ++way) {
      const bool ta = way & 1, tb = way & 2, in_parts = way & 4;
      const auto which = static_cast<CountedDimension>(std::min(way / 8, 2));
      Rows own = counts;
      const std::int64_t lengths[] = {m, n, k};
      for (std::int32_t& count : own)
        count = std::min(count, static_cast<std::int32_t>(lengths[static_cast<int>(which)]));
      const bool has_counts = way / 8 < 3;
      const OnDevice<std::int32_t> dc(own);
      const std::int64_t parts = in_parts ? parts_of(k) : 1, part = outer * inner * m * n;
      const OnDevice<float> c(test::poison(size(parts * part)));
      ManyProducts p = {.a = {da.get(), ta ? m : k, inner * m * k, m * k},
                        .b = {db.get(), tb ? k : n, inner * k * n, k * n},
                        .c = {c.get(), n, inner * m * n, m * n},
                        .outer = outer,
                        .inner = inner,
                        .m = m,
                        .n = n,
                        .k = k,
                        .a_transposed = ta,
                        .b_transposed = tb,
                        .counts = has_counts ? dc.get() : nullptr,
                        .counted = which,
                        .part = in_parts ? part : 0};
      multiply_many(p, stream.get());
      const Floats found = c.read(stream);
      Doubles expected(found.size(), NAN);
      bool left_alone = true;
      for (std::int64_t z = 0; z < outer * inner; ++z) {
        const auto length = [&](CountedDimension d, std::int64_t all) {
          return has_counts && which == d ? std::int64_t{own[size(z / inner)]} : all;
        };
        const std::int64_t mm = length(CountedDimension::m, m), nn = length(CountedDimension::n, n),
                           kk = length(CountedDimension::k, k);
        for (std::int64_t s = 0; s < parts; ++s) {
          const std::int64_t begin = s * kPartLength, end = in_parts ? std::min(kk, begin + kPartLength) : kk;
          for (std::int64_t i = 0; i < m; ++i) {
            for (std::int64_t j = 0; j < n; ++j) {
              const std::size_t at = size(s * part + z * m * n + i * n + j);
              if (i >= mm || j >= nn) {
                left_alone = left_alone && found[at] == test::poison(1)[0];
                continue;
              }
              double sum = 0;
              for (std::int64_t l = begin; l < end; ++l)
                sum += static_cast<double>(a[size(z * m * k + (ta ? l * m + i : i * k + l))]) *
                       b[size(z * k * n + (tb ? j * k + l : l * n + j))];
              expected[at] = sum;
            }
          }
        }
      }
      LODE_CHECK(left_alone);
      LODE_CHECK_CLOSE(off(found, expected), 0.0, 1e-5);
    }
  }
}

/// What the host's top_k takes: the largest, ties from the end; NaN and -inf are least.
Rows largest(const Floats& scores, std::int64_t top) {
  Rows order(scores.size());
  std::iota(order.begin(), order.end(), 0);
  const auto rank = [&](std::int32_t i) { return std::isnan(scores[size(i)]) ? -INFINITY : scores[size(i)]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](auto x, auto y) { return rank(x) > rank(y) || (rank(x) == rank(y) && x > y); });
  order.resize(std::min(order.size(), size(top)));
  std::sort(order.begin(), order.end());
  return order;
}

LODE_TEST(hash_pivotal_keys) {
  Stream stream;
  const std::int64_t heads = 2, group = 2, tokens = 5, keys = 1100, top = 40, rows = group * tokens;
  const Rows far_ends = {1, 40, 41, 777, 1100};
  const OnDevice<std::int32_t> ends(far_ends);
  for (int kind = 0; kind < 5; ++kind) {
    Floats scores = test::normal(size(heads * rows * keys), 5), norms = test::normal(size(heads * keys), 6);
    for (std::size_t i = 0; i < scores.size(); ++i) {
      if (kind == 1) scores[i] = i % 3 == 0 ? 0.0f : -0.0f;
      if (kind == 2)
        scores[i] = i % 11 == 0 ? NAN : i % 5 == 0 ? -INFINITY : i % 7 == 0 ? INFINITY : scores[i];
      if (kind == 3) scores[i] = std::round(scores[i]);
      if (kind == 4) scores[i] = i % 97 == 0 ? 3.4e38f : NAN;
    }
    const bool by_value = kind == 0 || kind == 3;
    if (kind == 3) std::fill(norms.begin(), norms.end(), 1.0f);
    const HashMarks size_only = {nullptr, nullptr, heads, keys};
    const std::vector<std::uint32_t> none(size(heads * size_only.width()), 0u);
    const OnDevice<std::uint32_t> words(none);
    const OnDevice<std::int32_t> before(Rows(none.size(), -1)), others(Rows{5, 6, 900, 0, 7, 0, 0, 0}),
        other_counts(Rows{3, 1});
    const OnDevice<float> s(scores), v(norms);
    const std::int64_t most = std::min<std::int64_t>(keys, 4 + rows * top);
    const OnDevice<std::int32_t> pivotal(Rows(size(heads * rows * top), -1)),
        listed(Rows(size(heads * most), -1)), counts(Rows(size(heads), -1)),
        far_counts(Rows(size(heads * tokens), -1));
    const OnDevice<std::uint8_t> labels(std::vector<std::uint8_t>(size(heads * rows * most), 9));
    const HashMarks marks = {words.get(), before.get(), heads, keys};
    const HashQueries queries = {group, tokens, ends.get()};
    mark_keys(marks, others.get(), other_counts.get(), 4, stream.get());
    find_pivotal(marks, queries, s.get(), by_value ? v.get() : nullptr, top, pivotal.get(), stream.get());
    list_marked(marks, queries, most, listed.get(), counts.get(), far_counts.get(), stream.get());
    label_pivotal(marks, queries, pivotal.get(), top, most, labels.get(), stream.get());
    const Rows found = pivotal.read(stream), list = listed.read(stream), count = counts.read(stream),
               far_count = far_counts.read(stream);
    const std::vector<std::uint8_t> label = labels.read(stream);
    for (std::int64_t head = 0; head < heads; ++head) {
      std::vector<Rows> expected;
      Rows seen = head == 0 ? Rows{5, 6, 900} : Rows{7};
      for (std::int64_t row = 0; row < rows; ++row) {
        Floats own(size(far_ends[size(row % tokens)]));
        for (std::size_t i = 0; i < own.size(); ++i)
          own[i] =
              scores[size((head * rows + row) * keys) + i] + (by_value ? norms[size(head * keys) + i] : 0.0f);
        expected.push_back(largest(own, top));
        const auto at = found.begin() + (head * rows + row) * top;
        LODE_CHECK(std::equal(expected.back().begin(), expected.back().end(), at));
        seen.insert(seen.end(), expected.back().begin(), expected.back().end());
      }
      std::sort(seen.begin(), seen.end());
      seen.erase(std::unique(seen.begin(), seen.end()), seen.end());
      LODE_CHECK(count[size(head)] == static_cast<std::int32_t>(seen.size()));
      LODE_CHECK(std::equal(seen.begin(), seen.end(), list.begin() + head * most));
      for (std::int64_t t = 0; t < tokens; ++t)
        LODE_CHECK(far_count[size(head * tokens + t)] ==
                   std::lower_bound(seen.begin(), seen.end(), far_ends[size(t)]) - seen.begin());
      for (std::int64_t row = 0; row < rows; ++row) {
        const Rows& own = expected[size(row)];
        for (std::size_t i = 0; i < seen.size(); ++i)
          LODE_CHECK(label[size((head * rows + row) * most) + i] ==
                     (std::binary_search(own.begin(), own.end(), seen[i]) ? 1 : 0));
      }
    }
  }
}

LODE_TEST(hash_gather) {
  Stream stream;
  const std::int64_t heads = 2, keys = 9, d = 6, width = 7, most = 4;
  const Floats inputs = test::normal(size(heads * keys * width), 1), turns = test::normal(size(heads * d), 2);
  const Rows listed = {1, 3, 8, -1, 0, -1, -1, -1}, counts = {3, 1};
  const OnDevice<float> i(inputs), t(turns), x(test::poison(size(heads * most * width)));
  const OnDevice<std::int32_t> l(listed), c(counts);
  gather_turned({i.get(), t.get(), l.get(), c.get(), heads, keys, width, d, most}, x.get(), stream.get());
  const Floats found = x.read(stream);
  for (std::int64_t head = 0; head < heads; ++head) {
    for (std::int64_t row = 0; row < most; ++row) {
      for (std::int64_t col = 0; col < width; ++col) {
        const float own = found[size((head * most + row) * width + col)];
        if (row >= counts[size(head)]) {
          LODE_CHECK(own == test::poison(1)[0]);
          continue;
        }
        const float* from = inputs.data() + (head * keys + listed[size(head * most + row)]) * width;
        const float* turn = turns.data() + head * d;
        const double expected =
            col < 3   ? double{from[col]} * turn[col] - double{from[col + 3]} * turn[3 + col]
            : col < 6 ? double{from[col]} * turn[col - 3] + double{from[col - 3]} * turn[col]
                      : double{from[col]};
        LODE_CHECK_CLOSE(own, expected, 1e-5);
      }
    }
  }
}

double value_of(HashActivation f, double x) {
  return f == HashActivation::relu   ? std::max(x, 0.0)
         : f == HashActivation::silu ? x / (1 + std::exp(-x))
                                     : std::tanh(x);
}

LODE_TEST(hash_activations_and_slopes) {
  Stream stream;
  const std::int64_t heads = 2, functions = 2, rows = 1030, width = 37;
  const Rows counts = {1030, 3};
  const OnDevice<std::int32_t> c(counts);
  for (const auto f : {HashActivation::relu, HashActivation::silu, HashActivation::tanh}) {
    for (const std::int64_t parts : {1, 3}) {
      const std::int64_t all = heads * functions * rows * width, of_bias = functions * width,
                         bias_part = heads * of_bias;
      const Floats x = test::normal(size(all), 1), bias = test::normal(size(bias_part), 2),
                   dy = test::normal(size(parts * all), 3);
      const OnDevice<float> dx(x), db(bias), out(test::poison(size(all))), ddy(dy),
          gradient(test::poison(size(all))), sums(test::poison(size(parts_of(rows) * bias_part)));
      const HashRows shape = {heads, functions, rows, width, c.get()};
      float* const y = f == HashActivation::tanh ? dx.get() : out.get();
      activate(f, shape, {db.get(), 0, of_bias, width}, dx.get(), y, stream.get());
      const Floats found = f == HashActivation::tanh ? dx.read(stream) : out.read(stream);
      slopes(f, shape,
             {.saved = dx.get(),
              .dy = ddy.get(),
              .parts = parts,
              .part = all,
              .dx = gradient.get(),
              .bias = {sums.get(), 0, of_bias, width},
              .bias_part = bias_part},
             stream.get());
      const Floats found_gradient = gradient.read(stream), found_sums = sums.read(stream);
      Doubles expected(size(all), NAN), slope(size(all), NAN), column(found_sums.size(), 0.0);
      for (std::int64_t z = 0; z < heads * functions; ++z) {
        for (std::int64_t row = 0; row < counts[size(z / functions)]; ++row) {
          for (std::int64_t col = 0; col < width; ++col) {
            const std::size_t at = size((z * rows + row) * width + col);
            const double in = static_cast<double>(x[at]) + bias[size(z * width + col)];
            expected[at] = value_of(f, in);
            double sum = 0;
            for (std::int64_t p = 0; p < parts; ++p) sum += dy[at + size(p * all)];
            slope[at] =
                sum * (f == HashActivation::relu ? (in > 0 ? 1.0 : 0.0)
                                                 : (value_of(f, in + 1e-4) - value_of(f, in - 1e-4)) / 2e-4);
            column[size(row / kPartLength * bias_part + z * width + col)] += slope[at];
          }
        }
      }
      LODE_CHECK_CLOSE(off(found, expected), 0.0, 1e-5);
      LODE_CHECK_CLOSE(off(found_gradient, slope), 0.0, 1e-4);
      LODE_CHECK_CLOSE(off(found_sums, column), 0.0, 1e-4);
    }
  }
}

LODE_TEST(hash_losses) {
  Stream stream;
  const std::int64_t heads = 2, group = 2, tokens = 3, most = 600, rows = group * tokens;
  const Rows counts = {600, 5}, far_counts = {600, 17, 0, 5, 1, 0};
  for (const bool softmax : {false, true}) {
    for (const float scale : {1.0f, 1e4f}) {
      const Floats z = test::normal(size(heads * rows * most), 1, scale);
      std::vector<std::uint8_t> labels(z.size());
      for (std::size_t i = 0; i < labels.size(); ++i) labels[i] = i % 7 == 0 ? 1 : 0;
      const OnDevice<float> dz(z);
      const OnDevice<std::uint8_t> l(labels);
      const OnDevice<std::int32_t> c(counts), far(far_counts);
      const OnDevice<double> row_losses(Doubles(size(heads * rows), NAN)), losses(Doubles(size(heads), NAN));
      const HashLoss loss = {softmax, 20.0f, l.get(), far.get(), heads, group, tokens, most};
      pivotal_loss(loss, c.get(), dz.get(), row_losses.get(), stream.get());
      sum_losses(loss, row_losses.get(), losses.get(), stream.get());
      const Floats found = dz.read(stream);
      const Doubles found_losses = losses.read(stream);
      Doubles gradient(z.size(), NAN);
      for (std::int64_t head = 0; head < heads; ++head) {
        double all = 0, pairs = 0;
        for (std::int64_t t = 0; t < tokens; ++t) pairs += far_counts[size(head * tokens + t)];
        for (std::int64_t row = 0; row < rows; ++row) {
          const std::int64_t n = far_counts[size(head * tokens + row % tokens)],
                             at = (head * rows + row) * most;
          double peak = -1e300, sum = 0, pivotal = 0;
          for (std::int64_t i = 0; i < n; ++i)
            peak = std::max<double>(peak, z[size(at + i)]), pivotal += labels[size(at + i)];
          for (std::int64_t i = 0; i < n; ++i) sum += std::exp(z[size(at + i)] - peak);
          for (std::int64_t i = 0; i < counts[size(head)]; ++i) {
            const double x = z[size(at + i)], y = labels[size(at + i)];
            double& g = gradient[size(at + i)] = 0;
            if (i >= n) continue;
            if (softmax) {
              const double target = pivotal > 0 ? y / pivotal : 0, log_share = x - peak - std::log(sum);
              if (pivotal == 0) continue;
              all -= target * log_share / tokens;
              g = (std::exp(log_share) - target) / (tokens * group);
            } else {
              const double weight = y > 0 ? 20 : 1, e = std::exp(-std::abs(x));
              all += weight * (std::max(x, 0.0) + std::log1p(e) - y * x) / pairs;
              g = weight * ((x >= 0 ? 1 : e) / (1 + e) - y) / (pairs * group);
            }
          }
        }
        LODE_CHECK_CLOSE(found_losses[size(head)], all / group, 1e-5 * std::abs(all));
      }
      LODE_CHECK_CLOSE(off(found, gradient), 0.0, 1e-5);
    }
  }
}

LODE_TEST(hash_adam) {
  Stream stream;
  const std::int64_t n = 1001, parts = 3;
  const Floats value = test::normal(size(n), 1), first = test::normal(size(n), 2),
               gradient = test::normal(size(parts * n), 4);
  Floats second = test::normal(size(n), 3);
  for (float& x : second) x *= x;
  const OnDevice<float> v(value), f(first), s(second), g(gradient);
  adam_of_parts({v.get(), f.get(), s.get(), g.get(), parts, n, 0.9f, 0.999f, 0.01f, 0.9f, 1e-6f}, n,
                stream.get());
  Doubles expected(size(n));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double sum = static_cast<double>(gradient[i]) + gradient[i + size(n)] + gradient[i + size(2 * n)];
    const double m = 0.9 * first[i] + 0.1 * sum, w = 0.999 * second[i] + 0.001 * sum * sum;
    expected[i] = 0.9 * value[i] - 0.01 * m / (std::sqrt(w) + 1e-6);
  }
  LODE_CHECK_CLOSE(off(v.read(stream), expected), 0.0, 1e-4);
}

}  // namespace
}  // namespace lode::cuda
