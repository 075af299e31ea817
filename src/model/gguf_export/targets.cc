// SPDX-License-Identifier: Apache-2.0
// Which tensors a GGUF file has, and where their rows lie in a model that is read.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lodestone/error.h"
#include "model/gguf_export/parts.h"
#include "model/weight_places.h"
#include "model/weight_shapes.h"

namespace lode {

namespace {

using Row = TensorRows::Row;
using RowMap = std::function<std::int64_t(std::int64_t)>;

/// Of the names that compete for the same weights the ones that other programs read too.
bool is_written(const TensorName& name, const ModelConfig& c, int layer) {
  const Family& family = family_of(c);
  switch (name.place) {
    case Place::expert_gate_up:
      return family.gguf == "gemma4";
    case Place::expert_gate:
    case Place::expert_up:
      return family.gguf != "gemma4";
    case Place::qkv:
      return !name.folder.empty();
    case Place::qkv_bias:
    case Place::expert_gate_up_bias:
    case Place::delta_qkvz:
    case Place::latent_kv_b:
      return false;
    case Place::delta_ba:
      return family.gguf == "qwen3next";
    case Place::delta_b:
    case Place::delta_a:
      return family.gguf != "qwen3next";
    case Place::gate:
    case Place::up:
    case Place::down: {
      // Beside experts the feed-forward of all tokens may have names of its own.
      const auto names = tensor_names(family);
      const bool two = std::count_if(names.begin(), names.end(),
                                     [&](const TensorName& n) { return n.place == name.place; }) > 1;
      const bool shared = name.gguf.find("shexp") != std::string_view::npos;
      return !two || shared == c.plan.layer(layer).experts;
    }
    default:
      return true;
  }
}

Row row_at(const Weight& w, std::int64_t row) {
  return {w.type, w.data + bytes_of(w.type, row * w.cols)};
}

TensorRows whole(const Weight& w, RowMap map = nullptr) {
  return {.row = [&w, map = std::move(map)](std::int64_t row) { return row_at(w, map ? map(row) : row); }};
}

/// Matrices of one size, one below the other.
TensorRows stacked(std::vector<const Weight*> parts) {
  const bool blocks = parts.front()->type == WeightType::mxfp4;
  return {.row =
              [parts = std::move(parts)](std::int64_t row) {
                const std::int64_t rows = parts.front()->rows;
                return row_at(*parts[static_cast<std::size_t>(row / rows)], row % rows);
              },
          .copied = blocks};
}

/// Numbers of a vector, in the order that `map` gives.
std::function<void(std::span<float>)> in_order(RowMap map) {
  return [map = std::move(map)](std::span<float> numbers) {
    const std::vector<float> old(numbers.begin(), numbers.end());
    for (std::size_t i = 0; i < old.size(); ++i)
      numbers[i] = old[static_cast<std::size_t>(map(static_cast<std::int64_t>(i)))];
  };
}

/// Which row here stands at a row of the file, for q and k: those that RoPE turns lie in another order there.
RowMap head_rows(const ModelConfig& c) {
  const std::vector<std::int64_t> order = head_row_order(c, family_of(c).gguf_pairs);
  std::vector<std::int64_t> back(order.size());
  for (std::size_t i = 0; i < order.size(); ++i)
    back[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
  return [back](std::int64_t row) {
    if (back.empty()) return row;
    const std::int64_t in_head = row % std::ssize(back);
    return row - in_head + back[static_cast<std::size_t>(in_head)];
  };
}

TensorRows attention_rows(Place place, const LayerWeights& w, const ModelConfig& c) {
  const RowMap heads = head_rows(c);
  if (place == Place::qkv)
    return {.row = [&w, heads](std::int64_t row) {
      if (row < w.q.rows) return row_at(w.q, heads(row));
      row -= w.q.rows;
      return row < w.k.rows ? row_at(w.k, heads(row)) : row_at(w.v, row - w.k.rows);
    }};
  if (place == Place::q_and_gate)
    return {.row = [&w, heads, d = std::int64_t{c.head_dim}](std::int64_t row) {
      const std::int64_t at = row / (2 * d) * d + row % d;
      return row % (2 * d) < d ? row_at(w.q, heads(at)) : row_at(w.attention_gate, at);
    }};
  if (place == Place::q || place == Place::k) return whole(weight_in(w, place), heads);
  TensorRows vector = whole(weight_in(w, place));
  vector.change = in_order(heads);
  return vector;
}

/// Value heads here belong to key heads one after the other; some files have them by their number within a key head
/// first. `width`: rows of a head, behind `before` rows that stay.
RowMap value_heads(const ModelConfig& c, std::int64_t width, std::int64_t before = 0) {
  const DeltaPlan& d = c.plan.delta;
  if (family_of(c).gguf == "qwen3next") return [](std::int64_t row) { return row; };
  return [=, keys = std::int64_t{d.key_heads},
          shared = std::int64_t{d.value_heads / d.key_heads}](std::int64_t row) {
    if (row < before) return row;
    const std::int64_t head = (row - before) / width;
    return before + (head % keys * shared + head / keys) * width + (row - before) % width;
  };
}

TensorRows delta_rows(Place place, const LayerWeights& layer, const ModelConfig& c) {
  const DeltaPlan& d = c.plan.delta;
  const DeltaWeights& w = layer.delta;
  if (place == Place::delta_ba)
    return {.row = [&w, shared = std::int64_t{d.value_heads / d.key_heads}](std::int64_t row) {
      const std::int64_t at = row / (2 * shared) * shared + row % shared;
      return row_at(row % (2 * shared) < shared ? w.b : w.a, at);
    }};
  const Weight& one = weight_in(layer, place);
  if (place == Place::delta_norm) return whole(one);
  if (place == Place::delta_qkv || place == Place::delta_conv)
    return whole(one, value_heads(c, d.value_dim, 2 * d.keys()));
  if (place == Place::delta_z) return whole(one, value_heads(c, d.value_dim));
  if (place == Place::delta_b || place == Place::delta_a) return whole(one, value_heads(c, 1));
  TensorRows rows = whole(one);
  rows.change = in_order(value_heads(c, place == Place::delta_out ? d.value_dim : 1));
  if (place == Place::delta_decay && d.decay_log)
    rows.change = [order = std::move(rows.change)](std::span<float> numbers) {
      order(numbers);
      for (float& x : numbers) x = -std::exp(x);
    };
  return rows;
}

TensorRows expert_rows(Place place, const LayerWeights& w) {
  std::vector<const Weight*> parts;
  for (const ExpertWeights& e : w.experts) {
    if (place == Place::expert_gate || place == Place::expert_gate_up) parts.push_back(&e.gate);
    if (place == Place::expert_up || place == Place::expert_gate_up) parts.push_back(&e.up);
    if (place == Place::expert_down) parts.push_back(&e.down);
    if (place == Place::expert_gate_bias) parts.push_back(&e.gate_bias);
    if (place == Place::expert_up_bias) parts.push_back(&e.up_bias);
    if (place == Place::expert_down_bias) parts.push_back(&e.down_bias);
  }
  return stacked(std::move(parts));
}

TensorRows latent_rows(const std::vector<Weight>& heads) {
  std::vector<const Weight*> parts;
  for (const Weight& head : heads) parts.push_back(&head);
  return stacked(std::move(parts));
}

const Weight& models_weight(Place place, const ModelWeights& m) {
  switch (place) {
    case Place::embedding:
      return m.embedding;
    case Place::output:
      return m.output;
    case Place::final_norm:
      return m.final_norm;
    case Place::input_embedding:
      return m.input_embedding;
    case Place::input_projection:
      return m.input_projection;
    default:
      return m.input_projection_norm;
  }
}

TensorRows layer_rows(Place place, const LayerWeights& w, const ModelConfig& c) {
  switch (place) {
    case Place::q:
    case Place::k:
    case Place::qkv:
    case Place::q_bias:
    case Place::k_bias:
    case Place::q_norm:
    case Place::k_norm:
    case Place::q_and_gate:
      return attention_rows(place, w, c);
    case Place::gate_up:
      return stacked({&w.gate, &w.up});
    case Place::latent_k_b:
      return latent_rows(w.latent.k_b);
    case Place::latent_v_b:
      return latent_rows(w.latent.v_b);
    default:
      if (place >= Place::delta_qkv && place <= Place::delta_out) return delta_rows(place, w, c);
      if (place >= Place::expert_gate && place <= Place::expert_down_bias) return expert_rows(place, w);
      return whole(weight_in(w, place));
  }
}

/// Whose gains are 1 + weight where a plan says so; files hold the sum.
bool is_gain(Place place) {
  return place == Place::final_norm || place == Place::attention_norm ||
         place == Place::attention_post_norm || place == Place::mlp_norm || place == Place::mlp_post_norm ||
         place == Place::q_norm || place == Place::k_norm;
}

}  // namespace

std::vector<GgufTarget> gguf_targets(const ModelConfig& c) {
  std::vector<GgufTarget> all;
  const auto add = [&](const TensorName& name, int layer) {
    if (!has_weight(name.place, c, layer) || !is_written(name, c, layer)) return;
    all.push_back(
        {fmt::format(fmt::runtime(name.gguf), layer), name.place, layer, shape_of(name.place, c, layer)});
  };
  for (const TensorName& name : tensor_names(family_of(c))) {
    if (name.gguf.empty() || (name.place == Place::output && c.tied_embeddings)) continue;
    if (!in_layer(name.place)) {
      add(name, -1);
      continue;
    }
    for (int layer = 0; layer < c.layers; ++layer) add(name, layer);
  }
  return all;
}

TensorRows rows_of_target(const GgufTarget& target, const ModelWeights& m, const ModelConfig& c) {
  TensorRows rows = in_layer(target.place)
                        ? layer_rows(target.place, m.layers[static_cast<std::size_t>(target.layer)], c)
                        : whole(models_weight(target.place, m));
  if (c.plan.norm_plus_one && is_gain(target.place))
    rows.change = [order = std::move(rows.change)](std::span<float> numbers) {
      if (order) order(numbers);
      for (float& x : numbers) x += 1;
    };
  return rows;
}

}  // namespace lode
