// SPDX-License-Identifier: Apache-2.0
// The functions of one KV head and its group as they are trained (HashAttention, section 4.3): tanh in place
// of sign, and a loss by which each query head learns to tell its own pivotal keys from the others.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "ann/hashing/hash_net.h"
#include "lab/train/adam.h"
#include "lab/train/checkpoint.h"
#include "lab/train/mlp.h"
#include "select/hash/weights.h"

namespace lode {

/// inputs -> widths... -> bits -> tanh, with its optimiser.
class HashFunction {
 public:
  HashFunction(std::int64_t inputs, const std::vector<std::int64_t>& widths, std::int64_t bits,
               HashNet::Activation activation, const AdamOptions& adam, Rng& rng);
  HashFunction(const HashFunction&) = delete;
  HashFunction& operator=(const HashFunction&) = delete;

  std::int64_t bits() const { return linears_.back()->outputs(); }
  /// codes [n, bits] = tanh(F(x)); x lives until backward().
  Matrix<const float> forward(Matrix<const float> x /*[n, inputs]*/, bool training);
  Matrix<float> gradient();  ///< [n, bits] of the last forward's codes, zero at first: to be added to
  void backward();           ///< from gradient()

  /// Before the first step: the function becomes directions (x - centre), exactly. False, and nothing is
  /// changed, when a hidden layer has less than two units for each bit.
  bool start_linear(Matrix<const float> directions /*[bits, inputs]*/, std::span<const float> centre);

  /// Before the first step: the function becomes a trained one. False, and nothing is changed, when that one
  /// has other layers.
  bool start_trained(const HashNet& net);

  Module& module() { return net_; }
  Adam& adam() { return adam_; }
  /// What inference needs, with weights as `type`.
  HashNet finished(DType type) const;

 private:
  Sequential net_;
  std::vector<Linear*> linears_;
  HashNet::Activation activation_;
  Adam adam_;
  std::vector<float> codes_, gradient_;  // [n, bits]
};

enum class PivotalLoss {
  bce,     ///< binary cross-entropy of each key, with the class weight of equation 8
  softmax  ///< cross-entropy of the keys against an even share for each pivotal key
};

/// What one step sees. Keys that are not far of a query take no part in its loss.
struct HashExamples {
  enum Label : std::uint8_t { kOther, kPivotal, kLeftOut };
  std::int64_t tokens = 0, keys = 0;
  std::vector<std::vector<float>> queries;        // [G][tokens, d]
  std::vector<float> key_inputs;                  // [keys, inputs]
  std::vector<std::vector<std::uint8_t>> labels;  // [G][tokens, keys] of Label
};

/// RunError when a loss is no number.
void expect_number(double loss);

class HashHead {
 public:
  struct Shape {
    int group = 1, head_dim = 0;
    HashScheme scheme;
    std::vector<std::int64_t> widths;
    PivotalLoss loss = PivotalLoss::bce;
    AdamOptions adam;
    std::uint64_t seed = 0;
  };
  explicit HashHead(const Shape& shape);

  /// The mean loss over queries and their keys, in nats; its gradients are added to the functions' own.
  double loss(const HashExamples& examples, double class1_weight);
  /// One step of all functions; RunError when the loss is no number.
  double step(const HashExamples& examples, double class1_weight, double rate_scale);

  std::deque<HashFunction>& queries() { return queries_; }  ///< [G]
  const std::deque<HashFunction>& queries() const { return queries_; }
  std::deque<HashFunction>& keys() { return keys_; }  ///< [1], or [G] with keys per query head
  const std::deque<HashFunction>& keys() const { return keys_; }
  void put(Checkpoint& checkpoint, const std::string& prefix);
  void get(const Checkpoint& checkpoint, const std::string& prefix, const std::string& where);

 private:
  double head_loss(Matrix<float> products, std::span<const std::uint8_t> labels, double class1_weight) const;

  Shape shape_;
  std::deque<HashFunction> queries_, keys_;
  std::vector<float> products_;  // [tokens, keys]: products of codes, then their gradients
};

}  // namespace lode
