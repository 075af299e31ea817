// SPDX-License-Identifier: Apache-2.0
// Ranks that are processes: what other tests show on threads, over MPI. Each process that mpirun starts runs these tests
// (ctest's `cluster_mpi`, and scripts/sanitize.sh under the sanitizers); one that is alone skips them.
#include "cluster/mpi.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>

#include "base/communicator.h"
#include "cluster/rank_prefill.h"
#include "cluster/shard_attention.h"
#include "engine/batch.h"
#include "engine/context_file.h"
#include "engine/document.h"
#include "lodestone/error.h"
#include "lodestone/scheduler.h"
#include "support/compare.h"
#include "support/ranks_text.h"
#include "support/unison_cases.h"

namespace lode {
namespace {

class Mpi : public test::RanksText {
 protected:
  static void SetUpTestSuite() {
    if (several_started()) ranks_ = connect_ranks(std::chrono::seconds(60));
  }
  static void TearDownTestSuite() {
    if (ranks_ != nullptr) ranks_->finish();
  }
  void SetUp() override {
    if (ranks_ == nullptr) GTEST_SKIP() << "needs mpirun -n 2 or more";
    // All ranks see one file: rank 0's.
    const auto own = std::filesystem::path(testing::TempDir()) / ("mpi_test_" + std::to_string(getpid()));
    path_ = ranks_->broadcast(own.string());
  }
  void TearDown() override {
    if (ranks_ == nullptr) return;
    ranks_->barrier();
    if (ranks_->rank() > 0) return;
    remove_files();
  }

  void index_over_ranks() const {
    Context context = read(*ranks_);
    save(context, *ranks_);
  }
  /// Whether all ranks have these very bytes.
  template <class T>
  static bool alike(const std::vector<T>& values) {
    std::string own(values.size() * sizeof(T), '\0');
    std::memcpy(own.data(), values.data(), own.size());
    const auto all = ranks_->all_strings(own);
    return std::ranges::all_of(all, [&](const std::string& other) { return other == own; });
  }

  static std::unique_ptr<Ranks> ranks_;
};
std::unique_ptr<Ranks> Mpi::ranks_;

TEST_F(Mpi, LongMessagesAndShortOnesArrive) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{5000}, std::size_t{3} << 20}) {
    const auto all = ranks_->all_strings(std::string(bytes, static_cast<char>('a' + ranks_->rank())));
    for (std::size_t r = 0; r < all.size(); ++r)
      EXPECT_EQ(all[r], std::string(bytes, static_cast<char>('a' + r))) << r;
  }
}

TEST_F(Mpi, ARankThatFailsEndsWhatAllDoAndTheyGoOn) {
  test::fail_everywhere_and_go_on(*ranks_);
}

TEST_F(Mpi, ATextInShardsAnswersAsOneProcessDoes) {
  index_over_ranks();
  const auto alone = open(nullptr);
  const auto shared = open(ranks_.get());
  for (const Spec& spec : {parse_spec("full"), methods_[0], methods_[1], methods_[2]}) {
    const std::vector<float> found = logits(shared, spec);
    EXPECT_LT(worst_difference(found, logits(alone, spec)), kTolerance) << spec.str();
    EXPECT_TRUE(alike(found)) << spec.str();
  }
}

/// As `ask` does it: steps run in the scheduler's thread, beside the one that listens for signs of life.
TEST_F(Mpi, ASchedulerAnswersOverRanks) {
  index_over_ranks();
  const auto document = open(ranks_.get());
  Scheduler scheduler(model_, {.max_sequences = 1});
  for (std::uint64_t question = 0; question < 4; ++question) {
    const Spec spec = question % 2 == 0 ? parse_spec("full") : methods_[question / 2];
    const Answer answer = scheduler
                              .submit({.document = document,
                                       .prompt = test::letters(7, question + 3),
                                       .attention = spec,
                                       .options = {.max_new_tokens = 12, .stop_at_eos = false}})
                              .result.get();
    EXPECT_EQ(std::ssize(answer.generation.tokens), 12);
    EXPECT_TRUE(alike(answer.generation.tokens)) << spec.str();
  }
}

}  // namespace
}  // namespace lode
