// SPDX-License-Identifier: Apache-2.0
#include "select/shared/per_token.h"

#include <functional>

#include "base/cancel.h"
#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

PerTokenSelector::PerTokenSelector(const LayerGeometry& geometry) : geometry_(geometry) {
  LODE_ASSERT(geometry.kv_heads > 0 && geometry.query_heads % geometry.kv_heads == 0 &&
              geometry.group() <= 32);
}

int PerTokenSelector::workers() const {
  return geometry_.pool != nullptr ? geometry_.pool->size() : 1;
}

void PerTokenSelector::for_each(std::int64_t items,
                                const std::function<void(std::int64_t, int)>& body) const {
  if (geometry_.pool != nullptr) {
    geometry_.pool->for_each(items, body);
  } else {
    for (std::int64_t item = 0; item < items; ++item) body(item, 0);
  }
}

void PerTokenSelector::select(std::span<const QueryBlock> blocks, Selection& out) {
  check_cancel();
  units_.clear();
  for (const QueryBlock& block : blocks) {
    for (std::int64_t token = 0; token < block.tokens; ++token) {
      const Position far_end = block.far_end(token, geometry_.dense);
      for (int head = 0; head < geometry_.kv_heads; ++head)
        units_.push_back({&block, token, head, block.far_begin, far_end});
    }
  }
  if (chosen_.size() < units_.size()) chosen_.resize(units_.size());
  unit_work_.assign(units_.size(), {});
  for_each(std::ssize(units_), [&](std::int64_t item, int worker) {
    const auto i = static_cast<std::size_t>(item);
    chosen_[i].clear();
    if (units_[i].far_keys() > 0) {
      choose(units_[i], worker, chosen_[i], unit_work_[i]);
    } else {
      chosen_[i].add_set(units_[i].set(all_heads(geometry_.group())));
    }
  });
  for (std::size_t i = 0; i < units_.size(); ++i) {
    out.append(chosen_[i]);
    work_.bytes += unit_work_[i].bytes;
    work_.keys_scored += unit_work_[i].keys_scored;
  }
}

}  // namespace lode
