// SPDX-License-Identifier: Apache-2.0
// Attention methods written in Python: an object for each layer, which indexes keys and names rows for queries.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>

#include "arrays.h"
#include "lodestone/error.h"
#include "lodestone/register_method.h"
#include "lodestone/spec.h"
#include "module.h"

namespace lode::python {

namespace {

using Floats = nb::ndarray<nb::numpy, float>;

float number_at(const KvRows& rows, std::int64_t row, int i) {
  const std::int64_t at = row * rows.d + i;
  if (rows.type == DType::f32) return reinterpret_cast<const float*>(rows.k)[at];
  if (rows.type == DType::f16) return to_float(reinterpret_cast<const f16*>(rows.k)[at]);
  if (rows.type == DType::bf16) return to_float(reinterpret_cast<const bf16*>(rows.k)[at]);
  if (rows.type == DType::q8)
    return static_cast<float>(reinterpret_cast<const std::int8_t*>(rows.k)[at]) * rows.k_scale[row];
  throw InputError("a method in Python: expected keys of f32, f16, bf16 or q8, found " +
                   std::string(name_of(rows.type)));
}

/// A head's keys [S, d] as float32: Python may keep them.
Floats keys_of(const KvRows& rows) {
  std::vector<float> keys;
  keys.reserve(static_cast<std::size_t>(rows.rows * rows.d));
  for (std::int64_t row = 0; row < rows.rows; ++row)
    for (int i = 0; i < rows.d; ++i) keys.push_back(number_at(rows, row, i));
  return numpy(std::move(keys), {static_cast<std::size_t>(rows.rows), static_cast<std::size_t>(rows.d)});
}

class PyMethod final : public Selector {
 public:
  /// Takes a reference to `object`; the GIL is held.
  PyMethod(nb::object object, const LayerGeometry& geometry, std::string name)
      : object_(object.release().ptr()), geometry_(geometry), name_(std::move(name)) {}
  PyMethod(const PyMethod&) = delete;
  PyMethod& operator=(const PyMethod&) = delete;
  ~PyMethod() override {
    if (!process_.here() || Py_IsInitialized() == 0) return;
    const nb::gil_scoped_acquire acquire;
    Py_DECREF(object_);
  }

  void build(std::int32_t, KvLayer kv) override {
    const nb::gil_scoped_acquire acquire;
    const InCallback mark;
    nb::list keys;
    for (const KvRows& head : kv.heads) keys.append(nb::cast(keys_of(head)));
    me().attr("build")(keys);
  }

  void select(std::span<const QueryBlock> blocks, Selection& out) override {
    const nb::gil_scoped_acquire acquire;
    const InCallback mark;
    for (const QueryBlock& block : blocks)
      for (std::int64_t t = 0; t < block.tokens; ++t)
        for (int head = 0; head < geometry_.kv_heads; ++head) select(block, t, head, out);
  }

  // Keys that leave the window behind the document are not offered to Python: a branch has its own.
  void append(std::int32_t, KvLayer, Position) override {}
  void roll_back(std::int32_t, std::int64_t) override {}
  void save(std::int32_t, SectionWriter&) const override {}
  void load(std::int32_t sequence, SectionReader&, KvLayer kv) override { build(sequence, kv); }
  std::int64_t index_bytes() const override { return 0; }

 private:
  nb::handle me() const { return {object_}; }

  void select(const QueryBlock& block, std::int64_t t, int head, Selection& out) {
    const auto group = static_cast<std::size_t>(geometry_.group()),
               d = static_cast<std::size_t>(geometry_.head_dim);
    const auto token = static_cast<std::int32_t>(t);
    const auto first =
        block.q.begin() + static_cast<std::ptrdiff_t>(
                              (static_cast<std::size_t>(t) * static_cast<std::size_t>(geometry_.query_heads) +
                               static_cast<std::size_t>(head) * group) *
                              d);
    Floats queries =
        numpy(std::vector<float>(first, first + static_cast<std::ptrdiff_t>(group * d)), {group, d});
    const Position end = block.far_end(t, geometry_.dense);
    std::vector<Position> rows;
    if (end > block.far_begin)
      rows =
          rows_of(me().attr("select")(head, nb::cast(queries), block.far_begin, end), block.far_begin, end);
    out.add_set({block.sequence, head, all_heads(geometry_.group()), token, token + 1});
    out.add_rows(rows);
  }

  /// What select() returned, rising and each once. InputError when it is no array of rows in [begin, end).
  std::vector<Position> rows_of(const nb::object& given, Position begin, Position end) const {
    nb::ndarray<nb::ro, nb::ndim<1>, nb::device::cpu> array;
    std::vector<Position> rows;
    if (!nb::try_cast(given, array, false))
      refuse("an int32 or int64 array [n] of row numbers from select()",
             nb::cast<std::string>(nb::str(given.type().attr("__name__"))));
    for (std::size_t i = 0; i < array.shape(0); ++i) {
      const std::int64_t at = static_cast<std::int64_t>(i) * array.stride(0);
      std::int64_t row = 0;
      if (array.dtype() == nb::dtype<std::int64_t>()) {
        row = static_cast<const std::int64_t*>(array.data())[at];
      } else if (array.dtype() == nb::dtype<std::int32_t>()) {
        row = static_cast<const std::int32_t*>(array.data())[at];
      } else {
        refuse("an int32 or int64 array from select()", "another type of number");
      }
      if (row < begin || row >= end)
        refuse("rows from " + std::to_string(begin) + " to " + std::to_string(end - 1) + " from select()",
               std::to_string(row));
      rows.push_back(static_cast<Position>(row));
    }
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    return rows;
  }

  [[noreturn]] void refuse(const std::string& expected, const std::string& found) const {
    throw InputError(name_ + ": expected " + expected + ", found " + found);
  }

  PyObject* object_;  ///< owned; a handle would be freed without the GIL
  LayerGeometry geometry_;
  std::string name_;
  OfProcess process_;
};

/// InputError when a layer cannot ask it for what it needs.
void check_parts(nb::handle object, const std::string& method) {
  const nb::handle type = object.type();
  for (const char* part : {"build", "select"}) {
    const nb::object found = nb::steal(PyObject_GetAttrString(object.ptr(), part));
    if (!found.is_valid() && PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw nb::python_error();
    PyErr_Clear();
    if (!found.is_valid() || PyCallable_Check(found.ptr()) == 0)
      throw InputError(
          method + ": expected objects with build(keys) and select(head, queries, begin, end), found " +
          nb::cast<std::string>(nb::str(type.attr("__name__"))) + " without " + part + "(); add it");
  }
}

/// Makes the object of one layer.
using Factory = nb::typed<nb::callable, nb::object(...)>;

void register_python(const std::string& name, Factory make, const std::map<std::string, std::string>& options,
                     const std::string& source) {
  MethodInfo info;
  info.name = name;
  info.source = source;
  for (const auto& [key, meaning] : options) info.keys.push_back({key, meaning, ""});
  // The list of methods outlives the interpreter, and so keeps its reference for good.
  PyObject* const factory = make.release().ptr();
  info.make = [factory, name](const Spec& spec, const LayerGeometry& geometry, std::string_view) {
    const nb::gil_scoped_acquire acquire;
    const InCallback mark;
    nb::dict given;
    for (const auto& [key, value] : spec.given)
      if (key != "sink" && key != "window" && key != "dense_layers") given[key.c_str()] = value;
    nb::object object = nb::handle(factory)(
        nb::arg("layer") = geometry.layer, nb::arg("query_heads") = geometry.query_heads,
        nb::arg("kv_heads") = geometry.kv_heads, nb::arg("head_dim") = geometry.head_dim, **given);
    check_parts(object, name);
    return std::make_unique<PyMethod>(std::move(object), geometry, name);
  };
  register_method(std::move(info));
}

}  // namespace

void bind_method(nb::module_& m) {
  m.def("_register_method", &register_python, nb::arg("name"), nb::arg("make"), nb::arg("options"),
        nb::arg("source"));
}

}  // namespace lode::python
