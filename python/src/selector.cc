// SPDX-License-Identifier: Apache-2.0
// One layer's selector over keys and values of others.
#include "lodestone/selector.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "arrays.h"
#include "attention.h"
#include "cuda_array.h"
#include "gpu_selector.h"
#include "kernels/kernels.h"
#include "lodestone/attend.h"
#include "lodestone/error.h"
#include "lodestone/spec.h"
#include "module.h"
#include "select/device_keys.h"

namespace lode::python {

namespace {

using RowArray = nb::ndarray<nb::numpy, std::int32_t>;
/// (KV head, query heads of the set, first token, last token + 1, rows, log-weights)
using SetTuple =
    std::tuple<int, std::vector<int>, int, int, RowArray, std::optional<nb::ndarray<nb::numpy, float>>>;

/// A method's selector for one layer and one sequence, with the keys' geometry. Calls take turns: the GIL is
/// given up before the mutex is taken, so that neither is waited for while the other is held.
class PySelector {
 public:
  PySelector(const std::string& spec, int query_heads, int kv_heads, int head_dim, int layer,
             std::optional<float> scale, const std::optional<ArrayArgument>& inverse_frequencies,
             float attention_scaling, std::uint64_t seed, const std::string& fingerprint)
      : spec_(parse_spec(spec)), threads_(shared_threads()) {
    if (kv_heads < 1 || query_heads < kv_heads || query_heads % kv_heads != 0 || query_heads / kv_heads > 16)
      throw InputError("Selector: expected query heads that are 1 to 16 times the KV heads, found " +
                       std::to_string(query_heads) + " and " + std::to_string(kv_heads));
    if (head_dim < 2 || head_dim > kMaxHeadDim || head_dim % 2 != 0 || layer < 0)
      throw InputError("Selector: expected an even head_dim from 2 to " + std::to_string(kMaxHeadDim) +
                       " and a layer of 0 or more, found " + std::to_string(head_dim) + " and " +
                       std::to_string(layer));
    constexpr Name kFrequencies = "inverse_frequencies";
    const Array given = inverse_frequencies ? array_of(*inverse_frequencies, kFrequencies) : Array();
    rope_ = make_rope(given.is_valid() ? floats(given, 1, kFrequencies) : std::span<const float>(), head_dim,
                      attention_scaling);
    geometry_ = {.layer = layer,
                 .query_heads = query_heads,
                 .kv_heads = kv_heads,
                 .head_dim = head_dim,
                 .scale = scale ? *scale : 1.0f / std::sqrt(static_cast<float>(head_dim)),
                 .dense = spec_.dense,
                 .rope = rope_.get(),
                 .pool = threads_.get(),
                 .seed = seed,
                 .covered = {}};
    const MethodInfo& info = find_method(spec_.name);
    if (!info.make) throw InputError("Selector: expected a sparse method, found '" + spec_.str() + "'");
    selector_ = info.make(spec_, geometry_, fingerprint);
    on_gpu_ = std::make_unique<SelectorOnGpu>(SelectorOnGpu::Host{spec_, geometry_, *selector_, mutex_});
  }

  bool wants_prompt() const { return selector_->wants_writes(); }
  std::string spec() const { return spec_.str(); }
  int sink() const { return static_cast<int>(geometry_.dense.sink); }
  int window() const { return static_cast<int>(geometry_.dense.window); }
  int dense_layers() const { return spec_.dense_layers; }
  std::int64_t index_bytes() const {
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    return selector_->index_bytes() + on_gpu_->bytes();
  }

  void observe(const ArrayArgument& q_, const ArrayArgument& k_, const ArrayArgument& v_, std::int64_t begin,
               nb::handle stream) {
    const auto gpu = gpu_of(q_);
    if (!gpu) check_cpu_options(stream, nb::none());
    if (gpu && dynamic_cast<HearsQueries*>(selector_.get()) != nullptr) {
      process_.check("Selector");
      return on_gpu_->observe(q_, begin, {*gpu, stream, nb::none()});
    }
    const Array q = host_array(q_, "q", stream), k = host_array(k_, "k", stream),
                v = host_array(v_, "v", stream);
    const auto queries = floats(q, 3, "q"), keys = floats(k, 3, "k"), values = floats(v, 3, "v");
    check_heads(q, geometry_.query_heads, "q");
    for (const auto& [array, name] : {std::pair{&k, "k"}, std::pair{&v, "v"}}) {
      check_heads(*array, geometry_.kv_heads, name);
      if (array->shape(0) != q.shape(0))
        throw nb::value_error((std::string(name) + ": expected as many tokens as q has, " +
                               std::to_string(q.shape(0)) + ", found " + shape_text(*array))
                                  .c_str());
    }
    const std::int64_t tokens = static_cast<std::int64_t>(q.shape(0));
    check_begin(begin, tokens);
    const auto unrotate = [&](std::span<const float> x, std::int64_t heads) {
      return unrotated(x, tokens, heads, begin);
    };
    process_.check("Selector");
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    const std::vector<float> q_plain = unrotate(queries, geometry_.query_heads),
                             k_plain = unrotate(keys, geometry_.kv_heads);
    selector_->on_write({.sequence = 0,
                         .phase = Phase::context,
                         .begin = static_cast<Position>(begin),
                         .tokens = tokens,
                         .q_unrotated = q_plain,
                         .k_unrotated = k_plain,
                         .q = queries,
                         .k = keys,
                         .v = values});
  }

  void build(const ArrayArgument& k_, const ArrayArgument& v_, nb::handle stream) {
    if (const auto gpu = gpu_of(k_)) {
      process_.check("Selector");
      on_gpu_->build(k_, v_, {*gpu, stream, nb::none()});
      built_ = 0;
      return;
    }
    check_cpu_options(stream, nb::none());
    const Array k = array_of(k_, "k"), v = array_of(v_, "v");
    const auto kv = checked_heads(k, v, -1);
    process_.check("Selector");
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    on_gpu_->forget();
    selector_->build(0, {.heads = kv, .tokens = kv.front().rows});
    built_ = kv.front().rows;
  }

  void roll_back(std::int64_t tokens) {
    process_.check("Selector");
    if (tokens < 0) throw InputError("roll_back: expected 0 tokens or more, found " + std::to_string(tokens));
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    selector_->roll_back(0, tokens);
    on_gpu_->roll_back(tokens);
    built_ = std::min(built_, tokens);
  }

  nb::object select(const ArrayArgument& q, std::int64_t begin, const ArrayArgument& k,
                    const ArrayArgument& v, std::int64_t first, nb::handle stream) {
    if (const auto gpu = gpu_to_use(q))
      return on_gpu_->select(q, begin, {k, v, first}, {*gpu, stream, nb::none()});
    check_cpu_options(stream, nb::none());
    check_first(first);
    Selection selection;
    run(Arrays(q, k, v), begin, [&](const QueryBlock& block) {
      selector_->append(0, block.kv, block.far_end(block.tokens - 1, geometry_.dense));
      selector_->select({&block, 1}, selection);
    });
    std::vector<SetTuple> sets;
    for (std::int64_t i = 0; i < selection.sets(); ++i) sets.push_back(tuple_of(selection.set(i)));
    return nb::cast(std::move(sets));
  }

  nb::object attend_block(const ArrayArgument& q, std::int64_t begin, const ArrayArgument& k,
                          const ArrayArgument& v, bool return_lse, std::int64_t first, nb::handle stream,
                          nb::handle out_) {
    if (const auto gpu = gpu_to_use(q))
      return on_gpu_->attend(q, begin, {k, v, first}, return_lse, {*gpu, stream, out_});
    check_cpu_options(stream, out_);
    check_first(first);
    const Arrays arrays(q, k, v);
    floats(arrays.q, 3, "q");
    const std::size_t tokens = arrays.q.shape(0), heads = arrays.q.shape(1), d = arrays.q.shape(2);
    Buffers out(tokens * heads, d);
    float *const output = out.output.data(), *const lse = out.lse.data();
    run(arrays, begin, [&](const QueryBlock& block) {
      attend(*selector_, {&block, 1}, geometry_, {&output, 1}, {&lse, 1});
    });
    State state = to_numpy(std::move(out), {tokens, heads}, d);
    return return_lse ? nb::cast(std::move(state)) : nb::cast(std::move(state.first));
  }

  nb::object rows(nb::handle stream) {
    process_.check("Selector");
    auto [k, v] = on_gpu_->rows(stream);
    return nb::make_tuple(std::move(k), std::move(v));
  }

  /// What all layers decide together (MethodInfo::finish), each over its own keys.
  static void finish(const std::vector<PySelector*>& layers, const std::vector<ArrayArgument>& ks,
                     const std::vector<ArrayArgument>& vs, nb::handle stream) {
    const std::map<int, std::size_t> places = places_of(layers);
    if (ks.size() != layers.size() || vs.size() != layers.size())
      throw InputError("finish: expected keys and values of each selector, found " +
                       std::to_string(layers.size()) + " selectors, " + std::to_string(ks.size()) +
                       " keys and " + std::to_string(vs.size()) + " values");
    if (layers.front()->on_gpu_->device()) return finish_on_gpu(layers, ks, stream);
    check_cpu_options(stream, nb::none());
    std::vector<Array> arrays;  // of keys and values, in turn
    std::vector<Selector*> selectors;
    std::vector<std::vector<KvRows>> kv;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      layers[i]->process_.check("Selector");
      selectors.push_back(layers[i]->selector_.get());
      arrays.push_back(array_of(ks[i], "keys"));
      arrays.push_back(array_of(vs[i], "values"));
      kv.push_back(layers[i]->checked_heads(arrays[2 * i], arrays[2 * i + 1], -1));
    }
    const MethodInfo& info = find_method(layers.front()->spec_.name);
    if (!info.finish) return;
    const nb::gil_scoped_release release;
    const auto locks = locked(layers);
    for (std::size_t i = 0; i < layers.size(); ++i)
      if (layers[i]->built_ != kv[i].front().rows)
        throw InputError("finish: expected the keys that each selector was built with, found " +
                         std::to_string(kv[i].front().rows) + " for " + std::to_string(layers[i]->built_) +
                         " in layer " + std::to_string(layers[i]->geometry_.layer));
    info.finish(selectors, 0, [&](int layer) {
      const auto& heads = kv[places.at(layer)];
      return KvLayer{.heads = heads, .tokens = heads.front().rows};
    });
  }

 private:
  /// Their mutexes, in one order for all callers.
  static std::vector<std::unique_lock<std::mutex>> locked(const std::vector<PySelector*>& layers) {
    std::vector<std::unique_lock<std::mutex>> locks;
    const std::set<PySelector*> each(layers.begin(), layers.end());
    for (PySelector* layer : each) locks.emplace_back(layer->mutex_);
    return locks;
  }

  /// Of selectors that were built on a GPU, where their keys are still.
  static void finish_on_gpu(const std::vector<PySelector*>& layers, const std::vector<ArrayArgument>& ks,
                            nb::handle stream) {
    const int device = *layers.front()->on_gpu_->device();
    std::vector<SelectorOnGpu*> on_gpu;
    std::vector<Selector*> selectors;
    const MethodInfo& info = find_method(layers.front()->spec_.name);
    if (!info.finish) return;  // wherever layers are
    for (std::size_t i = 0; i < layers.size(); ++i) {
      layers[i]->process_.check("Selector");
      if (layers[i]->on_gpu_->device() != device || gpu_of(ks[i]) != device)
        throw InputError("finish: expected selectors that were built on GPU " + std::to_string(device) +
                         " as the first one was, and their keys there, found another place in layer " +
                         std::to_string(layers[i]->geometry_.layer));
      on_gpu.push_back(layers[i]->on_gpu_.get());
      selectors.push_back(layers[i]->selector_.get());
    }
    const std::uintptr_t handle = stream_handle(stream);
    const nb::gil_scoped_release release;
    const auto locks = locked(layers);
    SelectorOnGpu::finish(on_gpu, device, handle,
                          [&](const std::function<KvLayer(int)>& rows) { info.finish(selectors, 0, rows); });
  }

  /// Where each layer's selector stands among these. InputError unless all are of one spec and each of a layer of its
  /// own: what a method decides for all it reads from its own selectors.
  static std::map<int, std::size_t> places_of(const std::vector<PySelector*>& layers) {
    if (layers.empty()) throw InputError("finish: expected at least one selector, found none");
    std::map<int, std::size_t> places;
    for (const PySelector* selector : layers) {
      if (selector == nullptr) throw InputError("finish: expected selectors, found None");
      const LayerGeometry &own = selector->geometry_, &first = layers.front()->geometry_;
      if (selector->spec() != layers.front()->spec() || own.query_heads != first.query_heads ||
          own.kv_heads != first.kv_heads || own.head_dim != first.head_dim)
        throw InputError("finish: expected selectors of one spec and of heads alike, found '" +
                         layers.front()->spec() + "' and '" + selector->spec() + "'");
      if (!places.emplace(selector->geometry_.layer, places.size()).second)
        throw InputError("finish: expected different selectors, each of another layer, found two of layer " +
                         std::to_string(selector->geometry_.layer));
    }
    return places;
  }

  /// An array [T, heads, d] of at least one token.
  void check_heads(const Array& array, int heads, Name name) const {
    if (std::cmp_not_equal(array.shape(1), heads) || std::cmp_not_equal(array.shape(2), geometry_.head_dim) ||
        array.shape(0) == 0)
      throw nb::value_error((std::string(name) + ": expected [tokens, " + std::to_string(heads) + ", " +
                             std::to_string(geometry_.head_dim) + "], found " + shape_text(array))
                                .c_str());
  }

  static void check_first(std::int64_t first) {
    if (first != 0)
      throw InputError(
          "first: expected 0 for arrays in the CPU's memory, where all rows are read where they lie, found " +
          std::to_string(first));
  }

  static void check_begin(std::int64_t begin, std::int64_t tokens) {
    if (begin < 0 || begin > std::numeric_limits<Position>::max() - tokens)
      throw nb::value_error(
          ("begin: expected a position of 0 or more, found " + std::to_string(begin)).c_str());
  }

  std::vector<KvRows> checked_heads(const Array& k, const Array& v, std::int64_t tokens) const {
    auto kv = kv_heads(k, v, tokens);
    if (std::cmp_not_equal(kv.size(), geometry_.kv_heads) || kv.front().d != geometry_.head_dim)
      throw nb::value_error(("k: expected [" + std::to_string(geometry_.kv_heads) + ", tokens, " +
                             std::to_string(geometry_.head_dim) + "], found " + shape_text(k))
                                .c_str());
    return kv;
  }

  std::vector<float> unrotated(std::span<const float> x, std::int64_t tokens, std::int64_t heads,
                               std::int64_t begin) const {
    std::vector<float> plain(x.begin(), x.end());
    const auto row = static_cast<std::size_t>(heads * geometry_.head_dim);
    for (std::int64_t t = 0; t < tokens; ++t)
      unrotate(*rope_, std::span(plain).subspan(static_cast<std::size_t>(t) * row, row),
               static_cast<Position>(begin + t));
    return plain;
  }

  /// The GPU that a call is for; nothing: the CPU. InputError when the index is elsewhere.
  std::optional<int> gpu_to_use(const ArrayArgument& q) {
    const std::optional<int> gpu = gpu_of(q);
    process_.check("Selector");
    if (gpu && built_ > 0)
      throw InputError(
          "Selector: expected queries in the CPU's memory, where the index is, found them on GPU " +
          std::to_string(*gpu) + "; call build() with keys there first");
    if (!gpu && on_gpu_->device())
      throw InputError(
          "Selector: expected queries on GPU " + std::to_string(*on_gpu_->device()) +
          ", where the index is, found them elsewhere; call build() with keys in the CPU's memory first");
    return gpu;
  }

  /// Each argument is asked once: a DLPack capsule gives its memory away.
  struct Arrays {
    Array q, k, v;
    Arrays(const ArrayArgument& q_, const ArrayArgument& k_, const ArrayArgument& v_)
        : q(array_of(q_, "q")), k(array_of(k_, "k")), v(array_of(v_, "v")) {}
  };

  template <class Body>
  void run(const Arrays& arrays, std::int64_t begin, const Body& body) {
    const Array &q = arrays.q, &k = arrays.k, &v = arrays.v;
    const auto queries = floats(q, 3, "q");
    check_heads(q, geometry_.query_heads, "q");
    const auto tokens = static_cast<std::int64_t>(q.shape(0));
    check_begin(begin, tokens);
    const auto kv = checked_heads(k, v, begin + tokens);
    const nb::gil_scoped_release release;
    const std::lock_guard lock(mutex_);
    const std::vector<float> plain = unrotated(queries, tokens, geometry_.query_heads, begin);
    const Position limit =
        geometry_.dense.from_context
            ? static_cast<Position>(std::max<std::int64_t>(0, built_ - geometry_.dense.window))
            : QueryBlock::kNoLimit;
    body(QueryBlock{.sequence = 0,
                    .phase = tokens > 1 ? Phase::question : Phase::generation,
                    .begin = static_cast<Position>(begin),
                    .tokens = tokens,
                    .q = queries,
                    .q_unrotated = plain,
                    .kv = {.heads = kv, .tokens = begin + tokens},
                    .far_begin = static_cast<Position>(geometry_.dense.sink),
                    .far_limit = limit});
  }

  SetTuple tuple_of(const Selection::Set& set) const {
    std::vector<std::int32_t> rows(set.rows.begin(), set.rows.end());
    for (const Run& r : set.runs)
      for (Position p = r.begin; p < r.end; ++p) rows.push_back(p);
    std::vector<int> heads;
    for (int g = 0; g < geometry_.group(); ++g)
      if ((set.queries.heads >> g & 1u) != 0)
        heads.push_back(static_cast<int>(set.queries.kv_head) * geometry_.group() + g);
    std::optional<nb::ndarray<nb::numpy, float>> weights;
    if (!set.log_weights.empty()) {
      std::vector<float> w(set.log_weights.begin(), set.log_weights.end());
      w.resize(rows.size(), 0.0f);
      const std::size_t n = w.size();
      weights = numpy(std::move(w), {n});
    } else {
      std::sort(rows.begin(), rows.end());
    }
    const std::size_t n = rows.size();
    return {set.queries.kv_head,         std::move(heads),  set.queries.token_begin, set.queries.token_end,
            numpy(std::move(rows), {n}), std::move(weights)};
  }

  Spec spec_;
  std::shared_ptr<ThreadPool> threads_;
  std::shared_ptr<const Rope> rope_;
  LayerGeometry geometry_;
  std::unique_ptr<Selector> selector_;
  std::int64_t built_ = 0;
  mutable std::mutex mutex_;
  std::unique_ptr<SelectorOnGpu> on_gpu_;  // of selector_
  OfProcess process_;
};

}  // namespace

void bind_selector(nb::module_& m) {
  nb::class_<PySelector>(m, "Selector",
                         "A method's index over one layer's keys, and the choice of keys for queries.\n\n"
                         "Calls take turns; the GIL is released while they compute.")
      .def(nb::init<const std::string&, int, int, int, int, std::optional<float>,
                    const std::optional<ArrayArgument>&, float, std::uint64_t, const std::string&>(),
           nb::arg("spec"), nb::arg("query_heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
           nb::arg("layer") = 0, nb::arg("scale") = nb::none(), nb::arg("inverse_frequencies") = nb::none(),
           nb::arg("attention_scaling") = 1.0f, nb::arg("seed") = 0, nb::arg("fingerprint") = "",
           "spec: 'name:key=value,...', a sparse method; query_heads: 1 to 16 times kv_heads; head_dim: "
           "even;\n"
           "layer: its number in the model, from 0; scale: of q.k, 1/sqrt(head_dim) by default;\n"
           "inverse_frequencies: float32 [d/2], RoPE's radians per position, for methods that look at keys "
           "before\n"
           "RoPE; without them keys are taken as they are; attention_scaling: RoPE's factor of keys and "
           "queries\n"
           "(YaRN); seed: of methods that draw numbers; fingerprint: of the model (Model.fingerprint) that a "
           "trained\n"
           "method's file must be for.\n"
           "InputError names what a spec may say, and heads that do not fit.")
      .def("observe", &PySelector::observe, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("begin"),
           nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::sig("def observe(self, q: lodestone.ArrayLike, k: lodestone.ArrayLike, v: "
                   "lodestone.ArrayLike, begin: "
                   "int, *, stream: lodestone.StreamLike | None = None) -> None"),
           "Shows a chunk of the prompt, after RoPE, to methods that want it (wants_prompt).\n\n"
           "q: float32 [T, Hq, d]; k, v: float32 [T, Hkv, d]; begin: position of the first token.\n"
           "ValueError when shapes or positions do not fit.\n\n"
           "Arrays on a GPU: of methods that listen to queries alone (squeezed), a sample of them comes to "
           "the CPU, of "
           "others\n"
           "the chunk.")
      .def("build", &PySelector::build, nb::arg("k"), nb::arg("v"), nb::kw_only(),
           nb::arg("stream") = nb::none(),
           nb::sig("def build(self, k: lodestone.ArrayLike, v: lodestone.ArrayLike, *, stream: "
                   "lodestone.StreamLike | "
                   "None = None) -> None"),
           "Indexes a document's keys and values; replaces what was there. Copies what it needs.\n\n"
           "k, v: float32, float16 or bfloat16 [Hkv, S, d], keys after RoPE at positions 0 to S - 1.\n\n"
           "Arrays on a GPU: rows are copied on it into blocks of the selector's own, in the order of "
           "`stream`, and the "
           "GPU\n"
           "indexes and chooses; attend() and select() then take arrays there, and k and v may go. kmeans "
           "and squeezed cluster "
           "keys on it, "
           "but\n"
           "copy them to the CPU where they are fewer than 4,096 or heads are wider than 128; methods whose "
           "index is the\n"
           "CPU's (quest with bits, double-sparsity, pqcache, ivf, snapkv) always do. InputError for methods "
           "whose keys "
           "no\n"
           "GPU chooses.")
      .def("roll_back", &PySelector::roll_back, nb::arg("tokens"),
           "Forgets the keys at position `tokens` and beyond. InputError below 0.")
      .def("select", &PySelector::select, nb::arg("q"), nb::arg("begin"), nb::arg("k"), nb::arg("v"),
           nb::kw_only(), nb::arg("first") = 0, nb::arg("stream") = nb::none(),
           nb::sig(
               signatures(
                   "def select(self, q: $array, begin: int, k: lodestone.ArrayLike, v: lodestone.ArrayLike, "
                   "*, first: int = 0, stream: $stream = None) -> list[tuple[int, list[int], int, int, "
                   "$result, $float32 | "
                   "None]]",
                   "int32")
                   .c_str()),
           "The keys outside of sink and window that the method chooses for query tokens.\n\n"
           "q [T, Hq, d], after RoPE: float32, on a GPU also float16 or bfloat16; begin: position of the "
           "first query token;\n"
           "k, v: float32, float16 or bfloat16 [Hkv, S, d] from token `first` on (0), first + S >= begin + "
           "T: the\n"
           "queries' own rows too.\n"
           "Returns (kv_head, query_heads, token_begin, token_end, rows, log_weights) for each set of query "
           "heads\n"
           "and tokens [token_begin, token_end) that share a choice: rows int32 [n], log_weights float32 [n] "
           "to\n"
           "add to their scores, or None. Rows are those of the set's last token; a token leaves out those "
           "that\n"
           "lie in its own window. What a method estimates of keys it skips (squeezed's tail=on) is not in "
           "them.\n\n"
           "Arrays on a GPU: as in attend(); waits for the stream, rows and log_weights are CudaArrays, and "
           "rows come in "
           "any\n"
           "order.")
      .def("attend", &PySelector::attend_block, nb::arg("q"), nb::arg("begin"), nb::arg("k"), nb::arg("v"),
           nb::arg("return_lse") = false, nb::kw_only(), nb::arg("first") = 0, nb::arg("stream") = nb::none(),
           nb::arg("out") = nb::none(),
           nb::sig(state_signatures("def attend(self, q: $array, begin: int, k: lodestone.ArrayLike, v: "
                                    "lodestone.ArrayLike, ",
                                    ", first: int = 0")
                       .c_str()),
           "Attention of query tokens over sink, window and the keys that the method chooses for them.\n\n"
           "q, begin, k, v: as select() takes them.\n"
           "Returns the output, float32 [T, Hq, d] (on a GPU of q's type); with return_lse=True also the "
           "log-sum-exp, float32 [T, "
           "Hq],\n"
           "natural logarithm, of the scores that were attended to: merge() takes both.\n\n"
           "Arrays on a GPU: enqueued in `stream`, into `out` or new CudaArrays, as in lodestone.attend; "
           "`out` "
           "may be float32\n"
           "whatever q is. Computed in float32 and rounded once. k and v of the\n"
           "tokens since the last call are copied into the selector's blocks. Rows below `begin` that a call "
           "has seen\n"
           "are not read again: roll_back() before they change. So k and v may leave out those of the first "
           "tokens and\n"
           "begin at token `first`. Not for CUDA graphs. InputError when the index is not where the arrays "
           "are, and for\n"
           "rows that are missing.")
      .def("rows", &PySelector::rows, nb::kw_only(), nb::arg("stream") = nb::none(),
           nb::sig("def rows(self, *, stream: lodestone.StreamLike | None = None) -> "
                   "tuple[numpy.typing.NDArray[typing.Any], numpy.typing.NDArray[typing.Any]]"),
           "Copies of the keys and values [Hkv, S, d] that the selector holds on a GPU, as NumPy arrays.\n\n"
           "In their own type; bfloat16 as uint16 with the same bits. Waits for `stream`. InputError for a "
           "selector\n"
           "of the CPU, which reads keys where they lie.")
      .def_prop_ro("wants_prompt", &PySelector::wants_prompt, "Whether observe() is of use.")
      .def_prop_ro("spec", &PySelector::spec, "What it was made from.")
      .def_prop_ro("sink", &PySelector::sink, "First tokens that every query attends to.")
      .def_prop_ro("window", &PySelector::window,
                   "Last tokens that every query attends to, its own included.")
      .def_prop_ro("dense_layers", &PySelector::dense_layers, "First layers of a model that stay exact.")
      .def_prop_ro("index_bytes", &PySelector::index_bytes, "Bytes of memory that the index holds.");
  m.def(
      "finish", &PySelector::finish, nb::arg("selectors"), nb::arg("keys"), nb::arg("values"), nb::kw_only(),
      nb::arg("stream") = nb::none(),
      nb::sig("def finish(selectors: collections.abc.Sequence[Selector], keys: "
              "collections.abc.Sequence[lodestone.ArrayLike], values: "
              "collections.abc.Sequence[lodestone.ArrayLike], *, "
              "stream: lodestone.StreamLike | None = None) -> None"),
      "What the layers of a model decide together (one threshold for `squeezed`), after each has been "
      "built.\n\n"
      "selectors: one a layer, all of one spec; keys, values: of each [Hkv, S, d], those it was built with.\n"
      "InputError when they are not. Does nothing for methods that decide layer by layer.\n"
      "Arrays on a GPU: of selectors that were built there, whose own rows are read; the arrays say the "
      "place alone.\n"
      "Waits for the stream.");
}

}  // namespace lode::python
