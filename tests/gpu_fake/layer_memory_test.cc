// SPDX-License-Identifier: Apache-2.0
// A layer of another engine's where the GPU's memory ends in the middle of a call, or a call's kernels are lost.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>

#include "base/out_of_memory.h"
#include "base/rng.h"
#include "base/threads.h"
#include "gpu/select/layer_selector.h"
#include "kernels/kernels.h"
#include "lodestone/attend.h"
#include "lodestone/engine.h"
#include "lodestone/error.h"
#include "play.h"

namespace lode {
namespace {

constexpr int kHeads = 2, kDim = 32;
constexpr std::int64_t kRows = 400, kBuilt = 300, kTokens = kRows - kBuilt, kNumbers = kRows * kHeads * kDim;

struct Layer {
  cuda::Buffer kv{2 * kNumbers * 4, "a test"}, q{kNumbers * 4, "a test"}, out{kNumbers * 4, "a test"};
  cuda::Stream stream;
  cuda::CallerStream caller = {0, stream.get()};
  ThreadPool pool{1};
  std::shared_ptr<const Rope> rope = make_rope(std::vector<float>(kDim / 2, 0.01f), kDim);
  Spec spec = parse_spec("quest:budget=64,sink=2,window=16");
  LayerGeometry geometry = {.layer = 0,
                            .query_heads = kHeads,
                            .kv_heads = kHeads,
                            .head_dim = kDim,
                            .scale = 1.0f / std::sqrt(static_cast<float>(kDim)),
                            .dense = spec.dense,
                            .rope = rope.get(),
                            .pool = &pool,
                            .seed = 5,
                            .covered = {}};
  std::unique_ptr<Selector> host = find_method(spec.name).make(spec, geometry, "");
  LayerSelector gpu{spec, geometry, *host, 0};

  Layer() {
    Rng rng(7);
    for (const cuda::Buffer* to : {&kv, &q}) {
      std::vector<float> numbers(static_cast<std::size_t>(to->bytes() / 4));
      for (float& number : numbers) number = static_cast<float>(rng.normal());
      const DType type = to == &q ? DType::bf16 : DType::f32;
      std::vector<char> there(numbers.size() * static_cast<std::size_t>(bytes_of(type)));
      kernels().narrow(numbers.data(), std::ssize(numbers), type, there.data());
      cuda::copy_and_wait(to->as<void>(), there.data(), std::ssize(there), caller);
    }
  }
  CallerRows rows(std::int64_t tokens) const {
    constexpr std::int64_t kRow = kDim * 4;
    const char* const k = kv.as<char>();
    return {.kv = {k, k + kNumbers * 4, kRow, kRow, kRow * kHeads, kRow * kHeads, tokens},
            .type = DType::f32};
  }
  /// In bfloat16: with room of its own for queries and output.
  std::vector<std::uint16_t> answer(std::int64_t tokens = kTokens) {
    gpu.attend({q.as<void>(), kBuilt, tokens, DType::bf16}, rows(kBuilt + tokens),
               {out.as<void>(), nullptr, DType::bf16}, caller);
    std::vector<std::uint16_t> found(static_cast<std::size_t>(tokens * kHeads * kDim));
    cuda::copy_and_wait(found.data(), out.as<void>(), std::ssize(found) * 2, caller);
    return found;
  }
};

TEST(LayerMemory, CallsThatFailedForWantOfItAreMadeAgain) {
  Layer plenty;
  plenty.gpu.build(plenty.rows(kBuilt), plenty.caller);
  const std::vector<std::uint16_t> one = plenty.answer(1), expected = plenty.answer();
  Layer layer;
  const auto until_it_fits = [](const std::function<void()>& call) {
    int failed = 0;
    for (std::int64_t more = 0; more < 1 << 24; more += 1 << 10) {
      cuda::play_memory(cuda::play_memory(0) + more);
      try {
        call();
        cuda::play_memory(cuda::kPlayedMemory);
        return failed;
      } catch (const OutOfDeviceMemory&) {
        ++failed;
      }
    }
    ADD_FAILURE() << "it never fitted";
    return failed;
  };
  EXPECT_GT(until_it_fits([&] { layer.gpu.build(layer.rows(kBuilt), layer.caller); }), 0);
  EXPECT_GT(until_it_fits([&] { EXPECT_EQ(layer.answer(1), one); }), 0);
  EXPECT_GT(until_it_fits([&] { EXPECT_EQ(layer.answer(), expected); }), 0);
  EXPECT_EQ(layer.answer(), expected);
  cuda::play_memory(cuda::kPlayedMemory);
}

TEST(LayerMemory, ACallWhoseKernelsWereLostEndsTheIndex) {
  Layer whole;
  whole.gpu.build(whole.rows(kBuilt), whole.caller);
  const std::vector<std::uint16_t> expected = whole.answer(1);
  Layer layer;
  layer.gpu.build(layer.rows(kBuilt), layer.caller);
  cuda::fail_next_flush();
  EXPECT_THROW(layer.answer(1), RunError);
  for (const std::int64_t tokens : {std::int64_t{1}, kTokens}) {
    try {
      layer.answer(tokens);
      ADD_FAILURE() << "rows of the lost call count";
    } catch (const RunError& error) {
      EXPECT_NE(std::string_view(error.what()).find("call build() again"), std::string_view::npos);
    }
  }
  layer.gpu.build(layer.rows(kBuilt), layer.caller);
  EXPECT_EQ(layer.answer(1), expected);
}

}  // namespace
}  // namespace lode
