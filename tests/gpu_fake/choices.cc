// SPDX-License-Identifier: Apache-2.0
// Kernels of the played GPU that index keys and choose among them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "ann/packed_codes.h"
#include "ann/product_quantizer.h"
#include "base/rng.h"
#include "gpu/index/device_keys.h"
#include "gpu_fake/play.h"
#include "kernels/cuda/baselines/label_keys.h"
#include "kernels/cuda/baselines/page_bounds.h"
#include "kernels/cuda/baselines/pq_encode.h"
#include "kernels/cuda/baselines/probed_keys.h"
#include "kernels/cuda/device/random.h"
#include "kernels/cuda/saap/buckets.h"
#include "kernels/cuda/select/join_lists.h"
#include "kernels/cuda/select/select.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode::cuda {

namespace {

/// Where the bounds of a page begin.
char* page_at(const PageBounds& bounds, const KvLayout& layout, std::int64_t layer, std::int64_t head,
              std::int64_t page) {
  return bounds.bounds + layer * bounds.layer_bytes(layout) +
         (head * bounds.capacity + page) * bounds.page_bytes(layout);
}
ChannelLevels levels_at(const float* levels, std::int64_t head, std::int64_t channels, int bits) {
  ChannelLevels of;
  of.bits = bits;
  of.low.assign(levels + head * 2 * channels, levels + (head * 2 + 1) * channels);
  of.step.assign(levels + (head * 2 + 1) * channels, levels + (head * 2 + 2) * channels);
  return of;
}
void put_code(char* codes, std::int64_t nth, int bits, std::uint32_t code) {
  char& byte = codes[nth * bits / 8];
  byte = static_cast<char>(static_cast<unsigned char>(byte) | code << nth * bits % 8);
}
int code_at(const char* codes, std::int64_t nth, int bits) {
  return static_cast<unsigned char>(codes[nth * bits / 8]) >> nth * bits % 8 & ((1 << bits) - 1);
}

void bound_page(const char* base, const KvLayout& layout, std::int64_t layer, int head, std::int64_t page,
                const PageBounds& bounds) {
  const std::int64_t d = layout.head_dim;
  std::vector<float> both(static_cast<std::size_t>(2 * d), -INFINITY);  // largest, least
  std::fill(both.begin() + d, both.end(), INFINITY);
  for (std::int64_t i = 0; i < bounds.page; ++i) {
    std::vector<float> key = widened(
        base + layer * layout.layer_stride + layout.key_offset(head, bounds.sink + page * bounds.page + i),
        layout.type, d);
    if (!std::all_of(key.begin(), key.end(), [](float x) { return std::isfinite(x); }))
      std::fill(key.begin(), key.end(), 0.0f);
    for (std::size_t c = 0; c < key.size(); ++c) {
      both[c] = std::max(both[c], key[c]);
      both[key.size() + c] = std::min(both[key.size() + c], key[c]);
    }
  }
  char* const to = page_at(bounds, layout, layer, head, page);
  if (!bounds.coded())
    return kernels().narrow(both.data(), 2 * d, layout.type, reinterpret_cast<std::byte*>(to));
  const ChannelLevels levels = levels_at(bounds.levels, layer * layout.kv_heads + head, d, bounds.bits);
  std::memset(to, 0, static_cast<std::size_t>(bounds.page_bytes(layout)));
  for (std::int64_t b = 0; b < 2 * d; ++b) {
    const auto rounding = b < d ? ChannelLevels::Rounding::up : ChannelLevels::Rounding::down;
    put_code(to, b, bounds.bits, levels.code(b % d, both[static_cast<std::size_t>(b)], rounding));
  }
}

double score_page(const Queries& in, const PageBounds& bounds, std::int64_t query, int head,
                  std::int64_t page) {
  const std::int64_t d = in.layout.head_dim;
  const int kv_head = head / (in.query_heads / in.layout.kv_heads);
  const char* const from =
      page_at(bounds, in.layout, 0, kv_head, page) + in.tokens[query].sequence * bounds.sequence_stride;
  const float* const q = in.q + (query * in.query_heads + head) * d;
  const auto stored = bounds.coded() ? std::vector<float>{} : widened(from, in.layout.type, 2 * d);
  double sum = 0.0;
  for (std::int64_t b = 0; b < 2 * d; ++b) {
    const double value = bounds.coded() ? static_cast<double>(code_at(from, b, bounds.bits)) *
                                              bounds.levels[(2 * kv_head + 1) * d + b % d]
                                        : static_cast<double>(stored[static_cast<std::size_t>(b)]);
    sum += static_cast<double>(b < d ? std::max(q[b % d], 0.0f) : std::min(q[b % d], 0.0f)) * value;
  }
  return sum;
}

/// The rows of one list, rising.
std::vector<std::int32_t> rows_of_pages(const float* scores, const PageRule& rule, std::int64_t query) {
  const std::int64_t far =
      std::max<std::int64_t>(0, rule.tokens[query].position + 1 - rule.window - rule.sink);
  const std::int64_t pages = far / rule.page, budget = std::min<std::int64_t>(far, rule.budget[query]);
  std::vector<std::int32_t> order, rows;
  for (std::int64_t page = pages; page-- > 0;) order.push_back(static_cast<std::int32_t>(page));
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return scores[a] > scores[b]; });
  std::int64_t left = budget;
  const auto take = [&](std::int64_t end, std::int64_t most) {
    const std::int64_t some = std::min(left, most);
    for (std::int64_t i = rule.sink + end - some; i < rule.sink + end; ++i)
      rows.push_back(static_cast<std::int32_t>(i));
    left -= some;
  };
  take(far, far % rule.page);
  for (const std::int32_t page : order) take((page + std::int64_t{1}) * rule.page, rule.page);
  std::sort(rows.begin(), rows.end());
  return rows;
}

}  // namespace

bool can_bound_pages(int head_dim) {
  return head_dim % 8 == 0;
}
void bound_pages(const char* base, const KvLayout& layout, int layers, std::int64_t begin, std::int64_t end,
                 const PageBounds& bounds, StreamHandle stream) {
  enqueue(stream, [=] {
    for (int layer = 0; layer < layers; ++layer)
      for (int head = 0; head < layout.kv_heads; ++head)
        for (std::int64_t page = begin; page < end; ++page)
          bound_page(base, layout, layer, head, page, bounds);
  });
}
void score_pages(const Queries& queries, const PageBounds& bounds, bool sum_heads, std::int64_t window,
                 std::int64_t, float* scores, std::int64_t stride, StreamHandle stream) {
  enqueue(stream, [=] {
    const int lists = sum_heads ? queries.layout.kv_heads : queries.query_heads,
              together = queries.query_heads / lists;
    for (int query = 0; query < queries.count; ++query) {
      const std::int64_t pages = (queries.tokens[query].position + 1 - window - bounds.sink) / bounds.page;
      for (int list = 0; list < lists; ++list) {
        for (std::int64_t page = 0; page < pages; ++page) {
          double sum = 0.0;
          for (int g = 0; g < together; ++g)
            sum += score_page(queries, bounds, query, list * together + g, page);
          scores[(std::int64_t{query} * lists + list) * stride + page] = static_cast<float>(sum);
        }
      }
    }
  });
}
void top_pages(const float* scores, std::int64_t lists, std::int64_t n, const PageRule& rule,
               std::int32_t* rows, std::int64_t capacity, std::int32_t* counts, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t list = 0; list < lists; ++list) {
      const auto chosen = rows_of_pages(scores + list * n, rule, list / rule.lists_of_query);
      if (std::ssize(chosen) > capacity) throw RunError("more rows than there is room for");
      std::copy(chosen.begin(), chosen.end(), rows + list * capacity);
      counts[list] = static_cast<std::int32_t>(chosen.size());
    }
  });
}

// ---- Labels and the best keys.
// -----------------------------------------------------------------------------------------

namespace {

void label_key(const char* base, const KvLayout& layout, int layer, int head, std::int64_t key,
               const KeyLabels& to) {
  const std::int64_t of = std::int64_t{layer} * layout.kv_heads + head, d = layout.head_dim;
  std::vector<float> row =
      widened(base + layer * layout.layer_stride + layout.key_offset(head, key), layout.type, d);
  if (!std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); }))
    std::fill(row.begin(), row.end(), 0.0f);
  std::vector<float> label(static_cast<std::size_t>(to.eights() * 8), 0.0f);
  for (int c = 0; c < to.count; ++c)
    label[static_cast<std::size_t>(c)] = row[static_cast<std::size_t>(to.channels[of * to.count + c])];
  char* const at =
      to.labels + layer * to.layer_bytes(layout.kv_heads) + (head * to.capacity + key) * to.label_bytes();
  if (!to.coded())
    return kernels().narrow(label.data(), std::ssize(label), layout.type, reinterpret_cast<std::byte*>(at));
  const ChannelLevels levels = levels_at(to.levels, of, to.count, to.bits);
  std::memset(at, 0, static_cast<std::size_t>(to.label_bytes()));
  for (int c = 0; c < to.count; ++c)
    put_code(at, c, to.bits,
             levels.code(c, label[static_cast<std::size_t>(c)], ChannelLevels::Rounding::nearest));
}

double score_label(const Queries& in, const KeyLabels& labels, std::int64_t query, int head,
                   std::int64_t key) {
  const int kv_head = head / (in.query_heads / in.layout.kv_heads);
  const char* const from = labels.labels + in.tokens[query].sequence * labels.sequence_stride +
                           (kv_head * labels.capacity + key) * labels.label_bytes();
  const float* const q = in.q + (query * in.query_heads + head) * in.layout.head_dim;
  const auto stored = labels.coded() ? std::vector<float>{} : widened(from, in.layout.type, labels.count);
  double sum = 0.0;
  for (int c = 0; c < labels.count; ++c) {
    const double value = labels.coded() ? static_cast<double>(code_at(from, c, labels.bits)) *
                                              labels.levels[(2 * kv_head + 1) * labels.count + c]
                                        : static_cast<double>(stored[static_cast<std::size_t>(c)]);
    sum += static_cast<double>(q[labels.channels[kv_head * labels.count + c]] * in.scale) * value;
  }
  return sum;
}

}  // namespace

void label_keys(const char* base, const KvLayout& layout, int layers, std::int64_t begin, std::int64_t end,
                const KeyLabels& labels, StreamHandle stream) {
  enqueue(stream, [=] {
    for (int layer = 0; layer < layers; ++layer)
      for (int head = 0; head < layout.kv_heads; ++head)
        for (std::int64_t key = begin; key < end; ++key) label_key(base, layout, layer, head, key, labels);
  });
}
void score_labels(const Queries& queries, const KeyLabels& labels, std::int64_t sink, std::int64_t window,
                  std::int64_t max_tokens, float* scores, ExponentialSum*, StreamHandle stream) {
  enqueue(stream, [=] {
    for (int query = 0; query < queries.count; ++query) {
      for (int head = 0; head < queries.query_heads; ++head) {
        float* const own = scores + (std::int64_t{query} * queries.query_heads + head) * max_tokens;
        for (std::int64_t key = 0; key < queries.tokens[query].position + 1 - window; ++key)
          own[key] =
              key < sink ? -INFINITY : static_cast<float>(score_label(queries, labels, query, head, key));
      }
    }
  });
}

namespace {

/// Centroid `which` of a part, as channels, and -|c|^2 / 2.
float centroid_at(const KeyCodes& codes, std::int64_t head, int part, int channel, int which) {
  return codes.centroids[head * codes.centroids_of_head() +
                         (std::int64_t{part} * (codes.width + 1) + channel) * codes.entries() + which];
}
int nearest(const KeyCodes& codes, std::int64_t head, int part, const float* x) {
  int at = 0;
  float high = -INFINITY;
  for (int which = 0; which < codes.entries(); ++which) {
    float sum = 0.0f;
    for (int c = 0; c < codes.width; ++c) sum = std::fma(centroid_at(codes, head, part, c, which), x[c], sum);
    sum += centroid_at(codes, head, part, codes.width, which);
    if (sum > high) high = sum, at = which;
  }
  return at;
}
/// The byte that holds a part's code, and where in it.
std::uint8_t& code_byte(const KeyCodes& codes, std::int64_t head, int part, std::int64_t key) {
  return codes.codes[(head * codes.planes() + (codes.nibbles() ? part / 2 : part)) * codes.capacity + key];
}
int shift_of(const KeyCodes& codes, int part) {
  return codes.nibbles() && part % 2 == 1 ? 4 : 0;
}

}  // namespace

void code_keys(const char* base, const KvLayout& layout, int layers, std::int64_t begin, std::int64_t end,
               const KeyCodes& codes, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t of = 0; of < std::int64_t{layers} * layout.kv_heads; ++of) {
      const std::int64_t layer = of / layout.kv_heads, head = of % layout.kv_heads;
      for (std::int64_t key = begin; key < end; ++key) {
        const char* const at =
            base + layer * layout.layer_stride + layout.key_offset(static_cast<int>(head), key);
        std::vector<float> row = widened(at, layout.type, layout.head_dim);
        if (!std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); }))
          std::fill(row.begin(), row.end(), 0.0f);
        for (int part = 0; part < codes.parts; ++part) {
          std::uint8_t& byte = code_byte(codes, of, part, key);
          const int code = nearest(codes, of, part, row.data() + part * codes.width);
          byte = static_cast<std::uint8_t>(shift_of(codes, part) > 0 ? byte | code << 4 : code);
        }
      }
    }
  });
}
std::int64_t code_tables_bytes(int, int, int, const KeyCodes&) {
  return 64;
}
void score_codes(const Queries& queries, const KeyCodes& codes, std::int64_t sink, std::int64_t window,
                 std::int64_t max_tokens, void*, float* scores, ExponentialSum*, StreamHandle stream) {
  enqueue(stream, [=] {
    const int group = queries.query_heads / queries.layout.kv_heads;
    for (std::int64_t row = 0; row < std::int64_t{queries.count} * queries.query_heads; ++row) {
      const int head = static_cast<int>(row % queries.query_heads) / group;
      const float* const q = queries.q + row * queries.layout.head_dim;
      for (std::int64_t key = 0; key < queries.tokens[row / queries.query_heads].position + 1 - window;
           ++key) {
        double sum = 0.0;
        for (int part = 0; key >= sink && part < codes.parts; ++part) {
          const int code =
              code_byte(codes, head, part, key) >> shift_of(codes, part) & (codes.nibbles() ? 15 : 255);
          for (int c = 0; c < codes.width; ++c)
            sum += static_cast<double>(q[part * codes.width + c] * queries.scale) *
                   static_cast<double>(centroid_at(codes, head, part, c, code));
        }
        scores[row * max_tokens + key] = key < sink ? -INFINITY : static_cast<float>(sum);
      }
    }
  });
}
void score_keys(const Queries&, std::int64_t, std::int64_t, std::int64_t, float*, ExponentialSum*,
                StreamHandle) {
  throw RunError("the played GPU scores no keys");
}
void share_scores(const float* scores, const ExponentialSum*, const Queries& queries, std::int64_t sink,
                  std::int64_t window, std::int64_t max_tokens, float* shared, StreamHandle stream) {
  enqueue(stream, [=] {
    const int group = queries.query_heads / queries.layout.kv_heads;
    for (int list = 0; list < queries.count * queries.layout.kv_heads; ++list) {
      const std::int64_t end = queries.tokens[list / queries.layout.kv_heads].position + 1 - window;
      std::vector<double> weight(static_cast<std::size_t>(std::max<std::int64_t>(0, end)), 0.0);
      for (int g = 0; g < group; ++g) {
        const float* const own = scores + (std::int64_t{list} * group + g) * max_tokens;
        double peak = -INFINITY, sum = 0.0;
        for (std::size_t i = 0; i < weight.size(); ++i)
          if (std::isfinite(own[i])) peak = std::fmax(peak, static_cast<double>(own[i]));
        for (std::size_t i = 0; i < weight.size(); ++i)
          if (std::isfinite(own[i])) sum += std::exp(static_cast<double>(own[i]) - peak);
        for (std::size_t i = 0; i < weight.size(); ++i)
          if (own[i] > -INFINITY) weight[i] += std::exp(static_cast<double>(own[i]) - peak) / sum;
      }
      for (std::size_t i = 0; i < weight.size(); ++i)
        shared[list * max_tokens + static_cast<std::int64_t>(i)] =
            static_cast<std::int64_t>(i) < sink ? -INFINITY
                                                : static_cast<float>(std::log(std::max(weight[i], 1e-38)));
    }
  });
}
std::int64_t select_workspace_bytes(std::int64_t, std::int64_t) {
  return 16;
}
void top_k(const float* scores, std::int64_t lists, std::int64_t n, const std::int32_t* lengths,
           const std::int32_t* k, std::int32_t* rows, std::int64_t capacity, std::int32_t* counts, void*,
           StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t list = 0; list < lists; ++list) {
      const float* const own = scores + list * n;
      std::vector<std::int32_t> order;
      for (std::int32_t i = lengths != nullptr ? lengths[list] : static_cast<std::int32_t>(n); i-- > 0;)
        if (own[i] > -INFINITY) order.push_back(i);
      std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return own[a] > own[b]; });
      order.resize(
          std::min(order.size(), static_cast<std::size_t>(std::min<std::int64_t>(capacity, k[list]))));
      std::sort(order.begin(), order.end());
      std::copy(order.begin(), order.end(), rows + list * capacity);
      counts[list] = static_cast<std::int32_t>(order.size());
    }
  });
}

void gather_keys(const GatherTask& task, float* out, StreamHandle stream) {
  if (task.frequencies != nullptr) throw RunError("the played GPU un-rotates no keys");
  enqueue(stream, [=] {
    for (std::int64_t i = 0; i < task.count; ++i) {
      const std::int64_t key = task.positions != nullptr ? task.positions[i] : task.begin + i * task.step;
      std::vector<float> row = widened(task.layer + task.layout.key_offset(task.kv_head, key),
                                       task.layout.type, task.layout.head_dim);
      if (!std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); }))
        std::fill(row.begin(), row.end(), 0.0f);
      std::copy(row.begin(), row.end(), out + i * task.layout.head_dim);
    }
  });
}
void assign(const float* x, std::int64_t n, const float* centroids, std::int64_t c, int d,
            std::int32_t* label, float*, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t i = 0; i < n; ++i) {
      float most = -INFINITY;
      for (std::int64_t which = 0; which < c; ++which) {
        const float score = kernels().dot(x + i * d, centroids + which * d, d);
        if (score > most) most = score, label[i] = static_cast<std::int32_t>(which);
      }
    }
  });
}
void narrow_labels(const std::int32_t* from, std::int64_t count, std::uint16_t* to, StreamHandle stream) {
  enqueue(stream, [=] { std::copy_n(from, count, to); });
}
void score_lists(const Queries& queries, const float* centroids, int lists, float* scores,
                 StreamHandle stream) {
  enqueue(stream, [=] {
    const std::int64_t d = queries.layout.head_dim, group = queries.query_heads / queries.layout.kv_heads;
    for (std::int64_t row = 0; row < std::int64_t{queries.count} * queries.query_heads; ++row) {
      const std::int64_t head = row % queries.query_heads / group;
      for (std::int64_t c = 0; c < lists; ++c)
        scores[row * lists + c] = kernels().dot(queries.q + row * d, centroids + (head * lists + c) * d, d);
    }
  });
}
void score_probed_keys(const Queries& queries, const ProbedKeys& keys, std::int64_t sink, std::int64_t window,
                       std::int64_t max_tokens, float* scores, std::int32_t* scanned, StreamHandle stream) {
  enqueue(stream, [=] {
    const std::int64_t d = queries.layout.head_dim, group = queries.query_heads / queries.layout.kv_heads;
    for (std::int64_t row = 0; row < std::int64_t{queries.count} * queries.query_heads; ++row) {
      const QueryToken& token = queries.tokens[row / queries.query_heads];
      const int head = static_cast<int>(row % queries.query_heads / group);
      const std::int32_t* const probed = keys.probed + row * keys.most;
      for (std::int64_t key = 0; key < token.position + 1 - window; ++key) {
        const bool wanted =
            key >= sink &&
            std::count(probed, probed + keys.counts[row],
                       keys.labels[token.sequence * keys.sequence_stride + head * max_tokens + key]) > 0;
        float& score = scores[row * max_tokens + key];
        score = -INFINITY;
        if (!wanted) continue;
        ++scanned[row];
        const std::vector<float> k = widened(
            queries.bases[token.sequence] + queries.layer_offset + queries.layout.key_offset(head, key),
            queries.layout.type, d);
        score = kernels().dot(queries.q + row * d, k.data(), d) * queries.scale;
      }
    }
  });
}
void draw_numbers(const Queries& queries, std::uint64_t seed, std::int64_t sink, std::int64_t window,
                  std::int64_t max_tokens, float* numbers, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t list = 0; list < std::int64_t{queries.count} * queries.layout.kv_heads; ++list) {
      const std::int64_t position = queries.tokens[list / queries.layout.kv_heads].position;
      const std::uint64_t own = hash_seed(seed, list % queries.layout.kv_heads, position);
      for (std::int64_t key = 0; key < position + 1 - window; ++key)
        numbers[list * max_tokens + key] =
            key < sink ? -INFINITY : nth_uniform(own, static_cast<std::uint64_t>(key - sink));
    }
  });
}
void join_lists(const Queries& queries, const JoinTask& task, StreamHandle stream) {
  enqueue(stream, [=] {
    const int heads = queries.layout.kv_heads, each = task.lists_per_head;
    for (int list = 0; list < queries.count * heads * each; ++list) {
      const int head = list / each;
      const ListSource& from = task.source[task.of_head[head % heads]];
      const std::int64_t far_end = queries.tokens[head / heads].position + 1 - task.window;
      std::vector<std::int32_t> rows;
      if (from.rows != nullptr) {
        const std::int64_t at = (from.same_for_all ? head % heads : head) * from.lists_per_head +
                                (from.lists_per_head > 1 ? list % each : 0);
        const std::int32_t* const first = from.rows + at * from.capacity;
        rows.assign(first, first + from.counts[at]);
        if (from.same_for_all) rows.erase(std::lower_bound(rows.begin(), rows.end(), far_end), rows.end());
      }
      for (std::int64_t row = std::max(from.from, task.sink); row < far_end; ++row)
        rows.push_back(static_cast<std::int32_t>(row));
      if (std::ssize(rows) > task.capacity) throw RunError("more rows than there is room for");
      std::copy(rows.begin(), rows.end(), task.rows + list * task.capacity);
      task.counts[list] = static_cast<std::int32_t>(rows.size());
    }
  });
}

}  // namespace lode::cuda

namespace lode {

namespace {

std::int64_t held_clusters = 0;
std::function<std::int64_t()> limit_of_last;

/// Holds what it is told to, and makes nothing of it.
class HeldKeys final : public DeviceKeys {
 public:
  bool takes(const KeysOnDevice&, std::int64_t) const override { return false; }
  std::vector<std::vector<float>> centroids(const KeysOnDevice&, std::span<const std::vector<Position>>,
                                            std::int64_t, std::span<const std::uint64_t>) override {
    throw RunError("the played GPU makes no clusters");
  }
  std::vector<std::int32_t> labels(const KeysOnDevice&, std::span<const std::vector<float>>) override {
    throw RunError("the played GPU makes no clusters");
  }
  std::vector<KeyClusters> clusters(const KeysOnDevice&, const ClusterTask&) override {
    throw RunError("the played GPU makes no clusters");
  }
  std::vector<double> sharpness(const KeysOnDevice&, std::span<const float>, int, float) override {
    throw RunError("the played GPU makes no clusters");
  }
  void attend(int, std::int64_t, std::span<const float>, float, std::span<float>, std::span<float>) override {
    throw RunError("the played GPU makes no clusters");
  }
  void release() override {}
  std::int64_t bytes() const override { return held_clusters; }
};

}  // namespace

void cuda::play_held_clusters(std::int64_t bytes) {
  held_clusters = bytes;
}
std::int64_t cuda::left_to_index() {
  return limit_of_last();
}

/// The played GPU makes no clusters: the host does.
std::unique_ptr<DeviceKeys> make_device_keys(std::function<GpuKeys()>, int,
                                             std::function<std::int64_t()> limit) {
  if (held_clusters == 0) return nullptr;
  limit_of_last = std::move(limit);
  return std::make_unique<HeldKeys>();
}

}  // namespace lode
