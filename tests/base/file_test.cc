// SPDX-License-Identifier: Apache-2.0
// What is opened is a file; what is written is whole or not there, whoever dies or fills the disk.
#include "base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "base/hidden_name.h"
#include "support/refusal.h"

namespace lode {
namespace {

using test::bytes_of_file;
using test::expect_refused;
using test::TestFolder;

std::span<const std::byte> bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

TEST(MappedFile, HoldsTheBytes) {
  const TestFolder folder;
  MappedFile file(folder.write("a", "hello"));
  EXPECT_EQ(file.bytes().size(), 5u);
  MappedFile other = std::move(file);
  EXPECT_EQ(static_cast<char>(other.bytes()[4]), 'o');
  EXPECT_TRUE(MappedFile(folder.write("empty", "")).bytes().empty());
  EXPECT_EQ(read_file(folder / "a"), "hello");
}

TEST(MappedFile, OnlyFilesAreOpened) {
  const TestFolder folder;
  expect_refused("none", [&] { MappedFile(folder / "none"); });
  expect_refused("folder", [&] { MappedFile(folder.path()); });
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  expect_refused("pipe", [&] { MappedFile(folder / "pipe"); });  // and does not wait for a writer
  expect_refused("device", [&] { MappedFile("/dev/zero"); });
  ASSERT_EQ(symlink("loop", (folder / "loop").c_str()), 0);
  expect_refused("loop", [&] { MappedFile(folder / "loop"); });
  expect_refused("at most 3 bytes", [&] { read_file(folder.write("a", "hello"), 3); });
}

TEST(MappedFile, SparseTerabyteCostsNothing) {
  const TestFolder folder;
  const auto path = folder.write("sparse", "");
  if (truncate(path.c_str(), off_t{1} << 40) != 0) GTEST_SKIP() << "the file system has no such large files";
  const MappedFile file(path);
  EXPECT_EQ(file.bytes().size(), std::size_t{1} << 40);
  EXPECT_EQ(file.bytes()[std::size_t{1} << 39], std::byte{0});
}

TEST(AtomicFile, AppearsWholeAtCommit) {
  const TestFolder folder;
  folder.write("out", "old");
  {
    AtomicFile out(folder / "out");
    out.write(bytes("new text"));
    out.write_at(0, bytes("N"));
    EXPECT_EQ(out.size(), 8u);
    EXPECT_EQ(bytes_of_file(folder / "out"), "old");
    out.commit();
  }
  EXPECT_EQ(bytes_of_file(folder / "out"), "New text");
  EXPECT_FALSE(std::filesystem::exists(folder / ".out.tmp"));
}

TEST(AtomicFile, OthersMayReadWhatTheUmaskLeavesThemUnlessItIsTheOwners) {
  using Readers = AtomicFile::Readers;
  const TestFolder folder;
  const auto mode = [&](Readers readers) {
    AtomicFile(folder / "out", readers).commit();
    return std::filesystem::status(folder / "out").permissions();
  };
  const mode_t before = umask(027);
  EXPECT_EQ(mode(Readers::owner), std::filesystem::perms{0600});
  EXPECT_EQ(mode(Readers::as_umask_says), std::filesystem::perms{0640});
  umask(before);
}

/// Renamed over, /dev/null would be a file from then on. A pipe of the test's own stands for it: a test that
/// fails must not do to the machine what it is to prevent.
TEST(AtomicFile, DevicesAndPipesStayWhatTheyAre) {
  const TestFolder folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  expect_refused("pipe: expected a file to write", [&] { AtomicFile(folder / "pipe").commit(); });
  ASSERT_EQ(symlink("pipe", (folder / "link").c_str()), 0);
  expect_refused("link: expected a file to write", [&] { AtomicFile(folder / "link").commit(); });
  expect_refused("found a folder", [&] { AtomicFile(folder.path()).commit(); });
  EXPECT_TRUE(std::filesystem::is_fifo(folder / "pipe"));
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
}

TEST(AtomicFile, ALinkLeadsToWhatItNames) {
  const TestFolder folder;
  folder.write("real", "old");
  ASSERT_EQ(symlink("real", (folder / "link").c_str()), 0);
  AtomicFile out(folder / "link");
  out.write(bytes("new"));
  out.commit();
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
  EXPECT_EQ(bytes_of_file(folder / "real"), "new");
}

TEST(Room, OnADiskIsSeenBeforeTheWork) {
  const TestFolder folder;
  EXPECT_NO_THROW(expect_room(folder / "out", 1));
  EXPECT_NO_THROW(expect_room("out", 1));
  try {
    expect_room(folder / "out", std::uint64_t{1} << 62, "much");
    FAIL() << "expected a refusal";
  } catch (const RunError& error) {
    const std::string said = error.what();
    for (const std::string& part :
         {(folder / "out").string() + ": expected room for ", std::string(" (much), found "),
          " free on the disk of '" + (folder / "out").parent_path().string() + "': make room there"})
      EXPECT_NE(said.find(part), std::string::npos) << said;
  }
}

TEST(Room, ThatIsUsedUpNamesTheFileAndWhatToDo) {
  EXPECT_EQ(write_failure("a/b", ENOSPC),
            "a/b: cannot be written: No space left on device: make room there and give the same command "
            "again, or write "
            "to another disk");
  EXPECT_EQ(write_failure("a/b", EIO), "a/b: cannot be written: Input/output error");
}

TEST(AtomicFile, WithoutCommitNothingStays) {
  const TestFolder folder;
  { AtomicFile(folder / "out").write(bytes("half")); }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(AtomicFile, SecondWriterIsRefusedAndTheFirstGoesOn) {
  const TestFolder folder;
  AtomicFile first(folder / "out");
  expect_refused("being written by another process", [&] { AtomicFile second(folder / "out"); });
  first.write(bytes("first"));
  first.commit();
  EXPECT_EQ(bytes_of_file(folder / "out"), "first");
}

TEST(AtomicFile, WhatADeadWriterLeftIsRemoved) {
  const TestFolder folder;
  folder.write(".out.tmp", "left over");
  AtomicFile out(folder / "out");
  out.write(bytes("x"));
  out.commit();
  EXPECT_EQ(bytes_of_file(folder / "out"), "x");
}

/// A symbolic link in place of the temporary must not make us overwrite what it points to.
TEST(AtomicFile, LinkInPlaceOfTheTemporaryIsNotFollowed) {
  const TestFolder folder;
  const auto victim = folder.write("victim", "precious");
  ASSERT_EQ(symlink(victim.c_str(), (folder / ".out.tmp").c_str()), 0);
  AtomicFile out(folder / "out");
  out.write(bytes("x"));
  out.commit();
  EXPECT_EQ(bytes_of_file(victim), "precious");
  EXPECT_EQ(bytes_of_file(folder / "out"), "x");
}

/// Opening a pipe that nobody reads from hangs; anybody can plant one in a shared folder.
TEST(AtomicFile, PipeOrFolderInPlaceOfTheTemporaryStaysThere) {
  const TestFolder folder;
  ASSERT_EQ(mkfifo((folder / ".out.tmp").c_str(), 0600), 0);
  std::filesystem::create_directory(folder / ".other.tmp");
  for (const char* name : {"out", "other"}) {
    AtomicFile out(folder / name);
    out.write(bytes("x"));
    out.commit();
    EXPECT_EQ(bytes_of_file(folder / name), "x");
  }
  EXPECT_TRUE(std::filesystem::is_fifo(folder / ".out.tmp"));
  EXPECT_TRUE(std::filesystem::is_directory(folder / ".other.tmp"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 4) << "no temporary stays";
}

TEST(AtomicFile, NamesAsLongAsTheyMayBe) {
  const TestFolder folder;
  for (const std::size_t letters : {250, 251, 255}) {
    const auto path = folder / std::string(letters, 'x');
    AtomicFile out(path);
    expect_refused("being written by another process", [&] { AtomicFile second(path); });
    out.write(bytes("x"));
    out.commit();
    EXPECT_EQ(bytes_of_file(path), "x");
  }
}

TEST(HiddenBeside, ANameIsNeverTooLong) {
  const std::filesystem::path longest = "folder/" + std::string(NAME_MAX, 'n');
  EXPECT_EQ(hidden_beside("folder/a.lode", "partial"), "folder/.a.lode.partial");
  EXPECT_LE(hidden_beside(longest, "partial").filename().string().size(), std::size_t{NAME_MAX});
  EXPECT_EQ(hidden_beside(longest, "partial").parent_path(), "folder");
}

TEST(AtomicFile, OneOfManyWritersWins) {
  const TestFolder folder;
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&, writer] {
      for (int round = 0; round < 50; ++round) {
        try {
          AtomicFile out(folder / "out");
          out.write(bytes(std::string(1000, static_cast<char>('a' + writer))));
          out.commit();
        } catch (const InputError&) {
        }
        const std::string found =
            std::filesystem::exists(folder / "out") ? bytes_of_file(folder / "out") : "";
        if (found.empty()) continue;
        EXPECT_EQ(found, std::string(1000, found[0]));
      }
    });
  }
  for (auto& writer : writers) writer.join();
  EXPECT_FALSE(std::filesystem::exists(folder / ".out.tmp"));
}

/// Exit code of `body` in a process of its own; -signal when one killed it.
template <class Body>
int in_child(const Body& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(AtomicFile, KilledWriterLeavesTheOldFile) {
  const TestFolder folder;
  folder.write("out", "old");
  EXPECT_EQ(in_child([&] {
              AtomicFile out(folder / "out");
              out.write(bytes("half"));
              raise(SIGKILL);
              return 0;
            }),
            -SIGKILL);
  EXPECT_EQ(bytes_of_file(folder / "out"), "old");
  AtomicFile next(folder / "out");  // the dead writer's temporary is in nobody's way
  next.write(bytes("next"));
  next.commit();
  EXPECT_EQ(bytes_of_file(folder / "out"), "next");
}

/// A limit on the size of files stands for a full disk: a write fails in the middle.
TEST(AtomicFile, FailedWriteNamesThePathAndLeavesNothing) {
  const TestFolder folder;
  folder.write("out", "old");
  EXPECT_EQ(in_child([&] {
              signal(SIGXFSZ, SIG_IGN);
              const rlimit limit = {.rlim_cur = 4096, .rlim_max = 4096};
              setrlimit(RLIMIT_FSIZE, &limit);
              try {
                AtomicFile out(folder / "out");
                for (int i = 0; i < 10; ++i) out.write(bytes(std::string(1000, 'x')));
                return 1;
              } catch (const RunError& e) {
                return std::string(e.what()).find("out") == std::string::npos ? 2 : 0;
              }
            }),
            0);
  EXPECT_EQ(bytes_of_file(folder / "out"), "old");
  EXPECT_FALSE(std::filesystem::exists(folder / ".out.tmp"));
}

TEST(AtomicFile, FoldersAndNamesThatCannotBeWritten) {
  const TestFolder folder;
  expect_refused("none/out", [&] { AtomicFile(folder / "none/out"); });
  expect_refused("cannot be written", [&] { AtomicFile(folder / std::string(300, 'x')); });
  std::filesystem::create_directory(folder / "taken");
  EXPECT_ANY_THROW({
    AtomicFile out(folder / "taken");
    out.write(bytes("x"));
    out.commit();
  });
  EXPECT_TRUE(std::filesystem::is_directory(folder / "taken"));
  EXPECT_FALSE(std::filesystem::exists(folder / ".taken.tmp"));
}

}  // namespace
}  // namespace lode
