// SPDX-License-Identifier: Apache-2.0
#include "lab/train/saap/keys.h"

#include <algorithm>
#include <cmath>

#include "kernels/kernels.h"
#include "lab/train/checkpoint.h"
#include "lab/train/loss.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Keys with these chances, each once: systematic sampling, so that their number is the chances' sum, up to
/// rounding.
std::vector<std::int64_t> drawn(std::span<const double> chances, Rng& rng) {
  std::vector<std::int64_t> keys;
  double sum = 0.0, next = rng.uniform();
  for (std::size_t k = 0; k < chances.size(); ++k) {
    sum += chances[k];
    if (sum <= next) continue;
    keys.push_back(static_cast<std::int64_t>(k));
    next += 1.0;
  }
  return keys;
}

/// Half of the chances lies as `attention` does, half evenly over the keys from `begin` on.
std::vector<double> chances_of(std::vector<double> attention, std::int64_t begin, std::int64_t keys) {
  const double n = static_cast<double>(std::max<std::int64_t>(1, std::ssize(attention) - begin)),
               half = 0.5 * static_cast<double>(keys);
  for (std::int64_t k = 0; k < std::ssize(attention); ++k) {
    double& chance = attention[static_cast<std::size_t>(k)];
    chance = k < begin ? 0.0 : std::min(1.0, half * chance + half / n);
  }
  return attention;
}

template <class T>
void add_row(std::vector<T>& to, const T* from, std::int64_t count) {
  to.insert(to.end(), from, from + count);
}

}  // namespace

SaapKeySample sample_saap_keys(const SaapCandidates& candidates, const SaapRows& rows, const Rope& rope,
                               float scale, const SaapFilter& filter, std::int64_t queries, std::int64_t keys,
                               Rng& rng) {
  SaapKeySample sample;
  const auto all = std::ssize(candidates.positions);
  if (all == 0) return sample;
  const std::int64_t d = std::ssize(candidates.q) / all, n = std::ssize(rows.plain) / d;
  const Matrix<const float> rotated(rows.rotated.data(), n, d);
  std::vector<double> mean(static_cast<std::size_t>(n), 0.0), own(mean.size()), log_sums;
  for_each_scored(candidates, rotated, rope, scale, filter, queries,
                  [&](std::int64_t, std::span<const float> scores, const SaapFilter::Ranges& far) {
                    const float most = best_score(scores, far);
                    double total = 0.0;
                    far.for_each([&](std::size_t k) { total += own[k] = std::exp(scores[k] - most); });
                    far.for_each([&](std::size_t k) { mean[k] += own[k] / total; });
                    log_sums.push_back(most + std::log(total));
                  });
  if (log_sums.empty()) return sample;
  for (double& share : mean) share /= static_cast<double>(log_sums.size());
  const std::vector<double> chances = chances_of(std::move(mean), filter.sink, keys);
  const std::vector<std::int64_t> chosen = drawn(chances, rng);
  for (const std::int64_t k : chosen) {
    add_row(sample.k, rows.plain.data() + k * d, d);
    sample.stands_for.push_back(static_cast<float>(1.0 / chances[static_cast<std::size_t>(k)]));
  }
  std::vector<float> row(chosen.size());
  std::size_t query = 0;
  for_each_scored(candidates, rotated, rope, scale, filter, queries,
                  [&](std::int64_t at, std::span<const float> scores, const SaapFilter::Ranges& far) {
                    const double log_sum = log_sums[query++];
                    for (std::size_t i = 0; i < chosen.size(); ++i) {
                      const double score = scores[static_cast<std::size_t>(chosen[i])];
                      row[i] = far.holds(chosen[i])
                                   ? static_cast<float>(std::exp(score - log_sum)) * sample.stands_for[i]
                                   : 0.0f;
                    }
                    add_row(sample.q, candidates.q.data() + at * d, d);
                    sample.attention.resize(sample.attention.size() + row.size());
                    kernels().narrow(row.data(), std::ssize(row), DType::f16,
                                     sample.attention.data() + sample.attention.size() - row.size());
                  });
  return sample;
}

SaapKeyTrainer::SaapKeyTrainer(const Shape& shape, std::span<const float> centroids, double rate,
                               std::uint64_t seed)
    : keys_(shape.d, shape.hidden, shape.buckets, true, hash_seed(seed, 0)),
      queries_(shape.d, shape.hidden, shape.buckets, true, hash_seed(seed, 1)),
      of_keys_(keys_.module(), {.rate = rate}),
      of_queries_(queries_.module(), {.rate = rate}) {
  keys_.start_linear(centroids);
  queries_.start_linear(centroids);
}

double SaapKeyTrainer::step(const SaapKeySample& sample, std::span<const std::int32_t> queries,
                            double rate_scale) {
  Module &f_k = keys_.module(), &f_q = queries_.module();
  const std::int64_t d = f_k.inputs(), c = f_k.outputs(), n_k = std::ssize(sample.stands_for),
                     n_q = std::ssize(queries);
  const auto matrix = [](std::vector<float>& buffer, std::int64_t rows, std::int64_t columns) {
    buffer.resize(static_cast<std::size_t>(rows * columns));
    return Matrix<float>(buffer.data(), rows, columns);
  };
  std::vector<float> buffers[6];
  const Matrix<float> q = matrix(buffers[0], n_q, d), attention = matrix(buffers[1], n_q, n_k),
                      of_keys = matrix(buffers[2], n_k, c), of_queries = matrix(buffers[3], n_q, c),
                      keys_gradient = matrix(buffers[4], n_k, c),
                      queries_gradient = matrix(buffers[5], n_q, c);
  for (std::int64_t i = 0; i < n_q; ++i) {
    const std::int64_t row = queries[static_cast<std::size_t>(i)];
    std::copy_n(sample.q.data() + row * d, d, q[i].data());
    kernels().widen(sample.attention.data() + row * n_k, DType::f16, n_k, attention[i].data());
  }
  f_k.forward({sample.k.data(), n_k, d}, of_keys, true);
  f_q.forward(q, of_queries, true);
  const double loss =
      partition_loss(of_keys, of_queries, attention, sample.stands_for, keys_gradient, queries_gradient);
  for (Module* module : {&f_k, &f_q}) module->zero_gradients();
  f_k.backward(keys_gradient, {});
  f_q.backward(queries_gradient, {});
  of_keys_.step(rate_scale);
  of_queries_.step(rate_scale);
  return loss;
}

void SaapKeyTrainer::put(Checkpoint& checkpoint, const std::string& prefix) {
  checkpoint.put(prefix + "keys.", keys_.module(), &of_keys_);
  checkpoint.put(prefix + "queries.", queries_.module(), &of_queries_);
}

void SaapKeyTrainer::get(const Checkpoint& checkpoint, const std::string& prefix, const std::string& where) {
  checkpoint.get(prefix + "keys.", keys_.module(), &of_keys_, where);
  checkpoint.get(prefix + "queries.", queries_.module(), &of_queries_, where);
}

}  // namespace lode
