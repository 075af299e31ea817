// SPDX-License-Identifier: Apache-2.0
#include "model/joined_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "lodestone/error.h"
#include "model/family.h"
#include "model/weight_shapes.h"

namespace lode {

namespace {

bool always_joined(const ModelConfig& c) {
  return std::ranges::any_of(tensor_names(family_of(c)),
                             [](const TensorName& name) { return name.gguf == "blk.{}.attn_qkv.weight"; });
}

void split(const std::string& name, const std::string& layer, const std::string& kind,
           const std::array<std::int64_t, 3>& rows, WeightFiles& files) {
  const NamedTensor whole = std::move(files.tensors.extract(name).mapped());
  const std::int64_t all = std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
  if (whole.shape.empty() || whole.shape.front() != all)
    throw InputError(fmt::format("{}: tensor '{}': expected {} rows, those of q, k and v, found {}",
                                 whole.where, name, all, whole.shape.empty() ? 0 : whole.shape.front()));
  const std::size_t row_bytes = whole.bytes.size() / static_cast<std::size_t>(all);
  std::int64_t begin = 0;
  for (std::size_t part = 0; part < rows.size(); ++part) {
    constexpr std::array<const char*, 3> kParts = {"attn_q", "attn_k", "attn_v"};
    NamedTensor own = whole;
    own.shape.front() = rows[part];
    own.bytes = whole.bytes.subspan(static_cast<std::size_t>(begin) * row_bytes,
                                    static_cast<std::size_t>(rows[part]) * row_bytes);
    begin += rows[part];
    files.tensors.emplace(layer + kParts[part] + kind, std::move(own));
  }
}

}  // namespace

void split_joined_qkv(WeightFiles& files, const ModelConfig& c) {
  if (always_joined(c)) return;
  for (int i = 0; i < c.layers; ++i) {
    const std::string layer = fmt::format("blk.{}.", i);
    const std::int64_t q = shape_of(Place::q, c, i)[0], kv = shape_of(Place::k, c, i)[0];
    for (const char* kind : {".weight", ".bias"})
      if (const std::string name = layer + "attn_qkv" + kind; files.tensors.contains(name))
        split(name, layer, kind, {q, kv, kv}, files);
  }
}

}  // namespace lode
