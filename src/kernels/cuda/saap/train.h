// SPDX-License-Identifier: Apache-2.0
// The parts of a training step of SAAP's query classifier (section 6.1 of Mazaré et al. 2025) beside the
// matrix products: batch norm with ReLU, softmax with the Kullback-Leibler divergence, column sums and Adam.
// No kernel takes from the host what changes from step to step: they find it in device memory, at the running
// step's place of a table, so that a captured step can be replayed. All sums have a fixed order.
#pragma once

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// One step of a table of steps.
struct NetStep {
  std::int64_t first_row = 0;             ///< of its batch in the list of rows
  float rate = 0, keep = 1, epsilon = 0;  ///< of Adam's update, corrections included
};

/// Where the running step stands; `at` is in device memory and counts up with every step.
struct NetSteps {
  const NetStep* table = nullptr;
  const std::int32_t* rows = nullptr;  ///< examples of all batches, one after the other
  std::int32_t* at = nullptr;
};

/// x[i, :] = q[row i of the batch, :].
void take_batch(const NetSteps& steps, const float* q /*[examples, d]*/, std::int64_t n, std::int64_t d,
                float* x /*[n, d]*/, StreamHandle stream);

/// A batch norm over H columns; null `gain`: there is none, and `shift` is the bias of the layer before it.
struct BatchNormArrays {
  const float *gain = nullptr, *shift = nullptr;  // [H]
  const float* bias = nullptr;                    // [H] of the layer before; with a gain
  float *mean = nullptr, *variance = nullptr;     // [H] running
  double momentum = 0.1, epsilon = 1e-5;
};
/// out = relu(gain * normalised + shift), normalised = (x - mean) / deviation over the batch; running
/// statistics take the batch in, the variance unbiased. Without a gain: out = relu(x + shift).
void norm_relu(const BatchNormArrays& norm, const float* x /*[n, H]*/, std::int64_t n, std::int64_t h,
               float* normalised /*[n, H]*/, float* inverse /*[H]*/, float* out /*[n, H]*/,
               StreamHandle stream);
/// Of norm_relu: `dy` becomes the gradient of x; those of gain and shift are written.
void norm_relu_backward(const BatchNormArrays& norm, const float* normalised, const float* inverse,
                        const float* out, std::int64_t n, std::int64_t h, float* dy /*[n, H]*/,
                        float* gain_gradient /*[H], null without a gain*/, float* shift_gradient /*[H]*/,
                        StreamHandle stream);

/// y + bias (+ other bias) are logits; y becomes the gradient of the batch's mean KL(target || softmax), and
/// row_loss[i] its i-th summand, in nats.
void divergence(const NetSteps& steps, const void* targets /*[examples, C] f16*/, const float* bias /*[C]*/,
                const float* other_bias /*[C] or null*/, std::int64_t n, std::int64_t c, float* y /*[n, C]*/,
                double* row_loss /*[n]*/, StreamHandle stream);

/// sums[c] = sum over the rows of y[:, c]; `copy`, unless null, gets the same.
void sum_columns(const float* y /*[n, C]*/, std::int64_t n, std::int64_t c, float* sums, float* copy,
                 StreamHandle stream);

/// One update of `count` parameters; count is a multiple of 4.
struct AdamArrays {
  float *value = nullptr, *first = nullptr, *second = nullptr;
  const float* gradient = nullptr;
  float beta1 = 0.9f, beta2 = 0.999f;
};
void adam(const NetSteps& steps, const AdamArrays& arrays, std::int64_t count, StreamHandle stream);

/// losses[step] = the mean of row_loss; then the next step is the running one.
void end_step(const NetSteps& steps, const double* row_loss, std::int64_t n, double* losses,
              StreamHandle stream);

}  // namespace lode::cuda
