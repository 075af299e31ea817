// SPDX-License-Identifier: Apache-2.0
// The index of `retrieval` in a context file.
#pragma once

#include <vector>

#include "lodestone/kv_view.h"
#include "select/retrieval_index.h"

namespace lode {

class SectionWriter;
class SectionReader;

/// The indexes of all KV heads of a layer.
void save_retrieval(const RetrievalIndex::Shape& shape, const std::vector<RetrievalIndex>& heads,
                    SectionWriter& out);
/// What save_retrieval wrote, over the same keys; InputError unless it has this shape and lies within `kv`.
/// Keys are coded again rather than stored.
std::vector<RetrievalIndex> load_retrieval(const RetrievalIndex::Shape& shape, KvLayer kv,
                                           const SectionReader& in, ThreadPool& pool);

}  // namespace lode
