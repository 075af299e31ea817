// SPDX-License-Identifier: Apache-2.0
// The linear parts of Llama-3.1-8B with block-quantised weights in tiles: a decode step without its attention
// as one graph, by kind of step, beside the read of as many bytes; products of many rows beside those of bf16.
//   usage: bench_tiles [quick]
#include <cstring>
#include <memory>

#include "bench.h"
#include "kernels/cuda/linear/linear.h"

namespace lode::cuda::bench {
namespace {

using enum TileFormat;

constexpr int kLayers = 32, kQueryHeads = 32, kKvHeads = 8, kHeadDim = 128;
constexpr std::int64_t kHidden = 4096, kInner = 14336, kVocab = 128256;
constexpr std::int64_t kQ = kQueryHeads * kHeadDim, kKv = kKvHeads * kHeadDim;

/// A matrix in tiles whose bytes are those of random bf16 numbers, or of bf16 where the format is none.
struct Matrix {
  Matrix(TileFormat format, std::int64_t rows, std::int64_t cols, unsigned seed)
      : memory(random_weights((format == none ? rows * cols * 2 : tiled_bytes(format, rows, cols)) / 2,
                              format == none ? 0.02f : 1.0f, seed)),
        weight{memory.as<void>(), DType::bf16, rows, cols, format} {}
  Buffer memory;
  DeviceWeight weight;
};

/// Formats of a file: "Q4_K_M" has finer v and down in every other layer.
struct Mix {
  const char* name;
  TileFormat usual, fine, output;
};

struct Layer {
  Layer(const Mix& mix, int index)
      : fine(index % 2 == 0 ? mix.fine : mix.usual),
        q(mix.usual, kQ, kHidden, 2),
        k(mix.usual, kKv, kHidden, 3),
        v(fine, kKv, kHidden, 4),
        o(mix.usual, kHidden, kQ, 5),
        gate(mix.usual, kInner, kHidden, 6),
        up(mix.usual, kInner, kHidden, 7),
        down(fine, kHidden, kInner, 8) {}
  TileFormat fine;
  Matrix q, k, v, o, gate, up, down;
  Buffer norm = random_floats(kHidden, 1.0f, 1), mlp_norm = random_floats(kHidden, 1.0f, 4);
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const Matrix* m : {&q, &k, &v, &o, &gate, &up, &down}) sum += m->memory.bytes();
    return sum;
  }
};

struct Model {
  Model(const Mix& mix, std::int64_t most_rows, int layer_count)
      : linear(stream.get(), Precision::fast), output(mix.output, kVocab, kHidden, 9) {
    for (int l = 0; l < layer_count; ++l) layers.push_back(std::make_unique<Layer>(mix, l));
    layout = {kKvHeads, kHeadDim, DType::bf16, 0};
    layout.layer_stride = layout.layer_bytes(most_rows);
    store = Buffer(layout.layer_stride, "keys and values");
    std::vector<QueryToken> places;
    for (int r = 0; r < most_rows; ++r) places.push_back({0, r});
    const char* const base = store.as<char>();
    bases = Buffer(8, "bases");
    tokens = Buffer(most_rows * static_cast<std::int64_t>(sizeof(QueryToken)), "places");
    copy(bases.as<void>(), &base, bases.bytes(), nullptr);
    copy(tokens.as<void>(), places.data(), tokens.bytes(), nullptr);
    x = random_floats(most_rows * kHidden, 1.0f, 10);
    q = random_floats(most_rows * kQ, 1.0f, 11);
    logits = Buffer(std::min<std::int64_t>(most_rows, 32) * kVocab * 4, "logits");
    linear.reserve(most_rows, kHidden, kInner, kQ, kKv);
    linear.reserve_panel(Linear::panel_bytes(kInner, kHidden, Precision::fast));
    LODE_CUDA(cudaDeviceSynchronize());
  }
  void qkv(const Layer& layer, std::int64_t rows) {
    Linear::QkvArguments a;
    a.x = x.as<float>();
    a.norm = {layer.norm.as<void>(), DType::f32, 1, kHidden};
    a.q = layer.q.weight, a.k = layer.k.weight, a.v = layer.v.weight;
    a.frequencies = frequencies.as<float>();
    a.q_out = q.as<float>();
    Queries where;
    where.tokens = tokens.as<QueryToken>();
    where.bases = bases.as<const char*>();
    where.layout = layout;
    where.count = static_cast<int>(rows);
    where.query_heads = kQueryHeads;
    linear.qkv(a, where);
  }
  void out(const Layer& layer, std::int64_t rows) {
    linear.project_out(q.as<float>(), rows, layer.o.weight, {}, x.as<float>());
  }
  void mlp(const Layer& layer, std::int64_t rows) {
    linear.mlp({{layer.mlp_norm.as<void>(), DType::f32, 1, kHidden},
                layer.gate.weight,
                layer.up.weight,
                layer.down.weight,
                {},
                {},
                {},
                1e-5f},
               rows, x.as<float>());
  }
  void head(std::int64_t rows) {
    linear.head(x.as<float>(), rows, {layers[0]->norm.as<void>(), DType::f32, 1, kHidden}, 1e-5f, output.weight,
                logits.as<float>());
  }
  void step(std::int64_t rows) {
    for (const auto& layer : layers) {
      qkv(*layer, rows);
      out(*layer, rows);
      mlp(*layer, rows);
    }
    head(rows);
  }
  template <class Body>
  double per_layer(const Body& body) {
    const auto all = [&] {
      for (const auto& layer : layers) body(*layer);
    };
    return median_replay(stream, 9, all) / static_cast<double>(layers.size());
  }

  Stream stream;
  Linear linear;
  std::vector<std::unique_ptr<Layer>> layers;
  Matrix output;
  KvLayout layout;
  Buffer store, bases, tokens, x, q, logits, frequencies = random_floats(kHeadDim / 2, 0.1f, 12);
};

void report_decode(const Mix& mix, bool quick) {
  Model m(mix, 32, kLayers);
  std::int64_t bytes = m.output.memory.bytes();
  for (const auto& layer : m.layers) bytes += layer->bytes();
  const Buffer out(4, "sum");
  const double read = median_replay(m.stream, 9, [&] {
    for (const auto& l : m.layers) {
      for (const Matrix* w : {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down})
        read_bytes(w->memory.as<void>(), w->memory.bytes(), out.as<unsigned>(), m.stream.get());
    }
    read_bytes(m.output.memory.as<void>(), m.output.memory.bytes(), out.as<unsigned>(), m.stream.get());
  });
  std::printf("%s: %.2f GB, %.3f ms at 4.58 TB/s, read a kernel each %.3f ms\n", mix.name,
              static_cast<double>(bytes) / 1e9, static_cast<double>(bytes) / 4.58e9, read / 1e3);
  for (const std::int64_t rows : {1, 2, 4, 8, 16, 32}) {
    if (quick && rows > 1) break;
    const double step = median_replay(m.stream, 15, [&] { m.step(rows); });
    std::printf("  rows %2lld: step without attention %.3f ms (%.2f TB/s)   qkv %.2f  o %.2f  mlp %.2f us a layer  head %.1f us\n",
                static_cast<long long>(rows), step / 1e3, static_cast<double>(bytes) / step / 1e6,
                m.per_layer([&](const Layer& l) { m.qkv(l, rows); }),
                m.per_layer([&](const Layer& l) { m.out(l, rows); }),
                m.per_layer([&](const Layer& l) { m.mlp(l, rows); }), median_replay(m.stream, 9, [&] { m.head(rows); }));
  }
}

/// A layer's linear parts for a chunk of a prefill.
void report_prefill(const Mix& mix, std::int64_t rows) {
  Model m(mix, rows, 2);
  const double us = m.per_layer([&](const Layer& l) {
    m.qkv(l, rows);
    m.out(l, rows);
    m.mlp(l, rows);
  });
  const double flops = 2.0 * static_cast<double>(rows) * ((2 * kQ + 2 * kKv) * kHidden + 3 * kInner * kHidden);
  std::printf("%s: a layer's linear parts for %lld rows %.0f us, %.0f TFLOP/s\n", mix.name,
              static_cast<long long>(rows), us, flops / us / 1e6);
}

int run(bool quick) {
  const Availability gpu = availability();
  if (!gpu.ok) {
    std::printf("skipped: %s\n", gpu.why.c_str());
    return 77;
  }
  constexpr Mix kMixes[] = {{"Q4_K", q4_k, q4_k, q4_k}, {"Q4_K_M", q4_k, q6_k, q6_k}, {"Q8_0", q8_0, q8_0, q8_0},
                            {"Q6_K", q6_k, q6_k, q6_k}, {"Q5_K", q5_k, q5_k, q5_k},   {"Q4_0", q4_0, q4_0, q4_0}};
  for (const Mix& mix : kMixes) report_decode(mix, quick);
  for (const std::int64_t rows : {2048, 4096}) {
    report_prefill({"bf16", none, none, none}, rows);
    for (const Mix& mix : {kMixes[0], kMixes[1], kMixes[2]}) report_prefill(mix, rows);
  }
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
