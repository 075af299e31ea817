// SPDX-License-Identifier: Apache-2.0
// kdeformer and reformer against their definitions: hash every key in float64, sort, cut, look where the
// query falls.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "support/damaged_index.h"
#include "support/forged_index.h"
#include "support/refusal.h"
#include "support/selectors.h"

namespace lode::test {
namespace {

/// Products of x with the directions of one hash of a KV head.
std::vector<double> products(const LayerGeometry& geometry, int head, int hash, int directions,
                             std::span<const float> x) {
  std::vector<double> out;
  for (int i = 0; i < directions; ++i) {
    Rng rng(hash_seed(geometry.seed, geometry.layer, head, hash, i));
    double dot = 0;
    for (const float value : x) dot += static_cast<double>(value) * static_cast<float>(rng.normal());
    out.push_back(dot);
  }
  return out;
}

/// Where the bits stand in the Gray sequence 0, 1, 11, 10, 110, ...: found by walking along it.
std::uint32_t gray_place(const std::vector<double>& dots) {
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < dots.size(); ++i) bits |= (dots[i] > 0 ? 1u : 0u) << i;
  for (std::uint32_t place = 0;; ++place)
    if ((place ^ (place >> 1)) == bits) return place;
}

std::uint32_t signed_argmax(std::vector<double> dots) {
  const std::size_t half = dots.size();
  for (std::size_t i = 0; i < half; ++i) dots.push_back(-dots[i]);
  return static_cast<std::uint32_t>(std::max_element(dots.begin(), dots.end()) - dots.begin());
}

/// Keys of bins `before` the query's to the query's own; of equal codes the query stands at `share` of them.
FarSet bins_plainly(const std::vector<std::uint32_t>& codes, std::uint32_t query, Position first,
                    std::int64_t bin, int before, bool in_the_middle) {
  const std::int64_t n = std::ssize(codes), count = (n + bin - 1) / bin;
  std::vector<std::int64_t> order(codes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) {
    return codes[static_cast<std::size_t>(a)] < codes[static_cast<std::size_t>(b)];
  });
  const std::int64_t below = std::count_if(codes.begin(), codes.end(), [&](auto c) { return c < query; });
  const std::int64_t equal = std::count(codes.begin(), codes.end(), query);
  const std::int64_t place = equal == 0      ? std::min(below, n - 1)
                             : in_the_middle ? below + equal / 2
                                             : below + equal - 1;
  FarSet far;
  for (std::int64_t b = 0; b < count; ++b) {
    // The bin that holds the place, and those before it.
    const std::int64_t own = (b + before < count ? b + before : count - 1);
    bool taken = false;
    for (std::int64_t later = b; later <= own; ++later)
      taken |= later * n / count <= place && place < (later + 1) * n / count;
    for (std::int64_t i = b * n / count; taken && i < (b + 1) * n / count; ++i)
      far.emplace(first + static_cast<Position>(order[static_cast<std::size_t>(i)]), 0.0f);
  }
  return far;
}

TEST(KdeFormer, VisitsTheBinOfTheGrayOrder) {
  ThreadPool pool(2);
  for (const auto& [bits, bin] : {std::pair{7, 16}, {1, 10}, {12, 5}, {3, 1}}) {
    World world({.kv_heads = 2, .group = 2, .d = 32, .dense = {2, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(100);
    const auto selector =
        make("kdeformer:num_projs=" + std::to_string(bits) + ",bucket_size=" + std::to_string(bin), geometry);
    selector->build(0, world.store().layer(0));
    world.write(40);
    const QueryBlock block = world.block(136, 4);
    const std::vector<FarSet> found = select(*selector, block, geometry);
    for (std::int64_t t = 0; t < 4; ++t) {
      for (int h = 0; h < 4; ++h) {
        std::vector<std::uint32_t> codes;
        for (Position p = 2; p < block.far_end(t, geometry.dense); ++p)
          codes.push_back(gray_place(products(geometry, h / 2, 0, bits, world.key(p, h / 2))));
        const auto at = static_cast<std::size_t>(t * 4 + h);
        const std::uint32_t query =
            gray_place(products(geometry, h / 2, 0, bits, block.q.subspan(at * 32, 32)));
        EXPECT_EQ(found[at], bins_plainly(codes, query, 2, bin, 0, true)) << bits << " " << t << " " << h;
        EXPECT_LE(std::ssize(found[at]), bin);
      }
    }
  }
}

TEST(Reformer, VisitsItsChunkAndThoseBefore) {
  ThreadPool pool(2);
  struct Case {
    int buckets, bin, hashes, before;
  };
  for (const Case& c : {Case{8, 16, 1, 1}, {16, 7, 3, 0}, {2, 9, 2, 2}, {64, 3, 1, 1}}) {
    World world({.kv_heads = 2, .group = 2, .d = 32, .dense = {2, 16}});
    const LayerGeometry geometry = world.geometry(pool);
    world.write(100);
    const auto selector =
        make("reformer:num_buckets=" + std::to_string(c.buckets) + ",bucket_size=" + std::to_string(c.bin) +
                 ",n_hashes=" + std::to_string(c.hashes) + ",chunks_before=" + std::to_string(c.before),
             geometry);
    selector->build(0, world.store().layer(0));
    world.write(40);
    const QueryBlock block = world.block(136, 4);
    const std::vector<FarSet> found = select(*selector, block, geometry);
    for (std::int64_t t = 0; t < 4; ++t) {
      for (int h = 0; h < 4; ++h) {
        const auto at = static_cast<std::size_t>(t * 4 + h);
        FarSet expected;
        for (int hash = 0; hash < c.hashes; ++hash) {
          std::vector<std::uint32_t> codes;
          for (Position p = 2; p < block.far_end(t, geometry.dense); ++p)
            codes.push_back(
                signed_argmax(products(geometry, h / 2, hash, c.buckets / 2, world.key(p, h / 2))));
          const std::uint32_t query =
              signed_argmax(products(geometry, h / 2, hash, c.buckets / 2, block.q.subspan(at * 32, 32)));
          expected.merge(bins_plainly(codes, query, 2, c.bin, c.before, false));
        }
        EXPECT_EQ(found[at], expected) << c.buckets << " " << t << " " << h;
      }
    }
  }
}

// The number of buckets follows from the context that was built, and a saved index keeps it.
TEST(Reformer, BucketsFollowFromTheContext) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 1, .d = 16, .dense = {0, 8}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(200);
  const auto automatic = make("reformer:bucket_size=9", geometry),  // 22 chunks
      explicitly = make("reformer:bucket_size=9,num_buckets=32", geometry);
  for (Selector* s : {automatic.get(), explicitly.get()}) s->build(0, world.store().layer(0));
  world.write(300);
  EXPECT_EQ(select(*automatic, world.block(490, 10), geometry),
            select(*explicitly, world.block(490, 10), geometry));
  const auto loaded = make("reformer:bucket_size=9", geometry);
  load_sections(*loaded, saved_sections(*automatic), world.store().layer(0));
  EXPECT_EQ(select(*automatic, world.block(490, 10), geometry),
            select(*loaded, world.block(490, 10), geometry));
}

// Keys that all hash alike are still cut into bins of the size that was asked for.
TEST(SortedBins, EqualKeysGiveEqualBins) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 1, .d = 16, .dense = {0, 1}});
  world.shape_key = [](Position, int, int, float) { return 0.0f; };
  const LayerGeometry geometry = world.geometry(pool);
  world.write(101);
  for (const char* spec : {"kdeformer:bucket_size=10", "reformer:bucket_size=10,chunks_before=0"}) {
    const auto selector = make(spec, geometry);
    selector->build(0, world.store().layer(0));
    EXPECT_EQ(select(*selector, world.block(100, 1), geometry)[0].size(), 10u) << spec;
  }
}

TEST(SortedBins, CountWhatTheyRead) {
  ThreadPool pool(1);
  World world({.kv_heads = 1, .group = 2, .d = 16, .dense = {0, 1}});
  const LayerGeometry geometry = world.geometry(pool);
  world.write(1001);
  for (const auto& [spec, directions] :
       {std::pair{"kdeformer:bucket_size=100", 7}, {"reformer:bucket_size=50,num_buckets=20", 10}}) {
    const auto selector = make(spec, geometry);
    selector->build(0, world.store().layer(0));
    SelectWork work;
    const std::vector<FarSet> found = select(*selector, world.block(1000, 1), geometry, &work);
    EXPECT_EQ(work.bytes, directions * 16 * 4 + 4 * std::ssize(found[0]) + 4 * std::ssize(found[1])) << spec;
    EXPECT_EQ(work.keys_scored, directions);
    EXPECT_GE(selector->index_bytes(), 1000 * 8);
  }
}

TEST(SortedBins, DamagedIndexesAreRefused) {
  ThreadPool pool(2);
  World world({.kv_heads = 2, .group = 1, .d = 32, .dense = {1, 16}});
  LayerGeometry geometry = world.geometry(pool);
  world.write(100);
  const KvLayer kv = world.store().layer(0);
  for (const std::string spec : {"kdeformer:num_projs=5", "reformer:n_hashes=2,bucket_size=9"}) {
    const auto selector = make(spec, geometry);
    selector->build(0, kv);
    const IndexSections good = saved_sections(*selector);
    const DamagedIndex refused(*selector, good, kv);
    refused("KV heads", "shape", 0, number(3));
    refused("tables", "shape", 8, number(7));
    refused("head dimension", "shape", 16, number(64));
    refused("as many codes", "shape", 24, number(std::int64_t{1} << 40));
    refused("as many codes", "shape", 24, number(-2));
    refused("behind the sink", "shape", 32, number(0));
    refused("within the context", "shape", 40, number(101));
    refused("within the context", "shape", 40, number(std::numeric_limits<std::int64_t>::min()));
    refused("size that 'shape' gives", "shape", 40, number(90));
    refused("same seed", "shape", 48, number(-1));
    refused("below their number", "codes", 8, std::string("\x20\x00\x00\x00", 4));
    load_sections(*selector, good, kv);
  }
}

TEST(SortedBins, KeysOutOfRangeAreRefused) {
  for (const char* spec : {"kdeformer:num_projs=0", "kdeformer:num_projs=33", "kdeformer:bucket_size=-1",
                           "reformer:num_buckets=1", "reformer:num_buckets=7", "reformer:n_hashes=0",
                           "reformer:chunks_before=-1"})
    expect_refused("former", [&] { parse_spec(spec); });
}

}  // namespace
}  // namespace lode::test
