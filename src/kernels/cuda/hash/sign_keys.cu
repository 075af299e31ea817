// SPDX-License-Identifier: Apache-2.0
// Signatures of keys, many at a time. A block takes 32 keys of one head and layer; a lane has a key, a warp
// eight outputs, so that weights are read by whole warps and each output is one chain of fused additions in
// the order of the inputs: it has the same bits whatever keys share the block.
#include <cuda_fp16.h>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/element.cuh"
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/hash/signatures.h"

namespace lode::cuda {

namespace {

constexpr int kKeys = 32, kThreads = 256, kWarps = kThreads / 32, kOutputs = 8, kPitch = kKeys + 1;

struct Params {
  const char* base = nullptr;
  KvLayout layout;
  int group = 1, sets = 1;
  std::int64_t begin = 0, end = 0;
  SignNets nets;
  SignedValues values = SignedValues::off;
  Signatures signatures;
};

template <class T>
__device__ void read_weights(const void* weights, std::int64_t at, float (&out)[8]) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int piece = 0; piece < 8 / kPiece; ++piece) {
    float some[kPiece];
    widen_pack<T>(__ldg(reinterpret_cast<const uint4*>(static_cast<const T*>(weights) + at + piece * kPiece)),
                  some);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) out[piece * kPiece + i] = some[i];
  }
}

/// What phi_kv sees of the block's keys, into x [inputs][kPitch].
__device__ void read_inputs(const Params& p, const char* layer, int kv_head, std::int64_t first, int count,
                            float* x) {
  const int d = p.layout.head_dim, inputs = p.nets.widths[0];
  const auto number = [&](std::int64_t key, bool value, int i) {
    const char* const row = layer + p.layout.key_offset(kv_head, key) + (value ? p.layout.value_offset() : 0);
    return Vector{row, p.layout.type}[i];
  };
  const int vectors = p.values == SignedValues::vector ? 2 : 1;
  for (int at = threadIdx.x; at < inputs * kKeys; at += kThreads) {
    const int key = at / inputs, i = at % inputs;
    const bool there = key < count && i < vectors * d;
    x[i * kPitch + key] = there ? number(first + key, i >= d, i % d) : 0.0f;
  }
  __syncthreads();
  if (p.values != SignedValues::norm || static_cast<int>(threadIdx.x) >= count) return;
  float sum = 0.0f;
  for (int i = 0; i < d; ++i) {
    const float v = number(first + threadIdx.x, true, i);
    sum = fmaf(v, v, sum);
  }
  x[d * kPitch + threadIdx.x] = sqrtf(sum);
}

template <class T>
__global__ void __launch_bounds__(kThreads) sign_keys_kernel(const __grid_constant__ Params p) {
  extern __shared__ float shared[];
  const SignNets& nets = p.nets;
  float *x = shared, *y = shared + nets.widest() * kPitch;
  __shared__ __align__(16) unsigned char bytes[kKeys][16];
  const int set = blockIdx.y, layer = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::int64_t first = p.begin + std::int64_t{blockIdx.x} * kKeys;
  const int count = static_cast<int>(min(std::int64_t{kKeys}, p.end - first));
  const int kv_head = p.signatures.per_query_head ? set / p.group : set;
  const std::int64_t net = std::int64_t{layer} * p.sets + set;
  read_inputs(p, p.base + layer * p.layout.layer_stride, kv_head, first, count, x);
  __syncthreads();
  std::int64_t weights = net * nets.weights_of_net(), biases = net * nets.biases_of_net();
  for (int i = 0; i < nets.depth; ++i) {
    const int in = nets.widths[i], out = nets.widths[i + 1];
    const bool last = i + 1 == nets.depth;
    for (int first_out = warp * kOutputs; first_out < out; first_out += kWarps * kOutputs) {
      float sum[kOutputs] = {};
#pragma unroll 2
      for (int at = 0; at < in; at += 8) {
        float from[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) from[e] = x[(at + e) * kPitch + lane];
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) {
          float w[8];
          read_weights<T>(nets.weights, weights + std::int64_t{first_out + o} * in + at, w);
#pragma unroll
          for (int e = 0; e < 8; ++e) sum[o] = fmaf(w[e], from[e], sum[o]);
        }
      }
      unsigned bits = 0;
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        const float z = sum[o] + nets.biases[biases + first_out + o];
        if (last)
          bits |= (z > 0.0f ? 1u : 0u) << o;
        else
          y[(first_out + o) * kPitch + lane] = nets.relu ? (z < 0.0f ? 0.0f : z) : z / (1.0f + expf(-z));
      }
      if (last) bytes[lane][first_out / 8] = static_cast<unsigned char>(bits);
    }
    __syncthreads();
    float* const other = x;
    x = y, y = other;
    weights += std::int64_t{in} * out, biases += out;
  }
  const int words = p.signatures.words;
  for (int at = threadIdx.x; at < count * words; at += kThreads) {
    const unsigned word = *reinterpret_cast<const unsigned*>(&bytes[at / words][at % words * 4]);
    p.signatures.codes[(net * p.signatures.capacity + first) * words + at] = word;
  }
}

/// Bytes of shared memory that an activation takes: of all keys of a block, and of those of the layer behind.
constexpr int kActivationBytes = 2 * kPitch * static_cast<int>(sizeof(float));

template <class T>
void launch(const Params& p, int layers, StreamHandle stream) {
  const auto shared = static_cast<std::size_t>(p.nets.widest()) * kActivationBytes;
  allow_shared_bytes(reinterpret_cast<const void*>(sign_keys_kernel<T>), static_cast<std::int64_t>(shared));
  const dim3 grid(static_cast<unsigned>((p.end - p.begin + kKeys - 1) / kKeys), static_cast<unsigned>(p.sets),
                  static_cast<unsigned>(layers));
  Launch(grid, kThreads, shared, stream)(sign_keys_kernel<T>, p);
}

}  // namespace

int widest_signed() {
  constexpr int kOthers = 2048;  // bytes of the kernel's own, and what the system takes
  int device = 0, most = 0;
  LODE_CUDA(cudaGetDevice(&device));
  LODE_CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return (most - kOthers) / kActivationBytes;
}

void sign_keys(const char* base, const KvLayout& layout, int layers, int query_heads, std::int64_t begin,
               std::int64_t end, const SignNets& nets, SignedValues values, const Signatures& signatures,
               StreamHandle stream) {
  if (begin >= end) return;
  const Params p = {.base = base,
                    .layout = layout,
                    .group = query_heads / layout.kv_heads,
                    .sets = signatures.per_query_head ? query_heads : layout.kv_heads,
                    .begin = begin,
                    .end = end,
                    .nets = nets,
                    .values = values,
                    .signatures = signatures};
  if (nets.type == DType::f16)
    launch<__half>(p, layers, stream);
  else
    launch<float>(p, layers, stream);
}

}  // namespace lode::cuda
