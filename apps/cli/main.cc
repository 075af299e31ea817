// SPDX-License-Identifier: Apache-2.0
// The program: parses the verb, runs it, turns failures into one sentence and an exit code.
#include <algorithm>
#include <cstdio>
#include <new>

#include "base/cancel.h"
#include "base/text.h"
#include "cli.h"
#include "lodestone/error.h"

namespace {

constexpr int kDone = 0, kFailed = 1, kBadInput = 2, kInterrupted = 130;

int complain(int code, const std::string& message) {
  std::fprintf(stderr, "lodestone: %s\n", message.c_str());
  return code;
}

/// "; did you mean 'index'?" for a first word that is no verb, else nothing.
std::string suggestion(const CLI::App& app, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return "";
  std::vector<std::string> names;
  for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(verb->get_name());
  if (std::find(names.begin(), names.end(), argv[1]) != names.end()) return "";
  const std::string nearest = lode::nearest_name(argv[1], names);
  return nearest.empty() ? "" : "; did you mean '" + nearest + "'?";
}

int run(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return kDone;
  } catch (const CLI::Success& e) {  // --help, --version
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    return complain(kBadInput, std::string(e.what()) + suggestion(app, argc, argv));
  } catch (const lode::InputError& e) {
    return complain(kBadInput, e.what());
  } catch (const lode::Interrupted&) {
    return complain(kInterrupted, "interrupted; nothing half-written was left behind");
  } catch (const std::bad_alloc&) {
    return complain(kFailed, "out of memory; a shorter context (-c) or a smaller --kv-type needs less");
  } catch (const std::exception& e) {
    return complain(kFailed, e.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  lode::install_cancel_handlers();
  CLI::App app{"Lodestone: index a long document once, then ask it many questions fast."};
  app.set_version_flag("--version", LODESTONE_VERSION);
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::simple);
  lode::cli::add_demo(app);
  lode::cli::add_index(app);
  lode::cli::add_ask(app);
  lode::cli::add_inspect(app);
  lode::cli::add_verify(app);
  return run(app, argc, argv);
}
