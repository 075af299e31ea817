// SPDX-License-Identifier: Apache-2.0
// The program: parses the verb, runs it, turns failures into one sentence and an exit code.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <iostream>
#include <new>
#include <string_view>
#include <vector>

#include "base/cancel.h"
#include "base/text.h"
#include "cli.h"
#include "lodestone/error.h"

namespace {

constexpr int kDone = 0, kFailed = 1, kBadInput = 2, kInterrupted = 130;

/// A mapped file that another program cuts short, or a disk that fails, shows as SIGBUS at the next look at
/// its pages, in whichever thread looks first. The others wait for its exit, so that the sentence comes once.
void on_bus_error(int) {
  static constexpr char kSentence[] =
      "lodestone: a file that was in use can no longer be read: another program cut it short, or its disk "
      "fails\n";
  static std::atomic_flag said;
  while (said.test_and_set()) pause();
  const ssize_t written = write(STDERR_FILENO, kSentence, sizeof kSentence - 1);
  static_cast<void>(written);
  _exit(kFailed);
}

void install_bus_error_handler() {
  struct sigaction action = {};
  action.sa_handler = on_bus_error;
  sigfillset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
}

int complain(int code, const std::string& message) {
  std::fprintf(stderr, "lodestone: %s\n", message.c_str());
  return code;
}

std::string nearest(std::string_view word, const std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), word) != names.end()) return "";
  const std::string found = lode::nearest_name(word, names);
  return found.empty() ? "" : "; did you mean '" + found + "'?";
}

/// "; did you mean 'index'?" for the first word that is no verb or no flag of its verb, else nothing.
std::string suggestion(const CLI::App& app, int argc, char** argv) {
  const CLI::App* verb = &app;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = std::string_view(argv[i]).substr(0, std::string_view(argv[i]).find('='));
    std::vector<std::string> names;
    if (word.starts_with("--")) {
      for (const CLI::Option* option : verb->get_options()) {
        for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
      }
    } else {
      for (const CLI::App* sub : verb->get_subcommands([](const CLI::App*) { return true; })) {
        names.push_back(sub->get_name());
        if (sub->get_name() == word) verb = sub;
      }
    }
    if (std::string found = nearest(word, names); !found.empty()) return found;
  }
  return "";
}

/// --help and --version; CLI11 prints them without a look at whether that worked.
int print_and_leave(const CLI::App& app, const CLI::Success& request) {
  app.exit(request);
  return std::cout.flush() ? kDone : complain(kFailed, "cannot write to standard output");
}

int run(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return kDone;
  } catch (const CLI::Success& e) {  // --help, --version
    return print_and_leave(app, e);
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
  install_bus_error_handler();
  CLI::App app{"Lodestone: index a long document once, then ask it many questions fast.", "lodestone"};
  app.set_version_flag("--version", LODESTONE_VERSION);
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::simple);
  lode::cli::add_demo(app);
  lode::cli::add_index(app);
  lode::cli::add_ask(app);
  lode::cli::add_bench(app);
  lode::cli::add_tune(app);
  lode::cli::add_report(app);
  lode::cli::add_inspect(app);
  lode::cli::add_eval(app);
  lode::cli::add_probe(app);
  lode::cli::add_tasks(app);
  lode::cli::add_train(app);
  lode::cli::add_verify(app);
  return run(app, argc, argv);
}
