// SPDX-License-Identifier: Apache-2.0
// Any text as a file of samples: refused, or samples that are the same after writing and reading again.
#include "fuzz/target.h"
#include "lab/tasks/sample_file.h"

LODE_FUZZ_TARGET(samples) {
  for (const lode::Sample& sample : lode::parse_samples(input, "fuzz")) {
    const std::string line = lode::sample_line(sample, true);
    LODE_ASSERT(lode::sample_line(lode::parse_samples(line, "fuzz").at(0), true) == line);
  }
}
