// SPDX-License-Identifier: Apache-2.0
#include "gpu/index/device_walks.h"

#include <algorithm>
#include <utility>

#include "base/cancel.h"
#include "gpu/index/device_memory.h"
#include "kernels/cuda/device/caller.h"
#include "kernels/cuda/device/per_device.h"
#include "kernels/cuda/graph/walks.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr std::int64_t kWord = 4;
constexpr std::int64_t kMissedAtOnce = 1 << 19;
constexpr std::int64_t kMostWalks = 1 << 20;  // of one launch, which Ctrl-C waits for

static_assert(QueryWalks::kKeep == cuda::kWalkKeeps && QueryWalks::kMostBeam == cuda::kMostWalkedBeam &&
              QueryWalks::kMostWanted == cuda::kMostWanted && QueryWalks::kOffers == cuda::kMostOffers);
static_assert(sizeof(MissedKey) == sizeof(cuda::MissedKey) && sizeof(Link) == kWord);

std::int64_t code_bytes_for(std::int64_t numbers) {
  return (numbers + 15) / 16 * 16;
}

class DeviceWalks final : public QueryWalks {
 public:
  DeviceWalks(const Wanted& of, const BeamKeys& keys, const KeyGraph& like, std::shared_ptr<void> held)
      : held_(std::move(held)),
        nodes_(like.nodes()),
        degree_(like.degree()),
        numbers_(keys.d),
        rows_(nodes_ * keys.rows.stride, kWhat),
        squares_(nodes_ * kWord, kWhat),
        codes_(of.queries.rows * 2 * code_bytes_for(keys.d), kWhat),
        wanted_(std::ssize(of.nearest) * kWord, kWhat),
        links_(nodes_ * degree_ * kWord, kWhat),
        entries_(std::int64_t{KeyGraph::kEntries} * kWord, kWhat),
        seen_(cuda::kWalksAtOnce * cuda::seen_words(nodes_) * kWord, kWhat),
        results_(result_bytes(of), kWhat),
        visits_(nodes_ * kWord, kWhat),
        uses_(nodes_ * degree_ * kWord, kWhat),
        found_(of.queries.rows * std::int64_t{sizeof(std::uint64_t)}, kWhat) {
    upload(rows_.as<void>(), std::span(keys.rows.data, static_cast<std::size_t>(nodes_ * keys.rows.stride)),
           stream_);
    upload(squares_.as<void>(), std::span(keys.squares, static_cast<std::size_t>(nodes_)), stream_);
    upload(codes_.as<void>(), std::span<const std::int8_t>(coded(of.queries)), stream_);
    upload(wanted_.as<void>(), of.nearest, stream_);
    graph_ = {.nodes = nodes_,
              .degree = degree_,
              .links = links_.as<std::uint32_t>(),
              .entries = entries_.as<std::int32_t>(),
              .rows = rows_.as<void>(),
              .stride = keys.rows.stride,
              .seen = seen_.as<std::uint32_t>()};
    queries_ = {.count = of.queries.rows,
                .code_bytes = static_cast<int>(code_bytes_for(keys.d)),
                .codes = codes_.as<void>(),
                .each = static_cast<int>(of.each()),
                .wanted = wanted_.as<std::int32_t>()};
    stream_.synchronize();
  }

  void enter(const KeyGraph& graph) override {
    LODE_ASSERT(graph.nodes() == nodes_ && graph.degree() == degree_);
    check_cancel();
    const cuda::OnDevice here(device_);
    upload(links_.as<void>(), graph.rows(), stream_);
    upload(entries_.as<void>(), graph.entries(), stream_);
    graph_.entry_count = static_cast<int>(graph.entries().size());
  }

  void watch(std::int64_t beam, std::vector<std::uint32_t>& visits,
             std::vector<std::uint32_t>& uses) override {
    LODE_ASSERT(beam <= kMostBeam);
    check_cancel();
    const cuda::OnDevice here(device_);
    cuda::fill(visits_.as<void>(), 0, visits_.bytes(), stream_.get());
    cuda::fill(uses_.as<void>(), 0, uses_.bytes(), stream_.get());
    cuda::watch_walks(graph_, queries_, static_cast<int>(beam), visits_.as<std::uint32_t>(),
                      uses_.as<std::uint32_t>(), stream_.get());
    visits = downloaded(visits_.as<std::uint32_t>(), nodes_, stream_);
    uses = downloaded(uses_.as<std::uint32_t>(), nodes_ * degree_, stream_);
  }

  std::vector<std::uint64_t> found(std::int64_t beam) override {
    check_cancel();
    const cuda::OnDevice here(device_);
    cuda::found_by_walks(graph_, queries_, static_cast<int>(beam), found_.as<std::uint64_t>(), stream_.get());
    return downloaded(found_.as<std::uint64_t>(), queries_.count, stream_);
  }

  std::vector<Node> best(std::int64_t beam, std::int64_t keep) override {
    LODE_ASSERT(keep <= kKeep && beam <= keep);
    check_cancel();
    const cuda::OnDevice here(device_);
    cuda::best_by_walks(graph_, queries_, static_cast<int>(beam), static_cast<int>(keep),
                        results_.as<std::int32_t>(), stream_.get());
    return downloaded(results_.as<Node>(), queries_.count * keep, stream_);
  }

  std::vector<Node> offers(std::span<const std::uint64_t> found, std::span<const MissedKey> missed) override {
    const cuda::OnDevice here(device_);
    std::vector<Node> offers(missed.size() * kOffers);
    upload(found_.as<void>(), found, stream_);
    auto* const asked = results_.as<cuda::MissedKey>();
    auto* const told = reinterpret_cast<std::int32_t*>(asked + kMissedAtOnce);
    for (std::int64_t first = 0; first < std::ssize(missed); first += kMissedAtOnce) {
      check_cancel();
      const std::int64_t some = std::min(kMissedAtOnce, std::ssize(missed) - first);
      const auto at = static_cast<std::size_t>(first), count = static_cast<std::size_t>(some);
      cuda::copy(asked, missed.data() + first, some * std::int64_t{sizeof(MissedKey)}, stream_.get());
      cuda::offers_for(graph_, squares_.as<float>(), numbers_, queries_, found_.as<std::uint64_t>(), asked,
                       some, told, stream_.get());
      const std::span<Node> to = std::span(offers).subspan(at * kOffers, count * kOffers);
      cuda::copy(to.data(), told, static_cast<std::int64_t>(to.size_bytes()), stream_.get());
      stream_.synchronize();
    }
    return offers;
  }

  static std::int64_t result_bytes(const Wanted& of) {
    const std::int64_t missed = sizeof(MissedKey) + kOffers * kWord;
    return std::max(kMissedAtOnce * missed, of.queries.rows * kKeep * kWord);
  }

 private:
  static constexpr const char* kWhat = "walks over a graph of keys";

  /// [q, 2, code bytes] as CodedQuery has them.
  std::vector<std::int8_t> coded(Matrix<const float> queries) const {
    const std::int64_t bytes = code_bytes_for(queries.cols);
    std::vector<std::int8_t> codes(static_cast<std::size_t>(queries.rows * 2 * bytes), 0);
    CodedQuery query;
    for (std::int64_t q = 0; q < queries.rows; ++q) {
      code_query(queries[q], query);
      std::copy_n(query.high, queries.cols, codes.begin() + 2 * q * bytes);
      std::copy_n(query.low, queries.cols, codes.begin() + (2 * q + 1) * bytes);
    }
    return codes;
  }
  std::shared_ptr<void> held_;  ///< counts the memory until it is given back
  std::int64_t nodes_;
  int degree_, numbers_;
  int device_ = cuda::current_device();  ///< new threads start on device 0
  cuda::Stream stream_;
  cuda::Buffer rows_, squares_;         // [nodes, stride], [nodes]
  cuda::Buffer codes_, wanted_;         // [q, 2, code bytes], [q, each]
  cuda::Buffer links_, entries_;        // [nodes, degree], [entries]
  cuda::Buffer seen_, results_;         // of walks; [q, keep], or missed keys and what they are offered
  cuda::Buffer visits_, uses_, found_;  // [nodes], [nodes, degree], [q]
  cuda::WalkedGraph graph_;
  cuda::WalkingQueries queries_;
};

}  // namespace

std::int64_t device_walks_bytes(const Wanted& of, const BeamKeys& keys, const KeyGraph& like) {
  const std::int64_t queries = of.queries.rows;
  const bool taken = queries > 0 && queries <= kMostWalks && like.nodes() > 0 &&
                     like.degree() <= cuda::kMostWalkedDegree && of.each() <= cuda::kMostWanted &&
                     std::ssize(like.entries()) <= 4 * like.degree();
  if (!taken) return 0;
  const std::int64_t node = keys.rows.stride + (2 + 2 * like.degree()) * kWord;
  const std::int64_t query = 2 * code_bytes_for(keys.d) + of.each() * kWord + 2 * kWord;
  return like.nodes() * node + queries * query + DeviceWalks::result_bytes(of) +
         cuda::kWalksAtOnce * cuda::seen_words(like.nodes()) * kWord;
}

std::unique_ptr<QueryWalks> device_walks(const Wanted& of, const BeamKeys& keys, const KeyGraph& like,
                                         std::shared_ptr<void> held) {
  return std::make_unique<DeviceWalks>(of, keys, like, std::move(held));
}

}  // namespace lode
