// SPDX-License-Identifier: Apache-2.0
#include "cluster/save_shards.h"

#include "engine/context_file.h"
#include "lodestone/sources.h"

namespace lode {

void save_shards(const Context& context, const std::filesystem::path& path, const Attachments& attachments,
                 Communicator& ranks) {
  const std::string id = ranks.broadcast(new_shard_id(path));
  const ShardSet set = shards_for(path, id, context.tokens(), ranks.size());
  try {
    save_shard(context, path, set, static_cast<std::size_t>(ranks.rank()));
    ranks.barrier();
    if (ranks.rank() == 0) save_context(context, path, source_of(context).text, attachments, set);
  } catch (...) {
    if (ranks.rank() == 0) remove_shards(path, set, RemovedShards::these);
    throw;
  }
  if (ranks.rank() == 0) remove_shards(path, set, RemovedShards::all_others);
  ranks.barrier();
}

}  // namespace lode
