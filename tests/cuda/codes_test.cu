// SPDX-License-Identifier: Apache-2.0
// Codes of keys against plain loops: bit for bit, with ties between centroids, fewer centroids than codes,
// NaN and infinities; scores in float64, of several sequences, of parts that share bytes and tables that do
// not fit a block together.
#include <limits>

#include "harness.h"
#include "kernels/cuda/baselines/pq_encode.h"
#include "scores.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int kKvHeads = 2, kLayers = 2, kSequences = 2, kTokens = 1300;

struct Form {
  DType type;
  int d, parts, bits, levels;
};
const std::vector<Form> kForms = {{DType::bf16, 128, 2, 6, 64},  {DType::f16, 64, 8, 4, 16},
                                  {DType::f32, 64, 1, 5, 20},    {DType::bf16, 96, 3, 3, 7},
                                  {DType::f32, 256, 2, 8, 200},  {DType::f16, 128, 128, 2, 3},
                                  {DType::bf16, 80, 40, 7, 128}, {DType::f32, 128, 1, 1, 1}};

/// Keys of kSequences sequences and kLayers layers, and their codes.
struct Store {
  Form form;
  KvLayout layout;
  KeyCodes shape;
  std::vector<float> keys[kSequences], centroids;  // as stored, [L, Hkv, parts, width + 1, entries]
  std::vector<OnDevice<char>> on_device;
  OnDevice<float> centroids_on_device;
  OnDevice<std::uint8_t> codes;

  explicit Store(const Form& f)
      : form(f),
        layout(layout_of(f)),
        shape{.capacity = kTokens + 5, .parts = f.parts, .width = f.d / f.parts, .bits = f.bits},
        centroids_on_device(make_centroids()),
        codes(std::vector<std::uint8_t>(static_cast<std::size_t>(kSequences * sequence_bytes()), 0x55)) {
    for (int sequence = 0; sequence < kSequences; ++sequence) make_keys(sequence);
  }
  std::int64_t sequence_bytes() const { return kLayers * shape.layer_bytes(kKvHeads); }
  static KvLayout layout_of(const Form& form) {
    KvLayout layout = {kKvHeads, form.d, form.type, 0};
    layout.layer_stride = layout.layer_bytes(kTokens);
    return layout;
  }
  void make_keys(int sequence) {
    const std::int64_t rows = kLayers * layout.layer_stride / layout.row_bytes();
    std::vector<float>& own = keys[sequence];
    own = test::normal(static_cast<std::size_t>(rows * form.d), 11 + static_cast<unsigned>(sequence));
    for (float& x : own) x = test::rounded(x, form.type);
    for (const std::size_t row : {40u, 200u, 700u})  // such keys count as 0
      own[row * static_cast<std::size_t>(form.d) + 3] = row == 200 ? -kInf : NAN;
    on_device.emplace_back(test::encode(own, form.type));
  }
  float& centroid(int layer, int head, int part, int channel, int which) {
    return centroids[static_cast<std::size_t>((layer * kKvHeads + head) * shape.centroids_of_head() +
                                              (part * (shape.width + 1) + channel) * shape.entries() +
                                              which)];
  }
  const std::vector<float>& make_centroids() {
    centroids = test::normal(static_cast<std::size_t>(kLayers * kKvHeads * shape.centroids_of_head()), 12);
    for (int of = 0; of < kLayers * kKvHeads * form.parts; ++of) {
      const int layer = of / form.parts / kKvHeads, head = of / form.parts % kKvHeads, part = of % form.parts;
      for (int which = 0; which < shape.entries(); ++which) {
        float norm = 0.0f;
        for (int c = 0; c < shape.width; ++c) {
          float& x = centroid(layer, head, part, c, which);
          if (which % 5 == 4) x = centroid(layer, head, part, c, which / 2);  // ties
          if (which >= form.levels) x = 0.0f;
          norm += x * x;
        }
        centroid(layer, head, part, shape.width, which) = which < form.levels ? -0.5f * norm : -kInf;
      }
    }
    return centroids;
  }
  KeyCodes on_gpu(int sequence, int layer) const {
    KeyCodes one = shape;
    one.sequence_stride = sequence_bytes();
    one.codes = codes.get() + sequence * one.sequence_stride + layer * shape.layer_bytes(kKvHeads);
    one.centroids = centroids_on_device.get() + layer * kKvHeads * shape.centroids_of_head();
    return one;
  }
  void code_all(std::int64_t begin, std::int64_t end, StreamHandle stream) const {
    for (int sequence = 0; sequence < kSequences; ++sequence)
      code_keys(on_device[static_cast<std::size_t>(sequence)].get(), layout, kLayers, begin, end,
                on_gpu(sequence, 0), stream);
  }
  int code(int sequence, int layer, int head, int key, int part) {
    const std::int64_t at =
        (layer * layout.layer_stride + layout.key_offset(head, key)) / layout.row_bytes() * form.d;
    const float* const row = keys[sequence].data() + at;
    const bool finite = std::all_of(row, row + form.d, [](float x) { return std::isfinite(x); });
    float high = -kInf;
    int nearest = 0;
    for (int which = 0; which < form.levels; ++which) {
      float sum = 0.0f;
      for (int c = 0; c < shape.width; ++c)
        sum =
            std::fma(centroid(layer, head, part, c, which), finite ? row[part * shape.width + c] : 0.0f, sum);
      sum += centroid(layer, head, part, shape.width, which);
      if (sum > high) high = sum, nearest = which;
    }
    return nearest;
  }
  int found(const std::vector<std::uint8_t>& all, int sequence, int layer, int head, int key,
            int part) const {
    const int plane = shape.nibbles() ? part / 2 : part;
    const std::uint8_t byte =
        all[static_cast<std::size_t>(sequence * sequence_bytes() + layer * shape.layer_bytes(kKvHeads) +
                                     (head * shape.planes() + plane) * shape.capacity + key)];
    return shape.nibbles() ? byte >> part % 2 * 4 & 15 : byte;
  }
};

LODE_TEST(codes_of_keys) {
  constexpr int kBegin = 4, kEnd = kTokens - 3;
  for (const Form& form : kForms) {
    Store store(form);
    Stream stream;
    store.code_all(kBegin, 77, stream.get());
    store.code_all(77, 78, stream.get());
    store.code_all(78, kEnd, stream.get());
    const auto all = store.codes.read(stream);
    for (int of = 0; of < kSequences * kLayers * kKvHeads; ++of) {
      const int sequence = of / kKvHeads / kLayers, layer = of / kKvHeads % kLayers, head = of % kKvHeads;
      for (int key = 0; key < kTokens + 5; ++key) {
        const bool coded = key >= kBegin && key < kEnd;
        for (int part = 0; part < form.parts; ++part)
          LODE_CHECK(store.found(all, sequence, layer, head, key, part) ==
                     (coded                   ? store.code(sequence, layer, head, key, part)
                      : store.shape.nibbles() ? 5
                                              : 0x55));
      }
    }
  }
}

LODE_TEST(codes_scores) {
  const std::int64_t sink = 3, window = 20, n = kTokens + 40;
  const std::vector<QueryToken> places = {{0, kTokens - 1}, {1, 530}, {0, 5}, {1, 22}};
  const auto tokens = static_cast<int>(places.size());
  for (const Form& form : kForms) {
    Store store(form);
    Stream stream;
    store.code_all(sink, kTokens, stream.get());
    const auto codes = store.codes.read(stream);
    for (const int group : {1, 3, 4, 10}) {
      const int heads = group * kKvHeads;
      const auto q = test::normal(static_cast<std::size_t>(tokens * heads * form.d), 3);
      const test::QueriesOnDevice in(store.layout, places, heads, q);
      const OnDevice<float> scores(test::poison(static_cast<std::size_t>(tokens * heads * n)));
      const OnDevice<ExponentialSum> sums(test::poisoned_sums(tokens * heads, n));
      const Buffer tables(code_tables_bytes(tokens, heads, kKvHeads, store.shape), "tables");
      fill(tables.as<void>(), 0xff, tables.bytes(), stream.get());
      score_codes(*in, store.on_gpu(0, 1), sink, window, n, tables.as<void>(), scores.get(), sums.get(),
                  stream.get());
      const auto found = scores.read(stream);
      test::expect_sums(sums.read(stream), found, places, heads, {sink, window, n});
      // What each centroid adds: [tokens * heads, parts, levels].
      std::vector<test::Sum> table;
      for (int row = 0; row < tokens * heads; ++row) {
        for (int part = 0; part < form.parts; ++part) {
          for (int which = 0; which < form.levels; ++which) {
            test::Sum& sum = table.emplace_back();
            for (int c = 0; c < store.shape.width; ++c)
              sum.add(0.125 * store.centroid(1, row % heads / group, part, c, which) *
                      q[static_cast<std::size_t>(row * form.d + part * store.shape.width + c)]);
          }
        }
      }
      test::expect_scores(found, places, heads, {sink, window, n}, 2e-6, [&](int row, std::int64_t key) {
        const QueryToken& at = places[static_cast<std::size_t>(row / heads)];
        test::Sum all = {.value = 0.0, .size = 1e-6};
        for (int part = 0; part < form.parts; ++part) {
          const int which =
              store.found(codes, at.sequence, 1, row % heads / group, static_cast<int>(key), part);
          const test::Sum& one =
              table[static_cast<std::size_t>((row * form.parts + part) * form.levels + which)];
          all.value += one.value, all.size += one.size;
        }
        return all;
      });
    }
  }
}

}  // namespace
}  // namespace lode::cuda
