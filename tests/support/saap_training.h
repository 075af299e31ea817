// SPDX-License-Identifier: Apache-2.0
// A small run of SAAP's training, and where its files go.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/rng.h"
#include "eval/tiny_model.h"
#include "lab/train/saap/trainer.h"
#include "select/saap/artefact.h"

namespace lode::test {

inline std::filesystem::path temporary(const std::string& name) {
  return std::filesystem::path(testing::TempDir()) / ("train-saap-" + std::to_string(getpid()) + "-" + name);
}

inline std::string text_of(std::size_t bytes, std::uint64_t seed) {
  static const std::vector<std::string> words = {"stone ", "river ", "lode ", "seven ",
                                                 "of ",    "the ",   "and ",  "north "};
  std::string text;
  Rng rng(seed);
  while (text.size() < bytes) text += words[rng.below(words.size())];
  return text;
}

/// A small run on the tiny model.
struct Small {
  SaapSettings settings;
  std::vector<Prompt> prompts;
  Small() {
    settings.clusters = 12;
    settings.hidden = 24;
    settings.filter = {.sink = 1, .window = 32, .distance = 16};
    settings.samples = 150;
    settings.held_out = 1;
    settings.steps = 60;
    settings.batch = 64;
    settings.rate = 3e-3;
    settings.probes = 3;
    settings.dense_layers = 0;
    prompts = cut_into_prompts(*tiny_model(), "words", text_of(1600, 1), 401);
  }
  SaapResult train(const std::filesystem::path& checkpoint,
                   const std::function<void(const SaapHeadReport&)>& on_head = {}) const {
    return train_saap(tiny_model(), {.kv_type = DType::f32}, settings, prompts, checkpoint,
                      Progress::Mode::quiet, on_head);
  }
};

inline std::string bytes_of_artefact(const SaapResult& result, const std::string& name) {
  const std::filesystem::path path = temporary(name);
  write_saap(path, result.layers, tiny_model()->fingerprint(), {{.from = 0, .training = "{}"}});
  std::string bytes = read_file(path);
  std::filesystem::remove(path);
  return bytes;
}

}  // namespace lode::test
