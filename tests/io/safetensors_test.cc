// SPDX-License-Identifier: Apache-2.0
// safetensors: what is written is read back, and files that lie about offsets, sizes or shapes are refused
// with the tensor's name. No bytes lead outside the file.
#include "io/safetensors.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "lodestone/error.h"
#include "support/refusal.h"
#include "support/source_dir.h"

namespace lode {
namespace {

using test::refusal;
using test::TestFolder;

std::string with_length(const std::string& header, std::uint64_t length) {
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file + header;
}

/// A file of this header and `data` bytes of data.
std::string file_of(const std::string& header, std::size_t data = 0) {
  return with_length(header, header.size()) + std::string(data, 'd');
}

std::string tensor(const std::string& name, const std::string& type, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + R"(":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}";
}

/// The header of one tensor 'w'.
std::string one(const std::string& type, const std::string& shape, const std::string& offsets) {
  return "{" + tensor("w", type, shape, offsets) + "}";
}

std::map<std::string, Tensor> parse(std::string_view file,
                                    std::map<std::string, std::string>* metadata = nullptr) {
  return parse_safetensors(std::as_bytes(std::span(file)), "m.safetensors", metadata);
}

TEST(Safetensors, ReadsWhatOthersWrite) {
  const std::string header = R"({"__metadata__":{"format":"pt"},)" + tensor("a", "F32", "[2,3]", "[4,28]") +
                             "," + tensor("scalar", "BF16", "[]", "[0,2]") + "," +
                             tensor("none", "I64", "[0,5]", "[2,2]") + "," +
                             tensor("b", "U8", "[2]", "[2,4]") + "}   ";
  std::map<std::string, std::string> metadata;
  const std::string file = file_of(header, 28);
  const auto tensors = parse(file, &metadata);
  ASSERT_EQ(tensors.size(), 4u);
  EXPECT_EQ(metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
  EXPECT_EQ(tensors.at("a").shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(tensors.at("a").bytes.data() - std::as_bytes(std::span(file)).data(),
            static_cast<std::ptrdiff_t>(8 + header.size() + 4));
  EXPECT_EQ(tensors.at("a").elements(), 6);
  EXPECT_EQ(tensors.at("scalar").elements(), 1);
  EXPECT_EQ(tensors.at("none").elements(), 0);
  EXPECT_TRUE(parse(file_of("{}")).empty());
}

TEST(Safetensors, RoundTrip) {
  const TestFolder folder;
  const std::vector<float> values = {1.0f, -0.0f, 1e-45f};
  const std::vector<std::uint16_t> halves = {1, 2, 3, 4};
  const std::vector<TensorToWrite> written = {
      {"z first", DType::f32, {3}, std::as_bytes(std::span(values))},
      {"a second", DType::bf16, {2, 2}, std::as_bytes(std::span(halves))},
      {"\u00e9\"\\\n", DType::f16, {0, 7}, {}}};
  write_safetensors(folder / "m.safetensors", written, {{"key", "value \u00e9"}});
  const std::string file = test::bytes_of_file(folder / "m.safetensors");
  std::map<std::string, std::string> metadata;
  const auto read = parse(file, &metadata);
  EXPECT_EQ(metadata, (std::map<std::string, std::string>{{"key", "value \u00e9"}}));
  ASSERT_EQ(read.size(), written.size());
  for (const TensorToWrite& t : written) {
    const Tensor& tensor = read.at(t.name);
    EXPECT_EQ(float_type(tensor, t.name, "m"), t.type);
    EXPECT_EQ(tensor.shape, t.shape);
    ASSERT_EQ(tensor.bytes.size(), t.bytes.size());
    EXPECT_TRUE(std::equal(t.bytes.begin(), t.bytes.end(), tensor.bytes.begin()));
  }
  EXPECT_EQ((read.at("z first").bytes.data() - std::as_bytes(std::span(file)).data()) % 64, 0);
  for (std::size_t at = file.size() - 20; at < file.size(); ++at) {
    std::string damaged = file;
    damaged[at] ^= 1;
    test::expect_refused("checksum", [&] { parse(damaged); });
  }
}

TEST(Safetensors, WhatIsNoSafetensorsFileIsNamed) {
  const std::vector<std::pair<std::string, std::string>> files = {
      {"", "at least 8 bytes, found 0"},
      {"1234567", "found 7"},
      {with_length("", 0), "JSON object"},
      {with_length("{}", 1), "JSON"},
      {with_length("{}", 3), "cut short"},
      {with_length("{}", UINT64_MAX), "18446744073709551615"},
      {with_length("{}", UINT64_MAX - 7), "18446744073709551608"},
      {with_length("{}", std::uint64_t{1} << 63), "9223372036854775808"},
      {with_length(std::string(100'000'001, ' '), 100'000'001), "100000001"},
      {file_of("[]"), "JSON object"},
      {file_of(" {}"), "JSON object"},
      {file_of("{"), "JSON"},
      {file_of("{} x"), "JSON"},
      {file_of(std::string("{}\0", 3)), "JSON"},
      {file_of("{\"\xff\":1}"), "JSON"},
      {file_of("{'a':1}"), "JSON"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", "Git LFS"},
      {std::string("PK\3\4 a zip of pickles"), "pickle"},
      {std::string("\x80\2}q\0 pickle", 12), "pickle"},
      {file_of("{\"a\":" + std::string(1'000'000, '[')), "deep"},
      {std::string("GGUF\3\0\0\0\0\0\0\0", 12), "m.safetensors"}};
  for (const auto& [file, what] : files) {
    SCOPED_TRACE(what);
    const std::string message = refusal([&] { parse(file); });
    EXPECT_NE(message.find(what), std::string::npos) << message;
    EXPECT_NE(message.find("m.safetensors"), std::string::npos) << message;
  }
}

TEST(Safetensors, LyingEntriesAreRefusedByTensor) {
  const std::vector<std::pair<std::string, std::string>> headers = {
      {R"({"w":5})", "an object"},
      {R"({"w":[]})", "an object"},
      {R"({"w":{}})", "'dtype'"},
      {R"({"w":{"dtype":"F32","data_offsets":[0,4]}})", "'shape'"},
      {R"({"w":{"dtype":"F32","shape":[1]}})", "'data_offsets'"},
      {one("F32", "1", "[0,4]"), "'shape'"},
      {one("F32", "{}", "[0,4]"), "'shape'"},
      {one("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), "'shape'"},
      {one("F32", "[-1]", "[0,4]"), "dimension"},
      {one("F32", "[1.0]", "[0,4]"), "dimension"},
      {one("F32", "[\"1\"]", "[0,4]"), "dimension"},
      {one("F32", "[null]", "[0,4]"), "dimension"},
      {one("F32", "[18446744073709551615]", "[0,4]"), "dimension"},
      {one("F32", "[9223372036854775807]", "[0,4]"), "dimension"},
      {one("F32", "[281474976710656,281474976710656]", "[0,4]"), "larger than any file"},
      {one("F32", "[4294967296,4294967296]", "[0,0]"), "larger than any file"},  // wraps to 0
      {one("F32", "[2147483648,2147483649]", "[0,4]"), "larger than any file"},
      {one("F32", "[1]", "[0,4,4]"), "'data_offsets'"},
      {one("F32", "[1]", "[4]"), "'data_offsets'"},
      {one("F32", "[1]", "{}"), "'data_offsets'"},
      {one("F32", "[1]", "[-4,0]"), "'data_offsets'"},
      {one("F32", "[1]", "[0,4.0]"), "'data_offsets'"},
      {one("F32", "[1000]", "[0,1e3]"), "'data_offsets'"},
      {one("F32", "[1]", "[\"0\",\"4\"]"), "'data_offsets'"},
      {one("F32", "[1]", "[4,0]"), "rise"},
      {one("F32", "[1]", "[18446744073709551612,18446744073709551615]"), "rise"},
      {one("F32", "[1]", "[0,9223372036854775807]"), "cut short"},
      {one("F32", "[1]", "[9007199254740993,9007199254740997]"), "cut short"},
      {one("F32", "[2]", "[0,8]"), "cut short"},
      {one("F32", "[1]", "[0,3]"), "expected 4 bytes"},
      {one("F32", "[]", "[0,2]"), "expected 4 bytes"},
      {one("F32", "[0]", "[0,4]"), "expected 0 bytes"},
      {one("F32", "[0]", "[0,0]"), "4"},  // data that no tensor has
      {one("F16", "[1]", "[0,2]"), "4"},
      {one("F16", "[1]", "[2,4]"), "hole"},
      {one("f32", "[1]", "[0,4]"), "'f32'"},
      {one("F4", "[1]", "[0,4]"), "'F4'"},
      {one("F8_E8M0", "[4]", "[0,4]"), "'F8_E8M0'"},
      {one("", "[1]", "[0,4]"), "''"},
      {"{" + tensor("w", "F16", "[1]", "[0,2]") + "," + tensor("w", "F16", "[1]", "[2,4]") + "}", "twice"},
      {"{" + tensor("v", "F16", "[1]", "[0,2]") + "," + tensor("w", "F16", "[1]", "[1,3]") + "}", "overlap"},
      {"{" + tensor("v", "F16", "[2]", "[0,4]") + "," + tensor("w", "F16", "[2]", "[0,4]") + "}", "overlap"},
      {"{" + tensor("v", "U8", "[1]", "[0,1]") + "," + tensor("w", "U8", "[2]", "[2,4]") + "}", "hole"},
      {"{" + tensor("v", "F16", "[2]", "[0,4]") + "," + tensor("w", "F16", "[0]", "[2,2]") + "}", "overlap"}};
  for (const auto& [header, what] : headers) {
    SCOPED_TRACE(header);
    const std::string message = refusal([&] { parse(file_of(header, 4)); });
    EXPECT_NE(message.find(what), std::string::npos) << message;
    EXPECT_NE(message.find("m.safetensors"), std::string::npos) << message;
    const bool of_the_file = what == "4";
    EXPECT_TRUE(of_the_file || message.find("'w'") != std::string::npos) << message;
  }
}

TEST(Safetensors, MetadataHoldsStringsOnly) {
  for (const std::string value : {"5", "[]", "\"x\"", R"({"a":1})", R"({"a":null})", R"({"a":{"b":"c"}})"}) {
    const std::string message = refusal([&] { parse(file_of(R"({"__metadata__":)" + value + "}")); });
    EXPECT_NE(message.find("__metadata__"), std::string::npos) << message;
  }
}

TEST(Safetensors, OtherTypesAreReadButAreNoWeights) {
  for (const auto& [type, bytes] : std::vector<std::pair<std::string, int>>{
           {"F64", 8}, {"I64", 8}, {"I8", 1}, {"BOOL", 1}, {"F8_E4M3", 1}}) {
    const std::string size = std::to_string(bytes);
    const std::string file = file_of(one(type, "[1]", "[0," + size + "]"), static_cast<std::size_t>(bytes));
    const auto tensors = parse(file);
    test::expect_refused("found " + type, [&] { float_type(tensors.at("w"), "w", "m"); });
  }
}

TEST(Safetensors, NamesInMessagesAreShortAndPrintable) {
  const std::string name = "\\u001b[2J\\n" + std::string(1 << 20, 'n');
  const std::string message =
      refusal([&] { parse(file_of("{" + tensor(name, "F32", "[1]", "[0,3]") + "}", 3)); });
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_LT(message.size(), 300u);
}

std::string small_file() {
  const std::string header = R"({"__metadata__":{"k":"v"},)" + tensor("a.weight", "F32", "[2,2]", "[0,16]") +
                             "," + tensor("b", "BF16", "[3]", "[16,22]") + "}";
  return file_of(header, 22);
}

TEST(Safetensors, CutAnywhereIsRefused) {
  const std::string file = small_file();
  ASSERT_EQ(parse(file).size(), 2u);
  for (std::size_t size = 0; size < file.size(); ++size) {
    // A copy of its own on the heap, so that a sanitizer sees a read past the end.
    const std::vector<char> cut(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size));
    const std::string message = refusal([&] { parse({cut.data(), cut.size()}); });
    ASSERT_NE(message.find("m.safetensors"), std::string::npos) << size;
  }
  refusal([&] { parse(file + "x"); });
}

TEST(Safetensors, FlippedBitsOfTheHeaderLeadNowhereElse) {
  const std::string file = small_file();
  int accepted = 0;
  for (std::size_t bit = 0; bit < 8 * (file.size() - 22); ++bit) {
    std::string altered = file;
    altered[bit / 8] = static_cast<char>(altered[bit / 8] ^ 1 << bit % 8);
    try {
      std::size_t bytes = 0;
      for (const auto& [name, t] : parse(altered)) {
        ASSERT_TRUE(t.bytes.empty() || (reinterpret_cast<const char*>(t.bytes.data()) >= altered.data() &&
                                        reinterpret_cast<const char*>(t.bytes.data() + t.bytes.size()) <=
                                            altered.data() + altered.size()));
        bytes += t.bytes.size();
      }
      ASSERT_EQ(bytes, 22u) << "bit " << bit;
      ++accepted;
    } catch (const InputError& e) {
      ASSERT_LT(std::string(e.what()).size(), 500u);
    }
  }
  EXPECT_GT(accepted, 0) << "a bit of a name changes the name only";
}

/// A bit of a name, of metadata or of the blanks behind them changes what a file of ours says, and is found.
TEST(Safetensors, EveryFlippedBitOfAFileOfOursIsFound) {
  const TestFolder folder;
  const std::vector<float> values(17, 0.5f);
  const std::vector<TensorToWrite> tensors = {{"w", DType::f32, {17}, std::as_bytes(std::span(values))}};
  write_safetensors(folder / "m.safetensors", tensors, {{"method", "saap"}, {"note", "x"}});
  const std::string file = test::bytes_of_file(folder / "m.safetensors");
  ASSERT_EQ(parse(file).size(), 1u);
  for (std::size_t bit = 0; bit < 8 * file.size(); ++bit) {
    std::string altered = file;
    altered[bit / 8] = static_cast<char>(altered[bit / 8] ^ 1 << bit % 8);
    EXPECT_THROW(parse(altered), InputError) << "bit " << bit % 8 << " of byte " << bit / 8;
  }
}

/// A layer at a time reads the file anew; its gigabytes are hashed once.
TEST(Safetensors, AFileIsHashedOnceUntilItChanges) {
  const TestFolder folder;
  const std::vector<float> values(std::size_t{8} << 20, 0.5f);
  const auto path = folder / "m.safetensors";
  const std::vector<TensorToWrite> tensors = {
      {"w", DType::f32, {std::ssize(values)}, std::as_bytes(std::span(values))}};
  write_safetensors(path, tensors, {});
  const auto seconds = [&] {
    const MappedFile file(path);
    const test::CpuClock clock;
    EXPECT_EQ(parse_safetensors(file).size(), 1u);
    return clock.seconds();
  };
  const double first = seconds();
  EXPECT_LT(4 * seconds(), first);
  std::string altered = test::bytes_of_file(path);
  altered[altered.size() - 1000] = static_cast<char>(altered[altered.size() - 1000] ^ 1);
  folder.write("m.safetensors", altered);
  const MappedFile file(path);
  EXPECT_NE(refusal([&] { parse_safetensors(file); }).find("checksum"), std::string::npos);
}

// Nothing but a checksum tells a flipped bit of a number from what was trained.
TEST(Safetensors, ShippedArtefactsCarryTheirChecksum) {
  for (const char* name : {"hash", "saap"}) {
    const MappedFile file(source_dir() / "models/pocket" / (std::string(name) + ".safetensors"));
    std::string altered(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
    EXPECT_FALSE(parse(altered).empty());
    altered.back() = static_cast<char>(altered.back() ^ 1);
    EXPECT_NE(refusal([&] { parse(altered); }).find("checksum"), std::string::npos) << name;
  }
}

TEST(Safetensors, AMillionTinyTensorsAreReadInTime) {
  constexpr std::size_t kTensors = 1'000'000;
  std::string header = "{";
  for (std::size_t i = 0; i < kTensors; ++i) {
    header += (i == 0 ? "" : ",") + tensor(std::to_string(i), "U8", "[1]",
                                           "[" + std::to_string(i) + "," + std::to_string(i + 1) + "]");
  }
  const std::string file = file_of(header + "}", kTensors);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(parse(file).size(), kTensors);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  RecordProperty("seconds", std::to_string(took.count()));
  EXPECT_LT(took.count(), 60.0);
}

}  // namespace
}  // namespace lode
