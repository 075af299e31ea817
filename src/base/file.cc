// SPDX-License-Identifier: Apache-2.0
#include "base/file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/hash.h"
#include "base/hidden_name.h"
#include "base/text.h"
#include "base/unreadable.h"
#include "lodestone/error.h"

namespace lode {

namespace {

std::string system_says() {
  return std::strerror(errno);
}

bool is_name_of(const std::filesystem::path& path, int fd) {
  struct stat named = {}, open = {};
  return ::lstat(path.c_str(), &named) == 0 && ::fstat(fd, &open) == 0 && named.st_ino == open.st_ino &&
         named.st_dev == open.st_dev;
}

/// Opens a regular file for reading; says what was found instead.
int open_regular(const std::filesystem::path& path, struct stat& info) {
  // O_NONBLOCK: opening a FIFO that nobody writes would hang otherwise.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const std::string sentence = path.string() + ": cannot be opened: " + system_says();
    constexpr std::array kOurs = {EACCES, EPERM, EMFILE, ENFILE, ENOMEM};  // these say nothing of the file
    if (std::find(kOurs.begin(), kOurs.end(), errno) != kOurs.end()) throw UnreadableError(sentence);
    throw InputError(sentence);
  }
  const char* found = nullptr;
  if (::fstat(fd, &info) != 0)
    found = "something that cannot be examined";
  else if (S_ISDIR(info.st_mode))
    found = "a folder";
  else if (!S_ISREG(info.st_mode))
    found = "a device, pipe or socket";
  if (found != nullptr) {
    ::close(fd);
    throw InputError(path.string() + ": expected a file, found " + found);
  }
  return fd;
}

/// Where a file of this name is to be put: links lead to what they name, as a shell's > would have it. A
/// device, pipe or folder is nothing to rename a file over: root could, and /dev/null would be a file from
/// then on.
std::filesystem::path place_to_write(const std::filesystem::path& path) {
  std::error_code none;
  const auto status = std::filesystem::status(path, none);
  if (status.type() == std::filesystem::file_type::none)  // links that lead in a circle, say
    throw InputError(path.string() + ": cannot be written: " + none.message());
  if (std::filesystem::is_directory(status))
    throw InputError(path.string() + ": expected a file to write, found a folder");
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw InputError(path.string() + ": expected a file to write, found a device, pipe or socket");
  const bool is_link = std::filesystem::exists(status) && std::filesystem::is_symlink(path, none);
  return is_link ? std::filesystem::canonical(path) : path;
}

/// Of a folder where others may have put something in that place.
std::filesystem::path random_temporary_of(const std::filesystem::path& path) {
  std::array<std::byte, 16> random = {};
  if (::getrandom(random.data(), random.size(), 0) != std::ssize(random))
    throw RunError(path.string() + ": cannot be written: no random name for its temporary: " + system_says());
  return path.parent_path() / ("." + hash_hex(random) + ".tmp");
}

bool is_own_regular(int fd) {
  struct stat info = {};
  return ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_uid == ::geteuid();
}

void write_all(int fd, std::span<const std::byte> bytes, std::int64_t offset,
               const std::filesystem::path& path) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd, bytes.data(), bytes.size(), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) throw RunError(path.string() + ": cannot be written: no progress");
    if (n < 0) throw RunError(write_failure(path, errno));
    bytes = bytes.subspan(static_cast<std::size_t>(n));
    offset += n;
  }
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  struct stat info = {};
  fd_ = open_regular(path, info);
  ::flock(fd_, LOCK_SH | LOCK_NB);  // best effort: tells polite writers that somebody reads
  if (info.st_size == 0) return;
  const auto size = static_cast<std::size_t>(info.st_size);
  void* at = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd_, 0);
  if (at == MAP_FAILED) {
    const std::string reason = system_says();
    ::close(fd_);
    throw RunError(path.string() + ": cannot be mapped: " + reason);
  }
  bytes_ = {static_cast<const std::byte*>(at), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  if (fd_ >= 0) ::close(fd_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(fd_, other.fd_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

std::string read_file(const std::filesystem::path& path, std::size_t limit) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  if (bytes.size() > limit) {
    throw InputError(path.string() + ": expected at most " + std::to_string(limit) + " bytes, found " +
                     std::to_string(bytes.size()));
  }
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void expect_room(const std::filesystem::path& path, std::uint64_t bytes, std::string_view what_for) {
  std::error_code unknown;
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const auto space = std::filesystem::space(folder, unknown);
  if (unknown || space.available >= bytes) return;
  throw RunError(
      fmt::format("{}: expected room for {}{}, found {} free on the disk of '{}': make room there, or write "
                  "to another disk",
                  path.string(), human_bytes(static_cast<std::int64_t>(bytes)),
                  what_for.empty() ? std::string() : fmt::format(" ({})", what_for),
                  human_bytes(static_cast<std::int64_t>(space.available)), folder.string()));
}

std::string write_failure(const std::filesystem::path& path, int error) {
  const bool full = error == ENOSPC || error == EDQUOT;
  return fmt::format(
      "{}: cannot be written: {}{}", path.string(), std::strerror(error),
      full ? ": make room there and give the same command again, or write to another disk" : "");
}

AtomicFile::AtomicFile(const std::filesystem::path& path, Readers readers) : path_(place_to_write(path)) {
  const mode_t mode = readers == Readers::owner ? 0600 : 0666;
  temporary_ = hidden_beside(path_, "tmp");  // so that the next writer finds what a dead one left
  // The lock, held while we live, is how others tell a live writer from a dead one's leftover. Whoever got it
  // looks again whether the name still means that file: another may have removed or renamed it in between.
  for (int attempt = 0; attempt < 8; ++attempt) {
    fd_ = ::open(temporary_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    if (fd_ < 0 && errno != EEXIST) break;
    const bool ours = fd_ >= 0;
    const int fd = ours ? fd_ : ::open(temporary_.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) continue;  // removed or renamed meanwhile
    if (!ours && !is_own_regular(fd)) {  // a pipe, a link or somebody else's: none of our writers left it
      if (fd >= 0) ::close(fd);
      temporary_ = random_temporary_of(path_);
      continue;
    }
    const bool locked = ::flock(fd, LOCK_EX | LOCK_NB) == 0;
    const bool named = is_name_of(temporary_, fd);
    if (ours && locked && named) return;
    if (!ours && locked && named) ::unlink(temporary_.c_str());
    ::close(fd);
    fd_ = -1;
    if (!ours && !locked) throw InputError(path.string() + ": is being written by another process");
  }
  throw InputError(path.string() + ": cannot be written: " + system_says());
}
AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::unlink(temporary_.c_str());
  ::close(fd_);
}

void AtomicFile::write(std::span<const std::byte> bytes) {
  write_all(fd_, bytes, static_cast<std::int64_t>(size_), path_);
  size_ += bytes.size();
}

void AtomicFile::write_at(std::uint64_t offset, std::span<const std::byte> bytes) {
  LODE_ASSERT(offset + bytes.size() <= size_);
  write_all(fd_, bytes, static_cast<std::int64_t>(offset), path_);
}

void AtomicFile::commit() {
  if (::fsync(fd_) != 0) throw RunError(write_failure(path_, errno));
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) {
    throw RunError(path_.string() + ": cannot be put in place: " + system_says());
  }
  ::close(std::exchange(fd_, -1));
  const std::filesystem::path folder = path_.has_parent_path() ? path_.parent_path() : ".";
  const int dir = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir >= 0) {
    ::fsync(dir);
    ::close(dir);
  }
}

}  // namespace lode
