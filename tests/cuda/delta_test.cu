// SPDX-License-Identifier: Apache-2.0
// A recurrent layer on the device: against float64, with states that vanish and gates that saturate; and its bits, which
// depend neither on how tokens are cut into calls nor on which sequences come together.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "harness.h"
#include "kernels/cuda/delta/delta.h"

namespace lode::cuda {
namespace {

struct Sizes {
  int key_heads, value_heads, key_dim, value_dim, kernel;
  bool tiled;
};
constexpr Sizes kSizes[] = {{2, 4, 8, 12, 4, false}, {2, 4, 128, 128, 4, true},  {2, 6, 128, 128, 4, false},
                            {1, 2, 30, 5, 2, false}, {1, 1, 256, 200, 4, false}, {2, 2, 64, 64, 1, false}};

std::vector<float> numbers(std::int64_t count, float size, std::uint64_t seed) {
  std::vector<float> x(static_cast<std::size_t>(count));
  std::uint64_t state = seed * 2654435761u + 1;
  for (float& value : x) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = size * (static_cast<float>(state >> 40) / float(1 << 23) - 1.0f);
  }
  return x;
}

/// A layer, the products of some tokens' inputs, and the states of some sequences in front of them.
struct Problem {
  DeltaLayer layer;
  std::int64_t tokens, columns, state_floats;
  std::vector<float> conv, dt_bias, rate, norm, products;

  Problem(const Sizes& s, std::int64_t tokens_, float gates)
      : layer({s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.kernel, s.tiled, 1e-6f}),
        tokens(tokens_) {
    columns = layer.channels() + layer.values() + 2 * layer.value_heads;
    state_floats = (layer.kernel - 1) * layer.channels() + layer.key_dim * layer.values();
    conv = numbers(layer.channels() * layer.kernel, 1.0f, 1);
    dt_bias = numbers(layer.value_heads, 1.0f, 2);
    rate = numbers(layer.value_heads, 0.5f, 3);
    for (float& r : rate) r -= 0.6f;
    norm = numbers(layer.value_dim, 1.0f, 4);
    products = numbers(tokens * columns, 1.0f, 5);
    for (std::int64_t t = 0; t < tokens; ++t)
      for (std::int64_t i = columns - 2 * layer.value_heads; i < columns; ++i)
        products[static_cast<std::size_t>(t * columns + i)] *= gates;
  }
  std::vector<float> state(std::uint64_t seed) const { return numbers(state_floats, 1.0f, 100 + seed); }
};

using States = std::vector<std::vector<float>>;  // [sequences][state_floats]
struct Result {
  std::vector<float> o;  // [T, values]
  States after;
};

Buffer on_device(const std::vector<float>& x, const Stream& stream) {
  Buffer buffer(std::max<std::int64_t>(std::ssize(x), 1) * 4, "a test");
  copy(buffer.as<void>(), x.data(), std::ssize(x) * 4, stream.get());
  return buffer;
}

/// Tokens from `first` on: so many of each sequence, one sequence behind the other.
Result run(const Problem& p, std::int64_t first, const std::vector<int>& counts, const States& before,
           bool in_place = false) {
  constexpr std::int64_t kInFront = 4;  // floats of other layers
  Stream stream;
  std::vector<Buffer> from, to;
  std::vector<DeltaRows> rows;
  std::int32_t tokens = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    std::vector<float> all(static_cast<std::size_t>(kInFront + p.state_floats), NAN);
    to.push_back(on_device(all, stream));
    std::copy(before[i].begin(), before[i].end(), all.begin() + kInFront);
    from.push_back(on_device(all, stream));
    rows.push_back({from[i].as<float>(), (in_place ? from : to)[i].as<float>(), tokens, counts[i]});
    tokens += counts[i];
  }
  const Buffer conv = on_device(p.conv, stream), dt_bias = on_device(p.dt_bias, stream),
               rate = on_device(p.rate, stream), norm = on_device(p.norm, stream),
               products = on_device(p.products, stream);
  Result result;
  result.o.assign(static_cast<std::size_t>(tokens * p.layer.values()), NAN);
  const Buffer there(std::ssize(rows) * std::int64_t{sizeof(DeltaRows)}, "a test"),
      o = on_device(result.o, stream),
      convolved(std::max<std::int64_t>(tokens, 1) * p.layer.channels() * 4, "a test"),
      gates(std::max<std::int64_t>(tokens, 1) * 2 * p.layer.value_heads * 4, "a test");
  copy(there.as<void>(), rows.data(), there.bytes(), stream.get());
  DeltaLayer layer = p.layer;
  layer.conv = conv.as<float>(), layer.dt_bias = dt_bias.as<float>(), layer.rate = rate.as<float>();
  layer.norm = norm.as<float>();
  const float* const at = products.as<float>() + first * p.columns;
  const std::int64_t z = p.layer.channels(), b = z + p.layer.values(), a = b + p.layer.value_heads;
  delta_layer(layer,
              {.qkv = {at, p.columns},
               .z = {at + z, p.columns},
               .b = {at + b, p.columns},
               .a = {at + a, p.columns},
               .tokens = tokens,
               .rows = there.as<DeltaRows>(),
               .row_count = static_cast<int>(rows.size()),
               .single = std::ranges::all_of(counts, [](int n) { return n <= 1; }),
               .state = kInFront,
               .convolved = convolved.as<float>(),
               .gates = gates.as<float>(),
               .o = o.as<float>()},
              stream.get());
  copy(result.o.data(), o.as<float>(), std::ssize(result.o) * 4, stream.get());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::vector<float>& found = result.after.emplace_back(static_cast<std::size_t>(p.state_floats));
    copy(found.data(), rows[i].after + kInFront, p.state_floats * 4, stream.get());
  }
  stream.synchronize();
  return result;
}

/// Some tokens of one sequence in float64; `state` becomes the one behind them.
class Oracle {
 public:
  Oracle(const Problem& p, const std::vector<float>& before) : p_(p), state_(before.begin(), before.end()) {}

  std::vector<double> take(std::int64_t token) {
    const DeltaLayer& l = p_.layer;
    const float* const in = p_.products.data() + token * p_.columns;
    const std::vector<double> x = convolve(in);
    std::vector<double> o(static_cast<std::size_t>(l.values()));
    for (int h = 0; h < l.value_heads; ++h) take_head(in, x, h, o.data() + h * l.value_dim);
    return o;
  }
  const std::vector<double>& state() const { return state_; }

 private:
  std::vector<double> convolve(const float* in) {
    const DeltaLayer& l = p_.layer;
    const std::int64_t channels = l.channels(), past = l.kernel - 1;
    std::vector<double> x(static_cast<std::size_t>(channels));
    for (std::int64_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (std::int64_t i = 0; i <= past; ++i)
        sum += double{p_.conv[static_cast<std::size_t>(c * l.kernel + i)]} *
               (i < past ? state_[static_cast<std::size_t>(i * channels + c)] : double{in[c]});
      x[static_cast<std::size_t>(c)] = sum / (1 + std::exp(-sum));
      for (std::int64_t i = 0; i < past; ++i)
        state_[static_cast<std::size_t>(i * channels + c)] =
            i + 1 < past ? state_[static_cast<std::size_t>((i + 1) * channels + c)] : double{in[c]};
    }
    for (int h = 0; h < 2 * l.key_heads; ++h) {
      double* const head = x.data() + h * l.key_dim;
      double squares = 0;
      for (int i = 0; i < l.key_dim; ++i) squares += head[i] * head[i];
      const double factor =
          (h < l.key_heads ? 1 / std::sqrt(double(l.key_dim)) : 1.0) / std::sqrt(squares + 1e-6);
      for (int i = 0; i < l.key_dim; ++i) head[i] *= factor;
    }
    return x;
  }

  void take_head(const float* in, const std::vector<double>& x, int h, double* o) {
    const DeltaLayer& l = p_.layer;
    const std::int64_t kd = l.key_dim, vd = l.value_dim,
                       key = kd * (l.tiled ? h % l.key_heads : h / (l.value_heads / l.key_heads));
    const float* const z = in + l.channels() + h * vd;
    const float *const b = in + l.channels() + l.values(), *const a = b + l.value_heads;
    const auto head = static_cast<std::size_t>(h);
    const double dt = double{a[h]} + p_.dt_bias[head], soft = dt > 20 ? dt : std::log1p(std::exp(dt)),
                 decay = std::exp(p_.rate[head] * soft), beta = 1 / (1 + std::exp(-double{b[h]}));
    double* const s = state_.data() + (l.kernel - 1) * l.channels() + h * kd * vd;
    const double *const q = x.data() + key, *const k = q + l.keys(),
                        *const v = x.data() + 2 * l.keys() + h * vd;
    double squares = 0;
    for (std::int64_t c = 0; c < vd; ++c) {
      double known = 0;
      for (std::int64_t i = 0; i < kd; ++i) known += decay * s[i * vd + c] * k[i];
      o[c] = 0;
      for (std::int64_t i = 0; i < kd; ++i) {
        s[i * vd + c] = decay * s[i * vd + c] + k[i] * beta * (v[c] - known);
        o[c] += s[i * vd + c] * q[i];
      }
      squares += o[c] * o[c];
    }
    for (std::int64_t c = 0; c < vd; ++c)
      o[c] *= p_.norm[static_cast<std::size_t>(c)] / std::sqrt(squares / double(vd) + double{l.eps}) * z[c] /
              (1 + std::exp(-double{z[c]}));
  }

  const Problem& p_;
  std::vector<double> state_;
};

/// By how much numbers differ, of the largest that is expected.
double apart(const float* found, const std::vector<double>& expected) {
  double most = 1e-30, worst = 0;
  for (const double x : expected) most = std::max(most, std::fabs(x));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double off = std::fabs(found[i] - expected[i]);
    worst = off <= worst ? worst : off;  // not a number stays
  }
  return worst / most;
}

States states_of(const Problem& p, std::size_t count) {
  States states;
  for (std::size_t i = 0; i < count; ++i) states.push_back(p.state(i));
  return states;
}

LODE_TEST(recurrent_layers_are_those_of_float64) {
  for (const Sizes& sizes : kSizes) {
    for (const float gates : {1.0f, 200.0f}) {  // states that vanish at once or stay, betas of 0 and 1
      const std::vector<int> counts = {1, 0, 41, 2, 16};
      const Problem p(sizes, 60, gates);
      const States before = states_of(p, counts.size());
      const Result found = run(p, 0, counts, before);
      std::int64_t token = 0;
      for (std::size_t i = 0; i < counts.size(); ++i) {
        if (counts[i] == 0) continue;  // its state stays where it is
        Oracle oracle(p, before[i]);
        for (int t = 0; t < counts[i]; ++t, ++token)
          LODE_CHECK_CLOSE(apart(found.o.data() + token * p.layer.values(), oracle.take(token)), 0.0, 2e-4);
        LODE_CHECK_CLOSE(apart(found.after[i].data(), oracle.state()), 0.0, 1e-5);
      }
    }
  }
}

LODE_TEST(states_of_recurrent_layers_do_not_depend_on_how_tokens_are_cut) {
  for (const Sizes& sizes : kSizes) {
    const Problem p(sizes, 45, 1.0f);
    const Result whole = run(p, 0, {45}, {p.state(0)});
    for (const int step : {1, 2, 7, 16, 44}) {
      States state = {p.state(0)};
      std::vector<float> o;
      for (int at = 0; at < 45; at += step) {
        const Result part = run(p, at, {std::min(step, 45 - at)}, state, /*in_place=*/at > 0);
        state = part.after;
        o.insert(o.end(), part.o.begin(), part.o.end());
      }
      LODE_CHECK(state == whole.after);
      LODE_CHECK(o == whole.o);
    }
  }
}

LODE_TEST(recurrent_layers_of_a_sequence_do_not_depend_on_company) {
  const Problem p(kSizes[1], 40, 1.0f);
  for (const std::vector<int>& counts : {std::vector<int>{1, 3, 0, 1, 30, 5}, std::vector<int>{1, 0, 1, 1}}) {
    const States before = states_of(p, counts.size());
    const Result together = run(p, 0, counts, before);
    std::int64_t first = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] > 0) {
        const Result alone = run(p, first, {counts[i]}, {before[i]});
        LODE_CHECK(alone.after[0] == together.after[i]);
        LODE_CHECK(std::equal(alone.o.begin(), alone.o.end(), together.o.begin() + first * p.layer.values()));
      }
      first += counts[i];
    }
  }
}

LODE_TEST(outputs_are_gated) {
  Stream stream;
  std::vector<float> x = numbers(1000, 3.0f, 1), gates = numbers(1000, 150.0f, 2);
  const std::vector<float> before = x;
  const Buffer there = on_device(x, stream), by = on_device(gates, stream);
  gate_outputs(there.as<float>(), by.as<float>(), std::ssize(x), stream.get());
  copy(x.data(), there.as<float>(), std::ssize(x) * 4, stream.get());
  stream.synchronize();
  for (std::size_t i = 0; i < x.size(); ++i)
    LODE_CHECK_CLOSE(x[i], before[i] / (1 + std::exp(-double{gates[i]})), 1e-6);
}

}  // namespace
}  // namespace lode::cuda
