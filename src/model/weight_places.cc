// SPDX-License-Identifier: Apache-2.0
#include "model/weight_places.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <numeric>
#include <span>

#include "base/text.h"
#include "lodestone/error.h"
#include "model/expert_tensors.h"
#include "model/family.h"
#include "model/weight_shapes.h"

namespace lode {

namespace {

using Shape = std::vector<std::int64_t>;

std::string shape_text(const Shape& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

Shape without_ones(Shape shape) {
  std::erase(shape, 1);
  return shape;
}

/// Of layers that draft tokens.
bool is_draft(const std::string& name, const ModelConfig& c) {
  if (c.plan.draft_layers == 0) return false;
  if (name.starts_with("mtp.")) return true;
  for (int i = c.layers; i < c.layers + c.plan.draft_layers; ++i)
    if (name.starts_with(fmt::format("model.layers.{}.", i)) || name.starts_with(fmt::format("blk.{}.", i)))
      return true;
  return false;
}

/// Of a layer that attends to another's keys and values, and makes none.
bool is_unused_row(const std::string& name, const ModelConfig& c) {
  constexpr std::array<std::string_view, 7> kParts = {
      "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight", "attn_k.weight",
      "attn_v.weight",           "attn_k_norm.weight",      "self_attn.v_norm.weight"};
  for (int i = 0; i < c.layers; ++i) {
    if (c.plan.layer(i).own_rows()) continue;
    for (const std::string_view part : kParts)
      if (name == fmt::format("model.layers.{}.{}", i, part) || name == fmt::format("blk.{}.{}", i, part))
        return true;
  }
  return false;
}

/// Takes tensors out one by one, checking each; what is left at the end nobody asked for.
class Taker {
 public:
  explicit Taker(WeightFiles& files) : files_(files) {}

  bool has(const std::string& name) const { return files_.tensors.contains(name); }

  /// All leading dimensions become rows; a vector is one row. `vectors`: each of them is a vector.
  Weight take(const std::string& name, const Shape& wanted, bool vectors) {
    const NamedTensor found = take_any(name, wanted);
    if (!found.type)
      throw InputError(fmt::format("{}: tensor '{}': expected weights in F32, F16 or BF16, found {}",
                                   found.where, excerpt(name), found.type_name));
    if (vectors && !is_plain(*found.type))
      throw InputError(fmt::format("{}: tensor '{}': expected a vector in F32, F16 or BF16, found {}",
                                   found.where, excerpt(name), found.type_name));
    const std::int64_t rows =
        std::accumulate(wanted.begin(), wanted.end() - 1, std::int64_t{1}, std::multiplies<>());
    return {found.bytes.data(), *found.type, rows, wanted.back()};
  }

  std::span<const std::byte> take_bytes(const std::string& name, const Shape& wanted) {
    const NamedTensor found = take_any(name, wanted);
    if (found.type_name != "U8")
      throw InputError(
          fmt::format("{}: tensor '{}': expected U8, found {}", found.where, excerpt(name), found.type_name));
    return found.bytes;
  }

  void finish(const ModelConfig& c) {
    for (const auto& [name, tensor] : files_.tensors) {
      const bool harmless = name.ends_with("rotary_emb.inv_freq") ||
                            (c.tied_embeddings && name == "lm_head.weight") || is_draft(name, c) ||
                            is_unused_row(name, c) ||
                            (files_.gguf && name.starts_with("rope_f"));  // read with the config
      if (!harmless)
        throw InputError(
            fmt::format("{}: tensor '{}' has no place in this architecture", tensor.where, excerpt(name)));
    }
  }

 private:
  NamedTensor take_any(const std::string& name, const Shape& wanted) {
    const auto node = files_.tensors.extract(name);
    if (node.empty())
      throw InputError(fmt::format("{}: expected a tensor '{}' of shape {}, found none", files_.where, name,
                                   shape_text(wanted)));
    // Some files of one column write the 1, others do not.
    const bool same = files_.gguf ? without_ones(node.mapped().shape) == without_ones(wanted)
                                  : node.mapped().shape == wanted;
    if (!same) {
      throw InputError(fmt::format("{}: tensor '{}': expected shape {}, found {}", node.mapped().where, name,
                                   shape_text(wanted), shape_text(node.mapped().shape)));
    }
    return node.mapped();
  }

  WeightFiles& files_;
};

Weight LayerWeights::*member_of(Place place) {
  using Member = Weight LayerWeights::*;
  constexpr std::array<std::pair<Place, Member>, 26> kMembers = {{
      {Place::attention_norm, &LayerWeights::attention_norm},
      {Place::q, &LayerWeights::q},
      {Place::k, &LayerWeights::k},
      {Place::v, &LayerWeights::v},
      {Place::q_bias, &LayerWeights::q_bias},
      {Place::k_bias, &LayerWeights::k_bias},
      {Place::v_bias, &LayerWeights::v_bias},
      {Place::q_norm, &LayerWeights::q_norm},
      {Place::k_norm, &LayerWeights::k_norm},
      {Place::o, &LayerWeights::o},
      {Place::o_bias, &LayerWeights::o_bias},
      {Place::attention_post_norm, &LayerWeights::attention_post_norm},
      {Place::mlp_norm, &LayerWeights::mlp_norm},
      {Place::gate, &LayerWeights::gate},
      {Place::up, &LayerWeights::up},
      {Place::gate_bias, &LayerWeights::gate_bias},
      {Place::up_bias, &LayerWeights::up_bias},
      {Place::down, &LayerWeights::down},
      {Place::down_bias, &LayerWeights::down_bias},
      {Place::mlp_post_norm, &LayerWeights::mlp_post_norm},
      {Place::sinks, &LayerWeights::sinks},
      {Place::router, &LayerWeights::router},
      {Place::router_bias, &LayerWeights::router_bias},
      {Place::choice_bias, &LayerWeights::choice_bias},
      {Place::shared_gate, &LayerWeights::shared_gate},
      {Place::layer_factor, &LayerWeights::factor},
  }};
  const auto at =
      std::find_if(kMembers.begin(), kMembers.end(), [&](const auto& m) { return m.first == place; });
  LODE_ASSERT(at != kMembers.end());
  return at->second;
}

Weight rows_of(const Weight& w, std::int64_t begin, std::int64_t rows) {
  return {w.data + bytes_of(w.type, begin * w.cols), w.type, rows, w.cols};
}

/// A part of a vector.
Weight columns_of(const Weight& w, std::int64_t begin, std::int64_t cols) {
  return {w.data + bytes_of(w.type, begin), w.type, 1, cols};
}

Weight DeltaWeights::*delta_member_of(Place place) {
  switch (place) {
    case Place::delta_qkv:
      return &DeltaWeights::qkv;
    case Place::delta_z:
      return &DeltaWeights::z;
    case Place::delta_b:
      return &DeltaWeights::b;
    case Place::delta_a:
      return &DeltaWeights::a;
    case Place::delta_conv:
      return &DeltaWeights::conv;
    case Place::delta_dt_bias:
      return &DeltaWeights::dt_bias;
    case Place::delta_decay:
      return &DeltaWeights::decay;
    case Place::delta_norm:
      return &DeltaWeights::norm;
    case Place::delta_out:
      return &DeltaWeights::out;
    default:
      return nullptr;
  }
}

/// What layers are given beside the stream, and what experts have that stand apart; null: the place is of neither.
Weight* beside_member_of(Place place, LayerWeights& layer) {
  switch (place) {
    case Place::input_gate:
      return &layer.inputs.gate;
    case Place::input_out:
      return &layer.inputs.out;
    case Place::input_norm:
      return &layer.inputs.norm;
    case Place::dense_post_norm:
      return &layer.apart.dense_post_norm;
    case Place::experts_norm:
      return &layer.apart.norm;
    case Place::experts_post_norm:
      return &layer.apart.post_norm;
    case Place::router_norm:
      return &layer.apart.router_norm;
    case Place::expert_factors:
      return &layer.apart.factors;
    default:
      return nullptr;
  }
}

/// Some parts of each of `groups` groups of rows, one part of all groups behind the other: a copy.
std::vector<Weight> parts_of_groups(const Weight& w, std::int64_t groups, std::span<const std::int64_t> parts,
                                    OwnedBytes& owned) {
  const std::int64_t row_bytes = bytes_of(w.type, w.cols), all = w.rows / groups;
  std::byte* to =
      owned.emplace_back(std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(bytes_of(w))))
          .get();
  std::vector<Weight> weights;
  std::int64_t begin = 0;
  for (const std::int64_t rows : parts) {
    weights.push_back({to, w.type, groups * rows, w.cols});
    for (std::int64_t g = 0; g < groups; ++g, to += rows * row_bytes)
      std::memcpy(to, w.data + (g * all + begin) * row_bytes, static_cast<std::size_t>(rows * row_bytes));
    begin += rows;
  }
  LODE_ASSERT(begin == all);
  return weights;
}

Weight LatentWeights::*latent_member_of(Place place) {
  switch (place) {
    case Place::latent_q:
    case Place::latent_q_b:
      return &LatentWeights::q_b;
    case Place::latent_q_a:
      return &LatentWeights::q_a;
    case Place::latent_q_a_norm:
      return &LatentWeights::q_a_norm;
    case Place::latent_kv_a:
      return &LatentWeights::kv_a;
    case Place::latent_kv_a_norm:
      return &LatentWeights::kv_a_norm;
    default:
      return nullptr;
  }
}

/// Each head's W_k is transposed: it is applied to queries. Of blocks that takes their numbers.
void put_heads(Place place, const Weight& whole, LatentWeights& to, const ModelConfig& c, OwnedBytes& owned) {
  const LatentPlan& p = c.plan.latent;
  const std::int64_t rows = whole.rows / c.query_heads;
  for (std::int64_t h = 0; h < c.query_heads; ++h) {
    const Weight head = rows_of(whole, h * rows, rows);
    if (place == Place::latent_k_b) to.k_b.push_back(head);
    if (place == Place::latent_v_b) to.v_b.push_back(head);
    if (place != Place::latent_kv_b) continue;
    const std::int64_t shape[] = {1, p.kv_rank, p.nope};
    to.k_b.push_back(from_columns(as_plain(rows_of(head, 0, p.nope), owned), shape, false, owned));
    to.v_b.push_back(rows_of(head, p.nope, p.value));
  }
}

/// Matrices that hold the rows of several in turns; false: it is none of those.
bool put_parts(Place place, const Weight& whole, LayerWeights& layer, const ModelConfig& c,
               OwnedBytes& owned) {
  const DeltaPlan& d = c.plan.delta;
  if (place == Place::q_and_gate) {
    const std::int64_t parts[] = {c.head_dim, c.head_dim};
    const auto weights = parts_of_groups(whole, c.query_heads, parts, owned);
    layer.q = weights[0];
    layer.attention_gate = weights[1];
    return true;
  }
  const std::int64_t shared = d.key_heads > 0 ? d.value_heads / d.key_heads : 0;
  if (place == Place::delta_ba) {
    const std::int64_t parts[] = {shared, shared};
    const auto weights = parts_of_groups(whole, d.key_heads, parts, owned);
    layer.delta.b = weights[0];
    layer.delta.a = weights[1];
    return true;
  }
  if (place != Place::delta_qkvz) return false;
  const std::int64_t parts[] = {d.key_dim, d.key_dim, shared * d.value_dim, shared * d.value_dim};
  const auto weights = parts_of_groups(whole, d.key_heads, parts, owned);
  layer.delta.qkv = {weights[0].data, whole.type, d.channels(), whole.cols};  // q, k and v lie side by side
  layer.delta.z = weights[3];
  return true;
}

/// Where a layer keeps a tensor that it takes as it is.
Weight& place_in(LayerWeights& layer, Place place) {
  if (Weight* const beside = beside_member_of(place, layer); beside != nullptr) return *beside;
  if (const auto member = latent_member_of(place); member != nullptr) return layer.latent.*member;
  if (const auto member = delta_member_of(place); member != nullptr) return layer.delta.*member;
  return layer.*member_of(place);
}

void put(Place place, const Weight& whole, LayerWeights& layer, const ModelConfig& c, int index,
         OwnedBytes& owned) {
  if (put_parts(place, whole, layer, c, owned)) return;
  if (place == Place::latent_kv_b || place == Place::latent_k_b || place == Place::latent_v_b)
    return put_heads(place, whole, layer.latent, c, owned);
  if (place == Place::qkv) {
    const std::int64_t q = shape_of(Place::q, c, index)[0], kv = shape_of(Place::k, c, index)[0];
    layer.q = rows_of(whole, 0, q);
    layer.k = rows_of(whole, q, kv);
    layer.v = rows_of(whole, q + kv, kv);
  } else if (place == Place::qkv_bias) {
    const std::int64_t q = shape_of(Place::q, c, index)[0], kv = shape_of(Place::k, c, index)[0];
    layer.q_bias = columns_of(whole, 0, q);
    layer.k_bias = columns_of(whole, q, kv);
    layer.v_bias = columns_of(whole, q + kv, kv);
  } else if (place == Place::gate_up) {
    layer.gate = rows_of(whole, 0, whole.rows / 2);
    layer.up = rows_of(whole, whole.rows / 2, whole.rows / 2);
  } else {
    place_in(layer, place) = whole;
  }
}

void put_expert(Place place, const Weight& w, ExpertWeights& expert) {
  const std::int64_t half = w.rows / 2;
  if (place == Place::expert_gate) expert.gate = w;
  if (place == Place::expert_up) expert.up = w;
  if (place == Place::expert_down) expert.down = w;
  if (place == Place::expert_gate_bias) expert.gate_bias = w;
  if (place == Place::expert_up_bias) expert.up_bias = w;
  if (place == Place::expert_down_bias) expert.down_bias = w;
  if (place == Place::expert_gate_up) {
    expert.gate = rows_of(w, 0, half);
    expert.up = rows_of(w, half, half);
  }
  if (place == Place::expert_gate_up_bias) {
    expert.gate_bias = columns_of(w, 0, w.cols / 2);
    expert.up_bias = columns_of(w, w.cols / 2, w.cols / 2);
  }
}

/// Walks the names of a family.
class Placer {
 public:
  Placer(WeightFiles& files, const ModelConfig& c, ModelWeights& m)
      : files_(files), taker_(files), c_(c), m_(m), names_(tensor_names(family_of(c))) {}

  std::vector<std::unique_ptr<std::byte[]>> run() {
    m_.layers.resize(static_cast<std::size_t>(c_.layers));
    for (std::size_t n = 0; n < names_.size(); ++n) {
      const TensorName& name = names_[n];
      if (pattern_of(name).empty()) continue;
      if (!in_layer(name.place)) {
        take_models(name);
        continue;
      }
      for (int i = 0; i < c_.layers; ++i)
        if (has_weight(name.place, c_, i) && is_taken_from(n, i)) take_layers(name, i);
    }
    taker_.finish(c_);
    return std::move(owned_);
  }

 private:
  std::string_view pattern_of(const TensorName& name) const { return files_.gguf ? name.gguf : name.folder; }

  /// The name of a layer's tensor, with two {} that of an expert's.
  std::string text_of(const TensorName& name, int layer, std::int64_t expert = 0) const {
    return fmt::format(fmt::runtime(pattern_of(name)), layer, expert);
  }
  static std::string with(const std::string& name, const char* ending) { return name + ending; }

  bool is_there(const TensorName& name, int layer) const {
    const std::string text = text_of(name, layer);
    return taker_.has(name.form == TensorForm::mxfp4 ? with(text, "_blocks") : text);
  }

  /// What a tensor of this name fills: places that several names compete for have one number.
  static int filled_by(Place place) {
    switch (place) {
      case Place::k:
      case Place::v:
      case Place::qkv:
        return static_cast<int>(Place::q);
      case Place::k_bias:
      case Place::v_bias:
      case Place::qkv_bias:
        return static_cast<int>(Place::q_bias);
      case Place::expert_up:
      case Place::expert_gate_up:
        return static_cast<int>(Place::expert_gate);
      case Place::delta_z:
      case Place::delta_qkvz:
        return static_cast<int>(Place::delta_qkv);
      case Place::latent_k_b:
      case Place::latent_v_b:
        return static_cast<int>(Place::latent_kv_b);
      case Place::delta_a:
      case Place::delta_ba:
        return static_cast<int>(Place::delta_b);
      default:
        return static_cast<int>(place);
    }
  }

  static bool holds_several(Place place) {
    return place == Place::expert_gate_up || place == Place::delta_qkvz || place == Place::delta_ba ||
           place == Place::latent_kv_b || place == Place::qkv || place == Place::qkv_bias;
  }

  /// Of several names for what a place holds the first that is there counts, or else the last, which is then missed.
  bool is_taken_from(std::size_t n, int layer) const {
    const auto rival = [&](const TensorName& other) {
      const bool together = holds_several(names_[n].place), theirs = holds_several(other.place);
      return !pattern_of(other).empty() && filled_by(other.place) == filled_by(names_[n].place) &&
             (other.place == names_[n].place || together != theirs);
    };
    for (std::size_t i = 0; i < n; ++i)
      if (rival(names_[i]) && taken_.contains({i, layer})) return false;
    const auto behind = names_.begin() + static_cast<std::ptrdiff_t>(n) + 1;
    return std::none_of(behind, names_.end(), rival) || is_there(names_[n], layer);
  }

  static bool is_expert(Place place) {
    return place >= Place::expert_gate && place <= Place::expert_down_bias;
  }

  Weight& models_weight(Place place) {
    switch (place) {
      case Place::embedding:
        return m_.embedding;
      case Place::final_norm:
        return m_.final_norm;
      case Place::input_embedding:
        return m_.input_embedding;
      case Place::input_projection:
        return m_.input_projection;
      case Place::input_projection_norm:
        return m_.input_projection_norm;
      default:
        return m_.output;
    }
  }

  void take_models(const TensorName& name) {
    if (name.place == Place::output && c_.tied_embeddings) return;
    if (!has_weight(name.place, c_, -1)) return;
    Weight& to = models_weight(name.place);
    const Shape shape = shape_of(name.place, c_, -1);
    to = taker_.take(std::string(pattern_of(name)), shape, shape.size() == 1);
  }

  void take_layers(const TensorName& name, int i) {
    LayerWeights& layer = m_.layers[static_cast<std::size_t>(i)];
    const Shape shape = shape_of(name.place, c_, i);
    taken_.insert({static_cast<std::size_t>(&name - names_.data()), i});
    if (!is_expert(name.place)) {
      take_one(name, i, shape, layer);
      return;
    }
    layer.experts.resize(static_cast<std::size_t>(c_.plan.experts.count));
    const bool one_each = pattern_of(name).find("{}") != pattern_of(name).rfind("{}");
    const Weight all = one_each ? Weight{} : take_together(name, i, shape);
    for (std::int64_t e = 0; e < std::ssize(layer.experts); ++e) {
      const std::int64_t rows = shape.size() == 2 ? 1 : shape[1];
      put_expert(name.place,
                 one_each ? taker_.take(text_of(name, i, e), {shape.begin() + 1, shape.end()}, rows == 1)
                          : rows_of(all, e * rows, rows),
                 layer.experts[static_cast<std::size_t>(e)]);
    }
  }

  void take_one(const TensorName& name, int i, const Shape& shape, LayerWeights& layer) {
    // Folders have the convolution as [channels, 1, kernel], and the gate of a single output as [1, D].
    Shape in_file = shape;
    const bool folder = !files_.gguf;
    if (folder && name.place == Place::delta_conv) in_file.insert(in_file.begin() + 1, 1);
    if (folder && name.place == Place::shared_gate) in_file.insert(in_file.begin(), 1);
    Weight w = taker_.take(text_of(name, i), in_file, shape.size() == 1 || name.place == Place::delta_conv);
    if (shape.size() < 3) w.rows = shape.size() == 1 ? 1 : shape[0];
    put(name.place, w, layer, c_, i, owned_);
  }

  /// One tensor of all experts, in rows.
  Weight take_together(const TensorName& name, int i, const Shape& shape) {
    const std::string text = text_of(name, i);
    const bool vectors = shape.size() == 2,
               in_turn = name.place == Place::expert_gate_up || name.place == Place::expert_gate_up_bias;
    if (files_.gguf || name.form == TensorForm::rows) return taker_.take(text, shape, vectors);
    if (name.form == TensorForm::mxfp4) {
      if (shape[2] % 32 != 0)
        throw InputError(fmt::format("{}: tensor '{}': expected a multiple of 32 columns, found {}",
                                     files_.where, text, shape[2]));
      const auto blocks = taker_.take_bytes(with(text, "_blocks"), {shape[0], shape[1], shape[2] / 32, 16});
      const auto scales = taker_.take_bytes(with(text, "_scales"), {shape[0], shape[1], shape[2] / 32});
      return from_mxfp4(blocks, scales, shape, in_turn, owned_);
    }
    if (vectors) return apart(taker_.take(text, shape, true), owned_);
    return from_columns(taker_.take(text, {shape[0], shape[2], shape[1]}, false), shape, in_turn, owned_);
  }

  WeightFiles& files_;
  Taker taker_;
  const ModelConfig& c_;
  ModelWeights& m_;
  std::vector<TensorName> names_;
  std::set<std::pair<std::size_t, int>> taken_;  // names and layers
  std::vector<std::unique_ptr<std::byte[]>> owned_;
};

}  // namespace

const Weight& weight_in(const LayerWeights& layer, Place place) {
  return place_in(const_cast<LayerWeights&>(layer), place);
}

std::vector<std::unique_ptr<std::byte[]>> take_weights(WeightFiles& files, const ModelConfig& c,
                                                       ModelWeights& m) {
  return Placer(files, c, m).run();
}

}  // namespace lode
