// SPDX-License-Identifier: Apache-2.0
// Arrays of others (NumPy, PyTorch, JAX, CuPy by DLPack) as the library's views, without a copy, and results as
// NumPy arrays.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>
#include <vector>

#include "lodestone/kv_view.h"
#include "lodestone/types.h"

namespace lode::python {

namespace nb = nanobind;

using Array = nb::ndarray<nb::ro>;

/// What an error message calls an array: "k", "queries".
using Name = const char*;

/// An argument that is to be an array; array_of looks whether it is one.
struct ArrayArgument {
  nb::object object;
};

/// The GPU that an array of CUDA's lies on, by its own word; nothing for all else.
std::optional<int> gpu_of(const ArrayArgument& argument);

/// Whether an array is contiguous, its last dimension first.
bool in_c_order(const Array& array);

/// A view of an argument's memory, which it keeps alive. TypeError, which names the argument, when it is no array, and
/// ValueError when its memory is not the CPU's.
Array array_of(const ArrayArgument& argument, Name name);

/// A float32 array of `dims` dimensions in C order; TypeError or ValueError otherwise.
std::span<const float> floats(const Array& array, std::size_t dims, Name name);
/// The same of int32.
std::span<const std::int32_t> int32s(const Array& array, std::size_t dims, Name name);

/// As NumPy writes it: "float64".
std::string type_name(nb::dlpack::dtype type);
/// TypeError for others than f32, f16 and bf16.
DType float_type(const Array& array, Name name);
/// An array of these types, of `dims` dimensions in C order, and which it is; TypeError or ValueError otherwise.
DType check_float_vectors(const Array& array, std::size_t dims, Name name);
/// Keys and values are to be [Hkv, S, d], alike in shape and type, which this returns.
DType check_keys_and_values(const Array& k, const Array& v);

/// Keys and values [Hkv, S, d] of f32, f16 or bf16, one view a head. Rows of a head lie side by side; heads may
/// lie anywhere (a slice of a larger buffer is fine). The first `tokens` rows, or all when it is negative.
std::vector<KvRows> kv_heads(const Array& k, const Array& v, std::int64_t tokens = -1);

/// A NumPy array that owns `data`.
template <class T>
nb::ndarray<nb::numpy, T> numpy(std::vector<T> data, const std::vector<std::size_t>& shape) {
  auto* const owned = new std::vector<T>(std::move(data));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(owned->data(), shape.size(), shape.data(), owner);
}

/// f32, f16, or bf16, whose bits NumPy sees as uint16.
nb::dlpack::dtype numpy_type(DType type);
/// A NumPy array of keys or values that owns `numbers`.
using NumpyRows = nb::ndarray<nb::numpy>;
NumpyRows numpy_rows(std::vector<char> numbers, const std::vector<std::size_t>& shape, DType type);

std::string shape_text(const Array& array);
std::vector<std::size_t> shape_of(const Array& array);

}  // namespace lode::python

namespace nanobind::detail {

/// Takes any object: the function that wants an array says what is wrong with it. Type checkers see ArrayLike.
template <>
struct type_caster<lode::python::ArrayArgument> {
  NB_TYPE_CASTER(lode::python::ArrayArgument, const_name("lodestone.ArrayLike"))
  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    value.object = borrow(source);
    return !source.is_none();
  }
};

}  // namespace nanobind::detail
