// SPDX-License-Identifier: Apache-2.0
#include "engine/model.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "base/hash.h"
#include "base/timed_parts.h"
#include "lodestone/error.h"
#include "model/source.h"
#include "text/chat_template.h"

namespace lode {

namespace {

/// How a token's experts are chosen and weighed; their sizes are the weights'.
void add_experts(const ExpertPlan& e, const auto& add) {
  const ExpertPlan usual;
  add("experts_used", e.used, usual.used);
  add("expert_score", static_cast<int>(e.score), static_cast<int>(usual.score));
  add("expert_score_chosen", e.score_chosen, usual.score_chosen);
  add("expert_normalise", e.normalise, usual.normalise);
  add("expert_scale", e.scale, usual.scale);
  add("expert_groups", e.groups, usual.groups);
  add("expert_groups_used", e.groups_used, usual.groups_used);
  add("expert_group_best", e.group_best, usual.group_best);
  add("experts_apart", e.apart, usual.apart);
}

/// What a plan has beyond Llama's, and so what fingerprints of older files never spoke of; empty for those.
std::string text_of(const ModelConfig& c) {
  const ModelPlan& p = c.plan;
  std::string text;
  const auto add = [&](std::string_view name, double value, double usual) {
    if (value != usual) text += fmt::format(" {}={}", name, value);
  };
  const ModelPlan usual;
  add("qk_norm", p.qk_norm, usual.qk_norm);
  add("rotary_dim", p.rotary_dim, usual.rotary_dim);
  add("local_theta", p.local_theta, usual.local_theta);
  add("score_scale", p.score_scale, usual.score_scale);
  add("query_growth", p.query_growth, usual.query_growth);
  if (p.query_growth != 0) add("query_growth_start", static_cast<double>(p.query_growth_start), 0);
  add("activation", static_cast<int>(p.activation), static_cast<int>(usual.activation));
  add("norm_plus_one", p.norm_plus_one, usual.norm_plus_one);
  add("post_norms", p.post_norms, usual.post_norms);
  add("embedding_multiplier", p.embedding_multiplier, usual.embedding_multiplier);
  add("residual_multiplier", p.residual_multiplier, usual.residual_multiplier);
  add("logit_divisor", p.logit_divisor, usual.logit_divisor);
  add("logit_cap", p.logit_cap, usual.logit_cap);
  add("v_norm", p.v_norm, usual.v_norm);
  add("layer_factor", p.layer_factor, usual.layer_factor);
  add("inputs", p.inputs.width, usual.inputs.width);
  add("rope_share", c.rope_scaling.share, 1.0);
  add("sinks", p.sinks, usual.sinks);
  add("attention_gate", p.attention_gate, usual.attention_gate);
  add("activation_limit", p.activation_limit, usual.activation_limit);
  add("delta_tiled", p.delta.tiled, usual.delta.tiled);
  add("delta_decay_log", p.delta.decay_log, usual.delta.decay_log);
  add("latent_interleaved", p.latent.interleaved, usual.latent.interleaved);
  add_experts(p.experts, add);
  for (std::size_t i = 0; i < p.layers.size(); ++i) {
    add(fmt::format("window{}", i), static_cast<double>(p.layers[i].window), 0);
    add(fmt::format("turn{}", i), static_cast<int>(p.layers[i].turn), static_cast<int>(Turn::usual));
    add(fmt::format("recurrent{}", i), p.layers[i].recurrent, false);
    add(fmt::format("kv_heads{}", i), p.layers[i].kv_heads, 0);
    add(fmt::format("head_dim{}", i), p.layers[i].head_dim, 0);
    add(fmt::format("value_is_key{}", i), p.layers[i].value_is_key, false);
    add(fmt::format("rows_of{}", i), p.layers[i].rows_of, LayerPlan::kOwn);
  }
  for (const float x : c.rope_scaling.short_divisors) text += fmt::format(" {}", x);
  for (const float x : c.rope_scaling.long_divisors) text += fmt::format(" {}", x);
  return text;
}

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
  return hash_hex(text + text_of(c));
}

/// What ends a turn by the chat template ends an answer, whether the config names it as EOS or not. A template that
/// cannot be read is complained of where it is used.
void add_end_of_turn(Model::Impl& m) {
  if (m.chat_template.empty()) return;
  try {
    const ChatTemplate chat(m.chat_template, ChatTokens::of(*m.tokenizer, m.config.bos, m.config.eos), "");
    for (const TokenId id : chat.ends_of_turn(*m.tokenizer))
      if (std::find(m.config.eos.begin(), m.config.eos.end(), id) == m.config.eos.end())
        m.config.eos.push_back(id);
  } catch (const InputError&) {
  }
}

}  // namespace

Model::Model() : impl_(std::make_unique<Impl>()) {}
Model::~Model() = default;

std::shared_ptr<const Model> Model::load(const std::filesystem::path& dir, int threads, bool check_finite) {
  std::shared_ptr<Model> model(new Model);
  Impl& m = *model->impl_;
  m.path = dir;
  std::optional<TimedPart> timed("model opened");
  ModelSource source = ModelSource::open(dir);
  m.config = source.config();
  m.tokenizer = source.tokenizer();
  m.chat_template = source.chat_template();
  if (m.tokenizer->vocab() > m.config.vocab) {
    throw InputError(fmt::format(
        "{}: expected a tokenizer of at most {} tokens, as many as the model's vocabulary has, found {}",
        dir.string(), m.config.vocab, m.tokenizer->vocab()));
  }
  add_end_of_turn(m);
  timed.reset();
  timed.emplace("weights checked");
  m.pool = std::make_unique<ThreadPool>(threads);
  m.weights = ModelWeights::read(source.take_weights(), m.config, check_finite, m.pool.get());
  m.fingerprint = fingerprint_of(m.config, m.weights);
  return model;
}

std::shared_ptr<const Model> Model::random(std::string_view shape, int threads, std::uint64_t seed,
                                           Device device) {
  std::shared_ptr<Model> model(new Model);
  Impl& m = *model->impl_;
  m.path = std::string(shape);
  const std::size_t colon = shape.find(':');
  const std::string_view name = shape.substr(0, colon),
                         weights = colon == shape.npos ? "bf16" : shape.substr(colon + 1);
  m.config = named_shape(name);
  const std::optional<WeightType> type = find_weight_type(weights);
  if (!type)
    throw InputError(fmt::format("expected a type of weights such as bf16 or q4_k, found '{}'", weights));
  if (device != Device::cuda && *type != WeightType::bf16)
    throw InputError(
        fmt::format("expected random weights of bf16 without --device cuda, found {}", name_of(*type)));
  m.weights = device == Device::cuda ? ModelWeights::shapes(m.config, *type)
                                     : ModelWeights::random(m.config, DType::bf16, seed);
  m.pool = std::make_unique<ThreadPool>(threads);
  m.fingerprint = fingerprint_of(m.config, m.weights);
  return model;
}

std::string_view name_of(Device device) {
  return device == Device::cuda ? "cuda" : "cpu";
}

std::shared_ptr<const GpuModel> Model::Impl::gpu_model(std::int64_t limit, const GpuGroup& group) const {
  const std::lock_guard lock(gpu_mutex_);
  auto shared = gpu_.lock();
  if (shared == nullptr) gpu_ = shared = make_gpu_model(config, weights, limit, group, pool.get());
  const int wanted = std::max(1, static_cast<int>(group.devices.size()));
  if (shared->gpus() != wanted || shared->ranges() != group.ranges)
    throw InputError(fmt::format(
        "expected a model that {} GPUs share for {} ranges of a text, found it in use on {} for {}", wanted,
        group.ranges, shared->gpus(), shared->ranges()));
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
