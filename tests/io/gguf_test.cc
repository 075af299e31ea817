// SPDX-License-Identifier: Apache-2.0
// GGUF: what is written is read back, and files that lie about counts, lengths, types, shapes or offsets are
// refused with the key's or tensor's name. No bytes lead outside the file.
#include "io/gguf.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "lodestone/error.h"
#include "support/gguf_file.h"
#include "support/refusal.h"

namespace lode {
namespace {

using test::expect_refused;
using test::gguf_string;
using test::GgufBuilder;
using test::raw;
using test::refusal;
using test::TestFolder;

GgufFile parse(std::string_view file) {
  return parse_gguf(std::as_bytes(std::span(file)), "m.gguf");
}

/// A small file with a key of each kind and two tensors.
GgufBuilder small() {
  GgufBuilder b;
  b.text("general.architecture", "llama").number("a", 7).real("b", 0.5f).texts("words", {"x", "", "yz"});
  b.array<std::int32_t>("numbers", test::kI32, {1, -2, 3}).key("flag", test::kBool, raw(std::uint8_t{1}));
  b.tensor("w", {4, 2}, 0, 0).tensor("v", {4}, 0, 32);
  return b;
}

TEST(Gguf, ReadsWhatIsThere) {
  const std::string bytes = small().file();
  const GgufFile file = parse(bytes);
  const GgufMetadata& m = file.metadata;
  EXPECT_EQ(m.text("general.architecture"), "llama");
  EXPECT_EQ(m.integer("a", 0, 10), 7);
  EXPECT_EQ(m.number("b", 0, 1), 0.5);
  EXPECT_TRUE(m.boolean("flag"));
  EXPECT_EQ(m.texts("words"), (std::vector<std::string_view>{"x", "", "yz"}));
  EXPECT_EQ(m.integers("numbers", -5, 5), (std::vector<std::int64_t>{1, -2, 3}));
  EXPECT_EQ(m.integers("a", 0, 10), std::vector<std::int64_t>{7});
  ASSERT_EQ(file.tensors.size(), 2u);
  EXPECT_EQ(file.tensors.at("w").shape, (std::vector<std::int64_t>{2, 4}));
  EXPECT_EQ(file.tensors.at("w").bytes.size(), 32u);
  EXPECT_EQ(file.tensors.at("v").bytes.data() - std::as_bytes(std::span(bytes)).data(),
            std::ssize(bytes) - 32);
  EXPECT_TRUE(is_gguf(std::as_bytes(std::span(bytes))));
}

TEST(Gguf, ReadsVersionTwoAndOtherAlignments) {
  GgufBuilder b = small();
  b.version = 2;
  EXPECT_NO_THROW(parse(b.file()));
  b.number("general.alignment", 8);
  b.tensors.clear();
  b.tensor("w", {4, 2}, 0, 0).tensor("v", {4}, 0, 40);
  b.alignment = 8;
  EXPECT_EQ(parse(b.file()).tensors.at("v").bytes.size(), 16u);
}

TEST(Gguf, ReadsBlockTypesByTheirSizes) {
  GgufBuilder b;
  b.tensor("q", {64, 1}, 8, 0);  // Q8_0: 34 bytes for 32 numbers
  b.data = std::string(68, 'd');
  EXPECT_EQ(parse(b.file()).tensors.at("q").type, WeightType::q8_0);
  b.data.pop_back();
  expect_refused("'q'", [&] { parse(b.file()); });
}

TEST(Gguf, NestedArraysAreBounded) {
  const auto nested = [](int depth) {
    std::string value = raw(std::uint32_t{test::kU8}) + raw(std::uint64_t{1}) + "x";
    for (int i = 1; i < depth; ++i) value = raw(std::uint32_t{test::kArray}) + raw(std::uint64_t{1}) + value;
    return GgufBuilder().key("deep", test::kArray, value).file();
  };
  EXPECT_EQ(parse(nested(3)).metadata.values().at("deep").arrays.size(), 1u);
  expect_refused("deep", [&] { parse(nested(4)); });
  expect_refused("deep", [&] { parse(nested(5000)); });
}

TEST(Gguf, EveryCutAndEveryFlippedBitOfTheHeaderIsReadOrRefused) {
  const std::string whole = small().file(), header = small().header();
  for (std::size_t size = 0; size < header.size(); ++size) refusal([&] { parse(whole.substr(0, size)); });
  refusal([&] { parse(whole.substr(0, whole.size() - 49)); });
  for (std::size_t bit = 0; bit < header.size() * 8; ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    try {
      for (const auto& [name, tensor] : parse(damaged).tensors)
        ASSERT_LE(tensor.bytes.size(), damaged.size());
    } catch (const InputError&) {
    }
  }
}

struct Hostile {
  std::string why;  // part of the sentence
  std::string file;
};

std::string with_counts(std::uint64_t tensors, std::uint64_t keys, const std::string& rest = "") {
  return "GGUF" + raw(std::uint32_t{3}) + raw(tensors) + raw(keys) + rest;
}

void add_headers(std::vector<Hostile>& all) {
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  all.push_back({"GGUF", ""});
  all.push_back({"GGUF", "GGU"});
  all.push_back({"GGUF", "GGML" + raw(std::uint32_t{3})});
  all.push_back({"big-endian", "FUGG" + raw(std::uint32_t{3})});
  all.push_back({"big-endian", "GGUF" + raw(std::uint32_t{3u << 24})});
  all.push_back({"LFS", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"});
  for (const std::uint32_t version : {0u, 1u, 4u, 0x80000001u}) {
    GgufBuilder b = small();
    b.version = version;
    all.push_back({"version", b.file()});
  }
  for (const std::uint64_t count :
       {kMax, kMax >> 1, kMax >> 2, std::uint64_t{1'000'000'000}, std::uint64_t{1} << 61}) {
    all.push_back({"number of tensors", with_counts(count, 0, std::string(64, '\0'))});
    all.push_back({"metadata keys", with_counts(0, count, std::string(64, '\0'))});
  }
  all.push_back({"number of tensors", with_counts(2, 0, std::string(40, '\0'))});
}

void add_keys(std::vector<Hostile>& all) {
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  for (const std::uint64_t length : {kMax, kMax >> 1, std::uint64_t{1} << 63, std::uint64_t{1000}})
    all.push_back({"key", with_counts(0, 1, raw(length) + std::string(64, 'k'))});
  const auto with_key = [](std::string_view name, std::uint32_t type, const std::string& value) {
    return GgufBuilder().key(name, type, value).file();
  };
  all.push_back({"key", with_key("", test::kU8, "x")});
  all.push_back({"key", with_key(std::string_view("a\0b", 3), test::kU8, "x")});
  all.push_back({"key", with_key("\xff\xfe", test::kU8, "x")});
  all.push_back({"key", with_key(std::string(70000, 'k'), test::kU8, "x")});
  all.push_back({"twice", GgufBuilder().number("k", 1).number("k", 2).file()});
  for (const std::uint32_t type : {13u, 99u, 0xffffffffu})
    all.push_back({"'k'", with_key("k", type, "xxxxxxxx")});
  for (const std::uint64_t length : {kMax, std::uint64_t{1} << 63, std::uint64_t{500}})
    all.push_back({"'k'", with_key("k", test::kString, raw(length) + "text")});
  // Counts whose product with the size of an element wraps around.
  for (const std::uint64_t count :
       {kMax, std::uint64_t{1} << 61, (std::uint64_t{1} << 61) + 1, std::uint64_t{1000}})
    for (const std::uint32_t type : {+test::kU64, +test::kF32, +test::kU8, +test::kString, +test::kArray})
      all.push_back({"'k'", with_key("k", test::kArray, raw(type) + raw(count) + std::string(16, '\0'))});
  all.push_back({"'k'", with_key("k", test::kArray, raw(std::uint32_t{77}) + raw(std::uint64_t{1}) + "x")});
  all.push_back({"'k'", with_key("k", test::kArray,
                                 raw(std::uint32_t{test::kString}) + raw(std::uint64_t{2}) +
                                     gguf_string("fine") + raw(std::uint64_t{900}) + "overrun")});
  for (const std::uint32_t alignment : {0u, 3u, 4u, 13u, 1u << 30}) {
    GgufBuilder b = small();
    b.number("general.alignment", alignment);
    all.push_back({"general.alignment", b.file()});
  }
  GgufBuilder wrong = small();
  all.push_back({"general.alignment", wrong.text("general.alignment", "32").file()});
}

void add_tensors(std::vector<Hostile>& all) {
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  const auto with_tensor = [](std::string_view name, const std::vector<std::uint64_t>& dimensions,
                              std::uint32_t type = 0, std::uint64_t offset = 0) {
    return GgufBuilder().tensor(name, dimensions, type, offset).file();
  };
  all.push_back({"name", with_tensor("", {4})});
  all.push_back({"name", with_tensor(std::string(65536, 'w'), {4})});
  all.push_back({"name", with_tensor(std::string_view("w\0x", 3), {4})});
  all.push_back({"name", with_tensor("\xc3\x28", {4})});
  all.push_back({"twice", GgufBuilder().tensor("w", {4}, 0, 0).tensor("w", {4}, 0, 32).file()});
  all.push_back({"dimensions", with_tensor("w", {})});
  all.push_back({"dimensions", with_tensor("w", {1, 1, 1, 1, 1})});
  all.push_back(
      {"dimensions", with_counts(1, 0, gguf_string("w") + raw(0xffffffffu) + std::string(64, '\0'))});
  for (const std::uint64_t n : {std::uint64_t{0}, kMax, kMax >> 1, (std::uint64_t{1} << 42) + 1})
    all.push_back({"'w'", with_tensor("w", {n})});
  // Products that wrap around, one of them to exactly 0.
  all.push_back({"shape", with_tensor("w", {1ull << 40, 1ull << 40})});
  all.push_back({"shape", with_tensor("w", {1ull << 31, 1ull << 31})});
  all.push_back({"shape", with_tensor("w", {1ull << 32, 1ull << 32, 4, 4})});
  for (const std::uint32_t type : {4u, 9u, 16u, 24u, 26u, 28u, 255u, 0xffffffffu})
    all.push_back({"types", with_tensor("w", {4}, type)});
  for (const std::uint32_t type : {2u, 3u, 8u, 12u, 14u, 39u})  // rows that are no whole blocks
    all.push_back({"multiple", with_tensor("w", {16, 2}, type)});
  all.push_back({"multiple", with_tensor("w", {32, 256}, 12)});
  all.push_back({"offset", with_tensor("w", {4}, 0, 1)});
  all.push_back({"offset", with_tensor("w", {4}, 0, 16)});
  for (const std::uint64_t offset : {std::uint64_t{64}, std::uint64_t{1} << 40, kMax - 31, (kMax >> 1) - 30})
    all.push_back({"'w'", with_tensor("w", {4}, 0, offset)});
  all.push_back({"'w'", with_tensor("w", {17}, 0, 0)});
  all.push_back({"overlap", GgufBuilder().tensor("w", {16}, 0, 0).tensor("v", {4}, 0, 32).file()});
  all.push_back({"overlap", GgufBuilder().tensor("w", {4}, 0, 0).tensor("v", {4}, 0, 0).file()});
}

TEST(Gguf, HostileFilesAreRefusedAndNamed) {
  std::vector<Hostile> all;
  add_headers(all);
  add_keys(all);
  add_tensors(all);
  EXPECT_GE(all.size(), 60u);
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(std::to_string(i) + " " + all[i].why);
    const std::string message = refusal([&] { parse(all[i].file); });
    EXPECT_NE(message.find(all[i].why), std::string::npos) << message;
    EXPECT_TRUE(message.starts_with("m.gguf")) << message;
  }
}

TEST(Gguf, GettersNameTheKey) {
  const std::string bytes = small().file();
  const GgufFile file = parse(bytes);
  const GgufMetadata& m = file.metadata;
  expect_refused("'none'", [&] { m.integer("none", 0, 1); });
  expect_refused("'a'", [&] { m.integer("a", 0, 6); });
  expect_refused("'b'", [&] { m.integer("b", 0, 6); });
  expect_refused("'a'", [&] { m.text("a"); });
  expect_refused("'a'", [&] { m.texts("a"); });
  expect_refused("'words'", [&] { m.integers("words", 0, 1); });
  expect_refused("'numbers'", [&] { m.integers("numbers", 0, 9); });
  expect_refused("'numbers'", [&] { m.numbers("numbers"); });
  expect_refused("'words'", [&] { m.number("words", 0, 1); });
  GgufBuilder b;
  b.real("nan", std::numeric_limits<float>::quiet_NaN()).key("huge", test::kU64, raw(~std::uint64_t{0}));
  b.text("broken", "\xff");
  const std::string other = b.file();
  const GgufFile odd = parse(other);
  expect_refused("'nan'", [&] { odd.metadata.number("nan", -1e300, 1e300); });
  expect_refused("'huge'", [&] { odd.metadata.integer("huge", 0, 1 << 30); });
  expect_refused("'broken'", [&] { odd.metadata.text("broken"); });
}

/// Part `index` of `count` with one tensor.
std::string part(int index, int count, int tensors, const std::string& name, const std::string& model = "m") {
  GgufBuilder b;
  if (index == 0) b.text("general.architecture", "llama");
  b.text("general.name", model);
  b.key("split.no", test::kU16, raw(static_cast<std::uint16_t>(index)));
  b.key("split.count", test::kU16, raw(static_cast<std::uint16_t>(count)));
  b.key("split.tensors.count", test::kI32, raw(std::int32_t{tensors}));
  return b.tensor(name, {4}, 0, 0).file();
}

struct SplitFolder {
  TestFolder folder;
  std::filesystem::path name(int i, int count = 3) const {
    return folder / ("m-0000" + std::to_string(i) + "-of-0000" + std::to_string(count) + ".gguf");
  }
  void write(int i, const std::string& bytes, int count = 3) const {
    folder.write(name(i, count).filename().string(), bytes);
  }
  void write_all() const {
    for (int i = 1; i <= 3; ++i) write(i, part(i - 1, 3, 3, "t" + std::to_string(i)));
  }
};

TEST(GgufParts, AnyPartOpensAll) {
  const SplitFolder split;
  split.write_all();
  for (int i = 1; i <= 3; ++i) {
    const GgufModel model = GgufModel::open(split.name(i));
    EXPECT_EQ(model.tensors.size(), 3u);
    EXPECT_EQ(model.files.size(), 3u);
    EXPECT_EQ(model.metadata().text("general.architecture"), "llama");
  }
  EXPECT_EQ(GgufModel::parts_of(split.name(2)).size(), 3u);
  EXPECT_EQ(GgufModel::parts_of("x/model.gguf").size(), 1u);
}

TEST(GgufParts, MissingAndForeignPartsAreNamed) {
  const SplitFolder split;
  const auto open = [&] { GgufModel::open(split.name(1)); };
  split.write_all();
  std::filesystem::remove(split.name(2));
  expect_refused("m-00002-of-00003.gguf", open);
  split.write(2, part(1, 3, 3, "t2", "another"));
  expect_refused("another model", open);
  split.write(2, part(2, 3, 3, "t2"));
  expect_refused("part 2 of 3", open);
  split.write(2, part(1, 3, 5, "t2"));
  expect_refused("another model", open);
  split.write(2, part(1, 3, 3, "t1"));
  expect_refused("another part", open);
  split.write(2, GgufBuilder().tensor("t2", {4}, 0, 0).file());
  expect_refused("m-00002-of-00003.gguf", open);
  for (int i = 1; i <= 3; ++i) split.write(i, part(i - 1, 3, 4, "t" + std::to_string(i)));
  expect_refused("4 tensors", open);
  // A part under a name of its own cannot lead to the others.
  split.folder.write("alone.gguf", part(1, 3, 3, "t2"));
  expect_refused("NAME-00002-of-00003.gguf", [&] { GgufModel::open(split.folder / "alone.gguf"); });
}

TEST(GgufParts, WhatIsNoFileIsRefused) {
  const TestFolder folder;
  expect_refused("none.gguf", [&] { GgufModel::open(folder / "none.gguf"); });
  EXPECT_FALSE(GgufModel::is_file(folder.path()));
  EXPECT_TRUE(GgufModel::is_file("some.gguf"));
  EXPECT_TRUE(GgufModel::is_file(folder.write("odd-name", small().file())));
  EXPECT_FALSE(GgufModel::is_file(folder.write("text", "text")));
}

}  // namespace
}  // namespace lode
