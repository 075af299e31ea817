// SPDX-License-Identifier: Apache-2.0
// What `train saap` and its bench share.
#pragma once

#include "cli.h"
#include "lab/train/saap/trainer.h"

namespace lode::cli {

/// Flags of what a classifier is and how it is trained.
void add_saap_training_flags(CLI::App& verb, SaapSettings& settings);
void add_bench_train_saap(CLI::App& bench);

}  // namespace lode::cli
