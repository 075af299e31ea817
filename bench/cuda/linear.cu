// SPDX-License-Identifier: Apache-2.0
// The linear parts of Llama-3.1-8B with random bf16 weights: a decode step without its attention as one
// graph, by kind of step, beside the read of as many bytes and cuBLASLt; and products of many rows.
//   usage: bench_linear [quick]
#include <cstring>
#include <memory>

#include "bench.h"
#include "kernels/cuda/linear/linear.h"
#include "kernels/cuda/linear/linear_cublaslt.h"

namespace lode::cuda::bench {
namespace {

constexpr int kLayers = 32, kQueryHeads = 32, kKvHeads = 8, kHeadDim = 128;
constexpr std::int64_t kHidden = 4096, kInner = 14336, kVocab = 128256;
constexpr std::int64_t kQ = kQueryHeads * kHeadDim, kKv = kKvHeads * kHeadDim;

struct Layer {
  Buffer norm = random_weights(kHidden, 1.0f, 1), qkv = random_weights((kQ + 2 * kKv) * kHidden, 0.02f, 2),
         o = random_weights(kHidden * kQ, 0.02f, 3), mlp_norm = random_weights(kHidden, 1.0f, 4),
         gate_up = random_weights(2 * kInner * kHidden, 0.02f, 5),
         down = random_weights(kHidden * kInner, 0.02f, 6);
};

DeviceWeight weight(const Buffer& buffer, std::int64_t first_row, std::int64_t rows, std::int64_t cols) {
  return {buffer.as<std::uint16_t>() + first_row * cols, DType::bf16, rows, cols};
}

/// The model, one sequence a row, and what a step writes.
struct Model {
  explicit Model(std::int64_t rows_) : rows(rows_), layers(kLayers), linear(stream.get(), Precision::fast) {
    layout = {kKvHeads, kHeadDim, DType::bf16, 0};
    layout.layer_stride = layout.layer_bytes(128);
    store = Buffer(rows * kLayers * layout.layer_stride, "keys and values");
    std::vector<const char*> starts;
    std::vector<QueryToken> places;
    for (int r = 0; r < rows; ++r) {
      starts.push_back(store.as<char>() + r * kLayers * layout.layer_stride);
      places.push_back({r, 100});
    }
    bases = Buffer(rows * 8, "bases");
    tokens = Buffer(rows * static_cast<std::int64_t>(sizeof(QueryToken)), "places");
    copy(bases.as<void>(), starts.data(), bases.bytes(), nullptr);
    copy(tokens.as<void>(), places.data(), tokens.bytes(), nullptr);
    linear.reserve(rows, kHidden, kInner, kQ, kKv);
    LODE_CUDA(cudaDeviceSynchronize());
  }
  void qkv(int l) {
    const Layer& layer = layers[static_cast<std::size_t>(l)];
    Linear::QkvArguments a;
    a.x = x.as<float>();
    a.norm = weight(layer.norm, 0, 1, kHidden);
    a.q = weight(layer.qkv, 0, kQ, kHidden);
    a.k = weight(layer.qkv, kQ, kKv, kHidden);
    a.v = weight(layer.qkv, kQ + kKv, kKv, kHidden);
    a.frequencies = frequencies.as<float>();
    a.q_out = q.as<float>();
    Queries where;
    where.tokens = tokens.as<QueryToken>();
    where.bases = bases.as<const char*>();
    where.layer_offset = l * layout.layer_stride;
    where.layout = layout;
    where.count = static_cast<int>(rows);
    where.query_heads = kQueryHeads;
    linear.qkv(a, where);
  }
  void out(int l) {
    linear.project_out(q.as<float>(), rows, weight(layers[static_cast<std::size_t>(l)].o, 0, kHidden, kQ), {},
                       x.as<float>());
  }
  void mlp(int l) {
    const Layer& layer = layers[static_cast<std::size_t>(l)];
    linear.mlp({weight(layer.mlp_norm, 0, 1, kHidden),
                weight(layer.gate_up, 0, kInner, kHidden),
                weight(layer.gate_up, kInner, kInner, kHidden),
                weight(layer.down, 0, kHidden, kInner),
                {},
                {},
                {},
                1e-5f},
               rows, x.as<float>());
  }
  void head() {
    linear.head(x.as<float>(), rows, weight(norm, 0, 1, kHidden), 1e-5f, weight(output, 0, kVocab, kHidden),
                logits.as<float>());
  }
  void step() {
    embed(ids.as<std::int32_t>(), rows, weight(embedding, 0, kVocab, kHidden), x.as<float>(), stream.get());
    for (int l = 0; l < kLayers; ++l) {
      qkv(l);
      out(l);
      mlp(l);
    }
    head();
    argmax(logits.as<float>(), rows, kVocab, ids.as<std::int32_t>(), stream.get());
  }
  template <class Body>
  double per_layer(const Body& body) {
    return median_replay(stream, 9,
                         [&] {
                           for (int l = 0; l < kLayers; ++l) body(l);
                         }) /
           kLayers;
  }

  std::int64_t rows;
  Stream stream;
  std::vector<Layer> layers;
  Linear linear;
  KvLayout layout;
  Buffer store, bases, tokens;
  Buffer norm = random_weights(kHidden, 1.0f, 7), output = random_weights(kVocab * kHidden, 0.02f, 8),
         embedding = random_weights(kVocab * kHidden, 1.0f, 9), x = random_floats(rows * kHidden, 1.0f, 10),
         q = random_floats(rows * kQ, 1.0f, 11), frequencies = random_floats(kHeadDim / 2, 0.1f, 12),
         logits = Buffer(rows * kVocab * 4, "logits"), ids = Buffer(rows * 4, "tokens");
};

/// The same five products by cuBLASLt, nothing else.
double by_library(Model& m, CublasLt& lt, std::int64_t rows) {
  const Buffer x = random_weights(rows * kInner, 1.0f, 13);
  const Buffer y(rows * kVocab * 4, "products");
  const auto multiply = [&](const Buffer& w, std::int64_t out, std::int64_t in) {
    lt.multiply({x.as<void>(), DType::bf16, rows, in}, {w.as<void>(), DType::bf16, out, in}, false,
                y.as<float>(), m.stream.get());
  };
  return median_replay(m.stream, 9, [&] {
    for (const Layer& l : m.layers) {
      multiply(l.qkv, kQ + 2 * kKv, kHidden);
      multiply(l.o, kHidden, kQ);
      multiply(l.gate_up, 2 * kInner, kHidden);
      multiply(l.down, kHidden, kInner);
    }
    multiply(m.output, kVocab, kHidden);
  });
}

double by_reading(Model& m) {
  const Buffer out(4, "sum");
  const auto read = [&](const Buffer& w) {
    read_bytes(w.as<void>(), w.bytes(), out.as<unsigned>(), m.stream.get());
  };
  return median_replay(m.stream, 9, [&] {
    for (const Layer& l : m.layers) {
      for (const Buffer* w : {&l.qkv, &l.o, &l.gate_up, &l.down}) read(*w);
    }
    read(m.output);
  });
}

void report_decode(Model& m, std::int64_t rows) {
  m.rows = rows;
  const double bytes =
      2.0 * (kLayers * ((2 * kQ + 2 * kKv) * kHidden + 3 * kInner * kHidden) + kVocab * kHidden);
  const double step = median_replay(m.stream, 15, [&] { m.step(); });
  const double qkv = m.per_layer([&](int l) { m.qkv(l); }), out = m.per_layer([&](int l) { m.out(l); }),
               mlp = m.per_layer([&](int l) { m.mlp(l); }),
               head = median_replay(m.stream, 9, [&] { m.head(); });
  std::printf(
      "rows %lld: step without attention %.3f ms (%.2f TB/s)   qkv %.2f  o %.2f  gate-up-down %.2f us a "
      "layer  head %.1f us\n",
      static_cast<long long>(rows), step / 1e3, bytes / step / 1e6, qkv, out, mlp, head);
}

void report_many(Model& m) {
  const auto n = static_cast<std::int64_t>(4096);
  const double flops = 2.0 * static_cast<double>(n) * 3 * kInner * kHidden;
  m.linear.reserve(n, kHidden, kInner, kQ, kKv);
  const Buffer x = random_floats(n * kHidden, 1.0f, 14);
  const Layer& l = m.layers[0];
  const double us = median_replay(m.stream, 5, [&] {
    m.linear.mlp({weight(l.mlp_norm, 0, 1, kHidden),
                  weight(l.gate_up, 0, kInner, kHidden),
                  weight(l.gate_up, kInner, kInner, kHidden),
                  weight(l.down, 0, kHidden, kInner),
                  {},
                  {},
                  {},
                  1e-5f},
                 n, x.as<float>());
  });
  std::printf("gate, up, down for %lld rows: %.0f us, %.0f TFLOP/s\n", static_cast<long long>(n), us,
              flops / us / 1e6);
}

int run(bool quick) {
  const Availability gpu = availability();
  if (!gpu.ok) {
    std::printf("skipped: %s\n", gpu.why.c_str());
    return 77;
  }
  Model m(kFusedRows);
  report_decode(m, 1);
  if (quick) return 0;
  for (const std::int64_t rows : {1, 2, 4, 8}) report_decode(m, rows);
  std::printf("reading the same matrices, a kernel each: %.3f ms\n", by_reading(m) / 1e3);
  std::string found;
  if (const std::unique_ptr<CublasLt> lt = CublasLt::open(found)) {
    for (const std::int64_t rows : {1, 4, 8, 16, 64})
      std::printf("rows %lld by cuBLASLt, products alone: %.3f ms\n", static_cast<long long>(rows),
                  by_library(m, *lt, rows) / 1e3);
  }
  report_many(m);
  return 0;
}

}  // namespace
}  // namespace lode::cuda::bench

int main(int argc, char** argv) {
  try {
    return lode::cuda::bench::run(argc > 1 && std::strcmp(argv[1], "quick") == 0);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
