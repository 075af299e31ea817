// SPDX-License-Identifier: Apache-2.0
#include "lab/bench/batch.h"

#include <algorithm>
#include <optional>
#include <thread>

#include "base/cancel.h"
#include "base/threads.h"
#include "engine/document.h"
#include "gpu/batch_backend.h"
#include "lab/bench/artefact.h"
#include "lab/bench/decode.h"
#include "lodestone/scheduler.h"

namespace lode {
namespace {

constexpr int kWarmUp = 3;
constexpr std::int64_t kSmallChunk = 256;  // nothing is prefilled: little memory beside the keys
constexpr std::chrono::microseconds kLook(300);
constexpr std::int64_t kStepsBeside = 1 << 15;  // that a prefill may take

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Tokens that a sequence may generate.
std::int64_t most_steps(const BatchBenchOptions& options) {
  return options.sequences + kWarmUp + options.steps + 32 + (options.prefill > 0 ? kStepsBeside : 0);
}

std::shared_ptr<const Document> make_document(const std::shared_ptr<const Model>& model,
                                              const BatchBenchOptions& options, std::span<const Spec> specs,
                                              int number) {
  const std::int64_t room = options.tail + most_steps(options) + 32;
  Context context(model, {.kv_type = options.kv_type,
                          .device = options.device,
                          .gpu_memory = options.gpu_memory,
                          .max_tokens = options.context + room,
                          .chunk = options.device == Device::cuda ? kSmallChunk : 0,
                          .seed = options.seed});
  for (const Spec& spec : specs) context.attach(spec);
  fill_context(context, {.context = options.context,
                         .kv_type = options.kv_type,
                         .device = options.device,
                         .kind = options.kind,
                         .skew = options.skew,
                         .seed = hash_seed(options.seed, number)});
  context.build_indexes();
  return Document::Impl::share(std::move(context), {}, {});
}

/// One run: the sequences of one row of the result.
class Measured {
 public:
  Measured(const std::shared_ptr<const Model>& model, const BatchBenchOptions& options,
           std::span<const std::shared_ptr<const Document>> documents, std::span<const Spec> specs)
      : options_(options),
        documents_(documents),
        specs_(specs),
        scheduler_(model, scheduler_options(options)) {}

  BatchBenchRow measure(const std::function<double(std::int64_t)>& microseconds_for) {
    Rng rng(options_.seed);
    std::vector<Ticket<Answer>> tickets;
    for (int i = 0; i < options_.sequences; ++i) tickets.push_back(scheduler_.submit(request(i, rng)));
    wait_for([&](const SchedulerStats& s) { return s.prompt_tokens == options_.sequences * options_.tail; });
    wait_for(
        [from = scheduler_.stats().steps](const SchedulerStats& s) { return s.steps >= from + kWarmUp; });
    const auto start = std::chrono::steady_clock::now();
    const std::int64_t first = scheduler_.stats().steps;
    wait_for([&](const SchedulerStats& s) { return s.steps >= first + options_.steps; });
    const std::int64_t steps = scheduler_.stats().steps - first;
    const double seconds = seconds_since(start);
    BatchBenchRow row;
    if (options_.prefill > 0) read_beside(row.beside);
    for (const auto& ticket : tickets) scheduler_.cancel(ticket.id);
    if (options_.prefill > 0) {
      for (const auto& ticket : tickets) ticket.result.wait();
      const auto alone = std::chrono::steady_clock::now();
      read_document().result.get();
      row.beside.alone_seconds = seconds_since(alone);
    }
    row.ms_step = 1e3 * seconds / static_cast<double>(steps);
    row.tokens_per_second = 1e3 * options_.sequences / row.ms_step;
    row.bytes = bytes_of_step(tickets);
    row.limit_ms = 1e-3 * microseconds_for(row.bytes);
    const bool full =
        std::all_of(specs_.begin(), specs_.end(), [](const Spec& s) { return s.name == "full"; });
    row.shared = full ? (options_.sequences + options_.documents - 1) / options_.documents : 1;
    return row;
  }

 private:
  static SchedulerOptions scheduler_options(const BatchBenchOptions& options) {
    // On a GPU addresses are reserved for so much, memory for what is used.
    const std::int64_t memory = std::int64_t{1} << (options.device == Device::cuda ? 36 : 40);
    return {.max_sequences = options.sequences, .memory = memory, .chunk = options.tail};
  }

  const Spec& spec_of(int sequence) const {
    return specs_[static_cast<std::size_t>(sequence) % specs_.size()];
  }
  const Document& document_of(int sequence) const {
    return *documents_[static_cast<std::size_t>(sequence) % documents_.size()];
  }

  Request request(int sequence, Rng& rng) const {
    Request request = {.document = documents_[static_cast<std::size_t>(sequence) % documents_.size()],
                       .attention = spec_of(sequence),
                       .options = {.max_new_tokens = most_steps(options_), .stop_at_eos = false}};
    const auto vocab = static_cast<std::uint64_t>(scheduler_.model()->config().vocab);
    for (std::int64_t i = 0; i < options_.tail; ++i)
      request.prompt.push_back(static_cast<TokenId>(rng.below(vocab)));
    return request;
  }

  Ticket<std::shared_ptr<const Document>> read_document() {
    Rng rng(hash_seed(options_.seed, 1));
    const auto vocab = static_cast<std::uint64_t>(scheduler_.model()->config().vocab);
    std::vector<TokenId> tokens;
    for (std::int64_t i = 0; i < options_.prefill; ++i)
      tokens.push_back(static_cast<TokenId>(rng.below(vocab)));
    return scheduler_.read(std::move(tokens), {},
                           {.kv_type = options_.kv_type, .max_tokens = options_.prefill + 1});
  }

  /// While the sequences generate: when steps end is seen by their number.
  void read_beside(BesidePrefill& beside) {
    const auto start = std::chrono::steady_clock::now();
    const auto ticket = read_document();
    const std::int64_t first = scheduler_.stats().steps;
    std::int64_t last = first;
    auto ended = start;
    while (ticket.result.wait_for(kLook) != std::future_status::ready) {
      check_cancel();
      const std::int64_t steps = scheduler_.stats().steps;
      if (steps == last) continue;
      const double took = 1e3 * seconds_since(ended) / static_cast<double>(steps - last);
      if (last > first) beside.longest_ms_step = std::max(beside.longest_ms_step, took);
      last = steps;
      ended = std::chrono::steady_clock::now();
    }
    beside.seconds = seconds_since(start);
    beside.ms_step = 1e3 * beside.seconds / static_cast<double>(std::max<std::int64_t>(1, last - first));
  }

  void wait_for(const auto& reached) const {
    while (!reached(scheduler_.stats())) {
      check_cancel();
      std::this_thread::sleep_for(kLook);
    }
  }

  /// Weights once; of full attention each document once, and the tails; of other methods what each sequence's
  /// tokens read on average.
  std::int64_t bytes_of_step(std::span<const Ticket<Answer>> tickets) const {
    std::int64_t bytes = scheduler_.model()->weight_bytes();
    std::vector<bool> read(documents_.size());
    for (int i = 0; i < options_.sequences; ++i) {
      const Document& document = document_of(i);
      const Answer answer = tickets[static_cast<std::size_t>(i)].result.get();
      const WorkReport& work = answer.generation.work;
      if (spec_of(i).name != "full") {
        bytes += (work.kv_bytes + work.selector_bytes) / std::max<std::int64_t>(1, work.tokens);
        continue;
      }
      const std::int64_t own = options_.tail + options_.steps;
      const std::int64_t token_bytes = document.impl().parts().kv.shape().token_bytes();
      bytes += own * token_bytes;
      const std::size_t d = static_cast<std::size_t>(i) % documents_.size();
      if (!read[d]) bytes += document.tokens() * token_bytes;
      read[d] = true;
    }
    return bytes;
  }

  const BatchBenchOptions& options_;
  const std::span<const std::shared_ptr<const Document>> documents_;
  const std::span<const Spec> specs_;
  Scheduler scheduler_;
};

std::vector<std::span<const std::byte>> buffers_of(
    std::span<const std::shared_ptr<const Document>> documents) {
  std::vector<std::span<const std::byte>> buffers;
  for (const auto& document : documents) {
    for (const KvRows& rows : document->impl().rows) {
      const auto bytes = static_cast<std::size_t>(rows.rows * rows.row_bytes());
      buffers.emplace_back(rows.k, bytes);
      buffers.emplace_back(rows.v, bytes);
    }
  }
  return buffers;
}

}  // namespace

std::vector<BatchBenchRow> bench_batch(const std::shared_ptr<const Model>& model,
                                       const BatchBenchOptions& options, std::span<const Spec> wanted,
                                       const std::function<void(std::string_view)>& note) {
  const TemporaryFile functions;
  std::vector<Spec> specs;
  for (const Spec& spec : wanted)
    specs.push_back(with_made_up_hash(spec, model->config(), model->fingerprint(), functions));
  std::vector<std::shared_ptr<const Document>> documents;
  for (int i = 0; i < options.documents; ++i) {
    note("making document " + std::to_string(i + 1));
    documents.push_back(make_document(model, options, specs, i));
  }
  std::optional<ReadFloor> floor;
  if (options.device == Device::cpu) {
    const std::int64_t most = model->weight_bytes() + 2 * options.sequences * documents.front()->kv_bytes();
    floor.emplace(buffers_of(documents), most, model->pool());
    for (int i = 0; i < 3; ++i) floor->measure();
  }
  const auto microseconds_for = [&](std::int64_t bytes) {
    return floor ? floor->microseconds_for(bytes) : gpu_read_microseconds(bytes);
  };
  std::vector<BatchBenchRow> rows;
  for (std::size_t i = 0; i < (options.mixed ? 1 : specs.size()); ++i) {
    const std::size_t count = options.mixed ? specs.size() : 1;
    const auto of_run = std::span<const Spec>(specs).subspan(i, count);
    note("measuring");
    rows.push_back(Measured(model, options, documents, of_run).measure(microseconds_for));
    for (const Spec& spec : wanted.subspan(i, count))
      rows.back().attention += (rows.back().attention.empty() ? "" : " + ") + spec.str();
  }
  return rows;
}

}  // namespace lode
