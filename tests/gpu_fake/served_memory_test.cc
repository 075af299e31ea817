// SPDX-License-Identifier: Apache-2.0
// A GPU that has less memory than was counted: others have taken some.
#include <gtest/gtest.h>

#include "engine/batch.h"
#include "gpu_fake/play.h"
#include "support/gpu.h"
#include "support/lisbon.h"
#include "support/served.h"

namespace lode::serve {
namespace {

using test::Crowd, test::lisbon_text, test::Told;

struct LessMemory {
  explicit LessMemory(std::int64_t bytes) { cuda::play_memory(bytes); }
  ~LessMemory() { cuda::play_memory(cuda::kPlayedMemory); }
};

TEST(GpuServed, DocumentsThatAreOpenedInVainAreOpenedWithLessBesideThem) {
  const test::ContextsFolder folder;
  const auto there = put_on_gpu(*pocket(), DType::f16);
  EngineOptions options;
  options.library.folder = folder.path();
  options.library.memory = std::int64_t{1} << 32;
  options.library.gpu_memory = std::int64_t{1} << 32;
  options.gpu_question_memory = std::int64_t{1} << 24;
  options.on_gpu = {{"pocket", there.model}};
  options.question_template = "{question}";
  constexpr int kDocuments = 4;
  {
    EngineBackend backend({{"pocket", pocket()}}, options);
    for (int i = 0; i < kDocuments; ++i)
      ASSERT_EQ(test::store(backend, "d" + std::to_string(i), lisbon_text(0, 60 + 10 * i)), "");
    Crowd crowd(backend);
    crowd.ask("d3", "Who lives here?", 4);
    EXPECT_EQ(crowd.told().front().status, 200);
    options.library.gpu_memory = 5 * backend.stats().document_bytes;
  }
  EngineBackend backend({{"pocket", pocket()}}, options);
  Crowd first(backend);
  first.ask("d0", "Who lives here?", 4);  // the buffers of steps are there
  EXPECT_EQ(first.told().front().status, 200);
  // Room for two more of what five were counted for.
  const LessMemory less(cuda::play_memory(cuda::kPlayedMemory) + options.library.gpu_memory * 2 / 5);
  Crowd crowd(backend);
  for (int i = 0; i < 3 * kDocuments; ++i)
    crowd.ask("d" + std::to_string(i % kDocuments), "Who lives here?", 4);
  for (const Told& told : crowd.told()) EXPECT_EQ(told.status, 200) << told.error;
}

}  // namespace
}  // namespace lode::serve
