// SPDX-License-Identifier: Apache-2.0
// The KV store: what is written comes back in the store's type, rows never move, a mapped file is shared
// until written to, and memory is what the type says.
#include "kv/store.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>

#include "base/file.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "kernels/kv_row.h"
#include "lodestone/error.h"
#include "support/normals.h"

namespace lode {
namespace {

using test::normals;

std::vector<float> row_of(const KvRows& rows, std::int64_t row, bool key) {
  std::vector<float> x(static_cast<std::size_t>(rows.d));
  (key ? read_key_row : read_value_row)(rows, row, x.data());
  return x;
}

void append(KvStore& store, std::int64_t count, std::uint64_t seed) {
  const std::int64_t n = count * store.shape().kv_heads * store.shape().head_dim;
  for (int layer = 0; layer < store.shape().layers; ++layer) {
    store.write(layer, count, normals(n, hash_seed(seed, layer, 0)), normals(n, hash_seed(seed, layer, 1)));
  }
  store.commit(count);
}

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * 4096;
}

class OfType : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Kv, OfType,
                         testing::Values(DType::f32, DType::f16, DType::bf16, DType::q8, DType::q4),
                         [](const auto& info) { return std::string(name_of(info.param)); });

double tolerance(DType type) {
  switch (type) {
    case DType::f32:
      return 0.0;
    case DType::f16:
      return 1e-3;
    case DType::bf16:
      return 8e-3;
    case DType::q8:
      return 4e-2;  // half a step of max|x| / 127, of numbers up to 5
    case DType::q4:
      return 0.75;  // about a quarter of the largest level's distance to the next, six times, of numbers whose size is 1
  }
  return 0.0;
}

TEST_P(OfType, RowsComeBackRoundedAndChunksDoNotMatter) {
  const KvShape shape = {.layers = 2, .kv_heads = 3, .head_dim = 80, .type = GetParam(), .max_tokens = 64};
  const std::int64_t tokens = 37, per_token = 3 * 80;
  KvStore whole(shape), pieces(shape);
  for (int layer = 0; layer < 2; ++layer) {
    const std::vector<float> k = normals(tokens * per_token, 10 + layer),
                             v = normals(tokens * per_token, 20 + layer);
    whole.write(layer, tokens, k, v);
  }
  whole.commit(tokens);
  for (std::int64_t at = 0; at < tokens;) {
    const std::int64_t count = std::min<std::int64_t>(tokens - at, 1 + at % 7);
    for (int layer = 0; layer < 2; ++layer) {
      const std::vector<float> k = normals(tokens * per_token, 10 + layer),
                               v = normals(tokens * per_token, 20 + layer);
      const auto part = [&](const std::vector<float>& x) {
        return std::span(x).subspan(static_cast<std::size_t>(at * per_token),
                                    static_cast<std::size_t>(count * per_token));
      };
      pieces.write(layer, count, part(k), part(v));
      EXPECT_EQ(pieces.layer(layer, count).tokens, at + count);
    }
    pieces.commit(count);
    at += count;
  }
  for (int layer = 0; layer < 2; ++layer) {
    const std::vector<float> k = normals(tokens * per_token, 10 + layer);
    for (int head = 0; head < 3; ++head) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::vector<float> got =
            row_of(whole.layer(layer).heads[static_cast<std::size_t>(head)], t, true);
        for (int i = 0; i < 80; ++i) {
          const float expected = k[static_cast<std::size_t>((t * 3 + head) * 80 + i)];
          EXPECT_NEAR(got[static_cast<std::size_t>(i)], expected,
                      tolerance(GetParam()) * std::max(1.0f, std::fabs(expected)));
        }
        EXPECT_EQ(got, row_of(pieces.layer(layer).heads[static_cast<std::size_t>(head)], t, true));
      }
      const auto bytes = whole.rows(layer, head, KvStore::Part::v),
                 other = pieces.rows(layer, head, KvStore::Part::v);
      ASSERT_EQ(bytes.size(), other.size());
      EXPECT_EQ(std::memcmp(bytes.data(), other.data(), bytes.size()), 0);
    }
  }
}

TEST_P(OfType, MemoryIsWhatTheTypeSays) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer keeps four bytes of its own for each of ours";
#endif
  KvStore store({.layers = 2, .kv_heads = 2, .head_dim = 64, .type = GetParam(), .max_tokens = 1 << 24});
  const std::int64_t tokens = 40000, chunk = 1000;
  const std::int64_t expected = tokens * store.shape().token_bytes();
  const std::vector<float> x = normals(chunk * 2 * 64, 1);
  store.expect(tokens);
  const std::int64_t before = resident_bytes();
  for (std::int64_t at = 0; at < tokens; at += chunk) {
    for (int layer = 0; layer < 2; ++layer) store.write(layer, chunk, x, x);
    store.commit(chunk);
  }
  const std::int64_t taken = resident_bytes() - before;
  EXPECT_NEAR(static_cast<double>(taken), static_cast<double>(expected),
              0.03 * static_cast<double>(expected) + (1 << 20));
  store.roll_back(100);
  EXPECT_LT(resident_bytes() - before, expected / 10);  // so many tokens go back to the system
}

TEST_P(OfType, InfinitiesAndNanStayWhatTheyAre) {
  KvStore store({.layers = 1, .kv_heads = 1, .head_dim = 4, .type = GetParam(), .max_tokens = 4});
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> k = {1, nan, 2, 3, inf, -inf, 0, 1, 0, 0, 0, 0, 1e-45f, 0, 0, 0};
  store.write(0, 4, k, k);
  store.commit(4);
  const KvRows rows = store.layer(0).heads[0];
  const bool q8 = bytes_of(GetParam()) <= 1;
  EXPECT_TRUE(std::isnan(row_of(rows, 0, true)[1]));
  EXPECT_EQ(std::isnan(row_of(rows, 0, true)[0]), q8);
  EXPECT_TRUE(q8 ? std::isnan(row_of(rows, 1, true)[0]) : row_of(rows, 1, true)[0] == inf);
  EXPECT_EQ(row_of(rows, 2, true), std::vector<float>(4, 0.0f));
  EXPECT_NEAR(row_of(rows, 3, true)[0], 0.0f, 1e-30f);
}

/// The parts of a store as one file, each at a page.
struct Saved {
  std::filesystem::path path;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> sections;  // offset, bytes; by (layer, head, part)
};

Saved save(const KvStore& store) {
  Saved saved;
  saved.path = std::filesystem::path(testing::TempDir()) /
               ("kv-" + std::to_string(getpid()) + std::string(name_of(store.shape().type)));
  std::string bytes;
  const int parts = store.shape().type == DType::q8 ? 4 : 2;
  for (int layer = 0; layer < store.shape().layers; ++layer) {
    for (int head = 0; head < store.shape().kv_heads; ++head) {
      for (int part = 0; part < parts; ++part) {
        const auto rows = store.rows(layer, head, static_cast<KvStore::Part>(part));
        bytes.resize((bytes.size() + 4095) / 4096 * 4096, 'x');
        saved.sections.emplace_back(bytes.size(), rows.size());
        bytes.append(reinterpret_cast<const char*>(rows.data()), rows.size());
      }
    }
  }
  std::ofstream(saved.path, std::ios::binary) << bytes;
  return saved;
}

TEST_P(OfType, AMappedFileGrowsAndTheFileStaysAsItWas) {
  const KvShape shape = {.layers = 2, .kv_heads = 2, .head_dim = 64, .type = GetParam(), .max_tokens = 2000};
  KvStore written(shape);
  append(written, 777, 5);
  const Saved saved = save(written);
  const std::string before = read_file(saved.path);
  {
    const MappedFile file(saved.path);
    KvStore mapped(shape);
    std::size_t section = 0;
    const int parts = shape.type == DType::q8 ? 4 : 2;
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        for (int part = 0; part < parts; ++part, ++section) {
          mapped.map(layer, head, static_cast<KvStore::Part>(part), file, saved.sections[section].first,
                     saved.sections[section].second);
        }
      }
    }
    mapped.commit(777);
    for (KvStore* store : {&written, &mapped}) {
      append(*store, 123, 6);
      store->roll_back(800);
      append(*store, 300, 7);
    }
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        for (int part = 0; part < parts; ++part) {
          const auto a = written.rows(layer, head, static_cast<KvStore::Part>(part));
          const auto b = mapped.rows(layer, head, static_cast<KvStore::Part>(part));
          ASSERT_EQ(a.size(), b.size());
          EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size()), 0);
        }
      }
    }
    mapped.roll_back(10);  // into the mapped rows
    append(mapped, 5, 8);
    EXPECT_EQ(mapped.tokens(), 15);
  }
  EXPECT_EQ(read_file(saved.path), before);
  std::filesystem::remove(saved.path);
}

TEST(KvStore, MapsOfTheWrongSizeAreBadInput) {
  const KvShape shape = {.layers = 1, .kv_heads = 1, .head_dim = 64, .type = DType::f16, .max_tokens = 100};
  KvStore written(shape);
  append(written, 100, 5);
  const Saved saved = save(written);
  const MappedFile file(saved.path);
  KvStore store(shape);
  EXPECT_THROW(store.map(0, 0, KvStore::Part::k, file, 0, 127), InputError);        // no whole row
  EXPECT_THROW(store.map(0, 0, KvStore::Part::k, file, 0, 128 * 101), InputError);  // too many rows
  EXPECT_THROW(store.map(0, 0, KvStore::Part::k, file, 1 << 20, 128), InputError);  // behind the end
  EXPECT_THROW(store.map(0, 0, KvStore::Part::k, file, 0, std::uint64_t{0} - 128),
               InputError);  // wraps around
  EXPECT_THROW(store.map(0, 0, KvStore::Part::k, file, std::uint64_t{0} - 4096, 128), InputError);
  store.map(0, 0, KvStore::Part::k, file, 0, 0);
  store.map(0, 0, KvStore::Part::v, file, 0, 0);
  store.commit(0);
  EXPECT_EQ(store.tokens(), 0);
  std::filesystem::remove(saved.path);
}

TEST(KvStore, RowsDoNotMoveAndRollBackForgets) {
  KvStore store({.layers = 1, .kv_heads = 1, .head_dim = 64, .type = DType::f16, .max_tokens = 100000});
  append(store, 1, 1);
  const std::byte* const first = store.layer(0).heads[0].k;
  append(store, 50000, 2);
  EXPECT_EQ(store.layer(0).heads[0].k, first);
  store.roll_back(1);
  EXPECT_EQ(store.tokens(), 1);
  EXPECT_EQ(store.layer(0).tokens, 1);
  append(store, 9, 3);
  KvStore fresh({.layers = 1, .kv_heads = 1, .head_dim = 64, .type = DType::f16, .max_tokens = 10});
  append(fresh, 1, 1);
  append(fresh, 9, 3);
  const auto a = store.rows(0, 0, KvStore::Part::k), b = fresh.rows(0, 0, KvStore::Part::k);
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size()), 0);
}

/// The last layer attends to the first one's rows; the second has fewer and longer ones.
TEST_P(OfType, LayersOfOtherHeadsAndLayersThatShareRows) {
  const KvShape shape = {.layers = 3,
                         .kv_heads = 2,
                         .head_dim = 16,
                         .type = GetParam(),
                         .max_tokens = 50,
                         .by_layer = {{2, 8, 0}, {1, 16, 1}, {2, 8, 0}}};
  EXPECT_TRUE(shape.layers_share_rows() && shape.has_rows(1) && !shape.has_rows(2));
  EXPECT_TRUE(shape.holds(0, 1, true) && !shape.holds(1, 1, true) && !shape.holds(2, 0, true));
  KvStore store(shape);
  const std::vector<float> short_rows = test::normals(5 * 2 * 8, 1), long_rows = test::normals(5 * 16, 2);
  store.write(0, 5, short_rows, short_rows);
  store.write(1, 5, long_rows, long_rows);
  EXPECT_EQ(store.layer(2, 5).heads[1].k, store.layer(0, 5).heads[1].k) << "before they are committed, too";
  EXPECT_EQ(store.layer(2, 5).heads[1].rows, 5);
  store.commit(5);
  ASSERT_EQ(store.layer(1).heads.size(), 1u);
  EXPECT_EQ(store.layer(1).heads[0].d, 16);
  EXPECT_EQ(store.layer(2).heads[0].d, 8);
  std::vector<float> row(16);
  read_key_row(store.layer(1).heads[0], 4, row.data());
  for (int c = 0; c < 16; ++c)
    EXPECT_NEAR(row[static_cast<std::size_t>(c)], long_rows[static_cast<std::size_t>(64 + c)], 0.5);
  read_value_row(store.layer(2).heads[1], 3, row.data());
  for (int c = 0; c < 8; ++c)
    EXPECT_NEAR(row[static_cast<std::size_t>(c)], short_rows[static_cast<std::size_t>(3 * 16 + 8 + c)], 0.5);
  store.roll_back(2);
  EXPECT_EQ(store.layer(2).heads[0].rows, 2);
}

/// Layers that hold what others hold: copies, or the same memory. With threads as without.
TEST_P(OfType, LayersRepeatOthers) {
  ThreadPool pool(3);
  const KvShape shape = {.layers = 5, .kv_heads = 2, .head_dim = 32, .type = GetParam(), .max_tokens = 100};
  for (const bool share : {false, true}) {
    KvStore store(shape), plain(shape);
    if (share) store.share(2);
    for (const std::int64_t count : {7, 30}) {
      for (int layer = 0; layer < shape.layers; ++layer) {
        const std::int64_t n = count * shape.kv_heads * shape.head_dim;
        const auto k = normals(n, hash_seed(count, layer % 2)),
                   v = normals(n, hash_seed(count, layer % 2, 1));
        plain.write(layer, count, k, v);
        if (layer < 2) store.write(layer, count, k, v, &pool);
      }
      store.repeat(2, count, pool);
      store.commit(count);
      plain.commit(count);
    }
    for (int layer = 0; layer < shape.layers; ++layer) {
      for (int head = 0; head < shape.kv_heads; ++head) {
        for (const bool key : {true, false})
          for (std::int64_t row = 0; row < 37; ++row)
            EXPECT_EQ(row_of(store.layer(layer).heads[static_cast<std::size_t>(head)], row, key),
                      row_of(plain.layer(layer).heads[static_cast<std::size_t>(head)], row, key));
        EXPECT_EQ(store.rows(layer, head, KvStore::Part::k).data() ==
                      store.rows(layer % 2, head, KvStore::Part::k).data(),
                  share || layer < 2);
      }
    }
  }
}

TEST(KvStore, RollBackDropsWhatWasPending) {
  KvStore store({.layers = 2, .kv_heads = 1, .head_dim = 2, .type = DType::f32, .max_tokens = 8});
  append(store, 3, 1);
  store.write(0, 2, normals(4, 1), normals(4, 2));  // the second layer never comes
  store.roll_back(3);
  append(store, 5, 2);
  EXPECT_EQ(store.tokens(), 8);
}

TEST(KvStore, TooManyTokensNameBothNumbers) {
  KvStore store({.layers = 1, .kv_heads = 1, .head_dim = 2, .type = DType::f32, .max_tokens = 10});
  append(store, 8, 1);
  try {
    append(store, 3, 2);
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("at most 10"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("8 there and 3"), std::string::npos);
  }
  append(store, 2, 2);
  EXPECT_EQ(store.tokens(), 10);
  append(store, 0, 3);
  EXPECT_EQ(store.tokens(), 10);
}

TEST(KvStore, OffsetsPassFourGiB) {
  const std::int64_t far = (std::int64_t{9} << 30) / 512;  // f32 rows of 512 bytes, beyond 9 GiB
  KvStore store({.layers = 1, .kv_heads = 2, .head_dim = 128, .type = DType::f32, .max_tokens = far + 10});
  const KvRows a = store.layer(0, far + 10).heads[0], b = store.layer(0, far + 10).heads[1];
  EXPECT_GE(std::llabs(a.k - b.k), far * 512);
  const_cast<std::byte*>(a.k)[(far + 9) * 512 + 511] = std::byte{1};  // touches one page
}

TEST(KvShape, TokenBytes) {
  EXPECT_EQ((KvShape{.layers = 32, .kv_heads = 8, .head_dim = 128, .type = DType::bf16, .max_tokens = 1}
                 .token_bytes()),
            131072);
  EXPECT_EQ(
      (KvShape{.layers = 1, .kv_heads = 2, .head_dim = 64, .type = DType::q8, .max_tokens = 1}.token_bytes()),
      2 * 2 * 68);
  EXPECT_EQ((KvShape{.layers = 32, .kv_heads = 8, .head_dim = 128, .type = DType::q4, .max_tokens = 1}
                 .token_bytes()),
            36864);  // 128k tokens: 4.83 GB
}

}  // namespace
}  // namespace lode
