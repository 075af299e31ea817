// SPDX-License-Identifier: Apache-2.0
#include "engine/model.h"

#include <fmt/format.h>

#include <tuple>

#include "base/hash.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Everything that changes what the model computes: weights, shape, RoPE.
std::string fingerprint_of(const ModelConfig& c, const ModelWeights& w) {
  const RopeScaling &r = c.rope_scaling, usual;
  std::string text =
      fmt::format("{} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {}", w.fingerprint, c.hidden,
                  c.intermediate, c.layers, c.query_heads, c.kv_heads, c.head_dim, c.vocab, c.norm_eps,
                  c.rope_theta, static_cast<int>(r.kind), r.factor, r.original_max_positions,
                  r.low_freq_factor, r.high_freq_factor, r.beta_fast, r.attention_factor);
  // YaRN's alone. Models that say nothing of these keep the fingerprints that their files have.
  const auto rest = [](const RopeScaling& s) {
    return std::tuple(s.beta_slow, s.mscale, s.mscale_all_dim, s.truncate);
  };
  if (r.kind == RopeScaling::Kind::yarn && rest(r) != rest(usual))
    text += fmt::format(" {} {} {} {}", r.beta_slow, r.mscale, r.mscale_all_dim, r.truncate);
  return hash_hex(text);
}

}  // namespace

Model::Model() : impl_(std::make_unique<Impl>()) {}
Model::~Model() = default;

std::shared_ptr<const Model> Model::load(const std::filesystem::path& dir, int threads, bool check_finite) {
  std::shared_ptr<Model> model(new Model);
  Impl& m = *model->impl_;
  m.path = dir;
  m.config = read_config(dir);
  m.tokenizer = Tokenizer::read(dir);
  if (m.tokenizer->vocab() > m.config.vocab) {
    throw InputError(fmt::format(
        "{}: expected a tokenizer of at most {} tokens, as many as config.json's vocab_size, found {}",
        dir.string(), m.config.vocab, m.tokenizer->vocab()));
  }
  m.weights = ModelWeights::read(dir, m.config, check_finite);
  m.pool = std::make_unique<ThreadPool>(threads);
  m.fingerprint = fingerprint_of(m.config, m.weights);
  return model;
}

std::shared_ptr<const Model> Model::random(std::string_view shape, int threads, std::uint64_t seed,
                                           Device device) {
  std::shared_ptr<Model> model(new Model);
  Impl& m = *model->impl_;
  m.path = std::string(shape);
  m.config = named_shape(shape);
  m.weights = device == Device::cuda ? ModelWeights::shapes(m.config, DType::bf16)
                                     : ModelWeights::random(m.config, DType::bf16, seed);
  m.pool = std::make_unique<ThreadPool>(threads);
  m.fingerprint = fingerprint_of(m.config, m.weights);
  return model;
}

std::string_view name_of(Device device) {
  return device == Device::cuda ? "cuda" : "cpu";
}

std::shared_ptr<const GpuModel> Model::Impl::gpu_model(std::int64_t limit) const {
  const std::lock_guard lock(gpu_mutex_);
  auto shared = gpu_.lock();
  if (shared == nullptr) gpu_ = shared = make_gpu_model(config, weights, limit);
  return shared;
}

const ModelConfig& Model::config() const {
  return impl_->config;
}
const Tokenizer& Model::tokenizer() const {
  if (!impl_->tokenizer) throw RunError("a model with random weights has no tokenizer");
  return *impl_->tokenizer;
}
const std::filesystem::path& Model::path() const {
  return impl_->path;
}
const std::string& Model::fingerprint() const {
  return impl_->fingerprint;
}
std::int64_t Model::weight_bytes() const {
  return impl_->weights.bytes;
}
DType Model::weight_type() const {
  return plain_dtype(impl_->weights.layers.front().q.type);  // f32: blocks of any type
}
ThreadPool& Model::pool() const {
  return *impl_->pool;
}

}  // namespace lode
