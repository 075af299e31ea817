// SPDX-License-Identifier: Apache-2.0
#include "lab/studies/step_log.h"

#include <fmt/format.h>
#include <sys/file.h>

#include <cerrno>
#include <cstring>

#include "base/file.h"
#include "base/hash.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr const char* kWhat = "steps of tune";

std::string hash_of(const Json& key) {
  return hash_hex(key.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

StepLog::StepLog(const std::filesystem::path& path) : path_(path) {
  file_ = std::fopen(path.c_str(), "abe");
  if (file_ == nullptr) throw InputError(write_failure(path, errno));
  try {
    if (::flock(fileno(file_), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
      throw InputError(path.string() + ": another process is at work on it");
    const std::string text = read_file(path);
    const std::size_t whole = text.rfind('\n') == std::string::npos ? 0 : text.rfind('\n') + 1;
    for (std::size_t begin = 0, end = 0; begin < whole; begin = end + 1) {
      end = text.find('\n', begin);
      const Json line = Json::parse(text.substr(begin, end - begin), nullptr, /*allow_exceptions=*/false);
      const bool first = begin == 0, heading = line.is_object() && json_has(line, "lodestone");
      if (first ? !heading || line["lodestone"] != kWhat : !line.is_object() || !json_has(line, "step"))
        throw InputError(path.string() +
                         ": expected what an earlier run left, found something else: remove it");
      if (!first) steps_[json_string(line, "step", path.string())] = json_member(line, "result");
    }
    std::filesystem::resize_file(path, whole);
    if (whole == 0) append({{"lodestone", kWhat}});
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
  if (file_ != nullptr) append({{"step", hash}, {"result", result}});
  return steps_[hash] = std::move(result);
}

void StepLog::append(const Json& line) {
  const std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0)
    throw RunError(write_failure(path_, errno));
}

void StepLog::remove() {
  steps_.clear();
  std::error_code gone;
  if (file_ != nullptr) std::filesystem::remove(path_, gone);
}

}  // namespace lode
