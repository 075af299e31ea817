// SPDX-License-Identifier: Apache-2.0
// Rows in another order: every part of a row moves, the rows around stay, what comes behind comes and goes,
// and the inverse gives the bytes back.
#include "kv/move_rows.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/file.h"
#include "base/rng.h"
#include "base/threads.h"

namespace lode {
namespace {

using Part = KvStore::Part;

/// Keys and values that are nowhere the same: who takes one for the other is seen.
void append(KvStore& store, std::int64_t count, std::uint64_t seed) {
  std::vector<float> k(static_cast<std::size_t>(count * store.shape().kv_heads * store.shape().head_dim)),
      v(k);
  for (int layer = 0; layer < store.shape().layers; ++layer) {
    Rng rng(hash_seed(seed, layer));
    for (std::vector<float>* x : {&k, &v})
      for (float& value : *x) value = static_cast<float>(rng.normal());
    store.write(layer, count, k, v);
  }
  store.commit(count);
}

RowOrder shuffled(Position begin, Position end, std::uint64_t seed) {
  RowOrder order = {.begin = begin, .tokens = {}};
  for (Position t = begin; t < end; ++t) order.tokens.push_back(t);
  Rng rng(seed);
  for (std::size_t i = order.tokens.size(); i > 1; --i)
    std::swap(order.tokens[i - 1], order.tokens[rng.below(i)]);
  return order;
}

class MovedRows : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Kv, MovedRows,
                         testing::Values(DType::f32, DType::f16, DType::bf16, DType::q8, DType::q4),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(MovedRows, ThereAndBack) {
  ThreadPool pool(3);
  const KvShape shape = {.layers = 2, .kv_heads = 2, .head_dim = 24, .type = GetParam(), .max_tokens = 5000};
  KvStore moved(shape), plain(shape);
  for (KvStore* s : {&moved, &plain}) append(*s, 3000, 5);
  const std::vector<RowOrder> orders = {shuffled(7, 2900, 1), shuffled(7, 2900, 2)};
  move_rows(moved, 1, orders, pool);
  for (KvStore* s : {&moved, &plain}) {
    append(*s, 100, 6);
    s->roll_back(2900);
    append(*s, 50, 7);
  }
  const std::int64_t width = row_bytes_of(shape.type, 24);
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      for (const Part part : {Part::k, Part::v, Part::k_scale, Part::v_scale}) {
        const bool scale = part == Part::k_scale || part == Part::v_scale;
        if (scale && shape.type != DType::q8) continue;
        const std::int64_t bytes = scale ? std::int64_t{sizeof(float)} : width;
        const auto a = moved.rows(layer, head, part), b = plain.rows(layer, head, part);
        for (Position row = 0; row < 2950; ++row) {
          const Position token = layer == 0 ? row : orders[static_cast<std::size_t>(head)].token_of(row);
          ASSERT_EQ(
              std::memcmp(a.data() + row * bytes, b.data() + token * bytes, static_cast<std::size_t>(bytes)),
              0);
        }
      }
    }
  }
  move_rows(moved, 1, std::vector{orders[0].inverse(), orders[1].inverse()}, pool);
  for (int head = 0; head < 2; ++head) {
    for (const Part part : {Part::k, Part::v, Part::k_scale, Part::v_scale}) {
      if ((part == Part::k_scale || part == Part::v_scale) && shape.type != DType::q8) continue;
      const auto a = moved.rows(1, head, part), b = plain.rows(1, head, part);
      EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size()), 0);
    }
  }
}

/// Whether the page at this address is of a mapped file.
bool is_of_a_file(const std::byte* address) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::uint64_t begin = 0, end = 0, inode = 0;
    // begin-end rights offset device inode path
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64 " %*s %*s %*s %" SCNu64, &begin, &end, &inode) != 3)
      continue;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (at >= begin && at < end) return inode != 0;
  }
  ADD_FAILURE() << "no mapping holds the address";
  return false;
}

TEST(MovedRowsOfAFile, AreMemoryOfTheStoreAndTheFileStays) {
  ThreadPool pool(2);
  // Several huge pages a part, begun and ended inside one.
  const KvShape shape = {.layers = 1, .kv_heads = 1, .head_dim = 256, .type = DType::f32, .max_tokens = 8200};
  constexpr std::int64_t kTokens = 8000, kBytes = kTokens * 1024;
  KvStore plain(shape), mapped(shape);
  append(plain, kTokens, 5);
  const auto path = std::filesystem::path(testing::TempDir()) / ("rows-" + std::to_string(getpid()));
  std::string before;
  for (const Part part : {Part::k, Part::v})
    before.append(reinterpret_cast<const char*>(plain.rows(0, 0, part).data()), kBytes);
  std::ofstream(path, std::ios::binary) << before;
  {
    const MappedFile file(path);
    mapped.map(0, 0, Part::k, file, 0, kBytes);
    mapped.map(0, 0, Part::v, file, kBytes, kBytes);
    mapped.commit(kTokens);
    for (KvStore* store : {&plain, &mapped}) append(*store, 100, 6);
    RowOrder order = shuffled(700, 7900, 1);
    const auto row_of_file = [&](Position row) {
      return is_of_a_file(mapped.rows(0, 0, Part::v).data() + row * 1024);
    };
    EXPECT_TRUE(row_of_file(4000));
    for (const int times : {0, 1}) {
      move_rows(mapped, 0, std::span(&order, 1), pool);
      EXPECT_FALSE(row_of_file(4000));
      EXPECT_TRUE(row_of_file(10)) << "no row of the order shares its huge page";
      for (const Part part : {Part::k, Part::v}) {
        const auto a = mapped.rows(0, 0, part), b = plain.rows(0, 0, part);
        for (Position row = 0; row < kTokens + 100; ++row) {
          const Position token = times == 0 ? order.token_of(row) : row;
          ASSERT_EQ(std::memcmp(a.data() + row * 1024, b.data() + token * 1024, 1024), 0) << row;
        }
      }
      order = order.inverse();
    }
  }
  EXPECT_EQ(read_file(path), before);
  std::filesystem::remove(path);
}

TEST(MovedRowsOfAnEmptyOrder, Stay) {
  ThreadPool pool(1);
  KvStore store({.layers = 1, .kv_heads = 1, .head_dim = 8, .type = DType::f32, .max_tokens = 8});
  append(store, 4, 1);
  const auto rows = store.rows(0, 0, KvStore::Part::k);
  const std::vector<std::byte> before(rows.begin(), rows.end());
  move_rows(store, 0, std::vector<RowOrder>(1), pool);
  EXPECT_TRUE(std::ranges::equal(store.rows(0, 0, KvStore::Part::k), before));
}

}  // namespace
}  // namespace lode
