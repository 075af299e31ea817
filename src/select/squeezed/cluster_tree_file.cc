// SPDX-License-Identifier: Apache-2.0
// Sections of a saved cluster index: shape = {heads, d, levels, begin, 1 for values + 4 for centroids in 8
// bits + 8 for spreads + 16 where tokens that choose together add none + 32 where single ones add none,
// segments, then per segment: end, per head and segment: bytes of a number of means (2 or 4), nodes of each
// level} int64; first, keys [nodes + 1], [nodes] int32 of every (segment, head, level) one after the other;
// centroids, values [nodes, d] in the same order, spreads [nodes, (d + 1) / 2] int8 and spread_scales [nodes]
// float32; where centroids are int8, scales [nodes] float32; rows [keys] int32 per (segment, head). Files
// from before centroids had 8 bits are without the 4; spreads of every dimension were a 2, and are no longer
// read.
#include <algorithm>
#include <cmath>

#include "io/container.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "select/squeezed/cluster_tree.h"

namespace lode {

namespace {

constexpr std::int64_t kShapeNumbers = 6, kWholeCentroids = 4, kSpreads = 8, kNotTogether = 16,
                       kNotAlone = 32;

std::int64_t contents(Spreads spreads) {
  if (spreads == Spreads::none) return 0;
  return kSpreads + (adds(spreads, QueryKind::together) ? 0 : kNotTogether) +
         (adds(spreads, QueryKind::alone) ? 0 : kNotAlone);
}
std::int64_t contents(const ClusterShape& shape) {
  return (shape.values ? 1 : 0) + (shape.q8 ? kWholeCentroids : 0) + contents(shape.spreads);
}
bool has_spreads(const ClusterShape& shape) {
  return shape.spreads != Spreads::none;
}

/// Takes the sections apart from front to back, checking as it goes.
class Parser {
 public:
  Parser(const ClusterShape& shape, std::int64_t tokens, const SectionReader& in)
      : shape_(shape),
        tokens_(tokens),
        where_(in.prefix()),
        numbers_(in.values<std::int64_t>("shape")),
        whole_(std::ssize(numbers_) >= kShapeNumbers && (numbers_[4] & kWholeCentroids) != 0),
        first_(in.values<std::int32_t>("first")),
        keys_(in.values<std::int32_t>("keys")),
        centroids_(in.bytes("centroids")),
        scales_(whole_ ? in.values<float>("scales") : std::span<const float>{}),
        values_(in.bytes("values")),
        spreads_(has_spreads(shape) ? in.bytes("spreads") : std::span<const std::byte>{}),
        spread_scales_(has_spreads(shape) ? in.values<float>("spread_scales") : std::span<const float>{}),
        rows_(in.values<Position>("rows")) {}

  std::vector<ClusterSegment> parse() {
    const auto head = take(numbers_, kShapeNumbers);
    require(head[0] == shape_.heads && head[1] == shape_.head_dim, "the model's KV heads and head dimension");
    const bool to_q8 = shape_.q8 && !whole_;
    require(head[2] == shape_.levels && head[4] == contents(shape_) - (to_q8 ? kWholeCentroids : 0),
            "the levels, means and spreads that the spec asks for");
    require(head[3] == shape_.begin, "keys behind the sink");
    require(head[5] >= 0 && head[5] <= std::ssize(numbers_), "a number of segments");
    std::vector<ClusterSegment> segments(static_cast<std::size_t>(head[5]));
    Position begin = shape_.begin;
    for (ClusterSegment& segment : segments) {
      const std::int64_t end = take(numbers_, 1)[0];
      require(end > begin && end <= tokens_, "segments that follow each other within the context");
      segment.begin = begin;
      segment.end = begin = static_cast<Position>(end);
      for (int h = 0; h < shape_.heads; ++h) segment.heads.push_back(tree(segment));
    }
    require(numbers_.empty() && first_.empty() && keys_.empty() && centroids_.empty() && values_.empty() &&
                scales_.empty() && spreads_.empty() && spread_scales_.empty() && rows_.empty(),
            "sections of the sizes that 'shape' gives");
    return segments;
  }

 private:
  void require(bool fits, const char* what) const {
    if (!fits) throw InputError("index '" + where_ + "': expected " + what + ", found otherwise");
  }
  template <class T>
  std::span<const T> take(std::span<const T>& from, std::int64_t count) const {
    require(count >= 0 && count <= std::ssize(from), "sections of the sizes that 'shape' gives");
    const auto part = from.first(static_cast<std::size_t>(count));
    from = from.subspan(static_cast<std::size_t>(count));
    return part;
  }
  template <class T>
  std::vector<T> copy(std::span<const T>& from, std::int64_t count) const {
    const auto part = take(from, count);
    return {part.begin(), part.end()};
  }

  std::vector<std::byte> means(std::span<const std::byte>& from, std::int64_t nodes, DType type) const {
    const std::int64_t numbers = nodes * shape_.head_dim;
    std::vector<std::byte> out = copy(from, numbers * bytes_of(type));
    std::vector<float> wide(static_cast<std::size_t>(numbers));
    kernels().widen(out.data(), type, numbers, wide.data());
    require(std::all_of(wide.begin(), wide.end(), [](float x) { return std::isfinite(x); }), "finite means");
    return out;
  }

  std::vector<float> scales(std::span<const float>& from, std::int64_t nodes) const {
    std::vector<float> out = copy(from, nodes);
    require(std::all_of(out.begin(), out.end(), [](float x) { return std::isfinite(x) && x >= 0.0f; }),
            "scales that are finite and not negative");
    return out;
  }

  void take_centroids(std::int64_t nodes, DType type, ClusterLevel& level) {
    if (!whole_) {
      level.centroids = means(centroids_, nodes, type);
      return;
    }
    level.centroids = copy(centroids_, nodes * shape_.head_dim);
    level.scales = scales(scales_, nodes);
    require(
        std::find(level.centroids.begin(), level.centroids.end(), std::byte{128}) == level.centroids.end(),
        "centroids of -127 to 127");
  }

  void take_spreads(std::int64_t nodes, ClusterLevel& level) {
    level.spreads = copy(spreads_, nodes * spread_dims(shape_.head_dim));
    level.spread_scales = scales(spread_scales_, nodes);
    require(std::all_of(level.spreads.begin(), level.spreads.end(),
                        [](std::byte x) { return std::to_integer<int>(x) < 128; }),
            "spreads that are not negative");
  }

  /// Sums of the finer level's (or the leaves') keys must be the node's keys.
  void check_level(const ClusterLevel& level, const ClusterLevel* finer, std::int64_t children) const {
    require(level.first.front() == 0 && level.first.back() == children, "every child in one node");
    for (std::size_t i = 0; i < level.keys.size(); ++i) {
      const std::int32_t from = level.first[i], to = level.first[i + 1];
      require(from < to && to <= children, "children in rising ranges");
      std::int64_t keys = to - from;
      if (finer != nullptr) {
        keys = 0;
        for (std::int32_t c = from; c < to; ++c) keys += finer->keys[static_cast<std::size_t>(c)];
      }
      require(keys == level.keys[i], "as many keys in a node as in its children");
    }
  }

  void check_rows(const ClusterTree& tree, const ClusterSegment& segment) const {
    std::vector<bool> seen(static_cast<std::size_t>(segment.end - segment.begin), false);
    const ClusterLevel& leaves = tree.levels.back();
    for (std::size_t leaf = 0; leaf + 1 < leaves.first.size(); ++leaf) {
      for (std::int32_t i = leaves.first[leaf]; i < leaves.first[leaf + 1]; ++i) {
        const Position row = tree.rows[static_cast<std::size_t>(i)];
        require(
            row >= segment.begin && row < segment.end && !seen[static_cast<std::size_t>(row - segment.begin)],
            "each key in one cluster");
        require(i == leaves.first[leaf] || tree.rows[static_cast<std::size_t>(i - 1)] < row,
                "rising rows in a cluster");
        seen[static_cast<std::size_t>(row - segment.begin)] = true;
      }
    }
  }

  ClusterTree tree(const ClusterSegment& segment) {
    ClusterTree tree;
    const std::int64_t width = take(numbers_, 1)[0], keys = segment.end - segment.begin;
    require(width == 2 || width == 4, "means of 2 or 4 bytes a number");
    tree.values_type = width == 2 ? DType::f16 : DType::f32;
    tree.type = whole_ ? DType::q8 : tree.values_type;
    for (int l = 0; l < shape_.levels; ++l) {
      const std::int64_t nodes = take(numbers_, 1)[0];
      require(nodes >= 1 && nodes <= keys, "no more clusters than keys");
      ClusterLevel& level = tree.levels.emplace_back();
      level.first = copy(first_, nodes + 1);
      level.keys = copy(keys_, nodes);
      take_centroids(nodes, tree.type, level);
      if (shape_.values) level.values = means(values_, nodes, tree.values_type);
      if (has_spreads(shape_)) take_spreads(nodes, level);
    }
    tree.rows = copy(rows_, keys);
    check_level(tree.levels.back(), nullptr, keys);
    check_rows(tree, segment);
    for (std::size_t l = tree.levels.size() - 1; l-- > 0;)
      check_level(tree.levels[l], &tree.levels[l + 1], tree.levels[l + 1].nodes());
    if (shape_.q8) centroids_to_q8(tree, shape_.head_dim);
    return tree;
  }

  const ClusterShape& shape_;
  std::int64_t tokens_;
  std::string where_;
  std::span<const std::int64_t> numbers_;
  bool whole_;  ///< whether the file's centroids have 8 bits
  std::span<const std::int32_t> first_, keys_;
  std::span<const std::byte> centroids_;
  std::span<const float> scales_;
  std::span<const std::byte> values_, spreads_;
  std::span<const float> spread_scales_;
  std::span<const Position> rows_;
};

}  // namespace

void save_segments(std::span<const ClusterSegment> segments, const ClusterShape& shape, SectionWriter& out) {
  std::vector<std::int64_t> numbers = {shape.heads, shape.head_dim,  shape.levels,
                                       shape.begin, contents(shape), std::ssize(segments)};
  std::vector<std::int32_t> first, keys;
  std::vector<std::byte> centroids, values, spreads;
  std::vector<float> scales, spread_scales;
  std::vector<Position> rows;
  const auto add = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  for (const ClusterSegment& segment : segments) {
    numbers.push_back(segment.end);
    for (const ClusterTree& tree : segment.heads) {
      numbers.push_back(bytes_of(tree.values_type));
      for (const ClusterLevel& level : tree.levels) {
        numbers.push_back(level.nodes());
        add(first, level.first);
        add(keys, level.keys);
        add(centroids, level.centroids);
        add(scales, level.scales);
        add(values, level.values);
        add(spreads, level.spreads);
        add(spread_scales, level.spread_scales);
      }
      add(rows, tree.rows);
    }
  }
  out.add<std::int64_t>("shape", numbers);
  out.add<std::int32_t>("first", first);
  out.add<std::int32_t>("keys", keys);
  out.add("centroids", std::span<const std::byte>(centroids));
  if (shape.q8) out.add<float>("scales", scales);
  out.add("values", std::span<const std::byte>(values));
  if (has_spreads(shape)) {
    out.add("spreads", std::span<const std::byte>(spreads));
    out.add<float>("spread_scales", spread_scales);
  }
  out.add<Position>("rows", rows);
}

Spreads saved_spreads(const SectionReader& in) {
  const auto numbers = in.values<std::int64_t>("shape");
  constexpr std::int64_t kAll = kSpreads | kNotTogether | kNotAlone;
  for (const Spreads spreads : {Spreads::together, Spreads::alone, Spreads::all})
    if (std::ssize(numbers) >= kShapeNumbers && (numbers[4] & kAll) == contents(spreads)) return spreads;
  return Spreads::none;
}

std::vector<ClusterSegment> load_segments(const ClusterShape& shape, std::int64_t tokens,
                                          const SectionReader& in) {
  return Parser(shape, tokens, in).parse();
}

}  // namespace lode
