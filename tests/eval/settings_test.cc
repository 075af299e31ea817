// SPDX-License-Identifier: Apache-2.0
// What tells two measurements apart: options, machine, and the contents of the files that specs read.
#include "lab/eval/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "select/plan/file.h"
#include "support/refusal.h"
#include "tiny_model.h"

namespace lode {
namespace {

namespace fs = std::filesystem;

class FilesHash : public testing::Test {
 protected:
  ~FilesHash() override { fs::remove(artefact_); }
  static std::string of(const std::string& spec) {
    return files_hash(parse_spec(spec), tiny_model()->path());
  }
  static void write(const fs::path& path, const std::string& text) { std::ofstream(path) << text; }

  const test::TestFolder folder_;
  const fs::path artefact_ = tiny_model()->path() / "hash.safetensors";
};

TEST_F(FilesHash, ChangesWithTheContentsAndNotWithTheName) {
  const fs::path a = folder_ / "a.safetensors", b = folder_ / "b.safetensors";
  write(a, "one");
  write(b, "one");
  const std::string first = of("kmeans:weights=" + a.string());
  EXPECT_EQ(of("kmeans:weights=" + b.string()), first);
  write(a, "two");
  EXPECT_NE(of("kmeans:weights=" + a.string()), first);
  EXPECT_EQ(of("kmeans:probes=4"), "") << "reads none";
  EXPECT_EQ(of("full"), "");
}

TEST_F(FilesHash, KnowsTheArtefactInTheModelsFolder) {
  EXPECT_EQ(of("hash"), "");
  write(artefact_, "one");
  const std::string first = of("hash");
  EXPECT_EQ(of("hash:budget=7"), first);
  write(artefact_, "two");
  EXPECT_NE(of("hash"), first);
  EXPECT_NE(first, "");
}

/// A changed hash throws away answers that took hours.
TEST_F(FilesHash, CountsHowOftenAMethodHasChanged) {
  for (const MethodInfo& method : methods()) {
    const bool changed = method.name == "h2o" || method.name == "ivf" || method.name == "snapkv";
    if (!method.trained && method.name != "plan") {
      EXPECT_EQ(of(method.name), changed ? "cb358fcee0dfde56" : "") << method.name;
    }
    EXPECT_EQ(method.revision, changed ? 2 : 0) << method.name;
  }
}

TEST_F(FilesHash, OfAPlanCountsWhatItsHeadsRead) {
  const fs::path plan = folder_ / "plan.json";
  const auto write_with = [&](const std::string& spec) {
    write_plan(plan, {.model_fingerprint = tiny_model()->fingerprint(),
                      .note = "",
                      .dense = {},
                      .heads = {{"full", spec}, {"full", "full"}}});
  };
  write_with("hash");
  const std::string without = of("plan:" + plan.string());
  write(artefact_, "one");
  const std::string with = of("plan:" + plan.string());
  EXPECT_NE(with, without);
  write_with("hash:budget=7");
  EXPECT_NE(of("plan:" + plan.string()), with);
}

TEST(RunSettings, NameEveryOption) {
  const auto of = [](const ContextOptions& options) { return run_settings(*tiny_model(), options); };
  const Json plain = of({});
  EXPECT_EQ(of({}), plain);
  EXPECT_NE(of({.kv_type = DType::f32}), plain);
  EXPECT_NE(of({.device = Device::cuda}), plain);
  EXPECT_NE(of({.gpu_memory = 1}), plain);
  EXPECT_NE(of({.kv_tier = KvTier::host}), plain);
  EXPECT_NE(of({.active_memory = 1}), plain);
  EXPECT_NE(of({.max_tokens = 512}), plain);
  EXPECT_NE(of({.chunk = 64}), plain);
  EXPECT_NE(of({.seed = 1}), plain);
  EXPECT_NE(of({.audit = 0.5}), plain);
  EXPECT_NE(of({.rope_factor = 2.0}), plain);
  const auto other = Model::load(tiny_model()->path(), 1);
  EXPECT_THAT(machine_name(*other, Device::cpu), testing::HasSubstr(", 1 thread, "));
  EXPECT_THAT(run_settings(*other, {}).at("machine").get<std::string>(), testing::HasSubstr(", 1 threads, "))
      << "as kept answers say it";
  EXPECT_NE(run_settings(*other, {}), plain) << "another number of threads takes another time";
}

}  // namespace
}  // namespace lode
