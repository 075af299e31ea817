// SPDX-License-Identifier: Apache-2.0
// Every head has the list of the choice that serves it, in its order.
#include <cuda_runtime.h>

#include <vector>

#include "harness.h"
#include "kernels/cuda/select/join_lists.h"

namespace lode::cuda {
namespace {

constexpr int kHeads = 3, kGroup = 4;
constexpr std::int64_t kSink = 3, kWindow = 10;

template <class T>
Buffer on_device(const std::vector<T>& from, StreamHandle stream) {
  Buffer to(std::ssize(from) * std::int64_t{sizeof(T)}, "a test");
  copy(to.as<void>(), from.data(), to.bytes(), stream);
  return to;
}

/// Lists of random lengths and rows.
struct Lists {
  std::int64_t capacity = 1;
  int lists_per_head = 1;
  std::vector<std::int32_t> rows, counts;
  Buffer rows_there, counts_there;

  Lists(int tokens, int each, std::int64_t most, StreamHandle stream) : capacity(most), lists_per_head(each) {
    const std::int64_t lists = std::int64_t{tokens} * kHeads * each;
    std::uint32_t state = 7 + static_cast<std::uint32_t>(each);
    const auto next = [&] {
      return static_cast<std::int32_t>((state = state * 1664525u + 1013904223u) >> 8);
    };
    for (std::int64_t i = 0; i < lists; ++i) counts.push_back(i == 1 ? 0 : next() % (capacity + 1));
    for (std::int64_t i = 0; i < lists * capacity; ++i) rows.push_back(next());
    rows_there = on_device(rows, stream);
    counts_there = on_device(counts, stream);
  }
  ListSource source() const {
    return {rows_there.as<std::int32_t>(), counts_there.as<std::int32_t>(), capacity, lists_per_head};
  }
};

void check_joined(const std::vector<std::int32_t>& positions, const std::vector<std::int32_t>& of_head,
                  int each) {
  Stream stream;
  const int tokens = static_cast<int>(std::ssize(positions));
  const Lists shared(tokens, 1, 700, stream.get()), own(tokens, each, 40, stream.get());
  std::vector<QueryToken> queries;
  for (const std::int32_t position : positions) queries.push_back({0, position});
  const Buffer queries_there = on_device(queries, stream.get()), serves = on_device(of_head, stream.get());
  constexpr std::int64_t kCapacity = 20000;
  const std::int64_t lists = std::int64_t{tokens} * kHeads * each;
  const Buffer rows(lists * kCapacity * 4, "a test"), counts(lists * 4, "a test");
  const Queries in = {.tokens = queries_there.as<QueryToken>(),
                      .layout = {kHeads, 64, DType::bf16, 0},
                      .count = tokens,
                      .query_heads = kHeads * kGroup};
  JoinTask task = {.of_head = serves.as<std::int32_t>(),
                   .rows = rows.as<std::int32_t>(),
                   .counts = counts.as<std::int32_t>(),
                   .capacity = kCapacity,
                   .lists_per_head = each,
                   .sink = kSink,
                   .window = kWindow};
  task.source[0] = shared.source();
  task.source[1].from = 0;  // every far key
  task.source[2] = own.source();
  stream.synchronize();  // tokens and sources are looked up early
  join_lists(in, task, stream.get());
  std::vector<std::int32_t> found(lists * kCapacity), lengths(lists);
  copy(found.data(), rows.as<void>(), rows.bytes(), stream.get());
  copy(lengths.data(), counts.as<void>(), counts.bytes(), stream.get());
  stream.synchronize();
  for (std::int64_t list = 0; list < lists; ++list) {
    const std::int64_t head = list / each;
    const int which = of_head[head % kHeads];
    std::vector<std::int32_t> expected;
    if (which == 1) {
      for (std::int64_t i = kSink; i < positions[head / kHeads] + 1 - kWindow; ++i)
        expected.push_back(static_cast<std::int32_t>(i));
    } else {
      const Lists& from = which == 0 ? shared : own;
      const std::int64_t at = which == 0 ? head : list;
      expected.assign(from.rows.begin() + at * from.capacity,
                      from.rows.begin() + at * from.capacity + from.counts[at]);
    }
    LODE_CHECK(lengths[list] == std::ssize(expected));
    LODE_CHECK(std::equal(expected.begin(), expected.end(), found.begin() + list * kCapacity));
  }
}

LODE_TEST(every_head_has_the_list_of_the_choice_that_serves_it) {
  check_joined({17000}, {0, 1, 2}, kGroup);
  check_joined({17000}, {2, 0, 2}, 1);
  check_joined({0, 12, 13, 4000}, {1, 2, 0}, kGroup);
  check_joined({5000, 5001, 5002}, {1, 1, 1}, 1);
}

LODE_TEST(a_choice_for_all_queries_is_cut_where_their_far_keys_end) {
  Stream stream;
  const std::vector<std::int32_t> rows = {4, 5, 9, 20, -1, 6, 30, 31, 32, 40, 7, -1, -1, -1, -1},
                                  counts = {4, 5, 1};
  const std::vector<QueryToken> queries = {{0, 11}, {0, 29}, {0, 80}, {0, 41}};
  const Buffer rows_there = on_device(rows, stream.get()), counts_there = on_device(counts, stream.get()),
               queries_there = on_device(queries, stream.get()),
               serves = on_device(std::vector<std::int32_t>(kHeads, 0), stream.get()),
               to(4 * kHeads * 100 * 4, "a test"), lengths_there(4 * kHeads * 4, "a test");
  JoinTask task = {.of_head = serves.as<std::int32_t>(),
                   .rows = to.as<std::int32_t>(),
                   .counts = lengths_there.as<std::int32_t>(),
                   .capacity = 100,
                   .sink = kSink,
                   .window = kWindow};
  task.source[0] = {.rows = rows_there.as<std::int32_t>(),
                    .counts = counts_there.as<std::int32_t>(),
                    .capacity = 5,
                    .same_for_all = true,
                    .from = 41};
  stream.synchronize();
  join_lists({.tokens = queries_there.as<QueryToken>(),
              .layout = {kHeads, 64, DType::bf16, 0},
              .count = 4,
              .query_heads = kHeads * kGroup},
             task, stream.get());
  std::vector<std::int32_t> found(4 * kHeads * 100), lengths(4 * kHeads);
  copy(found.data(), to.as<void>(), to.bytes(), stream.get());
  copy(lengths.data(), lengths_there.as<void>(), lengths_there.bytes(), stream.get());
  stream.synchronize();
  for (int list = 0; list < 4 * kHeads; ++list) {
    const std::int64_t end = queries[list / kHeads].position + 1 - kWindow;
    std::vector<std::int32_t> expected;
    for (int i = 0; i < counts[list % kHeads]; ++i)
      if (rows[list % kHeads * 5 + i] < end) expected.push_back(rows[list % kHeads * 5 + i]);
    for (std::int64_t row = 41; row < end; ++row) expected.push_back(static_cast<std::int32_t>(row));
    LODE_CHECK(lengths[list] == std::ssize(expected));
    LODE_CHECK(std::equal(expected.begin(), expected.end(), found.begin() + list * 100));
  }
}

}  // namespace
}  // namespace lode::cuda
