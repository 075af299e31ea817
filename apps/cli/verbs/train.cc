// SPDX-License-Identifier: Apache-2.0
// lodestone train METHOD: makes a method's artefact for every layer and KV head of a frozen model. One file a
// method.
#include "cli.h"

namespace lode::cli {

void add_train(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("train", "Train a method's artefact for a frozen model");
  verb->require_subcommand(1);
  add_train_kmeans(*verb);
  add_train_saap(*verb);
  add_train_hash(*verb);
}

}  // namespace lode::cli
