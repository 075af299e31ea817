// SPDX-License-Identifier: Apache-2.0
// A model's fingerprint changes with everything that changes what the model computes, so that a context or an
// artefact of one is never used with another.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "base/file.h"
#include "eval/tiny_model.h"

namespace lode {
namespace {

TEST(Fingerprint, ChangesWithAllThatTheRotationDependsOn) {
  const test::TestFolder kept;
  std::filesystem::copy(tiny_model()->path(), kept.path());
  const Json plain = Json::parse(read_file(kept.path() / "config.json"));
  std::set<std::string> seen = {tiny_model()->fingerprint()};
  const auto expect_another = [&](const Json& scaling) {
    Json config = plain;
    config["rope_scaling"] = scaling;
    std::ofstream(kept.path() / "config.json") << config.dump();
    EXPECT_TRUE(seen.insert(Model::load(kept.path(), 1)->fingerprint()).second) << scaling.dump();
  };
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 512}};
  expect_another(yarn);
  for (const auto& [key, value] :
       std::vector<std::pair<const char*, Json>>{{"factor", 2.0},
                                                 {"original_max_position_embeddings", 256},
                                                 {"beta_fast", 16.0},
                                                 {"beta_slow", 2.0},
                                                 {"attention_factor", 1.5},
                                                 {"mscale", 0.7},
                                                 {"mscale_all_dim", 0.7},
                                                 {"truncate", false}}) {
    Json other = yarn;
    other[key] = value;
    expect_another(other);
  }
  const Json llama3 = {{"rope_type", "llama3"},
                       {"factor", 4.0},
                       {"original_max_position_embeddings", 512},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0}};
  expect_another(llama3);
  for (const char* key : {"low_freq_factor", "high_freq_factor"}) {
    Json other = llama3;
    other[key] = 2.0;
    expect_another(other);
  }
}

}  // namespace
}  // namespace lode
