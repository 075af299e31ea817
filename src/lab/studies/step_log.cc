// SPDX-License-Identifier: Apache-2.0
#include "lab/studies/step_log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <cerrno>

#include "base/file.h"
#include "base/hash.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// The first line of a log. Logs of another version are begun anew.
constexpr const char* kHeading = R"({"lodestone":"steps of tune","version":1})";
constexpr const char* kAnyHeading = R"({"lodestone":"steps of tune",)";

std::string hash_of(const Json& key) {
  return hash_hex(key.dump(-1, ' ', false, Json::error_handler_t::replace));
}

/// Opens the file and locks it; again where another process has removed it meanwhile.
std::FILE* open_locked(const std::filesystem::path& path) {
  for (;;) {
    const int fd =
        ::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    std::FILE* const file = fd < 0 ? nullptr : ::fdopen(fd, "a");
    if (file == nullptr) throw InputError(write_failure(path, errno));
    struct stat opened = {}, named = {};
    const bool locked = ::flock(fd, LOCK_EX | LOCK_NB) == 0;
    if (locked && ::fstat(fd, &opened) == 0 && ::lstat(path.c_str(), &named) == 0 &&
        opened.st_ino == named.st_ino)
      return file;
    std::fclose(file);
    if (!locked)
      throw InputError(path.string() + ": another process writes to it; wait for it, or name another output");
  }
}

}  // namespace

StepLog::StepLog(const std::filesystem::path& path) : path_(path), file_(open_locked(path)) {
  try {
    const std::string text = read_file(path);
    if (!text.empty() && !text.starts_with(kAnyHeading))
      throw InputError(path.string() +
                       ": expected what an earlier run left, found something else: remove it");
    const std::size_t whole = text.rfind('\n') == std::string::npos ? 0 : text.rfind('\n') + 1,
                      heading = text.starts_with(std::string(kHeading) + '\n') ? text.find('\n') + 1 : 0;
    for (std::size_t begin = heading, end = 0; heading > 0 && begin < whole; begin = end + 1) {
      end = text.find('\n', begin);
      const Json line = Json::parse(text.substr(begin, end - begin), nullptr, /*allow_exceptions=*/false);
      if (const Json& step = json_member(line, "step"); step.is_string())
        steps_[step.get<std::string>()] = json_member(line, "result");
    }
    std::filesystem::resize_file(path, heading > 0 ? whole : 0);
    if (heading == 0) append(kHeading);
  } catch (...) {
    std::fclose(file_);
    throw;
  }
}

StepLog::~StepLog() {
  if (file_ == nullptr) return;
  std::error_code gone;  // nothing to go on from
  if (steps_.empty()) std::filesystem::remove(path_, gone);
  std::fclose(file_);
}

const Json* StepLog::find(const Json& key) const {
  const auto found = steps_.find(hash_of(key));
  return found == steps_.end() ? nullptr : &found->second;
}

const Json& StepLog::add(const Json& key, Json result) {
  const std::string hash = hash_of(key);
  if (file_ != nullptr)
    append(Json{{"step", hash}, {"result", result}}.dump(-1, ' ', false, Json::error_handler_t::replace));
  return steps_[hash] = std::move(result);
}

void StepLog::append(const std::string& line) {
  const std::string text = line + '\n';
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0)
    throw RunError(write_failure(path_, errno));
}

void StepLog::remove() {
  steps_.clear();
  std::error_code gone;
  if (file_ != nullptr) std::filesystem::remove(path_, gone);
}

}  // namespace lode
