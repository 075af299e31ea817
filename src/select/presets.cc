// SPDX-License-Identifier: Apache-2.0
#include "select/presets.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "base/text.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Sorted by method. A window that is a share of the text cannot be written, and a preset without `sink` and `window` has the
/// method's own: hash's and squeezed's are their papers'.
constexpr auto kPresets = std::to_array<Preset>({
    {"double-sparsity", "paper", "bits=4,budget=1/16,per=query-head,sink=0,window=1,dense_layers=2",
     "the best keys alone; ours: sink and window beside them"},
    {"h2o", "paper", "heavy_ratio=10%,recent_ratio=10%,queries=16777216,sink=0,window=1",
     "attention summed over all of the text's queries; ours: over 2048 of them, and sink and window beside"},
    {"hash", "paper", "per=query-head",
     "each query head chooses its keys; ours: the heads of a group choose together"},
    {"hnsw", "paper", "k=100,sink=128,window=512", "the sink and window of RetrievalAttention's baselines"},
    {"infllm", "paper", "block_size=128,repr_topk=4,topk=16,per=layer,rope=fixed,sink=128,window=4096",
     "128 first and 4096 last tokens beside the blocks; ours: 1 and 2047"},
    {"ivf", "paper", "nprobe=30%,k=100,sink=128,window=512",
     "the share of the keys that RetrievalAttention says an inverted file must score; ours: 16 lists"},
    {"kmeans", "paper", "clusters=1024,probes=32,rope=off,sink=1,window=2047",
     "1024 clusters of any text; ours: more of a text beyond 32k tokens, fewer of one below 16k"},
    {"magicpig", "paper", "K=10,L=150,sink=4,window=64,dense_layers=1",
     "4 first and 64 last tokens, and the first layer exact; ours: 1 and 2047, and none"},
    {"pqcache", "paper", "m=2,bits=6,budget=1/20,per=kv-head,sink=32",
     "32 first tokens; ours: 1. The paper's window is as many tokens as are chosen: write it beside"},
    {"quest", "paper", "page_size=16,bits=16,per=query-head,budget=1024,sink=0,window=1,dense_layers=2",
     "pages alone; ours: a window of 2047 beside them"},
    {"retrieval", "paper", "k=100,per=query-head,warm=off,sink=128,window=512",
     "a graph for each query head, every search anew; ours: one for a group, begun where the last one ended"},
    {"saap", "paper", "probes=32,group=batched,rank=mass,sink=1,window=2047,dense_layers=1",
     "buckets by probability; ours: by probability / sqrt(keys)"},
    {"snapkv", "paper",
     "window_size=32,kernel_size=7,pooling=maxpool,max_capacity_prompt=2048,per=query-head,sink=0,window=1",
     "the authors' LongBench runs: 32 tokens vote, maxpool over 7, 2048 keys; ours: 64, avgpool over 5, 320"},
    {"squeezed", "paper", "metric=cosine,average=plain,centroids=f16,spread=off,kept1=0.5",
     "clusters by cosine, plain means of scores; ours: by how queries score keys, root of mean squares, "
     "spread, 8 bits"},
    {"streaming", "paper", "sink=4,window=2000", "the authors' program; ours: SAAP's 1 and 2047"},
});

}  // namespace

std::span<const Preset> presets_of(std::string_view method) {
  const auto is_of = [&](const Preset& preset) { return preset.method == method; };
  const auto first = std::find_if(kPresets.begin(), kPresets.end(), is_of);
  return {first, std::find_if_not(first, kPresets.end(), is_of)};
}

void apply_preset(std::string_view method, std::string_view text, std::map<std::string, std::string>& given) {
  const auto named = given.find("preset");
  if (named == given.end()) return;
  const auto presets = presets_of(method);
  const auto preset =
      std::find_if(presets.begin(), presets.end(), [&](const Preset& p) { return p.name == named->second; });
  if (preset == presets.end()) {
    std::vector<std::string> names;
    for (const Preset& p : presets) names.emplace_back(p.name);
    throw InputError(fmt::format("attention spec '{}': key 'preset': expected one of {}, found '{}'", text,
                                 join(names), excerpt(named->second)));
  }
  given.erase(named);
  for (std::string_view rest = preset->keys; !rest.empty();) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), item.size() + 1));
    const std::size_t equals = item.find('=');
    given.emplace(item.substr(0, equals), item.substr(equals + 1));
  }
}

}  // namespace lode
