// SPDX-License-Identifier: Apache-2.0
// One stream does it all. The host writes a step's numbers into one of two pinned stages while the GPU takes
// the step before; buffers are made once, for the longest prompt and the largest step.
#include "gpu/train/hash.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "gpu/backend.h"
#include "kernels/cuda/device/device.h"
#include "kernels/cuda/device/event.h"
#include "kernels/cuda/hash/train.h"
#include "kernels/cuda/linear/many_products.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kKeyStageBytes = std::int64_t{128} << 20;  // of each of two, or one head's keys
constexpr std::int64_t kMostPairs = 65535;                        // of heads and functions in one launch
constexpr std::int64_t kFloat = 4;

std::int64_t rounded_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// Keys that a step sees at most: others and the pivotal ones of all queries.
std::int64_t most_listed(const GpuHashShape& shape, std::int64_t tokens, std::int64_t keys,
                         std::int64_t others) {
  return std::min(keys, others + shape.group * tokens * shape.top);
}

// ---- Networks --------------------------------------------------------------------------------------------

/// One kind of functions, of queries or of keys: their numbers for all heads, and what the step of some heads
/// needs.
class Functions {
 public:
  Functions(const GpuHashShape& shape, std::int64_t functions, std::int64_t inputs)
      : heads_(shape.heads),
        functions_(functions),
        inputs_(inputs),
        hidden_(shape.silu ? cuda::HashActivation::silu : cuda::HashActivation::relu),
        beta1_(static_cast<float>(shape.beta1)),
        beta2_(static_cast<float>(shape.beta2)) {
    std::vector<std::int64_t> widths = shape.widths;
    widths.push_back(shape.bits);
    for (const std::int64_t width : widths) {
      layers_.push_back({.in = inputs, .out = width, .weight = size_, .bias = size_ + inputs * width});
      size_ += inputs * width + width;
      widest_ = std::max(widest_, width);
      inputs = width;
    }
  }

  std::int64_t bytes() const { return 3 * kFloat * heads_ * numbers(); }
  std::int64_t bytes_of_head(std::int64_t rows) const {
    std::int64_t floats = 2 * functions_ * rows * widest_ + cuda::parts_of(rows) * numbers();
    for (const Layer& layer : layers_) floats += copies(layer) * functions_ * rows * layer.out;
    return kFloat * floats;
  }

  /// Makes room for all heads, and for steps of `at_once` of them.
  void make_room(std::int64_t at_once, std::int64_t rows, const cuda::Stream& stream) {
    for (cuda::Buffer* all : {&values_, &first_, &second_}) {
      *all = cuda::Buffer(kFloat * heads_ * numbers(), "functions");
      cuda::fill(all->as<void>(), 0, all->bytes(), stream.get());
    }
    for (Layer& layer : layers_) {
      const std::int64_t bytes = kFloat * at_once * functions_ * rows * layer.out;
      layer.sums = cuda::Buffer(bytes, "a step's layers");
      if (copies(layer) > 1) layer.outputs = cuda::Buffer(bytes, "a step's layers");
    }
    for (cuda::Buffer& gradient : gradients_)
      gradient = cuda::Buffer(kFloat * at_once * functions_ * rows * widest_, "a step's gradients");
    parts_ = cuda::Buffer(kFloat * at_once * cuda::parts_of(rows) * numbers(), "gradients of functions");
  }

  /// copy(device array of one function's numbers, array of the host) for its values and both moments.
  template <class Copy>
  void each_array(std::int64_t head, std::int64_t index, const GpuHashFunction& function, const Copy& copy) {
    std::int64_t at = (head * functions_ + index) * size_;
    for (const GpuHashArray& array : function) {
      copy(values_.as<float>() + at, array.value);
      copy(first_.as<float>() + at, array.first);
      copy(second_.as<float>() + at, array.second);
      at += std::ssize(array.value);
    }
    LODE_ASSERT(at == (head * functions_ + index + 1) * size_);
  }

  /// Some heads' part of a step: of `rows` inputs for each function, counts[h] of them where there are counts.
  struct Part {
    std::int64_t first = 0, heads = 0, rows = 0;
    const std::int32_t* counts = nullptr;
    cuda::ManyMatrices<const float> x;
  };

  void forward(const Part& part, cuda::StreamHandle stream) {
    cuda::ManyMatrices<const float> x = part.x;
    for (const Layer& layer : layers_) {
      multiply(part, stream,
               {.a = x,
                .b = weight(part, layer),
                .c = rows_of(layer.sums, part, layer.out),
                .m = part.rows,
                .n = layer.out,
                .k = layer.in,
                .b_transposed = true,
                .counted = cuda::CountedDimension::m});
      cuda::activate(activation(layer), shape(part, layer), numbers_at(values_, part, layer.bias),
                     layer.sums.as<float>(), outputs(layer).as<float>(), stream);
      x = as_const(rows_of(outputs(layer), part, layer.out));
    }
  }

  /// [heads, functions, rows, bits], as all that follows.
  float* codes() const { return layers_.back().sums.as<float>(); }
  /// Where a gradient of the codes may stand.
  float* code_gradient() const { return gradients_[0].as<float>(); }

  /// From the gradient of the codes, the sum of `parts` that are `stride` numbers apart.
  void backward(const Part& part, const float* dy, std::int64_t parts, std::int64_t stride,
                cuda::StreamHandle stream) {
    std::size_t turn = 0;
    for (std::size_t i = layers_.size(); i-- > 0; turn ^= 1) {
      const Layer& layer = layers_[i];
      const cuda::Buffer& own = gradients_[turn];
      const std::int64_t in_part = part.heads * numbers();
      cuda::slopes(activation(layer), shape(part, layer),
                   {.saved = layer.sums.as<float>(),
                    .dy = dy,
                    .parts = parts,
                    .part = stride,
                    .dx = own.as<float>(),
                    .bias = gradient_at(layer.bias),
                    .bias_part = in_part},
                   stream);
      const cuda::ManyMatrices<const float> dx = as_const(rows_of(own, part, layer.out));
      cuda::ManyMatrices<float> of_weight = gradient_at(layer.weight);
      of_weight.row = layer.in;
      multiply(part, stream,
               {.a = dx,
                .b = i == 0 ? part.x : as_const(rows_of(outputs(layers_[i - 1]), part, layer.in)),
                .c = of_weight,
                .m = layer.out,
                .n = layer.in,
                .k = part.rows,
                .a_transposed = true,
                .counted = cuda::CountedDimension::k,
                .part = in_part});
      if (i == 0) break;
      const cuda::Buffer& next = gradients_[turn ^ 1];
      multiply(part, stream,
               {.a = dx,
                .b = weight(part, layer),
                .c = rows_of(next, part, layer.in),
                .m = part.rows,
                .n = layer.in,
                .k = layer.out,
                .counted = cuda::CountedDimension::m});
      dy = next.as<float>(), parts = 1, stride = 0;
    }
  }

  void update(const Part& part, const GpuHashStep& step, cuda::StreamHandle stream) {
    const std::int64_t count = part.heads * numbers(), at = part.first * numbers();
    cuda::adam_of_parts({.value = values_.as<float>() + at,
                         .first = first_.as<float>() + at,
                         .second = second_.as<float>() + at,
                         .gradient = parts_.as<float>(),
                         .parts = cuda::parts_of(part.rows),
                         .part = count,
                         .beta1 = beta1_,
                         .beta2 = beta2_,
                         .rate = step.rate,
                         .keep = step.keep,
                         .epsilon = step.epsilon},
                        count, stream);
  }

 private:
  struct Layer {
    std::int64_t in = 0, out = 0, weight = 0, bias = 0;  ///< the last two: places in a function
    cuda::Buffer sums, outputs;                          // [heads, functions, rows, out]
  };
  bool is_last(const Layer& layer) const { return &layer == &layers_.back(); }
  cuda::HashActivation activation(const Layer& layer) const {
    return is_last(layer) ? cuda::HashActivation::tanh : hidden_;
  }
  /// The codes stand in the place of their sums.
  std::int64_t copies(const Layer& layer) const { return is_last(layer) ? 1 : 2; }
  const cuda::Buffer& outputs(const Layer& layer) const {
    return is_last(layer) ? layer.sums : layer.outputs;
  }
  std::int64_t numbers() const { return functions_ * size_; }  ///< of a head

  static cuda::ManyMatrices<const float> as_const(const cuda::ManyMatrices<float>& m) {
    return {m.data, m.row, m.outer, m.inner};
  }
  cuda::ManyMatrices<float> rows_of(const cuda::Buffer& all, const Part& part, std::int64_t width) const {
    return {all.as<float>(), width, functions_ * part.rows * width, part.rows * width};
  }
  cuda::ManyMatrices<const float> numbers_at(const cuda::Buffer& all, const Part& part,
                                             std::int64_t place) const {
    return {all.as<float>() + part.first * numbers() + place, 0, numbers(), size_};
  }
  cuda::ManyMatrices<const float> weight(const Part& part, const Layer& layer) const {
    cuda::ManyMatrices<const float> weights = numbers_at(values_, part, layer.weight);
    weights.row = layer.in;
    return weights;
  }
  cuda::ManyMatrices<float> gradient_at(std::int64_t place) const {
    return {parts_.as<float>() + place, 0, numbers(), size_};
  }
  cuda::HashRows shape(const Part& part, const Layer& layer) const {
    return {part.heads, functions_, part.rows, layer.out, part.counts};
  }
  void multiply(const Part& part, cuda::StreamHandle stream, cuda::ManyProducts products) const {
    products.outer = part.heads, products.inner = functions_, products.counts = part.counts;
    cuda::multiply_many(products, stream);
  }

  std::int64_t heads_, functions_, inputs_;
  cuda::HashActivation hidden_;
  float beta1_, beta2_;
  std::vector<Layer> layers_;
  std::int64_t size_ = 0, widest_ = 0;     // numbers of a function
  cuda::Buffer values_, first_, second_;   // [all heads, functions, size]
  std::array<cuda::Buffer, 2> gradients_;  // [heads, functions, rows, widest]
  cuda::Buffer parts_;                     // [parts, heads, functions, size]
};

// ---- Bytes -----------------------------------------------------------------------------------------------

/// Where a step's numbers stand in a stage.
struct Stage {
  std::int64_t scored = 0, inputs = 0, turns = 0, others = 0, counts = 0, far_ends = 0, bytes = 0;
};
Stage stage_of(const GpuHashShape& shape, std::int64_t heads, std::int64_t tokens, std::int64_t others) {
  Stage stage;
  const auto place = [&](std::int64_t numbers) {
    const std::int64_t at = stage.bytes;
    stage.bytes = rounded_up(at + kFloat * numbers, 256);
    return at;
  };
  const std::int64_t queries = heads * shape.group * tokens * shape.head_dim;
  stage.scored = place(queries), stage.inputs = place(queries);
  stage.turns = place(heads * shape.head_dim);
  stage.others = place(heads * others);
  stage.counts = place(heads);
  stage.far_ends = place(tokens);
  return stage;
}

/// Of one head's step beside its functions.
struct HeadBytes {
  std::int64_t scored, inputs, log_norms, scores, words, pivotal, listed, far_counts, labels, x, products,
      code_parts, row_losses, stage;
  HeadBytes(const GpuHashShape& shape, const GpuHashSizes& most) {
    const std::int64_t rows = shape.group * most.tokens,
                       seen = most_listed(shape, most.tokens, most.keys, most.others);
    scored = kFloat * most.keys * shape.head_dim;
    inputs = shape.own_inputs ? kFloat * most.keys * shape.key_inputs : 0;
    log_norms = shape.by_value ? kFloat * most.keys : 0;
    scores = kFloat * rows * most.keys;
    words = kFloat * rounded_up(most.keys, 32) / 32;
    pivotal = kFloat * rows * shape.top;
    listed = kFloat * seen;
    far_counts = kFloat * most.tokens;
    labels = rows * seen;
    x = kFloat * seen * shape.key_inputs;
    products = kFloat * rows * seen;
    code_parts = kFloat * cuda::parts_of(seen) * rows * shape.bits;
    row_losses = 8 * rows;
    stage = stage_of(shape, 1, most.tokens, most.others).bytes;
  }
  std::int64_t sum() const {
    return scored + inputs + log_norms + scores + 2 * words + pivotal + listed + kFloat + far_counts +
           labels + x + products + code_parts + row_losses + stage;
  }
};

Functions query_functions(const GpuHashShape& shape) {
  return {shape, shape.group, shape.head_dim};
}
Functions key_functions(const GpuHashShape& shape) {
  return {shape, shape.key_functions, shape.key_inputs};
}

// ---- All of it -------------------------------------------------------------------------------------------

class CudaHashTraining final : public GpuHashTraining {
 public:
  CudaHashTraining(const GpuHashShape& shape, const GpuHashSizes& most, std::int64_t at_once)
      : shape_(shape),
        most_(most),
        at_once_(at_once),
        queries_(query_functions(shape)),
        keys_(key_functions(shape)) {
    const HeadBytes bytes(shape, most);
    const std::int64_t seen = most_listed(shape, most.tokens, most.keys, most.others);
    queries_.make_room(at_once, most.tokens, stream_);
    keys_.make_room(at_once, seen, stream_);
    const auto make = [&](std::int64_t of_head, const char* what) {
      return cuda::Buffer(of_head * at_once, what);
    };
    scored_ = make(bytes.scored, "a prompt's keys");
    inputs_ = make(bytes.inputs, "a prompt's keys");
    log_norms_ = make(bytes.log_norms, "norms of values");
    scores_ = make(bytes.scores, "scores of queries and keys");
    words_ = make(bytes.words, "keys of a step");
    before_ = make(bytes.words, "keys of a step");
    pivotal_ = make(bytes.pivotal, "pivotal keys");
    listed_ = make(bytes.listed, "keys of a step");
    counts_ = make(kFloat, "keys of a step");
    far_counts_ = make(bytes.far_counts, "keys of a step");
    labels_ = make(bytes.labels, "pivotal keys");
    x_ = make(bytes.x, "keys of a step");
    products_ = make(bytes.products, "products of codes");
    code_parts_ = make(bytes.code_parts, "gradients of codes");
    row_losses_ = make(bytes.row_losses, "losses");
    stage_ = make(bytes.stage, "a step");
    for (Staged& staged : staged_) staged.memory = cuda::PinnedBuffer(stage_.bytes());
    stream_.synchronize();
  }

  std::int64_t heads_at_once() const override { return at_once_; }

  void put(std::int64_t head, std::int64_t index, const GpuHashFunction& function) override {
    of(index).each_array(head, own_index(index), function, [&](float* there, std::span<float> here) {
      cuda::copy(there, here.data(), kFloat * std::ssize(here), stream_.get());
    });
    stream_.synchronize();
  }
  void get(std::int64_t head, std::int64_t index, const GpuHashFunction& function) override {
    of(index).each_array(head, own_index(index), function, [&](const float* there, std::span<float> here) {
      cuda::copy(here.data(), there, kFloat * std::ssize(here), stream_.get());
    });
    stream_.synchronize();
  }

  void begin(std::int64_t first, std::int64_t heads, std::int64_t keys, std::int64_t steps,
             const WriteKeys& write) override {
    LODE_ASSERT(heads >= 1 && heads <= at_once_ && first + heads <= shape_.heads);
    LODE_ASSERT(keys >= 1 && keys <= most_.keys);
    first_ = first, heads_ = heads, series_keys_ = keys, steps_ = steps, taken_ = 0;
    if (losses_.bytes() < 8 * steps * heads) {
      losses_ = cuda::Buffer();
      losses_ = cuda::Buffer(8 * steps * heads, "losses");
    }
    bring_keys(write);
  }

  std::vector<GpuHashDraw> draw(std::int64_t tokens) override {
    LODE_ASSERT(tokens >= 1 && tokens <= most_.tokens);
    tokens_ = tokens;
    Staged& staged = staged_[turn_];
    staged.copied.wait();
    const Stage stage = stage_of(shape_, heads_, tokens, most_.others);
    char* const base = staged.memory.as<char>();
    const auto part = [&]<class T>(T, std::int64_t place, std::int64_t head, std::int64_t numbers) {
      return std::span(reinterpret_cast<T*>(base + place) + head * numbers,
                       static_cast<std::size_t>(numbers));
    };
    const std::int64_t floats = shape_.group * tokens * shape_.head_dim;
    std::vector<GpuHashDraw> draws;
    for (std::int64_t head = 0; head < heads_; ++head)
      draws.push_back({.scored = part(float(), stage.scored, head, floats),
                       .inputs = part(float(), stage.inputs, head, floats),
                       .turn = part(float(), stage.turns, head, shape_.head_dim),
                       .others = part(std::int32_t(), stage.others, head, most_.others),
                       .others_count = part(std::int32_t(), stage.counts, head, 1).data()});
    return draws;
  }

  void take(const GpuHashStep& step) override {
    LODE_ASSERT(std::ssize(step.far_ends) == tokens_ && taken_ < steps_);
    const Stage stage = stage_of(shape_, heads_, tokens_, most_.others);
    Staged& staged = staged_[turn_];
    std::copy(step.far_ends.begin(), step.far_ends.end(),
              reinterpret_cast<std::int32_t*>(staged.memory.as<char>() + stage.far_ends));
    cuda::copy(stage_.as<void>(), staged.memory.as<void>(), stage.bytes, stream_.get());
    staged.copied.record(stream_.get());
    turn_ ^= 1;
    enqueue(step, stage);
    ++taken_;
  }

  std::vector<double> finish() override {
    std::vector<double> losses(static_cast<std::size_t>(taken_ * heads_));
    cuda::copy(losses.data(), losses_.as<void>(), 8 * std::ssize(losses), stream_.get());
    stream_.synchronize();
    return losses;
  }

 private:
  struct Staged {
    cuda::PinnedBuffer memory;
    cuda::Event copied;
  };

  Functions& of(std::int64_t index) { return index < shape_.group ? queries_ : keys_; }
  std::int64_t own_index(std::int64_t index) const {
    return index < shape_.group ? index : index - shape_.group;
  }
  template <class T>
  const T* staged(std::int64_t place) const {
    return reinterpret_cast<const T*>(stage_.as<char>() + place);
  }
  const float* key_inputs() const { return (shape_.own_inputs ? inputs_ : scored_).as<float>(); }

  /// Some heads at a time: the host writes some while others are copied.
  void bring_keys(const WriteKeys& write) {
    const std::int64_t n = series_keys_, scored = n * shape_.head_dim,
                       inputs = shape_.own_inputs ? n * shape_.key_inputs : 0,
                       norms = shape_.by_value ? n : 0;
    const std::int64_t of_head = kFloat * (scored + inputs + norms),
                       at_once = std::clamp<std::int64_t>(kKeyStageBytes / of_head, 1, (heads_ + 3) / 4);
    for (std::int64_t begin = 0, turn = 0; begin < heads_; begin += at_once, turn ^= 1) {
      const std::int64_t end = std::min(heads_, begin + at_once), some = end - begin;
      Staged& own = key_stages_[static_cast<std::size_t>(turn)];
      own.copied.wait();
      if (own.memory.bytes() < of_head * at_once) own.memory = cuda::PinnedBuffer(of_head * at_once);
      float* const base = own.memory.as<float>();
      float *const inputs_at = base + some * scored, *const norms_at = inputs_at + some * inputs;
      const auto part = [](float* at, std::int64_t head, std::int64_t numbers) {
        return std::span(at + head * numbers, static_cast<std::size_t>(numbers));
      };
      std::vector<GpuHashKeys> keys;
      for (std::int64_t head = 0; head < some; ++head)
        keys.push_back({.scored = part(base, head, scored),
                        .inputs = part(inputs_at, head, inputs),
                        .log_norms = part(norms_at, head, norms)});
      write(begin, end, keys);
      cuda::copy(scored_.as<float>() + begin * scored, base, kFloat * some * scored, stream_.get());
      cuda::copy(inputs_.as<float>() + begin * inputs, inputs_at, kFloat * some * inputs, stream_.get());
      cuda::copy(log_norms_.as<float>() + begin * norms, norms_at, kFloat * some * norms, stream_.get());
      own.copied.record(stream_.get());
    }
    stream_.synchronize();
  }

  void enqueue(const GpuHashStep& step, const Stage& stage) {
    const cuda::StreamHandle stream = stream_.get();
    const std::int64_t d = shape_.head_dim, rows = shape_.group * tokens_, n = series_keys_,
                       seen = most_listed(shape_, tokens_, n, most_.others);
    const cuda::HashMarks marks = {words_.as<std::uint32_t>(), before_.as<std::int32_t>(), heads_, n};
    const cuda::HashQueries asked = {shape_.group, tokens_, staged<std::int32_t>(stage.far_ends)};
    cuda::fill(words_.as<void>(), 0, kFloat * heads_ * marks.width(), stream);
    cuda::mark_keys(marks, staged<std::int32_t>(stage.others), staged<std::int32_t>(stage.counts),
                    most_.others, stream);
    cuda::multiply_many({.a = {staged<float>(stage.scored), d, rows * d, 0},
                         .b = {scored_.as<float>(), d, n * d, 0},
                         .c = {scores_.as<float>(), n, rows * n, 0},
                         .outer = heads_,
                         .m = rows,
                         .n = n,
                         .k = d,
                         .b_transposed = true},
                        stream);
    cuda::find_pivotal(marks, asked, scores_.as<float>(), shape_.by_value ? log_norms_.as<float>() : nullptr,
                       shape_.top, pivotal_.as<std::int32_t>(), stream);
    cuda::list_marked(marks, asked, seen, listed_.as<std::int32_t>(), counts_.as<std::int32_t>(),
                      far_counts_.as<std::int32_t>(), stream);
    cuda::label_pivotal(marks, asked, pivotal_.as<std::int32_t>(), shape_.top, seen,
                        labels_.as<std::uint8_t>(), stream);
    const std::int64_t width = shape_.key_inputs;
    cuda::gather_turned({.inputs = key_inputs(),
                         .turns = staged<float>(stage.turns),
                         .listed = listed_.as<std::int32_t>(),
                         .counts = counts_.as<std::int32_t>(),
                         .heads = heads_,
                         .keys = n,
                         .width = width,
                         .head_dim = d,
                         .most = seen},
                        x_.as<float>(), stream);
    const Functions::Part of_keys = {.first = first_,
                                     .heads = heads_,
                                     .rows = seen,
                                     .counts = counts_.as<std::int32_t>(),
                                     .x = {x_.as<float>(), width, seen * width, 0}},
                          of_queries = {.first = first_,
                                        .heads = heads_,
                                        .rows = tokens_,
                                        .x = {staged<float>(stage.inputs), d, rows * d, tokens_ * d}};
    keys_.forward(of_keys, stream);
    queries_.forward(of_queries, stream);
    learn(step, of_queries, of_keys);
    queries_.update(of_queries, step, stream);
    keys_.update(of_keys, step, stream);
  }

  /// The loss, and back through both networks. Queries whose heads share a function of the keys share its
  /// products.
  void learn(const GpuHashStep& step, const Functions::Part& of_queries, const Functions::Part& of_keys) {
    const cuda::StreamHandle stream = stream_.get();
    const std::int64_t bits = shape_.bits, sets = shape_.key_functions, rows = shape_.group * tokens_,
                       in_set = rows / sets, seen = of_keys.rows;
    const cuda::ManyMatrices<const float> query_codes = {queries_.codes(), bits, rows * bits, in_set * bits},
                                          key_codes = {keys_.codes(), bits, sets * seen * bits, seen * bits};
    const cuda::ManyMatrices<float> products = {products_.as<float>(), seen, rows * seen, in_set * seen};
    const cuda::ManyMatrices<const float> slopes = {products.data, products.row, products.outer,
                                                    products.inner};
    const auto multiply = [&](cuda::ManyProducts p) {
      p.outer = heads_, p.inner = sets, p.counts = of_keys.counts;
      cuda::multiply_many(p, stream);
    };
    multiply({.a = query_codes,
              .b = key_codes,
              .c = products,
              .m = in_set,
              .n = seen,
              .k = bits,
              .b_transposed = true,
              .counted = cuda::CountedDimension::n});
    const cuda::HashLoss loss = {.softmax = shape_.softmax,
                                 .class1_weight = step.class1_weight,
                                 .labels = labels_.as<std::uint8_t>(),
                                 .far_counts = far_counts_.as<std::int32_t>(),
                                 .heads = heads_,
                                 .group = shape_.group,
                                 .tokens = tokens_,
                                 .most = seen};
    cuda::pivotal_loss(loss, of_keys.counts, products.data, row_losses_.as<double>(), stream);
    cuda::sum_losses(loss, row_losses_.as<double>(), losses_.as<double>() + taken_ * heads_, stream);
    const std::int64_t part = heads_ * rows * bits;
    multiply({.a = slopes,
              .b = key_codes,
              .c = {code_parts_.as<float>(), bits, rows * bits, in_set * bits},
              .m = in_set,
              .n = bits,
              .k = seen,
              .counted = cuda::CountedDimension::k,
              .part = part});
    multiply({.a = slopes,
              .b = query_codes,
              .c = {keys_.code_gradient(), bits, sets * seen * bits, seen * bits},
              .m = seen,
              .n = bits,
              .k = in_set,
              .a_transposed = true,
              .counted = cuda::CountedDimension::m});
    queries_.backward(of_queries, code_parts_.as<float>(), cuda::parts_of(seen), part, stream);
    keys_.backward(of_keys, keys_.code_gradient(), 1, 0, stream);
  }

  GpuHashShape shape_;
  GpuHashSizes most_;
  std::int64_t at_once_;
  cuda::Stream stream_;
  Functions queries_, keys_;
  std::int64_t first_ = 0, heads_ = 0, series_keys_ = 0;  // of the running series, H heads and n keys
  std::int64_t steps_ = 0, taken_ = 0, tokens_ = 0;
  cuda::Buffer scored_, inputs_, log_norms_;       // [H, n, d], [H, n, key inputs], [H, n]
  cuda::Buffer scores_;                            // [H, rows, n]
  cuda::Buffer words_, before_, listed_, counts_;  // marks; [H, seen], [H]
  cuda::Buffer pivotal_, far_counts_, labels_;     // [H, rows, top], [H, tokens], [H, rows, seen]
  cuda::Buffer x_, products_, code_parts_;  // [H, seen, key inputs], [H, rows, seen], [parts, H, rows, bits]
  cuda::Buffer row_losses_, losses_;        // [H, rows], [steps, H]
  cuda::Buffer stage_;
  std::array<Staged, 2> staged_, key_stages_;
  std::size_t turn_ = 0;
};

}  // namespace

GpuHashBytes gpu_hash_bytes(const GpuHashShape& shape, const GpuHashSizes& most) {
  const Functions queries = query_functions(shape), keys = key_functions(shape);
  const std::int64_t seen = most_listed(shape, most.tokens, most.keys, most.others);
  return {
      .functions = queries.bytes() + keys.bytes(),
      .head = HeadBytes(shape, most).sum() + queries.bytes_of_head(most.tokens) + keys.bytes_of_head(seen)};
}

std::unique_ptr<GpuHashTraining> make_gpu_hash_training(const GpuHashShape& shape, const GpuHashSizes& most,
                                                        std::int64_t memory) {
  if (const GpuInfo gpu = gpu_info(); !gpu.ok) throw RunError("no GPU to use: " + gpu.why);
  const GpuHashBytes bytes = gpu_hash_bytes(shape, most);
  const std::int64_t fitting = std::min((memory - bytes.functions) / bytes.head,
                                        kMostPairs / std::max(shape.group, shape.key_functions)),
                     at_once = std::clamp<std::int64_t>(fitting, 1, shape.heads);
  const std::int64_t series = (shape.heads + at_once - 1) / at_once;  // of about as many heads each
  return std::make_unique<CudaHashTraining>(shape, most, (shape.heads + series - 1) / series);
}

}  // namespace lode
