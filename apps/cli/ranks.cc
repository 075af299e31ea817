// SPDX-License-Identifier: Apache-2.0
#include "ranks.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string_view>
#include <thread>

#include "base/cancel.h"
#include "base/fatal_signals.h"
#include "base/text.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode::cli {

namespace {

constexpr std::array<std::string_view, 5> kVerbs = {"index", "ask", "eval", "serve", "estimate"};

struct Joined {
  std::unique_ptr<Ranks> ranks;
  std::string failure;
  int own_stderr = STDERR_FILENO;  ///< where a rank speaks when rank 0 cannot
};
Joined& joined() {
  static Joined one;
  return one;
}

/// LODESTONE_RANK_TIMEOUT: seconds after which a silent rank counts as lost.
std::chrono::milliseconds patience() {
  constexpr double kUsual = 5, kMost = 3600;
  const char* const wanted = std::getenv("LODESTONE_RANK_TIMEOUT");
  if (wanted == nullptr) return std::chrono::milliseconds(static_cast<int>(kUsual * 1000));
  char* end = nullptr;
  const double seconds = std::strtod(wanted, &end);
  if (end == wanted || *end != '\0' || !(seconds >= 1 && seconds <= kMost))
    throw InputError(fmt::format("LODESTONE_RANK_TIMEOUT: expected seconds from 1 to {}, found '{}'", kMost,
                                 excerpt(wanted)));
  return std::chrono::milliseconds(static_cast<int>(seconds * 1000));
}

void silence(int own) {
  joined().own_stderr = dup(own);
  set_fatal_output(joined().own_stderr);
  const int nowhere = open("/dev/null", O_RDWR);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(nowhere, fd);
  if (nowhere > STDERR_FILENO) close(nowhere);
}

/// Bits of an answer are the same on all ranks where their kernels are.
void expect_alike(Ranks& all) {
  const std::vector<std::string> names = all.all_strings(std::string(kernels().name));
  for (std::size_t r = 1; r < names.size(); ++r)
    if (names[r] != names[0])
      throw InputError(fmt::format(
          "expected ranks on processors with the same instructions, found {} on rank 0 and {} on rank "
          "{}: LODESTONE_ISA names one that all have, e.g. mpirun -x LODESTONE_ISA=avx2",
          names[0], names[r], r));
}

/// Arguments but for the number of threads, which may differ.
std::vector<std::string> compared(int argc, char** argv) {
  std::vector<std::string> all;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--threads" || argument == "-t")
      ++i;
    else if (!argument.starts_with("--threads="))
      all.emplace_back(argument);
  }
  return all;
}

/// Ranks that are asked for different things would wait for one another, or mix what they have.
void expect_same_arguments(Ranks& all, int argc, char** argv) {
  constexpr char kBetween = '\0';  // no argument holds it
  std::string own;
  for (const std::string& argument : compared(argc, argv)) own += argument + kBetween;
  const std::vector<std::string> of = all.all_strings(own);
  for (std::size_t r = 1; r < of.size(); ++r) {
    if (of[r] == of[0]) continue;
    const auto differs = static_cast<std::size_t>(std::ranges::mismatch(of[0], of[r]).in1 - of[0].begin());
    const std::size_t begin = differs == 0 ? 0 : of[0].rfind(kBetween, differs - 1) + 1;
    const auto argument = [&](const std::string& from) {
      return begin < from.size() ? "'" + excerpt(from.substr(begin, from.find(kBetween, begin) - begin)) + "'"
                                 : std::string("none");
    };
    throw InputError(
        fmt::format("expected the same arguments on all ranks, found {} on rank 0 where rank {} has {}",
                    argument(of[0]), r, argument(of[r])));
  }
}

void expect_verb(int argc, char** argv) {
  const std::string_view verb = argc > 1 ? argv[1] : "";
  if (verb.starts_with("-") || std::ranges::find(kVerbs, verb) != kVerbs.end()) return;
  throw InputError(
      fmt::format("expected a verb that several ranks share ({}), found '{}': start it without mpirun",
                  join(std::vector<std::string>(kVerbs.begin(), kVerbs.end()), ", "), excerpt(verb)));
}

/// Whether rank 0 says what has happened and ends all. Where it does not (it hangs, or is out of reach), this rank is
/// to: the later the higher its number, so that one speaks.
bool rank_0_speaks(Ranks& all) {
  using std::chrono::milliseconds;
  constexpr milliseconds kLook(20), kForLauncher(10'000);
  const auto wait = patience() + milliseconds(100 * std::min(all.rank(), 50));
  for (auto waited = milliseconds(0); waited < wait; waited += kLook) {
    if (all.first_has_spoken()) {
      std::this_thread::sleep_for(kForLauncher);  // which ends this process meanwhile
      return true;
    }
    std::this_thread::sleep_for(kLook);
  }
  return false;
}

}  // namespace

Ranks* ranks() {
  return joined().ranks.get();
}

void join_ranks(int argc, char** argv) {
  if (!several_started()) return;
  joined().ranks = connect_ranks(patience());
  Ranks& all = *joined().ranks;
  if (all.rank() > 0) silence(STDERR_FILENO);
  expect_verb(argc, argv);
  expect_same_arguments(all, argc, argv);
  expect_alike(all);
}

void tell_ranks(const std::string& failure) {
  joined().failure = failure;
  if (Ranks* const all = ranks(); all != nullptr && !all->other_failed()) all->fail(failure);
}

int leave_ranks(int exit_code) {
  Ranks* const all = ranks();
  if (all == nullptr) return exit_code;
  if (exit_code == 0) {
    try {
      all->finish();
      return exit_code;
    } catch (const std::exception& error) {
      exit_code = 1;
      tell_ranks(error.what());
      if (all->rank() == 0) std::cerr << fmt::format("lodestone: {}\n", excerpt(error.what(), 1000));
    }
  }
  std::cout.flush();
  if (all->rank() == 0) {
    all->tell_spoken();
  } else if (!rank_0_speaks(*all)) {
    const std::string line = fmt::format("lodestone: rank {}: {}\n", all->rank(), joined().failure);
    if (write(joined().own_stderr, line.data(), line.size()) < 0) exit_code = 1;
  }
  all->abort(exit_code);
  return exit_code;
}

void settle_output() {
  using std::chrono::milliseconds;
  if (ranks() == nullptr || ranks()->rank() > 0) return;
  for (const int fd : {STDOUT_FILENO, STDERR_FILENO}) {
    int unread = 0;
    for (int look = 0; look < 100 && ioctl(fd, FIONREAD, &unread) == 0 && unread > 0; ++look)
      std::this_thread::sleep_for(milliseconds(2));
  }
  std::this_thread::sleep_for(milliseconds(10));  // for the launcher to write what it has read
}

bool next_line(std::string& line) {
  Ranks* const all = ranks();
  if (all == nullptr) return static_cast<bool>(std::getline(std::cin, line));
  std::string said;
  if (all->rank() == 0 && std::getline(std::cin, line)) said = "+" + line;
  said = all->broadcast(said);
  if (said.empty()) return false;
  line = said.substr(1);
  return true;
}

}  // namespace lode::cli
