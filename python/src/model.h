// SPDX-License-Identifier: Apache-2.0
// Models and documents as Python holds them, and how threads that wait for them keep Python going.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/batch.h"
#include "lodestone/chat.h"
#include "lodestone/document.h"
#include "lodestone/scheduler.h"
#include "lodestone/spec.h"
#include "module.h"

namespace lode::python {

/// A model and the scheduler that answers for it.
struct PyModel {
  std::shared_ptr<const Model> model;
  Device device = Device::cpu;             ///< of its documents
  std::shared_ptr<const GpuModel> on_gpu;  ///< its weights there; null: on the CPU
  std::shared_ptr<Scheduler> scheduler;
  OfProcess process;

  static std::shared_ptr<PyModel> load(const std::string& path, const std::string& device, int threads);
  PyModel() = default;
  PyModel(const PyModel&) = delete;
  PyModel& operator=(const PyModel&) = delete;
  /// In a fork there are no threads to wait for.
  ~PyModel();

  /// What ask(scheduler) gives, with the GIL released; RunError in a fork and behind end().
  template <class Ask>
  auto asked(const Ask& ask) const {
    process.check("Model");
    if (scheduler == nullptr) throw RunError("Model: expected a program that goes on, found one that ends");
    std::shared_ptr<Scheduler> held = scheduler;
    const nb::gil_scoped_release release;
    const std::shared_ptr<Scheduler> last = std::move(held);  // goes before the GIL is taken again
    return ask(*last);
  }
  void cancel(std::uint64_t id) const {
    if (process.here() && scheduler != nullptr) scheduler->cancel(id);
  }
  /// Ends what is under way and waits for it, with the GIL released: the scheduler's threads may be in Python code.
  void end();
};

struct PyDocument {
  std::shared_ptr<PyModel> owner;
  std::shared_ptr<const Document> document;
  std::vector<std::string> remarks;  ///< what the user should know of how it was read

  PyDocument(std::shared_ptr<PyModel> owner_, std::shared_ptr<const Document> document_)
      : owner(std::move(owner_)), document(std::move(document_)) {}
  PyDocument(const PyDocument&) = delete;
  PyDocument& operator=(const PyDocument&) = delete;
  ~PyDocument();

  /// RunError in a fork.
  const Document& here() const {
    owner->process.check("Document");
    return *document;
  }
};

/// Waits for a ticket with the GIL released; Ctrl-C cancels the job.
template <class Result>
Result wait_for(PyModel& owner, const Ticket<Result>& ticket) {
  InCallback::check_outside();
  for (;;) {
    {
      const nb::gil_scoped_release release;
      if (ticket.result.wait_for(std::chrono::milliseconds(50)) == std::future_status::ready) break;
    }
    if (PyErr_CheckSignals() != 0) {
      owner.cancel(ticket.id);
      {
        const nb::gil_scoped_release release;
        ticket.result.wait();
      }
      throw nb::python_error();
    }
  }
  return ticket.result.get();
}

std::vector<Spec> parse_specs(const std::vector<std::string>& texts);
/// A spec, `auto`, or none: as the document is asked usually (usual_attention).
Spec attention_of(const Document& document, const std::optional<std::string>& attention);
/// None: as the chat template is there or not.
ChatUse chat_use(const std::optional<bool>& chat);
/// What Python calls the settings of chat templates.
extern const ChatNames kArguments;

}  // namespace lode::python
