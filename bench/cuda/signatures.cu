// SPDX-License-Identifier: Apache-2.0
// Speed of selection by signatures and of the attention behind it, one layer, beside full attention in the
// same run. A figure is the median of replays of a graph of many calls, over layers that rotate; "first" is
// the selection with signatures of the queries given, so that the difference is what their networks cost;
// "together" is selection and attention as the engine has them, 0 where it has not; "as rows come" two
// launches of which the second attends what the first has listed so far; "two" the launches one after the
// other. usage: bench_signatures
#include <cmath>
#include <numeric>
#include <string>

#include "bench.h"
#include "kernels/cuda/device/random.h"
#include "kernels/cuda/hash/signatures.h"

namespace lode::cuda::bench {
namespace {

constexpr int kDim = 128, kReplays = 9;
constexpr std::int64_t kRotated = std::int64_t{4} << 30;

struct Shape {
  int batch, kv_heads, query_heads;
  std::int64_t tokens, part;  ///< a part-th of the keys is chosen
  int words;
  bool own_sets, per_query_head;
};

void run(const Shape& shape) {
  Stream stream;
  KvLayout layout = {shape.kv_heads, kDim, DType::bf16, 0};
  const std::int64_t each = layout.layer_bytes(shape.tokens);
  const int places = static_cast<int>(std::max<std::int64_t>(2, kRotated / (each * shape.batch)));
  const int sets = shape.own_sets ? shape.query_heads : shape.kv_heads;
  const int lists = shape.per_query_head ? shape.query_heads : shape.kv_heads;
  const std::int64_t room = (shape.tokens + kSignatureUnit - 1) / kSignatureUnit * kSignatureUnit;
  const Buffer memory(each * places * shape.batch, "keys and values"),
      codes(places * shape.batch * sets * room * shape.words * 4, "signatures");
  fill_uniform(memory.as<void>(), DType::bf16, memory.bytes() / 2, 0, 1.7f, 1, stream.get());
  SignNets nets = {.type = DType::f16, .depth = 3, .widths = {kDim, kDim, kDim, 32 * shape.words}};
  SignNets key_nets = nets;
  const Buffer weights(places * shape.query_heads * nets.weights_of_net() * 2, "weights"),
      biases(places * shape.query_heads * nets.biases_of_net() * 4, "biases");
  fill_uniform(weights.as<void>(), DType::f16, weights.bytes() / 2, 0, 0.15f, 2, stream.get());
  fill_uniform(biases.as<void>(), DType::f32, biases.bytes() / 4, 0, 0.1f, 3, stream.get());
  key_nets.weights = weights.as<void>(), key_nets.biases = biases.as<float>();
  layout.layer_stride = each;
  const std::int64_t place_words = sets * room * shape.words;
  const Signatures all = {.codes = codes.as<std::uint32_t>(),
                          .sequence_stride = places * place_words,
                          .capacity = room,
                          .words = shape.words,
                          .per_query_head = shape.own_sets};
  std::vector<const char*> bases;
  std::vector<QueryToken> tokens;
  Timer timer;
  for (int b = 0; b < shape.batch; ++b) {
    bases.push_back(memory.as<char>() + b * places * each);
    tokens.push_back({b, static_cast<std::int32_t>(shape.tokens - 1)});
    Signatures own = all;
    own.codes += b * all.sequence_stride;
    timer.start(stream.get());
    sign_keys(bases.back(), layout, places, shape.query_heads, 0, shape.tokens, key_nets, SignedValues::off,
              own, stream.get());
    timer.stop(stream.get());
  }
  const double signing = timer.microseconds() / places;
  const Buffer bases_device(shape.batch * 8, "bases"), tokens_device(shape.batch * 8, "tokens"),
      q(shape.batch * shape.query_heads * kDim * 4, "q"), o(q.bytes(), "o");
  copy(bases_device.as<void>(), bases.data(), bases_device.bytes(), stream.get());
  copy(tokens_device.as<void>(), tokens.data(), tokens_device.bytes(), stream.get());
  fill_uniform(q.as<void>(), DType::f32, q.bytes() / 4, 0, 1.7f, 4, stream.get());
  const Buffer workspace(decode_workspace_bytes(shape.batch, shape.query_heads, shape.kv_heads, kDim), "w");
  fill(workspace.as<void>(), 0, workspace.bytes(), stream.get());
  const std::int64_t sink = 128, window = 128,
                     budget = (shape.tokens - sink - window + shape.part - 1) / shape.part;
  const Buffer rows(shape.batch * lists * budget * 4, "rows"), counts(shape.batch * lists * 4, "counts"),
      arriving(rows.bytes(), "rows"), budgets(shape.batch * 4, "budgets"),
      given(shape.batch * shape.query_heads * shape.words * 4, "given");
  const std::vector<std::int32_t> budget_of(static_cast<std::size_t>(shape.batch),
                                            static_cast<std::int32_t>(budget));
  copy(budgets.as<void>(), budget_of.data(), budgets.bytes(), stream.get());
  fill(arriving.as<void>(), kEmptyPlaces, arriving.bytes(), stream.get());
  copy(given.as<void>(), codes.as<void>(), given.bytes(), stream.get());
  stream.synchronize();
  const auto queries = [&](int i) {
    return Queries{.tokens = tokens_device.as<QueryToken>(),
                   .bases = bases_device.as<const char*>(),
                   .layer_offset = i % places * each,
                   .layout = layout,
                   .count = shape.batch,
                   .query_heads = shape.query_heads,
                   .scale = 1.0f / std::sqrt(static_cast<float>(kDim)),
                   .q = q.as<float>(),
                   .o = o.as<float>()};
  };
  const auto keys_of = [&](int i) {
    Signatures own = all;
    own.codes += i % places * place_words;
    return own;
  };
  const auto nets_of = [&](int i) {
    SignNets mine = nets;
    mine.weights = weights.as<char>() + i % places * shape.query_heads * nets.weights_of_net() * 2;
    mine.biases = biases.as<float>() + i % places * shape.query_heads * nets.biases_of_net();
    return mine;
  };
  const SignatureRule rule = {.budget = budgets.as<std::int32_t>(),
                              .per_query_head = shape.per_query_head,
                              .sink = sink,
                              .window = window};
  const ArrivingRows coming = {.rows = arriving.as<std::int32_t>(),
                               .budgets = rule.budget,
                               .capacity = budget,
                               .sink = sink,
                               .window = window};
  const auto select = [&](int i, const std::uint32_t* words) {
    select_by_signature(queries(i), q.as<float>(), nets_of(i), words, keys_of(i), rule, shape.tokens,
                        rows.as<std::int32_t>(), budget, counts.as<std::int32_t>(), stream.get());
  };
  // What attend_by_signature does with long lists.
  const auto select_and_attend = [&](int i) {
    return can_attend_arriving(queries(i)) && lists == shape.kv_heads &&
           select_in_cluster(queries(i), q.as<float>(), nets_of(i), keys_of(i), rule, shape.tokens,
                             coming.rows, budget, counts.as<std::int32_t>(), stream.get()) &&
           (attend_arriving_decode(queries(i), coming, shape.tokens, workspace.as<void>(), stream.get()),
            true);
  };
  const RowLists chosen = {.rows = rows.as<std::int32_t>(),
                           .counts = counts.as<std::int32_t>(),
                           .capacity = budget,
                           .lists_per_head = lists / shape.kv_heads,
                           .sink = sink,
                           .window = window};
  const auto attend = [&](int i) {
    attend_rows_decode(queries(i), chosen, shape.tokens, workspace.as<void>(), stream.get());
  };
  const auto fused = [&](int i) {
    return attend_by_signature(queries(i), q.as<float>(), nets_of(i), keys_of(i), rule, shape.tokens, coming,
                               counts.as<std::int32_t>(), workspace.as<void>(), stream.get());
  };
  const int calls = 64;
  const auto time = [&](const std::function<void(int)>& call) {
    return median_replay(stream, kReplays,
                         [&] {
                           for (int i = 0; i < calls; ++i) call(i);
                         }) /
           calls;
  };
  const double full =
      time([&](int i) { attend_full_decode(queries(i), shape.tokens, workspace.as<void>(), stream.get()); });
  const double whole = time([&](int i) { select(i, nullptr), attend(i); });
  const double one = fused(0) ? time([&](int i) { fused(i); }) : 0;
  const double arrived = select_and_attend(0) ? time([&](int i) { select_and_attend(i); }) : 0;
  const double choose = time([&](int i) { select(i, nullptr); });
  const double search = time([&](int i) { select(i, given.as<std::uint32_t>()); });
  const double attended = time(attend);
  std::printf(
      "| %d | %d/%d | %lldk | 1/%lld | %d%s%s | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f | %.1fx | "
      "%.0f |\n",
      shape.batch, shape.kv_heads, shape.query_heads, static_cast<long long>(shape.tokens >> 10),
      static_cast<long long>(shape.part), 32 * shape.words, shape.own_sets ? ", own" : "",
      shape.per_query_head ? ", per query head" : "", one, arrived, whole, choose, search, attended, full,
      full / (one > 0 ? one : whole), signing);
  std::fflush(stdout);
}

}  // namespace
}  // namespace lode::cuda::bench

int main() {
  using lode::cuda::bench::Shape;
  std::printf(
      "| batch | heads | keys | share | bits | together us | as rows come | two | select | search | attend | "
      "full | | sign "
      "all keys us |\n"
      "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
  const std::int64_t k = 1024;
  for (const Shape& shape :
       {Shape{1, 8, 32, 32 * k, 32, 1, false, false}, Shape{1, 8, 32, 128 * k, 32, 1, false, false},
        Shape{1, 8, 32, 128 * k, 16, 1, false, false}, Shape{1, 8, 32, 512 * k, 32, 1, false, false},
        Shape{1, 8, 32, 1024 * k, 64, 1, false, false}, Shape{1, 8, 32, 128 * k, 32, 4, false, false},
        Shape{1, 8, 32, 128 * k, 32, 1, true, true}, Shape{8, 8, 32, 128 * k, 32, 1, false, false},
        Shape{1, 1, 4, 171 * k, 32, 1, false, false}})
    run(shape);
}
