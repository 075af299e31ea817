// SPDX-License-Identifier: Apache-2.0
// A layer's selector over arrays on a GPU: what a build with CUDA does (gpu_selector.cc), and one without refuses
// (no_gpu_calls.cc). Work is enqueued in the caller's stream; what waits for it says so.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "arrays.h"
#include "gpu_calls.h"
#include "lodestone/selector.h"
#include "lodestone/spec.h"

namespace lode::python {

/// What rows() says where none lie on a GPU.
inline constexpr const char* kNoRowsOnGpu =
    "rows: expected a selector that was built on a GPU, found another: on the CPU keys and values lie in the "
    "caller's arrays alone";

class SelectorOnGpu {
 public:
  /// What belongs to the selector on the host, and outlives this; `mutex` is taken without the GIL.
  struct Host {
    const Spec& spec;
    const LayerGeometry& geometry;
    Selector& selector;
    std::mutex& mutex;
  };

  explicit SelectorOnGpu(const Host& host);
  ~SelectorOnGpu();
  SelectorOnGpu(const SelectorOnGpu&) = delete;
  SelectorOnGpu& operator=(const SelectorOnGpu&) = delete;

  /// Nothing before a call has brought keys.
  std::optional<int> device() const { return device_; }
  std::int64_t bytes() const;

  void forget();
  void build(const ArrayArgument& k, const ArrayArgument& v, const GpuOptions& options);
  void roll_back(std::int64_t tokens);
  /// Keys and values [Hkv, S, d] from token `first` on.
  struct Keys {
    const ArrayArgument &k, &v;
    std::int64_t first = 0;
  };
  /// Output [T, Hq, d], or with `return_lse` a state.
  nb::object attend(const ArrayArgument& q, std::int64_t begin, const Keys& keys, bool return_lse,
                    const GpuOptions& options);
  nb::object select(const ArrayArgument& q, std::int64_t begin, const Keys& keys, const GpuOptions& options);
  /// A copy of the rows that lie there, as NumPy arrays. InputError where none do.
  std::pair<NumpyRows, NumpyRows> rows(nb::handle stream);
  /// For selectors that hear queries alone (HearsQueries).
  void observe(const ArrayArgument& q, std::int64_t begin, const GpuOptions& options);
  /// Without the GIL, with the layers' mutexes taken; `run` as LayerSelector::finish has it.
  static void finish(std::span<SelectorOnGpu* const> layers, int device, std::uintptr_t stream,
                     const std::function<void(const std::function<KvLayer(int)>&)>& run);

 private:
  struct Layer;
  struct Call;

  Host host_;
  std::optional<int> device_;
  std::unique_ptr<Layer> layer_;
};

}  // namespace lode::python
