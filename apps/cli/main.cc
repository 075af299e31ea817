// SPDX-License-Identifier: Apache-2.0
// The program: parses the verb, runs it, turns failures into one sentence and an exit code.
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <new>
#include <string>
#include <string_view>
#include <system_error>

#include "base/cancel.h"
#include "base/fatal_signals.h"
#include "base/text.h"
#include "cli.h"
#include "help.h"
#include "lodestone/error.h"
#include "ranks.h"
#include "verbs/chat.h"

namespace {

constexpr int kDone = 0, kFailed = 1, kBadInput = 2, kInterrupted = 130;

/// A descriptor that the caller closed would be given to the next file that is opened, and what is meant for the
/// terminal would be written into that file. Opened the wrong way round, each still fails when it is used.
void open_standard_descriptors() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY) != fd)
      _exit(kFailed);
}

/// Libraries that run out of address space in the middle of their work end the program with a signal. With so much
/// they start, and what is ours says what it lacks.
bool has_address_space() {
  constexpr rlim_t kLeast = rlim_t{256} << 20;
  rlimit limit = {};
  return getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= kLeast;
}

/// One line, whatever names and values are quoted in it.
int complain(int code, const std::string& message) {
  constexpr std::size_t kLongest = 4000;
  lode::cli::tell_ranks(message);
  std::fprintf(stderr, "lodestone: %s\n", lode::excerpt(message, kLongest).c_str());
  return code;
}

/// --help and --version; CLI11 prints them without a look at whether that worked.
int print_and_leave(const CLI::App& app, const CLI::Success& request) {
  app.exit(request);
  return std::cout.flush() ? kDone : complain(kFailed, "cannot write to standard output");
}

int run(CLI::App& app, int argc, char** argv) {
  try {
    lode::cli::join_ranks(argc, argv);
    app.parse(argc, argv);
    return kDone;
  } catch (const CLI::Success& e) {  // --help, --version
    return print_and_leave(app, e);
  } catch (const CLI::ParseError& e) {
    return complain(kBadInput, lode::cli::usage_error(app, e, argc, argv));
  } catch (const lode::InputError& e) {
    return complain(kBadInput, e.what());
  } catch (const lode::Interrupted&) {
    return complain(kInterrupted,
                    lode::cli::ranks() == nullptr
                        ? "interrupted; no result was left half-written"
                        : "interrupted, by a signal or by the launcher because a rank had ended; "
                          "no result was left half-written");
  } catch (const std::bad_alloc&) {
    return complain(kFailed, "out of memory; a shorter context (-c) or a smaller --kv-type needs less");
  } catch (const std::system_error& e) {
    return complain(kFailed,
                    e.code() == std::errc::resource_unavailable_try_again
                        ? "cannot start a thread: out of memory (ulimit -v) or of processes (ulimit -u)"
                        : e.what());
  } catch (const std::exception& e) {
    return complain(kFailed, e.what());
  }
}

/// Where GPUs share a model, code that is loaded in the middle of a step may wait for a sum that waits for a GPU whose
/// step waits for the load. The runtime reads this when it starts.
void load_gpu_code_early(int argc, char** argv) {
  const auto shares = [](const char* argument) {
    const std::string_view flag(argument);
    return flag.starts_with("--tensor-parallel") || flag.starts_with("--context-parallel");
  };
  if (std::any_of(argv, argv + argc, shares)) setenv("CUDA_MODULE_LOADING", "EAGER", /*replace=*/0);
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_descriptors();
  signal(SIGXFSZ, SIG_IGN);  // a write beyond the limit of file sizes fails with a sentence
  lode::install_cancel_handlers();
  lode::install_fatal_handlers();
  if (!has_address_space())
    return complain(kFailed,
                    "out of memory: expected at least 256 MiB of address space (ulimit -v), found less");
  load_gpu_code_early(argc, argv);
  CLI::App app{"Lodestone: index a long document once, then ask it many questions fast.", "lodestone"};
  app.set_version_flag("--version", LODESTONE_VERSION);
  app.require_subcommand(1);
  lode::cli::set_help_style(app);
  app.failure_message(CLI::FailureMessage::simple);
  lode::cli::add_demo(app);
  lode::cli::add_index(app);
  lode::cli::add_ask(app);
  lode::cli::add_chat(app);
  lode::cli::add_serve(app);
  lode::cli::add_mcp(app);
  lode::cli::add_bench(app);
  lode::cli::add_quantize(app);
  lode::cli::add_tune(app);
  lode::cli::add_report(app);
  lode::cli::add_inspect(app);
  lode::cli::add_estimate(app);
  lode::cli::add_eval(app);
  lode::cli::add_probe(app);
  lode::cli::add_tasks(app);
  lode::cli::add_train(app);
  lode::cli::add_verify(app);
  lode::cli::add_methods(app);
  return lode::cli::leave_ranks(run(app, argc, argv));
}
