// SPDX-License-Identifier: Apache-2.0
#include "base/fatal_signals.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace lode {

namespace {

std::atomic<int> output{STDERR_FILENO};
struct sigaction before;  // of SIGSEGV: a sanitizer's, or the default

/// The first thread to come here speaks; the others wait for its exit, so that the sentence comes once.
[[noreturn]] void leave(std::string_view sentence) {
  constexpr int kFailed = 1;
  static std::atomic_flag said;
  while (said.test_and_set()) pause();
  const ssize_t written = write(output, sentence.data(), sentence.size());
  static_cast<void>(written);
  _exit(kFailed);
}

/// By whichever thread looks first at pages that are gone.
void on_bus_error(int) {
  leave(
      "lodestone: a file that was in use can no longer be read: another program cut it short, or its disk "
      "fails\n");
}

/// Bytes of address space that this process has; 0 when nobody says. Safe in a signal handler.
std::uint64_t address_space_used() {
  const int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  std::array<char, 64> text = {};
  const ssize_t length = read(file, text.data(), text.size() - 1);
  close(file);
  std::uint64_t pages = 0;
  for (ssize_t i = 0; i < length && text[static_cast<std::size_t>(i)] >= '0'; ++i)
    pages = 10 * pages + static_cast<std::uint64_t>(text[static_cast<std::size_t>(i)] - '0');
  return pages * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
}

/// What is left is less than allocators and loaders ask for at once.
bool address_space_is_used_up() {
  constexpr std::uint64_t kLittle = std::uint64_t{64} << 20;
  rlimit limit = {};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return false;
  return address_space_used() + kLittle > limit.rlim_cur;
}

void on_memory_fault(int signal, siginfo_t* info, void*) {
  if (address_space_is_used_up())
    leave("lodestone: out of memory: the address space that the process may have (ulimit -v) is used up\n");
  // An instruction is run again, and ends the program as it would have; a signal that was sent has to be sent again.
  sigaction(signal, &before, nullptr);
  if (info->si_code <= 0) raise(signal);
}

}  // namespace

void install_fatal_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_bus_error;
  sigfillset(&action.sa_mask);
  sigaction(SIGBUS, &action, nullptr);
  // A stack that cannot grow has no room for the handler.
  static std::array<std::byte, 16384> stack;
  const stack_t other = {.ss_sp = stack.data(), .ss_flags = 0, .ss_size = stack.size()};
  sigaltstack(&other, nullptr);
  action.sa_sigaction = on_memory_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &before);
}

void set_fatal_output(int fd) noexcept {
  output = fd;
}

}  // namespace lode
