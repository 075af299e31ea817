// SPDX-License-Identifier: Apache-2.0
// Signals wait while code runs that uses the stack pointer as a register.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace lode {

/// This thread takes no signal as long as this lives, but those that its own instructions raise. A handler's
/// frame is written below the stack pointer: where generated code keeps a buffer's address in it, as oneDNN's
/// products of float32 seem to do, that is the middle of the heap.
class HoldSignals {
 public:
  HoldSignals() {
    sigset_t held;
    sigfillset(&held);
    for (const int raised : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&held, raised);
    pthread_sigmask(SIG_BLOCK, &held, &before_);
  }
  ~HoldSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  HoldSignals(const HoldSignals&) = delete;
  HoldSignals& operator=(const HoldSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace lode
