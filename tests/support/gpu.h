// SPDX-License-Identifier: Apache-2.0
// What tests of the engine on a GPU share.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/file.h"
#include "engine/context.h"
#include "gpu/backend.h"
#include "select/plan/file.h"
#include "support/source_dir.h"

#define NEEDS_GPU() \
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) GTEST_SKIP() << gpu.why

namespace lode {

/// The pocket model, loaded once.
inline std::shared_ptr<const Model> pocket() {
  static const auto model = Model::load(source_dir().string() + "/models/pocket");
  return model;
}

/// The first tokens of the shipped document.
inline std::vector<TokenId> story(std::int64_t tokens) {
  static const std::vector<TokenId> all = pocket()->tokenizer().encode(
      read_file(source_dir().string() + "/demo/document.txt"), Tokenizer::Bos::as_template);
  return {all.begin(), all.begin() + tokens};
}

/// A plan file of the pocket model for as long as this lives.
class PlanFile {
 public:
  /// [L][Hkv]
  PlanFile(LocalWindow dense, std::vector<std::vector<std::string>> heads)
      : path_(std::filesystem::temp_directory_path() /
              ("lodestone-plan-" + std::to_string(getpid()) + ".json")) {
    write_plan(path_, {.model_fingerprint = std::string(pocket()->fingerprint()),
                       .note = {},
                       .dense = dense,
                       .heads = std::move(heads)});
  }
  ~PlanFile() { std::filesystem::remove(path_); }
  PlanFile(const PlanFile&) = delete;
  PlanFile& operator=(const PlanFile&) = delete;
  Spec spec(const std::string& more = "") const { return parse_spec("plan:" + path_.string() + more); }

 private:
  std::filesystem::path path_;
};

}  // namespace lode
