// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/launch_chain.h"

namespace lode::cuda {

namespace {

thread_local LaunchChain* chain_here = nullptr;

/// What the driver takes for a launch outside of a graph.
class LaunchConfig {
 public:
  LaunchConfig(const LaunchShape& shape, StreamHandle stream) {
    config_.gridDim = shape.grid;
    config_.blockDim = shape.block;
    config_.dynamicSmemBytes = shape.shared_bytes;
    config_.stream = stream;
    config_.attrs = attributes_;
    if (shape.early) {
      cudaLaunchAttribute& early = attributes_[config_.numAttrs++];
      early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      early.val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.cluster > 1) {
      cudaLaunchAttribute& cluster = attributes_[config_.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;
  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchAttribute attributes_[2] = {};
  cudaLaunchConfig_t config_ = {};
};

/// A launch and a copy of its arguments. Assigned to again and again, so that its memory is reused.
struct HeldLaunch {
  const void* kernel = nullptr;
  LaunchShape shape;
  std::vector<std::byte> bytes;      ///< of the arguments, one behind the other
  std::vector<std::size_t> offsets;  ///< where each begins
  std::vector<void*> places;         ///< the same as addresses, when the driver asks for them

  void assign(const LaunchShape& new_shape, const void* new_kernel,
              std::span<const KernelArgument> arguments) {
    kernel = new_kernel;
    shape = new_shape;
    bytes.clear();
    offsets.clear();
    for (const KernelArgument& argument : arguments) {
      offsets.push_back(bytes.size());
      const auto* const from = static_cast<const std::byte*>(argument.at);
      bytes.insert(bytes.end(), from, from + argument.bytes);
    }
  }
  void** addresses() {
    places.clear();
    for (const std::size_t offset : offsets) places.push_back(bytes.data() + offset);
    return places.data();
  }
  cudaKernelNodeParams parameters() {
    cudaKernelNodeParams all{};
    all.func = const_cast<void*>(kernel);
    all.gridDim = shape.grid;
    all.blockDim = shape.block;
    all.sharedMemBytes = static_cast<unsigned>(shape.shared_bytes);
    all.kernelParams = addresses();
    return all;
  }
  /// What a node of a graph cannot change.
  bool is_alike(const HeldLaunch& other) const {
    return kernel == other.kernel && shape.cluster == other.shape.cluster && shape.early == other.shape.early;
  }
  bool is_equal(const HeldLaunch& other) const {
    const auto same = [](const dim3& a, const dim3& b) { return a.x == b.x && a.y == b.y && a.z == b.z; };
    return same(shape.grid, other.shape.grid) && same(shape.block, other.shape.block) &&
           shape.shared_bytes == other.shape.shared_bytes && bytes == other.bytes;
  }
};

/// Launches one behind the other, as a graph.
class LaunchSequence {
 public:
  /// Null where the driver makes none, for want of memory, say: kernels are launched one by one then.
  static std::unique_ptr<LaunchSequence> made(std::span<const HeldLaunch> launches) {
    const BesideNoCapture turn;  // a graph that is instantiated allocates and loads
    std::unique_ptr<LaunchSequence> sequence(new LaunchSequence(launches));
    if (sequence->instantiate() == cudaSuccess) return sequence;
    cudaGetLastError();
    return nullptr;
  }
  ~LaunchSequence() {
    const BesideNoCapture turn;
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
    cudaGetLastError();
  }
  LaunchSequence(const LaunchSequence&) = delete;
  LaunchSequence& operator=(const LaunchSequence&) = delete;

  bool has(std::span<const HeldLaunch> launches) const {
    return !broken_ && std::ranges::equal(launches, launches_, &HeldLaunch::is_alike);
  }
  /// False, and nothing is enqueued, where the driver refuses; then for ever.
  bool launch(std::span<HeldLaunch> launches, StreamHandle stream) {
    for (std::size_t i = 0; i < launches.size() && !broken_; ++i) {
      if (launches[i].is_equal(launches_[i])) continue;
      launches_[i] = launches[i];
      const cudaKernelNodeParams parameters = launches_[i].parameters();
      broken_ = cudaGraphExecKernelNodeSetParams(exec_, nodes_[i], &parameters) != cudaSuccess;
    }
    broken_ = broken_ || cudaGraphLaunch(exec_, stream) != cudaSuccess;
    if (broken_) cudaGetLastError();
    return !broken_;
  }

 private:
  explicit LaunchSequence(std::span<const HeldLaunch> launches)
      : launches_(launches.begin(), launches.end()) {}
  cudaError_t instantiate() {
    cudaError_t status = cudaGraphCreate(&graph_, 0);
    for (HeldLaunch& launch : launches_)
      if (status == cudaSuccess) status = add(launch);
    return status == cudaSuccess ? cudaGraphInstantiate(&exec_, graph_, 0) : status;
  }
  cudaError_t add(HeldLaunch& launch) {
    cudaGraphNodeParams node{};
    node.type = cudaGraphNodeTypeKernel;
    const cudaKernelNodeParams parameters = launch.parameters();
    node.kernel.func = parameters.func;
    node.kernel.gridDim = parameters.gridDim;
    node.kernel.blockDim = parameters.blockDim;
    node.kernel.sharedMemBytes = parameters.sharedMemBytes;
    node.kernel.kernelParams = parameters.kernelParams;
    cudaGraphEdgeData edge{};
    if (launch.shape.early) {
      edge.from_port = cudaGraphKernelNodePortProgrammatic;
      edge.type = cudaGraphDependencyTypeProgrammatic;
    }
    const std::size_t before = nodes_.empty() ? 0 : 1;
    cudaGraphNode_t added = nullptr;
    if (const cudaError_t status = cudaGraphAddNode(&added, graph_, before == 1 ? &nodes_.back() : nullptr,
                                                    before == 1 ? &edge : nullptr, before, &node);
        status != cudaSuccess)
      return status;
    nodes_.push_back(added);
    if (launch.shape.cluster == 1) return cudaSuccess;
    cudaLaunchAttributeValue cluster{};
    cluster.clusterDim = {static_cast<unsigned>(launch.shape.cluster), 1, 1};
    return cudaGraphKernelNodeSetAttribute(added, cudaLaunchAttributeClusterDimension, &cluster);
  }

  std::vector<HeldLaunch> launches_;  ///< as the nodes have them
  std::vector<cudaGraphNode_t> nodes_;
  cudaGraph_t graph_ = nullptr;  ///< whose nodes go by the same names in exec_
  cudaGraphExec_t exec_ = nullptr;
  bool broken_ = false;
};

}  // namespace

struct LaunchGraphs::Parts {
  std::vector<HeldLaunch> launches;  ///< the first `held` are held back
  std::size_t held = 0;
  std::vector<std::unique_ptr<LaunchSequence>> sequences;
  std::size_t refused = 0;     ///< that the driver has not made
  std::exception_ptr failure;  ///< of the first flush that failed

  void hold_back(const LaunchShape& shape, const void* kernel, std::span<const KernelArgument> arguments) {
    if (held == launches.size()) launches.emplace_back();
    launches[held].assign(shape, kernel, arguments);
    ++held;
  }
  /// The graph of the launches; null where calls differ too much for each to have one, or there is none.
  LaunchSequence* sequence_of(std::span<HeldLaunch> all) {
    constexpr std::size_t kMost = 8;
    const auto at = std::ranges::find_if(sequences, [&](const auto& s) { return s->has(all); });
    if (at != sequences.end()) return at->get();
    if (sequences.size() + refused >= kMost) return nullptr;
    auto made = LaunchSequence::made(all);
    if (made != nullptr) return sequences.emplace_back(std::move(made)).get();
    ++refused;
    return nullptr;
  }
  void enqueue(std::span<HeldLaunch> all, StreamHandle stream) {
    LaunchSequence* const sequence = sequence_of(all);
    if (sequence != nullptr && sequence->launch(all, stream)) return;
    for (HeldLaunch& one : all)
      LODE_CUDA(cudaLaunchKernelExC(LaunchConfig(one.shape, stream).get(), one.kernel, one.addresses()));
  }
};

bool LaunchGraphs::has_lost() const {
  return parts_->failure != nullptr;
}
LaunchGraphs::LaunchGraphs() : parts_(std::make_unique<Parts>()) {}
LaunchGraphs::~LaunchGraphs() = default;

LaunchChain::LaunchChain(LaunchGraphs& graphs, StreamHandle stream) : graphs_(graphs), stream_(stream) {
  LODE_ASSERT(chain_here == nullptr);
  chain_here = this;
}

LaunchChain::~LaunchChain() {
  flush_launches_quietly();
  chain_here = nullptr;
}

void LaunchChain::flush() {
  LaunchGraphs::Parts& parts = graphs_.parts();
  const std::span all(parts.launches.data(), std::exchange(parts.held, 0));
  if (parts.failure != nullptr) std::rethrow_exception(parts.failure);
  if (all.empty()) return;
  try {
    parts.enqueue(all, stream_);
  } catch (...) {
    parts.failure = std::current_exception();
    throw;
  }
}

bool holds_back(StreamHandle stream) {
  return chain_here != nullptr && chain_here->stream() == stream;
}
void flush_launches() {
  if (chain_here != nullptr) chain_here->flush();
}
void flush_launches_quietly() noexcept {
  try {
    flush_launches();
  } catch (const std::exception&) {  // the chain keeps it
  }
}

void launch(const LaunchShape& shape, const void* kernel, std::span<const KernelArgument> arguments,
            StreamHandle stream) {
  if (holds_back(stream)) return chain_here->parts().hold_back(shape, kernel, arguments);
  void* places[kMostArguments];
  std::ranges::transform(arguments, places, [](const KernelArgument& a) { return const_cast<void*>(a.at); });
  LODE_CUDA(cudaLaunchKernelExC(LaunchConfig(shape, stream).get(), kernel, places));
}

}  // namespace lode::cuda
