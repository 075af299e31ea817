// SPDX-License-Identifier: Apache-2.0
#include "engine/row_order.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/cancel.h"
#include "lodestone/error.h"
#include "select/shared/orders_rows.h"

namespace lode {

bool order_rows(Context& context) {
  Context::Impl& c = context.impl();
  AttachedMethod* only = nullptr;
  for (AttachedMethod& method : c.methods) {
    if (method.dense()) continue;
    if (only != nullptr) return false;
    only = &method;
  }
  if (only == nullptr || c.gpu != nullptr || !only->built) return false;
  // Heads or layers have the same rows, and each its clusters.
  if (c.kv.shape().shared_rows || c.kv.shape().layers_share_rows()) return false;
  const Position end = always_far_end(only->spec.dense, c.indexed);
  for (int layer = 0; layer < c.config.layers; ++layer) {
    check_cancel();
    Selector* const selector = only->selectors[static_cast<std::size_t>(layer)];
    if (ordered_end(selector, 0) == 0) order_rows(c.kv, layer, selector, 0, end, c.model->pool());
  }
  return ordered_end(c) > 0;
}

void expect_order(const Context& context) {
  const Context::Impl& c = context.impl();
  if (c.gpu != nullptr)
    throw InputError("expected device cpu beside --order cluster, found a context on a GPU");
  if (c.kv.shape().shared_rows)
    throw InputError(
        "expected a model whose heads have rows of their own for --order cluster, found latent rows");
  if (c.kv.shape().layers_share_rows())
    throw InputError(
        "expected a model whose layers have rows of their own for --order cluster, found layers that share "
        "them");
  bool attached = false, ordered = false;
  const auto sparse = std::count_if(c.methods.begin(), c.methods.end(),
                                    [](const AttachedMethod& method) { return !method.dense(); });
  if (sparse > 1)
    throw InputError(fmt::format(
        "expected a context with one method for --order cluster, whose clusters its rows follow, found {}",
        sparse));
  for (const AttachedMethod& method : c.methods) {
    for (const Selector* selector : method.selectors) {
      attached |= selector != nullptr;
      ordered |= dynamic_cast<const OrdersRows*>(selector) != nullptr;
    }
  }
  if (attached && !ordered)
    throw InputError(
        "expected a method that attends whole clusters for --order cluster (saap, kmeans, ivf or squeezed), "
        "found another");
}

void restore_rows(Context::Impl& c) {
  for (const AttachedMethod& method : c.methods) {
    for (std::size_t layer = 0; layer < method.selectors.size(); ++layer)
      restore_rows(c.kv, static_cast<int>(layer), method.selectors[layer], 0, c.model->pool());
  }
}

Position ordered_end(const Context::Impl& c) {
  Position end = 0;
  for (const AttachedMethod& method : c.methods)
    for (const Selector* selector : method.selectors) end = std::max(end, ordered_end(selector, 0));
  return end;
}

RowOrder row_order(const Context::Impl& c, int layer, int kv_head) {
  for (const AttachedMethod& method : c.methods) {
    const Selector* const selector =
        method.selectors.empty() ? nullptr : method.selectors[static_cast<std::size_t>(layer)];
    if (const Position end = ordered_end(selector, 0); end > 0)
      return dynamic_cast<const OrdersRows&>(*selector).row_order(0, kv_head, end);
  }
  return {};
}

}  // namespace lode
