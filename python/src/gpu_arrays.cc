// SPDX-License-Identifier: Apache-2.0
#include "gpu_arrays.h"

namespace lode::python {

namespace {

std::string place_text(std::optional<int> gpu) {
  return gpu ? "on GPU " + std::to_string(*gpu) : "in the CPU's memory or elsewhere";
}

}  // namespace

nb::object capsule_of(const nb::object& array, const Caller& caller, bool newest) {
  const cuda::OnDevice here(caller.at.device);  // producers ask for the current device and its stream
  const nb::object give = array.attr("__dlpack__");
  if (!newest) return give(nb::arg("stream") = caller.number());
  return give(nb::arg("stream") = caller.number(), nb::arg("max_version") = nb::make_tuple(1, 1));
}

void check_place(const ArrayArgument& argument, Name name, const Caller& caller) {
  const std::optional<int> gpu = gpu_of(argument);
  if (gpu == caller.at.device) return;
  if (!gpu) array_of(argument, name);  // what is no array at all is named so
  throw nb::value_error((std::string(name) + ": expected an array on GPU " +
                         std::to_string(caller.at.device) + ", where the others lie, found one " +
                         place_text(gpu))
                            .c_str());
}

void wait_for(std::uintptr_t stream, const Caller& caller) {
  const auto other = reinterpret_cast<cuda::StreamHandle>(stream);
  if (other == caller.at.stream) return;
  const cuda::OnDevice here(caller.at.device);
  cuda::Event reached;
  reached.record(other);
  reached.hold_up(caller.at.stream);
}

cuda::StridedKv strided(const Array& k, const Array& v, DType type) {
  for (const Array* array : {&k, &v})
    if (array->shape(2) > 1 && array->stride(2) != 1)
      throw nb::value_error(
          "k and v: expected the numbers of a row side by side, found other strides; make the "
          "array contiguous in its last dimension");
  const std::int64_t number = bytes_of(type);
  return {.k = static_cast<const char*>(k.data()),
          .v = static_cast<const char*>(v.data()),
          .k_head = k.stride(0) * number,
          .v_head = v.stride(0) * number,
          .k_row = k.stride(1) * number,
          .v_row = v.stride(1) * number,
          .rows = static_cast<std::int64_t>(k.shape(1))};
}

void check_shape(const Array& out, const std::vector<std::size_t>& shape) {
  if (shape_of(out) == shape) return;
  std::string text;
  for (const std::size_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  throw nb::value_error(("out: expected [" + text + "], found " + shape_text(out)).c_str());
}

DType checked_type(const Array& out, const std::vector<std::size_t>& shape, DType wanted) {
  if (wanted == DType::f32 || out.dtype() == nb::dtype<float>()) {
    floats(out, shape.size(), "out");
    wanted = DType::f32;
  } else if (out.dtype() == dlpack_type(wanted)) {
    check_float_vectors(out, shape.size(), "out");
  } else {
    throw nb::type_error(("out: expected float32 or " + type_name(dlpack_type(wanted)) + ", as q is, found " +
                          type_name(out.dtype()))
                             .c_str());
  }
  check_shape(out, shape);
  return wanted;
}

CudaArray new_array(std::shared_ptr<CudaMemory> memory, std::int64_t offset, std::vector<std::size_t> shape,
                    nb::dlpack::dtype type) {
  std::byte* const data = memory->memory.as<std::byte>();
  const int device = memory->caller.at.device;
  return {std::move(memory), data == nullptr ? nullptr : data + offset, std::move(shape), type, device};
}

std::int64_t product(const std::vector<std::size_t>& shape) {
  std::int64_t all = 1;
  for (const std::size_t n : shape) all *= static_cast<std::int64_t>(n);
  return all;
}

StateOut state_out(const Caller& caller, const std::vector<std::size_t>& rows, std::size_t d, bool wants_lse,
                   nb::handle out, DType type) {
  const cuda::OnDevice here(caller.at.device);
  return {caller, rows, d, wants_lse, out, type};
}

nb::dlpack::dtype dlpack_type(DType type) {
  using Code = nb::dlpack::dtype_code;
  const Code code = type == DType::bf16 ? Code::Bfloat : Code::Float;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * bytes_of(type)), 1};
}

}  // namespace lode::python
