// SPDX-License-Identifier: Apache-2.0
#include "exchange.h"

#include <map>
#include <string_view>

namespace lode::python {

namespace {

/// DLPack 1.3, DLPackExchangeAPI, of version 1 whatever the minor one.
struct Table {
  struct {
    std::uint32_t major, minor;
  } version;
  Table* previous;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, nb::dlpack::dltensor* out);  ///< null: the library has none
  int (*current_stream)(std::int32_t device_type, std::int32_t device, void** out);
};

/// What a type offers; types are known for good, and kept alive.
struct Known {
  const Table* table = nullptr;  ///< null: nothing
  bool writable = false;         ///< whether every array of the library may be written to
};

/// A subclass may have memory of another kind: what it inherits does not count.
Known look_up(nb::handle type) {
  const nb::object own = nb::steal(PyObject_GetAttrString(type.ptr(), "__dict__"));
  if (!own.is_valid()) return PyErr_Clear(), Known{};
  const nb::object capsule = nb::steal(PyMapping_GetItemString(own.ptr(), "__dlpack_c_exchange_api__"));
  if (!capsule.is_valid()) return PyErr_Clear(), Known{};
  const auto* table = static_cast<const Table*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  PyErr_Clear();
  while (table != nullptr && table->version.major != 1) table = table->previous;
  if (table == nullptr || table->tensor_from_object == nullptr) return {};
  const std::string_view module = nb::str(type.attr("__module__")).c_str();
  return {table, module == "torch" || module.starts_with("torch.")};
}

const Known& known(nb::handle type) {
  static auto* const types = new std::map<PyObject*, Known>;  // never destroyed; the GIL guards it
  const auto at = types->find(type.ptr());
  if (at != types->end()) return at->second;
  return types->emplace(type.inc_ref().ptr(), look_up(type)).first->second;
}

bool wants_gradients(nb::handle array) {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  const nb::object wants = nb::steal(PyObject_GetAttr(array.ptr(), name));
  if (!wants.is_valid()) PyErr_Clear();
  return wants.is_valid() && wants.ptr() == Py_True;
}

}  // namespace

std::optional<Exchanged> exchanged(nb::handle array, bool written) {
  const Known& type = known(array.type());
  if (type.table == nullptr || (written && !type.writable) || wants_gradients(array)) return std::nullopt;
  Exchanged seen{};
  if (type.table->tensor_from_object(array.ptr(), &seen.tensor) != 0) return PyErr_Clear(), std::nullopt;
  const nb::dlpack::dltensor& t = seen.tensor;
  if (t.ndim < 0 || t.ndim > kMostDimensions || (t.strides == nullptr && t.ndim > 0)) return std::nullopt;
  if (t.device.device_type != nb::device::cpu::value) {
    void* stream = nullptr;
    if (type.table->current_stream(t.device.device_type, t.device.device_id, &stream) != 0)
      return PyErr_Clear(), std::nullopt;
    seen.stream = reinterpret_cast<std::uintptr_t>(stream);
  }
  return seen;
}

}  // namespace lode::python
