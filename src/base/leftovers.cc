// SPDX-License-Identifier: Apache-2.0
#include "base/leftovers.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace lode {

/// A writer holds a lock on its temporary for as long as it lives.
bool remove_if_dead(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) return false;
  struct stat opened = {}, named = {};
  const bool own = ::fstat(fd, &opened) == 0 && S_ISREG(opened.st_mode) && opened.st_uid == ::geteuid();
  const bool removed = own && ::flock(fd, LOCK_EX | LOCK_NB) == 0 && ::lstat(path.c_str(), &named) == 0 &&
                       named.st_ino == opened.st_ino && named.st_dev == opened.st_dev &&
                       ::unlink(path.c_str()) == 0;
  ::close(fd);
  return removed;
}

void remove_leftovers(const std::filesystem::path& folder, std::string_view extension) {
  const std::string ending = std::string(extension) + ".tmp";
  std::error_code failed;
  std::vector<std::filesystem::path> found;
  for (auto at = std::filesystem::directory_iterator(folder, failed);
       !failed && at != std::filesystem::directory_iterator(); at.increment(failed)) {
    const std::string name = at->path().filename().string();
    if (name.starts_with('.') && name.ends_with(ending)) found.push_back(at->path());
  }
  for (const auto& path : found) remove_if_dead(path);
}

}  // namespace lode
