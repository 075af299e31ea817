// SPDX-License-Identifier: Apache-2.0
// What the played GPU does in a training step of HashAttention's functions, plainly and in float64. Behind
// counted rows it writes nothing, as the kernels promise, so that who reads there reads NaNs.
#include <algorithm>
#include <cmath>
#include <vector>

#include "gpu_fake/play.h"
#include "kernels/cuda/hash/train.h"
#include "kernels/cuda/linear/many_products.h"
#include "kernels/kernels.h"

namespace lode::cuda {

namespace {

std::int64_t counted(const ManyProducts& p, CountedDimension which, std::int64_t length, std::int64_t outer) {
  return p.counts != nullptr && p.counted == which ? p.counts[outer] : length;
}

void multiply_one(const ManyProducts& p, std::int64_t outer, std::int64_t inner) {
  const std::int64_t m = counted(p, CountedDimension::m, p.m, outer),
                     n = counted(p, CountedDimension::n, p.n, outer),
                     k = counted(p, CountedDimension::k, p.k, outer);
  const float *const a = p.a.data + outer * p.a.outer + inner * p.a.inner, *const b = p.b.data +
                                                                                      outer * p.b.outer +
                                                                                      inner * p.b.inner;
  float* const c = p.c.data + outer * p.c.outer + inner * p.c.inner;
  const std::int64_t parts = p.part == 0 ? 1 : parts_of(p.k);
  for (std::int64_t part = 0; part < parts; ++part) {
    const std::int64_t begin = part * kPartLength, end = p.part == 0 ? k : std::min(k, begin + kPartLength);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (std::int64_t l = begin; l < end; ++l)
          sum += static_cast<double>(a[p.a_transposed ? l * p.a.row + i : i * p.a.row + l]) *
                 b[p.b_transposed ? j * p.b.row + l : l * p.b.row + j];
        c[part * p.part + i * p.c.row + j] = static_cast<float>(sum);
      }
    }
  }
}

void mark(const HashMarks& marks, std::int64_t head, std::int64_t key) {
  marks.words[head * marks.width() + key / 32] |= 1u << (key % 32);
}
bool is_marked(const HashMarks& marks, std::int64_t head, std::int64_t key) {
  return (marks.words[head * marks.width() + key / 32] >> (key % 32) & 1u) != 0;
}

double slope_of(HashActivation activation, double saved) {
  if (activation == HashActivation::tanh) return 1 - saved * saved;
  if (activation == HashActivation::relu) return saved > 0 ? 1 : 0;
  const double s = 1 / (1 + std::exp(-saved));
  return s * (1 + saved * (1 - s));
}

std::int64_t rows_of(const HashRows& shape, std::int64_t head) {
  return shape.counts != nullptr ? shape.counts[head] : shape.rows;
}

/// The loss of one query, whose products become their gradients.
double loss_of(const HashLoss& l, std::int64_t head, std::int64_t query, std::int64_t listed, float* z) {
  const std::int64_t row = head * l.group * l.tokens + query,
                     far = l.far_counts[head * l.tokens + query % l.tokens];
  const std::uint8_t* const labels = l.labels + row * l.most;
  z += row * l.most;
  double pairs = 0, loss = 0, pivotal = 0, peak = -1e30, total = 0;
  for (std::int64_t t = 0; t < l.tokens; ++t) pairs += l.far_counts[head * l.tokens + t];
  pairs = std::max(pairs, 1.0);
  for (std::int64_t i = 0; i < far; ++i) pivotal += labels[i], peak = std::max<double>(peak, z[i]);
  for (std::int64_t i = 0; i < far; ++i) total += std::exp(z[i] - peak);
  for (std::int64_t i = 0; i < listed; ++i) {
    const double x = z[i], y = i < far ? labels[i] : 0;
    double gradient = 0;
    if (i < far && !l.softmax) {
      const double weight = y > 0 ? l.class1_weight : 1.0, e = std::exp(-std::abs(x));
      loss += weight * ((x < 0 ? 0 : x) + std::log1p(e) - y * x) / pairs;
      gradient = weight * ((x >= 0 ? 1 : e) / (1 + e) - y) / (pairs * static_cast<double>(l.group));
    } else if (i < far && pivotal > 0) {
      const double target = y / pivotal, log_share = x - peak - std::log(total);
      loss -= target * log_share / static_cast<double>(l.tokens);
      gradient = (std::exp(log_share) - target) / static_cast<double>(l.tokens * l.group);
    }
    z[i] = static_cast<float>(gradient);
  }
  return loss;
}

}  // namespace

void multiply_many(const ManyProducts& p, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t outer = 0; outer < p.outer; ++outer)
      for (std::int64_t inner = 0; inner < p.inner; ++inner) multiply_one(p, outer, inner);
  });
}

void mark_keys(const HashMarks& marks, const std::int32_t* keys, const std::int32_t* counts,
               std::int64_t most, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t head = 0; head < marks.heads; ++head)
      for (std::int64_t i = 0; i < counts[head]; ++i) mark(marks, head, keys[head * most + i]);
  });
}

void find_pivotal(const HashMarks& marks, const HashQueries& queries, const float* scores,
                  const float* log_norms, std::int64_t top, std::int32_t* pivotal, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t row = 0; row < marks.heads * queries.rows(); ++row) {
      const std::int64_t head = row / queries.rows();
      std::vector<float> own(
          static_cast<std::size_t>(queries.far_ends[row % queries.rows() % queries.tokens]));
      for (std::size_t i = 0; i < own.size(); ++i) {
        const auto key = static_cast<std::int64_t>(i);
        own[i] = scores[row * marks.keys + key] +
                 (log_norms == nullptr ? 0.0f : log_norms[head * marks.keys + key]);
      }
      std::vector<Position> found;
      top_k(own, top, 0, found);
      std::copy(found.begin(), found.end(), pivotal + row * top);
      for (const Position key : found) mark(marks, head, key);
    }
  });
}

void list_marked(const HashMarks& marks, const HashQueries& queries, std::int64_t most, std::int32_t* listed,
                 std::int32_t* counts, std::int32_t* far_counts, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t head = 0; head < marks.heads; ++head) {
      std::int32_t* const own = listed + head * most;
      std::int32_t count = 0;
      for (std::int64_t key = 0; key < marks.keys; ++key) {
        if (key % 32 == 0) marks.before[head * marks.width() + key / 32] = count;
        if (is_marked(marks, head, key)) own[count++] = static_cast<std::int32_t>(key);
      }
      counts[head] = count;
      for (std::int64_t t = 0; t < queries.tokens; ++t)
        far_counts[head * queries.tokens + t] =
            static_cast<std::int32_t>(std::lower_bound(own, own + count, queries.far_ends[t]) - own);
    }
  });
}

void label_pivotal(const HashMarks& marks, const HashQueries& queries, const std::int32_t* pivotal,
                   std::int64_t top, std::int64_t most, std::uint8_t* labels, StreamHandle stream) {
  enqueue(stream, [=] {
    std::fill_n(labels, marks.heads * queries.rows() * most, std::uint8_t{0});
    for (std::int64_t row = 0; row < marks.heads * queries.rows(); ++row) {
      const std::int64_t head = row / queries.rows(),
                         far = queries.far_ends[row % queries.rows() % queries.tokens];
      for (std::int64_t i = 0; i < std::min(top, far); ++i) {
        const std::int32_t key = pivotal[row * top + i];
        std::int64_t place = marks.before[head * marks.width() + key / 32];
        for (std::int64_t k = key / 32 * 32; k < key; ++k) place += is_marked(marks, head, k) ? 1 : 0;
        labels[row * most + place] = 1;
      }
    }
  });
}

void gather_turned(const HashGather& g, float* x, StreamHandle stream) {
  enqueue(stream, [=] {
    const std::int64_t half = g.head_dim / 2;
    for (std::int64_t head = 0; head < g.heads; ++head) {
      const float* const turns = g.turns + head * g.head_dim;
      for (std::int64_t i = 0; i < g.counts[head]; ++i) {
        const float* const from = g.inputs + (head * g.keys + g.listed[head * g.most + i]) * g.width;
        float* const to = x + (head * g.most + i) * g.width;
        std::copy_n(from, g.width, to);
        for (std::int64_t j = 0; j < half; ++j) {
          to[j] = from[j] * turns[j] - from[half + j] * turns[half + j];
          to[half + j] = from[half + j] * turns[j] + from[j] * turns[half + j];
        }
      }
    }
  });
}

void activate(HashActivation activation, const HashRows& shape, const ManyMatrices<const float>& bias,
              float* x, float* y, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t pair = 0; pair < shape.heads * shape.functions; ++pair) {
      const std::int64_t head = pair / shape.functions, function = pair % shape.functions;
      for (std::int64_t i = 0; i < rows_of(shape, head) * shape.width; ++i) {
        const std::int64_t at = pair * shape.rows * shape.width + i;
        const float in = x[at] + bias.data[head * bias.outer + function * bias.inner + i % shape.width];
        x[at] = in;
        y[at] = activation == HashActivation::relu   ? std::max(in, 0.0f)
                : activation == HashActivation::silu ? in / (1 + std::exp(-in))
                                                     : std::tanh(in);
      }
    }
  });
}

void slopes(HashActivation activation, const HashRows& shape, const HashSlopes& s, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t pair = 0; pair < shape.heads * shape.functions; ++pair) {
      const std::int64_t head = pair / shape.functions, function = pair % shape.functions,
                         rows = rows_of(shape, head);
      float* const bias = s.bias.data + head * s.bias.outer + function * s.bias.inner;
      for (std::int64_t part = 0; part < parts_of(shape.rows); ++part) {
        for (std::int64_t col = 0; col < shape.width; ++col) {
          double sum = 0;
          for (std::int64_t row = part * kPartLength; row < std::min(rows, (part + 1) * kPartLength); ++row) {
            const std::int64_t at = (pair * shape.rows + row) * shape.width + col;
            double dy = 0;
            for (std::int64_t p = 0; p < s.parts; ++p) dy += s.dy[at + p * s.part];
            s.dx[at] = static_cast<float>(dy * slope_of(activation, s.saved[at]));
            sum += s.dx[at];
          }
          bias[part * s.bias_part + col] = static_cast<float>(sum);
        }
      }
    }
  });
}

void pivotal_loss(const HashLoss& loss, const std::int32_t* counts, float* z, double* row_losses,
                  StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t row = 0; row < loss.heads * loss.group * loss.tokens; ++row) {
      const std::int64_t head = row / (loss.group * loss.tokens);
      row_losses[row] = loss_of(loss, head, row % (loss.group * loss.tokens), counts[head], z);
    }
  });
}

void sum_losses(const HashLoss& loss, const double* row_losses, double* losses, StreamHandle stream) {
  enqueue(stream, [=] {
    const std::int64_t rows = loss.group * loss.tokens;
    for (std::int64_t head = 0; head < loss.heads; ++head) {
      double sum = 0;
      for (std::int64_t i = 0; i < rows; ++i) sum += row_losses[head * rows + i];
      losses[head] = sum / static_cast<double>(loss.group);
    }
  });
}

void adam_of_parts(const HashAdam& a, std::int64_t count, StreamHandle stream) {
  enqueue(stream, [=] {
    for (std::int64_t i = 0; i < count; ++i) {
      float g = 0;
      for (std::int64_t p = 0; p < a.parts; ++p) g += a.gradient[i + p * a.part];
      a.first[i] = a.beta1 * a.first[i] + (1 - a.beta1) * g;
      a.second[i] = a.beta2 * a.second[i] + (1 - a.beta2) * g * g;
      a.value[i] = a.keep * a.value[i] - a.rate * a.first[i] / (std::sqrt(a.second[i]) + a.epsilon);
    }
  });
}

}  // namespace lode::cuda
