// SPDX-License-Identifier: Apache-2.0
// Arrays of a caller's on a GPU, the stream that the caller works in, and memory for results. Of builds with CUDA alone.
#pragma once

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "cuda_array.h"
#include "exchange.h"
#include "gpu_calls.h"
#include "kernels/cuda/attend/attend_strided.h"
#include "kernels/cuda/device/caller.h"
#include "kernels/cuda/device/event.h"

namespace lode::python {

/// A stream of the caller's, and the object of it that Python holds, which keeps it alive.
struct Caller {
  cuda::CallerStream at;
  nb::object object;

  Caller(int device, nb::handle stream)
      : at{device, reinterpret_cast<cuda::StreamHandle>(stream_handle(stream))}, object(nb::borrow(stream)) {}
  /// As DLPack writes it.
  std::uintptr_t number() const {
    return at.stream == nullptr ? 1 : reinterpret_cast<std::uintptr_t>(at.stream);
  }
};

struct CudaMemory {
  Caller caller;
  cuda::StreamMemory memory;
  cuda::Event filled;

  /// The caller's device is current, and the GIL is held.
  CudaMemory(std::int64_t bytes, const Caller& of) : caller(of), memory(bytes, of.at) {}
  CudaMemory(cuda::StreamMemory made, const Caller& of) : caller(of), memory(std::move(made)) {}
  /// What the stream has been told until now fills it.
  void record() { filled.record(caller.at.stream); }
};

using Written = nb::ndarray<>;

/// The capsule that an array gives for work in the caller's stream.
nb::object capsule_of(const nb::object& array, const Caller& caller, bool newest);
/// ValueError, which names where an array lies that does not lie on the caller's GPU; TypeError for what is none.
void check_place(const ArrayArgument& argument, Name name, const Caller& caller);
/// Makes the caller's stream wait for what is enqueued in another one of its GPU.
void wait_for(std::uintptr_t stream, const Caller& caller);

/// A view of an argument on the caller's GPU. ValueError for arrays elsewhere, TypeError for what gives none.
template <class A>
A gpu_array(const ArrayArgument& argument, Name name, const Caller& caller) {
  constexpr bool kWritten = !std::is_same_v<A, Array>;
  const auto seen = exchanged(argument.object, kWritten);
  if (seen && seen->tensor.device.device_type == nb::device::cuda::value &&
      seen->tensor.device.device_id == caller.at.device) {
    wait_for(seen->stream, caller);
    return view_of<A>(*seen, argument.object);
  }
  if (CudaArray* own = nullptr;
      nb::try_cast(argument.object, own, false) && own->device() == caller.at.device) {
    hold_up(*own, reinterpret_cast<std::uintptr_t>(caller.at.stream));
    return A(own->data(), own->shape().size(), own->shape().data(), argument.object, nullptr, own->type(),
             nb::device::cuda::value, own->device());
  }
  check_place(argument, name, caller);
  // What may be written to is said by newer capsules alone, which older producers do not know.
  std::string why = "its memory is read-only";
  const std::string module = nb::str(argument.object.type().attr("__module__")).c_str();
  if (kWritten && module.starts_with("jax"))
    throw nb::type_error("out: expected an array that may change, found one of JAX");
  for (const bool newest : {kWritten, !kWritten}) {
    try {
      A array;
      if (nb::try_cast(capsule_of(argument.object, caller, newest), array, false)) return array;
      PyErr_Clear();
      break;  // read-only, or nothing that is known
    } catch (nb::python_error& error) {
      why = nb::str(error.value()).c_str();
      if (!error.matches(PyExc_TypeError)) break;
    }
  }
  throw nb::type_error((std::string(name) +
                        ": expected an array that gives its memory by __dlpack__, found " +
                        nb::str(argument.object.type().attr("__name__")).c_str() + ": " + why)
                           .c_str());
}

/// Keys and values of check_keys_and_values. ValueError unless the numbers of each row lie side by side.
cuda::StridedKv strided(const Array& k, const Array& v, DType type);

CudaArray new_array(std::shared_ptr<CudaMemory> memory, std::int64_t offset, std::vector<std::size_t> shape,
                    nb::dlpack::dtype type);
std::int64_t product(const std::vector<std::size_t>& shape);

/// ValueError unless an array for a result has this shape.
void check_shape(const Array& out, const std::vector<std::size_t>& shape);

/// The type of an array for a result of this shape in C order: `wanted`, or float32. TypeError for others.
DType checked_type(const Array& out, const std::vector<std::size_t>& shape, DType wanted);

/// An array of the caller's for a result: T in C order, of this shape.
template <class T>
T* checked_out(const Written& out, const std::vector<std::size_t>& shape) {
  const Array seen(out);
  if constexpr (std::is_same_v<T, float>)
    floats(seen, shape.size(), "out");
  else
    int32s(seen, shape.size(), "out");
  check_shape(seen, shape);
  return static_cast<T*>(out.data());
}

nb::dlpack::dtype dlpack_type(DType type);

/// Where a state goes: a new piece of memory, or arrays of the caller's. The output is of `type`; a given one may be
/// float32, too.
class StateOut {
 public:
  StateOut(const Caller& caller, std::vector<std::size_t> rows, std::size_t d, bool wants_lse, nb::handle out,
           DType wanted = DType::f32)
      : type(wanted),
        rows_(std::move(rows)),
        outputs_(rows_),
        wants_lse_(wants_lse),
        given_(nb::borrow(out)) {
    outputs_.push_back(d);
    if (!out.is_none()) {
      take(caller);
      return;
    }
    const std::int64_t bytes = product(outputs_) * bytes_of(type);
    lse_at_ = (bytes + 255) / 256 * 256;
    made_ = std::make_shared<CudaMemory>(
        lse_at_ + (wants_lse ? product(rows_) * std::int64_t{sizeof(float)} : 0), caller);
    output = made_->memory.as<void>();
    lse = wants_lse ? made_->memory.as<float>() + lse_at_ / std::int64_t{sizeof(float)} : nullptr;
  }

  /// Once the work has been enqueued.
  nb::object result() {
    if (made_ == nullptr) return given_;
    nb::object first = nb::cast(new_array(made_, 0, outputs_, dlpack_type(type)));
    if (!wants_lse_) return first;
    return nb::make_tuple(first, new_array(made_, lse_at_, rows_, nb::dtype<float>()));
  }
  void record() {
    if (made_ != nullptr) made_->record();
  }

  /// Of calls that take float32 alone.
  float* floats() const { return static_cast<float*>(output); }

  void* output = nullptr;
  float* lse = nullptr;
  DType type = DType::f32;  ///< of the output

 private:
  void take(const Caller& caller) {
    if (!wants_lse_) {
      written_.push_back(gpu_array<Written>({given_}, "out", caller));
    } else {
      StateArgument both;
      if (!nb::try_cast(given_, both, false))
        throw nb::type_error("out: expected a pair of arrays (output, log-sum-exp), found something else");
      written_.push_back(gpu_array<Written>(both.first, "out", caller));
      written_.push_back(gpu_array<Written>(both.second, "out", caller));
      lse = checked_out<float>(written_[1], rows_);
    }
    type = checked_type(Array(written_[0]), outputs_, type);
    output = written_[0].data();
  }

  std::vector<std::size_t> rows_, outputs_;
  bool wants_lse_;
  nb::object given_;
  std::vector<Written> written_;
  std::shared_ptr<CudaMemory> made_;
  std::int64_t lse_at_ = 0;
};

/// New memory is made before the GIL is given up, since it holds an object of Python's.
StateOut state_out(const Caller& caller, const std::vector<std::size_t>& rows, std::size_t d, bool wants_lse,
                   nb::handle out, DType type = DType::f32);

}  // namespace lode::python
