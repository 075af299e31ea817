// SPDX-License-Identifier: Apache-2.0
// Merging two states on the device: against float64, and with sides that are empty or not numbers.
#include <cuda_runtime.h>

#include <bit>
#include <vector>

#include "harness.h"
#include "kernels/cuda/attend/attend_window.h"
#include "kernels/cuda/attend/merge_states.h"
#include "kernels/cuda/reduce/group_exchange.h"
#include "reference.h"

namespace lode::cuda {
namespace {

constexpr int kDim = 80;

std::vector<float> merged(const std::vector<float>& a, const std::vector<float>& a_lse,
                          const std::vector<float>& b, const std::vector<float>& b_lse) {
  Stream stream;
  const auto on_device = [&](const std::vector<float>& x) {
    Buffer buffer(std::ssize(x) * 4, "a test");
    copy(buffer.as<void>(), x.data(), std::ssize(x) * 4, stream.get());
    return buffer;
  };
  const Buffer o = on_device(a), lse = on_device(a_lse), other = on_device(b), other_lse = on_device(b_lse);
  merge_states(o.as<float>(), lse.as<float>(), other.as<float>(), other_lse.as<float>(), std::ssize(a_lse),
               kDim, stream.get());
  std::vector<float> result(a.size());
  copy(result.data(), o.as<float>(), std::ssize(a) * 4, stream.get());
  stream.synchronize();
  return result;
}

LODE_TEST(states_merge_as_in_float64_and_empty_sides_change_nothing) {
  const float none = -INFINITY;
  const std::vector<float> a_lse = {0.5f, none, 3.0f, none, 200.0f, -300.0f},
                           b_lse = {1.5f, 2.0f, none, none, 199.0f, 300.0f};
  std::vector<float> a(a_lse.size() * kDim), b(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = std::sin(float(i)), b[i] = std::cos(float(i));
  const std::vector<float> found = merged(a, a_lse, b, b_lse);
  for (std::size_t i = 0; i < a.size(); ++i) {
    const std::size_t row = i / kDim;
    const double peak = std::fmax(a_lse[row], b_lse[row]);
    const double wa = a_lse[row] == none ? 0.0 : std::exp(a_lse[row] - peak);
    const double wb = b_lse[row] == none ? 0.0 : std::exp(b_lse[row] - peak);
    LODE_CHECK_CLOSE(found[i], wa + wb == 0.0 ? a[i] : (a[i] * wa + b[i] * wb) / (wa + wb), 1e-6);
  }
}

LODE_TEST(sinks_merge_as_a_key_without_a_value) {
  Stream stream;
  const std::vector<float> sinks = {0.0f, -INFINITY, 40.0f, -90.0f},
                           lse = {1.0f, 2.0f, 39.0f, -100.0f, -INFINITY, -INFINITY, 1e4f, NAN};
  std::vector<float> o(lse.size() * kDim);
  for (std::size_t i = 0; i < o.size(); ++i) o[i] = std::sin(float(i));
  const test::OnDevice<float> sinks_there(sinks), lse_there(lse), o_there(o);
  merge_sinks(o_there.get(), lse_there.get(), sinks_there.get(), std::ssize(lse), 4, kDim, stream.get());
  const std::vector<float> found = o_there.read(stream), all = lse_there.read(stream);
  for (std::size_t row = 0; row + 1 < lse.size(); ++row) {
    const double own = lse[row], sink = sinks[row % 4], peak = std::fmax(own, sink);
    const double sum = peak == -INFINITY ? 0.0 : std::exp(own - peak) + std::exp(sink - peak),
                 weight = sink == -INFINITY ? 1.0 : std::exp(own - peak) / sum;
    for (std::size_t i = row * kDim; i < (row + 1) * kDim; ++i)
      LODE_CHECK_CLOSE(found[i], o[i] * weight, 1e-6);
    if (sum > 0) LODE_CHECK_CLOSE(all[row], peak + std::log(sum), 1e-3);
  }
  LODE_CHECK(std::isnan(found.back()));
}

LODE_TEST(windows_list_what_they_reach_of_a_document) {
  Stream stream;
  constexpr int kHeads = 3, kCapacity = 100;
  const std::vector<QueryToken> absolute = {{0, 0},   {1, 99},  {2, 130}, {3, 198},
                                            {4, 199}, {5, 227}, {6, 500}},
                                in_tail = {{0, 0}, {1, 0}, {2, 2}, {3, 70}, {4, 71}, {5, 99}, {6, 436}};
  const test::OnDevice<QueryToken> there(absolute), tails(in_tail);
  const test::OnDevice<std::int32_t> rows(
      std::vector<std::int32_t>(absolute.size() * kHeads * kCapacity, -7)),
      counts(std::vector<std::int32_t>(absolute.size() * kHeads, -7));
  for (const std::int64_t window : {1, 64, 100}) {
    list_window({there.get(), tails.get(), kHeads, window, kCapacity}, static_cast<int>(absolute.size()),
                rows.get(), counts.get(), stream.get());
    const auto listed = rows.read(stream), count = counts.read(stream);
    for (std::size_t list = 0; list < count.size(); ++list) {
      const std::int64_t position = absolute[list / kHeads].position,
                         seam = position - in_tail[list / kHeads].position;
      std::vector<std::int32_t> expected;
      for (std::int64_t row = std::max<std::int64_t>(0, position + 1 - window); row < seam; ++row)
        expected.push_back(static_cast<std::int32_t>(row));
      const auto* const begin = listed.data() + list * kCapacity;
      LODE_CHECK(count[list] == static_cast<int>(expected.size()) &&
                 std::equal(expected.begin(), expected.end(), begin));
    }
  }
}

/// Planes and states of some rows, some of them empty, with poison in what is empty.
LODE_TEST(planes_merge_as_in_float64_with_and_without_any) {
  Stream stream;
  constexpr int kRows = 37;
  for (const int d : {80, 128, 256}) {
    for (const int planes : {0, 1, 16}) {
      for (const int states : {1, 3}) {
        const int all = planes + states;
        std::vector<float> lse(static_cast<std::size_t>(all * kRows)),
            outputs(lse.size() * static_cast<std::size_t>(d));
        for (std::size_t i = 0; i < lse.size(); ++i) {
          lse[i] = i % 5 == 3 ? -INFINITY : 40.0f * std::sin(float(i));
          for (std::size_t k = 0; k < static_cast<std::size_t>(d); ++k)
            outputs[i * static_cast<std::size_t>(d) + k] =
                lse[i] == -INFINITY ? NAN : std::cos(float(i + 7 * k));
        }
        const Buffer o(std::ssize(outputs) * 4, "a test"), l(std::ssize(lse) * 4, "a test"),
            to(std::int64_t{kRows} * d * 4, "a test"), halves(std::int64_t{kRows} * d * 4, "a test");
        copy(o.as<void>(), outputs.data(), o.bytes(), stream.get());
        copy(l.as<void>(), lse.data(), l.bytes(), stream.get());
        StatePart parts[3];
        for (int s = 0; s < states; ++s)
          parts[s] = {o.as<float>() + std::int64_t{planes + s} * kRows * d,
                      l.as<float>() + (planes + s) * kRows};
        merge_planes({o.as<float>(), l.as<float>(), planes}, parts, states, kRows, d, to.as<float>(),
                     {halves.as<void>(), std::int64_t{kRows} * d}, stream.get());
        std::vector<float> found(static_cast<std::size_t>(kRows * d));
        std::vector<std::uint16_t> split(2 * found.size());
        copy(found.data(), to.as<float>(), to.bytes(), stream.get());
        copy(split.data(), halves.as<void>(), halves.bytes(), stream.get());
        stream.synchronize();
        const auto widened = [&](std::size_t i) {
          return double{std::bit_cast<float>(static_cast<std::uint32_t>(split[i]) << 16)};
        };
        for (std::size_t i = 0; i < found.size(); ++i) {
          const std::size_t row = i / static_cast<std::size_t>(d), rows = kRows;
          double sum = 0, want = 0;
          for (std::size_t p = 0; p < static_cast<std::size_t>(all); ++p) {
            if (lse[p * rows + row] == -INFINITY) continue;
            const double weight = std::exp(double{lse[p * rows + row]} - 40.0);
            sum += weight, want += weight * outputs[p * found.size() + i];
          }
          LODE_CHECK_CLOSE(found[i], sum == 0.0 ? 0.0 : want / sum, 1e-5);
          LODE_CHECK_CLOSE(widened(i) + widened(found.size() + i), found[i], 1e-4);
        }
      }
    }
  }
}

/// Ranks of one GPU, each on a stream of its own: states of all merge on each, and each gets what all have.
LODE_TEST(ranks_merge_states_and_gather_numbers_alike) {
  constexpr int kRanks = 3, kRows = 29, d = 128;
  const DeviceGroup group({0, 0, 0}, GpuSum::peers);
  const GroupExchange exchange(group, kRows * (d + 1));
  std::vector<Stream> streams(kRanks);
  std::vector<std::vector<float>> states, found(kRanks, std::vector<float>(kRows * d)),
      gathered(kRanks, std::vector<float>(kRanks * kRows));
  const Buffer merged(kRanks * kRows * d * 4, "a test"), all(kRanks * kRanks * kRows * 4, "a test");
  for (int r = 0; r < kRanks; ++r) {
    std::vector<float> state(kRows * (d + 1));
    for (int row = 0; row < kRows; ++row) {
      float& lse = state[static_cast<std::size_t>(kRows * d + row)];
      lse = row == 5 || (row + r) % 4 == 0 ? -INFINITY : 30.0f * std::sin(float(7 * row + r));
      for (int i = 0; i < d; ++i)
        state[static_cast<std::size_t>(row * d + i)] = lse == -INFINITY ? NAN : std::cos(float(row + i * r));
    }
    states.push_back(std::move(state));
  }
  for (int call = 0; call < 4; ++call) {  // slots in turn
    const int slot = call % 2;
    for (int r = 0; r < kRanks; ++r) {
      const auto& state = states[static_cast<std::size_t>(r)];
      const StreamHandle stream = streams[static_cast<std::size_t>(r)].get();
      if (call % 2 == 0) {
        copy(exchange.part(r, slot), state.data(), std::ssize(state) * 4, stream);
        exchange.merge(r, slot, kRows, d, merged.as<float>() + r * kRows * d, stream);
      } else {
        copy(exchange.part(r, slot), state.data() + kRows * d, kRows * 4, stream);
        exchange.gather(r, slot, kRows, all.as<float>() + r * kRanks * kRows, stream);
      }
    }
  }
  for (int r = 0; r < kRanks; ++r) {
    const auto own = static_cast<std::size_t>(r);
    copy(found[own].data(), merged.as<float>() + r * kRows * d, kRows * d * 4, streams[own].get());
    copy(gathered[own].data(), all.as<float>() + r * kRanks * kRows, kRanks * kRows * 4, streams[own].get());
    streams[own].synchronize();
    LODE_CHECK(found[own] == found[0]);
    for (int other = 0; other < kRanks; ++other)
      for (int row = 0; row < kRows; ++row)
        LODE_CHECK(gathered[own][static_cast<std::size_t>(other * kRows + row)] ==
                   states[static_cast<std::size_t>(other)][static_cast<std::size_t>(kRows * d + row)]);
  }
  exchange.expect_whole();
  for (int i = 0; i < kRows * d; ++i) {
    double sum = 0, want = 0;
    for (const auto& state : states) {
      const float lse = state[static_cast<std::size_t>(kRows * d + i / d)];
      if (lse == -INFINITY) continue;
      sum += std::exp(double{lse} - 30.0);
      want += std::exp(double{lse} - 30.0) * state[static_cast<std::size_t>(i)];
    }
    LODE_CHECK_CLOSE(found[0][static_cast<std::size_t>(i)], sum == 0.0 ? 0.0 : want / sum, 1e-5);
  }
}

LODE_TEST(what_is_not_a_number_on_one_side_is_not_hidden_by_the_other) {
  const std::vector<float> a(kDim, 1.0f), bad(kDim, NAN);
  LODE_CHECK(std::isnan(merged(a, {0.0f}, bad, {NAN})[0]));
  LODE_CHECK(std::isnan(merged(bad, {NAN}, a, {0.0f})[0]));
}

}  // namespace
}  // namespace lode::cuda
