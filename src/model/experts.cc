// SPDX-License-Identifier: Apache-2.0
#include "model/experts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/threads.h"
#include "lodestone/error.h"

namespace lode {

namespace {

/// Scores of all experts, in place.
void score(const ExpertPlan& plan, std::span<float> x) {
  if (plan.score == ExpertPlan::Score::sigmoid) {
    for (float& v : x) v = 1.0f / (1.0f + std::exp(-v));
    return;
  }
  const float most = *std::max_element(x.begin(), x.end());
  float sum = 0;
  for (float& v : x) sum += v = std::exp(v - most);
  for (float& v : x) v /= sum;
}

/// Numbers of the `count` largest, largest first.
std::vector<int> largest(std::span<const float> x, int count) {
  std::vector<int> order(x.size());
  std::iota(order.begin(), order.end(), 0);
  const auto better = [&](int a, int b) {
    const float left = x[static_cast<std::size_t>(a)], right = x[static_cast<std::size_t>(b)];
    return left > right || (left == right && a < b);
  };
  std::partial_sort(order.begin(), order.begin() + count, order.end(), better);
  order.resize(static_cast<std::size_t>(count));
  return order;
}

/// Experts outside the best groups are out of the question.
void keep_best_groups(const ExpertPlan& plan, std::vector<float>& scores) {
  if (plan.groups_used == plan.groups) return;
  const std::int64_t size = plan.count / plan.groups;
  std::vector<float> best;
  for (int g = 0; g < plan.groups; ++g) {
    std::vector<float> group(scores.begin() + g * size, scores.begin() + (g + 1) * size);
    std::partial_sort(group.begin(), group.begin() + plan.group_best, group.end(), std::greater<>());
    best.push_back(std::accumulate(group.begin(), group.begin() + plan.group_best, 0.0f));
  }
  const auto kept = largest(best, plan.groups_used);
  for (int g = 0; g < plan.groups; ++g)
    if (std::find(kept.begin(), kept.end(), g) == kept.end())
      std::fill_n(scores.begin() + g * size, size, -std::numeric_limits<float>::infinity());
}

/// Weights of the chosen, from their logits or scores.
void weigh(const ExpertPlan& plan, std::span<Choice> chosen) {
  std::vector<float> weights;
  for (const Choice& c : chosen) weights.push_back(c.weight);
  if (plan.score_chosen) score(plan, weights);
  const float sum = std::accumulate(weights.begin(), weights.end(), 0.0f);
  const float divisor = plan.normalise ? sum + 1e-20f : 1.0f;
  for (std::size_t i = 0; i < chosen.size(); ++i)
    chosen[i].weight = weights[i] / divisor * static_cast<float>(plan.scale);
}

}  // namespace

std::vector<Choice> choose_experts(const ExpertPlan& plan, std::span<const float> logits,
                                   std::span<const float> choice_bias, std::int64_t tokens) {
  const auto e = static_cast<std::size_t>(plan.count), used = static_cast<std::size_t>(plan.used);
  std::vector<Choice> all(static_cast<std::size_t>(tokens) * used);
  for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
    std::vector<float> scores(logits.begin() + static_cast<std::ptrdiff_t>(t * e),
                              logits.begin() + static_cast<std::ptrdiff_t>((t + 1) * e));
    if (!plan.score_chosen) score(plan, scores);
    std::vector<float> ranked = scores;
    for (std::size_t i = 0; i < choice_bias.size(); ++i) ranked[i] += choice_bias[i];
    keep_best_groups(plan, ranked);
    const std::span<Choice> chosen(all.data() + t * used, used);
    const std::vector<int> best = largest(ranked, plan.used);
    for (std::size_t i = 0; i < used; ++i)
      chosen[i] = {.expert = best[i], .weight = scores[static_cast<std::size_t>(best[i])]};
    weigh(plan, chosen);
  }
  return all;
}

/// The tiles of block-quantised experts are made in a layer's first step, all together: otherwise hundreds of tokens
/// would each wait for some expert that none chose before.
void Experts::make_ready(std::span<const ExpertWeights> experts, int chosen) {
  const ExpertWeights& one = experts[static_cast<std::size_t>(chosen)];
  if (linear_.ready(one.gate) && linear_.ready(one.up) && linear_.ready(one.down)) return;
  for (const ExpertWeights& e : experts)
    for (const Weight* w : {&e.gate, &e.up, &e.down}) linear_.make_ready(*w);
}

/// Sorts rows by expert, then by who goes through a product together, then by token.
void Experts::sort_rows(std::span<const Choice> choices, std::int64_t tokens) {
  const auto used = static_cast<std::size_t>(plan_.experts.used);
  rows_.assign(choices.size(), 0);
  token_of_.clear();
  shares_.clear();
  std::vector<std::vector<std::size_t>> of(static_cast<std::size_t>(plan_.experts.count));
  for (std::size_t i = 0; i < choices.size(); ++i)
    of[static_cast<std::size_t>(choices[i].expert)].push_back(i);
  for (std::size_t e = 0; e < of.size(); ++e) {
    std::size_t at = 0;
    for (const LinearLayers::Rows& together : linear_.rows()) {
      Share share{static_cast<int>(e), together.narrow, together.bf16, std::ssize(token_of_), 0};
      const auto end = static_cast<std::size_t>(std::min(tokens, together.first + together.count));
      for (; at < of[e].size() && of[e][at] / used < end; ++at, ++share.count) {
        rows_[of[e][at]] = std::ssize(token_of_);
        token_of_.push_back(static_cast<std::int64_t>(of[e][at] / used));
      }
      if (share.count > 0) shares_.push_back(share);
    }
  }
}

/// `projections` share the sorted rows: those of x [n, D] that `order` names, or x where there is none.
void Experts::multiply(const std::vector<float>& x, std::int64_t n, std::span<const std::int64_t> order,
                       std::span<const ExpertWeights> experts, std::initializer_list<Projected> projections) {
  std::vector<RowsProduct> products;
  for (const Projected& p : projections) {
    const std::int64_t cols = (experts.front().*p.w).rows;
    p.out->resize(rows_.size() * static_cast<std::size_t>(cols));
    for (const Share& s : shares_)
      products.push_back({.w = &(experts[static_cast<std::size_t>(s.expert)].*p.w),
                          .first = s.first,
                          .rows = s.count,
                          .out = p.out->data() + s.first * cols,
                          .narrow = s.narrow,
                          .bf16 = s.bf16});
  }
  linear_.grouped(x, n, products, order);
  for (const Projected& p : projections) add_biases(experts, p);
}

void Experts::add_biases(std::span<const ExpertWeights> experts, const Projected& p) {
  const std::int64_t cols = (experts.front().*p.w).rows;
  for (const Share& s : shares_) {
    const Weight& b = experts[static_cast<std::size_t>(s.expert)].*p.bias;
    if (b.data == nullptr) continue;
    const std::vector<float> numbers = numbers_of(b);
    for (std::int64_t row = s.first; row < s.first + s.count; ++row)
      for (std::int64_t i = 0; i < cols; ++i)
        (*p.out)[static_cast<std::size_t>(row * cols + i)] += numbers[static_cast<std::size_t>(i)];
  }
}

void Experts::add(const LayerWeights& w, const std::vector<float>& routed, const std::vector<float>& h,
                  std::int64_t tokens, const Activate& activate, std::vector<float>& out) {
  const ExpertPlan& plan = plan_.experts;
  const std::int64_t d = hidden_;
  logits_.resize(static_cast<std::size_t>(tokens * plan.count));
  linear_(routed, {{&w.router, &w.router_bias, &logits_, true}});
  const std::vector<float> bias =
      w.choice_bias.data == nullptr ? std::vector<float>{} : numbers_of(w.choice_bias);
  std::vector<Choice> choices = choose_experts(plan, logits_, bias, tokens);
  if (plan.apart) {
    const std::vector<float> factors = numbers_of(w.apart.factors);
    for (Choice& c : choices) c.weight *= factors[static_cast<std::size_t>(c.expert)];
  }
  if (choices.empty()) return;
  make_ready(w.experts, choices.front().expert);
  sort_rows(choices, tokens);
  multiply(h, tokens, token_of_, w.experts,
           {{&ExpertWeights::gate, &ExpertWeights::gate_bias, &gate_},
            {&ExpertWeights::up, &ExpertWeights::up_bias, &up_}});
  activate(gate_, up_, std::ssize(choices));
  multiply(gate_, std::ssize(choices), {}, w.experts,
           {{&ExpertWeights::down, &ExpertWeights::down_bias, &down_}});
  pool_.for_each(tokens, [&](std::int64_t t, int) {
    for (std::int64_t i = t * plan.used; i < (t + 1) * plan.used; ++i) {
      const float weight = choices[static_cast<std::size_t>(i)].weight;
      const float* const from = down_.data() + rows_[static_cast<std::size_t>(i)] * d;
      for (std::int64_t c = 0; c < d; ++c) out[static_cast<std::size_t>(t * d + c)] += weight * from[c];
    }
  });
}

std::int64_t Experts::scratch_floats() const {
  const ExpertPlan& e = plan_.experts;
  return e.count + e.used * (2 * hidden_ + 2 * e.width);
}

}  // namespace lode
