// SPDX-License-Identifier: Apache-2.0
// `bench serve`: load on a running server.
#pragma once

#include <CLI/CLI.hpp>

namespace lode::cli {

void add_bench_serve(CLI::App& bench);

}  // namespace lode::cli
