// SPDX-License-Identifier: Apache-2.0
// Keys and values of a context in the order of its one method's clusters.
#pragma once

#include "engine/context.h"
#include "kv/move_rows.h"

namespace lode {

/// For many questions, after build_indexes(): on the CPU, keys and values move in memory, in place, so that
/// the clusters of the one method that is attached beside `full` lie together (saap, kmeans, ivf, squeezed),
/// which makes its attention up to twice as fast; answers differ by rounding alone. Costs about as much time
/// as four tokens of full attention; what is mapped from a file becomes memory of this process. Attaching
/// another method, rolling back into the context and saving put them back. False, and nothing happens, where
/// there is nothing to gain.
bool order_rows(Context& context);
/// InputError where methods are attached and none has an order of its own, or more than one is beside full
/// (order_rows would do nothing), or on a GPU. Before the text is read.
void expect_order(const Context& context);
/// Back to the order of tokens, if they are in another.
void restore_rows(Context::Impl& context);
/// One past the last row of any layer that may hold another token than its own; 0 = all are in token order.
Position ordered_end(const Context::Impl& context);
/// How the rows of a head lie; no tokens: in token order. To be asked once: it is made from the index.
RowOrder row_order(const Context::Impl& context, int layer, int kv_head);

}  // namespace lode
