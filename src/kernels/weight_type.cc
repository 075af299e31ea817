// SPDX-License-Identifier: Apache-2.0
#include "kernels/weight_type.h"

#include <algorithm>
#include <array>

#include "lodestone/error.h"

namespace lode {

namespace {

using enum WeightType;

constexpr std::array<WeightLayout, 18> kLayouts = {{{f32, "F32", 0, 1, 4},
                                                    {f16, "F16", 1, 1, 2},
                                                    {bf16, "BF16", 30, 1, 2},
                                                    {q8_0, "Q8_0", 8, 32, 34},
                                                    {q4_0, "Q4_0", 2, 32, 18},
                                                    {q4_1, "Q4_1", 3, 32, 20},
                                                    {q5_0, "Q5_0", 6, 32, 22},
                                                    {q5_1, "Q5_1", 7, 32, 24},
                                                    {q2_k, "Q2_K", 10, 256, 84},
                                                    {q3_k, "Q3_K", 11, 256, 110},
                                                    {q4_k, "Q4_K", 12, 256, 144},
                                                    {q5_k, "Q5_K", 13, 256, 176},
                                                    {q6_k, "Q6_K", 14, 256, 210},
                                                    {iq4_nl, "IQ4_NL", 20, 32, 18},
                                                    {iq4_xs, "IQ4_XS", 23, 256, 136},
                                                    {iq3_s, "IQ3_S", 21, 256, 110},
                                                    {iq3_xxs, "IQ3_XXS", 18, 256, 98},
                                                    {mxfp4, "MXFP4", 39, 32, 17}}};

char upper(char c) {
  return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
}

}  // namespace

std::span<const WeightLayout> weight_layouts() {
  return kLayouts;
}

const WeightLayout& layout_of(WeightType type) {
  const WeightLayout& layout = kLayouts[static_cast<std::size_t>(type)];
  LODE_ASSERT(layout.type == type);
  return layout;
}

std::optional<WeightType> find_weight_type(std::string_view name) {
  const auto same = [&](const WeightLayout& l) {
    return std::equal(l.name.begin(), l.name.end(), name.begin(), name.end(),
                      [](char a, char b) { return a == upper(b); });
  };
  const auto at = std::find_if(kLayouts.begin(), kLayouts.end(), same);
  return at == kLayouts.end() ? std::nullopt : std::optional(at->type);
}

std::optional<WeightType> find_gguf_type(std::uint32_t number) {
  const auto at = std::find_if(kLayouts.begin(), kLayouts.end(),
                               [&](const WeightLayout& l) { return l.gguf_type == number; });
  return at == kLayouts.end() ? std::nullopt : std::optional(at->type);
}

}  // namespace lode
