// SPDX-License-Identifier: Apache-2.0
#include "lab/bench/common.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

#include "base/threads.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {
namespace {

constexpr int kCentres = 256;
// Signal and noise of clustered keys and queries; their sum has the variance of the normal kind's numbers.
constexpr float kKeyNoise = 0.6f, kQueryNoise = 0.6f;

}  // namespace

LayerGeometry bench_geometry(const ModelConfig& shape, const Spec& spec, const Rope& rope, ThreadPool& pool,
                             std::uint64_t seed) {
  return {.layer = spec.dense_layers,
          .query_heads = shape.query_heads,
          .kv_heads = shape.kv_heads,
          .head_dim = shape.head_dim,
          .scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim)),
          .dense = spec.dense,
          .rope = &rope,
          .pool = &pool,
          .seed = seed,
          .covered = {}};
}

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

ContextOptions with_room(const Model& model, ContextOptions options, std::int64_t tokens,
                         const std::function<void(std::string_view)>& note) {
  options.max_tokens = tokens;
  const std::int64_t own = model.config().max_positions;
  if (tokens > own) {
    if (const RopeScaling& scaling = model.config().rope_scaling; scaling.kind != RopeScaling::Kind::none)
      throw InputError(fmt::format(
          "expected at most {} tokens, the model's positions, found a need for {}: its RoPE has a "
          "scaling of its own, so a bench cannot go beyond them",
          own, tokens));
    options.rope_factor = std::ceil(static_cast<double>(tokens) / static_cast<double>(own));
    note(
        fmt::format("{} tokens are more than the model's {} positions: its RoPE is scaled by {}, which "
                    "changes answers but no speed",
                    tokens, own, *options.rope_factor));
  }
  return options;
}

std::int64_t last_level_cache_bytes() {
  std::int64_t most = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    std::int64_t kib = 0;
    if (file >> kib) most = std::max(most, kib * 1024);  // "36608K"
  }
  return most > 0 ? most : std::int64_t{32} << 20;
}

VectorMaker::VectorMaker(const Shape& shape, KvKind kind, double skew, const Rope& rope, std::uint64_t seed)
    : shape_(shape), kind_(kind), rope_(rope), rng_(seed) {
  centres_.resize(static_cast<std::size_t>(shape.kv_heads) * kCentres *
                  static_cast<std::size_t>(shape.head_dim));
  for (float& x : centres_) x = quick_normal(rng_);
  double sum = 0.0;
  for (int c = 0; c < kCentres; ++c) cumulative_.push_back(sum += std::pow(c + 1.0, -skew));
  for (double& x : cumulative_) x /= sum;
  if (kind == KvKind::ood) ood_.emplace(shape.query_heads, shape.kv_heads, shape.head_dim, rng_);
}

void VectorMaker::fill(std::vector<float>& out, std::int64_t tokens, int heads, bool clustered, float noise) {
  const std::int64_t d = shape_.head_dim;
  const float signal = std::sqrt(1.0f - noise * noise);
  out.resize(static_cast<std::size_t>(tokens * heads * d));
  for (std::int64_t row = 0; row < tokens * heads; ++row) {
    float* x = out.data() + row * d;
    for (std::int64_t c = 0; c < d; ++c) x[c] = quick_normal(rng_);
    if (!clustered) continue;
    const auto found = std::upper_bound(cumulative_.begin(), cumulative_.end() - 1, rng_.uniform());
    const std::int64_t head = row % heads * shape_.kv_heads / heads;
    const float* centre = centres_.data() + (head * kCentres + (found - cumulative_.begin())) * d;
    for (std::int64_t c = 0; c < d; ++c) x[c] = signal * centre[c] + noise * x[c];
  }
}

/// Keys, and queries if wanted, as after RoPE.
void VectorMaker::make_ood(std::int64_t tokens, bool queries) {
  const std::int64_t d = shape_.head_dim;
  if (queries) q.resize(static_cast<std::size_t>(tokens * shape_.query_heads * d));
  k.resize(static_cast<std::size_t>(tokens * shape_.kv_heads * d));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int h = 0; queries && h < shape_.query_heads; ++h)
      ood_->query(h, rng_, q.data() + (t * shape_.query_heads + h) * d);
    for (int h = 0; h < shape_.kv_heads; ++h) ood_->key(h, rng_, k.data() + (t * shape_.kv_heads + h) * d);
  }
}

/// Turns vectors [T, heads, d] to their positions, or back.
void VectorMaker::turn(std::vector<float>& x, int heads, Position begin, bool back) const {
  const std::size_t row = static_cast<std::size_t>(heads) * static_cast<std::size_t>(shape_.head_dim);
  for (std::size_t t = 0; t * row < x.size(); ++t) {
    const std::span<float> own = std::span(x).subspan(t * row, row);
    const auto position = begin + static_cast<Position>(t);
    back ? rope_.unrotate(own, position) : rope_.rotate(own, position);
  }
}

void VectorMaker::make(Position begin, std::int64_t tokens) {
  const bool ood = kind_ == KvKind::ood, clustered = kind_ == KvKind::clustered;
  if (ood) {
    make_ood(tokens, true);
    q_unrotated = q;
    k_unrotated = k;
  } else {
    fill(q_unrotated, tokens, shape_.query_heads, clustered, kQueryNoise);
    fill(k_unrotated, tokens, shape_.kv_heads, clustered, kKeyNoise);
    q = q_unrotated;
    k = k_unrotated;
  }
  fill(v, tokens, shape_.kv_heads, false, 1.0f);
  turn(ood ? q_unrotated : q, shape_.query_heads, begin, ood);
  turn(ood ? k_unrotated : k, shape_.kv_heads, begin, ood);
}

void VectorMaker::make_keys(Position begin, std::int64_t tokens) {
  const bool ood = kind_ == KvKind::ood;
  if (ood) {
    make_ood(tokens, false);
  } else {
    fill(k, tokens, shape_.kv_heads, kind_ == KvKind::clustered, kKeyNoise);
    turn(k, shape_.kv_heads, begin, false);
  }
  fill(v, tokens, shape_.kv_heads, false, 1.0f);
}

void CacheEmptier::empty() {
  if (other_.empty()) other_.resize(static_cast<std::size_t>(2 * last_level_cache_bytes()));
  const std::int64_t piece = std::ssize(other_) / pool_.size();
  pool_.for_each(pool_.size(),
                 [&](std::int64_t i, int) { read_ += kernels().read(other_.data() + i * piece, piece) & 1; });
}

ReadFloor::ReadFloor(std::vector<std::span<const std::byte>> buffers, std::int64_t most_bytes,
                     ThreadPool& pool)
    : buffers_(std::move(buffers)), pool_(pool) {
  for (std::int64_t bytes = 1 << 14; bytes < most_bytes; bytes *= 4) sizes_.push_back(bytes);
  sizes_.push_back(most_bytes);
  times_.resize(sizes_.size());
}

void ReadFloor::read(std::int64_t bytes) {
  // Pieces as large as attention's own, and enough of them for every thread.
  const std::int64_t piece = std::clamp<std::int64_t>(bytes / (8 * pool_.size()), 1 << 12, 1 << 18);
  std::vector<std::span<const std::byte>> pieces;
  for (std::int64_t left = bytes; left > 0;) {
    const std::span<const std::byte> buffer = buffers_[buffer_];
    const std::size_t take =
        std::min({static_cast<std::size_t>(std::min(left, piece)), buffer.size() - offset_});
    pieces.push_back(buffer.subspan(offset_, take));
    left -= static_cast<std::int64_t>(take);
    offset_ += take;
    if (offset_ == buffer.size()) offset_ = 0, buffer_ = (buffer_ + 1) % buffers_.size();
  }
  const KernelTable& table = kernels();
  pool_.for_each(std::ssize(pieces), [&](std::int64_t i, int) {
    const std::span<const std::byte> p = pieces[static_cast<std::size_t>(i)];
    const std::uint64_t bits = table.read(p.data(), std::ssize(p));
    asm volatile("" ::"r"(bits));  // the result counts as used
  });
}

void ReadFloor::measure() {
  for (std::size_t i = 0; i < sizes_.size(); ++i) times_[i].push_back(microseconds([&] { read(sizes_[i]); }));
}

double ReadFloor::microseconds_for(std::int64_t bytes) const {
  if (bytes <= 0) return 0.0;
  std::size_t above = 0;
  while (above + 1 < sizes_.size() && sizes_[above] < bytes) ++above;
  const double high = median(times_[above]);
  if (above == 0) return high;
  const double low = median(times_[above - 1]);
  const auto x0 = static_cast<double>(sizes_[above - 1]), x1 = static_cast<double>(sizes_[above]);
  return low + (high - low) * (static_cast<double>(bytes) - x0) / (x1 - x0);
}

}  // namespace lode
