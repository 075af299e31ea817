// SPDX-License-Identifier: Apache-2.0
// Decode attention and top-k against float64 on the host, on inputs chosen to hurt.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <numeric>

#include "harness.h"
#include "kernels/cuda/attend/attend_beside.h"
#include "kernels/cuda/attend/attend_runs.h"
#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/select/select.h"
#include "reference.h"

namespace lode::cuda {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::uint64_t state = 1;
float normal() {  // sum of uniforms: near enough
  float sum = 0;
  for (int i = 0; i < 4; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    sum += static_cast<float>(state >> 40) * 0x1p-24f - 0.5f;
  }
  return sum * 1.732f;
}

template <class T>
Buffer to_device(const std::vector<T>& host) {
  Buffer buffer(static_cast<std::int64_t>(std::max<std::size_t>(1, host.size()) * sizeof(T)), "test");
  LODE_CUDA(cudaMemcpy(buffer.as<void>(), host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return buffer;
}
template <class T>
std::vector<T> to_host(const Buffer& buffer, std::size_t n) {
  std::vector<T> host(n);
  LODE_CUDA(cudaMemcpy(host.data(), buffer.as<void>(), n * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

/// Bytes that come late, an even number of them.
struct Late {
  const char* from;
  char* to;
  std::int64_t bytes;
};
/// Writes when the kernel behind may have started, so that this sees other numbers before its wait.
__global__ void write_late(const Late* all, int count) {
  release_successor();
  const long long start = clock64();
  while (clock64() - start < 40000) {
  }
  for (int i = 0; i < count; ++i) {
    for (std::int64_t at = threadIdx.x; at < all[i].bytes / 2; at += blockDim.x)
      reinterpret_cast<short*>(all[i].to)[at] = reinterpret_cast<const short*>(all[i].from)[at];
  }
}

struct Problem {
  int d, group, kv_heads;
  DType type;
  std::vector<int> positions;  // one query token each, each of its own sequence
  std::int64_t sink = 0, window = 0;
  bool per_query_head = false;
  std::vector<std::vector<std::int32_t>> lists = {};  // empty: full attention
  int runs = 0;                                       // lists are cut into so many stretches
};

/// Everything on the host in float32, rounded to the store's type, and on the device.
struct World {
  explicit World(const Problem& p) : problem(p), layout{p.kv_heads, p.d, p.type, 0} {
    std::vector<const char*> pointers;
    for (const int position : p.positions) {
      const int n = position + 1;
      std::vector<float> k(static_cast<std::size_t>(p.kv_heads * n * p.d)), v(k.size());
      for (float& x : k) x = test::rounded(normal(), p.type);
      for (float& x : v) x = test::rounded(normal(), p.type);
      keys.push_back(k), values.push_back(v);
      memory.emplace_back(layout.layer_bytes(n), "test");
      pointers.push_back(memory.back().as<char>());
    }
    bases = to_device(pointers);
    std::vector<QueryToken> tokens;
    for (std::size_t i = 0; i < p.positions.size(); ++i)
      tokens.push_back({static_cast<int>(i), p.positions[i]});
    places = to_device(tokens);
    q.resize(p.positions.size() * static_cast<std::size_t>(heads() * p.d));
    for (float& x : q) x = 2 * normal();
  }
  int heads() const { return problem.kv_heads * problem.group; }

  void upload() {
    for (std::size_t s = 0; s < keys.size(); ++s) {
      const int n = problem.positions[s] + 1;
      std::vector<char> bytes(static_cast<std::size_t>(layout.layer_bytes(n)), 0);
      for (int h = 0; h < problem.kv_heads; ++h) {
        for (int t = 0; t < n; ++t) {
          for (int i = 0; i < problem.d; ++i) {
            put(bytes.data() + layout.key_offset(h, t), i,
                keys[s][static_cast<std::size_t>((h * n + t) * problem.d + i)]);
            put(bytes.data() + layout.key_offset(h, t) + layout.value_offset(), i,
                values[s][static_cast<std::size_t>((h * n + t) * problem.d + i)]);
          }
        }
      }
      LODE_CUDA(cudaMemcpy(memory[s].as<void>(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    }
    device_q = to_device(q);
  }
  void put(char* row, int i, float x) const {
    if (problem.type == DType::f32) std::memcpy(row + i * 4, &x, 4);
    const __nv_bfloat16 b = __float2bfloat16_rn(x);
    const __half f = __float2half_rn(x);
    if (problem.type == DType::bf16) std::memcpy(row + i * 2, &b, 2);
    if (problem.type == DType::f16) std::memcpy(row + i * 2, &f, 2);
  }

  /// Runs the kernel on queries [first, first + count); output [count, Hq, d], lse behind it.
  std::vector<float> run(int first, int count) {
    const std::size_t rows = static_cast<std::size_t>(count * heads());
    std::vector<float> poison(rows * static_cast<std::size_t>(problem.d + 1), -12345.0f);
    Buffer out = to_device(poison);
    const std::int64_t bytes = decode_workspace_bytes(count, heads(), problem.kv_heads, problem.d);
    if (workspace.bytes() < bytes) {
      workspace = Buffer(bytes, "test");
      LODE_CUDA(cudaMemset(workspace.as<void>(), 0, static_cast<std::size_t>(bytes)));
    }
    const Queries queries = {.tokens = places.as<QueryToken>() + first,
                             .bases = bases.as<const char*>(),
                             .layer_offset = 0,
                             .layout = layout,
                             .count = count,
                             .query_heads = heads(),
                             .scale = 1.0f / std::sqrt(static_cast<float>(problem.d)),
                             .q = device_q.as<float>() + first * heads() * problem.d,
                             .o = out.as<float>(),
                             .lse = out.as<float>() + rows * static_cast<std::size_t>(problem.d)};
    std::vector<Late> late = {{nullptr, const_cast<char*>(reinterpret_cast<const char*>(queries.q)),
                               static_cast<std::int64_t>(rows) * problem.d * 4}};
    if (problem.lists.empty()) {
      add_newest(first, count, late);
      const std::vector<Buffer> held = write_behind(late);
      (beside ? attend_full_beside : attend_full_decode)(queries, most_tokens, workspace.as<void>(), stream);
      LODE_CUDA(cudaDeviceSynchronize());
    } else if (problem.runs > 0) {
      attend_as_runs(queries, first);
    } else {
      const int per = problem.per_query_head ? problem.group : 1;
      std::size_t most = 1;
      for (const auto& list : problem.lists) most = std::max(most, list.size());
      std::vector<std::int32_t> rows_host(static_cast<std::size_t>(count * problem.kv_heads * per) * most),
          counts;
      for (int i = 0; i < count * problem.kv_heads * per; ++i) {
        const auto& list = problem.lists[static_cast<std::size_t>(first * problem.kv_heads * per + i)];
        std::copy(list.begin(), list.end(),
                  rows_host.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(i) * most));
        counts.push_back(static_cast<std::int32_t>(list.size()));
      }
      const Buffer rows_device = to_device(rows_host), counts_device = to_device(counts);
      late.push_back({nullptr, counts_device.as<char>(), std::ssize(counts) * 4});
      late.push_back({nullptr, rows_device.as<char>(), std::ssize(rows_host) * 4});
      const std::vector<Buffer> held = write_behind(late);
      const RowLists lists = {.rows = rows_device.as<std::int32_t>(),
                              .counts = counts_device.as<std::int32_t>(),
                              .capacity = static_cast<std::int64_t>(most),
                              .lists_per_head = per,
                              .sink = problem.sink,
                              .window = problem.window};
      attend_rows_decode(queries, lists, most_tokens, workspace.as<void>(), stream);
      LODE_CUDA(cudaDeviceSynchronize());
    }
    return to_host<float>(out, poison.size());
  }

  /// The newest keys and values of these queries: a step writes them.
  void add_newest(int first, int count, std::vector<Late>& late) {
    for (int i = first; i < first + count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      for (int h = 0; h < problem.kv_heads; ++h) {
        char* const key = memory[at].as<char>() + layout.key_offset(h, problem.positions[at]);
        late.push_back({nullptr, key, layout.row_bytes()});
        late.push_back({nullptr, key + layout.value_offset(), layout.row_bytes()});
      }
    }
  }
  /// Launches the kernel that writes these bytes as they are now; until then they are something else.
  std::vector<Buffer> write_behind(std::vector<Late> late) const {
    std::int64_t bytes = 0;
    for (const Late& one : late) bytes += one.bytes;
    std::vector<Buffer> held;
    held.emplace_back(bytes, "test");
    char* at = held[0].as<char>();
    for (Late& one : late) {
      one.from = at, at += one.bytes;
      const auto size = static_cast<std::size_t>(one.bytes);
      LODE_CUDA(cudaMemcpy(const_cast<char*>(one.from), one.to, size, cudaMemcpyDeviceToDevice));
      LODE_CUDA(cudaMemset(one.to, 0xff, size));
    }
    held.push_back(to_device(late));
    Launch(1, 256, 0, stream)(write_late, held[1].as<Late>(), static_cast<int>(late.size()));
    return held;
  }

  /// The lists as stretches of unequal length, some of them empty, in reverse order, the later half of
  /// them in the second table.
  void attend_as_runs(const Queries& queries, int first) {
    const int lists = queries.count * problem.kv_heads, tabled = problem.runs / 2;
    std::size_t room = 1;
    for (const auto& list : problem.lists) room = std::max(room, list.size());
    const std::size_t sequences = problem.positions.size();
    std::vector<std::int32_t> rows(sequences * static_cast<std::size_t>(problem.kv_heads) * room, -1),
        more(static_cast<std::size_t>(lists) * room, -1);
    std::vector<RowRun> runs;
    for (int i = 0; i < lists; ++i) {
      const auto& list = problem.lists[static_cast<std::size_t>(first * problem.kv_heads + i)];
      const std::size_t table = static_cast<std::size_t>(first * problem.kv_heads + i) * room;
      std::copy(list.begin(), list.end(), rows.begin() + static_cast<std::ptrdiff_t>(table));
      std::copy(list.begin(), list.end(), more.begin() + static_cast<std::ptrdiff_t>(i * room));
      const int n = static_cast<int>(list.size());
      const auto cut = [&](int run) {  // rising; every fourth stretch is empty
        run -= run % 4 == 3;
        return static_cast<int>(std::int64_t{n} * run * run / (problem.runs * problem.runs));
      };
      for (int run = problem.runs - 1; run >= 0; --run) {
        const int end = run + 1 == problem.runs ? n : cut(run + 1), begin = std::min(end, cut(run));
        runs.push_back({begin, end - begin});
      }
    }
    const Buffer runs_there = to_device(runs), rows_there = to_device(rows), more_there = to_device(more),
                 counts(lists * 4, "test");
    attend_runs_decode(queries,
                       {.runs = runs_there.as<RowRun>(),
                        .count = problem.runs,
                        .tabled = tabled,
                        .rows = rows_there.as<std::int32_t>(),
                        .row_stride = static_cast<std::int64_t>(room),
                        .more = more_there.as<std::int32_t>(),
                        .more_stride = static_cast<std::int64_t>(room),
                        .counts = counts.as<std::int32_t>(),
                        .capacity = static_cast<std::int64_t>(room),
                        .sink = problem.sink,
                        .window = problem.window},
                       most_tokens, workspace.as<void>(), stream);
    LODE_CUDA(cudaDeviceSynchronize());
    const auto found = to_host<std::int32_t>(counts, static_cast<std::size_t>(lists));
    for (int i = 0; i < lists; ++i)
      LODE_CHECK(
          found[static_cast<std::size_t>(i)] ==
          static_cast<int>(problem.lists[static_cast<std::size_t>(first * problem.kv_heads + i)].size()));
  }

  /// The matrix unit takes queries of the store's type; other head dimensions keep them in float32.
  float query_of(float x) const {
    const bool on_matrix_unit = problem.d >= 64;
    return on_matrix_unit ? test::rounded(x, problem.type) : x;
  }

  /// Keys that a query head attends.
  std::vector<int> attended(int query, int head) const {
    const int position = problem.positions[static_cast<std::size_t>(query)];
    std::vector<int> rows;
    if (problem.lists.empty()) {
      rows.resize(static_cast<std::size_t>(position + 1));
      std::iota(rows.begin(), rows.end(), 0);
      return rows;
    }
    const int sink = static_cast<int>(std::min<std::int64_t>(problem.sink, position + 1));
    for (int i = 0; i < sink; ++i) rows.push_back(i);
    const int per = problem.per_query_head ? problem.group : 1;
    const int list =
        (query * problem.kv_heads + head / problem.group) * per + (per > 1 ? head % problem.group : 0);
    for (const int row : problem.lists[static_cast<std::size_t>(list)]) rows.push_back(row);
    for (int i = static_cast<int>(std::max<std::int64_t>(sink, position + 1 - problem.window)); i <= position;
         ++i)
      rows.push_back(i);
    return rows;
  }

  /// Float64 output of one query head, and its log-sum-exp behind it.
  std::vector<double> expected(int query, int head) const {
    const int n = problem.positions[static_cast<std::size_t>(query)] + 1, h = head / problem.group,
              d = problem.d;
    const float* const from = q.data() + (query * heads() + head) * d;
    const auto at = [&](const std::vector<std::vector<float>>& all, int t) {
      return all[static_cast<std::size_t>(query)].data() + static_cast<std::ptrdiff_t>((h * n + t) * d);
    };
    std::vector<double> out(static_cast<std::size_t>(d + 1), 0.0), scores;
    const std::vector<int> rows = attended(query, head);
    double peak = -kInf, sum = 0;
    for (const int t : rows) {
      double s = 0;
      for (int i = 0; i < d; ++i) s += static_cast<double>(query_of(from[i])) * at(keys, t)[i];
      scores.push_back(s / std::sqrt(static_cast<double>(d)));
      peak = std::max(peak, scores.back());
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const double p = std::exp(scores[i] - peak);
      sum += p;
      for (int c = 0; c < d; ++c) out[static_cast<std::size_t>(c)] += p * at(values, rows[i])[c];
    }
    for (int c = 0; c < d; ++c)
      out[static_cast<std::size_t>(c)] = sum > 0 ? out[static_cast<std::size_t>(c)] / sum : 0.0;
    out.back() = sum > 0 ? peak + std::log(sum) : -kInf;
    return out;
  }

  void check_all(double tolerance) {
    const int count = static_cast<int>(problem.positions.size());
    const std::vector<float> got = run(0, count);
    for (int query = 0; query < count; ++query) {
      for (int head = 0; head < heads(); ++head) {
        const std::vector<double> want = expected(query, head);
        const std::size_t row = static_cast<std::size_t>(query * heads() + head);
        double worst = 0, size = 1e-30;
        for (int c = 0; c < problem.d; ++c) {
          const double x = got[row * static_cast<std::size_t>(problem.d) + static_cast<std::size_t>(c)];
          worst = std::max(worst, std::isnan(x) ? 1e30 : std::fabs(x - want[static_cast<std::size_t>(c)]));
          size = std::max(size, std::fabs(want[static_cast<std::size_t>(c)]));
        }
        LODE_CHECK_CLOSE(worst, 0.0, tolerance * size);
        const float lse = got[static_cast<std::size_t>(count * heads() * problem.d) + row];
        if (std::isinf(want.back()))
          LODE_CHECK(lse == want.back());
        else
          LODE_CHECK_CLOSE(lse, want.back(), 2e-2);
      }
    }
  }

  Problem problem;
  KvLayout layout;
  std::vector<std::vector<float>> keys, values;  // per sequence [Hkv, n, d]
  std::vector<float> q;                          // [N, Hq, d]
  std::vector<Buffer> memory;
  Buffer bases, places, device_q, workspace;
  std::int64_t most_tokens = 1 << 20;  // what graphs are made for
  bool beside = false;                 ///< by attend_full_beside
  StreamHandle stream = nullptr;
};

double tolerance_of(DType type) {
  return type == DType::f32 ? 2e-5 : type == DType::f16 ? 4e-3 : 2e-2;
}

LODE_TEST(full_decode_matches_float64) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const int d : {8, 20, 64, 80, 96, 128, 256, 512}) {
      for (const int group : {1, 3, 4, 8, 16}) {
        World world({.d = d,
                     .group = group,
                     .kv_heads = group == 3   ? 5
                                 : group == 8 ? 1
                                              : 2,  // each way to share out the work
                     .type = type,
                     .positions = {0, 1, 15, 16, 62, 63, 64, 700, 5000}});
        world.upload();
        world.check_all(tolerance_of(type));
      }
    }
  }
}

/// Twice the numbers in twice the parts.
LODE_TEST(a_workspace_has_places_for_the_records_of_large_heads) {
  LODE_CHECK(decode_workspace_bytes(16, 8, 2, 512) > 3 * decode_workspace_bytes(16, 8, 2, 256));
}

LODE_TEST(a_graph_for_few_keys_gives_the_bits_of_one_for_many) {
  for (const DType type : {DType::f16, DType::bf16}) {
    for (const int d : {64, 80, 96, 128, 256, 512}) {
      for (const int group : {1, 3, 4, 8, 16}) {
        World world({.d = d,
                     .group = group,
                     .kv_heads = group == 3   ? 5
                                 : group == 8 ? 1
                                              : 2,
                     .type = type,
                     .positions = {0, 64, 1501}});
        world.upload();
        const std::vector<float> many = world.run(0, 3);
        world.most_tokens = 1502;
        world.check_all(tolerance_of(type));
        for (int again = 0; again < 3; ++again) LODE_CHECK(world.run(0, 3) == many);
        world.most_tokens = 300;  // fewer than there are: slow, not wrong
        world.check_all(tolerance_of(type));
      }
    }
  }
}

std::vector<std::vector<std::int32_t>> random_lists(const Problem& p, double share) {
  std::vector<std::vector<std::int32_t>> lists;
  for (const int position : p.positions) {
    for (int i = 0; i < p.kv_heads * (p.per_query_head ? p.group : 1); ++i) {
      std::vector<std::int32_t> rows;
      for (int row = static_cast<int>(p.sink); row < position + 1 - p.window; ++row) {
        if ((normal() + 2) / 4 < share) rows.push_back(row);
      }
      lists.push_back(rows);
    }
  }
  return lists;
}

/// Of heads of so many numbers.
void check_listed_rows(int d) {
  for (const DType type : {DType::f32, DType::f16, DType::bf16}) {
    for (const bool per_query_head : {false, true}) {
      for (const double share : {0.0, 0.3, 0.9}) {
        Problem p = {.d = d,
                     .group = 4,
                     .kv_heads = share > 0.5 ? 3 : 2,
                     .type = type,
                     .positions = {0, 5, 300, 3000},
                     .sink = 3,
                     .window = 37,
                     .per_query_head = per_query_head};
        p.lists = random_lists(p, share);
        World world(p);
        world.upload();
        world.check_all(tolerance_of(type));
      }
    }
  }
}

LODE_TEST(listed_rows_match_float64) {
  for (const int d : {128, 512}) check_listed_rows(d);
}

/// Lists of all lengths, or of the same length for the heads of a group, with or without order.
std::vector<std::vector<std::int32_t>> lists_of_lengths(const Problem& p, bool alike) {
  std::vector<std::vector<std::int32_t>> lists;
  const int each = p.per_query_head ? p.group : 1;
  for (const int position : p.positions) {
    const int first = static_cast<int>(p.sink),
              far = std::max(0, position + 1 - static_cast<int>(p.window) - first);
    for (int i = 0; i < p.kv_heads * each; ++i) {
      const int kind = (alike ? i / each : i) % 6;
      const int wanted = kind == 0 ? far : kind == 1 ? 0 : kind == 2 ? 1 : kind == 3 ? 64 : far / kind;
      std::vector<std::int32_t> rows(static_cast<std::size_t>(far));
      std::iota(rows.begin(), rows.end(), first);
      for (int at = 0; kind != 0 && at < far; ++at) {  // so that lists of one length differ
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        std::swap(rows[static_cast<std::size_t>(at)],
                  rows[static_cast<std::size_t>(at + static_cast<int>((state >> 33) % (far - at)))]);
      }
      rows.resize(static_cast<std::size_t>(std::min(far, wanted)));
      lists.push_back(rows);
    }
  }
  return lists;
}

// More pieces than blocks at once: blocks take several, of several lists.
LODE_TEST(many_lists_match_float64) {
  for (const int d : {64, 128}) {
    for (const int group : {1, 3, 4, 8, 16}) {
      for (const int turn : {0, 1, 2}) {
        Problem p = {.d = d,
                     .group = group,
                     .kv_heads = 8,
                     .type = group == 3 ? DType::f16 : DType::bf16,
                     .positions = {2500, 5, 0, 300, 1900},
                     .sink = turn == 1 ? 200 : 3,
                     .window = turn == 1 ? 700 : 37,
                     .per_query_head = turn < 2};
        p.lists = lists_of_lengths(p, turn == 1);
        World world(p);
        world.upload();
        world.check_all(tolerance_of(p.type));
        const std::vector<float> together = world.run(0, 5);
        const std::ptrdiff_t row = world.heads() * d;
        for (int i = 0; i < 5; ++i) {
          const std::vector<float> alone = world.run(i, 1);
          LODE_CHECK(std::equal(alone.begin(), alone.begin() + row, together.begin() + i * row));
        }
        LODE_CHECK(world.run(0, 5) == together);
      }
    }
  }
}

// More pieces than a block has places for, each list of more pieces than a warp merges.
LODE_TEST(many_long_lists_match_float64) {
  for (const bool per_query_head : {false, true}) {
    Problem p = {.d = 64,
                 .group = 4,
                 .kv_heads = 1,
                 .type = DType::bf16,
                 .positions = std::vector<int>(10, 17000),
                 .sink = 100,
                 .window = 200,
                 .per_query_head = per_query_head};
    p.positions[3] = 900;
    p.lists = random_lists(p, 0.95);
    World world(p);
    world.upload();
    world.check_all(tolerance_of(p.type));
    const std::vector<float> together = world.run(0, 10), alone = world.run(9, 1);
    const std::ptrdiff_t row = world.heads() * p.d;
    LODE_CHECK(std::equal(alone.begin(), alone.begin() + row, together.begin() + 9 * row));
  }
}

LODE_TEST(full_attention_of_many_sequences_gives_the_bits_of_one) {
  World world(
      {.d = 128, .group = 4, .kv_heads = 8, .type = DType::bf16, .positions = {1000, 0, 70, 2100, 63, 64}});
  world.upload();
  world.check_all(tolerance_of(DType::bf16));
  const std::vector<float> together = world.run(0, 6);
  const std::ptrdiff_t row = world.heads() * 128;
  for (int i = 0; i < 6; ++i) {
    const std::vector<float> alone = world.run(i, 1);
    LODE_CHECK(std::equal(alone.begin(), alone.begin() + row, together.begin() + i * row));
  }
}

LODE_TEST(a_stream_beside_gives_the_same_bits) {
  for (const int d : {80, 128, 256, 512}) {
    World world(
        {.d = d, .group = 4, .kv_heads = 8, .type = DType::bf16, .positions = {0, 15, 64, 255, 300, 511}});
    world.upload();
    world.most_tokens = 512;
    const std::vector<float> want = world.run(0, 6);
    world.beside = true;
    world.check_all(tolerance_of(DType::bf16));
    for (int again = 0; again < 3; ++again) LODE_CHECK(world.run(0, 6) == want);
  }
}

LODE_TEST(partial_results_stay_in_their_workspace) {
  constexpr int kTokens = 8;
  constexpr std::size_t kBehind = 32 << 20;
  for (const int d : {64, 128, 256, 512}) {
    World world({.d = d,
                 .group = 4,
                 .kv_heads = 1,
                 .type = DType::bf16,
                 .positions = std::vector<int>(kTokens, 300)});
    world.upload();
    const auto bytes = static_cast<std::size_t>(decode_workspace_bytes(kTokens, world.heads(), 1, d));
    world.workspace = Buffer(static_cast<std::int64_t>(bytes + kBehind), "test");
    LODE_CUDA(cudaMemset(world.workspace.as<void>(), 0, bytes + kBehind));
    LODE_CUDA(cudaMemset(world.workspace.as<char>() + bytes, 0x5a, kBehind));
    world.run(0, kTokens);
    const std::vector<char> all = to_host<char>(world.workspace, bytes + kBehind);
    LODE_CHECK(std::all_of(all.begin() + static_cast<std::ptrdiff_t>(bytes), all.end(),
                           [](char x) { return x == 0x5a; }));
  }
}

// Blocks that take several pieces, as many tokens need with the room of a window, against a token alone.
LODE_TEST(many_short_stretches_give_the_bits_of_one) {
  for (const DType type : {DType::f16, DType::bf16}) {
    for (const int d : {64, 128}) {
      World world(
          {.d = d,
           .group = 4,
           .kv_heads = 8,
           .type = type,
           .positions = {1790, 0, 70, 2047, 63, 64, 1000, 15, 2046, 1, 700, 1500, 127, 128, 129, 1900}});
      world.upload();
      world.most_tokens = 2048;
      world.check_all(tolerance_of(type));
      const std::vector<float> together = world.run(0, 16);
      for (int again = 0; again < 2; ++again) LODE_CHECK(world.run(0, 16) == together);
      const std::ptrdiff_t row = world.heads() * d;
      for (int i = 0; i < 16; ++i) {
        const std::vector<float> alone = world.run(i, 1);
        LODE_CHECK(std::equal(alone.begin(), alone.begin() + row, together.begin() + i * row));
      }
    }
  }
}

LODE_TEST(a_list_for_each_head_gives_the_bits_of_one_for_all) {
  Problem p = {.d = 128,
               .group = 4,
               .kv_heads = 8,
               .type = DType::bf16,
               .positions = {6000},
               .sink = 300,
               .window = 1500};
  p.lists = random_lists(p, 0.3);
  World world(p);
  world.upload();
  const std::vector<float> one = world.run(0, 1);
  world.problem.per_query_head = true;
  world.problem.lists.clear();
  for (const auto& list : p.lists) world.problem.lists.insert(world.problem.lists.end(), 4, list);
  LODE_CHECK(world.run(0, 1) == one);
}

LODE_TEST(stretches_of_rows_match_float64) {
  for (const int d : {64, 128}) {
    for (const int group : {1, 4, 16}) {
      for (const double share : {0.0, 0.05, 0.9}) {
        Problem p = {.d = d,
                     .group = group,
                     .kv_heads = group == 4 ? 3 : 1,
                     .type = share > 0.0 ? DType::bf16 : DType::f16,
                     .positions = {0, 5, 300, 4000},
                     .sink = 3,
                     .window = share > 0.5 ? 37 : 2000};
        p.lists = random_lists(p, share);
        p.runs = share > 0.5 ? 256 : 1 + group * 12;
        World world(p);
        world.upload();
        world.check_all(tolerance_of(p.type));
        const std::vector<float> many = world.run(0, 4);
        world.most_tokens = 4001;
        for (int again = 0; again < 3; ++again) LODE_CHECK(world.run(0, 4) == many);
        const std::vector<float> alone = world.run(3, 1);
        const std::ptrdiff_t row = world.heads() * d;
        LODE_CHECK(std::equal(alone.begin(), alone.begin() + row, many.begin() + 3 * row));
      }
    }
  }
}

LODE_TEST(a_few_stretches_match_float64) {
  Problem p = {
      .d = 128, .group = 4, .kv_heads = 2, .type = DType::bf16, .positions = {400}, .sink = 1, .window = 100};
  p.lists = random_lists(p, 0.5);
  p.runs = 9;
  World world(p);
  world.upload();
  world.check_all(tolerance_of(p.type));
}

LODE_TEST(no_stretches_and_no_window_give_the_empty_state) {
  Problem p = {.d = 64, .group = 2, .kv_heads = 1, .type = DType::bf16, .positions = {100}};
  p.lists = {{}};
  p.runs = 7;
  World world(p);
  world.upload();
  world.check_all(1e-3);
}

LODE_TEST(nothing_attended_gives_the_empty_state) {
  Problem p = {
      .d = 64, .group = 2, .kv_heads = 1, .type = DType::bf16, .positions = {100}, .sink = 0, .window = 0};
  p.lists = {{}};
  World world(p);
  world.upload();
  world.check_all(1e-3);
}

LODE_TEST(listing_every_key_gives_the_bits_of_full_attention) {
  for (const bool per_query_head : {false, true}) {
    Problem p = {.d = 128, .group = 4, .kv_heads = 8, .type = DType::bf16, .positions = {10, 2000, 9000}};
    World full(p);
    full.upload();
    const std::vector<float> want = full.run(0, 3);
    full.problem.sink = 5, full.problem.window = 100, full.problem.per_query_head = per_query_head;
    for (const int position : p.positions) {
      for (int i = 0; i < p.kv_heads * (per_query_head ? p.group : 1); ++i) {
        std::vector<std::int32_t> rows;
        for (int row = 5; row < position + 1 - 100; ++row) rows.push_back(row);
        full.problem.lists.push_back(rows);
      }
    }
    LODE_CHECK(full.run(0, 3) == want);
  }
}

LODE_TEST(bits_do_not_depend_on_the_batch) {
  World world({.d = 128, .group = 4, .kv_heads = 2, .type = DType::f16, .positions = {4000, 17, 4000, 900}});
  world.upload();
  const std::vector<float> all = world.run(0, 4);
  const std::size_t row = static_cast<std::size_t>(world.heads() * 128);
  for (int i = 0; i < 4; ++i) {
    const std::vector<float> alone = world.run(i, 1);
    LODE_CHECK(std::equal(alone.begin(), alone.begin() + static_cast<std::ptrdiff_t>(row),
                          all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(i) * row)));
  }
}

// Blocks of further streams wait for those alone that have started.
LODE_TEST(bits_do_not_depend_on_how_many_streams_there_are) {
  Problem lists = {.d = 128,
                   .group = 4,
                   .kv_heads = 8,
                   .type = DType::bf16,
                   .positions = {5000, 2500},
                   .per_query_head = true};
  lists.lists = random_lists(lists, 0.5);
  Problem few = {.d = 256, .group = 4, .kv_heads = 1, .type = DType::f16, .positions = {9000}};
  for (const Problem& problem : {lists, few}) {
    World world(problem);
    world.upload();
    const int count = static_cast<int>(problem.positions.size());
    const std::vector<float> want = world.run(0, count);
    for (int again = 0; again < 2; ++again) {
      const std::array<Stream, 3> streams;
      for (const Stream& stream : streams) {
        world.stream = stream.get();
        LODE_CHECK(world.run(0, count) == want);
      }
    }
  }
}

// One token alone: its first keys are fetched before the step's newest one is there.
LODE_TEST(a_token_alone_gives_the_bits_of_many) {
  for (const DType type : {DType::f16, DType::bf16}) {
    for (const int d : {64, 80, 128, 256, 512}) {
      for (const int group : {1, 4, 16}) {
        for (const int kv_heads : {1, 8}) {
          World world({.d = d,
                       .group = group,
                       .kv_heads = kv_heads,
                       .type = type,
                       .positions = {0, 1, 15, 16, 63, 64, 127, 130, 1000, 2047, 2048, 9000}});
          world.upload();
          const int count = static_cast<int>(world.problem.positions.size());
          const std::vector<float> all = world.run(0, count);
          const std::size_t row = static_cast<std::size_t>(world.heads() * d);
          for (int i = 0; i < count; ++i) {
            const std::vector<float> alone = world.run(i, 1);
            const auto from = all.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(i) * row);
            LODE_CHECK(std::equal(from, from + static_cast<std::ptrdiff_t>(row), alone.begin()));
          }
        }
      }
    }
  }
}

/// Of heads of d numbers.
void check_hurtful_numbers(DType type, int d) {
  const Problem problem = {.d = d, .group = 2, .kv_heads = 1, .type = type, .positions = {500}};
  World huge(problem);
  for (float& x : huge.q) x *= 300.0f;  // scores of hundreds: all but one weight vanish
  huge.upload();
  huge.check_all(tolerance_of(type));
  World equal(problem);
  std::fill(equal.keys[0].begin(), equal.keys[0].end(), 1.0f);
  equal.upload();
  equal.check_all(tolerance_of(type));
  for (const int number : {0, d - 1}) {
    World broken(problem);
    broken.keys[0][static_cast<std::size_t>(77 * d + number)] = NAN;
    broken.upload();
    const std::vector<float> got = broken.run(0, 1);
    for (int i = 0; i < 2 * d; ++i) LODE_CHECK(std::isnan(got[static_cast<std::size_t>(i)]));
  }
}

LODE_TEST(numbers_that_hurt) {
  for (const DType type : {DType::f32, DType::bf16})
    for (const int d : {64, 512}) check_hurtful_numbers(type, d);
}

void check_top_k(const std::vector<float>& scores, std::int64_t n, std::vector<std::int32_t> lengths,
                 std::vector<std::int32_t> k) {
  const std::int64_t lists = static_cast<std::int64_t>(k.size()),
                     capacity = std::max<std::int64_t>(1, *std::max_element(k.begin(), k.end()));
  const Buffer s = to_device(scores), l = to_device(lengths), kk = to_device(k);
  Buffer rows(lists * capacity * 4, "test"), counts(lists * 4, "test");
  top_k(s.as<float>(), lists, n, l.as<std::int32_t>(), kk.as<std::int32_t>(), rows.as<std::int32_t>(),
        capacity, counts.as<std::int32_t>(), nullptr, nullptr);
  LODE_CUDA(cudaDeviceSynchronize());
  const auto got = to_host<std::int32_t>(rows, static_cast<std::size_t>(lists * capacity));
  const auto got_counts = to_host<std::int32_t>(counts, static_cast<std::size_t>(lists));
  for (std::int64_t list = 0; list < lists; ++list) {
    std::vector<std::int32_t> order;
    const float* const row = scores.data() + list * n;
    for (std::int32_t i = 0; i < lengths[static_cast<std::size_t>(list)]; ++i) {
      if (row[i] > -kInf) order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return row[a] != row[b] ? row[a] > row[b] : a > b; });
    order.resize(std::min(order.size(), static_cast<std::size_t>(k[static_cast<std::size_t>(list)])));
    std::sort(order.begin(), order.end());
    LODE_CHECK(got_counts[static_cast<std::size_t>(list)] == static_cast<std::int32_t>(order.size()));
    LODE_CHECK(
        std::equal(order.begin(), order.end(), got.begin() + static_cast<std::ptrdiff_t>(list * capacity)));
  }
}

LODE_TEST(top_k_is_exact) {
  for (const std::int64_t n : {1, 31, 1000, 40000, 700000}) {
    std::vector<float> scores(static_cast<std::size_t>(6 * n));
    for (float& x : scores) x = normal();
    for (std::int64_t i = 0; i < n; ++i) {
      scores[static_cast<std::size_t>(n + i)] = 3.0f;                                     // all equal
      scores[static_cast<std::size_t>(2 * n + i)] = static_cast<float>(i % 5);            // many ties
      if (i % 3 == 0) scores[static_cast<std::size_t>(3 * n + i)] = i % 2 ? NAN : -kInf;  // not to be chosen
      if (i % 100 == 0) scores[static_cast<std::size_t>(4 * n + i)] = kInf;
      scores[static_cast<std::size_t>(5 * n + i)] = -kInf;
    }
    const auto length = static_cast<std::int32_t>(n);
    for (const std::int32_t k : {0, 1, 7, 500, 800000})
      check_top_k(scores, n, {length, length, length - length / 3, length, length, length},
                  std::vector<std::int32_t>(6, k));
  }
}

}  // namespace
}  // namespace lode::cuda
