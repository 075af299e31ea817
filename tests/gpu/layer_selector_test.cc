// SPDX-License-Identifier: Apache-2.0
// A layer of another engine's on a GPU against the same method on the host.
#include "gpu/select/layer_selector.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

#include "base/rng.h"
#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/attend.h"
#include "lodestone/engine.h"
#include "lodestone/error.h"
#include "support/compare.h"

namespace lode {
namespace {

constexpr int kHeads = 2, kGroup = 3, kDim = 64;
constexpr std::int64_t kMost = 1200, kQuery = std::int64_t{kHeads} * kGroup * kDim;

/// Keys and values [tokens, heads, 2, d] in float32: rows of a head lie apart.
struct Layer {
  std::vector<float> both, q;
  cuda::Buffer there, q_there, out;
  cuda::Stream stream;
  cuda::CallerStream caller = {0, stream.get()};
  ThreadPool pool{2};
  std::shared_ptr<const Rope> rope;
  Spec spec;
  LayerGeometry geometry;
  std::unique_ptr<Selector> host, other;
  std::unique_ptr<LayerSelector> gpu;

  explicit Layer(const std::string& text, bool turns = false)
      : both(static_cast<std::size_t>(kMost * kHeads * 2 * kDim)),
        q(static_cast<std::size_t>(kMost * kQuery)),
        rope(turns ? make_rope(std::vector<float>(kDim / 2, 0.01f), kDim, 1.25f) : make_rope({}, kDim)),
        spec(parse_spec(text)) {
    Rng rng(7);
    for (std::vector<float>* x : {&both, &q})
      for (float& number : *x) number = static_cast<float>(rng.normal());
    there = cuda::Buffer(std::ssize(both) * 4, "a test");
    q_there = cuda::Buffer(std::ssize(q) * 4, "a test");
    out = cuda::Buffer(kMost * (kQuery + kHeads * kGroup) * 4, "a test");
    bring();
    geometry = {.layer = 3,
                .query_heads = kHeads * kGroup,
                .kv_heads = kHeads,
                .head_dim = kDim,
                .scale = 1.0f / std::sqrt(static_cast<float>(kDim)),
                .dense = spec.dense,
                .rope = rope.get(),
                .pool = &pool,
                .seed = 5,
                .covered = {}};
    host = find_method(spec.name).make(spec, geometry, "");
    other = find_method(spec.name).make(spec, geometry, "");
    gpu = std::make_unique<LayerSelector>(spec, geometry, *other, 0);
  }
  void bring() {
    cuda::copy_and_wait(there.as<void>(), both.data(), there.bytes(), caller);
    cuda::copy_and_wait(q_there.as<void>(), q.data(), q_there.bytes(), caller);
  }

  CallerRows rows(std::int64_t tokens) const {
    const char* const at = there.as<char>();
    constexpr std::int64_t kRow = kDim * 4;
    return {.kv = {at, at + kRow, 2 * kRow, 2 * kRow, 2 * kRow * kHeads, 2 * kRow * kHeads, tokens},
            .type = DType::f32};
  }
  /// The host wants rows side by side.
  std::vector<std::vector<float>> plain;
  std::vector<KvRows> views;
  KvLayer host_rows(std::int64_t tokens) {
    plain.clear(), views.clear();
    for (int head = 0; head < kHeads; ++head)
      for (int part = 0; part < 2; ++part) {
        plain.emplace_back();
        for (std::int64_t t = 0; t < tokens; ++t) {
          const auto from = both.begin() + ((t * kHeads + head) * 2 + part) * kDim;
          plain.back().insert(plain.back().end(), from, from + kDim);
        }
      }
    for (std::size_t head = 0; head < kHeads; ++head)
      views.push_back({.type = DType::f32,
                       .k = reinterpret_cast<const std::byte*>(plain[2 * head].data()),
                       .v = reinterpret_cast<const std::byte*>(plain[2 * head + 1].data()),
                       .rows = tokens,
                       .d = kDim});
    return {.heads = views, .tokens = tokens};
  }

  std::int64_t built = 0;
  void build(std::int64_t tokens) {
    built = tokens;
    host->build(0, host_rows(tokens));
    gpu->build(rows(tokens), caller);
  }
  /// Of query tokens [begin, begin + tokens), outputs and their log-sum-exps; expects the host's of the GPU.
  void compare(std::int64_t begin, std::int64_t tokens) {
    const auto count = static_cast<std::size_t>(tokens * kQuery);
    const std::span<const float> own = std::span(q).subspan(static_cast<std::size_t>(begin * kQuery), count);
    std::vector<float> unrotated(own.begin(), own.end()), output(count), lse(count / kDim);
    for (std::int64_t t = 0; t < tokens; ++t)
      unrotate(*rope, std::span(unrotated).subspan(static_cast<std::size_t>(t * kQuery), kQuery),
               static_cast<Position>(begin + t));
    const QueryBlock block = {.phase = tokens > 1 ? Phase::question : Phase::generation,
                              .begin = static_cast<Position>(begin),
                              .tokens = tokens,
                              .q = own,
                              .q_unrotated = unrotated,
                              .kv = host_rows(begin + tokens),
                              .far_begin = static_cast<Position>(spec.dense.sink)};
    float *const to = output.data(), *const lse_to = lse.data();
    lode::attend(*host, {&block, 1}, geometry, {&to, 1}, {&lse_to, 1});
    auto* const there_out = out.as<float>();
    gpu->attend({q_there.as<float>() + begin * kQuery, begin, tokens}, rows(begin + tokens),
                {there_out, there_out + kMost * kQuery}, caller);
    std::vector<float> found(count), found_lse(count / kDim);
    cuda::copy_and_wait(found.data(), there_out, std::ssize(found) * 4, caller);
    cuda::copy_and_wait(found_lse.data(), there_out + kMost * kQuery, std::ssize(found_lse) * 4, caller);
    EXPECT_LT(relative_difference(found, output), 1e-4f) << begin << " " << tokens;
    EXPECT_LT(relative_difference(found_lse, lse), 1e-4f) << begin << " " << tokens;
  }
};

class GpuLayer : public testing::TestWithParam<const char*> {};

/// Tokens one at a time, many at once, rows that change behind a cut, and a position inside of the context.
TEST_P(GpuLayer, AttendsAsTheHost) {
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) GTEST_SKIP() << gpu.why;
  for (const bool turns : {false, true}) {
    Layer layer(GetParam(), turns);
    layer.build(703);
    for (std::int64_t position = 703; position < 706; ++position) layer.compare(position, 1);
    layer.compare(706, 70);
    layer.compare(400, 1);
    layer.host->roll_back(0, 680);
    layer.gpu->roll_back(680);
    Rng rng(9);
    for (auto at = layer.both.begin() + 680 * kHeads * 2 * kDim; at != layer.both.end(); ++at)
      *at = static_cast<float>(rng.normal());
    layer.bring();
    layer.compare(680, 33);
    layer.compare(713, 1);
    EXPECT_GT(layer.gpu->bytes(), 0);
  }
}

// Those of the second line have kernels that are not played.
INSTANTIATE_TEST_SUITE_P(Specs, GpuLayer,
                         testing::Values("streaming:sink=4,window=40", "random:window=40",
                                         "quest:budget=64,window=40", "quest:budget=64,bits=4,window=40",
                                         "double-sparsity:budget=64,window=40",
                                         "ivf:window=40,nprobe=3,k=40"),
                         [](const auto& info) { return "spec" + std::to_string(info.index); });

/// What is chosen, given to attention over rows, is what attention itself gives.
TEST(GpuLayerSets, AreThoseThatAreAttended) {
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) GTEST_SKIP() << gpu.why;
  Layer layer("quest:budget=64,window=40");
  layer.build(703);
  std::int64_t sets = 0;
  layer.gpu->select({layer.q_there.as<float>() + 703 * kQuery, 703, 35}, layer.rows(738), layer.caller,
                    [&](const CallerSet& set) {
                      std::vector<std::int32_t> rows(static_cast<std::size_t>(set.count));
                      cuda::copy_and_wait(rows.data(), set.rows, set.count * 4, layer.caller);
                      EXPECT_EQ(set.count, 64);
                      EXPECT_EQ(set.token_end, set.token_begin + 1);
                      EXPECT_EQ(set.first_query_head / kGroup, set.kv_head);
                      for (const std::int32_t row : rows)
                        EXPECT_TRUE(row >= layer.spec.dense.sink && row < 703 + set.token_begin + 1 - 40)
                            << row;
                      sets += set.query_heads;
                    });
  EXPECT_EQ(sets, 35 * kHeads * kGroup);
}

/// Rows [first, end) alone.
CallerRows rows_from(const Layer& layer, std::int64_t first, std::int64_t end) {
  CallerRows rows = layer.rows(end - first);
  rows.kv.k += first * rows.kv.k_row;
  rows.kv.v += first * rows.kv.v_row;
  rows.first = first;
  return rows;
}

TEST(GpuLayerSets, RowsThatAreThereNeedNotBeBroughtAgain) {
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) GTEST_SKIP() << gpu.why;
  Layer layer("quest:budget=64,window=40");
  layer.build(703);
  const auto answer = [&](const CallerRows& rows) {
    layer.gpu->attend({layer.q_there.as<float>() + 703 * kQuery, 703, 3}, rows, {layer.out.as<float>()},
                      layer.caller);
    std::vector<float> found(3 * kQuery);
    cuda::copy_and_wait(found.data(), layer.out.as<void>(), std::ssize(found) * 4, layer.caller);
    return found;
  };
  EXPECT_THROW(answer(rows_from(layer, 704, 706)), InputError);
  const std::vector<float> all = answer(layer.rows(706));
  EXPECT_THROW(answer(rows_from(layer, 704, 706)), InputError);
  EXPECT_EQ(layer.gpu->tokens(), 706) << "a call that is refused changes nothing";
  layer.gpu->roll_back(703);
  EXPECT_EQ(answer(rows_from(layer, 703, 706)), all);
  layer.gpu->roll_back(703);
  EXPECT_EQ(answer(rows_from(layer, 650, 706)), all);
}

TEST(GpuLayerSets, RowsComeBackAsTheyWere) {
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) GTEST_SKIP() << gpu.why;
  Layer layer("quest:budget=64,window=40");
  layer.build(703);
  layer.compare(703, 2);
  ASSERT_EQ(layer.gpu->tokens(), 705);
  ASSERT_EQ(layer.gpu->type(), DType::f32);
  std::vector<float> k(kHeads * 705 * kDim), v(k.size());
  layer.gpu->download(reinterpret_cast<char*>(k.data()), reinterpret_cast<char*>(v.data()), layer.caller);
  layer.host_rows(705);  // into plain
  for (std::size_t head = 0; head < kHeads; ++head) {
    constexpr std::size_t kNumbers = 705 * kDim;
    EXPECT_EQ(std::vector<float>(k.begin() + head * kNumbers, k.begin() + (head + 1) * kNumbers),
              layer.plain[2 * head]);
    EXPECT_EQ(std::vector<float>(v.begin() + head * kNumbers, v.begin() + (head + 1) * kNumbers),
              layer.plain[2 * head + 1]);
  }
}

/// What a call of `tokens` tokens from 703 on puts into `type`, as float32.
std::vector<float> answer_in(Layer& layer, DType type, const void* q, std::int64_t tokens) {
  const std::int64_t count = tokens * kQuery, bytes = count * bytes_of(type);
  layer.gpu->roll_back(703);
  layer.gpu->attend({q, 703, tokens, type}, layer.rows(703 + tokens), {layer.out.as<void>(), nullptr, type},
                    layer.caller);
  std::vector<char> there(static_cast<std::size_t>(bytes));
  cuda::copy_and_wait(there.data(), layer.out.as<void>(), bytes, layer.caller);
  std::vector<float> found(static_cast<std::size_t>(count));
  kernels().widen(there.data(), type, count, found.data());
  return found;
}

TEST(GpuLayerSets, QueriesOfSixteenBitsGiveTheBitsOfTheSameInFloat32) {
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) GTEST_SKIP() << gpu.why;
  for (const char* const spec : {"quest:budget=64,window=40", "quest:budget=64,bits=4,window=40"})
    for (const DType type : {DType::bf16, DType::f16})
      for (const std::int64_t tokens : {1, 3, 40}) {
        Layer layer(spec, type == DType::bf16);
        layer.build(703);
        const std::int64_t count = tokens * kQuery;
        std::vector<char> narrow(static_cast<std::size_t>(count * bytes_of(type)));
        std::vector<float> wide(static_cast<std::size_t>(count));
        kernels().narrow(layer.q.data() + 703 * kQuery, count, type, narrow.data());
        kernels().widen(narrow.data(), type, count, wide.data());
        const cuda::Buffer there(std::ssize(narrow), "a test"), wide_there(count * 4, "a test");
        cuda::copy_and_wait(there.as<void>(), narrow.data(), there.bytes(), layer.caller);
        cuda::copy_and_wait(wide_there.as<void>(), wide.data(), wide_there.bytes(), layer.caller);
        std::vector<float> expected = answer_in(layer, DType::f32, wide_there.as<void>(), tokens);
        kernels().narrow(expected.data(), count, type, narrow.data());
        kernels().widen(narrow.data(), type, count, expected.data());
        EXPECT_EQ(answer_in(layer, type, there.as<void>(), tokens), expected) << spec << " " << tokens;
      }
}

TEST(GpuLayerSets, MethodsWithoutAGpuFormAreNamed) {
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) GTEST_SKIP() << gpu.why;
  Layer layer("infllm");
  EXPECT_THROW(layer.gpu->build(layer.rows(300), layer.caller), InputError);
}

TEST(GpuLayerSets, MemoryStaysUntilWhatAFailedCallEnqueuedIsDone) {
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) GTEST_SKIP() << gpu.why;
  Layer layer("quest:budget=64,bits=4,window=40");  // which has no levels before it is built
  for (const std::int64_t tokens : {300, 301})
    EXPECT_THROW(layer.gpu->attend({layer.q_there.as<float>() + (tokens - 1) * kQuery, tokens - 1, 1},
                                   layer.rows(tokens), {layer.out.as<float>()}, layer.caller),
                 InputError);
  layer.gpu.reset();
  layer.stream.synchronize();
}

}  // namespace
}  // namespace lode
