// SPDX-License-Identifier: Apache-2.0
#include "cluster/save_shards.h"

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "base/file.h"
#include "base/leftovers.h"
#include "engine/context_file.h"
#include "io/container.h"
#include "lodestone/sources.h"

namespace lode {

namespace {

namespace fs = std::filesystem;

constexpr const char* kTextExtension = ".lode";

/// While shards "NAME.ID-1of4" and so on are written, ".NAME.ID.tmp" lies beside them, locked by rank 0: the temporary of
/// an AtomicFile that is never committed. Shards beside a mark that nobody locks are of no use to anybody.
fs::path marked_path(const fs::path& path, const std::string& id) {
  return path.parent_path() / (path.filename().string() + "." + id);
}

/// What a mark says.
struct Writing {
  fs::path text;
  std::string id;
};

std::optional<Writing> marked_by(const fs::path& mark) {
  const std::string name = mark.filename().string();
  if (!name.starts_with('.') || !name.ends_with(".tmp")) return std::nullopt;
  const std::string marked = name.substr(1, name.size() - 5);
  const std::size_t dot = marked.rfind('.');
  if (dot == std::string::npos || !is_shard_id(std::string_view(marked).substr(dot + 1))) return std::nullopt;
  return Writing{mark.parent_path() / marked.substr(0, dot), marked.substr(dot + 1)};
}

/// Whether a file lists the shards of this writing, or may: nothing is known of one that is damaged.
bool may_list(const fs::path& file, const std::string& id) {
  try {
    return is_container(MappedFile(file).bytes()) &&
           read_context_meta(ContainerReader(file), file).shards.id == id;
  } catch (const std::exception&) {
    return true;
  }
}

/// A text may have another name than when it was written.
bool any_lists(std::span<const fs::path> files, const std::string& id) {
  return std::ranges::any_of(
      files, [&](const fs::path& file) { return file.extension() == kTextExtension && may_list(file, id); });
}

std::vector<fs::path> files_in(const fs::path& folder) {
  std::error_code failed;
  std::vector<fs::path> files;
  for (auto at = fs::directory_iterator(folder, failed); !failed && at != fs::directory_iterator();
       at.increment(failed))
    files.push_back(at->path());
  return files;
}

}  // namespace

void save_shards(const Context& context, const std::filesystem::path& path, const Attachments& attachments,
                 Communicator& ranks) {
  std::string id;
  std::optional<AtomicFile> mark;
  if (ranks.rank() == 0) {
    id = new_shard_id(path);
    mark.emplace(marked_path(path, id));
  }
  id = ranks.broadcast(id);
  const ShardSet set = shards_for(path, id, context.tokens(), ranks.size());
  try {
    save_shard(context, path, set, static_cast<std::size_t>(ranks.rank()));
    ranks.barrier();
    if (ranks.rank() == 0) save_context(context, path, source_of(context).text, attachments, set);
  } catch (...) {
    if (ranks.rank() == 0) remove_shards(path, id, RemovedShards::these);
    throw;
  }
  if (ranks.rank() == 0) remove_shards(path, id, RemovedShards::all_others);
  ranks.barrier();
}

std::size_t remove_dead_shards(const fs::path& folder) {
  const std::vector<fs::path> files = files_in(folder);
  std::size_t removed = 0;
  for (const fs::path& file : files) {
    const auto writing = marked_by(file);
    if (writing && remove_if_dead(file) && !any_lists(files, writing->id))
      removed += remove_shards(writing->text, writing->id, RemovedShards::these);
  }
  return removed;
}

}  // namespace lode
