// SPDX-License-Identifier: Apache-2.0
// A reading that was ended goes on to the same file, whatever its methods have heard of the text.
#include "engine/prefill_log.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/file.h"
#include "support/lisbon.h"
#include "support/source_dir.h"

namespace lode {
namespace {

class EndedReading : public testing::Test {
 protected:
  void SetUp() override {
    TearDown();
    ASSERT_GT(size(), 3072);
  }
  void TearDown() override {
    for (const auto& path : {whole_, ended_, PrefillLog::beside(ended_)}) std::filesystem::remove(path);
  }

  std::int64_t size() const { return std::ssize(tokens_); }
  std::unique_ptr<Context> context_with(const std::string& spec) const {
    auto context = std::make_unique<Context>(model_, ContextOptions{.max_tokens = 4096, .chunk = 128});
    std::istringstream specs(spec);
    for (std::string one; specs >> one;) context->attach(parse_spec(one));
    return context;
  }
  void save(Context& context, const std::filesystem::path& path) const {
    context.build_indexes();
    context.save(path, text_);
  }
  void read_undisturbed(const std::string& spec) const {
    const auto context = context_with(spec);
    context->prefill(tokens_);
    save(*context, whole_);
  }
  /// Goes on to token `end` and is gone, or to the end and saves; returns from where on it read.
  std::int64_t read_on(const std::string& spec, std::int64_t end) const {
    const auto context = context_with(spec);
    PrefillLog log(PrefillLog::beside(ended_), *context);
    const std::int64_t begin = log.restore(*context, tokens_);
    const std::int64_t room = log.room(*context, end), before = bytes_of_log();
    context->prefill(
        std::span(tokens_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin)));
    log.save(*context);
    EXPECT_LE(bytes_of_log() - before, room);
    if (end < size()) return begin;
    save(*context, ended_);
    log.remove();
    return begin;
  }
  std::int64_t bytes_of_log() const {
    std::error_code none;
    const auto bytes = std::filesystem::file_size(PrefillLog::beside(ended_), none);
    return none ? 0 : static_cast<std::int64_t>(bytes);
  }

  const std::string text_ = test::lisbon_text(0, 160), id_ = std::to_string(getpid());
  const std::filesystem::path folder_ = std::filesystem::temp_directory_path(),
                              whole_ = folder_ / ("whole-" + id_ + ".lode"),
                              ended_ = folder_ / ("ended-" + id_ + ".lode");
  const std::shared_ptr<const Model> model_ = Model::load(source_dir() / "models/pocket");
  std::vector<TokenId> tokens_ = model_->tokenizer().encode(text_, Tokenizer::Bos::as_template);
};

class EndedReadingOf : public EndedReading, public testing::WithParamInterface<const char*> {};

TEST_P(EndedReadingOf, GoesOnToTheSameFile) {
  read_undisturbed(GetParam());
  EXPECT_EQ(read_on(GetParam(), 256), 0);
  EXPECT_EQ(read_on(GetParam(), 2176), 256);
  EXPECT_EQ(read_on(GetParam(), 2944), 2176);
  EXPECT_EQ(read_on(GetParam(), 2976), 2944);  // fewer tokens than some methods keep of the end
  EXPECT_EQ(read_on(GetParam(), size() - 10), 2976);
  // `retrieval` judges by the text's last queries: these are read again.
  const bool judges = std::string(GetParam()).starts_with("retrieval");
  EXPECT_EQ(read_on(GetParam(), size()), judges ? (size() - 64) / 128 * 128 : size() - 10);
  EXPECT_EQ(read_file(ended_), read_file(whole_));
}

INSTANTIATE_TEST_SUITE_P(Methods, EndedReadingOf,
                         testing::Values("kmeans", "squeezed:sparsity=0.8", "retrieval:error=0.1,rest=32"));

/// `retrieval` hears the text's end again, from a place on where the sample of `squeezed` was thinned a moment before.
TEST_F(EndedReading, OfSeveralMethodsGoesOnToTheSameFile) {
  const std::string specs = "squeezed:sparsity=0.8 retrieval:k=50";
  tokens_.resize(2150);
  read_undisturbed(specs);
  EXPECT_EQ(read_on(specs, 2100), 0);
  EXPECT_EQ(read_on(specs, size()), 2048);
  EXPECT_EQ(read_file(ended_), read_file(whole_));
}

/// What another method began has none of the queries that these two learn from.
TEST_F(EndedReading, OfAnotherMethodIsHeardAgainAsFarAsMustBe) {
  const std::string all = "retrieval:k=50";
  read_on("kmeans", 3072);
  EXPECT_EQ(read_on("squeezed:sparsity=0.8", size()), (size() - 2048) / 128 * 128);
  read_on("kmeans", 3072);
  {
    const auto context = context_with(all);
    PrefillLog log(PrefillLog::beside(ended_), *context);
    EXPECT_EQ(log.restore(*context, tokens_), 0);
    EXPECT_TRUE(log.holds_another()) << "so that hours of reading are not replaced unasked";
    EXPECT_EQ(context->tokens(), 0);
  }
  EXPECT_EQ(read_on(all, 1024), 0);
  EXPECT_EQ(read_on(all, size()), 1024) << "the log is its own now";
  read_undisturbed(all);
  EXPECT_EQ(read_file(ended_), read_file(whole_));
}

/// However often it is written.
TEST_P(EndedReadingOf, TakesNoMoreRoomThanItAskedFor) {
  const auto context = context_with(GetParam());
  PrefillLog log(PrefillLog::beside(ended_), *context);
  const std::int64_t room = log.room(*context, size());
  for (std::int64_t at = 0; at < size(); at += 128) {
    context->prefill(std::span(tokens_).subspan(
        static_cast<std::size_t>(at), static_cast<std::size_t>(std::min<std::int64_t>(128, size() - at))));
    log.save(*context);
  }
  EXPECT_LE(bytes_of_log(), room + (size() + 127) / 128 * 64) << "and a block's header";
}

/// What one bit or length of it says is not believed.
TEST_P(EndedReadingOf, IsTakenAsFarAsItsLogIsWhole) {
  read_on(GetParam(), 1024);
  read_on(GetParam(), 2048);
  const auto path = PrefillLog::beside(ended_);
  const std::string whole = read_file(path);
  for (std::size_t at = 64; at < whole.size(); at += at < 256 ? 1 : whole.size() / 30) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x40);
    std::ofstream(path, std::ios::binary) << damaged;
    const auto context = context_with(GetParam());
    PrefillLog log(path, *context);
    const std::int64_t taken = log.restore(*context, tokens_);
    EXPECT_TRUE(taken == 0 || taken == 1024) << at << ": " << taken;
  }
}

/// These cannot hand out what they hear.
TEST_F(EndedReading, OfOtherMethodsThatListenBeginsAnew) {
  for (const char* spec : {"snapkv", "infllm"}) {
    EXPECT_EQ(read_on(spec, 1024), 0) << spec;
    EXPECT_EQ(bytes_of_log(), 0) << spec;
    EXPECT_EQ(read_on(spec, 1024), 0) << spec;
  }
}

}  // namespace
}  // namespace lode
