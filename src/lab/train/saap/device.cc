// SPDX-License-Identifier: Apache-2.0
#include "lab/train/saap/device.h"

#include <algorithm>

#include "gpu/backend.h"
#include "gpu/train/saap.h"
#include "kernels/kernels.h"
#include "lab/train/loss.h"
#include "lodestone/error.h"

namespace lode {

namespace {

// ---- On the CPU ------------------------------------------------------------------------------------------

class FitOnCpu final : public SaapFit {
 public:
  FitOnCpu(const SaapExamples& examples, SaapClassifier& classifier, Adam& adam)
      : examples_(examples), classifier_(classifier), adam_(adam) {}

  std::int64_t series() const override { return 1; }
  void begin(const std::vector<Step>& steps) override {
    losses_.clear();
    for (const Step& step : steps) losses_.push_back(take(step));
  }
  std::vector<double> finish() override { return losses_; }
  void store() override {}

 private:
  /// One batch of equation 1.
  double take(const Step& step) {
    Module& module = classifier_.module();
    const auto n = std::ssize(step.rows);
    const std::int64_t d = module.inputs(), c = module.outputs();
    std::vector<float> x(static_cast<std::size_t>(n * d)), targets(static_cast<std::size_t>(n * c)),
        y(targets.size()), dy(targets.size());
    const Matrix<float> q(x.data(), n, d), target(targets.data(), n, c);
    for (std::int64_t i = 0; i < n; ++i)
      examples_.read(step.rows[static_cast<std::size_t>(i)], q[i], target[i]);
    module.forward({x.data(), n, d}, {y.data(), n, c}, true);
    const double loss = kl_divergence({y.data(), n, c}, {targets.data(), n, c}, {dy.data(), n, c});
    module.zero_gradients();
    module.backward({dy.data(), n, c}, {});
    adam_.step(step.rate_scale);
    return loss;
  }

  const SaapExamples& examples_;
  SaapClassifier& classifier_;
  Adam& adam_;
  std::vector<double> losses_;
};

class OnCpu final : public SaapDevice {
 public:
  explicit OnCpu(ThreadPool& pool) : pool_(pool) {}
  std::vector<float> cluster(Matrix<const float> keys, const KMeansOptions& options) override {
    return spherical_kmeans(keys, options, pool_);
  }
  void label(const BucketNet& keys, Matrix<const float> plain, std::span<std::int32_t> labels) override {
    keys.label(plain, labels);
  }
  std::int64_t add_examples(const SaapCandidates& candidates, const SaapKeys& keys, const Rope& rope,
                            float scale, const SaapFilter& filter, std::int64_t wanted,
                            SaapExamples& examples) override {
    return add_saap_examples(candidates, keys, rope, scale, filter, wanted, examples);
  }
  std::unique_ptr<SaapFit> fit(const SaapExamples& examples, SaapClassifier& classifier, Adam& adam,
                               std::int64_t) override {
    return std::make_unique<FitOnCpu>(examples, classifier, adam);
  }
  std::string name() const override { return std::string(kernels().name); }

 private:
  ThreadPool& pool_;
};

// ---- On a GPU --------------------------------------------------------------------------------------------

/// The classifier's arrays with the moments that the optimiser keeps of them.
GpuSaapNet arrays_of(const SaapClassifier& classifier, Adam& adam) {
  const SaapClassifier::Layers layers = classifier.layers();
  const auto trained = [&](Parameter& p) {
    GpuSaapNet::Array array = {.value = p.value, .first = {}, .second = {}};
    for (Adam::Moments& m : adam.moments())
      if (m.parameter == &p) array.first = m.first, array.second = m.second;
    return array;
  };
  GpuSaapNet net = {.inputs = layers.first->inputs(),
                    .hidden = layers.first->outputs(),
                    .buckets = layers.second->outputs(),
                    .beta1 = adam.options().beta1,
                    .beta2 = adam.options().beta2};
  net.w1 = trained(layers.first->weight), net.b1 = trained(layers.first->bias);
  net.w2 = trained(layers.second->weight), net.b2 = trained(layers.second->bias);
  if (layers.linear != nullptr)
    net.w3 = trained(layers.linear->weight), net.b3 = trained(layers.linear->bias);
  if (layers.norm == nullptr) return net;
  net.gain = trained(layers.norm->gain), net.shift = trained(layers.norm->bias);
  net.mean.value = layers.norm->mean.value, net.variance.value = layers.norm->variance.value;
  net.momentum = layers.norm->momentum(), net.norm_epsilon = layers.norm->epsilon();
  return net;
}

class FitOnGpu final : public SaapFit {
 public:
  FitOnGpu(std::unique_ptr<GpuSaapFit> fit, Adam& adam) : fit_(std::move(fit)), adam_(adam) {}

  std::int64_t series() const override { return kGpuSaapSteps; }
  void begin(const std::vector<Step>& steps) override {
    std::vector<GpuSaapStep> with_rates;
    for (const Step& step : steps) {
      const Adam::Update update = adam_.count_step(step.rate_scale);
      with_rates.push_back({step.rows, update.rate, update.keep, update.epsilon});
    }
    fit_->begin(with_rates);
  }
  std::vector<double> finish() override { return fit_->finish(); }
  void store() override { fit_->store(); }

 private:
  std::unique_ptr<GpuSaapFit> fit_;
  Adam& adam_;
};

class OnGpu final : public SaapDevice {
 public:
  explicit OnGpu(bool exact) : gpu_(make_gpu_saap_training(exact)) {}

  std::vector<float> cluster(Matrix<const float> keys, const KMeansOptions& options) override {
    return gpu_->cluster(keys, options);
  }

  void label(const BucketNet& keys, Matrix<const float> plain, std::span<std::int32_t> labels) override {
    if (keys.hidden > 0) return keys.label(plain, labels);
    std::vector<float> centroids(static_cast<std::size_t>(keys.buckets * keys.inputs));
    kernels().widen(keys.linear_weight.data(), keys.type, std::ssize(centroids), centroids.data());
    gpu_->label(plain, centroids, keys.bias, labels);
  }

  std::int64_t add_examples(const SaapCandidates& candidates, const SaapKeys& keys, const Rope& rope,
                            float scale, const SaapFilter& filter, std::int64_t wanted,
                            SaapExamples& examples) override {
    const auto count = std::ssize(candidates.positions), n = std::ssize(keys.labels);
    if (count == 0 || n == 0) return 0;
    const std::int64_t d = std::ssize(candidates.q) / count, c = std::ssize(keys.counts);
    const std::vector<float> q =
        scored_queries(candidates.q, candidates.positions, candidates.further, rope, scale);
    std::vector<GpuSaapQueries::Reach> reach;
    for (const Position position : candidates.positions) reach.push_back(reach_of(filter, position, n));
    const GpuSaapTargets found =
        gpu_->targets({.rotated = {keys.rotated.data(), n, d}, .labels = keys.labels, .buckets = c},
                      {.q = {q.data(), count, d}, .reach = reach}, wanted);
    for (std::size_t i = 0; i < found.chosen.size(); ++i) {
      const auto width = static_cast<std::size_t>(c), row = static_cast<std::size_t>(d);
      examples.add(std::span(candidates.q).subspan(static_cast<std::size_t>(found.chosen[i]) * row, row),
                   std::span(found.targets).subspan(i * width, width));
    }
    return found.looked_at;
  }

  std::unique_ptr<SaapFit> fit(const SaapExamples& examples, SaapClassifier& classifier, Adam& adam,
                               std::int64_t batch) override {
    std::int64_t most = 2;  // of any batch
    for (std::int64_t prompt = 0; prompt < examples.prompts(); ++prompt)
      most = std::max(most, std::min(batch, examples.end_of(prompt) - examples.begin_of(prompt)));
    const GpuSaapExamples all = {.q = examples.queries(), .targets = examples.targets()};
    return std::make_unique<FitOnGpu>(gpu_->fit(arrays_of(classifier, adam), all, most), adam);
  }

  std::string name() const override { return gpu_info().name + ", products by cuBLASLt: " + gpu_->library(); }

 private:
  static GpuSaapQueries::Reach reach_of(const SaapFilter& filter, Position position, std::int64_t n) {
    const SaapFilter::Ranges far = filter.far(position, n);
    const auto whole = [](std::int64_t x) { return static_cast<std::int32_t>(x); };
    return {.begin = whole(far.begin),
            .first_end = whole(far.first_end),
            .second_begin = whole(far.second_begin),
            .end = whole(far.end),
            .look_begin = whole(filter.sink),
            .look_end = whole(filter.causal ? position + 1 : n),
            .position = position,
            .distance = filter.queries ? whole(std::min<std::int64_t>(filter.distance, INT32_MAX)) : -1};
  }

  std::unique_ptr<GpuSaapTraining> gpu_;
};

}  // namespace

std::unique_ptr<SaapDevice> make_saap_device(Device device, ThreadPool& pool, bool exact) {
  if (device == Device::cuda) return std::make_unique<OnGpu>(exact);
  return std::make_unique<OnCpu>(pool);
}

}  // namespace lode
