// SPDX-License-Identifier: Apache-2.0
#include "cuda_array.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <numeric>
#include <string>

#include "arrays.h"
#include "module.h"

namespace lode::python {

std::size_t CudaArray::bytes() const {
  const std::size_t numbers =
      std::accumulate(shape_.begin(), shape_.end(), std::size_t{1}, std::multiplies<>());
  return numbers * type_.bits * type_.lanes / 8;
}

namespace {

std::uintptr_t checked_handle(nb::handle number) {
  unsigned long long handle = 0;
  if (PyLong_Check(number.ptr()) == 0 || !nb::try_cast(number, handle))
    throw nb::type_error("stream: expected CUDA's handle of it as an int of 0 or more, found another object");
  return handle == 1 ? 0
                     : static_cast<std::uintptr_t>(handle);  // DLPack's number for the legacy default stream
}

}  // namespace

std::uintptr_t stream_handle(nb::handle stream) {
  if (stream.is_none()) return 0;
  if (PyLong_Check(stream.ptr()) != 0) return checked_handle(stream);
  for (const char* name : {"cuda_stream", "ptr"})
    if (nb::hasattr(stream, name)) return checked_handle(stream.attr(name));
  if (nb::hasattr(stream, "__cuda_stream__")) {
    nb::object pair = stream.attr("__cuda_stream__");
    if (PyCallable_Check(pair.ptr()) != 0) pair = pair();
    if (nb::isinstance<nb::tuple>(pair) && nb::len(pair) == 2) return checked_handle(pair[1]);
  }
  throw nb::type_error(
      (std::string("stream: expected an int, or an object with cuda_stream (PyTorch), ptr (CuPy) or "
                   "__cuda_stream__, found ") +
       nb::str(stream.type().attr("__name__")).c_str())
          .c_str());
}

namespace {

/// The array as nanobind's own, which makes DLPack's capsules.
nb::object dlpack_of(nb::handle self, const nb::kwargs& wanted) {
  const auto& array = nb::cast<const CudaArray&>(self);
  nb::kwargs rest;
  for (const auto [key, value] : wanted) {
    if (nb::cast<std::string>(key) != "stream") {
      rest[key] = value;
    } else if (!PyLong_Check(value.ptr()) || nb::cast<std::int64_t>(value) != -1) {  // -1: the caller waits
      hold_up(array, stream_handle(value));
    }
  }
  if (!wanted.contains("stream")) hold_up(array, 0);
  const nb::ndarray<> seen(array.data(), array.shape().size(), array.shape().data(), self, nullptr,
                           array.type(), nb::device::cuda::value, array.device());
  return nb::cast(nb::ndarray<nb::array_api>(seen)).attr("__dlpack__")(**rest);
}

nb::object to_host(const CudaArray& array, nb::handle stream) {
  auto* const bytes = new std::vector<std::byte>(array.bytes());
  const nb::capsule owner(bytes, [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
  download(array, bytes->data(), stream);
  nb::dlpack::dtype type = array.type();
  if (type.code == static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat))  // which NumPy has not
    type.code = static_cast<std::uint8_t>(nb::dlpack::dtype_code::UInt);
  return nb::cast(nb::ndarray<nb::numpy>(bytes->data(), array.shape().size(), array.shape().data(), owner,
                                         nullptr, type));
}

std::string text_of(const CudaArray& array) {
  std::string text = "CudaArray(" + type_name(array.type()) + " [";
  for (std::size_t i = 0; i < array.shape().size(); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(array.shape()[i]);
  return text + "], GPU " + std::to_string(array.device()) + ")";
}

CudaArray to_device(const ArrayArgument& given, int device, nb::handle stream) {
  const Array array = array_of(given, "array");
  if (!in_c_order(array)) throw nb::value_error("array: expected a contiguous array");
  return upload(array, device, stream);
}

}  // namespace

void bind_cuda_array(nb::module_& m) {
  nb::class_<CudaArray>(m, "CudaArray",
                        "An array in C order on a GPU: what attention and top-k give for arrays there.\n\n"
                        "torch.from_dlpack, cupy.from_dlpack and jax.dlpack.from_dlpack take it without a "
                        "copy, and wait in their own\n"
                        "stream until it has been filled. Its memory goes back in the order of the stream "
                        "that it was made in: other\n"
                        "streams' work on it must have ended before it is dropped.")
      .def("__dlpack__", &dlpack_of, nb::arg("wanted"),
           nb::sig("def __dlpack__(self, **wanted: typing.Any) -> typing.Any"),
           "The array as DLPack's capsule, for work in stream=, CUDA's handle (None: the legacy default "
           "stream).")
      .def(
          "__dlpack_device__",
          [](const CudaArray& array) { return nb::make_tuple(nb::device::cuda::value, array.device()); },
          nb::sig("def __dlpack_device__(self) -> tuple[int, int]"),
          "(2, number of the GPU): DLPack's name for it.")
      .def("to_host", &to_host, nb::arg("stream") = nb::none(),
           nb::sig("def to_host(self, stream: lodestone.StreamLike | None = None) -> "
                   "numpy.typing.NDArray[typing.Any]"),
           "A copy as a NumPy array, of bfloat16 as uint16 with the same bits; waits for the stream and for "
           "what fills the\n"
           "array. RunError when the GPU failed.")
      .def_prop_ro(
          "shape", [](const CudaArray& array) { return nb::tuple(nb::cast(array.shape())); },
          nb::sig("def shape(self) -> tuple[int, ...]"), "As NumPy's.")
      .def_prop_ro(
          "dtype", [](const CudaArray& array) { return type_name(array.type()); },
          "The name of its type of number: float32, int32, ...")
      .def_prop_ro("device", &CudaArray::device, "The GPU's number, from 0.")
      .def("__repr__", &text_of);
  m.def("_to_device", &to_device, nb::arg("array"), nb::arg("device"), nb::arg("stream").none(),
        nb::sig(
            "def _to_device(array: lodestone.ArrayLike, device: int, stream: lodestone.StreamLike | None) -> "
            "CudaArray"));
  m.def("_gpu_count", &gpu_count);
}

}  // namespace lode::python
