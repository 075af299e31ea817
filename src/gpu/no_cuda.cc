// SPDX-License-Identifier: Apache-2.0
// What a program that was built without CUDA says of GPUs.
#include "gpu/attention_bench.h"
#include "gpu/backend.h"
#include "gpu/batch_backend.h"
#include "gpu/document_bytes.h"
#include "gpu/index/context_keys.h"
#include "gpu/layers/states_of.h"
#include "gpu/train/hash.h"
#include "gpu/train/saap.h"
#include "lodestone/error.h"

namespace lode {

namespace {
constexpr const char* kWhy =
    "this program was built without CUDA; for a build with it run `cmake --preset release "
    "-DLODESTONE_CUDA=ON && "
    "cmake --build --preset release` (docs/guides/gpu.md)";
}

GpuInfo gpu_info() {
  GpuInfo info;
  info.why = kWhy;
  return info;
}

GpuInfo gpu_present() {
  return gpu_info();
}

void start_gpu() noexcept {}

std::shared_ptr<const GpuModel> make_gpu_model(const ModelConfig&, const ModelWeights&, std::int64_t,
                                               const GpuGroup&, ThreadPool*) {
  throw RunError(kWhy);
}

std::unique_ptr<GpuContext> make_gpu_context(const ModelConfig&, std::shared_ptr<const GpuModel>,
                                             const GpuContextOptions&) {
  throw RunError(kWhy);
}

std::string why_no_gpu_batch(const GpuModel&, DType) {
  throw RunError(kWhy);
}

std::unique_ptr<GpuBatch> make_gpu_batch(const ModelConfig&, std::shared_ptr<const GpuModel>,
                                         const GpuBatchOptions&) {
  throw RunError(kWhy);
}

std::int64_t gpu_document_bytes(const ModelConfig&, const GpuModel&, DType, std::int64_t, std::int64_t) {
  throw RunError(kWhy);
}

DeviceKeys* device_keys_of(GpuContext&) {
  return nullptr;
}

void download_by_layer(const GpuContext&, KvStore&, const std::function<void(int)>&) {
  throw RunError(kWhy);
}

bool writes_to_host(const GpuContext&, const Step&) {
  return true;
}

void bring_states(GpuContext&, RecurrentStates&) {
  throw RunError(kWhy);
}

void restore_states(GpuContext&, const RecurrentStates&) {
  throw RunError(kWhy);
}

std::int64_t reachable_behind(const GpuTail&, std::int64_t) {
  throw RunError(kWhy);
}

double gpu_read_microseconds(std::int64_t) {
  throw RunError(kWhy);
}

double gpu_matrix_rate(std::int64_t) {
  throw RunError(kWhy);
}

std::unique_ptr<GpuSaapTraining> make_gpu_saap_training(bool) {
  throw RunError(kWhy);
}

GpuHashBytes gpu_hash_bytes(const GpuHashShape&, const GpuHashSizes&) {
  throw RunError(kWhy);
}

std::unique_ptr<GpuHashTraining> make_gpu_hash_training(const GpuHashShape&, const GpuHashSizes&,
                                                        std::int64_t) {
  throw RunError(kWhy);
}

std::vector<GpuAttentionRow> bench_attention_on_gpu(const GpuAttentionTask&, std::span<const Spec>,
                                                    const std::function<void(std::string_view)>&) {
  throw RunError(kWhy);
}

}  // namespace lode
