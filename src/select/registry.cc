// SPDX-License-Identifier: Apache-2.0
// The list of methods. A new method is one file beside this one, one line in methods.h and one here.
#include "lodestone/spec.h"
#include "select/methods.h"

namespace lode {

const std::vector<MethodInfo>& methods() {
  static const std::vector<MethodInfo> all = {
      full_method(),
      streaming_method(),
      topk_method(),
      random_method(),
      kmeans_method(),
      ideal_method(),
      squeezed_method(),
      hash_method(),
      hyperplanes_method(),
      saap_method(),
      retrieval_method(),
      quest_method(),
      double_sparsity_method(),
      infllm_method(),
      pqcache_method(),
      magicpig_method(),
      kdeformer_method(),
      reformer_method(),
      h2o_method(),
      snapkv_method(),
      ivf_method(),
      hnsw_method(),
      plan_method(),
  };
  return all;
}

}  // namespace lode
