// SPDX-License-Identifier: Apache-2.0
// Sections: shape = {Hkv, graphs per head, degree, d, position of the first key, keys} int64, links [Hkv,
// graphs, keys, degree] uint32 (node, highest bit: of the spanning tree; 2^31 - 1 behind the last), entries
// [Hkv, graphs, 16] int32 (-1 behind the last), guides [Hkv, graphs][count, d] float32, floors [Hkv,
// graphs][count] float32, guide_counts [Hkv, graphs] int64, directions [Hkv] int64 (how many numbers walks
// compare of a key), spaces [Hkv][2, directions, d], then [directions] float32 (KeySpace::values; nothing of
// a head whose keys are taken as they are), beams [Hkv] int64 (RetrievalIndex::beam), searched [1] int64 (the
// last token that was, -1 = none), remembered [Hq, 32] int32 (nodes that it found, -1 behind the last). Of specs with
// `error`: shares [Hq, {log of the least share, share of keys wanted, error, judged or not}] float64, nothing where
// none was calibrated, and summary, a line of text that `inspect` shows.
#include "select/retrieval/file.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "io/container.h"
#include "lodestone/error.h"

namespace lode {

namespace {

constexpr Node kNoEntry = -1;

template <class T>
std::span<const T> part(std::span<const T> all, std::int64_t from, std::int64_t count) {
  return all.subspan(static_cast<std::size_t>(from), static_cast<std::size_t>(count));
}

}  // namespace

void save_retrieval(const RetrievalIndex::Shape& shape, const std::vector<RetrievalIndex>& heads,
                    SectionWriter& out) {
  const std::array<std::int64_t, 6> header = {std::ssize(heads), shape.graphs, shape.degree,
                                              shape.head_dim,    shape.begin,  heads.front().keys()};
  std::vector<Link> links;
  std::vector<Node> entries;
  std::vector<float> guides, floors, spaces;
  std::vector<std::int64_t> counts, directions, beams;
  for (const RetrievalIndex& head : heads) {
    beams.push_back(head.beam());
    const std::vector<float> space = head.space().values();
    spaces.insert(spaces.end(), space.begin(), space.end());
    directions.push_back(space.empty() ? 0 : head.space().numbers());
    for (int g = 0; g < shape.graphs; ++g) {
      const std::span<const Link> rows = head.graph(g).rows();
      links.insert(links.end(), rows.begin(), rows.end());
      const std::span<const Node> own = head.graph(g).entries();
      entries.insert(entries.end(), own.begin(), own.end());
      entries.resize(entries.size() + KeyGraph::kEntries - own.size(), kNoEntry);
      const RetrievalIndex::Guides& guide = head.guides(g);
      guides.insert(guides.end(), guide.queries.begin(), guide.queries.end());
      floors.insert(floors.end(), guide.floors.begin(), guide.floors.end());
      counts.push_back(std::ssize(guide.floors));
    }
  }
  out.add<std::int64_t>("shape", header);
  out.add<Link>("links", links);
  out.add<Node>("entries", entries);
  out.add<float>("guides", guides);
  out.add<float>("floors", floors);
  out.add<std::int64_t>("guide_counts", counts);
  out.add<std::int64_t>("directions", directions);
  out.add<float>("spaces", spaces);
  out.add<std::int64_t>("beams", beams);
}

std::vector<RetrievalIndex> load_retrieval(const RetrievalIndex::Shape& shape, KvLayer kv,
                                           const SectionReader& in, ThreadPool& pool) {
  const std::string where = "index '" + in.prefix() + "'";
  const auto require = [&](bool fits, const char* what) {
    if (!fits) throw InputError(where + ": expected " + what + ", found otherwise");
  };
  const auto header = in.values<std::int64_t>("shape");
  const std::int64_t heads = std::ssize(kv.heads), graphs = heads * shape.graphs, d = shape.head_dim;
  require(header.size() == 6 && header[0] == heads && header[1] == shape.graphs &&
              header[2] == shape.degree && header[3] == d && header[4] == shape.begin,
          "the model's heads, the spec's degree and its sink");
  const std::int64_t keys = header[5];
  require(keys >= 0 && keys <= std::max<std::int64_t>(0, kv.tokens - shape.begin), "keys within the context");
  const auto links = in.values<Link>("links");
  const auto entries = in.values<Node>("entries");
  const auto guides = in.values<float>("guides"), floors = in.values<float>("floors");
  const auto counts = in.values<std::int64_t>("guide_counts");
  require(std::ssize(links) == graphs * keys * shape.degree && std::ssize(counts) == graphs &&
              std::ssize(entries) == graphs * std::int64_t{KeyGraph::kEntries},
          "sections of the sizes that 'shape' gives");
  const auto finite = [](float x) { return std::isfinite(x); };
  require(std::all_of(guides.begin(), guides.end(), finite), "finite guides");
  const auto directions = in.values<std::int64_t>("directions");
  const auto spaces = in.values<float>("spaces");
  require(in.has("beams"), "an index whose searches were judged (an older version's: index the text again)");
  const auto beams = in.values<std::int64_t>("beams");
  const auto possible = [&](std::int64_t beam) { return beam >= 0 && beam <= keys; };
  require(std::ssize(beams) == heads && std::all_of(beams.begin(), beams.end(), possible),
          "a beam of every head, no wider than its keys");
  require(std::ssize(directions) == heads && std::all_of(spaces.begin(), spaces.end(), finite),
          "finite directions of every head");

  std::vector<RetrievalIndex> loaded;
  std::int64_t guide = 0, graph = 0, space = 0;  // so far
  for (std::int64_t head = 0; head < heads; ++head) {
    std::vector<KeyGraph> own;
    std::vector<RetrievalIndex::Guides> own_guides;
    for (int g = 0; g < shape.graphs; ++g, ++graph) {
      const auto listed = part(entries, graph * std::int64_t{KeyGraph::kEntries}, KeyGraph::kEntries);
      const auto used = std::find(listed.begin(), listed.end(), kNoEntry) - listed.begin();
      own.push_back(KeyGraph::restore(shape.degree,
                                      part(links, graph * keys * shape.degree, keys * shape.degree),
                                      part(listed, 0, used), where));
      const std::int64_t count = counts[static_cast<std::size_t>(graph)];
      require(count >= 0 && count <= std::ssize(floors) - guide && (guide + count) * d <= std::ssize(guides),
              "as many guides as 'guide_counts' says");
      const auto queries = part(guides, guide * d, count * d);
      const auto limits = part(floors, guide, count);
      own_guides.push_back({{queries.begin(), queries.end()}, {limits.begin(), limits.end()}});
      guide += count;
    }
    const std::int64_t kept = directions[static_cast<std::size_t>(head)];
    require(kept >= 0 && kept <= d, "at most as many directions as a key has numbers");
    const std::int64_t values = KeySpace::value_count(shape.head_dim, static_cast<int>(kept));
    require(values <= std::ssize(spaces) - space, "as many directions as 'directions' says");
    loaded.push_back(RetrievalIndex::restore(
        shape, kv.heads[static_cast<std::size_t>(head)],
        KeySpace::restore(shape.head_dim, static_cast<int>(kept), part(spaces, space, values)),
        std::move(own), std::move(own_guides), beams[static_cast<std::size_t>(head)], pool));
    space += values;
  }
  require(guide == std::ssize(floors) && guide * d == std::ssize(guides) && space == std::ssize(spaces),
          "no guides beyond the last graph's and no directions beyond the last head's");
  return loaded;
}

void save_remembered(const RememberedWalks& walks, int query_heads, SectionWriter& out) {
  std::vector<Node> nodes;
  for (std::size_t head = 0; head < static_cast<std::size_t>(query_heads); ++head) {
    if (head < walks.nodes.size())
      nodes.insert(nodes.end(), walks.nodes[head].begin(), walks.nodes[head].end());
    nodes.resize((head + 1) * kRememberedNodes, kNoEntry);
  }
  out.add<std::int64_t>("searched", std::array{std::int64_t{walks.searched}});
  out.add<Node>("remembered", nodes);
}

RememberedWalks load_remembered(std::int64_t tokens, int query_heads, const SectionReader& in) {
  const auto searched = in.values<std::int64_t>("searched");
  const auto nodes = in.values<Node>("remembered");
  const auto known = [&](Node node) { return node >= kNoEntry && node < tokens; };
  if (searched.size() != 1 || searched[0] < -1 ||
      nodes.size() != static_cast<std::size_t>(query_heads) * kRememberedNodes ||
      !std::all_of(nodes.begin(), nodes.end(), known)) {
    throw InputError("index '" + in.prefix() +
                     "': expected the last token searched and 32 of its keys a query head, found otherwise");
  }
  RememberedWalks walks;
  if (searched[0] < tokens) walks.searched = static_cast<Position>(searched[0]);
  for (auto head = nodes.begin(); head != nodes.end(); head += kRememberedNodes)
    walks.nodes.emplace_back(head, std::find(head, head + kRememberedNodes, kNoEntry));
  return walks;
}

void save_shares(const std::vector<HeadShare>& shares, SectionWriter& out) {
  std::vector<double> numbers;
  double error = 0, wanted = 0;
  for (const HeadShare& s : shares) {
    numbers.insert(numbers.end(), {double{s.floor}, s.wanted, s.error, s.judged ? 1.0 : 0.0});
    error += s.error / static_cast<double>(shares.size());
    wanted += s.wanted / static_cast<double>(shares.size());
  }
  out.add<double>("shares", numbers);
  const std::string summary =
      shares.empty() ? std::string("not calibrated")
                     : fmt::format(
                           "on the text's last queries: output error {:.3f}, {:.2f} % of the far keys "
                           "beside the sample",
                           error, 100 * wanted);
  out.add("summary", std::as_bytes(std::span(summary)));
}

std::vector<HeadShare> load_shares(int query_heads, const SectionReader& in) {
  const auto numbers = in.values<double>("shares");
  const auto sound = [&](std::size_t i) {
    return numbers[i] <= 0.0 && numbers[i] >= -1e3 && numbers[i + 1] >= 0.0 && numbers[i + 1] <= 1.0 &&
           std::isfinite(numbers[i + 2]) && numbers[i + 2] >= 0.0 &&
           (numbers[i + 3] == 0.0 || numbers[i + 3] == 1.0);
  };
  bool fits = numbers.empty() || numbers.size() == 4 * static_cast<std::size_t>(query_heads);
  for (std::size_t i = 0; fits && i < numbers.size(); i += 4) fits = sound(i);
  if (!fits)
    throw InputError("index '" + in.prefix() +
                     "': expected a threshold of every query head that is a share, found otherwise");
  std::vector<HeadShare> shares;
  for (std::size_t i = 0; i < numbers.size(); i += 4)
    shares.push_back({.floor = static_cast<float>(numbers[i]),
                      .wanted = numbers[i + 1],
                      .error = numbers[i + 2],
                      .judged = numbers[i + 3] == 1.0});
  return shares;
}

}  // namespace lode
