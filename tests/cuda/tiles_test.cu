// SPDX-License-Identifier: Apache-2.0
// Block-quantised weights: every value that a file's blocks stand for comes back from tiles, exactly; products
// of 1 to 40 rows against float64 over these values, at widths and heights that no tile divides; whole steps
// of a layer with formats mixed as files mix them; a row's bits do not depend on its neighbours.
#include <algorithm>
#include <limits>
#include <random>
#include <string>

#include "harness.h"
#include "kernels/cuda/linear/linear.h"
#include "reference.h"
#include "test_tiles.h"

namespace lode::cuda {
namespace {

using test::OnDevice, test::TestTiles, test::kFormats, test::name_of_format;
using enum TileFormat;

std::vector<double> multiply(const std::vector<double>& x, const TestTiles& w) {
  const auto cols = static_cast<std::size_t>(w.weight.cols), rows = static_cast<std::size_t>(w.weight.rows);
  std::vector<double> y(x.size() / cols * rows);
  for (std::size_t r = 0; r < x.size() / cols; ++r) {
    for (std::size_t o = 0; o < rows; ++o) {
      double sum = 0;
      for (std::size_t i = 0; i < cols; ++i) sum += x[r * cols + i] * w.values[o * cols + i];
      y[r * rows + o] = sum;
    }
  }
  return y;
}
std::vector<double> widened(const std::vector<float>& x) {
  return {x.begin(), x.end()};
}
std::vector<double> rms_norm(const std::vector<double>& x, const std::vector<float>& gain, double eps) {
  std::vector<double> h(x.size());
  for (std::size_t row = 0; row < x.size(); row += gain.size()) {
    double sum = 0;
    for (std::size_t i = 0; i < gain.size(); ++i) sum += x[row + i] * x[row + i];
    const double inverse = 1 / std::sqrt(sum / static_cast<double>(gain.size()) + eps);
    for (std::size_t i = 0; i < gain.size(); ++i)
      h[row + i] = x[row + i] * inverse * static_cast<double>(gain[i]);
  }
  return h;
}

/// Inputs of few rows keep 16 bits of the largest of 256; many rows are rounded to bf16, as weights are.
double tolerance(Precision precision, std::int64_t n) {
  return precision == Precision::exact ? 2e-6 : n <= kTiledRows ? 1e-4 : 6e-3;
}

LODE_TEST(tiles_values) {
  Stream stream;
  for (const TileFormat f : kFormats) {
    const std::int64_t block = block_columns(f);
    for (const std::int64_t cols : {block, 3 * block, 9 * block}) {
      for (const std::int64_t rows : {1, 8, 21}) {
        const TestTiles w(f, rows, cols, 7, 1.0);
        const auto count = static_cast<std::size_t>(rows * cols);
        const OnDevice<float> f32(test::poison(count));
        unpack_tiles(w.weight.tiles(), 0, rows, f32.get(), DType::f32, stream.get());
        const std::vector<float> found = f32.read(stream);
        for (std::size_t i = 0; i < count; ++i) LODE_CHECK(found[i] == static_cast<float>(w.values[i]));
        const OnDevice<std::uint16_t> bf16(std::vector<std::uint16_t>(count, 0x7fff));
        unpack_tiles(w.weight.tiles(), 0, rows, bf16.get(), DType::bf16, stream.get());
        const std::vector<std::uint16_t> rounded = bf16.read(stream);
        for (std::size_t i = 0; i < count; ++i) LODE_CHECK(rounded[i] == to_bf16(found[i]).bits);
        if (rows < 21) continue;
        const OnDevice<float> some(test::poison(static_cast<std::size_t>(5 * cols)));
        unpack_tiles(w.weight.tiles(), 16, 5, some.get(), DType::f32, stream.get());
        LODE_CHECK(std::ranges::equal(some.read(stream),
                                      std::span(found).subspan(static_cast<std::size_t>(16 * cols))));
        const std::vector<std::int32_t> ids = {0, 20, 7, 7, -1, 21};
        const OnDevice<std::int32_t> ids_device(ids);
        const OnDevice<float> x(test::poison(ids.size() * static_cast<std::size_t>(cols)));
        embed(ids_device.get(), std::ssize(ids), w.weight, x.get(), stream.get());
        const std::vector<float> embedded = x.read(stream);
        for (std::size_t n = 0; n < ids.size(); ++n) {
          for (std::size_t i = 0; i < static_cast<std::size_t>(cols); ++i) {
            const float value = embedded[n * static_cast<std::size_t>(cols) + i];
            LODE_CHECK(
                ids[n] < 0 || ids[n] > 20
                    ? std::isnan(value)
                    : value == found[static_cast<std::size_t>(ids[n]) * static_cast<std::size_t>(cols) + i]);
          }
        }
      }
    }
  }
}

LODE_TEST(tiles_multiply) {
  Stream stream;
  for (const TileFormat f : kFormats) {
    const std::int64_t block = block_columns(f);
    const struct {
      std::int64_t out, in;
    } shapes[] = {{1, block}, {19, 3 * block}, {200, 9 * 256}, {48, 18 * 256}};
    for (const auto& shape : shapes) {
      const TestTiles w(f, shape.out, shape.in, 3, 0.1);
      const std::vector<float> bias = test::normal(static_cast<std::size_t>(shape.out), 4);
      const OnDevice<float> bias_device(bias);
      for (const Precision precision : {Precision::fast, Precision::exact}) {
        for (const std::int64_t n : {1, 2, 3, 4, 5, 8, 9, 16, 21, 32, 33, 40}) {
          if (precision == Precision::exact && n != 1 && n != 9) continue;
          Linear linear(stream.get(), precision);
          linear.reserve(n, shape.in, shape.in, shape.in, shape.in);
          linear.reserve_panel(Linear::panel_bytes(shape.out, shape.in, precision) / (n == 40 ? 2 : 1) +
                               kTileRows * shape.in * 4);
          const std::vector<float> x = test::normal(static_cast<std::size_t>(n * shape.in), 5);
          const OnDevice<float> x_device(x), y(test::poison(static_cast<std::size_t>(n * shape.out)));
          const DeviceWeight b = {bias_device.get(), DType::f32, 1, shape.out};
          linear.multiply(x_device.get(), n, w.weight, b, y.get(), false);
          std::vector<double> product = multiply(widened(x), w), expected = product;
          for (std::size_t i = 0; i < expected.size(); ++i)
            expected[i] += static_cast<double>(bias[i % bias.size()]);
          const std::string label = std::string(name_of_format(f)) + " rows " + std::to_string(n) + " out " +
                                    std::to_string(shape.out) + " in " + std::to_string(shape.in);
          const double allowed = tolerance(precision, n) * (shape.out == 1 ? 20 : 1);  // what cancels counts
          LODE_CHECK_ERROR(y.read(stream), expected, allowed, label);
          linear.multiply(x_device.get(), n, w.weight, {}, y.get(), true);
          for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += product[i];
          LODE_CHECK_ERROR(y.read(stream), expected, allowed, label + " added");
        }
      }
    }
  }
}

LODE_TEST(tiles_mlp) {
  // down has another format than gate and up, as in files of mixed quality; and gate another than up.
  Stream stream;
  const struct {
    TileFormat gate, up, down;
  } mixes[] = {{q4_k, q4_k, q6_k}, {q8_0, q8_0, q8_0}, {q4_0, q4_0, q4_1},
               {q5_0, q5_1, q5_1}, {q5_k, q5_k, q6_k}, {q6_k, q4_k, q4_k}};
  for (const auto& mix : mixes) {
    // 25 groups of columns are more than every warp knows gains of before its input is there; of 12, a warp that
    // quantises several rows comes back to a group whose gains it knew; 34 are shared by twice as many warps.
    const std::int64_t groups = mix.down == q4_1 ? 25 : mix.down == q5_1 ? 12 : mix.gate == q6_k ? 34 : 3;
    const std::int64_t hidden = groups * kTileColumns, inner = groups == 3 ? 1280 : 256;
    const TestTiles gate(mix.gate, inner, hidden, 5, 0.04), up(mix.up, inner, hidden, 6, 0.04),
        down(mix.down, hidden, inner, 7, 0.04);
    const std::vector<float> gain = test::normal(static_cast<std::size_t>(hidden), 8);
    const OnDevice<float> gain_device(gain);
    for (const std::int64_t n : {1, 3, 8, 11, 40}) {
      Linear linear(stream.get(), Precision::fast);
      linear.reserve(n, hidden, inner, hidden, hidden);
      linear.reserve_panel(Linear::panel_bytes(inner, hidden, Precision::fast));
      const std::vector<float> x = test::normal(static_cast<std::size_t>(n * hidden), 9, 3.0f);
      const OnDevice<float> x_device(x);
      linear.mlp({{gain_device.get(), DType::f32, 1, hidden},
                  gate.weight,
                  up.weight,
                  down.weight,
                  {},
                  {},
                  {},
                  1e-5f},
                 n, x_device.get());
      const std::vector<double> h = rms_norm(widened(x), gain, 1e-5f);
      std::vector<double> g = multiply(h, gate), u = multiply(h, up);
      for (std::size_t i = 0; i < g.size(); ++i) g[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
      std::vector<double> expected = multiply(g, down);
      for (std::size_t i = 0; i < x.size(); ++i) expected[i] += static_cast<double>(x[i]);
      LODE_CHECK_ERROR(x_device.read(stream), expected, tolerance(Precision::fast, n),
                       std::string(name_of_format(mix.gate)) + " rows " + std::to_string(n));
    }
  }
}

LODE_TEST(tiles_qkv) {
  Stream stream;
  const struct {
    TileFormat q, k, v;
    int heads, kv_heads, d;
  } cases[] = {{q4_k, q4_k, q6_k, 6, 2, 64},
               {q8_0, q8_0, q8_0, 4, 4, 128},
               {q4_0, q5_0, q4_0, 3, 1, 80},
               {q5_k, q5_k, q5_k, 2, 1, 256},
               {q4_k, q4_k, q4_k, 5, 1, 12}};
  const std::int64_t hidden = 512;
  for (const auto& c : cases) {
    const std::int64_t q_cols = c.heads * c.d, kv_cols = c.kv_heads * c.d;
    const TestTiles q(c.q, q_cols, hidden, 15, 0.05), k(c.k, kv_cols, hidden, 16, 0.05),
        v(c.v, kv_cols, hidden, 17, 0.05);
    const std::vector<float> gain = test::normal(static_cast<std::size_t>(hidden), 18),
                             bias = test::normal(static_cast<std::size_t>(q_cols), 19);
    const OnDevice<float> gain_device(gain), bias_device(bias);
    for (const std::int64_t n : {1, 4, 7, 19, 40}) {
      Linear linear(stream.get(), Precision::fast);
      linear.reserve(n, hidden, hidden, q_cols, kv_cols);
      linear.reserve_panel(Linear::panel_bytes(q_cols, hidden, Precision::fast));
      const std::vector<float> x = test::normal(static_cast<std::size_t>(n * hidden), 20);
      KvLayout layout{c.kv_heads, c.d, DType::f32, 0};
      layout.layer_stride = layout.layer_bytes(128);
      const OnDevice<char> store(std::vector<char>(static_cast<std::size_t>(layout.layer_stride), 0));
      const OnDevice<const char*> bases({store.get()});
      std::vector<QueryToken> tokens;
      for (std::int64_t r = 0; r < n; ++r) tokens.push_back({0, static_cast<std::int32_t>(r)});
      const OnDevice<QueryToken> tokens_device(tokens);
      const OnDevice<float> x_device(x),
          frequencies(std::vector<float>(static_cast<std::size_t>(c.d / 2), 0.0f));
      const auto blank = [&](std::int64_t cols) { return test::poison(static_cast<std::size_t>(n * cols)); };
      const OnDevice<float> q_plain(blank(q_cols)), k_out(blank(kv_cols)), v_out(blank(kv_cols)),
          q_out(blank(q_cols));
      Linear::QkvArguments a;
      a.x = x_device.get();
      a.norm = {gain_device.get(), DType::f32, 1, hidden};
      a.q = q.weight, a.k = k.weight, a.v = v.weight;
      a.q_bias = {bias_device.get(), DType::f32, 1, q_cols};
      a.frequencies = frequencies.get();
      a.q_out = q_out.get(), a.q_unrotated = q_plain.get(), a.k_out = k_out.get(), a.v_out = v_out.get();
      Queries where;
      where.tokens = tokens_device.get();
      where.bases = bases.get();
      where.layout = layout;
      where.count = static_cast<int>(n);
      where.query_heads = c.heads;
      linear.qkv(a, where);
      const std::vector<double> h = rms_norm(widened(x), gain, 1e-5f);
      std::vector<double> eq = multiply(h, q);
      for (std::size_t i = 0; i < eq.size(); ++i) eq[i] += static_cast<double>(bias[i % bias.size()]);
      const std::string label =
          std::string(name_of_format(c.q)) + " rows " + std::to_string(n) + " d " + std::to_string(c.d);
      LODE_CHECK_ERROR(q_plain.read(stream), eq, tolerance(Precision::fast, n), label);
      LODE_CHECK_ERROR(q_out.read(stream), eq, tolerance(Precision::fast, n), label);
      LODE_CHECK_ERROR(k_out.read(stream), multiply(h, k), tolerance(Precision::fast, n), label);
      LODE_CHECK_ERROR(v_out.read(stream), multiply(h, v), tolerance(Precision::fast, n), label);
      const std::vector<char> kept = store.read(stream);
      const std::vector<float> keys = k_out.read(stream), values = v_out.read(stream);
      for (std::int64_t r = 0; r < n; ++r) {
        for (int head = 0; head < c.kv_heads; ++head) {
          const auto* row = reinterpret_cast<const float*>(kept.data() + layout.key_offset(head, r));
          const auto* value = reinterpret_cast<const float*>(kept.data() + layout.key_offset(head, r) +
                                                             layout.value_offset());
          for (int i = 0; i < c.d; ++i) {
            const auto at = static_cast<std::size_t>(r * kv_cols + head * c.d + i);
            LODE_CHECK(row[i] == keys[at] && value[i] == values[at]);
          }
        }
      }
    }
  }
}

LODE_TEST(tiles_neighbours) {
  // A row alone, and the same row among others at every place of a batch: equal bits.
  Stream stream;
  const std::int64_t hidden = 1024, inner = 2304;
  for (const TileFormat f : kFormats) {
    Linear linear(stream.get(), Precision::fast);
    linear.reserve(16, hidden, inner, hidden, hidden);
    const TestTiles gate(f, inner, hidden, 32, 0.05), up(f, inner, hidden, 33, 0.05),
        down(f, hidden, inner, 34, 0.05);
    const OnDevice<float> gain(test::normal(static_cast<std::size_t>(hidden), 31));
    const Linear::MlpArguments a{
        {gain.get(), DType::f32, 1, hidden}, gate.weight, up.weight, down.weight, {}, {}, {}, 1e-5f};
    const std::vector<float> row = test::normal(static_cast<std::size_t>(hidden), 35);
    const OnDevice<float> alone(row);
    linear.mlp(a, 1, alone.get());
    const std::vector<float> expected = alone.read(stream);
    for (const int n : {2, 3, 4, 5, 8, 9, 13, 16}) {
      for (int place = 0; place<n; place += n> 8 ? 3 : 1) {
        std::vector<float> batch =
            test::normal(static_cast<std::size_t>(n * hidden), 36 + static_cast<unsigned>(n));
        std::copy(row.begin(), row.end(), batch.begin() + place * hidden);
        const OnDevice<float> together(batch);
        linear.mlp(a, n, together.get());
        const std::vector<float> found = together.read(stream);
        LODE_CHECK(std::equal(expected.begin(), expected.end(), found.begin() + place * hidden));
      }
    }
  }
}

LODE_TEST(tiles_widths) {
  // Equal bits as well where columns are shared by any number of warps: all of them, fewer, and more groups than sums.
  Stream stream;
  const std::int64_t out = 40;
  for (const TileFormat f : {q6_k, mxfp4}) {
    for (const std::int64_t groups : {1, 3, 7, 8, 10, 12, 13, 15, 16, 17, 24, 25, 56, 128}) {
      const std::int64_t in = groups * kTileColumns;
      const TestTiles w(f, out, in, 40, 0.05);
      Linear linear(stream.get(), Precision::fast);
      linear.reserve(8, in, in, in, in);
      const std::vector<float> x = test::normal(static_cast<std::size_t>(8 * in), 41);
      const OnDevice<float> x_device(x), y(test::poison(static_cast<std::size_t>(8 * out)));
      const auto product = [&](std::int64_t first, std::int64_t n) {
        linear.multiply(x_device.get() + first * in, n, w.weight, {}, y.get(), false);
        std::vector<float> found = y.read(stream);
        found.resize(static_cast<std::size_t>(n * out));
        return found;
      };
      const std::vector<float> all = product(0, 8);
      const std::string label = std::string(name_of_format(f)) + " groups " + std::to_string(groups);
      LODE_CHECK_ERROR(all, multiply(widened(x), w), tolerance(Precision::fast, 8), label);
      for (const std::int64_t n : {1, 2, 4}) {
        for (std::int64_t first = 0; first < 8; first += n) {
          const std::vector<float> some = product(first, n);
          LODE_CHECK(std::equal(some.begin(), some.end(), all.begin() + first * out));
        }
      }
    }
  }
}

LODE_TEST(tiles_extremes) {
  // NaN and infinity come through; zeros, and numbers near the ends of float32, give what they should.
  Stream stream;
  const std::int64_t in = 512, out = 40;
  for (const TileFormat f : kFormats) {
    const TestTiles w(f, out, in, 3, 1.0);
    Linear linear(stream.get(), Precision::fast);
    linear.reserve(5, in, in, in, in);
    std::vector<float> x = test::normal(static_cast<std::size_t>(5 * in), 5);
    x[7] = std::numeric_limits<float>::quiet_NaN();
    x[static_cast<std::size_t>(in + 300)] = -std::numeric_limits<float>::infinity();
    std::fill_n(x.begin() + 2 * in, in, 0.0f);
    for (std::int64_t i = 3 * in; i < 4 * in; ++i) x[static_cast<std::size_t>(i)] *= 1e25f;
    for (std::int64_t i = 4 * in; i < 5 * in; ++i) x[static_cast<std::size_t>(i)] *= 1e-25f;
    const OnDevice<float> x_device(x), y(test::poison(static_cast<std::size_t>(5 * out)));
    linear.multiply(x_device.get(), 5, w.weight, {}, y.get(), false);
    const std::vector<float> found = y.read(stream);
    const std::vector<double> expected = multiply(widened(x), w);
    for (std::int64_t r = 0; r < 5; ++r) {
      for (std::int64_t i = 0; i < out; ++i) {
        const auto at = static_cast<std::size_t>(r * out + i);
        LODE_CHECK(std::isfinite(found[at]) == (r > 1));
        if (r == 2) LODE_CHECK(found[at] == 0.0f);
      }
      const auto row = [&](const auto& v) {
        return std::vector(v.begin() + r * out, v.begin() + (r + 1) * out);
      };
      if (r > 2) LODE_CHECK_ERROR(row(found), row(expected), 1e-4, name_of_format(f).data());
    }
  }
}

}  // namespace
}  // namespace lode::cuda
