// SPDX-License-Identifier: Apache-2.0
// Any text as the section of a .lode file that says what it is about: refused, or numbers within their
// ranges.
#include "base/hash.h"
#include "base/json.h"
#include "engine/context_file.h"
#include "fuzz/target.h"
#include "support/forged_container.h"
#include "support/memory_file.h"

LODE_FUZZ_TARGET(context_meta) {
  lode::test::ForgedContainer forged = {.body = std::string(input)};
  forged.table = lode::Json({{{"name", "meta"},
                              {"offset", lode::test::ForgedContainer::kPage},
                              {"bytes", input.size()},
                              {"xxh3", lode::hash_hex(input)}}})
                     .dump();
  const lode::test::MemoryFile file(forged.bytes());
  const lode::ContainerReader reader(file.path());
  const lode::ContextMeta meta = lode::read_context_meta(reader, "fuzz");
  LODE_ASSERT(meta.tokens >= 1 && meta.rope_tokens >= 1);
  LODE_ASSERT(meta.kv_bytes() >= meta.tokens);
}
