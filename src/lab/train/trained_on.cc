// SPDX-License-Identifier: Apache-2.0
#include "lab/train/trained_on.h"

#include <algorithm>

#include "engine/context.h"
#include "select/trained_on.h"

namespace lode {

Json trained_on(const std::shared_ptr<const Model>& model, const ContextOptions& options,
                const std::vector<Prompt>& prompts) {
  std::int64_t total = 0, longest = 1;
  for (const Prompt& prompt : prompts) {
    total += std::ssize(prompt.tokens);
    longest = std::max(longest, std::ssize(prompt.tokens));
  }
  Json made = {{"prompts", prompts.size()},
               {"tokens", total},
               {"longest", longest},
               {"kv_type", std::string(name_of(options.kv_type))}};
  ContextOptions on_host = options;
  on_host.device = Device::cpu;
  on_host.max_tokens = longest;
  on_host.gpu_memory = on_host.active_memory = 0;
  on_host.kv_tier = KvTier::automatic;
  const Context context(model, on_host);
  if (context.impl().config.rope_scaling.kind != RopeScaling::Kind::dynamic)
    made["rope_fingerprint"] = rope_fingerprint(context.impl().rope);
  return made;
}

}  // namespace lode
