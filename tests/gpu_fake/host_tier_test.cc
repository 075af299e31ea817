// SPDX-License-Identifier: Apache-2.0
// What of a host's keys and values is on the GPU: the rows that a step asked for, and memory for little more,
// after any sequence of steps and rollbacks.
#include "gpu/host_tier.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "base/threads.h"

namespace lode {
namespace {

constexpr KvShape kShape = {
    .layers = 2, .kv_heads = 2, .head_dim = 64, .type = DType::f32, .max_tokens = 30000};

/// The host's side and the GPU's, for random walks over both.
struct Both {
  ThreadPool pool{2};
  cuda::Stream stream;
  KvStore store{kShape};
  cuda::KvRange held{{kShape.kv_heads, kShape.head_dim, kShape.type, 0}, kShape.layers, kShape.max_tokens};
  HostTier tier{kShape, pool, stream.get()};
  std::int64_t written = 0;  // of rows ever: no two rows are alike

  void write(std::int64_t count) {
    std::vector<float> k(static_cast<std::size_t>(count * kShape.kv_heads * kShape.head_dim)), v(k.size());
    for (int layer = 0; layer < kShape.layers; ++layer) {
      for (std::size_t i = 0; i < k.size(); ++i) {
        k[i] = static_cast<float>(written + layer * 7 + static_cast<std::int64_t>(i));
        v[i] = -k[i];
      }
      store.write(layer, count, k, v);
    }
    store.commit(count);
    written += count;
  }
  /// A step's own new rows, which its kernels would write.
  void write_held(std::int64_t count) {
    const std::int64_t before = store.tokens();
    write(count);
    for (int layer = 0; layer < kShape.layers; ++layer) {
      for (int head = 0; head < kShape.kv_heads; ++head) {
        const std::int64_t skip = before * held.layout().row_bytes();
        held.to_device(layer, head, cuda::KvRange::Part::k, before, before + count,
                       store.rows(layer, head, KvStore::Part::k).data() + skip, stream.get());
        held.to_device(layer, head, cuda::KvRange::Part::v, before, before + count,
                       store.rows(layer, head, KvStore::Part::v).data() + skip, stream.get());
      }
    }
    tier.held_more(count);
    stream.synchronize();  // as every step ends
  }
  void expect_rows(const cuda::KvRange& range, int range_layer, int layer, std::int64_t begin,
                   std::int64_t end) {
    if (begin >= end) return;
    std::vector<std::byte> found(static_cast<std::size_t>((end - begin) * range.layout().row_bytes()));
    for (int head = 0; head < kShape.kv_heads; ++head) {
      for (const bool values : {false, true}) {
        range.to_host(range_layer, head, values ? cuda::KvRange::Part::v : cuda::KvRange::Part::k, begin, end,
                      found.data(), stream.get());
        const auto rows =
            store.rows(layer, head, values ? KvStore::Part::v : KvStore::Part::k)
                .subspan(static_cast<std::size_t>(begin * range.layout().row_bytes()), found.size());
        ASSERT_TRUE(std::equal(rows.begin(), rows.end(), found.begin())) << begin << " to " << end;
      }
    }
  }
};

TEST(HostTier, AnySequenceOfStepsFindsItsRowsAndLittleMemoryIsHeld) {
  Both both;
  Rng rng(5);
  for (int step = 0; step < 150; ++step) {
    const std::int64_t tokens = both.store.tokens();
    const auto below = [&](std::int64_t n) {
      return static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(n)));
    };
    if (below(6) == 0) both.write(std::min<std::int64_t>(kShape.max_tokens - tokens, below(9000)));
    if (below(5) == 0 || both.store.tokens() + 40 > kShape.max_tokens) {
      const std::int64_t keep = below(2) == 0 ? below(both.store.tokens() + 1)
                                              : std::max<std::int64_t>(0, both.store.tokens() - below(60));
      both.store.roll_back(keep);
      both.tier.roll_back(keep);
    }
    if (both.store.tokens() + 40 > kShape.max_tokens) continue;
    const std::int64_t now = both.store.tokens(), sink = below(300), window = 1 + below(700),
                       more = 1 + below(32);
    const std::int64_t tail = std::max(sink, now - window);
    both.tier.hold(both.held, both.store, sink, tail, more, both.stream.get());
    for (int layer = 0; layer < kShape.layers; ++layer) {
      both.expect_rows(both.held, layer, layer, 0, std::min(sink, now));
      both.expect_rows(both.held, layer, layer, tail, now);
    }
    both.write_held(more);
    // Sink, tail and what is kept of the tokens before and behind, and blocks that are not full.
    const std::int64_t most = 300 + 2 * HostTier::kHeldTokens + 800 + 4 * cuda::kBlockTokens;
    ASSERT_LE(both.held.backed_bytes(), most * kShape.token_bytes());
  }
}

TEST(HostTier, ALayerIsBroughtWholeWithRoomBehind) {
  Both both;
  both.write(9000);  // more than one bounce
  for (const int layer : {1, 0, 1}) {
    both.tier.bring(both.store, layer, 50, both.stream.get());
    both.expect_rows(both.tier.stage(), 0, layer, 0, 9000);
  }
  EXPECT_GE(both.tier.bytes(), 9050 * kShape.token_bytes() / kShape.layers);
  EXPECT_EQ(both.tier.take_moved(), 3 * 9000 * kShape.token_bytes() / kShape.layers);
}

}  // namespace
}  // namespace lode
