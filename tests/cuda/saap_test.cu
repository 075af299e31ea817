// SPDX-License-Identifier: Apache-2.0
// SAAP's training, kernel by kernel, against float64: products of operands that lie either way, batch norm
// and divergence with their gradients, Adam, attention summed by bucket, and centroids. Sizes are ragged,
// buckets empty or all there is.
#include <numeric>

#include "harness.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/saap/targets.h"
#include "kernels/cuda/saap/train.h"
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

LODE_TEST(saap_products) {
  Stream stream;
  Products own(true), fast(false);
  const std::int64_t shapes[][3] = {{1, 1, 1}, {3, 65, 17}, {130, 70, 200}, {64, 64, 64}, {1000, 96, 384}};
  for (const auto& [m, n, k] : shapes) {
    const Floats a = test::normal(size(m * k), 1), b = test::normal(size(k * n), 2),
                 c = test::normal(size(m * n), 3);
    for (int way = 0; way < 8; ++way) {
      const bool ta = way & 1, tb = way & 2, add = way & 4;
      Doubles expected(c.size());
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < n; ++j) {
          double sum = add ? c[size(i * n + j)] : 0.0;
          for (std::int64_t l = 0; l < k; ++l)
            sum += static_cast<double>(a[size(ta ? l * m + i : i * k + l)]) *
                   b[size(tb ? j * k + l : l * n + j)];
          expected[size(i * n + j)] = sum;
        }
      }
      const OnDevice<float> da(a), db(b);
      for (Products* products : {&own, &fast}) {
        const OnDevice<float> dc(add ? c : test::poison(c.size()));
        products->multiply({da.get(), db.get(), dc.get(), m, n, k, ta, tb, add}, stream.get());
        LODE_CHECK_CLOSE(test::relative_error(dc.read(stream), expected), 0.0,
                         products == &own ? 1e-5 : 2e-3);
      }
    }
  }
}

/// A table of one step whose batch is these rows.
struct OneStep {
  OnDevice<NetStep> table;
  OnDevice<std::int32_t> rows, at;
  OneStep(const Rows& batch, const NetStep& step) : table({step}), rows(batch), at(Rows{0}) {}
  NetSteps get() const { return {table.get(), rows.get(), at.get()}; }
};

LODE_TEST(saap_norm_and_its_gradient) {
  Stream stream;
  for (const auto& [n, h] : {std::pair<std::int64_t, std::int64_t>{2, 1}, {37, 19}, {1000, 64}, {129, 200}}) {
    const Floats x = test::normal(size(n * h), 1, 3.0f), gain = test::normal(size(h), 2),
                 shift = test::normal(size(h), 3), bias = test::normal(size(h), 4),
                 dy = test::normal(size(n * h), 5);
    const OnDevice<float> dx(x), dgain(gain), dshift(shift), dbias(bias), mean(Floats(size(h), 0.5f)),
        variance(Floats(size(h), 2.0f)), normalised(test::poison(x.size())), inverse(test::poison(size(h))),
        out(test::poison(x.size())), slope(dy), gain_gradient(test::poison(size(h))),
        shift_gradient(test::poison(size(h)));
    const BatchNormArrays norm = {dgain.get(), dshift.get(), dbias.get(), mean.get(), variance.get()};
    norm_relu(norm, dx.get(), n, h, normalised.get(), inverse.get(), out.get(), stream.get());
    norm_relu_backward(norm, normalised.get(), inverse.get(), out.get(), n, h, slope.get(),
                       gain_gradient.get(), shift_gradient.get(), stream.get());
    Doubles y(x.size()), expected(x.size()), of_gain(size(h)), of_shift(size(h)), running(size(h)),
        spread(size(h));
    const auto count = static_cast<double>(n);
    for (std::int64_t j = 0; j < h; ++j) {
      double middle = 0, square = 0, sum = 0, along = 0;
      for (std::int64_t i = 0; i < n; ++i) middle += (x[size(i * h + j)] + bias[size(j)]) / count;
      for (std::int64_t i = 0; i < n; ++i) square += std::pow(x[size(i * h + j)] + bias[size(j)] - middle, 2);
      const double deviation = std::sqrt(square / count + norm.epsilon);
      const auto z = [&](std::int64_t i) {
        return (x[size(i * h + j)] + bias[size(j)] - middle) / deviation;
      };
      const auto g = [&](std::int64_t i) { return y[size(i * h + j)] > 0 ? dy[size(i * h + j)] : 0.0; };
      for (std::int64_t i = 0; i < n; ++i) {
        y[size(i * h + j)] = std::max(0.0, z(i) * gain[size(j)] + shift[size(j)]);
        sum += g(i), along += g(i) * z(i);
      }
      for (std::int64_t i = 0; i < n; ++i)
        expected[size(i * h + j)] = gain[size(j)] / deviation * (g(i) - sum / count - z(i) * along / count);
      of_gain[size(j)] = along, of_shift[size(j)] = sum;
      running[size(j)] = 0.9 * 0.5 + 0.1 * middle, spread[size(j)] = 0.9 * 2.0 + 0.1 * square / (count - 1);
    }
    LODE_CHECK_CLOSE(test::relative_error(out.read(stream), y), 0.0, 1e-5);
    if (n > 2) LODE_CHECK_CLOSE(test::relative_error(slope.read(stream), expected), 0.0, 1e-4);
    LODE_CHECK_CLOSE(test::relative_error(gain_gradient.read(stream), of_gain), 0.0, 1e-4);
    LODE_CHECK_CLOSE(test::relative_error(shift_gradient.read(stream), of_shift), 0.0, 1e-5);
    LODE_CHECK_CLOSE(test::relative_error(mean.read(stream), running), 0.0, 1e-5);
    LODE_CHECK_CLOSE(test::relative_error(variance.read(stream), spread), 0.0, 1e-5);
    // Without a norm: bias and ReLU.
    const OnDevice<float> plain(test::poison(x.size())), plain_slope(dy), sums(test::poison(size(h)));
    norm_relu({.shift = dshift.get()}, dx.get(), n, h, nullptr, nullptr, plain.get(), stream.get());
    norm_relu_backward({.shift = dshift.get()}, nullptr, nullptr, plain.get(), n, h, plain_slope.get(),
                       nullptr, sums.get(), stream.get());
    Doubles active(x.size()), passed(x.size()), total(size(h), 0.0);
    for (std::size_t i = 0; i < x.size(); ++i) {
      active[i] = std::max(0.0f, x[i] + shift[i % size(h)]);
      passed[i] = active[i] > 0 ? dy[i] : 0.0;
      total[i % size(h)] += passed[i];
    }
    LODE_CHECK_CLOSE(test::relative_error(plain.read(stream), active), 0.0, 1e-6);
    LODE_CHECK_CLOSE(test::relative_error(plain_slope.read(stream), passed), 0.0, 1e-6);
    LODE_CHECK_CLOSE(test::relative_error(sums.read(stream), total), 0.0, 1e-5);
  }
}

LODE_TEST(saap_divergence_and_its_gradient) {
  Stream stream;
  const std::int64_t n = 5, examples = 9;
  const Rows batch = {7, 0, 8, 3, 3};
  for (const std::int64_t c : {2, 33, 1024, 3000}) {
    Floats logits = test::normal(size(n * c), 1, 4.0f);
    const Floats bias = test::normal(size(c), 2), other = test::normal(size(c), 3);
    Floats targets(size(examples * c));
    for (std::int64_t e = 0; e < examples; ++e) {
      Floats raw = test::normal(size(c), static_cast<unsigned>(10 + e), 3.0f);
      double sum = 0;
      for (float& t : raw) sum += t = e == 8 ? 0.0f : t < 0 ? 0.0f : std::exp(t);  // one without any mass
      for (std::int64_t i = 0; i < c; ++i)
        targets[size(e * c + i)] =
            test::rounded(sum > 0 ? static_cast<float>(raw[size(i)] / sum) : 0.0f, DType::f16);
    }
    logits[0] = 80.0f;
    const OneStep step(batch, {});
    const OnDevice<char> on_device(test::encode(targets, DType::f16));
    const OnDevice<float> y(logits), b(bias), b3(other), sums(test::poison(size(c))),
        copy(test::poison(size(c)));
    const OnDevice<double> row_loss(Doubles(size(n), -1.0)), losses(Doubles(1, -1.0));
    divergence(step.get(), on_device.get(), b.get(), b3.get(), n, c, y.get(), row_loss.get(), stream.get());
    sum_columns(y.get(), n, c, sums.get(), copy.get(), stream.get());
    end_step(step.get(), row_loss.get(), n, losses.get(), stream.get());
    Doubles expected(logits.size()), columns(size(c), 0.0);
    double loss = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const float* t = targets.data() + batch[size(i)] * c;
      Doubles z(size(c));
      for (std::int64_t j = 0; j < c; ++j)
        z[size(j)] = static_cast<double>(logits[size(i * c + j)]) + bias[size(j)] + other[size(j)];
      const double most = *std::max_element(z.begin(), z.end());
      double sum = 0, mass = 0;
      for (std::int64_t j = 0; j < c; ++j) sum += std::exp(z[size(j)] - most), mass += t[j];
      for (std::int64_t j = 0; j < c; ++j) {
        if (t[j] > 0)
          loss += t[j] * (std::log(static_cast<double>(t[j])) - z[size(j)] + most + std::log(sum)) / n;
        expected[size(i * c + j)] = (mass * std::exp(z[size(j)] - most) / sum - t[j]) / n;
        columns[size(j)] += expected[size(i * c + j)];
      }
    }
    LODE_CHECK_CLOSE(test::relative_error(y.read(stream), expected), 0.0, 1e-5);
    LODE_CHECK_CLOSE(test::relative_error(sums.read(stream), columns), 0.0, 1e-5);
    LODE_CHECK_CLOSE(test::relative_error(copy.read(stream), columns), 0.0, 1e-5);
    LODE_CHECK_CLOSE(losses.read(stream)[0], loss, 1e-5 * std::abs(loss));
    LODE_CHECK(step.at.read(stream)[0] == 1);
  }
}

LODE_TEST(saap_adam_and_batches) {
  Stream stream;
  const std::int64_t count = 1028;
  const Floats value = test::normal(size(count), 1), first = test::normal(size(count), 2),
               gradient = test::normal(size(count), 3);
  Floats second = test::normal(size(count), 4);
  for (float& x : second) x *= x;
  const OneStep step({3, 1}, {.first_row = 0, .rate = 0.01f, .keep = 0.99f, .epsilon = 1e-3f});
  const OnDevice<float> v(value), m(first), s(second), g(gradient);
  adam(step.get(), {v.get(), m.get(), s.get(), g.get()}, count, stream.get());
  Doubles values, firsts, seconds;
  for (std::size_t i = 0; i < value.size(); ++i) {
    firsts.push_back(0.9 * first[i] + 0.1 * gradient[i]);
    seconds.push_back(0.999 * second[i] + 0.001 * gradient[i] * gradient[i]);
    values.push_back(0.99 * value[i] - 0.01 * firsts[i] / (std::sqrt(seconds[i]) + 1e-3));
  }
  LODE_CHECK_CLOSE(test::relative_error(v.read(stream), values), 0.0, 1e-5);
  LODE_CHECK_CLOSE(test::relative_error(m.read(stream), firsts), 0.0, 1e-6);
  LODE_CHECK_CLOSE(test::relative_error(s.read(stream), seconds), 0.0, 1e-5);
  const OnDevice<float> x(test::poison(14));
  take_batch(step.get(), v.get(), 2, 7, x.get(), stream.get());
  const Floats taken = x.read(stream), all = v.read(stream);
  for (std::size_t i = 0; i < 7; ++i) LODE_CHECK(taken[i] == all[21 + i] && taken[7 + i] == all[7 + i]);
}

LODE_TEST(saap_attention_by_bucket) {
  Stream stream;
  for (const auto& [n, buckets] :
       {std::pair<std::int64_t, std::int64_t>{1, 1}, {300, 7}, {5000, 300}, {4096, 1024}}) {
    const std::int64_t stride = (n + 63) / 64 * 64, count = 6;
    std::mt19937 engine(static_cast<unsigned>(n));
    Rows labels(size(n)), offsets(size(buckets + 1), 0), positions(size(stride), -1);
    for (std::int32_t& l : labels)  // a third of the keys in bucket 0, and some buckets empty
      l = engine() % 3 == 0 ? 0
                            : static_cast<std::int32_t>(engine() % static_cast<unsigned>(buckets)) / 2 * 2;
    for (const std::int32_t l : labels) ++offsets[size(l + 1)];
    std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
    Rows next(offsets.begin(), offsets.end() - 1);
    for (std::int64_t i = 0; i < n; ++i)
      positions[size(next[size(labels[size(i)])]++)] = static_cast<std::int32_t>(i);
    Floats scores = test::normal(size(count * stride), 7, 6.0f);
    const auto last = static_cast<std::int32_t>(n);
    std::vector<TargetQuery> queries(size(count), {0, last, last, last, 0, last, 0, -1});
    queries[1] = {last / 4, last / 2, last * 3 / 4, last, 0, last, last / 2, last / 3};
    queries[2] = {0, 0, last, last, 0, last, 0, -1};            // no far key
    queries[3] = {last - 1, last, last, last, 0, last, 0, -1};  // one
    queries[4].distance = 10, queries[4].position = 5;          // two best keys tie: the first one counts
    queries[5] = {0, last, last, last, 0, 0, 0, 3};             // nothing to look at
    if (n > 100) {
      const auto place = [&](std::int32_t p) {
        return std::find(positions.begin(), positions.end(), p) - positions.begin();
      };
      scores[size(4 * stride + place(8))] = scores[size(4 * stride + place(90))] = 100.0f;
    }
    for (std::int64_t q = 0; q < count; ++q)
      for (std::int64_t i = n; i < stride; ++i) scores[size(q * stride + i)] = NAN;  // behind the keys
    const OnDevice<float> s(scores), most(test::poison(size(count))),
        sums(test::poison(size(count * buckets)));
    const OnDevice<TargetQuery> dq(queries);
    const OnDevice<std::int32_t> p(positions), o(offsets), passes(Rows(size(count), -7)),
        chosen(Rows{0, 1, 3, 4});
    const OnDevice<std::uint16_t> targets(std::vector<std::uint16_t>(size(4 * buckets), 0x7e00));
    const TargetKeys keys = {p.get(), o.get(), stride, buckets};
    look_at_scores(s.get(), dq.get(), count, keys, most.get(), passes.get(), stream.get());
    const Rows passed = passes.read(stream);
    LODE_CHECK(passed[0] == 1 && passed[2] == 0 && passed[3] == 1 && passed[5] == 0);
    if (n > 100) LODE_CHECK(passed[4] == 0);  // key 8 is 3 away
    sum_by_bucket(s.get(), dq.get(), most.get(), chosen.get(), 4, keys, sums.get(), targets.get(),
                  stream.get());
    const std::vector<std::uint16_t> found = targets.read(stream);
    const std::int64_t which[] = {0, 1, 3, 4};
    for (std::int64_t r = 0; r < 4; ++r) {
      const TargetQuery& q = queries[size(which[r])];
      Doubles expected(size(buckets), 0.0);
      double total = 0, high = -1e30;
      const auto far = [&](std::int32_t at) {
        return (at >= q.begin && at < q.first_end) || (at >= q.second_begin && at < q.end);
      };
      for (std::int64_t i = 0; i < n; ++i)
        if (far(positions[size(i)]))
          high = std::max(high, static_cast<double>(scores[size(which[r] * stride + i)]));
      for (std::int64_t i = 0; i < n; ++i) {
        if (!far(positions[size(i)])) continue;
        const double w = std::exp(scores[size(which[r] * stride + i)] - high);
        expected[size(labels[size(positions[size(i)])])] += w, total += w;
      }
      if (total == 0) continue;
      for (std::int64_t b = 0; b < buckets; ++b)
        LODE_CHECK_CLOSE(to_float(f16{found[size(r * buckets + b)]}), expected[size(b)] / total,
                         6e-4 * expected[size(b)] / total + 1e-7);
    }
  }
}

LODE_TEST(saap_centroids) {
  Stream stream;
  const std::int64_t n = 50, d = 70, clusters = 4;
  Floats x = test::normal(size(n * d), 1);
  for (std::int64_t j = 0; j < d; ++j) x[size(48 * d + j)] = x[size(49 * d + j)] = 3e38f;
  Rows order(size(n));
  std::iota(order.begin(), order.end(), 0);
  std::swap(order[3], order[30]);
  const Rows offsets = {0, 47, 47, 48, 50};  // many, none, one, a sum beyond float32
  const Floats before = test::normal(size(clusters * d), 2);
  const OnDevice<float> dx(x), centroids(before);
  const OnDevice<std::int32_t> o(order), f(offsets);
  update_centroids(dx.get(), o.get(), f.get(), clusters, d, centroids.get(), stream.get());
  const Floats found = centroids.read(stream);
  for (std::int64_t c = 0; c < clusters; ++c) {
    Floats sum(size(d), 0.0f);
    for (std::int32_t i = offsets[size(c)]; i < offsets[size(c + 1)]; ++i)
      for (std::int64_t j = 0; j < d; ++j) sum[size(j)] += x[size(order[size(i)] * d + j)];
    double square = 0;
    for (const float s : sum) square += static_cast<double>(s) * s;
    for (std::int64_t j = 0; j < d; ++j) {
      const bool kept = c == 1 || c == 3;
      const float expected =
          kept ? before[size(c * d + j)] : static_cast<float>(sum[size(j)] * (1.0 / std::sqrt(square)));
      LODE_CHECK(found[size(c * d + j)] == expected);
    }
  }
}

}  // namespace
}  // namespace lode::cuda
