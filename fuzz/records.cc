// SPDX-License-Identifier: Apache-2.0
// Any text as the answers of an earlier run of `eval`: refused, or gone on with, and then it is whole.
#include "lab/eval/records.h"

#include "fuzz/target.h"
#include "support/memory_file.h"

LODE_FUZZ_TARGET(records) {
  const lode::Json settings = {{"settings", 1}};
  const lode::test::MemoryFile file(input);
  const lode::Sample sample = {.id = "a",
                               .task = "t",
                               .context = std::make_shared<std::string>("c"),
                               .question = "q",
                               .answers = {"x"}};
  { lode::Records(file.path(), settings).add(sample, "new", {}); }
  bool found = false;
  try {
    found = lode::Records(file.path(), settings).find(sample, "new") != nullptr;
  } catch (const lode::InputError&) {
    // What was gone on with can be gone on with again.
  }
  LODE_ASSERT(found);
}
