// SPDX-License-Identifier: Apache-2.0
// The linear parts of a layer against float64, for every count of rows on both sides of the borders between
// kernels, widths that no vector divides, every weight type, with and without biases; that a row's bits do
// not depend on its neighbours; that NaN comes through; that nothing is left unwritten.
#include <algorithm>
#include <limits>
#include <string>

#include "harness.h"
#include "kernels/cuda/linear/layer_inputs.h"
#include "kernels/cuda/linear/linear.h"
#include "lodestone/error.h"
#include "reference.h"

namespace lode::cuda {
namespace {

using test::OnDevice;

struct Matrix64 {
  std::int64_t rows = 0, cols = 0;
  std::vector<double> values;
};

/// A random weight: its numbers as the type holds them, on both sides.
struct TestWeight {
  TestWeight(std::int64_t rows, std::int64_t cols, DType type, unsigned seed, float deviation)
      : host{rows, cols, {}}, device(make(type, seed, deviation)) {
    weight = {device.get(), type, rows, cols};
  }
  std::vector<char> make(DType type, unsigned seed, float deviation) {
    std::vector<float> values =
        test::normal(static_cast<std::size_t>(host.rows * host.cols), seed, deviation);
    for (float& x : values) host.values.push_back(x = test::rounded(x, type));
    return test::encode(values, type);
  }
  Matrix64 host;
  OnDevice<char> device;
  DeviceWeight weight;
};

std::vector<double> widened(const std::vector<float>& x) {
  return {x.begin(), x.end()};
}

std::vector<double> multiply(const std::vector<double>& x, const Matrix64& w) {
  const std::int64_t n = static_cast<std::int64_t>(x.size()) / w.cols;
  std::vector<double> y(static_cast<std::size_t>(n * w.rows));
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t o = 0; o < w.rows; ++o) {
      const double *a = x.data() + r * w.cols, *b = w.values.data() + o * w.cols;
      double sum = 0;
      for (std::int64_t i = 0; i < w.cols; ++i) sum += a[i] * b[i];
      y[static_cast<std::size_t>(r * w.rows + o)] = sum;
    }
  }
  return y;
}

void add_rows(std::vector<double>& y, const Matrix64& bias) {
  for (std::size_t i = 0; i < y.size(); ++i) y[i] += bias.values[i % bias.values.size()];
}

std::vector<double> rms_norm(const std::vector<double>& x, const Matrix64& gain, double eps) {
  std::vector<double> h(x.size());
  const auto cols = static_cast<std::size_t>(gain.cols);
  for (std::size_t row = 0; row < x.size(); row += cols) {
    double sum = 0;
    for (std::size_t i = 0; i < cols; ++i) sum += x[row + i] * x[row + i];
    const double inverse = 1 / std::sqrt(sum / static_cast<double>(cols) + eps);
    for (std::size_t i = 0; i < cols; ++i) h[row + i] = x[row + i] * inverse * gain.values[i];
  }
  return h;
}

/// What rounding allows: few rows keep 16 bits of every input, many rows are rounded to the type.
double tolerance(Precision precision, std::int64_t n, DType type) {
  if (precision == Precision::exact) return 2e-6;
  if (n <= kFusedRows) return 1e-5;
  return type == DType::bf16 ? 6e-3 : 1e-3;
}

constexpr DType kTypes[] = {DType::f32, DType::f16, DType::bf16};
constexpr Precision kPrecisions[] = {Precision::exact, Precision::fast};

/// Calls body(precision, type, rows).
template <class Body>
void for_all(const Body& body) {
  for (const Precision precision : kPrecisions) {
    for (const DType type : kTypes) {
      for (const std::int64_t n : {1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 300}) body(precision, type, n);
    }
  }
}

std::string what(Precision precision, DType type, std::int64_t n) {
  return std::string(precision == Precision::exact ? "exact " : "fast ") + std::string(name_of(type)) +
         " rows " + std::to_string(n);
}
LODE_TEST(linear_library) {
  Stream stream;
  std::printf("  cuBLASLt: %s\n", Linear(stream.get(), Precision::fast).library().c_str());
}

LODE_TEST(linear_multiply) {
  const struct { std::int64_t out, in; } shapes[] = {{1, 1}, {33, 257}, {130, 96}, {48, 192}, {200, 1024}};
  Stream stream;
  for (const auto& shape : shapes) {
    for_all([&](Precision precision, DType type, std::int64_t n) {
      Linear linear(stream.get(), precision);
      linear.reserve(n, shape.in, shape.in, shape.in, shape.in);
      const TestWeight w(shape.out, shape.in, type, 1, 1.0f), bias(1, shape.out, type, 2, 1.0f);
      const std::vector<float> x = test::normal(static_cast<std::size_t>(n * shape.in), 3);
      const OnDevice<float> x_device(x), y(test::poison(static_cast<std::size_t>(n * shape.out)));
      linear.multiply(x_device.get(), n, w.weight, bias.weight, y.get(), false);
      std::vector<double> expected = multiply(widened(x), w.host);
      add_rows(expected, bias.host);
      const std::string label = what(precision, type, n) + " out " + std::to_string(shape.out);
      LODE_CHECK_ERROR(y.read(stream), expected, tolerance(precision, n, type), label);
      linear.multiply(x_device.get(), n, w.weight, {}, y.get(), true);
      const std::vector<double> product = multiply(widened(x), w.host);
      for (std::size_t i = 0; i < expected.size(); ++i) expected[i] += product[i];
      LODE_CHECK_ERROR(y.read(stream), expected, tolerance(precision, n, type), label + " added");
    });
  }
}

LODE_TEST(linear_wide) {
  // Inputs that shared memory holds in stages alone, and more tiles than there are blocks.
  Stream stream;
  const std::int64_t out = 2400, in = 6144;
  const TestWeight w(out, in, DType::bf16, 71, 0.05f);
  for (const std::int64_t n : {1, 8}) {
    Linear linear(stream.get(), Precision::fast);
    linear.reserve(n, in, in, in, in);
    const std::vector<float> x = test::normal(static_cast<std::size_t>(n * in), 72);
    const OnDevice<float> x_device(x), y(test::poison(static_cast<std::size_t>(n * out)));
    linear.multiply(x_device.get(), n, w.weight, {}, y.get(), false);
    LODE_CHECK_ERROR(y.read(stream), multiply(widened(x), w.host), tolerance(Precision::fast, n, DType::bf16),
                     "rows " + std::to_string(n));
  }
}

LODE_TEST(linear_mlp) {
  Stream stream;
  const struct { std::int64_t hidden, inner; } shapes[] = {{192, 320}, {90, 77}, {1024, 1536}};
  for (const auto& shape : shapes) {
    for_all([&](Precision precision, DType type, std::int64_t n) {
      if (shape.hidden == 1024 && n != 1 && n != 5 && n != 17)
        return;  // the float64 reference takes its time
      Linear linear(stream.get(), precision);
      linear.reserve(n, shape.hidden, shape.inner, shape.hidden, shape.hidden);
      const float spread = 1.0f / std::sqrt(static_cast<float>(shape.hidden));
      const TestWeight norm(1, shape.hidden, type, 4, 1.0f), gate(shape.inner, shape.hidden, type, 5, spread),
          up(shape.inner, shape.hidden, type, 6, spread), down(shape.hidden, shape.inner, type, 7, spread),
          gate_bias(1, shape.inner, type, 8, 0.5f), up_bias(1, shape.inner, type, 9, 0.5f),
          down_bias(1, shape.hidden, type, 10, 0.5f);
      const std::vector<float> x = test::normal(static_cast<std::size_t>(n * shape.hidden), 11, 3.0f);
      const OnDevice<float> x_device(x);
      linear.mlp({norm.weight, gate.weight, up.weight, down.weight, gate_bias.weight, up_bias.weight,
                  down_bias.weight, 1e-5f},
                 n, x_device.get());
      const std::vector<double> h = rms_norm(widened(x), norm.host, 1e-5f);
      std::vector<double> g = multiply(h, gate.host), u = multiply(h, up.host);
      add_rows(g, gate_bias.host);
      add_rows(u, up_bias.host);
      for (std::size_t i = 0; i < g.size(); ++i) g[i] = g[i] / (1 + std::exp(-g[i])) * u[i];
      std::vector<double> expected = multiply(g, down.host);
      add_rows(expected, down_bias.host);
      for (std::size_t i = 0; i < x.size(); ++i) expected[i] += x[i];
      LODE_CHECK_ERROR(x_device.read(stream), expected, tolerance(precision, n, type),
                       what(precision, type, n) + " hidden " + std::to_string(shape.hidden));
    });
  }
}

LODE_TEST(linear_head) {
  Stream stream;
  for_all([&](Precision precision, DType type, std::int64_t n) {
    const std::int64_t hidden = 128, vocab = 515;
    Linear linear(stream.get(), precision);
    linear.reserve(n, hidden, hidden, hidden, hidden);
    const TestWeight norm(1, hidden, type, 12, 1.0f), output(vocab, hidden, type, 13, 1.0f);
    const std::vector<float> x = test::normal(static_cast<std::size_t>(n * hidden), 14, 1e-3f);  // eps counts
    const OnDevice<float> x_device(x), logits(test::poison(static_cast<std::size_t>(n * vocab)));
    linear.head(x_device.get(), n, norm.weight, 1e-6f, output.weight, logits.get());
    LODE_CHECK_ERROR(logits.read(stream), multiply(rms_norm(widened(x), norm.host, 1e-6f), output.host),
                     tolerance(precision, n, type), what(precision, type, n));
  });
}

/// Tokens of several sequences at scattered positions, with a store of two layers whose unwritten bytes are
/// known.
struct QkvCase {
  Precision precision = Precision::exact;
  DType weights = DType::bf16, store = DType::bf16;
  std::int64_t n = 1;
  int query_heads = 4, kv_heads = 2, d = 64;
  std::int64_t hidden = 192;
  bool biased = false;
  bool normed = false;      ///< heads of queries, keys and values
  bool keys_alone = false;  ///< values are keys before norm and RoPE
  bool no_rows = false;     ///< queries alone are made
};

void turn(std::vector<double>& x, int heads, int d, const std::vector<QueryToken>& tokens,
          const std::vector<float>& frequencies, float scale) {
  for (std::size_t n = 0; n < tokens.size(); ++n) {
    for (int h = 0; h < heads; ++h) {
      double* at = x.data() + (n * static_cast<std::size_t>(heads) + static_cast<std::size_t>(h)) *
                                  static_cast<std::size_t>(d);
      for (int i = 0; i < d / 2; ++i) {
        const float angle = static_cast<float>(tokens[n].position) * frequencies[static_cast<std::size_t>(i)];
        const double c = std::cos(static_cast<double>(angle)) * scale,
                     s = std::sin(static_cast<double>(angle)) * scale;
        const double a = at[i], b = at[i + d / 2];
        at[i] = a * c - b * s;
        at[i + d / 2] = b * c + a * s;
      }
    }
  }
}

void check_qkv(const QkvCase& c) {
  Stream stream;
  Linear linear(stream.get(), c.precision);
  const std::int64_t q_cols = std::int64_t{c.query_heads} * c.d, kv_cols = std::int64_t{c.kv_heads} * c.d;
  linear.reserve(c.n, c.hidden, c.hidden, q_cols, kv_cols);
  const float spread = 1.0f / std::sqrt(static_cast<float>(c.hidden));
  const TestWeight norm(1, c.hidden, c.weights, 21, 1.0f), q(q_cols, c.hidden, c.weights, 22, spread),
      k(kv_cols, c.hidden, c.weights, 23, spread), v(kv_cols, c.hidden, c.weights, 24, spread),
      q_bias(1, q_cols, c.weights, 25, 1.0f), k_bias(1, kv_cols, c.weights, 26, 1.0f),
      v_bias(1, kv_cols, c.weights, 27, 1.0f), q_norm(1, c.d, c.weights, 29, 1.0f),
      k_norm(1, c.d, c.weights, 30, 1.0f);
  const std::vector<float> x = test::normal(static_cast<std::size_t>(c.n * c.hidden), 28);
  std::vector<float> frequencies;
  for (int i = 0; i < c.d / 2; ++i) frequencies.push_back(static_cast<float>(std::pow(5e5, -2.0 * i / c.d)));
  // Three sequences: row r belongs to sequence r % 3, at rising positions around a block's border.
  KvLayout layout{c.kv_heads, c.d, c.store, 0};
  layout.layer_stride = layout.layer_bytes(400);
  std::vector<QueryToken> tokens;
  for (std::int64_t r = 0; r < c.n; ++r)
    tokens.push_back({static_cast<std::int32_t>(r % 3), static_cast<std::int32_t>(126 + r / 3)});
  const std::size_t range = static_cast<std::size_t>(2 * layout.layer_stride);
  const OnDevice<char> store(std::vector<char>(3 * range, char{0x11}));
  const OnDevice<const char*> bases({store.get(), store.get() + range, store.get() + 2 * range});
  const OnDevice<QueryToken> tokens_device(tokens);
  const OnDevice<float> x_device(x), frequencies_device(frequencies);
  const auto blank = [&](std::int64_t cols) { return test::poison(static_cast<std::size_t>(c.n * cols)); };
  const OnDevice<float> q_out(blank(q_cols)), q_plain(blank(q_cols)), k_out(blank(kv_cols)),
      k_plain(blank(kv_cols)), v_out(blank(kv_cols));
  Linear::QkvArguments a;
  a.x = x_device.get();
  a.norm = norm.weight;
  a.q = q.weight;
  if (!c.no_rows) a.k = k.weight;
  if (!c.no_rows && !c.keys_alone) a.v = v.weight;
  if (c.biased) {
    a.q_bias = q_bias.weight;
    a.k_bias = k_bias.weight;
    a.v_bias = c.keys_alone ? k_bias.weight : v_bias.weight;
  }
  if (c.normed) a.q_norm = q_norm.weight, a.k_norm = k_norm.weight, a.v_norm = true;
  a.frequencies = frequencies_device.get();
  a.rope_scale = 1.25f;
  a.q_out = q_out.get();
  a.q_unrotated = q_plain.get();
  a.k_out = k_out.get();
  a.k_unrotated = k_plain.get();
  a.v_out = v_out.get();
  Queries where;
  where.tokens = tokens_device.get();
  where.bases = bases.get();
  where.layer_offset = layout.layer_stride;  // the second layer
  where.layout = layout;
  where.count = static_cast<int>(c.n);
  where.query_heads = c.query_heads;
  linear.qkv(a, where);

  const std::vector<double> h = rms_norm(widened(x), norm.host, 1e-5f);
  std::vector<double> eq = multiply(h, q.host), ek = multiply(h, k.host), ev = multiply(h, v.host);
  if (c.biased) {
    add_rows(eq, q_bias.host);
    add_rows(ek, k_bias.host);
    add_rows(ev, v_bias.host);
  }
  if (c.keys_alone) ev = ek;
  if (c.normed) {
    eq = rms_norm(eq, q_norm.host, 1e-5f), ek = rms_norm(ek, k_norm.host, 1e-5f);
    ev = rms_norm(ev, {1, c.d, std::vector<double>(static_cast<std::size_t>(c.d), 1.0)}, 1e-5f);
  }
  const double allowed = tolerance(c.precision, c.n, c.weights);
  const std::string label = what(c.precision, c.weights, c.n) + " store " + std::string(name_of(c.store));
  LODE_CHECK_ERROR(q_plain.read(stream), eq, allowed, label);
  if (!c.no_rows) {
    LODE_CHECK_ERROR(k_plain.read(stream), ek, allowed, label);
    LODE_CHECK_ERROR(v_out.read(stream), ev, allowed, label);
  }
  turn(eq, c.query_heads, c.d, tokens, frequencies, a.rope_scale);
  turn(ek, c.kv_heads, c.d, tokens, frequencies, a.rope_scale);
  LODE_CHECK_ERROR(q_out.read(stream), eq, allowed, label);
  if (c.no_rows) {
    LODE_CHECK(store.read(stream) == std::vector<char>(3 * range, char{0x11}));
    return;
  }
  LODE_CHECK_ERROR(k_out.read(stream), ek, allowed, label);

  // The store holds exactly the outputs, rounded, at their rows, and nothing else was touched.
  std::vector<char> expected(3 * range, char{0x11});
  const std::vector<float> keys = k_out.read(stream), values = v_out.read(stream);
  for (std::size_t r = 0; r < tokens.size(); ++r) {
    for (int head = 0; head < c.kv_heads; ++head) {
      const auto row = static_cast<std::size_t>(r * static_cast<std::size_t>(kv_cols) +
                                                static_cast<std::size_t>(head * c.d));
      char* at = expected.data() + static_cast<std::size_t>(tokens[r].sequence) * range +
                 layout.layer_stride + layout.key_offset(head, tokens[r].position);
      const auto put = [&](const std::vector<float>& from, char* to) {
        const std::vector<char> bytes = test::encode({from.begin() + static_cast<std::ptrdiff_t>(row),
                                                      from.begin() + static_cast<std::ptrdiff_t>(row) + c.d},
                                                     c.store);
        std::copy(bytes.begin(), bytes.end(), to);
      };
      put(keys, at);
      put(values, at + layout.value_offset());
    }
  }
  LODE_CHECK(store.read(stream) == expected);
}

LODE_TEST(linear_qkv) {
  for_all([&](Precision precision, DType type, std::int64_t n) {
    for (const DType store : kTypes) check_qkv({precision, type, store, n, 4, 2, 64, 192, n % 2 == 1});
  });
  for (const Precision precision : kPrecisions) {
    for (const std::int64_t n : {1, 3, 20}) {
      check_qkv({precision, DType::bf16, DType::bf16, n, 6, 1, 80, 256, true});
      check_qkv({precision, DType::bf16, DType::bf16, n, 3, 3, 96, 320, false});
      check_qkv({precision, DType::bf16, DType::bf16, n, 8, 2, 128, 1024, false});
      check_qkv({precision, DType::bf16, DType::f32, n, 2, 1, 256, 576, true});
      check_qkv({precision, DType::bf16, DType::bf16, n, 5, 5, 6, 45, true});
    }
  }
}

LODE_TEST(linear_qkv_of_normed_heads) {
  for_all([&](Precision precision, DType type, std::int64_t n) {
    QkvCase c = {precision, type, DType::bf16, n, 4, 1, 512, 192, n % 2 == 1, true};
    check_qkv(c);
    c.keys_alone = true;
    check_qkv(c);
    c.no_rows = true;
    check_qkv(c);
  });
}

LODE_TEST(linear_addition) {
  for_all([&](Precision precision, DType type, std::int64_t n) {
    Stream stream;
    Linear linear(stream.get(), precision);
    const std::int64_t cols = 96, hidden = 128;
    linear.reserve(n, hidden, hidden, cols, cols);
    const TestWeight w(hidden, cols, type, 41, 0.1f), gain(1, hidden, type, 42, 1.0f);
    const std::vector<float> in = test::normal(static_cast<std::size_t>(n * cols), 43),
                             x = test::normal(static_cast<std::size_t>(n * hidden), 44);
    const OnDevice<float> in_there(in), x_there(x);
    linear.project_out(in_there.get(), n, w.weight, {}, x_there.get(), {gain.weight, 1e-5f, 0.5f, 3.0f});
    std::vector<double> expected = rms_norm(multiply(widened(in), w.host), gain.host, 1e-5f);
    for (std::size_t i = 0; i < expected.size(); ++i)
      expected[i] = 3 * (static_cast<double>(x[i]) + 0.5 * expected[i]);
    LODE_CHECK_ERROR(x_there.read(stream), expected, tolerance(precision, n, type), what(precision, type, n));
  });
}

LODE_TEST(the_stream_may_leave_float16) {
  for_all([&](Precision precision, DType type, std::int64_t n) {
    Stream stream;
    Linear linear(stream.get(), precision);
    const std::int64_t cols = 96, rows = 128;
    linear.reserve(n, cols, rows, cols, cols);
    const TestWeight w(rows, cols, type, 45, 0.1f);
    const std::vector<float> x = test::normal(static_cast<std::size_t>(n * cols), 46, 1e6f);
    const OnDevice<float> x_there(x), y(test::poison(static_cast<std::size_t>(n * rows)));
    linear.multiply_stream(x_there.get(), n, w.weight, y.get());
    LODE_CHECK_ERROR(y.read(stream), multiply(widened(x), w.host), tolerance(precision, n, type),
                     what(precision, type, n));
  });
}

LODE_TEST(numbers_for_each_layer) {
  Stream stream;
  for (const std::int64_t tokens : {1, 7}) {
    const LayerInputs sizes = {.tokens = tokens, .layers = 3, .width = 44};
    const auto count = static_cast<std::size_t>(sizes.numbers()),
               width = static_cast<std::size_t>(sizes.width);
    const TestWeight gain(1, sizes.width, DType::bf16, 51, 1.0f);
    std::vector<float> made = test::normal(count, 52, 100.0f), embedded = test::normal(count, 53),
                       gates = test::normal(static_cast<std::size_t>(tokens) * width, 54);
    std::fill(made.begin(), made.begin() + 44, 0.0f);
    const OnDevice<float> made_there(made), embedded_there(embedded), gates_there(gates);
    join_inputs(sizes, 0.125f, gain.weight, 1e-5f, embedded_there.get(), made_there.get(), stream.get());
    std::vector<double> expected = widened(made);
    for (double& v : expected) v *= 0.125;
    expected = rms_norm(expected, gain.host, 1e-5f);
    for (std::size_t i = 0; i < count; ++i)
      expected[i] = (expected[i] + static_cast<double>(embedded[i])) / std::sqrt(2.0);
    LODE_CHECK_ERROR(made_there.read(stream), expected, 1e-6, "made");
    weigh_inputs(sizes, made_there.get(), 1, {}, gates_there.get(), stream.get());
    std::vector<double> weighed;
    for (std::size_t i = 0; i < gates.size(); ++i) {
      const auto g = static_cast<double>(gates[i]);
      weighed.push_back(g / (1 + std::exp(-g)) * expected[(i / width * 3 + 1) * width + i % width]);
    }
    LODE_CHECK_ERROR(gates_there.read(stream), weighed, 2e-6, "weighed");
  }
}

LODE_TEST(linear_neighbours) {
  // A row alone, and the same row among others at every place of a batch: equal bits.
  Stream stream;
  const std::int64_t hidden = 256, inner = 704;
  for (const Precision precision : kPrecisions) {
    for (const DType type : kTypes) {
      Linear linear(stream.get(), precision);
      linear.reserve(kFusedRows, hidden, inner, hidden, hidden);
      const TestWeight norm(1, hidden, type, 31, 1.0f), gate(inner, hidden, type, 32, 0.1f),
          up(inner, hidden, type, 33, 0.1f), down(hidden, inner, type, 34, 0.1f);
      const Linear::MlpArguments a{norm.weight, gate.weight, up.weight, down.weight, {}, {}, {}, 1e-5f};
      const std::vector<float> row = test::normal(static_cast<std::size_t>(hidden), 35);
      const OnDevice<float> alone(row);
      linear.mlp(a, 1, alone.get());
      const std::vector<float> expected = alone.read(stream);
      for (int n = 2; n <= kFusedRows; ++n) {
        for (int place = 0; place < n; ++place) {
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
}

LODE_TEST(linear_nan_and_infinity) {
  Stream stream;
  for_all([&](Precision precision, DType type, std::int64_t n) {
    const std::int64_t hidden = 128, vocab = 64;
    Linear linear(stream.get(), precision);
    linear.reserve(n, hidden, hidden, hidden, hidden);
    const TestWeight norm(1, hidden, type, 41, 1.0f), output(vocab, hidden, type, 42, 1.0f);
    std::vector<float> x = test::normal(static_cast<std::size_t>(n * hidden), 43);
    x[static_cast<std::size_t>((n - 1) * hidden + 77)] = std::numeric_limits<float>::quiet_NaN();
    if (n > 1) x[5] = std::numeric_limits<float>::infinity();
    const OnDevice<float> x_device(x), logits(test::poison(static_cast<std::size_t>(n * vocab)));
    linear.head(x_device.get(), n, norm.weight, 1e-5f, output.weight, logits.get());
    const std::vector<float> found = logits.read(stream);
    for (std::int64_t r = 0; r < n; ++r) {
      const bool bad = r == n - 1 || r == 0;
      for (std::int64_t i = 0; i < vocab; ++i)
        LODE_CHECK(std::isfinite(found[static_cast<std::size_t>(r * vocab + i)]) != bad);
    }
  });
}

LODE_TEST(linear_reserve) {
  Stream stream;
  Linear linear(stream.get(), Precision::exact);
  linear.reserve(4, 64, 64, 64, 64);
  const TestWeight norm(1, 64, DType::f32, 51, 1.0f), w(64, 64, DType::f32, 52, 1.0f);
  const OnDevice<float> x(test::normal(64 * 12, 53));
  bool refused = false;
  try {
    linear.mlp({norm.weight, w.weight, w.weight, w.weight, {}, {}, {}, 1e-5f}, 12, x.get());
  } catch (const RunError&) {
    refused = true;
  }
  LODE_CHECK(refused);
}

LODE_TEST(linear_in_a_graph) {
  // Captured once and replayed: the same bits as when launched.
  Stream stream;
  const std::int64_t hidden = 1024, inner = 2816;
  const TestWeight norm(1, hidden, DType::bf16, 61, 1.0f), gate(inner, hidden, DType::bf16, 62, 0.03f),
      up(inner, hidden, DType::bf16, 63, 0.03f), down(hidden, inner, DType::bf16, 64, 0.03f);
  const Linear::MlpArguments a{norm.weight, gate.weight, up.weight, down.weight, {}, {}, {}, 1e-5f};
  const std::vector<float> start = test::normal(static_cast<std::size_t>(hidden), 65);
  for (const std::int64_t n : {1, 8, 24}) {
    Linear linear(stream.get(), Precision::fast);
    linear.reserve(n, hidden, inner, hidden, hidden);
    std::vector<float> rows;
    for (std::int64_t r = 0; r < n; ++r) rows.insert(rows.end(), start.begin(), start.end());
    const OnDevice<float> launched(rows), replayed(rows);
    for (int layer = 0; layer < 6; ++layer) linear.mlp(a, n, launched.get());
    Graph::begin(stream.get());
    for (int layer = 0; layer < 3; ++layer) linear.mlp(a, n, replayed.get());
    const Graph graph = Graph::end(stream.get());
    graph.launch(stream.get());
    graph.launch(stream.get());
    const std::vector<float> found = replayed.read(stream);
    LODE_CHECK(launched.read(stream) == found);
    LODE_CHECK(std::all_of(found.begin(), found.end(), [](float v) { return std::isfinite(v); }));
  }
}

LODE_TEST(embed_rows) {
  Stream stream;
  for (const DType type : kTypes) {
    const TestWeight table(100, 37, type, 71, 1.0f);
    const std::vector<std::int32_t> ids = {0, 99, 5, 5, -1, 100};
    const OnDevice<std::int32_t> ids_device(ids);
    const OnDevice<float> x(test::poison(ids.size() * 37));
    embed(ids_device.get(), static_cast<std::int64_t>(ids.size()), table.weight, x.get(), stream.get());
    const std::vector<float> found = x.read(stream);
    for (std::size_t n = 0; n < ids.size(); ++n) {
      for (std::size_t i = 0; i < 37; ++i) {
        if (ids[n] < 0 || ids[n] >= 100)
          LODE_CHECK(std::isnan(found[n * 37 + i]));
        else
          LODE_CHECK(found[n * 37 + i] ==
                     static_cast<float>(table.host.values[static_cast<std::size_t>(ids[n]) * 37 + i]));
      }
    }
  }
}

LODE_TEST(argmax_ties_and_nan) {
  Stream stream;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const std::int64_t vocab : {1, 31, 1024, 1025, 128256}) {
    const auto size = static_cast<std::size_t>(vocab);
    std::vector<float> logits;
    std::vector<std::int32_t> expected;
    const auto row = [&](std::vector<float> values, std::int64_t best) {
      logits.insert(logits.end(), values.begin(), values.end());
      expected.push_back(static_cast<std::int32_t>(best));
    };
    std::vector<float> values = test::normal(size, 81);
    row(values, std::max_element(values.begin(), values.end()) - values.begin());
    row(std::vector<float>(size, -3.0f), 0);
    values.assign(size, -kInfinity);
    row(values, 0);
    values[size - 1] = -1e30f;
    row(values, vocab - 1);
    values.assign(size, -0.0f);
    values[size / 2] = 0.0f;
    row(values, 0);
    values = test::normal(size, 82);
    values[size / 3] = kInfinity;
    row(values, vocab / 3);
    values[size / 2] = -std::numeric_limits<float>::quiet_NaN();
    row(values, -1);
    const OnDevice<float> device(logits);
    const OnDevice<std::int32_t> tokens(std::vector<std::int32_t>(expected.size(), 77));
    argmax(device.get(), static_cast<std::int64_t>(expected.size()), vocab, tokens.get(), stream.get());
    LODE_CHECK(tokens.read(stream) == expected);
  }
}

}  // namespace
}  // namespace lode::cuda
