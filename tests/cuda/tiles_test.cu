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

namespace lode::cuda {
namespace {

using test::OnDevice;
using enum TileFormat;

constexpr TileFormat kFormats[] = {q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k};

std::string_view name_of_format(TileFormat f) {
  constexpr std::string_view kNames[] = {"none", "q4_0", "q4_1", "q5_0", "q5_1",
                                         "q8_0", "q4_k", "q5_k", "q6_k"};
  return kNames[static_cast<int>(f)];
}

double half(const std::uint8_t* at) {
  return static_cast<double>(to_float(f16{static_cast<std::uint16_t>(at[0] | at[1] << 8)}));
}

/// The values of one block, as ggml's description of the formats gives them.
std::vector<double> decode_small(TileFormat f, const std::uint8_t* b) {
  std::vector<double> y(32);
  const bool five = f == q5_0 || f == q5_1, minima = f == q4_1 || f == q5_1;
  const double d = half(b), m = minima ? half(b + 2) : 0.0;
  const std::uint8_t* const high = b + (minima ? 4 : 2);
  const std::uint8_t* const codes = high + (five ? 4 : 0);
  for (int j = 0; j < 32; ++j) {
    if (f == q8_0) {
      y[static_cast<std::size_t>(j)] = d * static_cast<std::int8_t>(b[2 + j]);
      continue;
    }
    int q = codes[j % 16] >> (j < 16 ? 0 : 4) & 15;
    if (five) q |= (high[j / 8] >> j % 8 & 1) << 4;
    y[static_cast<std::size_t>(j)] = minima ? d * q + m : d * (q - (five ? 16 : 8));
  }
  return y;
}

std::vector<double> decode_k(TileFormat f, const std::uint8_t* b) {
  std::vector<double> y(256);
  const double d = half(b), dmin = half(b + 2);
  const std::uint8_t *s = b + 4, *high = b + 16, *codes = b + (f == q5_k ? 48 : 16);
  for (int c = 0; c < 256; ++c) {
    const int j = c / 32;
    const int scale = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4,
              minimum = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
    int q = codes[c / 64 * 32 + c % 32] >> (c % 64 < 32 ? 0 : 4) & 15;
    if (f == q5_k) q |= (high[c % 32] >> j & 1) << 4;
    y[static_cast<std::size_t>(c)] = d * scale * q - dmin * minimum;
  }
  return y;
}

std::vector<double> decode_q6(const std::uint8_t* b) {
  std::vector<double> y(256);
  const double d = half(b + 208);
  for (int n = 0; n < 2; ++n) {
    for (int l = 0; l < 32; ++l) {
      const std::uint8_t *low = b + n * 64, *high = b + 128 + n * 32;
      const auto* scales = reinterpret_cast<const std::int8_t*>(b + 192 + n * 8);
      const int q[4] = {(low[l] & 15) | (high[l] & 3) << 4, (low[l + 32] & 15) | (high[l] >> 2 & 3) << 4,
                        low[l] >> 4 | (high[l] >> 4 & 3) << 4, low[l + 32] >> 4 | high[l] >> 6 << 4};
      for (int k = 0; k < 4; ++k)
        y[static_cast<std::size_t>(n * 128 + k * 32 + l)] = d * scales[k * 2 + l / 16] * (q[k] - 32);
    }
  }
  return y;
}

std::vector<double> decode(TileFormat f, const std::uint8_t* block) {
  return f == q6_k ? decode_q6(block) : f == q4_k || f == q5_k ? decode_k(f, block) : decode_small(f, block);
}

/// Random blocks with scales of a given size, on the device as tiles, and the values in float64.
struct TestTiles {
  TestTiles(TileFormat format, std::int64_t rows, std::int64_t cols, unsigned seed, double spread)
      : tiles(tiled_bytes(format, rows, cols), "tiles") {
    std::mt19937 engine(seed);
    const std::int64_t bytes = block_bytes(format), count = rows * cols / block_columns(format);
    blocks.resize(static_cast<std::size_t>(count * bytes));
    for (std::uint8_t& b : blocks) b = static_cast<std::uint8_t>(engine());
    std::uniform_real_distribution<double> draw(0.2, 1.0);
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint8_t* const at = blocks.data() + i * bytes;
      const auto put = [&](int where, double x) {
        const std::uint16_t bits = to_f16(static_cast<float>(x)).bits;
        at[where] = static_cast<std::uint8_t>(bits), at[where + 1] = static_cast<std::uint8_t>(bits >> 8);
      };
      // Uniform codes of b bits spread 2^b / 3.5 about their middle; scales of 6 or 7 bits are half as large.
      if (format == q6_k) put(208, draw(engine) * spread / 18 / 64);
      if (format == q4_k || format == q5_k) {
        const double width = format == q4_k ? 4.6 : 9.2;
        put(0, draw(engine) * spread / width / 32);
        put(2, draw(engine) * spread / 32);
      }
      if (format == q8_0) put(0, draw(engine) * spread / 74);
      if (format == q4_0 || format == q4_1) put(0, draw(engine) * spread / 4.6);
      if (format == q5_0 || format == q5_1) put(0, draw(engine) * spread / 9.2);
      if (format == q4_1 || format == q5_1) put(2, -draw(engine) * spread * 1.7);
      const std::vector<double> some = decode(format, at);
      values.insert(values.end(), some.begin(), some.end());
    }
    const OnDevice<std::uint8_t> raw(blocks);
    pack_tiles(raw.get(), format, rows, cols, tiles.as<void>(), nullptr);
    cudaDeviceSynchronize();
    weight = {tiles.as<void>(), DType::bf16, rows, cols, format};
  }
  std::vector<std::uint8_t> blocks;
  std::vector<double> values;  // [rows, cols]
  Buffer tiles;
  DeviceWeight weight;
};

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

#define LODE_CHECK_ERROR(found, expected, allowed, label)                                     \
  do {                                                                                        \
    const double error_ = test::relative_error(found, expected);                              \
    if (!(error_ <= (allowed)))                                                               \
      test::fail(__FILE__, __LINE__,                                                          \
                 std::string(#found) + ": " + (label) + ": error " + std::to_string(error_)); \
  } while (0)

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
  const std::int64_t hidden = 768, inner = 1280;
  for (const auto& mix : mixes) {
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
