// SPDX-License-Identifier: Apache-2.0
// Training of SAAP (Mazaré et al. 2025, section 4 and appendix A) for every layer and KV head of a frozen
// model:
//
//   1. read all prompts; spherical k-means on sampled keys before RoPE                       (appendix A)
//   2. read them again; sampled queries with the share of their attention in each bucket     (equation 1)
//   3. per head: Adam on KL(share || f_q(q)), each batch from one prompt                     (equation 1)
//
// Between 1 and 2, where asked for: f_k learns to take the centroids' place (section 6.5; saap_keys.h).
//
// Deviations, all of them settings: queries of a prompt are sampled once and reused, instead of anew in every
// step; the rate is higher and falls along a cosine, over fewer steps, and weights decay (the paper: 1e-5,
// 40,000 steps of 1,000 queries). The queries of all heads of a group train one network, as section 5
// implies. The divergence is KL(target || prediction), the direction in which softmax regression has a
// gradient everywhere.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/progress.h"
#include "lab/train/capture.h"
#include "lab/train/saap/device.h"
#include "lab/train/saap/examples.h"
#include "lab/train/saap/head.h"
#include "lodestone/engine.h"
#include "select/saap/artefact.h"

namespace lode {

struct SaapSettings {
  std::int64_t clusters = 1024, hidden = 1024;
  bool residual = false;    ///< a linear path beside the hidden layer, which starts at the centroids
  double balance = 0;       ///< evenness of the buckets, 0 (plain k-means) to 1: see balanced_offsets
  bool train_keys = false;  ///< keys are assigned by a trained f_k, which starts at the centroids
  /// Of f_k (saap_keys.h): its hidden layer (0 = `hidden`), steps, and of each prompt keys and queries.
  std::int64_t key_hidden = 0, key_steps = 1000, key_sample = 2048, key_queries = 256;
  std::int64_t key_width() const { return key_hidden > 0 ? key_hidden : hidden; }
  SaapFilter filter;
  int dense_layers = 1;         ///< first layers that are not trained
  std::int64_t samples = 2000;  ///< queries of each prompt and KV head, at most
  /// Share of those among a prompt's last `late_tokens`: where texts end with questions.
  double late = 0;
  std::int64_t late_tokens = 1024;
  /// A share `shifted` of the queries is scored as if it stood up to `shift` positions further behind the
  /// keys: attention in contexts longer than the prompts.
  std::int64_t shift = 0;
  double shifted = 0.5;
  std::int64_t shift_to = 0;     ///< no query is scored from behind this position; 0 = wherever `shift` says
  std::int64_t key_prompts = 0;  ///< prompts whose keys are clustered, spread over all; 0 = all
  std::int64_t held_out = 1;     ///< last prompts, on which nothing is trained
  /// Fine-tuning to the current prompt, the only one: trained on its queries before the last `late_tokens`,
  /// tested on those.
  bool adapt = false;
  /// Held-out queries see what they would see when asked, far keys before them, whatever the filter says.
  bool test_as_asked = false;
  std::int64_t steps = 1500, batch = 1000;
  double rate = 1e-3;
  double weight_decay = 1;     ///< of Adam, decoupled: weights shrink by rate x this in a step
  bool decay = true;           ///< of the rate, along a cosine to a hundredth
  DType type = DType::f16;     ///< of the classifier's weights in the artefact; q8: centroids stay f16
  std::int64_t probes = 32;    ///< at which captured mass is reported
  std::filesystem::path from;  ///< an artefact whose buckets are taken; empty = none
  /// Its networks stay as they are (in 8 bits where type is q8), and another one is trained over its buckets,
  /// for longer contexts; false: its only network is trained further.
  bool add_network = false;
  bool replace_network = false;                 ///< the added one takes the place of the last
  std::int64_t memory = std::int64_t{2} << 30;  ///< bytes of sampled queries at a time
  std::uint64_t seed = 0;
  Json json() const;
};

/// One trained head on prompts that it never saw. Mass: of the attention on far keys, the share in the
/// `probes` best buckets.
struct SaapHeadReport {
  int layer = 0, head = 0;
  std::int64_t examples = 0, held_out = 0;
  double train_loss = 0, loss = 0;                 ///< nats; over the last steps, on held-out prompts
  double mass = 0, selectivity = 0;                ///< of buckets chosen by f_q
  double kmeans_mass = 0, kmeans_selectivity = 0;  ///< by q . centroid
  double best_mass = 0;                            ///< by the target itself
  double gain = 0;                                 ///< see SaapMeasures, likewise these
  SaapCaptured captured = {}, kmeans_captured = {}, best_captured = {};
  /// Before the first step, of a network that is trained further; 0 of others.
  double start_loss = 0;
  SaapCaptured start_captured = {};
  double imbalance = 1;
  bool near_only = false;  ///< no query saw far keys: sink and window alone
  double seconds = 0;
  Json json() const;
  static SaapHeadReport parse(const std::string& json, const std::string& where);
};

/// Of the queries that are sampled for one head, which `memory` bounds.
std::int64_t saap_bytes_of_head(const SaapSettings& settings, std::int64_t prompts, std::int64_t head_dim);

struct SaapResult {
  std::map<int, std::vector<SaapHead>> layers;
  std::vector<SaapHeadReport> heads;
};

/// The filter lets about a fifth of the queries pass (appendix A): so many are looked at for one.
inline constexpr std::int64_t kSaapCandidatesPerSample = 5;

/// Up to `most` steps of a run from step `first` on: batches of the first `prompts` prompts, drawn from the
/// seed and the step's number alone.
std::vector<SaapFit::Step> draw_steps(const SaapExamples& examples, std::int64_t prompts,
                                      const SaapSettings& settings, std::uint64_t seed, std::int64_t first,
                                      std::int64_t most);

/// Trains on all prompts but the last `held_out` (but see SaapSettings::adapt). What is done is kept in
/// `checkpoint`; a run that finds one goes on from there, to the same bits. InputError when it belongs to
/// other settings or prompts, or when the prompts have no far keys. `on_head` is called once for every
/// finished head, one at a time.
SaapResult train_saap(std::shared_ptr<const Model> model, const ContextOptions& options,
                      const SaapSettings& settings, const std::vector<Prompt>& prompts,
                      const std::filesystem::path& checkpoint, Progress::Mode progress,
                      const std::function<void(const SaapHeadReport&)>& on_head = {});

}  // namespace lode
