// SPDX-License-Identifier: Apache-2.0
// A written GGUF file, byte by byte where the format says what they are.
#include "io/gguf_writer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "base/file.h"
#include "lodestone/error.h"

namespace lode {
namespace {

template <class T>
T number_at(const std::string& bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

TEST(GgufWriter, WritesWhatTheFormatSays) {
  const auto path = std::filesystem::path(testing::TempDir()) / "written.gguf";
  std::filesystem::remove(path);
  GgufWriter writer;
  writer.add("a", std::string_view("text"));
  writer.add("b", true);
  writer.add_u32("c", 7);
  const std::vector<std::string> texts = {"x", ""};
  writer.add_texts("d", texts);
  writer.add_tensor("t0", WeightType::q8_0, {3, 64});
  writer.add_tensor("t1", WeightType::f32, {2});
  writer.write(path, [](std::int64_t tensor, std::span<std::byte> bytes) {
    std::memset(bytes.data(), static_cast<int>(tensor + 1), bytes.size());
  });
  const std::string file = read_file(path);
  EXPECT_EQ(file.substr(0, 4), "GGUF");
  EXPECT_EQ(number_at<std::uint32_t>(file, 4), 3u);
  EXPECT_EQ(number_at<std::uint64_t>(file, 8), 2u);   // tensors
  EXPECT_EQ(number_at<std::uint64_t>(file, 16), 4u);  // keys
  EXPECT_EQ(number_at<std::uint64_t>(file, 24), 1u);  // "a"
  EXPECT_EQ(file[32], 'a');
  EXPECT_EQ(number_at<std::uint32_t>(file, 33), 8u);  // a string
  const std::size_t t0 = file.find("t0");
  EXPECT_EQ(number_at<std::uint32_t>(file, t0 + 2), 2u);
  EXPECT_EQ(number_at<std::uint64_t>(file, t0 + 6), 64u);  // the innermost dimension first
  EXPECT_EQ(number_at<std::uint64_t>(file, t0 + 14), 3u);
  EXPECT_EQ(number_at<std::uint32_t>(file, t0 + 22), 8u);  // Q8_0
  EXPECT_EQ(number_at<std::uint64_t>(file, t0 + 26), 0u);
  const std::size_t t1 = file.find("t1");
  EXPECT_EQ(number_at<std::uint64_t>(file, t1 + 18), 224u);  // 3 * 68 = 204 bytes, then to 32
  ASSERT_EQ(file.size() % 32, 0u);
  EXPECT_EQ(file[file.size() - 32], 2);
  EXPECT_EQ(file[file.size() - 32 - 224], 1);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace lode
