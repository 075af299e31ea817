// SPDX-License-Identifier: Apache-2.0
#include "lab/report/cells.h"

#include <cerrno>
#include <cstring>

#include "base/file.h"
#include "lab/tasks/sample_file.h"
#include "lodestone/error.h"

namespace lode {

ResultCache::ResultCache(const std::filesystem::path& path) : path_(path) {
  if (std::filesystem::exists(path)) {
    const std::string text = read_file(path);
    const std::size_t whole = text.rfind('\n') == std::string::npos ? 0 : text.rfind('\n') + 1;
    for_each_line(std::string_view(text).substr(0, whole), path.string(),
                  [&](std::string_view line, const std::string& where) {
                    const Json object = parse_json(line, where);
                    if (!json_member(object, "key").is_object() || !json_has(object, "result"))
                      throw InputError(where + ": expected an object with the fields 'key' and 'result'");
                    results_[object.at("key").dump()] = object.at("result");
                  });
    std::filesystem::resize_file(path, whole);
  }
  file_ = std::fopen(path.c_str(), "ab");
  if (file_ == nullptr) throw InputError(path.string() + ": cannot write: " + std::strerror(errno));
}

ResultCache::~ResultCache() {
  std::fclose(file_);
}

const Json* ResultCache::find(const Json& key) const {
  const auto found = results_.find(key.dump());
  return found == results_.end() ? nullptr : &found->second;
}

const Json& ResultCache::add(const Json& key, Json result) {
  const Json line = {{"key", key}, {"result", result}};
  const std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0)
    throw RunError(path_.string() + ": cannot write: " + std::strerror(errno));
  return results_[key.dump()] = std::move(result);
}

}  // namespace lode
