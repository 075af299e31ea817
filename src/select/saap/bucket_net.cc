// SPDX-License-Identifier: Apache-2.0
#include "select/saap/bucket_net.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.h"
#include "io/safetensors.h"
#include "kernels/int8_product.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr int kMostCode = 127;         // of weights in 8 bits
constexpr std::int64_t kGemvRows = 8;  // vectors of one gemv call
constexpr std::int64_t kMaxSide = std::int64_t{1} << 20;

std::vector<std::byte> narrowed(std::span<const float> x, DType type) {
  std::vector<std::byte> out(x.size() * static_cast<std::size_t>(bytes_of(type)));
  kernels().narrow(x.data(), std::ssize(x), type, out.data());
  return out;
}

const Tensor& find_tensor(const std::map<std::string, Tensor>& tensors, const std::string& name,
                          const std::vector<std::int64_t>& shape, std::string_view where) {
  const auto found = tensors.find(name);
  if (found == tensors.end())
    throw InputError(fmt::format("{}: expected a tensor '{}', found none", where, name));
  const Tensor& tensor = found->second;
  bool fits = tensor.shape.size() == shape.size();
  for (std::size_t i = 0; fits && i < shape.size(); ++i) {
    const std::int64_t n = tensor.shape[i];
    fits = shape[i] < 0 ? n >= 1 && n <= kMaxSide : n == shape[i];
  }
  if (fits) return tensor;
  std::vector<std::string> expected, sides;
  for (const std::int64_t n : shape) expected.push_back(n < 0 ? "any" : std::to_string(n));
  for (const std::int64_t n : tensor.shape) sides.push_back(std::to_string(n));
  throw InputError(fmt::format("{}: tensor '{}': expected the shape [{}], found [{}]", where, name,
                               join(expected), join(sides)));
}

void add_row(float* y, std::span<const float> row) {
  for (std::size_t i = 0; i < row.size(); ++i) y[i] += row[i];
}

/// w = code * most / 127, where the largest code is exactly `most`: rounding such a row again changes
/// nothing.
void decode_row(std::span<const std::int8_t> codes, float most, float* to) {
  const float step = most / kMostCode;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const int code = codes[i];
    to[i] = code == kMostCode ? most : code == -kMostCode ? -most : static_cast<float>(code) * step;
  }
}

struct CodedRows {
  std::vector<std::int8_t> codes;  // [rows, columns]
  std::vector<float> most;         // [rows]
};

/// A row of numbers too small for 8 bits (all codes 0) is 0, as in Int8Net.
CodedRows encode_rows(std::span<const float> w, std::int64_t columns) {
  CodedRows coded;
  std::vector<std::int16_t> wide(static_cast<std::size_t>(columns));
  for (auto row = w; !row.empty(); row = row.subspan(wide.size())) {
    int8_product_kernels().encode(row.data(), columns, kMostCode, wide.data());
    float most = 0.0f;
    for (std::size_t i = 0; i < wide.size(); ++i) {
      coded.codes.push_back(static_cast<std::int8_t>(wide[i]));
      most = std::max(most, std::abs(row[i]));
    }
    const bool zero = std::all_of(wide.begin(), wide.end(), [](std::int16_t code) { return code == 0; });
    coded.most.push_back(zero ? 0.0f : most);
  }
  return coded;
}

std::vector<float> round_rows(std::span<const float> w, std::int64_t columns) {
  const CodedRows coded = encode_rows(w, columns);
  std::vector<float> rounded(w.size());
  const auto n = static_cast<std::size_t>(columns);
  for (std::size_t row = 0; row < coded.most.size(); ++row)
    decode_row(std::span(coded.codes).subspan(row * n, n), coded.most[row], rounded.data() + row * n);
  return rounded;
}

std::vector<float> widened(const std::vector<std::byte>& raw, DType type) {
  std::vector<float> x(raw.size() / static_cast<std::size_t>(bytes_of(type)));
  kernels().widen(raw.data(), type, std::ssize(x), x.data());
  return x;
}

/// Weights of the shape that `tensor` was found to have, in 8 bits with the rows' largest in `most_name`.
std::vector<float> read_coded(const Tensor& tensor, const std::map<std::string, Tensor>& tensors,
                              const std::string& name, const std::string& most_name, std::string_view where) {
  const std::span codes(reinterpret_cast<const std::int8_t*>(tensor.bytes.data()), tensor.bytes.size());
  if (std::find(codes.begin(), codes.end(), std::int8_t{-128}) != codes.end())
    throw InputError(fmt::format("{}: tensor '{}': expected codes in [-127, 127], found -128", where, name));
  const std::vector<float> most = read_floats(tensors, most_name, {tensor.shape[0]}, where);
  if (std::any_of(most.begin(), most.end(), [](float x) { return x < 0.0f; }))
    throw InputError(
        fmt::format("{}: tensor '{}': expected numbers from 0 on, found a negative one", where, most_name));
  std::vector<float> weights(codes.size());
  const auto n = static_cast<std::size_t>(tensor.shape[1]);
  for (std::size_t row = 0; row < most.size(); ++row)
    decode_row(codes.subspan(row * n, n), most[row], weights.data() + row * n);
  return weights;
}

}  // namespace

std::vector<float> read_floats(const std::map<std::string, Tensor>& tensors, const std::string& name,
                               const std::vector<std::int64_t>& shape, std::string_view where) {
  const Tensor& tensor = find_tensor(tensors, name, shape, where);
  std::vector<float> values(static_cast<std::size_t>(tensor.elements()));
  kernels().widen(tensor.bytes.data(), float_type(tensor, name, where), tensor.elements(), values.data());
  if (!std::all_of(values.begin(), values.end(), [](float x) { return std::isfinite(x); }))
    throw InputError(fmt::format("{}: tensor '{}': expected finite numbers, found others", where, name));
  return values;
}

BucketNet::BucketNet(std::int64_t inputs_, std::int64_t buckets_, const Weights& w, DType type_)
    : type(type_ == DType::q8 ? DType::f32 : type_),
      inputs(inputs_),
      hidden(std::ssize(w.hidden_bias)),
      buckets(buckets_),
      hidden_weight(narrowed(w.hidden_weight, type)),
      hidden_bias(w.hidden_bias.begin(), w.hidden_bias.end()),
      output_weight(narrowed(w.output_weight, type)),
      linear_weight(narrowed(w.linear_weight, type)),
      bias(w.bias.begin(), w.bias.end()) {
  LODE_ASSERT(std::ssize(w.hidden_weight) == hidden * inputs &&
              std::ssize(w.output_weight) == buckets * hidden);
  LODE_ASSERT(w.linear_weight.empty() || std::ssize(w.linear_weight) == buckets * inputs);
  LODE_ASSERT((hidden > 0 || !w.linear_weight.empty()) && (bias.empty() || std::ssize(bias) == buckets));
  if (type_ == DType::q8) *this = rounded_to_8_bits();
}

BucketNet BucketNet::rounded_to_8_bits() const {
  const auto w1 = round_rows(widened(hidden_weight, type), inputs),
             w2 = round_rows(widened(output_weight, type), hidden),
             w3 = round_rows(widened(linear_weight, type), inputs);
  BucketNet net(inputs, buckets, {w1, hidden_bias, w2, w3, bias}, DType::f32);
  net.in_8_bits = true;
  return net;
}

std::int64_t BucketNet::bytes() const {
  return std::ssize(hidden_weight) + std::ssize(output_weight) + std::ssize(linear_weight) +
         (std::ssize(hidden_bias) + std::ssize(bias)) * std::int64_t{sizeof(float)};
}

void BucketNet::scores(const float* x, std::int64_t n, std::vector<float>& scratch, float* y) const {
  const KernelTable& table = kernels();
  scratch.resize(static_cast<std::size_t>(kGemvRows * std::max(hidden, buckets)));
  for (std::int64_t at = 0; at < n; at += kGemvRows) {
    const auto rows = static_cast<int>(std::min(kGemvRows, n - at));
    const float* in = x + at * inputs;
    float* out = y + at * buckets;
    if (hidden > 0) {
      table.gemv(in, rows, hidden_weight.data(), type, inputs, 0, hidden, scratch.data(), hidden);
      for (int r = 0; r < rows; ++r) {
        float* h = scratch.data() + r * hidden;
        add_row(h, hidden_bias);
        // A NaN stays: what comes of it must not look like a choice.
        for (std::int64_t i = 0; i < hidden; ++i) h[i] = h[i] < 0.0f ? 0.0f : h[i];
      }
      table.gemv(scratch.data(), rows, output_weight.data(), type, hidden, 0, buckets, out, buckets);
    }
    if (!linear_weight.empty()) {
      float* linear = hidden > 0 ? scratch.data() : out;
      table.gemv(in, rows, linear_weight.data(), type, inputs, 0, buckets, linear, buckets);
      if (hidden > 0) add_row(out, {linear, static_cast<std::size_t>(rows * buckets)});
    }
    for (int r = 0; r < rows; ++r) add_row(out + r * buckets, bias);
  }
}

void BucketNet::label(Matrix<const float> x, std::span<std::int32_t> labels) const {
  LODE_ASSERT(x.cols == inputs && x.stride == x.cols && std::ssize(labels) == x.rows);
  std::vector<float> scratch, y(static_cast<std::size_t>(kGemvRows * buckets));
  for (std::int64_t at = 0; at < x.rows; at += kGemvRows) {
    const std::int64_t rows = std::min(kGemvRows, x.rows - at);
    scores(x[at].data(), rows, scratch, y.data());
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* first = y.data() + r * buckets;
      labels[static_cast<std::size_t>(at + r)] =
          static_cast<std::int32_t>(std::max_element(first, first + buckets) - first);
    }
  }
}

std::vector<float> BucketNet::centroids() const {
  if (!is_centroids()) return {};
  std::vector<float> all(static_cast<std::size_t>(buckets * inputs));
  kernels().widen(linear_weight.data(), type, std::ssize(all), all.data());
  return all;
}

void BucketNet::write(const std::string& prefix, std::vector<TensorToWrite>& tensors,
                      std::deque<std::vector<std::byte>>& bytes) const {
  const auto add = [&](const char* name, DType t, std::vector<std::int64_t> shape,
                       std::span<const std::byte> data) {
    if (!data.empty()) tensors.push_back({prefix + name, t, std::move(shape), data});
  };
  const auto keep = [&](const auto& values) -> std::span<const std::byte> {
    const auto raw = std::as_bytes(std::span(values));
    return bytes.emplace_back(raw.begin(), raw.end());
  };
  const auto add_weight = [&](const std::string& path, std::int64_t rows, std::int64_t columns,
                              const std::vector<std::byte>& weight) {
    if (!in_8_bits || weight.empty()) return add((path + ".weight").c_str(), type, {rows, columns}, weight);
    const CodedRows coded = encode_rows(widened(weight, type), columns);
    add((path + ".weight").c_str(), DType::q8, {rows, columns}, keep(coded.codes));
    add((path + ".most").c_str(), DType::f32, {rows}, keep(coded.most));
  };
  add_weight(".hidden", hidden, inputs, hidden_weight);
  add(".hidden.bias", DType::f32, {hidden}, std::as_bytes(std::span(hidden_bias)));
  add_weight(".output", buckets, hidden, output_weight);
  add_weight(".linear", buckets, inputs, linear_weight);
  add(".bias", DType::f32, {buckets}, std::as_bytes(std::span(bias)));
}

BucketNet BucketNet::read(const std::map<std::string, Tensor>& tensors, const std::string& prefix,
                          std::int64_t inputs, std::string_view where) {
  const auto has = [&](const char* name) { return tensors.contains(prefix + name); };
  const bool deep = has(".hidden.weight"), linear = has(".linear.weight");
  const std::string first = prefix + (deep || !linear ? ".hidden.weight" : ".linear.weight");
  const Tensor& leading = find_tensor(tensors, first, {-1, inputs}, where);
  const bool coded = leading.type == "I8";
  const DType type = coded ? DType::f32 : float_type(leading, first, where);
  const auto weights = [&](const char* path, const std::vector<std::int64_t>& shape) {
    const std::string full = prefix + path + ".weight";
    const Tensor& tensor = find_tensor(tensors, full, shape, where);
    if (tensor.type != leading.type) {
      throw InputError(fmt::format("{}: tensor '{}': expected the type of '{}', found {}", where, full, first,
                                   tensor.type));
    }
    return coded ? read_coded(tensor, tensors, full, prefix + path + ".most", where)
                 : read_floats(tensors, full, shape, where);
  };
  std::vector<float> w1, b1, w2, w3, b2;
  if (deep) {
    w1 = weights(".hidden", {-1, inputs});
    const std::int64_t hidden = leading.shape[0];
    b1 = read_floats(tensors, prefix + ".hidden.bias", {hidden}, where);
    w2 = weights(".output", {-1, hidden});
  }
  const std::int64_t buckets = deep ? tensors.at(prefix + ".output.weight").shape[0] : leading.shape[0];
  if (linear) w3 = weights(".linear", {buckets, inputs});
  if (has(".bias")) b2 = read_floats(tensors, prefix + ".bias", {buckets}, where);
  BucketNet net(inputs, buckets, Weights{w1, b1, w2, w3, b2}, type);
  net.in_8_bits = coded;
  return net;
}

}  // namespace lode
