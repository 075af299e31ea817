// SPDX-License-Identifier: Apache-2.0
#include "documents/folder.h"

#include <fmt/format.h>
#include <fnmatch.h>

#include <algorithm>
#include <map>

#include "base/cancel.h"
#include "base/text.h"
#include "documents/child.h"
#include "lodestone/error.h"

namespace lode {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMostFiles = 1 << 16;
constexpr int kGitSeconds = 60;
constexpr std::size_t kGitOutput = std::size_t{64} << 20;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

/// The number at the front of `text`, without leading zeros; taken off it.
std::string_view take_number(std::string_view& text) {
  std::size_t end = 0;
  while (end < text.size() && is_digit(text[end])) ++end;
  std::string_view number = text.substr(0, end);
  text.remove_prefix(end);
  number.remove_prefix(std::min(number.find_first_not_of('0'), number.size()));
  return number;
}

bool is_repository(fs::path folder) {
  std::error_code none;
  for (folder = fs::canonical(folder, none); !folder.empty(); folder = folder.parent_path()) {
    if (fs::exists(folder / ".git", none)) return true;
    if (folder == folder.parent_path()) break;
  }
  return false;
}

/// What git says of the folder, without running anything that the repository asks for.
ChildResult git(const std::string& program, const fs::path& folder, const std::vector<std::string>& words) {
  std::vector<std::string> argv = {program,
                                   "-c",
                                   "core.fsmonitor=false",
                                   "-c",
                                   "core.hooksPath=/dev/null",
                                   "-c",
                                   "safe.directory=*",
                                   "--no-optional-locks",
                                   "-C",
                                   fs::absolute(folder).string()};
  argv.insert(argv.end(), words.begin(), words.end());
  return run_child(argv, "", {.seconds = kGitSeconds, .output = kGitOutput});
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(at, begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

/// In how many of the last commits each file changed; empty when git does not say.
std::map<std::string, int> changes_of(const std::string& program, const fs::path& folder) {
  std::map<std::string, int> changes;
  const ChildResult log = git(
      program, folder, {"log", "-n", "200", "--format=", "--name-only", "--relative", "-z", "--no-renames"});
  if (log.end != ChildResult::End::exited || log.code != 0) return changes;
  for (std::string& name : split(log.out, '\0')) {
    name.erase(0, std::min(name.find_first_not_of('\n'), name.size()));
    ++changes[name];
  }
  return changes;
}

/// False when git cannot say.
bool list_by_git(const fs::path& folder, FolderListing& listing) {
  const std::string program = find_program("git");
  if (program.empty()) {
    listing.remarks.push_back(fmt::format(
        "{}: its ignore files are not respected: git was not found (apt install git)", folder.string()));
    return false;
  }
  const ChildResult files =
      git(program, folder, {"ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"});
  if (files.end != ChildResult::End::exited || files.code != 0) {
    listing.remarks.push_back(fmt::format("{}: its ignore files are not respected: git ls-files failed ({})",
                                          folder.string(),
                                          excerpt(files.err.substr(0, files.err.find('\n')))));
    return false;
  }
  listing.files = split(files.out, '\0');
  const auto changes = changes_of(program, folder);
  const auto count = [&](const std::string& file) {
    const auto found = changes.find(file);
    return found == changes.end() ? 0 : found->second;
  };
  std::sort(listing.files.begin(), listing.files.end(), [&](const std::string& a, const std::string& b) {
    return count(a) != count(b) ? count(a) < count(b) : natural_less(a, b);
  });
  return true;
}

void list_by_walking(const fs::path& folder, const ReadOptions& options, FolderListing& listing) {
  std::error_code failed;
  fs::recursive_directory_iterator at(folder, fs::directory_options::none, failed);
  if (failed) throw InputError(fmt::format("{}: cannot be listed: {}", folder.string(), failed.message()));
  for (const auto end = fs::recursive_directory_iterator(); at != end;) {
    check_cancel();
    const fs::path path = at->path();
    const bool hidden = path.filename().string().starts_with('.');
    const bool is_folder = at->is_directory(failed) && !at->is_symlink(failed);
    if (hidden && is_folder) at.disable_recursion_pending();
    if (std::string file = path.lexically_relative(folder).generic_string();
        !hidden && !is_folder && is_wanted(file, options))
      listing.files.push_back(std::move(file));
    if (listing.files.size() > kMostFiles) break;  // refused by the caller
    at.increment(failed);
    if (failed) {
      listing.skipped.push_back({path.string(), "cannot be listed: " + failed.message()});
      failed.clear();
    }
  }
  std::sort(listing.files.begin(), listing.files.end(), natural_less);
}

bool matches(const std::string& glob, const std::string& path) {
  if (::fnmatch(glob.c_str(), path.c_str(), 0) == 0) return true;
  const std::size_t slash = path.rfind('/');
  return glob.find('/') == std::string::npos && slash != std::string::npos &&
         ::fnmatch(glob.c_str(), path.c_str() + slash + 1, 0) == 0;
}

bool matches_any(const std::vector<std::string>& globs, const std::string& path) {
  return std::any_of(globs.begin(), globs.end(),
                     [&](const std::string& glob) { return matches(glob, path); });
}

/// Why a name of the listing is not read; empty when it is.
std::string why_not(const fs::path& folder, const std::string& file) {
  std::error_code failed;
  for (fs::path path = fs::path(file).parent_path(); !path.empty(); path = path.parent_path())
    if (fs::is_symlink(folder / path, failed)) return "lies behind a link, which is not followed";
  const auto status = fs::symlink_status(folder / file, failed);
  if (fs::is_symlink(status)) return "a link, which is not followed";
  if (fs::is_directory(status)) return "a repository of its own";
  if (!fs::is_regular_file(status)) return fs::exists(status) ? "a device, pipe or socket" : "not there";
  return {};
}

}  // namespace

bool natural_less(std::string_view a, std::string_view b) {
  const std::string_view whole_a = a, whole_b = b;
  while (!a.empty() && !b.empty()) {
    if (is_digit(a.front()) && is_digit(b.front())) {
      const std::string_view x = take_number(a), y = take_number(b);
      if (x != y) return x.size() != y.size() ? x.size() < y.size() : x < y;
      continue;
    }
    if (a.front() != b.front())
      return static_cast<unsigned char>(a.front()) < static_cast<unsigned char>(b.front());
    a.remove_prefix(1);
    b.remove_prefix(1);
  }
  return a.empty() && b.empty() ? whole_a < whole_b : a.empty();
}

bool is_wanted(const std::string& path, const ReadOptions& options) {
  return (options.include.empty() || matches_any(options.include, path)) &&
         !matches_any(options.exclude, path);
}

FolderListing list_folder(const fs::path& folder, const ReadOptions& options) {
  FolderListing listing;
  if (!is_repository(folder) || !list_by_git(folder, listing)) list_by_walking(folder, options, listing);
  std::erase_if(listing.files, [&](const std::string& file) { return !is_wanted(file, options); });
  if (listing.files.size() > kMostFiles)
    throw InputError(
        fmt::format("{}: expected a folder of at most {} files to read, found more; choose some with "
                    "--include or --exclude",
                    folder.string(), kMostFiles));
  std::erase_if(listing.files, [&](const std::string& file) {
    const std::string why = why_not(folder, file);
    if (!why.empty()) listing.skipped.push_back({(folder / file).string(), why});
    return !why.empty();
  });
  return listing;
}

}  // namespace lode
