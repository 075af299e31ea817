// SPDX-License-Identifier: Apache-2.0
// Labels of keys against plain loops: numbers and codes bit for bit, scores in float64; channels that fill no
// eight, steps of zero, NaN and infinities, keys below the sink and behind the far ones.
#include <limits>

#include "harness.h"
#include "kernels/cuda/baselines/label_keys.h"
#include "scores.h"

namespace lode::cuda {
namespace {

using test::OnDevice;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int kKvHeads = 2, kLayers = 2, kTokens = 1300;

/// Keys of kLayers layers and their labels.
struct Store {
  KvLayout layout;
  KeyLabels shape;
  std::vector<float> keys, levels;     // as stored, [L, Hkv, low and step, channels]
  std::vector<std::int32_t> channels;  // [L, Hkv, channels]
  OnDevice<char> on_device;
  OnDevice<float> levels_on_device;
  OnDevice<std::int32_t> channels_on_device;
  OnDevice<char> labels;

  Store(DType type, int d, int count, int bits)
      : layout(layout_of(type, d)),
        shape{.capacity = kTokens + 5,
              .count = count,
              .bits = bits,
              .number_bytes = type == DType::f32 ? 4 : 2},
        keys(make_keys(layout, type)),
        on_device(test::encode(keys, type)),
        levels_on_device(make_levels()),
        channels_on_device(make_channels(d)),
        labels(std::vector<char>(static_cast<std::size_t>(kLayers * shape.layer_bytes(kKvHeads)), 0x55)) {}

  static KvLayout layout_of(DType type, int d) {
    KvLayout layout = {kKvHeads, d, type, 0};
    layout.layer_stride = layout.layer_bytes(kTokens);
    return layout;
  }
  static std::vector<float> make_keys(const KvLayout& layout, DType type) {
    const std::int64_t rows = kLayers * layout.layer_stride / layout.row_bytes();
    std::vector<float> keys = test::normal(static_cast<std::size_t>(rows * layout.head_dim), 11);
    for (float& x : keys) x = test::rounded(x, type);
    for (const std::size_t row : {40u, 200u, 700u})  // such keys count as 0
      keys[row * static_cast<std::size_t>(layout.head_dim) + 3] = row == 200 ? -kInf : NAN;
    return keys;
  }
  const std::vector<float>& make_levels() {
    for (int i = 0; i < kLayers * kKvHeads; ++i) {
      for (int c = 0; c < shape.count; ++c) levels.push_back(-2.0f - 0.01f * static_cast<float>(c % 7));
      for (int c = 0; c < shape.count; ++c)
        levels.push_back(c == 5 ? 0.0f : 0.3f + 0.02f * static_cast<float>((c + i) % 5));
    }
    return levels;
  }
  const std::vector<std::int32_t>& make_channels(int d) {
    for (int i = 0; i < kLayers * kKvHeads; ++i)
      for (int c = 0; c < shape.count; ++c) channels.push_back((c * d + i) / shape.count % d);
    return channels;
  }
  KeyLabels on_gpu(int layer) const {
    KeyLabels one = shape;
    one.labels = labels.get() + layer * shape.layer_bytes(kKvHeads);
    one.levels = levels_on_device.get() + layer * kKvHeads * 2 * shape.count;
    one.channels = channels_on_device.get() + layer * kKvHeads * shape.count;
    return one;
  }
  int channel(int layer, int head, int c) const {
    return channels[static_cast<std::size_t>((layer * kKvHeads + head) * shape.count + c)];
  }
  float level(int layer, int head, bool step, int c) const {
    return levels[static_cast<std::size_t>(((layer * kKvHeads + head) * 2 + (step ? 1 : 0)) * shape.count +
                                           c)];
  }
  /// Channel c of a key's label.
  float number(int layer, int head, int token, int c) const {
    const std::int64_t at =
        (layer * layout.layer_stride + layout.key_offset(head, token)) / layout.row_bytes();
    const float* const key = keys.data() + at * layout.head_dim;
    const bool finite = std::all_of(key, key + layout.head_dim, [](float x) { return std::isfinite(x); });
    return finite ? key[channel(layer, head, c)] : 0.0f;
  }
  int code(int layer, int head, int token, int c) const {
    const double step = level(layer, head, true, c);
    if (!(step > 0.0)) return 0;
    const double at =
        (static_cast<double>(number(layer, head, token, c)) - level(layer, head, false, c)) / step;
    return static_cast<int>(
        std::clamp(std::floor(at + 0.5), 0.0, static_cast<double>((1 << shape.bits) - 1)));
  }
};

struct Form {
  DType type;
  int d, channels, bits;
};
const std::vector<Form> kForms = {{DType::bf16, 128, 16, 4}, {DType::f16, 64, 8, 2},
                                  {DType::f32, 64, 11, 4},   {DType::bf16, 128, 16, 16},
                                  {DType::f32, 128, 40, 16}, {DType::f16, 256, 256, 2}};

LODE_TEST(labels_of_keys) {
  constexpr int kBegin = 4, kEnd = kTokens - 3;
  for (const Form& form : kForms) {
    const Store store(form.type, form.d, form.channels, form.bits);
    Stream stream;
    label_keys(store.on_device.get(), store.layout, kLayers, kBegin, 77, store.on_gpu(0), stream.get());
    label_keys(store.on_device.get(), store.layout, kLayers, 77, kEnd, store.on_gpu(0), stream.get());
    const std::vector<char> found = store.labels.read(stream);
    const int bytes = store.shape.label_bytes(), padded = store.shape.eights() * 8;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < kKvHeads; ++head) {
        for (int token = 0; token < kTokens; ++token) {
          const char* const own = found.data() + layer * store.shape.layer_bytes(kKvHeads) +
                                  (head * store.shape.capacity + token) * bytes;
          if (token < kBegin || token >= kEnd) {
            LODE_CHECK(std::count(own, own + bytes, 0x55) == bytes);
            continue;
          }
          std::vector<float> numbers(static_cast<std::size_t>(padded), 0.0f);
          for (int c = 0; c < padded; ++c) {
            const bool there = c < form.channels;
            if (store.shape.coded()) {
              const int each = 8 / form.bits;
              const int code = static_cast<unsigned char>(own[c / each]) >> form.bits * (c % each) &
                               ((1 << form.bits) - 1);
              LODE_CHECK(code == (there ? store.code(layer, head, token, c) : 0));
            } else if (there) {
              numbers[static_cast<std::size_t>(c)] = store.number(layer, head, token, c);
            }
          }
          if (store.shape.coded()) continue;
          const std::vector<char> expected = test::encode(numbers, form.type);
          LODE_CHECK(std::equal(expected.begin(), expected.end(), own));
        }
      }
    }
  }
}

LODE_TEST(labels_scores) {
  const std::int64_t sink = 3, window = 20, n = kTokens + 40;
  const std::vector<QueryToken> places = {{0, kTokens - 1}, {0, 530}, {0, 5}};
  for (const Form& form : kForms) {
    const Store store(form.type, form.d, form.channels, form.bits);
    Stream stream;
    label_keys(store.on_device.get(), store.layout, kLayers, sink, kTokens, store.on_gpu(0), stream.get());
    for (const int group : {1, 3, 4, 10}) {
      const int heads = group * kKvHeads;
      const auto tokens = static_cast<int>(places.size());
      const auto q = test::normal(static_cast<std::size_t>(tokens * heads * form.d), 3);
      const test::QueriesOnDevice in(store.layout, places, heads, q);
      const OnDevice<float> scores(
          test::poison(static_cast<std::size_t>(tokens * heads) * static_cast<std::size_t>(n)));
      const OnDevice<ExponentialSum> sums(test::poisoned_sums(tokens * heads, n));
      score_labels(*in, store.on_gpu(1), sink, window, n, scores.get(), sums.get(), stream.get());
      const auto found = scores.read(stream);
      test::expect_sums(sums.read(stream), found, places, heads, {sink, window, n});
      test::expect_scores(found, places, heads, {sink, window, n}, 2e-6, [&](int row, std::int64_t at) {
        const int kv = row % heads / group, key = static_cast<int>(at);
        test::Sum sum = {.value = 0.0, .size = 1e-6};
        for (int c = 0; c < form.channels; ++c) {
          const double value = store.shape.coded() ? static_cast<double>(store.level(1, kv, true, c)) *
                                                         store.code(1, kv, key, c)
                                                   : static_cast<double>(store.number(1, kv, key, c));
          sum.add(value * 0.125 * q[static_cast<std::size_t>(row * form.d + store.channel(1, kv, c))]);
        }
        return sum;
      });
    }
  }
}

}  // namespace
}  // namespace lode::cuda
