// SPDX-License-Identifier: Apache-2.0
// Every fuzz target on its corpus: seeds, and inputs that once did harm.
#include <gtest/gtest.h>

#include <filesystem>

#include "fuzz/target.h"
#include "support/refusal.h"
#include "support/source_dir.h"

namespace lode {
namespace {

const std::filesystem::path kCorpus = source_dir() / "fuzz" / "corpus";

class Replay : public testing::TestWithParam<std::string> {};

TEST_P(Replay, CorpusDoesNoHarm) {
  const fuzz::Target target = fuzz::targets().at(GetParam());
  int files = 0;
  for (const auto& file : std::filesystem::directory_iterator(kCorpus / GetParam())) {
    SCOPED_TRACE(file.path().string());
    EXPECT_LE(file.file_size(), 2048u);
    const std::string bytes = test::bytes_of_file(file.path());
    for (const std::size_t size : {bytes.size(), bytes.size() / 2, std::size_t{0}}) {
      const std::vector<char> input(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
      fuzz::run(target, {input.data(), input.size()});
    }
    ++files;
  }
  EXPECT_GT(files, 0);
}

std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& [name, target] : fuzz::targets()) all.push_back(name);
  return all;
}

INSTANTIATE_TEST_SUITE_P(Targets, Replay, testing::ValuesIn(names()),
                         [](const auto& info) { return info.param; });

TEST(Corpora, BelongToATarget) {
  for (const auto& folder : std::filesystem::directory_iterator(kCorpus)) {
    EXPECT_TRUE(fuzz::targets().contains(folder.path().filename().string())) << folder.path();
  }
}

}  // namespace
}  // namespace lode
