// SPDX-License-Identifier: Apache-2.0
#include "arrays.h"

#include <utility>

#include "exchange.h"

namespace lode::python {

namespace {

void check_dimensions(const Array& array, Name name) {
  if (array.ndim() != 3)
    throw nb::value_error(
        (std::string(name) + ": expected [KV heads, tokens, d], found " + shape_text(array)).c_str());
}

void check_rows(const Array& array, Name name) {
  const auto d = static_cast<std::int64_t>(array.shape(2));
  if (array.shape(1) > 0 && (array.stride(2) != 1 || (array.shape(1) > 1 && array.stride(1) != d)))
    throw nb::value_error((std::string(name) +
                           ": expected the rows of a head side by side, found other strides; "
                           "make the array contiguous in its last two dimensions")
                              .c_str());
}

void check_order(const Array& array, std::size_t dims, Name name) {
  if (array.ndim() != dims)
    throw nb::value_error(
        (std::string(name) + ": expected " + std::to_string(dims) + " dimensions, found " + shape_text(array))
            .c_str());
  if (!in_c_order(array))
    throw nb::value_error((std::string(name) + ": expected a contiguous array").c_str());
}

/// An array of T in C order.
template <class T>
std::span<const T> numbers(const Array& array, std::size_t dims, Name name, const char* type) {
  if (array.dtype() != nb::dtype<T>())
    throw nb::type_error(
        (std::string(name) + ": expected " + type + ", found " + type_name(array.dtype())).c_str());
  check_order(array, dims, name);
  return {static_cast<const T*>(array.data()), array.size()};
}

}  // namespace

std::string type_name(nb::dlpack::dtype type) {
  using Code = nb::dlpack::dtype_code;
  const std::pair<Code, const char*> names[] = {{Code::Int, "int"},         {Code::UInt, "uint"},
                                                {Code::Float, "float"},     {Code::Bfloat, "bfloat"},
                                                {Code::Complex, "complex"}, {Code::Bool, "bool"}};
  for (const auto& [code, name] : names)
    if (type.code == static_cast<std::uint8_t>(code))
      return code == Code::Bool ? name : name + std::to_string(type.bits);
  return "another type of number";
}

DType float_type(const Array& array, Name name) {
  const nb::dlpack::dtype type = array.dtype();
  if (type == nb::dtype<float>()) return DType::f32;
  if (type.lanes == 1 && type.bits == 16) {
    if (type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float)) return DType::f16;
    if (type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat)) return DType::bf16;
  }
  throw nb::type_error(
      (std::string(name) + ": expected float32, float16 or bfloat16, found " + type_name(type)).c_str());
}

DType check_float_vectors(const Array& array, std::size_t dims, Name name) {
  const DType type = float_type(array, name);
  check_order(array, dims, name);
  return type;
}

nb::dlpack::dtype numpy_type(DType type) {
  using Code = nb::dlpack::dtype_code;
  const Code code = type == DType::bf16 ? Code::UInt : Code::Float;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * bytes_of(type)), 1};
}

NumpyRows numpy_rows(std::vector<char> numbers, const std::vector<std::size_t>& shape, DType type) {
  auto* const owned = new std::vector<char>(std::move(numbers));
  const nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<char>*>(p); });
  return NumpyRows(owned->data(), shape.size(), shape.data(), owner, nullptr, numpy_type(type));
}

std::optional<int> gpu_of(const ArrayArgument& argument) {
  constexpr long kManaged = 13;  // DLPack's kDLCUDAManaged
  long type = 0, device = 0;
  if (const auto seen = exchanged(argument.object)) {
    type = seen->tensor.device.device_type;
    if (type != nb::device::cuda::value && type != kManaged) return std::nullopt;
    return seen->tensor.device.device_id;
  }
  try {
    if (!nb::hasattr(argument.object, "__dlpack_device__")) return std::nullopt;
    const nb::object place = argument.object.attr("__dlpack_device__")();
    if (!nb::isinstance<nb::tuple>(place) || nb::len(place) != 2) return std::nullopt;
    type = PyLong_AsLong(nb::object(place[0]).ptr());  // some give enumerations
    device = PyLong_AsLong(nb::object(place[1]).ptr());
  } catch (const nb::python_error&) {
    return std::nullopt;  // array_of says what it is not
  }
  PyErr_Clear();
  if (type != nb::device::cuda::value && type != kManaged) return std::nullopt;
  return static_cast<int>(device);
}

bool in_c_order(const Array& array) {
  std::int64_t stride = 1;
  for (std::size_t i = array.ndim(); i-- > 0; stride *= static_cast<std::int64_t>(array.shape(i)))
    if (array.shape(i) > 1 && array.stride(i) != stride) return array.size() == 0;
  return true;
}

Array array_of(const ArrayArgument& argument, Name name) {
  Array array;
  if (const auto seen = exchanged(argument.object)) {
    array = view_of<Array>(*seen, argument.object);
  } else if (!nb::try_cast(argument.object, array, false)) {
    PyErr_Clear();  // what a __dlpack__ raised
    throw nb::type_error(
        (std::string(name) +
         ": expected an array (of NumPy in this machine's byte order, or with __dlpack__, without "
         "gradients), found " +
         nb::str(argument.object.type().attr("__name__")).c_str())
            .c_str());
  }
  if (array.data() == nullptr && array.size() > 0)
    throw nb::type_error(
        (std::string(name) + ": expected an array with memory, found one that only stands for one").c_str());
  if (array.device_type() != nb::device::cpu::value)
    throw nb::value_error((std::string(name) +
                           ": expected an array in the CPU's memory, found one on another device; copy it "
                           "to the CPU first")
                              .c_str());
  return array;
}

std::string shape_text(const Array& array) {
  std::string text = "[";
  for (std::size_t i = 0; i < array.ndim(); ++i) text += (i > 0 ? ", " : "") + std::to_string(array.shape(i));
  return text + "]";
}

std::span<const float> floats(const Array& array, std::size_t dims, Name name) {
  return numbers<float>(array, dims, name, "float32");
}

std::span<const std::int32_t> int32s(const Array& array, std::size_t dims, Name name) {
  return numbers<std::int32_t>(array, dims, name, "int32");
}

std::vector<std::size_t> shape_of(const Array& array) {
  std::vector<std::size_t> shape;
  for (std::size_t i = 0; i < array.ndim(); ++i) shape.push_back(array.shape(i));
  return shape;
}

DType check_keys_and_values(const Array& k, const Array& v) {
  check_dimensions(k, "k");
  check_dimensions(v, "v");
  for (std::size_t i = 0; i < 3; ++i)
    if (k.shape(i) != v.shape(i))
      throw nb::value_error(
          ("k and v: expected equal shapes, found " + shape_text(k) + " and " + shape_text(v)).c_str());
  const DType type = float_type(k, "k");
  if (float_type(v, "v") != type) throw nb::type_error("k and v: expected one type of number, found two");
  return type;
}

std::vector<KvRows> kv_heads(const Array& k, const Array& v, std::int64_t tokens) {
  const DType type = check_keys_and_values(k, v);
  check_rows(k, "k");
  check_rows(v, "v");
  const auto rows = static_cast<std::int64_t>(k.shape(1));
  if (tokens > rows)
    throw nb::value_error(
        ("k: expected " + std::to_string(tokens) + " tokens or more, found " + std::to_string(rows)).c_str());
  std::vector<KvRows> heads;
  for (std::size_t h = 0; h < k.shape(0); ++h) {
    const auto at = [&](const Array& array) {
      return static_cast<const std::byte*>(array.data()) +
             static_cast<std::int64_t>(h) * array.stride(0) * bytes_of(type);
    };
    heads.push_back({.type = type,
                     .k = at(k),
                     .v = at(v),
                     .rows = tokens < 0 ? rows : tokens,
                     .d = static_cast<int>(k.shape(2))});
  }
  return heads;
}

}  // namespace lode::python
