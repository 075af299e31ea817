// SPDX-License-Identifier: Apache-2.0
#include "cluster/rank_prefill.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "attend/attend.h"
#include "base/cancel.h"
#include "cluster/merge_states.h"
#include "cluster/shard_attention.h"
#include "kernels/attend_span.h"
#include "kernels/kernels.h"
#include "lodestone/error.h"
#include "model/distributed_attention.h"

namespace lode {

namespace {

/// Rows [begin, end) of a matrix.
std::span<float> rows_of(std::span<float> matrix, const Share& rows, std::int64_t cols) {
  return matrix.subspan(static_cast<std::size_t>(rows.begin * cols),
                        static_cast<std::size_t>(rows.count() * cols));
}

/// Attention of one chunk's queries over the rows of all ranks' pieces.
class PrefillAttention final : public DistributedAttention {
 public:
  PrefillAttention(Communicator& ranks, const PrefillPlan& plan) : ranks_(ranks), plan_(plan) {}
  void begin(std::int64_t chunk) { chunk_ = chunk; }
  void attend(const DistributedCall& call) override;

 private:
  /// Tokens of each rank's piece, counted from the chunk's first.
  std::vector<Share> pieces() const;
  void attend_own_rows(const DistributedCall& call, const Share& own, AttentionState states) const;

  Communicator& ranks_;
  const PrefillPlan& plan_;
  std::int64_t chunk_ = 0;
  std::vector<float> q_, output_, lse_;  // [T of the chunk, Hq, d], [T, Hq, d], [T, Hq]
};

std::vector<Share> PrefillAttention::pieces() const {
  std::vector<Share> pieces;
  const std::int64_t first = plan_.chunk_at(chunk_).begin;
  for (int r = 0; r < ranks_.size(); ++r) {
    const Share piece = plan_.piece_of(chunk_, r);
    pieces.push_back({piece.begin - first, piece.end - first});
  }
  return pieces;
}

/// Queries before this rank's piece see the rows of earlier chunks, those behind it the piece's too; its own see the
/// piece as far as they have come.
void PrefillAttention::attend_own_rows(const DistributedCall& call, const Share& own,
                                       AttentionState states) const {
  const LayerGeometry& g = call.geometry;
  const KvLayer& kv = call.tails.front().kv;
  const std::int64_t cols = std::int64_t{g.query_heads} * g.head_dim, all = plan_.chunk_at(chunk_).count();
  std::vector<KvRows> heads(kv.heads.begin(), kv.heads.end());
  const auto run = [&](const Share& queries, std::int64_t rows, bool causal) {
    const std::int64_t first = queries.begin * g.query_heads;
    float* const output = states.output + queries.begin * cols;
    if (queries.count() == 0) return;
    if (rows == 0)
      return AttentionState{output, states.lse + first, queries.count() * g.query_heads, g.head_dim}.clear();
    for (KvRows& head : heads) head.rows = rows;
    const std::span<const float> q(q_.data() + queries.begin * cols,
                                   static_cast<std::size_t>(queries.count() * cols));
    if (causal)
      return attend_prefill(q, queries.count(), g.query_heads, heads, g.scale, output, states.lse + first,
                            *g.pool);
    attend_span(q, queries.count(), g.query_heads, heads, rows, g.scale, output, states.lse + first, *g.pool);
  };
  run({0, own.begin}, kv.tokens - own.count(), false);
  run(own, kv.tokens, true);
  run({own.end, all}, kv.tokens, false);
}

void PrefillAttention::attend(const DistributedCall& call) {
  check_cancel();
  LODE_ASSERT(call.blocks.size() == 1 && call.window == 0 && call.selector == nullptr);
  const QueryBlock& block = call.blocks.front();
  const std::int64_t heads = call.geometry.query_heads, d = call.geometry.head_dim;
  const std::int64_t tokens = plan_.chunk_at(chunk_).count();
  const std::vector<Share> pieces = this->pieces();
  const Share own = pieces[static_cast<std::size_t>(ranks_.rank())];
  q_.resize(static_cast<std::size_t>(tokens * heads * d));
  output_.resize(q_.size());
  lse_.resize(static_cast<std::size_t>(tokens * heads));
  std::ranges::copy(block.q, rows_of(q_, own, heads * d).begin());
  std::vector<std::span<std::byte>> parts;
  for (const Share& piece : pieces) parts.push_back(std::as_writable_bytes(rows_of(q_, piece, heads * d)));
  ranks_.all_gather(parts);
  const AttentionState states = {output_.data(), lse_.data(), tokens * heads, d};
  attend_own_rows(call, own, states);
  std::vector<Share> rows;
  for (const Share& piece : pieces) rows.push_back({piece.begin * heads, piece.end * heads});
  merge_own_rows(ranks_, states, rows);
  std::ranges::copy(rows_of(output_, own, heads * d), call.outputs.front());
  if (!call.lse.empty()) std::ranges::copy(rows_of(lse_, own, heads), call.lse.front());
  call.step.work.front().attend += count_full({&block, 1}, call.geometry);
}

void expect_model(const ModelConfig& config) {
  const auto refuse = [](const char* what) {
    throw InputError(
        fmt::format("over several ranks: expected a model whose layers all attend to all earlier tokens, "
                    "found {}: index its texts "
                    "on one machine, and ask those files over ranks",
                    what));
  };
  for (int layer = 0; layer < config.layers; ++layer) {
    if (config.plan.layer(layer).recurrent) refuse("recurrent layers");
    if (config.plan.layer(layer).window > 0) refuse("layers with a sliding window");
  }
  expect_like_layers(config, "over several ranks");
}

void expect_no_listeners(const Context::Impl& c) {
  const bool any = std::ranges::any_of(c.listeners, [](const auto& layer) { return !layer.empty(); });
  if (any)
    throw InputError(
        "over several ranks: expected methods that index keys alone, found one that learns from the reading "
        "itself: "
        "index the text on one machine");
}

/// Reads this rank's pieces; their rows follow each other in the store.
class PieceReader {
 public:
  PieceReader(Context::Impl& c, const PrefillPlan& plan, Communicator& ranks, const PrefillWatch& watch)
      : c_(c),
        plan_(plan),
        rank_(ranks.rank()),
        watch_(watch),
        attention_(ranks, plan),
        rows_(shape(c, plan, rank_)) {
    if (watch.layer_done) hooks_.layer_done = [&watch](int, std::span<const float>) { watch.layer_done(); };
  }
  void read(std::span<const TokenId> tokens);
  const KvStore& rows() const { return rows_; }

 private:
  static KvShape shape(const Context::Impl& c, const PrefillPlan& plan, int rank) {
    KvShape shape = c.kv.shape();
    shape.max_tokens = 0;
    for (std::int64_t chunk = 0; chunk < plan.chunks(); ++chunk)
      shape.max_tokens += plan.piece_of(chunk, rank).count();
    return shape;
  }
  void forward(std::span<const TokenId> piece, std::int64_t begin);

  Context::Impl& c_;
  const PrefillPlan& plan_;
  const int rank_;
  const PrefillWatch& watch_;
  PrefillAttention attention_;
  KvStore rows_;
  ForwardHooks hooks_;
};

void PieceReader::read(std::span<const TokenId> tokens) {
  rows_.expect(rows_.shape().max_tokens);
  for (std::int64_t chunk = 0; chunk < plan_.chunks(); ++chunk) {
    const Share piece = plan_.piece_of(chunk, rank_);
    attention_.begin(chunk);
    forward(tokens.subspan(static_cast<std::size_t>(piece.begin), static_cast<std::size_t>(piece.count())),
            piece.begin);
    if (watch_.chunk_done) watch_.chunk_done(plan_.chunk_at(chunk).end);
  }
}

/// To the forward pass the tokens that are not here are a document in front of the rows that are.
void PieceReader::forward(std::span<const TokenId> piece, std::int64_t begin) {
  const std::int64_t heads = std::int64_t{c_.config.layers} * c_.config.kv_heads;
  const std::vector<KvRows> elsewhere(
      static_cast<std::size_t>(heads),
      {.type = c_.options.kv_type, .rows = begin - rows_.tokens(), .d = c_.config.head_dim});
  const SequenceTokens sequence = {.tokens = piece, .kv = &rows_, .document = elsewhere};
  ForwardWork work;
  const Step step = {.sequences = {&sequence, 1},
                     .phase = Phase::context,
                     .hooks = hooks_.layer_done ? &hooks_ : nullptr,
                     .work = {&work, 1},
                     .distributed = &attention_};
  std::vector<float> no_logits;
  c_.llama.forward(step, c_.rope, LogitRows::none, no_logits);
}

/// Rows of one head and part on their way to the ranks that keep them.
class RowMove {
 public:
  RowMove(const PrefillPlan& plan, Communicator& ranks) : plan_(plan), ranks_(ranks) {}
  /// `from`: this rank's rows in the order of its pieces; `to`: where the text's first row would lie.
  void move(std::span<const std::byte> from, std::int64_t row_bytes, std::byte* to);

 private:
  /// Calls body(run of the rank's own rows, the first one's token) for those that fall into another's share.
  void for_runs(int from, int to, const auto& body) const;

  const PrefillPlan& plan_;
  Communicator& ranks_;
};

void RowMove::for_runs(int from, int to, const auto& body) const {
  const Share wanted = token_share(plan_.tokens, to, plan_.ranks);
  std::int64_t row = 0;
  for (std::int64_t chunk = 0; chunk < plan_.chunks(); ++chunk) {
    const Share piece = plan_.piece_of(chunk, from);
    const Share both = {std::max(piece.begin, wanted.begin), std::min(piece.end, wanted.end)};
    if (both.begin < both.end)
      body(Share{row + both.begin - piece.begin, row + both.end - piece.begin}, both.begin);
    row += piece.count();
  }
}

void RowMove::move(std::span<const std::byte> from, std::int64_t row_bytes, std::byte* to) {
  std::vector<std::vector<std::byte>> out(static_cast<std::size_t>(plan_.ranks)), in(out);
  std::vector<std::span<const std::byte>> sent;
  std::vector<std::span<std::byte>> received;
  for (int r = 0; r < plan_.ranks; ++r) {
    std::vector<std::byte>& message = out[static_cast<std::size_t>(r)];
    for_runs(ranks_.rank(), r, [&](const Share& rows, std::int64_t) {
      const std::byte* const first = from.data() + rows.begin * row_bytes;
      message.insert(message.end(), first, first + rows.count() * row_bytes);
    });
    std::int64_t coming = 0;
    for_runs(r, ranks_.rank(), [&](const Share& rows, std::int64_t) { coming += rows.count(); });
    in[static_cast<std::size_t>(r)].resize(static_cast<std::size_t>(coming * row_bytes));
    sent.emplace_back(message);
    received.emplace_back(in[static_cast<std::size_t>(r)]);
  }
  ranks_.exchange(sent, received);
  for (int r = 0; r < plan_.ranks; ++r) {
    const std::byte* at = in[static_cast<std::size_t>(r)].data();
    for_runs(r, ranks_.rank(), [&](const Share& rows, std::int64_t token) {
      const auto bytes = static_cast<std::size_t>(rows.count() * row_bytes);
      std::memcpy(to + token * row_bytes, at, bytes);
      at += bytes;
    });
  }
}

void move_rows(const KvStore& pieces, const PrefillPlan& plan, Communicator& ranks, KvStore& kv) {
  using Part = KvStore::Part;
  RowMove mover(plan, ranks);
  const KvShape& shape = kv.shape();
  for (int layer = 0; layer < shape.layers; ++layer) {
    check_cancel();
    for (int head = 0; head < shape.kv_heads; ++head) {
      for (const Part part : {Part::k, Part::v, Part::k_scale, Part::v_scale}) {
        const bool scale = part == Part::k_scale || part == Part::v_scale;
        const bool key = part == Part::k || part == Part::k_scale;
        if ((scale && shape.type != DType::q8) || !shape.holds(layer, head, key)) continue;
        const std::span<const std::byte> rows = pieces.rows(layer, head, part);
        mover.move(rows, std::ssize(rows) / pieces.tokens(),
                   kv.rows_to_write(layer, head, part, plan.tokens));
      }
    }
  }
  kv.commit(plan.tokens);
}

}  // namespace

std::int64_t PrefillPlan::chunks() const {
  const std::int64_t at_once = chunk * ranks;
  return std::clamp<std::int64_t>((tokens + at_once - 1) / at_once, 1, tokens / ranks);
}

Share PrefillPlan::chunk_at(std::int64_t index) const {
  const std::int64_t all = chunks();
  return {tokens * index / all, tokens * (index + 1) / all};
}

Share PrefillPlan::piece_of(std::int64_t index, int rank) const {
  const Share whole = chunk_at(index);
  const Share piece = share_of(whole.count(), index % 2 == 0 ? rank : ranks - 1 - rank, ranks);
  return {whole.begin + piece.begin, whole.begin + piece.end};
}

Context read_over_ranks(std::shared_ptr<const Model> model, const ContextOptions& options,
                        std::span<const TokenId> tokens, std::span<const Spec> methods, Communicator& ranks,
                        const PrefillWatch& watch) {
  expect_model(model->config());
  if (options.device == Device::cuda)
    throw InputError("over several ranks: expected --device cpu, found cuda");
  if (std::ssize(tokens) < ranks.size())
    throw InputError(fmt::format("expected a text of at least {} tokens, one for each rank, found {}",
                                 ranks.size(), tokens.size()));
  for (const Spec& spec : methods) expect_asked_over_ranks(model, spec);
  Context context(std::move(model), options);
  Context::Impl& c = context.impl();
  c.require_room(std::ssize(tokens));
  c.share = {&ranks, std::ssize(tokens), token_share(std::ssize(tokens), ranks.rank(), ranks.size())};
  for (const Spec& spec : methods) context.attach(spec);
  expect_no_listeners(c);
  const PrefillPlan plan = {.tokens = std::ssize(tokens), .chunk = c.options.chunk, .ranks = ranks.size()};
  PieceReader reader(c, plan, ranks, watch);
  reader.read(tokens);
  move_rows(reader.rows(), plan, ranks, c.kv);
  c.ids.assign(tokens.begin(), tokens.end());
  return context;
}

namespace {

/// In place of ranks that are not there: a method is told that it shares its keys, and chooses none.
class AbsentRanks final : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void fail(const std::string&) noexcept override {}
  void expect_alive() override {}

 private:
  void transfer(std::span<const std::span<const std::byte>>, std::span<const std::span<std::byte>>) override {
    LODE_ASSERT(false);
  }
  void drop_messages() override {}
};

std::int64_t some_tokens(const Model& model) {
  return std::min<std::int64_t>(model.config().max_positions, 1024);
}

}  // namespace

void expect_asked_over_ranks(const std::shared_ptr<const Model>& model, const Spec& method) {
  Context context(model, {.max_tokens = some_tokens(*model)});
  context.attach(method);
  const bool wants_mass =
      std::ranges::any_of(context.impl().methods.back().selectors,
                          [](const Selector* one) { return one != nullptr && one->wants_mass(); });
  if (wants_mass) throw InputError(fmt::format("'{}': {}", method.str(), kNeedsMass));
}

void expect_shared_method(const std::shared_ptr<const Model>& model, const Spec& method) {
  expect_asked_over_ranks(model, method);
  const std::int64_t tokens = some_tokens(*model);
  AbsentRanks ranks;
  Context context(model, {.max_tokens = tokens});
  context.impl().share = {&ranks, tokens, token_share(tokens, ranks.rank(), ranks.size())};
  context.attach(method);
}

}  // namespace lode
