// SPDX-License-Identifier: Apache-2.0
// Attention over plain arrays gives the bits of attention over the engine's blocks, which other tests compare with
// float64; and the largest of a list are those of a sort. python/tests/test_gpu.py has the rest.
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <vector>

#include "harness.h"
#include "kernels/cuda/attend/attend_strided.h"
#include "kernels/cuda/attend/prefill.h"
#include "kernels/cuda/device/caller.h"
#include "kernels/cuda/select/largest.h"

namespace lode::cuda {
namespace {

std::uint32_t state = 7;
std::uint32_t next() {
  return state = state * 1664525u + 1013904223u;
}
/// About 1 in size.
float number() {
  return static_cast<float>(next() >> 8) * 0x1p-23f - 1.0f;
}

template <class T>
Buffer on_device(const std::vector<T>& x, StreamHandle stream) {
  Buffer buffer(std::max<std::int64_t>(16, std::ssize(x) * std::int64_t{sizeof(T)}), "a test");
  copy(buffer.as<void>(), x.data(), std::ssize(x) * std::int64_t{sizeof(T)}, stream);
  return buffer;
}

struct Shape {
  int heads, group, d, rows, tokens;
  bool tokens_first;  // how plain arrays lie
};

/// The same keys of bf16 in plain arrays and in the engine's blocks, with queries.
struct Both {
  Shape s;
  Stream stream;
  CallerStream caller = {0, stream.get()};
  KvLayout layout;
  Buffer k, v, blocks, base, tokens, q, out;
  StridedKv kv;

  explicit Both(const Shape& shape) : s(shape), layout{s.heads, s.d, DType::bf16, 0} {
    const auto numbers = static_cast<std::size_t>(s.heads) * static_cast<std::size_t>(s.rows * s.d);
    std::vector<std::uint16_t> keys(numbers), values(numbers);
    for (auto* all : {&keys, &values})
      for (std::uint16_t& x : *all)
        x = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(number()) >> 16);
    const std::int64_t row = s.d * 2, head = s.tokens_first ? row : row * s.rows,
                       step = s.tokens_first ? row * s.heads : row;
    std::vector<char> bytes(static_cast<std::size_t>(layout.layer_bytes(s.rows)));
    for (int h = 0; h < s.heads; ++h)
      for (int t = 0; t < s.rows; ++t) {
        char* const to = bytes.data() + layout.key_offset(h, t);
        std::memcpy(to, reinterpret_cast<char*>(keys.data()) + h * head + t * step,
                    static_cast<std::size_t>(row));
        std::memcpy(to + layout.value_offset(), reinterpret_cast<char*>(values.data()) + h * head + t * step,
                    static_cast<std::size_t>(row));
      }
    k = on_device(keys, caller.stream), v = on_device(values, caller.stream);
    blocks = on_device(bytes, caller.stream);
    base = on_device(std::vector<const char*>{blocks.as<char>()}, caller.stream);
    std::vector<QueryToken> places;
    for (int t = 0; t < s.tokens; ++t) places.push_back({0, s.rows - s.tokens + t});
    tokens = on_device(places, caller.stream);
    std::vector<float> queries(states() * static_cast<std::size_t>(s.d));
    for (float& x : queries) x = 2 * number();
    q = on_device(queries, caller.stream);
    out = Buffer(std::ssize(queries) * 4 + static_cast<std::int64_t>(states()) * 4, "a test");
    kv = {k.as<char>(), v.as<char>(), head, head, step, step, s.rows};
  }
  std::size_t states() const { return static_cast<std::size_t>(s.tokens * s.heads * s.group); }
  Queries queries() const {
    return {.tokens = tokens.as<QueryToken>(),
            .bases = base.as<const char*>(),
            .layout = layout,
            .count = s.tokens,
            .query_heads = s.heads * s.group,
            .scale = 0.1f,
            .q = q.as<float>(),
            .o = out.as<float>(),
            .lse = out.as<float>() + states() * static_cast<std::size_t>(s.d)};
  }
  /// What a call writes, output and log-sum-exp.
  template <class Call>
  std::vector<float> of(const Call& call) const {
    std::vector<float> found(states() * static_cast<std::size_t>(s.d + 1));
    fill(out.as<void>(), 0xff, out.bytes(), caller.stream);
    {
      const Workspace workspace(
          decode_workspace_bytes(std::min(s.tokens, kMostStrided), s.heads * s.group, s.heads, s.d), caller);
      call(workspace.data());
    }
    copy_and_wait(found.data(), out.as<void>(), std::ssize(found) * 4, caller);
    return found;
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

const Shape kShapes[] = {{2, 4, 64, 5, 1, false},    {2, 4, 128, 3000, 3, false}, {8, 4, 128, 20000, 1, true},
                         {1, 12, 96, 1000, 2, true}, {3, 1, 80, 700, 40, true},   {2, 2, 256, 900, 4, false}};

LODE_TEST(all_keys_of_plain_arrays_give_the_bits_of_blocks) {
  for (const Shape& s : kShapes) {
    const Both both(s);
    const auto strided = both.of(
        [&](void* workspace) { attend_strided(both.queries(), both.kv, {}, workspace, both.caller.stream); });
    const auto blocked = both.of([&](void* workspace) {
      for (int first = 0; first < s.tokens; first += kMostStrided) {
        Queries some = both.queries();
        some.count = std::min(kMostStrided, s.tokens - first);
        some.tokens += first;
        some.q += first * s.heads * s.group * s.d, some.o += first * s.heads * s.group * s.d;
        some.lse += first * s.heads * s.group;
        attend_full_decode(some, s.rows, workspace, both.caller.stream);
      }
    });
    LODE_CHECK(same_bits(strided, blocked));
  }
}

LODE_TEST(lists_over_plain_arrays_give_the_bits_of_blocks) {
  for (Shape s : kShapes) {
    s.tokens = std::min(s.tokens, kMostStrided);
    const Both both(s);
    for (const int per_head : {1, s.group}) {
      const int lists = s.tokens * s.heads * per_head, capacity = s.rows;
      std::vector<std::int64_t> begins = {0};
      std::vector<std::int32_t> rows, counts, padded(static_cast<std::size_t>(lists * capacity));
      for (int list = 0; list < lists; ++list) {
        std::int32_t count = 0;
        for (int row = 0; row < s.rows; ++row)
          if (list % 5 != 3 && next() % 8 < 3) {
            rows.push_back(row);
            padded[static_cast<std::size_t>(list * capacity + count++)] = row;
          }
        counts.push_back(count);
        begins.push_back(std::ssize(rows));
      }
      const StreamHandle stream = both.caller.stream;
      const Buffer at = on_device(begins, stream), ragged = on_device(rows, stream),
                   all = on_device(padded, stream), lengths = on_device(counts, stream);
      const auto strided = both.of([&](void* workspace) {
        attend_strided(both.queries(), both.kv,
                       {.begins = at.as<std::int64_t>(),
                        .rows = ragged.as<std::int32_t>(),
                        .longest = capacity,
                        .per_token = s.heads * per_head},
                       workspace, stream);
      });
      const auto blocked = both.of([&](void* workspace) {
        attend_rows_decode(both.queries(),
                           {.rows = all.as<std::int32_t>(),
                            .counts = lengths.as<std::int32_t>(),
                            .capacity = capacity,
                            .lists_per_head = per_head},
                           s.rows, workspace, stream);
      });
      LODE_CHECK(same_bits(strided, blocked));
    }
  }
}

LODE_TEST(prefill_over_plain_arrays_gives_the_bits_of_blocks) {
  for (Shape s : kShapes) {
    s.tokens = std::min(s.rows, 150);
    const Both both(s);
    const StreamHandle stream = both.caller.stream;
    const std::int32_t position = s.rows - s.tokens;
    LODE_CHECK(same_bits(
        both.of([&](void*) { attend_strided_prefill(both.queries(), both.kv, stream); }),
        both.of([&](void*) { attend_prefill(both.queries(), position, stream, Precision::fast); })));
    for (const bool on_matrix_unit : {true, false}) {
      const auto run = [&](const StridedKv* kv) {
        return both.of([&](void*) {
          if (!on_matrix_unit || !attend_prefill_mma(both.queries(), position, {}, stream, kv))
            attend_prefill_f32(both.queries(), position, {}, stream, kv);
        });
      };
      LODE_CHECK(same_bits(run(&both.kv), run(nullptr)));
    }
  }
}

LODE_TEST(the_largest_are_those_of_a_sort) {
  const Stream stream;
  for (const std::int64_t n : {std::int64_t{1}, std::int64_t{40}, std::int64_t{5000}, std::int64_t{300000}}) {
    for (const int kinds : {2, 7, 1 << 20}) {
      std::vector<float> scores(static_cast<std::size_t>(n));
      for (float& x : scores) {
        const auto kind = static_cast<int>(next() >> 8) % kinds;
        x = kind == 0 ? -INFINITY : kind == 1 ? NAN : static_cast<float>(kind);
      }
      const Buffer from = on_device(scores, stream.get()), scratch(8, "a test");
      for (const std::int64_t k : {std::int64_t{1}, (n + 1) / 2, n}) {
        std::vector<std::int32_t> order(scores.size()), found(static_cast<std::size_t>(k));
        std::iota(order.begin(), order.end(), 0);
        const auto value = [&](std::int32_t i) {
          const float x = scores[static_cast<std::size_t>(i)];
          return std::isnan(x) ? -INFINITY : x;
        };
        std::sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
          return value(a) != value(b) ? value(a) > value(b) : a > b;
        });
        order.resize(static_cast<std::size_t>(k));
        std::sort(order.begin(), order.end());
        const Buffer rows(k * 4, "a test");
        largest(from.as<float>(), n, static_cast<std::int32_t>(k), rows.as<std::int32_t>(),
                scratch.as<std::int32_t>(), stream.get());
        copy_and_wait(found.data(), rows.as<void>(), k * 4, {0, stream.get()});
        LODE_CHECK(found == order);
      }
    }
  }
}

}  // namespace
}  // namespace lode::cuda
