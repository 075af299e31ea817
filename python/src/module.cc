// SPDX-License-Identifier: Apache-2.0
// The module lodestone._core: exceptions, then the parts in the order of their files.
#include "module.h"

#include "lodestone/error.h"

namespace lode::python {

NB_MODULE(_core, m) {
  m.doc() = "Attention as vector retrieval over the KV cache.";
  // Raised last are tried first.
  nb::exception<RunError>(m, "RunError", PyExc_RuntimeError).doc() =
      "A failure of the machine: memory, disk, threads of a fork.";
  nb::exception<InputError>(m, "InputError", PyExc_ValueError).doc() =
      "Wrong input. Its sentence says what was expected, what was found and where.";
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Interrupted&) {
      PyErr_SetNone(PyExc_KeyboardInterrupt);
    }
  });
  bind_cuda_array(m);
  bind_attention(m);
  bind_plan(m);
  bind_selector(m);
  bind_method(m);
  bind_models(m);
  bind_documents(m);
  bind_answers(m);
  bind_sequence(m);
  bind_evaluation(m);
}

}  // namespace lode::python
