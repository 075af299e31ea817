// SPDX-License-Identifier: Apache-2.0
#include "gpu/index/device_links.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "ann/graph/build.h"
#include "base/cancel.h"
#include "gpu/index/device_memory.h"
#include "kernels/cuda/device/caller.h"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/graph/links.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kWord = 4;

constexpr std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

std::int64_t item_count(std::int64_t keys, std::int64_t listed, int degree) {
  return std::max(listed, keys * forward_links(degree));
}

class DeviceLinks final : public GraphLinker {
 public:
  DeviceLinks(Matrix<const float> keys, std::span<const Node> nearest, std::int64_t each, int degree,
              std::shared_ptr<void> held)
      : held_(std::move(held)),
        count_(keys.rows),
        width_(static_cast<int>(keys.cols)),
        degree_(degree),
        forward_width_(forward_links(degree)),
        each_(static_cast<int>(each)),
        keys_(count_ * width_ * kWord, kWhat),
        squares_(count_ * kWord, kWhat),
        nearest_(std::ssize(nearest) * kWord, kWhat),
        first_((count_ + 1) * kWord, kWhat),
        next_((count_ + 1) * kWord, kWhat),
        items_(item_count(count_, std::ssize(nearest), degree) * kWord, kWhat),
        forward_(count_ * forward_width_ * kWord, kWhat),
        rows_(count_ * degree * kWord, kWhat),
        asking_(count_ * kWord, kWhat),
        asked_(count_ * candidates_for(degree) * kWord, kWhat) {
    upload(keys_.as<void>(), std::span(keys.data, at(count_ * width_)), stream_);
    upload(nearest_.as<void>(), nearest, stream_);
    listed_ = std::ssize(nearest);
    cuda::square_rows(keys_.as<float>(), count_, width_, squares_.as<float>(), stream_.get());
  }

  std::vector<Node> link_listed() override {
    check_cancel();
    const cuda::OnDevice here(device_);
    const cuda::NearestLists lists = {
        .queries = listed_ / each_, .each = each_, .keys = nearest_.as<std::int32_t>()};
    divide(lists.keys, listed_);
    cuda::lists_by_key(lists, by_key(), next_.as<std::int32_t>(), stream_.get());
    cuda::link_listed(keys(), lists, by_key(), candidates_for(degree_), forward_width_,
                      forward_.as<std::int32_t>(), stream_.get());
    cuda::put_links(forward_.as<std::int32_t>(), nullptr, count_, forward_width_, degree_,
                    rows_.as<std::int32_t>(), stream_.get());
    return with_links_back();
  }

  std::vector<Node> link_near(std::span<const Node> nodes, std::span<const Node> near,
                              std::int64_t each) override {
    LODE_ASSERT(each <= candidates_for(degree_) && std::ssize(near) == std::ssize(nodes) * each);
    check_cancel();
    const cuda::OnDevice here(device_);
    upload(asking_.as<void>(), nodes, stream_);
    upload(asked_.as<void>(), near, stream_);
    cuda::fill(forward_.as<void>(), 0xff, forward_.bytes(), stream_.get());  // -1
    cuda::link_near(keys(), asking_.as<std::int32_t>(), std::ssize(nodes), asked_.as<std::int32_t>(),
                    static_cast<int>(each), forward_width_, forward_.as<std::int32_t>(), stream_.get());
    cuda::put_links(forward_.as<std::int32_t>(), asking_.as<std::int32_t>(), std::ssize(nodes),
                    forward_width_, degree_, rows_.as<std::int32_t>(), stream_.get());
    return with_links_back();
  }

 private:
  static constexpr const char* kWhat = "links of a graph of keys";

  cuda::LinkedKeys keys() const {
    return {.count = count_, .width = width_, .rows = keys_.as<float>(), .squares = squares_.as<float>()};
  }
  cuda::ByKey by_key() const { return {first_.as<std::int32_t>(), items_.as<std::uint32_t>()}; }

  /// Where the items of each key begin, of [count] keys; first_ and next_ have it then.
  void divide(const std::int32_t* keys, std::int64_t count) {
    cuda::fill(next_.as<void>(), 0, next_.bytes(), stream_.get());
    cuda::count_keys(keys, count, next_.as<std::int32_t>(), stream_.get());
    std::vector<std::int32_t> first = downloaded(next_.as<std::int32_t>(), count_ + 1, stream_);
    std::exclusive_scan(first.begin(), first.end(), first.begin(), 0);
    upload<std::int32_t>(first_.as<void>(), first, stream_);
    upload<std::int32_t>(next_.as<void>(), first, stream_);
  }
  std::vector<Node> with_links_back() {
    divide(forward_.as<std::int32_t>(), count_ * forward_width_);
    cuda::links_by_target(forward_.as<std::int32_t>(), count_, forward_width_, by_key(),
                          next_.as<std::int32_t>(), stream_.get());
    cuda::add_links_back(keys(), by_key(), degree_, rows_.as<std::int32_t>(), stream_.get());
    return downloaded(rows_.as<Node>(), count_ * degree_, stream_);
  }
  std::shared_ptr<void> held_;  ///< counts the memory until it is given back
  std::int64_t count_, listed_ = 0;
  int width_, degree_, forward_width_, each_;
  int device_ = cuda::current_device();  ///< new threads start on device 0
  cuda::Stream stream_;
  cuda::Buffer keys_, squares_, nearest_;  // [n, width], [n], [q, each]
  cuda::Buffer first_, next_, items_;      // [n + 1], [n + 1], [q * each or n * forward links]
  cuda::Buffer forward_, rows_;            // [n, forward links], [n, degree]
  cuda::Buffer asking_, asked_;            // of link_near
};

}  // namespace

std::int64_t device_linker_bytes(std::int64_t keys, std::int64_t width, std::int64_t queries,
                                 std::int64_t each, int degree) {
  const bool taken = keys > 0 && keys < (std::int64_t{1} << 31) / degree && width <= kWidestEverywhere &&
                     each >= 1 && each <= cuda::kMostOfList && queries * each < (std::int64_t{1} << 31) &&
                     degree <= cuda::kMostLinkDegree && candidates_for(degree) <= cuda::kMostCandidates;
  if (!taken) return 0;
  const std::int64_t lists = queries * each;
  return (keys * (width + 5 + forward_links(degree) + degree + candidates_for(degree)) + lists +
          item_count(keys, lists, degree)) *
         kWord;
}

std::unique_ptr<GraphLinker> device_linker(Matrix<const float> keys, std::span<const Node> nearest,
                                           std::int64_t each, int degree, std::shared_ptr<void> held) {
  LODE_ASSERT(keys.stride == keys.cols && std::ssize(nearest) % each == 0);
  return std::make_unique<DeviceLinks>(keys, nearest, each, degree, std::move(held));
}

}  // namespace lode
