// SPDX-License-Identifier: Apache-2.0
// What comes to the GPU by way of pinned memory is what lies on the host: piece by piece, from one thread and from
// many, and whole contexts with rows that begin and end inside of blocks.
#include "gpu/pinned_upload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "base/rng.h"
#include "base/threads.h"
#include "engine/model.h"
#include "kv/store.h"
#include "lodestone/error.h"
#include "model/kv_shape.h"
#include "support/gpu.h"

namespace lode {
namespace {

constexpr std::int64_t kPiece = 1000, kPieces = 37;  // bytes, the last has fewer

TEST(PinnedUpload, EveryPieceComesOnce) {
  NEEDS_GPU();
  ThreadPool threads(3);
  std::vector<std::byte> from(static_cast<std::size_t>(kPiece * (kPieces - 1) + 13));
  Rng rng(5);
  for (std::byte& b : from) b = static_cast<std::byte>(rng.next());
  for (ThreadPool* const pool : {static_cast<ThreadPool*>(nullptr), &threads}) {
    cuda::Buffer to(std::ssize(from), "a test");
    PinnedUpload upload(pool, kPiece);
    const auto piece_of = [&](std::int64_t i) {
      const auto begin = static_cast<std::size_t>(i * kPiece);
      return std::span(from).subspan(begin, std::min<std::size_t>(kPiece, from.size() - begin));
    };
    upload.run(
        kPieces, [&](std::int64_t i, std::byte* at) { std::ranges::copy(piece_of(i), at); },
        [&](std::int64_t i, const std::byte* at, PinnedUpload::Lane& lane) {
          const auto bytes = std::ssize(piece_of(i));  // by way of the lane's own memory on the GPU
          cuda::copy(lane.scratch(), at, bytes, lane.stream());
          cuda::copy(to.as<std::byte>() + i * kPiece, lane.scratch(), bytes, lane.stream());
        });
    std::vector<std::byte> back(from.size());
    const cuda::Stream stream;
    cuda::copy(back.data(), to.as<void>(), to.bytes(), stream.get());
    stream.synchronize();
    EXPECT_EQ(back, from);
    upload.run(0, nullptr, nullptr);
  }
}

TEST(PinnedUpload, APieceThatFailsEndsIt) {
  NEEDS_GPU();
  ThreadPool threads(2);
  cuda::Buffer to(kPiece, "a test");
  PinnedUpload upload(&threads);
  std::atomic<int> sent = 0;
  const auto send = [&](std::int64_t, const std::byte* at, PinnedUpload::Lane& lane) {
    ++sent;
    cuda::copy(to.as<void>(), at, kPiece, lane.stream());
  };
  const auto fill = [&](std::int64_t i, std::byte* at) {
    if (i == 5) throw InputError("piece 5");
    std::fill_n(at, kPiece, std::byte{1});
  };
  EXPECT_THROW(upload.run(10, fill, send), InputError);
  EXPECT_LT(sent, 10);
  upload.run(4, fill, send);  // and can go on
}

void add_rows(KvStore& store, std::int64_t count, std::uint64_t seed) {
  const KvShape& shape = store.shape();
  for (int layer = 0; layer < shape.layers; ++layer) {
    std::vector<float> k(static_cast<std::size_t>(count * shape.kv_heads * shape.head_dim)), v(k.size());
    Rng rng(hash_seed(seed, layer));
    for (std::vector<float>* const rows : {&k, &v})
      for (float& x : *rows) x = static_cast<float>(rng.next() % 4096);
    store.write(layer, count, k, v);
  }
  store.commit(count);
}

TEST(PinnedUpload, RowsOfAContextComeWhole) {
  NEEDS_GPU();
  constexpr std::int64_t kMost = 8192;
  const ModelConfig& config = pocket()->config();
  const auto model = make_gpu_model(config, pocket()->impl().weights, 0, {}, &pocket()->pool());
  for (const DType type : {DType::f32, DType::bf16}) {
    for (ThreadPool* const pool : {static_cast<ThreadPool*>(nullptr), &pocket()->pool()}) {
      const auto context =
          make_gpu_context(config, model, {.pool = pool, .kv_type = type, .max_tokens = kMost, .chunk = 64});
      KvStore store(kv_shape(config, type, kMost)), back(kv_shape(config, type, kMost));
      for (const std::int64_t more : {50, 6333, 1, 300}) {  // more than 16 MiB at once is pinned
        add_rows(store, more, static_cast<std::uint64_t>(more));
        context->upload(store);
        ASSERT_EQ(context->tokens(), store.tokens());
      }
      context->download(back);
      ASSERT_EQ(back.tokens(), store.tokens());
      for (int layer = 0; layer < config.layers; ++layer)
        for (int head = 0; head < config.kv_heads; ++head)
          for (const auto part : {KvStore::Part::k, KvStore::Part::v})
            EXPECT_TRUE(std::ranges::equal(store.rows(layer, head, part), back.rows(layer, head, part)))
                << layer << " " << head;
    }
  }
}

}  // namespace
}  // namespace lode
