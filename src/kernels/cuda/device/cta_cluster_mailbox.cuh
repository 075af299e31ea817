// SPDX-License-Identifier: Apache-2.0
// Messages between the blocks of a cluster: stores into another block's shared memory that count themselves
// into a barrier there (st.async), so that who waits for them needs neither a barrier of the cluster nor a
// fence. A block may end once all messages to it have come.
#pragma once

#include <algorithm>

#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/kernel_settings.h"
#include "kernels/cuda/device/matrix.cuh"

namespace lode::cuda {

/// A place of shared memory that bytes are counted into. It completes once, when it was told how many to
/// expect and they are there.
using Inbox = std::uint64_t;

__device__ __forceinline__ void open_inbox(Inbox* inbox) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(inbox)) : "memory");
}
/// After open_inbox, before the cluster's blocks meet.
__device__ __forceinline__ void publish_inboxes() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect(Inbox* inbox, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(inbox)),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait_for(const Inbox* inbox, unsigned phase = 0) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(inbox)),
      "r"(phase)
      : "memory");
}

/// The address of this block's `mine` in block `rank` of the cluster.
__device__ __forceinline__ unsigned address_in(const void* mine, int rank) {
  unsigned at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(mine)), "r"(rank));
  return at;
}
__device__ __forceinline__ void send(unsigned to, unsigned x, unsigned inbox) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to), "r"(x),
               "r"(inbox)
               : "memory");
}
__device__ __forceinline__ void send(unsigned to, float2 x, unsigned inbox) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "r"(__float_as_uint(x.x)), "r"(__float_as_uint(x.y)), "r"(inbox)
               : "memory");
}
__device__ __forceinline__ void send(unsigned to, uint4 x, unsigned inbox) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(inbox)
      : "memory");
}
/// Bytes from device memory, a multiple of 16 and so aligned.
__device__ __forceinline__ void send_from_memory(void* to, const void* from, unsigned bytes, Inbox* inbox) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(inbox))
      : "memory");
}

/// The blocks of a cluster meet: what was stored before is not promised to be seen.
__device__ __forceinline__ void arrive_in_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

/// Before a launch in clusters of up to sixteen blocks of so many bytes of shared memory, and what is static,
/// of which so many share a processor. Blocks of the kernel behind come to a processor only where memory is
/// split between cache and blocks alike: as attention has it, or more where two of these blocks need more,
/// since all clusters must run at once.
template <class Kernel>
void prepare_clusters(Kernel kernel, std::int64_t bytes, int blocks = 2) {
  constexpr std::int64_t kOfProcessor = 228 << 10, kOfAttention = 58;
  const std::int64_t percent = (blocks * (bytes + 3072) * 100 + kOfProcessor - 1) / kOfProcessor;
  const void* const there = reinterpret_cast<const void*>(kernel);
  allow_shared_bytes(there, bytes);
  allow_wide_clusters(there);
  prefer_shared_percent(there, static_cast<int>(std::clamp<std::int64_t>(percent, kOfAttention, 100)));
}

/// Whether this GPU runs such a kernel in clusters of `ranks` blocks: not every part promises more than 8. To
/// be asked once, with the most shared memory, since the path, and with it the bits, must be one for all
/// contexts.
template <class Kernel>
bool can_place(Kernel kernel, int ranks, int threads, int bytes, int blocks = 2) {
  prepare_clusters(kernel, bytes, blocks);
  return EarlyLaunch(dim3(static_cast<unsigned>(ranks)), threads, bytes, ranks, nullptr)
             .clusters_at_once(kernel) > 0;
}

}  // namespace lode::cuda
