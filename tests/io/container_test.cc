// SPDX-License-Identifier: Apache-2.0
// The .lode file: what is written is read back, and nothing that is cut, altered, forged or of another kind
// is.
#include "io/container.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <cstring>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "base/file.h"
#include "lodestone/error.h"
#include "support/forged_container.h"
#include "support/refusal.h"

namespace lode {
namespace {

using test::expect_refused;
using test::ForgedContainer;
using test::refusal;
using test::TestFolder;

constexpr std::size_t kPage = 4096, kFooter = 16;

std::span<const std::byte> raw(std::string_view text) {
  return std::as_bytes(std::span(text));
}
std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Sections of all awkward sizes: none, one byte, a page, a page and a byte.
const std::vector<std::pair<std::string, std::string>>& contents() {
  static const std::vector<std::pair<std::string, std::string>> kContents = {
      {"meta", "{}"},
      {"empty", ""},
      {"kv/0/0/k", std::string(kPage, 'k')},
      {"select/kmeans:probes=8/3/labels", std::string(kPage + 1, '\xff')},
      {"last", "x"}};
  return kContents;
}

std::filesystem::path write_sample(const TestFolder& folder, std::string_view name = "a.lode") {
  ContainerWriter writer(folder / name);
  for (const auto& [section, bytes] : contents()) writer.add(section, raw(bytes));
  writer.finish();
  return folder / name;
}

std::string refusal_of(const std::filesystem::path& path) {
  return refusal([&] { ContainerReader reader(path); });
}

TEST(Container, ReadsWhatWasWritten) {
  const TestFolder folder;
  const ContainerReader reader(write_sample(folder));
  ASSERT_EQ(reader.sections().size(), contents().size());
  for (std::size_t i = 0; i < contents().size(); ++i) {
    const auto& [name, bytes] = contents()[i];
    EXPECT_EQ(reader.sections()[i].name, name);
    EXPECT_EQ(reader.sections()[i].offset % kPage, 0u);
    EXPECT_TRUE(reader.has(name));
    EXPECT_EQ(text_of(reader.bytes(name)), bytes);
  }
  EXPECT_EQ(reader.verify_all(), "");
  EXPECT_FALSE(reader.has("met"));
  expect_refused("'met'", [&] { reader.bytes("met"); });
}

TEST(Container, PiecesAreTheSameAsTheWhole) {
  const TestFolder folder;
  {
    ContainerWriter writer(folder / "a.lode");
    writer.begin("s");
    for (int i = 0; i < 1000; ++i) writer.append(raw(std::string(static_cast<std::size_t>(i % 7), 'a')));
    writer.end();
    writer.finish();
    ContainerWriter whole(folder / "b.lode");
    std::size_t bytes = 0;
    for (int i = 0; i < 1000; ++i) bytes += static_cast<std::size_t>(i % 7);
    whole.add("s", raw(std::string(bytes, 'a')));
    whole.finish();
  }
  EXPECT_EQ(test::bytes_of_file(folder / "a.lode"), test::bytes_of_file(folder / "b.lode"));
}

TEST(Container, NoSectionsAtAll) {
  const TestFolder folder;
  ContainerWriter(folder / "a.lode").finish();
  EXPECT_TRUE(ContainerReader(folder / "a.lode").sections().empty());
}

TEST(Container, ValuesAreWholeNumbersOfElements) {
  const TestFolder folder;
  const std::array<std::int32_t, 3> numbers = {1, -2, 3};
  {
    ContainerWriter writer(folder / "a.lode");
    SectionWriter section(writer, "p/");
    section.add("numbers", std::span<const std::int32_t>(numbers));
    section.add("ragged", raw("abc"));
    writer.finish();
  }
  const ContainerReader reader(folder / "a.lode");
  const SectionReader section(reader, "p/");
  const auto read = section.values<std::int32_t>("numbers");
  EXPECT_EQ(std::vector<std::int32_t>(read.begin(), read.end()), (std::vector<std::int32_t>{1, -2, 3}));
  expect_refused("p/ragged", [&] { section.values<std::int32_t>("ragged"); });
  expect_refused("p/none", [&] { section.values<std::int32_t>("none"); });
}

TEST(Container, CutAnywhereIsRefused) {
  const TestFolder folder;
  const auto path = write_sample(folder);
  for (std::uintmax_t size = std::filesystem::file_size(path); size-- > 0;) {
    std::filesystem::resize_file(path, size);
    try {
      ContainerReader reader(path);
      FAIL() << "cut to " << size << " bytes and accepted";
    } catch (const InputError& e) {
      ASSERT_NE(std::string(e.what()).find("a.lode"), std::string::npos) << e.what();
    }
  }
}

TEST(Container, BytesAddedAtTheEndAreRefused) {
  const TestFolder folder;
  const std::string whole = test::bytes_of_file(write_sample(folder));
  for (const std::string& more : {std::string(1, '\0'), std::string(kPage, '\0'), whole}) {
    EXPECT_NE(refusal_of(folder.write("b.lode", whole + more)).find("cut short or was added to"),
              std::string::npos);
  }
}

/// What a reader says of the file: the error, the damaged section, or nothing.
std::string fault_of(const std::filesystem::path& path) {
  try {
    return ContainerReader(path).verify_all();
  } catch (const InputError& e) {
    return e.what();
  }
}

TEST(Container, EveryFlippedBitIsNoticedAndItsSectionNamed) {
  const TestFolder folder;
  const auto path = write_sample(folder);
  const std::uint64_t size = std::filesystem::file_size(path);
  std::vector<std::string> owner(size, "expected zeros");  // between sections
  const auto own = [&](std::uint64_t at, std::uint64_t bytes, const std::string& name) {
    std::fill_n(owner.begin() + static_cast<std::ptrdiff_t>(at), bytes, name);
  };
  std::uint64_t table = 0;
  {
    const ContainerReader reader(path);
    for (const SectionInfo& section : reader.sections()) {
      own(section.offset, section.bytes, "section '" + section.name + "'");
      table = (section.offset + section.bytes + kPage - 1) / kPage * kPage;
    }
    own(0, kPage, path.string());
    own(table, size - table, path.string());
  }
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  for (std::uint64_t at = 0; at < size; ++at) {
    const bool dense = at < 128 || at >= table;  // elsewhere one bit of every byte tells as much
    for (int bit = dense ? 0 : static_cast<int>(at % 8); bit < (dense ? 8 : static_cast<int>(at % 8) + 1);
         ++bit) {
      file.seekg(static_cast<std::streamoff>(at));
      const int was = file.get();
      const auto put = [&](int byte) {
        file.seekp(static_cast<std::streamoff>(at));
        file.put(static_cast<char>(byte)).flush();
      };
      put(was ^ 1 << bit);
      const std::string fault = fault_of(path);
      put(was);
      ASSERT_EQ(fault.substr(0, owner[at].size()), owner[at]) << "bit " << bit << " of byte " << at;
    }
  }
  EXPECT_EQ(fault_of(path), "");
}

TEST(Container, ADamagedSectionLeavesTheOthersReadable) {
  const TestFolder folder;
  std::string bytes = test::bytes_of_file(write_sample(folder));
  std::uint64_t at = ContainerReader(folder / "a.lode").info("kv/0/0/k").offset + 17;
  bytes[at] ^= 4;
  const ContainerReader reader(folder.write("b.lode", bytes));
  expect_refused("'kv/0/0/k' is damaged", [&] { reader.bytes("kv/0/0/k"); });
  expect_refused("'kv/0/0/k' is damaged", [&] { reader.bytes("kv/0/0/k"); });
  EXPECT_EQ(text_of(reader.bytes("meta")), "{}");
  EXPECT_EQ(reader.verify_all(), "section 'kv/0/0/k' is damaged: its checksum does not match");
}

TEST(Container, OtherBytesBeforeTheFirstSectionAreSeen) {
  const TestFolder folder;
  const auto fault = [&](char filled) {
    const ForgedContainer forged = {
        .body = std::string(kPage, filled) + "x",
        .table = R"([{"name":"a","offset":8192,"bytes":1,"xxh3":")" + hash_hex("x") + "\"}]"};
    return fault_of(folder.write("f.lode", forged.bytes()));
  };
  EXPECT_EQ(fault('\0'), "");
  EXPECT_EQ(fault('n'), "expected zeros before its first section, found other bytes");
}

TEST(Container, OtherVersionsAndByteOrders) {
  const TestFolder folder;
  const auto said = [&](const ForgedContainer& forged) {
    return refusal_of(folder.write("f.lode", forged.bytes()));
  };
  for (const std::uint32_t major : {0u, 3u, 0x80000000u}) {
    const std::string message = said({.table = "[]", .major = major});
    EXPECT_NE(message.find("version 1 or 2, found " + std::to_string(major)), std::string::npos) << message;
  }
  EXPECT_NE(said({.table = "[]", .order_mark = 0x04030201}).find("byte order"), std::string::npos);
  const ForgedContainer later = {
      .body = std::string(kPage, '\0'),
      .table = R"([{"name":"of a later minor version","offset":4096,"bytes":0,"xxh3":")" + hash_hex("") +
               R"(","more":[1]}])",
      .minor = 7};
  EXPECT_EQ(ContainerReader(folder.write("f.lode", later.bytes())).verify_all(), "");
}

std::string entry(const std::string& name, const std::string& offset, const std::string& bytes) {
  return R"({"name":")" + name + R"(","offset":)" + offset + R"(,"bytes":)" + bytes + R"(,"xxh3":")" +
         std::string(32, '0') + "\"}";
}

TEST(Container, ForgedTablesAreRefused) {
  const TestFolder folder;
  const std::string a = entry("a", "4096", "10"), long_name(513, 'n');
  const std::vector<std::pair<std::string, std::string>> tables = {
      {"", "JSON"},
      {"{}", "no list"},
      {"null", "no list"},
      {"[1]", "object"},
      {"[[]]", "object"},
      {"[{}]", "'name'"},
      {"[" + a + "] x", "JSON"},
      {"[" + a + "," + a + "]", "'a'"},
      {"[" + a + "," + entry("a", "8192", "1") + "]", "twice"},
      {"[" + entry("a", "4096", "4097") + "," + entry("b", "8192", "1") + "]", "'b'"},  // overlap
      {"[" + entry("a", "8192", "1") + "," + entry("b", "4096", "1") + "]", "'b'"},     // falling
      {"[" + entry("a", "4097", "1") + "]", "'a'"},
      {"[" + entry("a", "0", "1") + "]", "'a'"},  // the header
      {"[" + entry("a", "4096", "8193") + "]", "'a'"},
      {"[" + entry("a", "12288", "1") + "]", "'a'"},
      {"[" + entry("a", "16384", "0") + "]", "'a'"},
      {"[" + entry("a", "9223372036854771712", "1") + "]", "'a'"},
      {"[" + entry("a", "4096", "9223372036854775807") + "]", "'a'"},
      {"[" + entry("a", "18446744073709547520", "8192") + "]", "'offset'"},
      {"[" + entry("a", "4096", "18446744073709551615") + "]", "'bytes'"},
      {"[" + entry("a", "-4096", "1") + "]", "'offset'"},
      {"[" + entry("a", "4096.0", "1") + "]", "'offset'"},
      {"[" + entry("a", "\"4096\"", "1") + "]", "'offset'"},
      {"[" + entry("a", "4096", "1e1") + "]", "'bytes'"},
      {"[" + entry("a", "4096", "null") + "]", "'bytes'"},
      {"[" + entry("", "4096", "1") + "]", "damaged"},
      {"[" + entry(long_name, "4096", "1") + "]", "damaged"},
      {R"([{"name":"a","offset":4096,"bytes":1,"xxh3":"00"}])", "'a'"},
      {R"([{"name":"a","offset":4096,"bytes":1,"xxh3":5}])", "'xxh3'"},
      {R"([{"name":"a","name":"b","offset":4096,"bytes":1,"xxh3":""}])", "twice"},
      {"[\"\xff\"]", "JSON"},
      {std::string(100000, '['), "deep"}};
  for (const auto& [table, what] : tables) {
    SCOPED_TRACE(table.substr(0, 120));
    const ForgedContainer forged = {.body = std::string(2 * kPage, 'b'), .table = table};
    const std::string message = refusal_of(folder.write("f.lode", forged.bytes()));
    EXPECT_NE(message.find(what), std::string::npos) << message;
    EXPECT_NE(message.find("f.lode"), std::string::npos) << message;
  }
}

// What several sections hold stands once in the file, which an earlier release refuses by its version; files
// without such sections stay as they were.
TEST(Container, EqualSectionsAreWrittenOnce) {
  const TestFolder folder;
  const std::string links(3 * kPage + 5, 'l'), other(3 * kPage + 5, 'o'), little(kPage - 1, 's');
  const auto write = [&](const char* name, const std::vector<std::pair<std::string, std::string>>& sections) {
    ContainerWriter writer(folder / name);
    for (const auto& [section, bytes] : sections) writer.add(section, raw(bytes));
    writer.finish();
    return test::bytes_of_file(folder / name);
  };
  const auto version = [](const std::string& file) { return static_cast<int>(file[12]); };
  const std::vector<std::pair<std::string, std::string>> sections = {
      {"a", links}, {"b", other}, {"c", links}, {"d", little}, {"e", little}, {"f", links}, {"g", other}};
  std::string file = write("shared.lode", sections);
  EXPECT_EQ(version(file), 2);
  EXPECT_EQ(version(write("apart.lode", {{"a", links}, {"b", other}, {"d", little}, {"e", little}})), 1);
  EXPECT_LT(file.size(), (1 + 4 + 4 + 1 + 1 + 1) * kPage);
  const ContainerReader reader(folder / "shared.lode");
  EXPECT_EQ(reader.verify_all(), "");
  for (const auto& [name, bytes] : sections) {
    EXPECT_EQ(text_of(reader.bytes(name)), bytes);
    EXPECT_EQ(reader.info(name).shared, name == "c" || name == "f" || name == "g");
  }
  file[reader.info("c").offset + 7] ^= 1;
  const ContainerReader damaged(folder.write("damaged.lode", file));
  for (const char* name : {"a", "c", "f"})
    expect_refused(std::string("'") + name + "' is damaged", [&] { damaged.bytes(name); });
  EXPECT_EQ(text_of(damaged.bytes("g")), other);
}

TEST(Container, OnlyWholeSectionsAreShared) {
  const TestFolder folder;
  const auto said = [&](const std::string& table, std::uint32_t major) {
    const ForgedContainer forged = {.body = std::string(2 * kPage, 'b'), .table = table, .major = major};
    return fault_of(folder.write("f.lode", forged.bytes()));
  };
  const std::string a = entry("a", "4096", "4097"), again = entry("b", "4096", "4097");
  EXPECT_NE(said("[" + a + "," + again + "]", 1).find("damaged at section 'b'"), std::string::npos);
  EXPECT_NE(said("[" + a + "," + again + "]", 2).find("'a' is damaged"), std::string::npos);  // its checksum
  for (const std::string& other :
       {entry("b", "4096", "4096"), entry("b", "8192", "1"), entry("b", "4096", "4098"),
        entry("", "4096", "4097"),
        R"({"name":"b","offset":4096,"bytes":4097,"xxh3":")" + std::string(32, '1') + "\"}"})
    EXPECT_NE(said("[" + a + "," + other + "]", 2).find("its table is damaged"), std::string::npos) << other;
}

TEST(Container, ForgedPlacesOfTheTableAreRefused) {
  const TestFolder folder;
  const std::uint64_t petabyte = std::uint64_t{1} << 50, most = UINT64_MAX;
  const auto expect_refusal = [&](ForgedContainer forged) {
    forged.body = std::string(kPage, 'b');
    forged.table = "[]";
    EXPECT_NE(refusal_of(folder.write("f.lode", forged.bytes())).find("expected"), std::string::npos);
  };
  for (const std::uint64_t offset : {std::uint64_t{0}, std::uint64_t{112}, std::uint64_t{kPage},
                                     2 * kPage + 1, petabyte, most, most - 1, most - kPage}) {
    expect_refusal({.table_offset = offset});
  }
  for (const std::uint64_t bytes :
       {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{18}, petabyte, most, most - 2 * kPage + 1}) {
    expect_refusal({.table_bytes = bytes});
  }
  for (const std::uint64_t bytes : {std::uint64_t{0}, petabyte, most}) expect_refusal({.file_bytes = bytes});
}

TEST(Container, ManySectionsAreReadInTime) {
  const TestFolder folder;
  constexpr int kSections = 100000;
  ForgedContainer forged = {.body = "", .table = "["};
  for (int i = 0; i < kSections; ++i) {
    forged.table += (i == 0 ? "" : ",") + entry(std::to_string(i), "4096", "0");
  }
  forged.table += "]";
  const auto path = folder.write("f.lode", forged.bytes());
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(ContainerReader(path).sections().size(), std::size_t{kSections});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(Container, NamesInMessagesCannotDriveATerminal) {
  const TestFolder folder;
  const ForgedContainer forged = {
      .body = std::string(kPage, 'b'),
      .table = "[" + entry("\\u001b[2J\\n" + std::string(300, 'n'), "1", "1") + "]"};
  const std::string message = refusal_of(folder.write("f.lode", forged.bytes()));
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_LT(message.size(), folder.path().string().size() + 200);
}

TEST(Container, OtherKindsOfFileAreNamed) {
  const TestFolder folder;
  const std::string whole = test::bytes_of_file(write_sample(folder));
  std::string as_text = whole;
  as_text.erase(as_text.find('\r'), 1);
  for (const std::string& bytes :
       {std::string(), std::string("LOD"), std::string("GGUF\3\0\0\0", 8), std::string("PK\3\4"), as_text,
        std::string("{\"a\":1}"), std::string(3 * kPage, '\0'), whole.substr(1)}) {
    EXPECT_NE(refusal_of(folder.write("b", bytes)).find("expected a .lode file"), std::string::npos);
  }
  EXPECT_NE(refusal_of(folder.path()).find("folder"), std::string::npos);
  EXPECT_NE(refusal_of(folder / "missing").find("missing"), std::string::npos);
  EXPECT_NE(refusal_of("/dev/zero").find("device"), std::string::npos);
  ASSERT_EQ(mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_NE(refusal_of(folder / "fifo").find("pipe"), std::string::npos);
  std::filesystem::create_symlink("loop", folder / "loop");
  EXPECT_NE(refusal_of(folder / "loop").find("loop"), std::string::npos);
}

TEST(Container, AHugeHoleyFileIsRefusedAtOnce) {
  const TestFolder folder;
  const auto path = write_sample(folder);
  std::error_code error;
  std::filesystem::resize_file(path, std::uintmax_t{1} << 40, error);
  if (error) GTEST_SKIP() << "this file system holds no file of 1 TiB: " << error.message();
  EXPECT_NE(refusal_of(path).find("added to"), std::string::npos);
}

TEST(Container, TheOldFileStaysUntilTheNewOneIsComplete) {
  const TestFolder folder;
  const auto path = write_sample(folder);
  const std::string before = test::bytes_of_file(path);
  const ContainerReader old(path);
  {
    ContainerWriter abandoned(path);
    abandoned.add("s", raw("new"));
  }
  EXPECT_EQ(test::bytes_of_file(path), before);
  ContainerWriter writer(path);
  writer.add("s", raw("new"));
  EXPECT_EQ(test::bytes_of_file(path), before);
  expect_refused("another process", [&] { ContainerWriter second(path); });
  writer.finish();
  EXPECT_EQ(text_of(ContainerReader(path).bytes("s")), "new");
  EXPECT_EQ(old.verify_all(), "") << "a reader keeps the file that it opened";
  std::filesystem::remove(path);
  EXPECT_EQ(text_of(old.bytes("meta")), "{}");
  EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "no temporary is left";
}

TEST(Container, SectionsMayBeReadByManyThreads) {
  const TestFolder folder;
  const ContainerReader reader(write_sample(folder));
  std::vector<std::jthread> threads;
  std::array<bool, 4> right = {};
  for (bool& mine : right) {
    threads.emplace_back([&] {
      mine = true;
      for (const auto& [name, bytes] : contents()) mine = mine && text_of(reader.bytes(name)) == bytes;
    });
  }
  threads.clear();
  EXPECT_EQ(right, (std::array<bool, 4>{true, true, true, true}));
}

}  // namespace
}  // namespace lode
