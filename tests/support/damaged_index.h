// SPDX-License-Identifier: Apache-2.0
// A saved index with some of its bytes changed, which must be refused with a sentence that says what is
// wrong.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "support/forged_index.h"
#include "support/refusal.h"

namespace lode::test {

/// As sections hold it.
inline std::string number(std::int64_t value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

/// To be called for each change.
class DamagedIndex {
 public:
  /// All of them outlive this.
  DamagedIndex(Selector& selector, const IndexSections& good, KvLayer kv)
      : selector_(selector), good_(good), kv_(kv) {}

  /// `bytes` at `place` of the section whose name ends so; `what` is in the sentence.
  void operator()(std::string_view what, std::string_view section, std::size_t place,
                  const std::string& bytes) const {
    IndexSections bad = good_;
    for (auto& [name, content] : bad) {
      if (name.ends_with(section)) content.replace(place, bytes.size(), bytes);
    }
    ASSERT_NE(bad, good_) << what;
    expect_refused(what, [&] { load_sections(selector_, bad, kv_); });
  }

 private:
  Selector& selector_;
  const IndexSections& good_;
  KvLayer kv_;
};

}  // namespace lode::test
