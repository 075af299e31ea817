// SPDX-License-Identifier: Apache-2.0
// Keys, queries and labels go through one stream under a lock; every network has a stream and a library
// handle of its own, so that the small steps of many heads run side by side. The first batch of a size runs
// as it comes (a kernel may not be loaded while a stream is captured), later ones replay a graph of it.
#include "gpu/train/saap.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>

#include "base/cancel.h"
#include "gpu/backend.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/linear/product.h"
#include "kernels/cuda/saap/targets.h"
#include "kernels/cuda/saap/train.h"
#include "kernels/cuda/select/select.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kScoreBytes = std::int64_t{512} << 20;  // of one block of queries
constexpr std::int64_t kMostQueries = 1024;                    // of one block
constexpr std::int64_t kKeyMultiple = 64;    // rows of products, so that the library finds its fast kernels
constexpr std::int64_t kFloatMultiple = 64;  // arrays begin at 256 bytes, which the library may assume

std::int64_t rounded_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// At least so many bytes; what was in there is lost when it grows.
void reserve(cuda::Buffer& buffer, std::int64_t bytes, std::string_view what) {
  if (buffer.bytes() >= bytes) return;
  buffer = cuda::Buffer();
  buffer = cuda::Buffer(bytes, what);
}

template <class T>
void upload(const cuda::Buffer& to, std::span<const T> from, const cuda::Stream& stream) {
  cuda::copy(to.as<void>(), from.data(), std::ssize(from) * std::int64_t{sizeof(T)}, stream.get());
}

template <class T>
void download(std::span<T> to, const void* from, const cuda::Stream& stream) {
  cuda::copy(to.data(), from, std::ssize(to) * std::int64_t{sizeof(T)}, stream.get());
}

// ---- k-means ---------------------------------------------------------------------------------------------

class StepsOnGpu final : public LloydSteps {
 public:
  StepsOnGpu(Matrix<const float> x, std::int64_t clusters, const cuda::Stream& stream)
      : stream_(stream),
        n_(x.rows),
        d_(x.cols),
        clusters_(clusters),
        x_(n_ * d_ * 4, "keys to cluster"),
        centroids_(clusters * d_ * 4, "centroids"),
        labels_(n_ * 4, "labels"),
        offsets_((clusters + 1) * 4, "clusters") {
    upload(x_, std::span(x.data, static_cast<std::size_t>(n_ * d_)), stream_);
  }

  void assign(std::span<const float> centroids, std::span<std::int32_t> labels) override {
    upload(centroids_, centroids, stream_);
    cuda::assign(x_.as<float>(), n_, centroids_.as<float>(), clusters_, static_cast<int>(d_),
                 labels_.as<std::int32_t>(), nullptr, stream_.get());
    download(labels, labels_.as<void>(), stream_);
    stream_.synchronize();
  }

  void update(std::span<const std::int64_t> order, std::span<const std::int64_t> offsets,
              std::span<float> centroids) override {
    const std::vector<std::int32_t> rows(order.begin(), order.end()), begins(offsets.begin(), offsets.end());
    upload(labels_, std::span(rows), stream_);
    upload(offsets_, std::span(begins), stream_);
    upload(centroids_, std::span<const float>(centroids), stream_);
    cuda::update_centroids(x_.as<float>(), labels_.as<std::int32_t>(), offsets_.as<std::int32_t>(), clusters_,
                           d_, centroids_.as<float>(), stream_.get());
    download(centroids, centroids_.as<void>(), stream_);
    stream_.synchronize();
  }

 private:
  const cuda::Stream& stream_;
  std::int64_t n_, d_, clusters_;
  cuda::Buffer x_, centroids_;     // [n, d], [C, d]
  cuda::Buffer labels_, offsets_;  // [n] labels, then the order by label; [C + 1]
};

// ---- A network -------------------------------------------------------------------------------------------

class Fit final : public GpuSaapFit {
 public:
  Fit(const GpuSaapNet& net, const GpuSaapExamples& examples, std::int64_t most_rows, bool exact)
      : net_(net), most_rows_(most_rows), products_(exact) {
    place_arrays();
    const std::int64_t d = net.inputs, h = net.hidden, c = net.buckets;
    q_ = cuda::Buffer(std::ssize(examples.q) * 4, "a head's queries");
    targets_ = cuda::Buffer(std::ssize(examples.targets) * 2, "a head's targets");
    upload(q_, examples.q, stream_);
    upload(targets_, examples.targets, stream_);
    x_ = cuda::Buffer(most_rows * d * 4, "a batch");
    for (cuda::Buffer* layer : {&inner_, &normalised_, &active_})
      *layer = cuda::Buffer(most_rows * h * 4, "a batch's hidden layer");
    y_ = cuda::Buffer(most_rows * c * 4, "a batch's outputs");
    row_loss_ = cuda::Buffer(most_rows * 8, "a batch's losses");
    inverse_ = cuda::Buffer(h * 4, "a batch norm");
    table_ = cuda::Buffer(kGpuSaapSteps * std::int64_t{sizeof(cuda::NetStep)}, "steps");
    rows_ = cuda::Buffer(kGpuSaapSteps * most_rows * 4, "batches");
    at_ = cuda::Buffer(4, "the running step");
    losses_ = cuda::Buffer(kGpuSaapSteps * 8, "losses");
    staged_table_ = cuda::PinnedBuffer(table_.bytes());
    staged_rows_ = cuda::PinnedBuffer(rows_.bytes());
    stream_.synchronize();
  }

  void begin(std::span<const GpuSaapStep> steps) override {
    LODE_ASSERT(std::ssize(steps) <= kGpuSaapSteps);
    std::int64_t rows = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const GpuSaapStep& step = steps[i];
      LODE_ASSERT(step.rows.size() >= 2 && std::ssize(step.rows) <= most_rows_);
      staged_table_.as<cuda::NetStep>()[i] = {rows, step.rate, step.keep, step.epsilon};
      std::copy(step.rows.begin(), step.rows.end(), staged_rows_.as<std::int32_t>() + rows);
      rows += std::ssize(step.rows);
    }
    begun_ = std::ssize(steps);
    cuda::copy(table_.as<void>(), staged_table_.as<void>(),
               std::ssize(steps) * std::int64_t{sizeof(cuda::NetStep)}, stream_.get());
    cuda::copy(rows_.as<void>(), staged_rows_.as<void>(), rows * 4, stream_.get());
    cuda::fill(at_.as<void>(), 0, 4, stream_.get());
    for (const GpuSaapStep& step : steps) run(std::ssize(step.rows));
  }

  std::vector<double> finish() override {
    std::vector<double> losses(static_cast<std::size_t>(begun_));
    download(std::span(losses), losses_.as<void>(), stream_);
    stream_.synchronize();
    return losses;
  }

  void store() override {
    std::int64_t at = 0;
    for (const GpuSaapNet::Array* array : trained()) {
      download(array->value, values_.as<float>() + at, stream_);
      download(array->first, first_.as<float>() + at, stream_);
      download(array->second, second_.as<float>() + at, stream_);
      at += rounded_up(std::ssize(array->value), kFloatMultiple);
    }
    if (normed()) {
      download(net_.mean.value, running_.as<float>(), stream_);
      download(net_.variance.value, running_.as<float>() + net_.hidden, stream_);
    }
    stream_.synchronize();
  }

 private:
  static constexpr int kArrays = 8;
  enum Place { kW1, kB1, kGain, kShift, kW2, kB2, kW3, kB3 };

  std::array<const GpuSaapNet::Array*, kArrays> trained() const {
    return {&net_.w1, &net_.b1, &net_.gain, &net_.shift, &net_.w2, &net_.b2, &net_.w3, &net_.b3};
  }
  bool normed() const { return !net_.gain.value.empty(); }
  bool has_linear() const { return !net_.w3.value.empty(); }

  /// All trained arrays one behind the other, for one update of them all.
  void place_arrays() {
    for (const GpuSaapNet::Array* array : trained()) {
      begins_[static_cast<std::size_t>(array_count_++)] = total_;
      total_ += rounded_up(std::ssize(array->value), kFloatMultiple);
    }
    for (cuda::Buffer* all : {&values_, &first_, &second_, &gradient_}) {
      *all = cuda::Buffer(total_ * 4, "a classifier");
      cuda::fill(all->as<void>(), 0, all->bytes(), stream_.get());
    }
    int i = 0;
    for (const GpuSaapNet::Array* array : trained()) {
      const std::int64_t at = begins_[static_cast<std::size_t>(i++)], bytes = std::ssize(array->value) * 4;
      cuda::copy(values_.as<float>() + at, array->value.data(), bytes, stream_.get());
      cuda::copy(first_.as<float>() + at, array->first.data(), bytes, stream_.get());
      cuda::copy(second_.as<float>() + at, array->second.data(), bytes, stream_.get());
    }
    running_ = cuda::Buffer(2 * net_.hidden * 4, "a batch norm");
    if (!normed()) return;
    cuda::copy(running_.as<float>(), net_.mean.value.data(), net_.hidden * 4, stream_.get());
    cuda::copy(running_.as<float>() + net_.hidden, net_.variance.value.data(), net_.hidden * 4,
               stream_.get());
  }
  float* value(Place place) const { return values_.as<float>() + begins_[place]; }
  float* gradient(Place place) const { return gradient_.as<float>() + begins_[place]; }

  cuda::NetSteps steps() const {
    return {table_.as<cuda::NetStep>(), rows_.as<std::int32_t>(), at_.as<std::int32_t>()};
  }
  /// The bias before a batch norm is taken away again by it, and has no gradient.
  cuda::BatchNormArrays norm() const {
    if (!normed()) return {.shift = value(kB1)};
    return {.gain = value(kGain),
            .shift = value(kShift),
            .bias = value(kB1),
            .mean = running_.as<float>(),
            .variance = running_.as<float>() + net_.hidden,
            .momentum = net_.momentum,
            .epsilon = net_.norm_epsilon};
  }

  void run(std::int64_t n) {
    const auto [found, fresh] = graphs_.try_emplace(n);
    if (fresh) {
      const cuda::BesideNoCapture turn;
      return enqueue(n);
    }
    if (!found->second) {
      cuda::Graph::begin(stream_.get());
      try {
        enqueue(n);
      } catch (...) {
        cuda::Graph::abandon(stream_.get());
        throw;
      }
      found->second = cuda::Graph::end(stream_.get());
    }
    found->second.launch(stream_.get());
  }

  void enqueue(std::int64_t n) {
    const std::int64_t d = net_.inputs, h = net_.hidden, c = net_.buckets;
    const cuda::StreamHandle stream = stream_.get();
    float *x = x_.as<float>(), *inner = inner_.as<float>(), *active = active_.as<float>(),
          *y = y_.as<float>();
    const auto forward = [&](const float* in, std::int64_t width, Place w, float* out, std::int64_t outputs,
                             bool add) {
      products_.multiply({.a = in,
                          .b = value(w),
                          .c = out,
                          .m = n,
                          .n = outputs,
                          .k = width,
                          .b_transposed = true,
                          .add = add},
                         stream);
    };
    const auto weight_gradient = [&](const float* dy, std::int64_t outputs, const float* in,
                                     std::int64_t width, Place w) {
      products_.multiply(
          {.a = dy, .b = in, .c = gradient(w), .m = outputs, .n = width, .k = n, .a_transposed = true},
          stream);
    };
    cuda::take_batch(steps(), q_.as<float>(), n, d, x, stream);
    forward(x, d, kW1, inner, h, false);
    cuda::norm_relu(norm(), inner, n, h, normalised_.as<float>(), inverse_.as<float>(), active, stream);
    forward(active, h, kW2, y, c, false);
    if (has_linear()) forward(x, d, kW3, y, c, true);
    cuda::divergence(steps(), targets_.as<void>(), value(kB2), has_linear() ? value(kB3) : nullptr, n, c, y,
                     row_loss_.as<double>(), stream);
    weight_gradient(y, c, active, h, kW2);
    cuda::sum_columns(y, n, c, gradient(kB2), has_linear() ? gradient(kB3) : nullptr, stream);
    if (has_linear()) weight_gradient(y, c, x, d, kW3);
    products_.multiply({.a = y, .b = value(kW2), .c = inner, .m = n, .n = h, .k = c}, stream);
    cuda::norm_relu_backward(norm(), normalised_.as<float>(), inverse_.as<float>(), active, n, h, inner,
                             normed() ? gradient(kGain) : nullptr,
                             normed() ? gradient(kShift) : gradient(kB1), stream);
    weight_gradient(inner, h, x, d, kW1);
    cuda::adam(steps(),
               {.value = values_.as<float>(),
                .first = first_.as<float>(),
                .second = second_.as<float>(),
                .gradient = gradient_.as<float>(),
                .beta1 = static_cast<float>(net_.beta1),
                .beta2 = static_cast<float>(net_.beta2)},
               total_, stream);
    cuda::end_step(steps(), row_loss_.as<double>(), n, losses_.as<double>(), stream);
  }

  GpuSaapNet net_;
  std::int64_t most_rows_;
  cuda::Stream stream_;
  cuda::Products products_;
  std::array<std::int64_t, kArrays> begins_{};  ///< of each array in `values_`
  int array_count_ = 0;
  std::int64_t total_ = 0, begun_ = 0;
  cuda::Buffer values_, first_, second_, gradient_;  // [total]
  cuda::Buffer running_;                             // [2, H] mean, variance
  cuda::Buffer q_, targets_;                         // [examples, d], [examples, C] f16
  cuda::Buffer x_;                                   // [rows, d]
  cuda::Buffer inner_, normalised_, active_;         // [rows, H]
  cuda::Buffer y_;                                   // [rows, C]
  cuda::Buffer row_loss_, inverse_;                  // [rows] float64, [H]
  cuda::Buffer table_, rows_, at_, losses_;          // [steps], [steps, rows], [1], [steps] float64
  cuda::PinnedBuffer staged_table_, staged_rows_;
  std::map<std::int64_t, cuda::Graph> graphs_;  ///< of a step, by its rows; empty after the first one
};

// ---- All of it -------------------------------------------------------------------------------------------

class CudaSaapTraining final : public GpuSaapTraining {
 public:
  explicit CudaSaapTraining(bool exact) : exact_(exact), products_(exact) {}

  std::vector<float> cluster(Matrix<const float> x, const KMeansOptions& options) override {
    LODE_ASSERT(options.nearness == Nearness::cosine);
    const std::lock_guard lock(mutex_);
    StepsOnGpu steps(x, options.clusters, stream_);
    return spherical_kmeans(x, options, steps);
  }

  void label(Matrix<const float> x, std::span<const float> centroids, std::span<const float> offsets,
             std::span<std::int32_t> labels) override {
    std::vector<float> lifted_x, lifted_centroids;
    if (!offsets.empty()) {
      lifted_x = lifted(x, {});
      lifted_centroids = lifted({centroids.data(), std::ssize(offsets), x.cols}, offsets);
      x = {lifted_x.data(), x.rows, x.cols + 1};
      centroids = lifted_centroids;
    }
    const std::lock_guard lock(mutex_);
    const std::int64_t clusters = std::ssize(centroids) / x.cols;
    reserve(rotated_, x.rows * x.cols * 4, "a prompt's keys");
    reserve(centroids_, std::ssize(centroids) * 4, "centroids");
    reserve(order_, x.rows * 4, "labels");
    upload(rotated_, std::span(x.data, static_cast<std::size_t>(x.rows * x.cols)), stream_);
    upload(centroids_, centroids, stream_);
    cuda::assign(rotated_.as<float>(), x.rows, centroids_.as<float>(), clusters, static_cast<int>(x.cols),
                 order_.as<std::int32_t>(), nullptr, stream_.get());
    download(labels, order_.as<void>(), stream_);
    stream_.synchronize();
  }

  GpuSaapTargets targets(const GpuSaapKeys& keys, const GpuSaapQueries& queries,
                         std::int64_t wanted) override {
    GpuSaapTargets result;
    const std::int64_t count = queries.q.rows;
    if (count == 0 || wanted <= 0) return result;
    const std::lock_guard lock(mutex_);
    const cuda::TargetKeys on_device = bring_keys(keys);
    const std::int64_t fitting = kScoreBytes / (4 * on_device.stride) / 32 * 32;
    const std::int64_t block =
        std::min(std::clamp<std::int64_t>(fitting, 32, kMostQueries), rounded_up(count, 32));
    bring_queries(queries, block);
    reserve(scores_, block * on_device.stride * 4, "scores of queries and keys");
    reserve(most_, block * 4, "scores of queries and keys");
    reserve(passes_, block * 4, "queries that pass");
    reserve(sums_, block * keys.buckets * 4, "attention by bucket");
    reserve(targets_, block * keys.buckets * 2, "attention by bucket");
    for (std::int64_t at = 0; at < count && std::ssize(result.chosen) < wanted; at += block) {
      check_cancel();
      take_block(keys, on_device, at, block, std::min(block, count - at), wanted, result);
    }
    return result;
  }

  std::unique_ptr<GpuSaapFit> fit(const GpuSaapNet& net, const GpuSaapExamples& examples,
                                  std::int64_t most_rows) override {
    return std::make_unique<Fit>(net, examples, most_rows, exact_);
  }

  std::string library() const override { return products_.found(); }

 private:
  /// Rows with one more column: ones, or what is given.
  static std::vector<float> lifted(Matrix<const float> x, std::span<const float> last) {
    const std::int64_t d = x.cols + 1;
    std::vector<float> out(static_cast<std::size_t>(x.rows * d), 1.0f);
    for (std::int64_t row = 0; row < x.rows; ++row) {
      std::copy_n(x[row].data(), x.cols, out.data() + row * d);
      if (!last.empty())
        out[static_cast<std::size_t>(row * d + x.cols)] = last[static_cast<std::size_t>(row)];
    }
    return out;
  }

  /// Sorts the keys by their buckets, those of a bucket in their order.
  cuda::TargetKeys bring_keys(const GpuSaapKeys& keys) {
    const std::int64_t n = keys.rotated.rows, d = keys.rotated.cols, stride = rounded_up(n, kKeyMultiple);
    std::vector<std::int32_t> offsets(static_cast<std::size_t>(keys.buckets + 1), 0),
        positions(static_cast<std::size_t>(stride), -1);
    for (const std::int32_t label : keys.labels) ++offsets[static_cast<std::size_t>(label + 1)];
    std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
    std::vector<std::int32_t> next(offsets.begin(), offsets.end() - 1);
    for (std::int64_t i = 0; i < n; ++i) {
      std::int32_t& at = next[static_cast<std::size_t>(keys.labels[static_cast<std::size_t>(i)])];
      positions[static_cast<std::size_t>(at++)] = static_cast<std::int32_t>(i);
    }
    reserve(rotated_, n * d * 4, "a prompt's keys");
    reserve(sorted_, stride * d * 4, "a prompt's keys by bucket");
    reserve(order_, stride * 4, "the order of keys");
    reserve(offsets_, (keys.buckets + 1) * 4, "buckets");
    upload(rotated_, std::span(keys.rotated.data, static_cast<std::size_t>(n * d)), stream_);
    upload(order_, std::span<const std::int32_t>(positions), stream_);
    upload(offsets_, std::span<const std::int32_t>(offsets), stream_);
    cuda::gather_rows(rotated_.as<float>(), order_.as<std::int32_t>(), stride, d, sorted_.as<float>(),
                      stream_.get());
    stream_.synchronize();
    return {order_.as<std::int32_t>(), offsets_.as<std::int32_t>(), stride, keys.buckets};
  }

  void bring_queries(const GpuSaapQueries& queries, std::int64_t block) {
    static_assert(sizeof(GpuSaapQueries::Reach) == sizeof(cuda::TargetQuery));
    const std::int64_t count = queries.q.rows, d = queries.q.cols;
    reserve(q_, rounded_up(count, block) * d * 4, "a prompt's queries");
    reserve(reach_, count * std::int64_t{sizeof(cuda::TargetQuery)}, "a prompt's queries");
    cuda::fill(q_.as<void>(), 0, q_.bytes(), stream_.get());  // also behind the last one
    upload(q_, std::span(queries.q.data, static_cast<std::size_t>(count * d)), stream_);
    upload(reach_, queries.reach, stream_);
    stream_.synchronize();
  }

  /// Scores queries [at, at + some) and adds the targets of those that pass.
  void take_block(const GpuSaapKeys& keys, const cuda::TargetKeys& on_device, std::int64_t at,
                  std::int64_t block, std::int64_t some, std::int64_t wanted, GpuSaapTargets& result) {
    const std::int64_t d = keys.rotated.cols;
    const cuda::TargetQuery* reach = reach_.as<cuda::TargetQuery>() + at;
    products_.multiply({.a = q_.as<float>() + at * d,
                        .b = sorted_.as<float>(),
                        .c = scores_.as<float>(),
                        .m = block,
                        .n = on_device.stride,
                        .k = d,
                        .b_transposed = true},
                       stream_.get());
    cuda::look_at_scores(scores_.as<float>(), reach, some, on_device, most_.as<float>(),
                         passes_.as<std::int32_t>(), stream_.get());
    std::vector<std::int32_t> passes(static_cast<std::size_t>(some)), chosen;
    download(std::span(passes), passes_.as<void>(), stream_);
    stream_.synchronize();
    for (std::int64_t i = 0; i < some && std::ssize(result.chosen) < wanted; ++i) {
      if (passes[static_cast<std::size_t>(i)] == 0) continue;
      chosen.push_back(static_cast<std::int32_t>(i));
      result.chosen.push_back(static_cast<std::int32_t>(at + i));
    }
    result.looked_at = at + some;
    if (chosen.empty()) return;
    upload(passes_, std::span<const std::int32_t>(chosen), stream_);
    cuda::sum_by_bucket(scores_.as<float>(), reach, most_.as<float>(), passes_.as<std::int32_t>(),
                        std::ssize(chosen), on_device, sums_.as<float>(), targets_.as<void>(), stream_.get());
    const std::size_t before = result.targets.size(),
                      more = chosen.size() * static_cast<std::size_t>(keys.buckets);
    result.targets.resize(before + more);
    download(std::span(result.targets).subspan(before), targets_.as<void>(), stream_);
    stream_.synchronize();
  }

  bool exact_;
  std::mutex mutex_;  // of what follows
  cuda::Stream stream_;
  cuda::Products products_;
  cuda::Buffer rotated_, sorted_;             // [n, d]; [stride, d] by bucket
  cuda::Buffer centroids_, order_, offsets_;  // [C, d], [stride], [C + 1]
  cuda::Buffer q_, reach_;                    // [count, d], [count] TargetQuery
  cuda::Buffer scores_, most_, passes_;       // [block, stride], [block], [block]
  cuda::Buffer sums_, targets_;               // [block, C] float32, f16
};

}  // namespace

std::unique_ptr<GpuSaapTraining> make_gpu_saap_training(bool exact) {
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) throw RunError("no GPU to use: " + gpu.why);
  return std::make_unique<CudaSaapTraining>(exact);
}

}  // namespace lode
