// SPDX-License-Identifier: Apache-2.0
// The parts of the module.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "lodestone/error.h"

namespace lode {
class ThreadPool;
}

namespace lode::python {

namespace nb = nanobind;

void bind_cuda_array(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_plan(nb::module_& m);
void bind_selector(nb::module_& m);
void bind_method(nb::module_& m);
void bind_models(nb::module_& m);
void bind_documents(nb::module_& m);
void bind_answers(nb::module_& m);
void bind_sequence(nb::module_& m);
void bind_evaluation(nb::module_& m);

/// The process that made an object whose threads a fork leaves behind.
class OfProcess {
 public:
  bool here() const { return pid_ == getpid(); }
  /// RunError in a child of that process.
  void check(const char* what) const {
    if (!here())
      throw RunError(std::string(what) +
                     ": expected to be used in the process that made it, found a fork of it, where its "
                     "threads do not run; make it anew in the child");
  }

 private:
  pid_t pid_ = getpid();
};

/// Held by a thread of the library while it runs Python's code: a method's, or a progress function. A model that this
/// code asked might wait for the code itself, so none is asked from there.
class InCallback {
 public:
  InCallback() { ++depth_; }
  ~InCallback() { --depth_; }
  InCallback(const InCallback&) = delete;
  InCallback& operator=(const InCallback&) = delete;
  /// RunError in such code.
  static void check_outside() {
    if (depth_ > 0)
      throw RunError(
          "expected no question and no text to read from within a method or a progress function, which a "
          "model "
          "waits for; ask when it has returned");
  }

 private:
  static inline thread_local int depth_ = 0;
};

/// The threads that attention functions and selectors share, made when they are first needed.
std::shared_ptr<ThreadPool> shared_threads();

}  // namespace lode::python
