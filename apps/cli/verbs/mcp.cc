// SPDX-License-Identifier: Apache-2.0
// lodestone mcp: the stored documents as tools of an agent, over standard input and output.
#include "serve/mcp.h"

#include <iostream>
#include <string>

#include "base/cancel.h"
#include "cli.h"
#include "lodestone/error.h"
#include "serving.h"

namespace lode::cli {

namespace {

struct McpFlags {
  CommonFlags common;
  ServingFlags serving;
};

void run(const McpFlags& flags) {
  const auto backend = make_backend(flags.serving, flags.common);
  bool broken = false;
  serve::McpServer server(*backend, program_version(), [&](const std::string& line) {
    try {
      print_text(line + "\n");
    } catch (const RunError&) {  // the client has gone; it will close our input, too
      broken = true;
    }
  });
  for (std::string line; !broken && std::getline(std::cin, line);) server.receive(line);
  check_cancel();
  server.finish();
}

}  // namespace

void add_mcp(CLI::App& app) {
  auto flags = std::make_shared<McpFlags>();
  CLI::App* verb =
      app.add_subcommand("mcp", "Offer stored documents to an agent (Model Context Protocol over stdio)");
  add_common_flags(*verb, flags->common);
  add_serving_flags(*verb, flags->serving);
  verb->callback([flags] { run(*flags); });
}

}  // namespace lode::cli
