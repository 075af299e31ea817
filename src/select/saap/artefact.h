// SPDX-License-Identifier: Apache-2.0
// What `train saap` makes and the `saap` method reads: a safetensors file with, for every trained layer L and
// KV head H, under "layer.L.head.H.": the networks "key" and "query" (bucket_net.h), and statistics of the
// training text: "load" [C], the share of its keys in each bucket, "imbalance" [1], and "selectivity" [n],
// the share of far keys that held-out queries attended with 1, 2, 4, ... probes. Metadata: "method",
// "version", "model_fingerprint", "layer.L.fingerprint" of that layer's numbers, and "training", a JSON
// object that says how it was made.
//
// Version 2, which files of one network with weights of 16 or 32 bits do without: up to four networks for
// queries over the same buckets, each for a stretch of the context. "networks" says how many; the second has
// its tensors under "query.2." (its "selectivity" among them), "network.2.training", and "network.2.from",
// the first query position that it chooses for. A key's bucket is the same for all, and which network chooses
// depends on the query's own position alone, so chunks, batches and rollbacks change nothing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lodestone/selector.h"
#include "select/saap/bucket_net.h"

namespace lode {

inline constexpr std::int64_t kMostSaapNetworks = 4;

struct SaapNetwork {
  BucketNet queries;  ///< f_q: softmax of its scores is the predicted share of attention in each bucket
  std::vector<float> selectivity;  // [n]

  /// Expected share of the far keys under `probes`, by interpolation.
  double expected_selectivity(std::int64_t probes) const;
};

struct SaapHead {
  BucketNet keys;                     ///< a key is in the bucket of its highest score
  std::vector<SaapNetwork> networks;  // [K]
  std::vector<float> load;            // [C]
  float imbalance = 1;                ///< of prompts of the training text, on average; see imbalance_of
  /// No query of the training text saw far keys: sink and window alone ("layer.L.head.H.near_only" in the metadata).
  bool near_only = false;
};

/// What a file says of one of its networks.
struct SaapStretch {
  Position from = 0;     ///< first query position that it chooses for; 0 for the first network
  std::string training;  ///< JSON object: how it was made
  /// Tokens of a training prompt on average, and how much further queries were shifted; 0 = not said.
  std::int64_t reach() const;
};

/// Where the network that was trained for the longer contexts takes over: the geometric middle of two
/// lengths.
Position switch_between(std::int64_t shorter, std::int64_t longer);

/// One layer's part of an artefact.
struct SaapLayer {
  std::vector<SaapHead> heads;         // [Hkv]
  std::string fingerprint;             ///< of all its numbers
  std::vector<SaapStretch> stretches;  // [K], `from` rising
  std::int64_t buckets() const { return heads.front().keys.buckets; }
  std::size_t network_for(Position query) const;
};

/// InputError when something is missing or has another shape or type, when heads or networks differ in the
/// number of buckets, when stretches do not rise, when numbers are not those that were written, or when the
/// file was made for another model.
SaapLayer read_saap(const std::filesystem::path& path, const LayerGeometry& geometry,
                    std::string_view model_fingerprint);

/// What the file says of its networks; InputError when it is no artefact of saap.
std::vector<SaapStretch> read_saap_stretches(const std::filesystem::path& path);
/// Fingerprint of each layer that the file holds, by the layer's number.
std::map<int, std::string> read_saap_fingerprints(const std::filesystem::path& path);

/// `layers` by number; a stretch for each network.
void write_saap(const std::filesystem::path& path, const std::map<int, std::vector<SaapHead>>& layers,
                std::string_view model_fingerprint, const std::vector<SaapStretch>& stretches);

/// How unevenly keys fill their buckets: the expected size of a random key's bucket, in units of the mean
/// size, the key itself left out: C sum n_c (n_c - 1) / (n (n - 1)). 1 = evenly. It is what a query pays more
/// than l / C if it asks for buckets as often as keys are in them. 1 for fewer than two keys.
double imbalance_of(std::span<const std::int64_t> counts /*[C]*/);

}  // namespace lode
