// SPDX-License-Identifier: Apache-2.0
// The parts of the module.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

namespace lode {
class ThreadPool;
}

namespace lode::python {

namespace nb = nanobind;

void bind_attention(nb::module_& m);
void bind_selector(nb::module_& m);
void bind_documents(nb::module_& m);

/// The threads that attention functions and selectors share, made when they are first needed.
std::shared_ptr<ThreadPool> shared_threads();

}  // namespace lode::python
