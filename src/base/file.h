// SPDX-License-Identifier: Apache-2.0
// Files: mapped for reading, and written so that a path holds the old file or the new one, never half of one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>

namespace lode {

/// A whole regular file mapped read-only. Throws InputError when it is missing, a folder, a device or
/// unreadable.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&&) noexcept;
  MappedFile& operator=(MappedFile&&) noexcept;

  std::span<const std::byte> bytes() const { return bytes_; }
  const std::filesystem::path& path() const { return path_; }
  int descriptor() const {
    return fd_;
  }  ///< open for reading; for further private mappings of parts of the file

 private:
  std::filesystem::path path_;
  int fd_ = -1;
  std::span<const std::byte> bytes_;
};

/// The bytes of a small file; InputError beyond `limit`.
std::string read_file(const std::filesystem::path& path, std::size_t limit = std::size_t{1} << 30);

/// RunError when the file system of a file to be written has less room, as far as it says: seen before the
/// work. `what_for` goes into the message: "the file 3 GiB, its copy 2 GiB".
void expect_room(const std::filesystem::path& path, std::uint64_t bytes, std::string_view what_for = {});

/// Why a file cannot be written, as `error` (errno) says it; where its disk is full, with what to do.
std::string write_failure(const std::filesystem::path& path, int error);

/// Writes beside `path` and renames over it in commit(): tmp (O_EXCL) + fsync + rename + fsync of the folder.
/// Destroyed without commit, it removes the temporary. One of a writer that is still alive is an InputError
/// ("being written by another process"), one of a dead writer is removed, and what is none of ours stays there.
/// Every failed write is a RunError that names the path and what the system said ("No space left on device").
/// A link leads to what it names; a device, pipe or folder is an InputError.
class AtomicFile {
 public:
  enum class Readers { as_umask_says, owner };
  explicit AtomicFile(const std::filesystem::path& path, Readers readers = Readers::as_umask_says);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write_at(std::uint64_t offset,
                std::span<const std::byte> bytes);  ///< overwrites earlier bytes, e.g. a header
  std::uint64_t size() const { return size_; }
  void commit();

 private:
  std::filesystem::path path_, temporary_;
  int fd_ = -1;
  std::uint64_t size_ = 0;
};

}  // namespace lode
