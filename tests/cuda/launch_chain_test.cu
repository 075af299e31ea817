// SPDX-License-Identifier: Apache-2.0
// Kernels that are held back against the same numbers on the host: each kernel changes what the one before it left, so an
// order, an argument or a width that is not the caller's shows.
#include <random>
#include <stdexcept>

#include "harness.h"
#include "kernels/cuda/device/event.h"
#include "kernels/cuda/device/hopper.cuh"
#include "kernels/cuda/device/launch_chain.h"
#include "lodestone/error.h"
#include "reference.h"

namespace lode::cuda {
namespace {

constexpr int kThreads = 64, kCount = 1000;

struct Change {
  unsigned factor, addend;
};

__device__ void change(unsigned* x, int count, Change by) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) x[i] = x[i] * by.factor + by.addend;
}
__global__ void plain_kernel(unsigned* x, int count, Change by) {
  change(x, count, by);
}
__global__ void early_kernel(unsigned* x, int count, Change by) {
  release_successor();
  wait_for_predecessor();
  change(x, count, by);
}
/// Looks its addend up before its wait.
__global__ void hasty_kernel(unsigned* x, int count, const unsigned* addend) {
  const unsigned known = *addend;
  wait_for_predecessor();
  change(x, count, {3, known});
}
__global__ void shared_kernel(unsigned* x, int count, Change by) {
  extern __shared__ unsigned held[];
  held[threadIdx.x] = by.addend;
  change(x, count, {by.factor, held[threadIdx.x]});
}

/// The same changes on the GPU and on the host.
class Numbers {
 public:
  Numbers() : there_(kCount * 4, "a test"), here_(kCount) {
    for (std::size_t i = 0; i < here_.size(); ++i) here_[i] = static_cast<unsigned>(i) * 2654435761u;
    copy(there_.as<void>(), here_.data(), there_.bytes(), stream_.get());
    stream_.synchronize();
  }
  StreamHandle stream() const { return stream_.get(); }
  /// kind 0: a plain kernel, 1: an early one, 2: an early one in clusters of two blocks, 3: one with shared memory.
  void change(int kind, int count, Change by) {
    const int blocks = (count + kThreads - 1) / kThreads / 2 * 2 + 2;
    auto* const x = there_.as<unsigned>();
    const auto grid = static_cast<unsigned>(blocks);
    if (kind == 0) Launch(grid, kThreads, 0, stream())(plain_kernel, x, count, by);
    if (kind == 1) EarlyLaunch(grid, kThreads, 0, 1, stream())(early_kernel, x, count, by);
    if (kind == 2) EarlyLaunch(grid, kThreads, 0, 2, stream())(early_kernel, x, count, by);
    if (kind == 3) Launch(grid, kThreads, kThreads * 4, stream())(shared_kernel, x, count, by);
    for (int i = 0; i < count; ++i) {
      unsigned& own = here_[static_cast<std::size_t>(i)];
      own = own * by.factor + by.addend;
    }
  }
  void change_in(StreamHandle stream, Change by) {
    constexpr unsigned kBlocks = (kCount + kThreads - 1) / kThreads;
    EarlyLaunch(kBlocks, kThreads, 0, 1, stream)(early_kernel, there_.as<unsigned>(), kCount, by);
    for (unsigned& own : here_) own = own * by.factor + by.addend;
  }
  /// By an early kernel behind a copy of `addend`, which reads the copy before its wait.
  void add_staged(PinnedBuffer& staged, const Buffer& there, unsigned addend) {
    *staged.as<unsigned>() = addend;
    copy_numbers(there.as<void>(), staged, 4, stream());
    constexpr unsigned kBlocks = (kCount + kThreads - 1) / kThreads;
    EarlyLaunch(kBlocks, kThreads, 0, 1, stream())(hasty_kernel, there_.as<unsigned>(), kCount,
                                                   there.as<unsigned>());
    for (unsigned& own : here_) own = own * 3 + addend;
  }
  void set_all(int byte) {
    fill(there_.as<void>(), byte, there_.bytes(), stream());
    here_.assign(here_.size(), static_cast<unsigned>(byte) * 0x01010101u);
  }
  void set_first(PinnedBuffer& staged, int count, unsigned value) {
    for (int i = 0; i < count; ++i) here_[static_cast<std::size_t>(i)] = staged.as<unsigned>()[i] = value;
    copy_numbers(there_.as<void>(), staged, count * 4, stream());
  }
  bool are_equal() const {
    std::vector<unsigned> found(here_.size());
    copy(found.data(), there_.as<void>(), there_.bytes(), stream());
    stream_.synchronize();
    return found == here_;
  }

 private:
  Stream stream_;
  Buffer there_;
  std::vector<unsigned> here_;
};

LODE_TEST(held_kernels_run_in_their_order_with_their_arguments) {
  Numbers numbers;
  LaunchGraphs graphs;
  std::mt19937 random(7);
  for (int call = 0; call < 40; ++call) {
    const LaunchChain chain(graphs, numbers.stream());
    const unsigned order = random() % 3;  // of three, whose graphs are used again
    for (unsigned i = 0; i < 5; ++i)
      numbers.change(static_cast<int>((i + order) % 4), 1 + static_cast<int>(random() % kCount),
                     {static_cast<unsigned>(random()) | 1, static_cast<unsigned>(random())});
  }
  LODE_CHECK(numbers.are_equal());
}

LODE_TEST(more_orders_of_kernels_than_have_graphs) {
  Numbers numbers;
  LaunchGraphs graphs;
  for (int call = 0; call < 64; ++call) {
    LaunchChain chain(graphs, numbers.stream());
    for (int at = call; at > 0; at /= 4)
      numbers.change(at % 4, kCount - call, {3, static_cast<unsigned>(call)});
    chain.flush();
    numbers.change(call % 4, kCount, {5, 1});
  }
  LODE_CHECK(numbers.are_equal());
}

LODE_TEST(what_else_the_stream_is_told_keeps_its_place_among_held_kernels) {
  Numbers numbers;
  LaunchGraphs graphs;
  PinnedBuffer few(64), many(kCount * 4);
  const Event event;
  for (unsigned call = 0; call < 6; ++call) {
    const LaunchChain chain(graphs, numbers.stream());
    LODE_CHECK(holds_back(numbers.stream()) && !holds_back(nullptr));
    numbers.change(0, kCount, {3, call});
    numbers.set_all(static_cast<int>(call) + 1);
    numbers.change(1, kCount, {7, call});
    numbers.set_first(few, 16, call);
    numbers.change(2, kCount, {9, call});
    { const Buffer freed(64, "a test"); }
    numbers.change(3, kCount, {11, call});
    LODE_CHECK(numbers.are_equal());  // copies back, and waits
    numbers.set_first(many, kCount, call);
    numbers.change(0, 10, {3, 5});
    event.hold_up(numbers.stream());
    LODE_CHECK(numbers.are_equal());
  }
  LODE_CHECK(!holds_back(numbers.stream()));
  numbers.set_first(few, 16, 77);
  LODE_CHECK(numbers.are_equal());
}

LODE_TEST(a_kernel_may_look_up_a_held_copy_before_its_wait) {
  Numbers numbers;
  LaunchGraphs graphs;
  PinnedBuffer staged(64);
  const Buffer there(64, "a test");
  for (unsigned call = 0; call < 200; ++call) {
    LaunchChain chain(graphs, numbers.stream());
    numbers.change(0, kCount, {5, call});
    numbers.add_staged(staged, there, call * 77);
    chain.flush();
    LODE_CHECK(numbers.are_equal());
  }
}

LODE_TEST(one_graph_in_two_streams_one_behind_the_other) {
  Numbers numbers;
  LaunchGraphs graphs;
  const Stream other;
  Event done;
  for (unsigned call = 0; call < 20; ++call) {
    for (const StreamHandle stream : {numbers.stream(), other.get()}) {
      done.hold_up(stream);
      {
        const LaunchChain chain(graphs, stream);
        numbers.change_in(stream, {3, call});
        numbers.change_in(stream, {7, 1});
      }
      done.record(stream);
    }
  }
  done.hold_up(numbers.stream());
  LODE_CHECK(numbers.are_equal());
}

LODE_TEST(a_flush_that_fails_says_so_from_then_on) {
  Numbers numbers;
  LaunchGraphs graphs;
  const auto fails = [](const auto& body) {
    try {
      body();
    } catch (const RunError&) {
      return true;
    }
    return false;
  };
  {
    LaunchChain chain(graphs, numbers.stream());
    constexpr unsigned kTooMany = 4096;  // threads
    Launch(1, kTooMany, 0, numbers.stream())(plain_kernel, nullptr, 0, Change{1, 0});
    LODE_CHECK(!graphs.has_lost());
    { const Buffer freed(64, "a test"); }  // tries, and may not throw
    LODE_CHECK(graphs.has_lost());
    LODE_CHECK(fails([&] { chain.flush(); }));
  }
  {
    LaunchChain chain(graphs, numbers.stream());
    LODE_CHECK(fails([&] { chain.flush(); }));
  }
  numbers.change(0, kCount, {3, 1});
  LODE_CHECK(numbers.are_equal());
}

LODE_TEST(held_kernels_run_where_an_exception_ends_the_chain) {
  Numbers numbers;
  LaunchGraphs graphs;
  try {
    const LaunchChain chain(graphs, numbers.stream());
    numbers.change(0, kCount, {3, 1});
    numbers.change(1, kCount, {5, 2});
    throw std::runtime_error("of a caller");
  } catch (const std::runtime_error&) {
  }
  LODE_CHECK(numbers.are_equal());
}

}  // namespace
}  // namespace lode::cuda
