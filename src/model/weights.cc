// SPDX-License-Identifier: Apache-2.0
#include "model/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>

#include "base/finite.h"
#include "base/hash.h"
#include "base/rng.h"
#include "base/text.h"
#include "base/threads.h"
#include "kernels/dequantise.h"
#include "lodestone/error.h"
#include "model/family.h"
#include "model/weight_files.h"
#include "model/weight_places.h"
#include "model/weight_shapes.h"

namespace lode {

namespace {

/// On all threads of a pool, or on this one.
void for_each_item(ThreadPool* pool, std::int64_t items, const std::function<void(std::int64_t)>& body) {
  if (pool != nullptr) return pool->for_each(items, [&](std::int64_t item, int) { body(item); });
  for (std::int64_t item = 0; item < items; ++item) body(item);
}

/// A copy of a weight whose rows (of a vector: numbers) are in that order within each head.
void reorder(Weight& w, std::span<const std::int64_t> order, std::vector<std::unique_ptr<std::byte[]>>& owned,
             ThreadPool* pool) {
  if (w.data == nullptr) return;
  const bool vector = w.rows == 1;
  const std::int64_t unit = bytes_of(w.type, vector ? 1 : w.cols), rows = vector ? w.cols : w.rows,
                     d = std::ssize(order);
  LODE_ASSERT(rows % d == 0);
  std::byte* const to =
      owned.emplace_back(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(rows * unit)))
          .get();
  for_each_item(pool, rows / d, [&](std::int64_t head) {
    for (std::int64_t row = head * d; row < (head + 1) * d; ++row) {
      const std::int64_t from = head * d + order[static_cast<std::size_t>(row % d)];
      std::memcpy(to + row * unit, w.data + from * unit, static_cast<std::size_t>(unit));
    }
  });
  w.data = to;
}

void reorder_heads(ModelWeights& m, const ModelConfig& c, bool pairs,
                   std::vector<std::unique_ptr<std::byte[]>>& owned, ThreadPool* pool) {
  const auto order = head_row_order(c, pairs);
  if (order.empty()) return;
  for (LayerWeights& w : m.layers)
    for (Weight* weight : {&w.q, &w.k, &w.q_bias, &w.k_bias, &w.q_norm, &w.k_norm})
      reorder(*weight, order, owned, pool);
}

bool finite(WeightType type, const std::byte* data, std::int64_t n) {
  if (type == WeightType::f32) return all_finite<std::uint32_t>(data, n, 0x7f800000u);
  if (type == WeightType::f16) return all_finite<std::uint16_t>(data, n, 0x7c00);
  if (type == WeightType::bf16) return all_finite<std::uint16_t>(data, n, 0x7f80);
  return blocks_finite(type, data, n);
}

/// A header of odd length leaves the data at odd addresses, which is legal in a file; kernels read whole
/// numbers, but blocks byte by byte.
bool misaligned(const Weight& w) {
  const auto size = static_cast<std::uintptr_t>(layout_of(w.type).block_bytes);
  return is_plain(w.type) && reinterpret_cast<std::uintptr_t>(w.data) % size != 0;
}

/// As fingerprints have it: plain types had these names before there were others.
std::string_view fingerprint_name(WeightType type) {
  return is_plain(type) ? name_of(plain_dtype(type)) : name_of(type);
}

/// Copies weights at odd addresses to `copies` and points to them there.
void align(ModelWeights& m, std::vector<std::unique_ptr<std::byte[]>>& owned) {
  constexpr std::int64_t kAlignment = 16;  // what the allocator gives
  std::int64_t bytes = 0;
  for_each_weight(m, [&](const std::string&, const Weight& w) {
    if (misaligned(w)) bytes += (bytes_of(w) + kAlignment - 1) / kAlignment * kAlignment;
  });
  if (bytes == 0) return;
  std::byte* at =
      owned.emplace_back(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes))).get();
  for_each_weight(m, [&](const std::string&, Weight& w) {
    if (!misaligned(w)) return;
    std::memcpy(at, w.data, static_cast<std::size_t>(bytes_of(w)));
    w.data = at;
    at += (bytes_of(w) + kAlignment - 1) / kAlignment * kAlignment;
  });
}

/// Names, shapes, types, and some bytes of every weight: enough to tell models apart without reading all of a
/// large one.
std::string fingerprint_of(const ModelWeights& m) {
  constexpr std::int64_t kSample = 4096;
  Hasher hasher;
  for_each_weight(m, [&](const std::string& name, const Weight& w) {
    const std::string line = fmt::format("{} {} {} {}\n", name, w.rows, w.cols, fingerprint_name(w.type));
    hasher.add(std::as_bytes(std::span(line)));
    const std::int64_t size = bytes_of(w), sample = std::min(size, kSample);
    for (const std::int64_t at : {std::int64_t{0}, (size - sample) / 2, size - sample}) {
      hasher.add({w.data + at, static_cast<std::size_t>(sample)});
    }
  });
  return hasher.hex();
}

/// The first weight, in the order of their places, that holds a NaN or an infinity; empty: none does. Some rows
/// at a time, so that all threads have work to the end.
std::string first_not_finite(const ModelWeights& m, ThreadPool* pool) {
  constexpr std::int64_t kPieceBytes = std::int64_t{8} << 20;
  struct Piece {
    std::string name;
    const Weight* weight = nullptr;
    std::int64_t row = 0, rows = 0;
  };
  std::vector<Piece> pieces;
  for_each_weight(m, [&](const std::string& name, const Weight& w) {
    if (w.data == nullptr) return;
    const std::int64_t most =
        std::max<std::int64_t>(1, kPieceBytes / std::max<std::int64_t>(1, bytes_of(w.type, w.cols)));
    for (std::int64_t row = 0; row < w.rows; row += most)
      pieces.push_back({name, &w, row, std::min(most, w.rows - row)});
  });
  std::vector<char> bad(pieces.size(), 0);
  for_each_item(pool, std::ssize(pieces), [&](std::int64_t item) {
    const Piece& piece = pieces[static_cast<std::size_t>(item)];
    const Weight& w = *piece.weight;
    const std::byte* const from = w.data + piece.row * bytes_of(w.type, w.cols);
    bad[static_cast<std::size_t>(item)] = finite(w.type, from, piece.rows * w.cols) ? 0 : 1;
  });
  const auto found = std::find(bad.begin(), bad.end(), 1);
  return found == bad.end() ? std::string() : pieces[static_cast<std::size_t>(found - bad.begin())].name;
}

/// A weight without data.
Weight sized_of(Place place, const ModelConfig& c, int layer, WeightType type) {
  if (!has_weight(place, c, layer)) return {};
  const auto shape = shape_of(place, c, layer);
  const bool vector = shape.size() == 1, small = vector || place == Place::delta_conv;  // never quantised
  const std::int64_t rows = vector ? 1 : shape[shape.size() - 2];
  return {nullptr, small && !is_plain(type) ? WeightType::f32 : type, rows, shape.back()};
}

void set_delta_shapes(DeltaWeights& w, const ModelConfig& c, int layer, WeightType type) {
  for (const auto& [place, weight] : {std::pair{Place::delta_qkv, &w.qkv},
                                      {Place::delta_z, &w.z},
                                      {Place::delta_b, &w.b},
                                      {Place::delta_a, &w.a},
                                      {Place::delta_conv, &w.conv},
                                      {Place::delta_dt_bias, &w.dt_bias},
                                      {Place::delta_decay, &w.decay},
                                      {Place::delta_norm, &w.norm},
                                      {Place::delta_out, &w.out}})
    *weight = sized_of(place, c, layer, type);
}

/// What random() fills: no biases, and no output when it is tied.
void set_shapes(ModelWeights& m, const ModelConfig& c, WeightType type) {
  const auto sized = [&](Place place, int layer) { return sized_of(place, c, layer, type); };
  m.embedding = sized(Place::embedding, -1);
  m.final_norm = sized(Place::final_norm, -1);
  if (!c.tied_embeddings) m.output = sized(Place::output, -1);
  m.layers.resize(static_cast<std::size_t>(c.layers));
  for (int i = 0; i < c.layers; ++i) {
    LayerWeights& w = m.layers[static_cast<std::size_t>(i)];
    w.attention_norm = sized(Place::attention_norm, i);
    w.mlp_norm = sized(Place::mlp_norm, i);
    w.q = sized(Place::q, i);
    if (const Weight both = sized(Place::q_and_gate, i); both.rows > 0) {
      w.q = w.attention_gate = both;
      w.q.rows = w.attention_gate.rows = both.rows / 2;
    }
    set_delta_shapes(w.delta, c, i, type);
    w.k = sized(Place::k, i);
    w.v = sized(Place::v, i);
    w.q_norm = sized(Place::q_norm, i);
    w.k_norm = sized(Place::k_norm, i);
    w.o = sized(Place::o, i);
    w.gate = sized(Place::gate, i);
    w.up = sized(Place::up, i);
    w.down = sized(Place::down, i);
    w.sinks = sized(Place::sinks, i);
    if (!c.plan.layer(i).experts) continue;
    w.router = sized(Place::router, i);
    w.shared_gate = sized(Place::shared_gate, i);
    const ExpertWeights expert = {.gate = sized(Place::expert_gate, i),
                                  .up = sized(Place::expert_up, i),
                                  .down = sized(Place::expert_down, i),
                                  .gate_bias = {},
                                  .up_bias = {},
                                  .down_bias = {}};
    w.experts.assign(static_cast<std::size_t>(c.plan.experts.count), expert);
  }
}

template <class T>
T rounded_to(float x) {
  if constexpr (std::is_same_v<T, float>) return x;
  if constexpr (std::is_same_v<T, bf16>) return to_bf16(x);
  if constexpr (std::is_same_v<T, f16>) return to_f16(x);
}

/// Uniform with the variance of a usual initialisation, four values of 16 bits from each draw: normals for
/// billions of weights would take minutes.
template <class T>
void fill_uniform(T* out, std::int64_t n, float width, Rng rng) {
  constexpr int kPerDraw = 4;
  const float step = width / 32768.0f;
  for (std::int64_t i = 0; i < n; i += kPerDraw) {
    std::uint64_t bits = rng.next();
    for (std::int64_t j = i; j < std::min(n, i + kPerDraw); ++j, bits >>= 16) {
      out[j] = rounded_to<T>(step * (static_cast<float>(static_cast<std::int16_t>(bits & 0xffff)) + 0.5f));
    }
  }
}

template <class T>
void fill_as(T* out, const Weight& w, bool norm, Rng rng) {
  if (norm) return void(std::fill_n(out, w.cols, rounded_to<T>(1.0f)));
  fill_uniform(out, w.rows * w.cols, std::sqrt(3.0f / static_cast<float>(w.cols)), rng);
}

void fill(const Weight& w, std::byte* out, bool norm, Rng rng) {
  if (w.type == WeightType::f32) return fill_as(reinterpret_cast<float*>(out), w, norm, rng);
  if (w.type == WeightType::f16) return fill_as(reinterpret_cast<f16*>(out), w, norm, rng);
  fill_as(reinterpret_cast<bf16*>(out), w, norm, rng);
}

}  // namespace

ModelWeights ModelWeights::read(const std::filesystem::path& dir, const ModelConfig& c, bool check_finite) {
  return read(open_weight_files(dir), c, check_finite);
}

ModelWeights ModelWeights::read(WeightFiles&& files, const ModelConfig& c, bool check_finite,
                                ThreadPool* pool) {
  ModelWeights m;
  for (const auto& [name, tensor] : files.tensors) ++m.types[tensor.type_name];
  m.owned_ = take_weights(files, c, m);
  m.files_ = std::move(files.files);
  const Family& family = family_of(c);
  reorder_heads(m, c, files.gguf ? family.gguf_pairs : family.folder_pairs, m.owned_, pool);
  align(m, m.owned_);
  const auto arena = std::make_shared<HugeArena>();
  for_each_weight(m, [&](const std::string&, Weight& w) {
    if (!is_plain(w.type)) w.tiles = std::make_shared<LazyTiles>(arena);
  });
  if (c.tied_embeddings) m.output = m.embedding;
  for_each_weight(m, [&](const std::string&, const Weight& w) { m.bytes += bytes_of(w); });
  m.fingerprint = fingerprint_of(m);
  if (!check_finite) return m;
  if (const std::string name = first_not_finite(m, pool); !name.empty())
    throw InputError(
        fmt::format("{}: weight '{}' holds a NaN or an infinity: the file is damaged", files.where, name));
  return m;
}

ModelWeights ModelWeights::shapes(const ModelConfig& c, WeightType type) {
  ModelWeights m;
  if (const std::int64_t block = layout_of(type).block;
      c.hidden % block != 0 || c.intermediate % block != 0 || c.query_heads * c.head_dim % block != 0)
    throw InputError(
        fmt::format("expected matrices of whole blocks of {} columns for {} weights, found {}, {} and {}",
                    block, name_of(type), c.hidden, c.intermediate, c.query_heads * c.head_dim));
  set_shapes(m, c, type);
  for_each_weight(
      m, [&](const std::string&, const Weight& w) { m.bytes += lode::bytes_of(w.type, w.rows * w.cols); });
  if (c.tied_embeddings) m.output = m.embedding;
  m.fingerprint = "shapes";
  return m;
}

ModelWeights ModelWeights::random(const ModelConfig& c, DType type, std::uint64_t seed) {
  ModelWeights m;
  set_shapes(m, c, weight_type_of(type));
  for_each_weight(m,
                  [&](const std::string&, const Weight& w) { m.bytes += w.rows * w.cols * bytes_of(type); });
  std::byte* at =
      m.owned_.emplace_back(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(m.bytes)))
          .get();
  std::uint64_t stream = 0;
  for_each_weight(m, [&](const std::string& name, Weight& w) {
    if (w.rows == 0) return;
    w.data = at;
    fill(w, at, name.ends_with("norm"), Rng(hash_seed(seed, stream++)));
    at += bytes_of(w);
  });
  if (c.tied_embeddings) m.output = m.embedding;
  m.fingerprint = fingerprint_of(m);
  return m;
}

}  // namespace lode
