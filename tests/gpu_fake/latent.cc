// SPDX-License-Identifier: Apache-2.0
// What stands around attention over latent rows on the played GPU, number by number.
#include "kernels/cuda/latent/latent.h"

#include <cmath>

#include "gpu_fake/play.h"
#include "kernels/kernels.h"

namespace lode::cuda {

namespace {

void multiply_now(const HeadProduct& p) {
  const std::int64_t rows = p.rows(), cols = p.w.cols;
  const std::vector<float> w = widened(p.w.data, p.w.type, p.w.rows * cols);
  std::vector<float> x(static_cast<std::size_t>(cols));
  for (std::int64_t slot = 0; slot < p.tokens * p.heads; ++slot) {
    for (int c = 0; c < cols; ++c)
      x[static_cast<std::size_t>(c)] = p.input.x[slot * p.input.stride + p.input.place(c)];
    const float* const of_head = w.data() + slot % p.heads * rows * cols;
    for (std::int64_t r = 0; r < rows; ++r)
      p.y[slot * rows + r] = static_cast<float>(kernels().dot(x.data(), of_head + r * cols, cols));
  }
}

struct Turned {
  std::vector<float> plain, turned;
};

/// A row of latent numbers and those that turn, in the order in which rows lie.
Turned put_together(const LatentRows& in, const float* latent, const float* turns, std::int32_t position) {
  const LatentShape& s = in.shape;
  const int half = s.row() / 2, turning = s.rope / 2;
  Turned row;
  row.plain.resize(static_cast<std::size_t>(s.row()));
  for (int i = 0; i < s.kv_rank; ++i)
    row.plain[static_cast<std::size_t>(i < s.in_half() ? turning + i : half + turning + i - s.in_half())] =
        latent[i];
  for (int i = 0; i < s.rope; ++i)
    row.plain[static_cast<std::size_t>(s.interleaved ? i / 2 + i % 2 * half
                                                     : i % turning + i / turning * half)] = turns[i];
  row.turned = row.plain;
  for (int i = 0; i < turning; ++i) {
    const float angle = static_cast<float>(position) * in.frequencies[i],
                cosine = std::cos(angle) * in.rope_scale, sine = std::sin(angle) * in.rope_scale;
    const auto a = static_cast<std::size_t>(i), b = static_cast<std::size_t>(i + half);
    row.turned[a] = row.plain[a] * cosine - row.plain[b] * sine;
    row.turned[b] = row.plain[b] * cosine + row.plain[a] * sine;
  }
  return row;
}

void put_now(const LatentRows& in, const Queries& where) {
  const LatentShape& s = in.shape;
  const auto put = [&](const std::vector<float>& from, float* to, std::int64_t at) {
    if (to != nullptr) std::copy(from.begin(), from.end(), to + at * s.row());
  };
  for (std::int64_t t = 0; t < where.count; ++t) {
    const QueryToken& token = where.tokens[t];
    for (std::int64_t h = 0; h < where.query_heads; ++h) {
      const std::int64_t at = t * where.query_heads + h;
      const Turned q = put_together(in, in.folded + at * s.kv_rank, in.q + at * (s.nope + s.rope) + s.nope,
                                    token.position);
      put(q.plain, in.q_unrotated, at);
      put(q.turned, in.q_out, at);
    }
    const float* const kv = in.kv + t * s.row();
    const Turned row =
        put_together(in, normed(kv, 1, in.kv_norm, in.eps).data(), kv + s.kv_rank, token.position);
    for (std::int64_t h = 0; h < where.layout.kv_heads; ++h) {
      put(row.plain, in.k_unrotated, t * where.layout.kv_heads + h);
      for (float* const to : {in.k_out, in.v_out}) put(row.turned, to, t * where.layout.kv_heads + h);
    }
    char* const base = const_cast<char*>(where.bases[token.sequence]) + where.layer_offset;
    kernels().narrow(row.turned.data(), s.row(), where.layout.type,
                     base + where.layout.key_offset(0, token.position));
  }
}

}  // namespace

void multiply_heads_few(const HeadProduct& product, StreamHandle stream) {
  enqueue(stream, [=] { multiply_now(product); });
}
void multiply_heads(const HeadProduct& product, Precision, void*, StreamHandle stream) {
  multiply_heads_few(product, stream);
}
std::int64_t heads_scratch_bytes(std::int64_t, int, std::int64_t) {
  return 64;
}
void put_latent_rows(const LatentRows& rows, const Queries& where, StreamHandle stream) {
  enqueue(stream, [=] { put_now(rows, where); });
}

}  // namespace lode::cuda
