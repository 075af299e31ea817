// SPDX-License-Identifier: Apache-2.0
// A reading that ended in the middle goes on from its log, and what comes behind it has the bits of one that did not.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <span>

#include "engine/context.h"
#include "engine/prefill_log.h"

namespace lode::test {

/// `text`: at least 170 tokens. `folder` is where the document would be.
inline void expect_an_interrupted_reading_goes_on(const std::function<Context()>& context,
                                                  std::span<const TokenId> text,
                                                  const std::filesystem::path& folder) {
  const auto path = PrefillLog::beside(folder / "document.lode");
  {
    Context c = context();
    PrefillLog log(path, c);
    c.prefill(text.first(64));
    log.save(c);
    c.prefill(text.subspan(64, 32));
    log.save(c);
  }
  Context c = context();
  PrefillLog log(path, c);
  EXPECT_EQ(log.restore(c, text.first(150)), 96);
  c.prefill(text.subspan(96, 54));
  Context whole = context();
  whole.prefill(text.first(150));
  EXPECT_EQ(c.forward(text.subspan(150, 20), kDense), whole.forward(text.subspan(150, 20), kDense));
}

}  // namespace lode::test
