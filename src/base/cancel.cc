// SPDX-License-Identifier: Apache-2.0
#include "base/cancel.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "lodestone/error.h"

namespace lode {

namespace {

constexpr int kInterruptedExit = 130;
std::atomic<bool> requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler may only touch lock-free atomics");

void on_signal(int) {
  if (requested.exchange(true)) _exit(kInterruptedExit);
}

}  // namespace

void install_cancel_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);  // no SA_RESTART: a blocked read returns, so that the flag is seen
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  // A terminal that closes; unless the program was told to outlive it (nohup).
  struct sigaction before = {};
  if (sigaction(SIGHUP, nullptr, &before) == 0 && before.sa_handler != SIG_IGN)
    sigaction(SIGHUP, &action, nullptr);
}

bool cancel_requested() noexcept {
  return requested.load(std::memory_order_relaxed);
}

void check_cancel() {
  if (cancel_requested()) throw Interrupted();
}

void set_cancel(bool on) noexcept {
  requested.store(on);
}

}  // namespace lode
