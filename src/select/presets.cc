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

/// Sorted by method.
constexpr std::array<Preset, 6> kPresets = {{
    {"hash", "paper", "per=query-head",
     "each query head chooses its keys; ours: the heads of a group choose together"},
    {"ivf", "paper", "nprobe=30%,k=100",
     "the share of the keys that RetrievalAttention says an inverted file must score; ours: 16 lists"},
    {"quest", "paper", "page_size=16,bits=16,per=query-head,budget=1024,sink=0,window=1,dense_layers=2",
     "pages alone; ours: a window of 2047 beside them"},
    {"retrieval", "paper", "k=100,per=query-head,warm=off,sink=128,window=512",
     "a graph for each query head, every search anew; ours: one for a group, begun where the last one ended"},
    {"saap", "paper", "probes=32,group=batched,rank=mass,sink=1,window=2047,dense_layers=1",
     "buckets by probability; ours: by probability / sqrt(keys)"},
    {"squeezed", "paper", "metric=cosine,average=plain,centroids=f16,spread=off,kept1=0.5",
     "clusters by cosine, plain means of scores; ours: by how queries score keys, root of mean squares, "
     "spread, 8 bits"},
}};

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
