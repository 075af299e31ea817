// SPDX-License-Identifier: Apache-2.0
// hash and hyperplanes on the GPU: the functions come from the host's selectors, signatures of keys are made
// on the device from its own rows, and one kernel a layer signs the queries and chooses
// (kernels/cuda/hash/signatures.h). Given the same signatures the keys chosen are the host's; signatures
// themselves may differ from the host's where a network's output is within rounding of 0.
#include "kernels/cuda/hash/signatures.h"

#include <algorithm>
#include <cstring>

#include "base/rng.h"
#include "gpu/select/key_index.h"
#include "kernels/cuda/device/device.h"
#include "select/shared/signature_selector.h"
#include "select/shared/synthetic_artefact.h"

namespace lode {

namespace {

/// The shape that all networks must have; false when they have more than one, or one that the kernels do not
/// take.
bool shape_of(const std::vector<const HashNet*>& nets, cuda::SignNets& shape) {
  const std::vector<HashLayer>& first = nets.front()->layers();
  if (std::ssize(first) > cuda::kSignLayers) return false;
  shape.depth = static_cast<int>(first.size());
  shape.relu = nets.front()->activation() == HashNet::Activation::relu;
  shape.type = DType::f16;
  shape.widths[0] = static_cast<int>((first.front().in + 7) / 8 * 8);
  for (const HashNet* net : nets) {
    if (net->layers().size() != first.size()) return false;
    for (std::size_t i = 0; i < first.size(); ++i) {
      const HashLayer& layer = net->layers()[i];
      if (layer.in != first[i].in || layer.out != first[i].out || layer.out % 8 != 0) return false;
      if (layer.type != DType::f16) shape.type = DType::f32;
      shape.widths[i + 1] = static_cast<int>(layer.out);
    }
  }
  return true;
}

/// Networks on the device, in the order of `nets`; null ones stay zero.
class Nets {
 public:
  Nets(const std::vector<const HashNet*>& nets, cuda::SignNets shape, cuda::StreamHandle stream)
      : shape_(shape) {
    const auto count = std::ssize(nets);
    const std::int64_t element = bytes_of(shape.type);
    std::vector<std::byte> weights(static_cast<std::size_t>(count * shape.weights_of_net() * element));
    std::vector<float> biases(static_cast<std::size_t>(count * shape.biases_of_net()));
    for (std::int64_t i = 0; i < count; ++i) {
      if (const HashNet* const net = nets[static_cast<std::size_t>(i)]; net != nullptr)
        pack(*net, weights.data() + i * shape.weights_of_net() * element,
             biases.data() + i * shape.biases_of_net());
    }
    weights_ = cuda::Buffer(std::ssize(weights), "the weights of signatures");
    biases_ = cuda::Buffer(std::ssize(biases) * std::int64_t{sizeof(float)}, "the biases of signatures");
    // Pageable memory: the calls return once the bytes have left.
    cuda::copy(weights_.as<void>(), weights.data(), weights_.bytes(), stream);
    cuda::copy(biases_.as<void>(), biases.data(), biases_.bytes(), stream);
  }
  /// From the n-th on.
  cuda::SignNets from(std::int64_t n) const {
    cuda::SignNets nets = shape_;
    nets.weights = weights_.as<char>() + n * shape_.weights_of_net() * bytes_of(shape_.type);
    nets.biases = biases_.as<float>() + n * shape_.biases_of_net();
    return nets;
  }
  std::int64_t bytes() const { return weights_.bytes() + biases_.bytes(); }

 private:
  void pack(const HashNet& net, std::byte* weights, float* biases) const {
    const std::int64_t element = bytes_of(shape_.type);
    for (std::size_t i = 0; i < net.layers().size(); ++i) {
      const HashLayer& layer = net.layers()[i];
      for (std::int64_t o = 0; o < layer.out; ++o, weights += shape_.widths[i] * element)
        copy_row(layer, o, weights);
      if (!layer.bias.empty()) std::copy(layer.bias.begin(), layer.bias.end(), biases);
      biases += layer.out;
    }
  }
  void copy_row(const HashLayer& layer, std::int64_t row, std::byte* to) const {
    const std::byte* const from = layer.weight.data() + row * layer.in * bytes_of(layer.type);
    if (layer.type == shape_.type) {
      std::memcpy(to, from, static_cast<std::size_t>(layer.in * bytes_of(layer.type)));
      return;
    }
    for (std::int64_t i = 0; i < layer.in; ++i) {
      std::uint16_t half;
      std::memcpy(&half, from + 2 * i, 2);
      const float x = layer.type == DType::f16 ? to_float(f16{half}) : to_float(bf16{half});
      std::memcpy(to + 4 * i, &x, 4);
    }
  }

  cuda::SignNets shape_;
  cuda::Buffer weights_;  // [nets, weights of one] of the shape's type
  cuda::Buffer biases_;   // [nets, biases of one]
};

class GpuSignatures final : public GpuSelector {
 public:
  GpuSignatures(const Spec& spec, const GpuGeometry& geometry, const HashScheme& scheme, Nets key_nets,
                Nets query_nets, std::string functions)
      : dense_(spec.dense),
        geometry_(geometry),
        options_(SignatureOptions::of(spec)),
        scheme_(scheme),
        functions_(std::move(functions)),
        key_nets_(std::move(key_nets)),
        query_nets_(std::move(query_nets)),
        budgets_(options_.budget, geometry.most_queries),
        signed_(geometry.sequences) {
    const std::int64_t n = geometry.max_tokens, queries = geometry.most_queries;
    const bool bounded = options_.mode != NearRule::Mode::depth && !options_.all_ties;
    const std::int64_t most_far = far_keys(dense_, n - 1);
    capacity_ = std::max<std::int64_t>(1, bounded ? options_.budget.of(most_far) : most_far);
    attends_ = capacity_ < most_far;
    lists_ = queries * (options_.per_query_head ? geometry.query_heads : geometry.kv_heads);
    room_ = (n + cuda::kSignatureUnit - 1) / cuda::kSignatureUnit * cuda::kSignatureUnit;
    codes_ = cuda::Buffer(geometry.sequences * geometry.layers * layer_words() * 4, "signatures");
    rows_ = cuda::Buffer(lists_ * capacity_ * 4, "the rows of signatures");
    counts_ = cuda::Buffer(geometry.layers * lists_ * 4, "the counts of signatures");
    staged_sets_ = cuda::PinnedBuffer(queries * std::int64_t{sizeof(cuda::SignatureSets)});
    sets_of_documents_ = cuda::Buffer(staged_sets_.bytes(), "where signatures of documents lie");
    if (attends_) {
      arriving_ = cuda::Buffer(geometry.kv_heads * capacity_ * 4, "the rows of signatures");
      cuda::fill(arriving_.as<void>(), cuda::kEmptyPlaces, arriving_.bytes(), geometry.stream);
    }
  }

  bool prepare(const GpuKeys& keys, cuda::StreamHandle stream) override {
    signed_.prepare(keys, [&](const GpuKeys& some, std::int64_t begin, std::int64_t end) {
      geometry_.for_layers([&](int layer, int layers) { sign(some, layer, layers, begin, end, stream); });
    });
    return false;
  }
  void roll_back(int sequence, std::int64_t tokens) override { signed_.roll_back(sequence, tokens); }

  void begin(const GpuStep& step) override {
    signed_.begin(step, dense_);
    budgets_.begin(step, dense_);
    is_joined_ = false;
  }
  bool joins(const GpuSelector& other) const override {
    const auto* const o = dynamic_cast<const GpuSignatures*>(&other);
    return o != nullptr && o->capacity_ <= capacity_ && o->geometry_.max_tokens <= geometry_.max_tokens &&
           o->functions_ == functions_;
  }
  void begin_joined(const GpuStep& step, std::span<GpuSelector* const> documents) override {
    LODE_ASSERT(std::ssize(documents) <= geometry_.most_queries);
    signed_.begin({}, dense_);
    budgets_.begin(step, dense_);
    is_joined_ = true;
    for (std::size_t i = 0; i < documents.size(); ++i) {
      const auto& document = dynamic_cast<const GpuSignatures&>(*documents[i]);
      staged_sets_.as<cuda::SignatureSets>()[i] = {document.codes_.as<std::uint32_t>(), document.room_};
    }
  }
  void upload(cuda::StreamHandle stream) override {
    budgets_.upload(stream);
    if (is_joined_)
      cuda::copy_numbers(sets_of_documents_.as<void>(), staged_sets_, staged_sets_.bytes(), stream);
  }
  bool has_news() const override { return is_joined_ || budgets_.has_news(); }

  cuda::RowLists select(int layer, const cuda::Queries& queries, const float*,
                        cuda::StreamHandle stream) override {
    cuda::Signatures keys = signatures(0, layer);
    keys.fresh = sign_new_keys(layer, stream);
    if (is_joined_)
      keys.apart = sets_of_documents_.as<cuda::SignatureSets>(),
      keys.first_set = std::int64_t{layer} * sets();
    const auto run = [&](const cuda::SignatureRanks& ranks) {
      cuda::select_by_signature(queries, queries.q, nets(layer), nullptr, keys, rule(), geometry_.max_tokens,
                                rows_.as<std::int32_t>(), capacity_, counts_of(layer), stream, ranks);
    };
    if (GpuRanges* const ranges = geometry_.ranges; ranges == nullptr) {
      run({});
    } else {
      const std::int64_t told = numbers_told(queries.count, keys);
      run({.own = ranges->part(told), .ranks = ranges->size()});
      run({.all = ranges->gather(told), .rank = ranges->rank(), .ranks = ranges->size()});
    }
    return {.rows = rows_.as<std::int32_t>(),
            .counts = counts_of(layer),
            .capacity = capacity_,
            .lists_per_head = lists_per_head(),
            .sink = dense_.sink,
            .window = dense_.window};
  }

  bool attend(int layer, const cuda::Queries& queries, const float*, void* workspace,
              cuda::StreamHandle stream) override {
    cuda::Signatures keys = signatures(0, layer);
    if (!attends_ || !cuda::can_attend_by_signature(queries, nets(layer), keys, rule(), arriving()))
      return false;
    keys.fresh = sign_new_keys(layer, stream);
    attends_ = cuda::attend_by_signature(queries, queries.q, nets(layer), keys, rule(), geometry_.max_tokens,
                                         arriving(), counts_of(layer), workspace, stream);
    return attends_;
  }

  std::int64_t counts_per_layer() const override { return lists_; }
  int lists_per_head() const override {
    return options_.per_query_head ? geometry_.query_heads / geometry_.kv_heads : 1;
  }
  std::int64_t select_bytes(const CountedToken& of, std::span<const int> heads, std::int64_t) const override {
    const std::int64_t far = far_keys(dense_, of.position);
    if (options_.mode == NearRule::Mode::count && options_.budget.of(far) >= far) return 0;
    return (far * sets() * scheme_.bits / 8 + query_nets_.bytes() / geometry_.layers) * std::ssize(heads) /
           geometry_.kv_heads;
  }
  std::int64_t bytes() const override {
    return key_nets_.bytes() + query_nets_.bytes() + codes_.bytes() + rows_.bytes() + arriving_.bytes() +
           counts_.bytes() + budgets_.bytes() + sets_of_documents_.bytes();
  }

 private:
  const std::int32_t* counts() const override { return counts_.as<std::int32_t>(); }
  std::int32_t* counts_of(int layer) const { return counts_.as<std::int32_t>() + layer * lists_; }
  cuda::ArrivingRows arriving() const {
    return {.rows = arriving_.as<std::int32_t>(),
            .budgets = budgets_.get(),
            .capacity = capacity_,
            .sink = dense_.sink,
            .window = dense_.window};
  }
  cuda::SignNets nets(int layer) const {
    return query_nets_.from(std::int64_t{layer} * geometry_.query_heads);
  }
  cuda::SignatureRule rule() const {
    const int together = options_.per_query_head ? 1 : geometry_.query_heads / geometry_.kv_heads;
    return {.mode = static_cast<cuda::SignatureRule::Mode>(options_.mode),
            .budget = budgets_.get(),
            .depth = static_cast<int>(options_.depth) * together,
            .all_ties = options_.all_ties,
            .per_query_head = options_.per_query_head,
            .sink = dense_.sink,
            .window = dense_.window};
  }
  /// What a GPU with a range of the text tells the others of so many queries.
  std::int64_t numbers_told(int queries, const cuda::Signatures& keys) const {
    const int group = geometry_.query_heads / geometry_.kv_heads;
    return std::int64_t{queries} * (options_.per_query_head ? geometry_.query_heads : geometry_.kv_heads) *
           cuda::signature_levels(rule(), keys, group);
  }
  /// Those that the running step itself makes far; whether there were any.
  bool sign_new_keys(int layer, cuda::StreamHandle stream) const {
    return signed_.take_needed([&](const GpuKeys& keys, std::int64_t begin, std::int64_t end) {
      sign(keys, layer, 1, begin, end, stream);
    });
  }
  int sets() const { return scheme_.per_query_head ? geometry_.query_heads : geometry_.kv_heads; }
  std::int64_t layer_words() const { return sets() * room_ * scheme_.bits / 32; }
  cuda::Signatures signatures(int sequence, int layer) const {
    const std::int64_t stride = geometry_.layers * layer_words();
    return {.codes = codes_.as<std::uint32_t>() + sequence * stride + layer * layer_words(),
            .sequence_stride = stride,
            .capacity = room_,
            .words = scheme_.bits / 32,
            .per_query_head = scheme_.per_query_head};
  }
  void sign(const GpuKeys& keys, int layer, int layers, std::int64_t begin, std::int64_t end,
            cuda::StreamHandle stream) const {
    cuda::sign_keys(keys.base + layer * keys.layout.layer_stride, keys.layout, layers, geometry_.query_heads,
                    begin, end, key_nets_.from(std::int64_t{layer} * sets()),
                    static_cast<cuda::SignedValues>(scheme_.values), signatures(keys.sequence, layer),
                    stream);
  }

  LocalWindow dense_;
  GpuGeometry geometry_;
  SignatureOptions options_;
  HashScheme scheme_;
  std::string functions_;       ///< alike where all choose alike
  Nets key_nets_, query_nets_;  // [L, sets], [L, Hq]
  std::int64_t capacity_ = 0;
  /// Choice and attention together, until that is refused: the shapes of a context do not change. Never where
  /// the budget is every key: a list of all has full attention's bits.
  bool attends_ = false;
  std::int64_t lists_ = 0;  ///< of most_queries
  std::int64_t room_ = 0;   ///< positions of a set
  cuda::Buffer codes_;      // [sequences, L, sets, room, words]
  cuda::Buffer rows_;       // [lists, capacity]
  cuda::Buffer arriving_;   // [Hkv, capacity] attended while they come; empty between steps
  cuda::Buffer counts_;     // [L, lists]
  StepBudgets budgets_;
  IndexedKeys signed_;
  bool is_joined_ = false;          ///< the step's queries ask several documents
  cuda::PinnedBuffer staged_sets_;  // [most_queries] SignatureSets
  cuda::Buffer sets_of_documents_;  // the same
};

/// Functions of the heads here that a selector of the host covers, where those of all heads have their places;
/// nothing at the others.
std::vector<const HashNet*> placed(const std::vector<HashNet>* nets, const std::vector<int>& covered,
                                   std::size_t places, int kv_heads) {
  std::vector<const HashNet*> all(places);
  const std::size_t each = places / static_cast<std::size_t>(kv_heads);
  for (std::size_t i = 0; nets != nullptr && i < nets->size(); ++i) {
    const int head = covered[i / each];
    if (head >= 0 && head < kv_heads) all[static_cast<std::size_t>(head) * each + i % each] = &(*nets)[i];
  }
  return all;
}

/// `layers[l]` is null where a layer is dense. Null when the kernels do not take the functions: then the
/// host's selectors choose. A step of one token is a graph that no host value may enter, so its own key must
/// be in the window.
std::unique_ptr<GpuSelector> make(const Spec& spec, const GpuGeometry& geometry,
                                  const std::vector<const HashWeights*>& layers) {
  const auto first =
      std::find_if(layers.begin(), layers.end(), [](auto* weights) { return weights != nullptr; });
  constexpr int kMostHeads = 16;
  if (first == layers.end() || !(*first)->scheme.roped ||
      (geometry.ranges == nullptr && spec.dense.window < 1) ||
      geometry.query_heads / geometry.kv_heads > kMostHeads || geometry.head_dim % 8 != 0)
    return nullptr;
  std::string functions = spec.str();
  for (const HashWeights* const weights : layers)
    functions += weights != nullptr ? weights->fingerprint() : "-";
  std::vector<const HashNet*> keys, queries, some_keys, some_queries;
  const auto sets =
      static_cast<std::size_t>((*first)->scheme.per_query_head ? geometry.query_heads : geometry.kv_heads);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const std::vector<int> covered = geometry.covered_heads(static_cast<int>(l));
    const auto add = [&](std::vector<const HashNet*>& to, const std::vector<HashNet>* nets, std::size_t n) {
      const auto all = placed(nets, covered, n, geometry.kv_heads);
      to.insert(to.end(), all.begin(), all.end());
    };
    add(keys, layers[l] != nullptr ? &layers[l]->key : nullptr, sets);
    add(queries, layers[l] != nullptr ? &layers[l]->query : nullptr,
        static_cast<std::size_t>(geometry.query_heads));
  }
  const auto is_net = [](const HashNet* net) { return net != nullptr; };
  std::copy_if(keys.begin(), keys.end(), std::back_inserter(some_keys), is_net);
  std::copy_if(queries.begin(), queries.end(), std::back_inserter(some_queries), is_net);
  cuda::SignNets key_shape, query_shape;
  if (!shape_of(some_keys, key_shape) || !shape_of(some_queries, query_shape)) return nullptr;
  constexpr int kWidest = 600;
  if (std::max(key_shape.widest(), query_shape.widest()) > std::min(kWidest, cuda::widest_signed()))
    return nullptr;
  return std::make_unique<GpuSignatures>(spec, geometry, (*first)->scheme,
                                         Nets(keys, key_shape, geometry.stream),
                                         Nets(queries, query_shape, geometry.stream), std::move(functions));
}

}  // namespace

std::unique_ptr<GpuSelector> make_gpu_signatures(const Spec& spec, const GpuGeometry& geometry,
                                                 std::span<Selector* const> selectors) {
  std::vector<const HashWeights*> layers;
  for (const Selector* const selector : selectors)
    layers.push_back(selector == nullptr ? nullptr : signature_weights(*selector));
  return make(spec, geometry, layers);
}

std::unique_ptr<GpuSelector> make_gpu_signatures_for_bench(const Spec& spec, const GpuGeometry& geometry,
                                                           std::uint64_t seed) {
  Rng rng(seed);
  const int bits = static_cast<int>(spec.integer("bits", 32, 32, 128));
  const HashWeights weights = made_up_hash(geometry.query_heads, geometry.kv_heads, geometry.head_dim, bits,
                                           spec.name == "hash" ? 2 : 0, rng);
  return make(spec, geometry,
              std::vector<const HashWeights*>(static_cast<std::size_t>(geometry.layers), &weights));
}

}  // namespace lode
