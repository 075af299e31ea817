// SPDX-License-Identifier: Apache-2.0
// Who computes the heavy steps of SAAP's training: the CPU, heads side by side, each on the thread that
// calls; or a GPU. Both draw the same candidates; sums differ in their last bits.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ann/kmeans.h"
#include "lab/train/adam.h"
#include "lab/train/saap/classifier.h"
#include "lab/train/saap/examples.h"
#include "lodestone/engine.h"

namespace lode {

/// One head's classifier while its optimiser runs.
class SaapFit {
 public:
  virtual ~SaapFit() = default;
  struct Step {
    std::vector<std::int32_t> rows;  ///< examples of the batch
    double rate_scale = 1.0;
  };
  /// How many steps make one series.
  virtual std::int64_t series() const = 0;
  /// Starts a series and counts its steps in the optimiser.
  virtual void begin(const std::vector<Step>& steps) = 0;
  /// Waits for it: the loss of each batch, in nats.
  virtual std::vector<double> finish() = 0;
  /// Brings classifier and optimiser up to date.
  virtual void store() = 0;
};

class SaapDevice {
 public:
  virtual ~SaapDevice() = default;
  /// spherical_kmeans.
  virtual std::vector<float> cluster(Matrix<const float> keys, const KMeansOptions& options) = 0;
  /// BucketNet::label.
  virtual void label(const BucketNet& keys, Matrix<const float> plain, std::span<std::int32_t> labels) = 0;
  /// add_saap_examples.
  virtual std::int64_t add_examples(const SaapCandidates& candidates, const SaapKeys& keys, const Rope& rope,
                                    float scale, const SaapFilter& filter, std::int64_t wanted,
                                    SaapExamples& examples) = 0;
  /// All four outlive the fit; batches have at most `batch` rows.
  virtual std::unique_ptr<SaapFit> fit(const SaapExamples& examples, SaapClassifier& classifier, Adam& adam,
                                       std::int64_t batch) = 0;
  virtual std::string name() const = 0;
};

/// RunError when there is no GPU and one was asked for. `exact`: a GPU multiplies in float32, as the CPU
/// does, and not in TF32.
std::unique_ptr<SaapDevice> make_saap_device(Device device, ThreadPool& pool, bool exact = false);

}  // namespace lode
