// SPDX-License-Identifier: Apache-2.0
#include "engine/batch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <mutex>
#include <new>
#include <set>

#include "base/finite.h"
#include "lodestone/error.h"
#include "select/of_layers.h"

namespace lode {

namespace {

/// Rows that attend the same way.
struct Group {
  std::vector<BatchRow*> rows;
  std::vector<SequenceTokens> sequences;
  std::vector<ForwardWork> work;
  ForwardHooks hooks;                             ///< of all rows, where some look for sources
  std::vector<std::vector<Selector*>> listeners;  ///< [L] of rows that are told; else empty
};

const AttachedMethod* method_of(const BatchRow& row) {
  return row.sparse ? row.sequence->method() : nullptr;
}

/// Whether nobody looks into the row, but that its sources may be wanted where it attends to all keys: there no index needs the
/// sequence's own number (see step_of).
bool shares_a_step(const BatchRow& row) {
  return row.hooks == nullptr ||
         (method_of(row) == nullptr && !row.told && row.audit == nullptr && row.hooks->mass &&
          !row.hooks->attended && !row.hooks->layer_done && !row.hooks->samples && !row.hooks->compare);
}

/// Whether two rows can be in one step. Rows without a document, or that are looked into, have their own.
bool attend_alike(const BatchRow& a, const BatchRow& b) {
  return !a.sequence->document().rows.empty() && shares_a_step(a) && shares_a_step(b) &&
         (a.hooks == nullptr) == (b.hooks == nullptr) && &a.sequence->document() == &b.sequence->document() &&
         method_of(a) == method_of(b) && a.told == b.told &&
         (!a.told || a.sequence->method() == b.sequence->method()) && a.phase == b.phase && a.rows == b.rows;
}

/// Generated tokens come first, so that they share their products.
std::vector<Group> groups_of(std::span<BatchRow* const> rows) {
  std::vector<Group> groups;
  for (const bool narrow : {true, false}) {
    for (BatchRow* const row : rows) {
      if ((row->phase == Phase::generation) != narrow) continue;
      const auto found = std::find_if(groups.begin(), groups.end(), [&](const Group& group) {
        return attend_alike(*group.rows.front(), *row);
      });
      Group& group = found == groups.end() ? groups.emplace_back() : *found;
      group.rows.push_back(row);
    }
  }
  return groups;
}

/// Each row's hook sees what is its own: without a method, a row's number is its place in the group.
const ForwardHooks* hooks_of(Group& group) {
  const ForwardHooks* const first = group.rows.front()->hooks;
  if (first == nullptr || group.rows.size() == 1) return first;
  group.hooks.least_mass = std::numeric_limits<float>::max();
  for (const BatchRow* const row : group.rows)
    group.hooks.least_mass = std::min(group.hooks.least_mass, row->hooks->least_mass);
  group.hooks.mass = [&group](const LayerGeometry& geometry, const AttentionMass& mass) {
    group.rows[static_cast<std::size_t>(mass.sequence)]->hooks->mass(geometry, mass);
  };
  return &group.hooks;
}

Step step_of(Group& group) {
  const BatchRow& first = *group.rows.front();
  const AttachedMethod* const method = method_of(first);
  const Document::Impl& document = first.sequence->document();
  group.work.resize(group.rows.size());
  for (BatchRow* const row : group.rows)
    group.sequences.push_back({.tokens = row->tokens,
                               .kv = &*row->sequence->tail,
                               .id = method == nullptr && !row->told
                                         ? static_cast<std::int32_t>(group.sequences.size())
                                         : row->sequence->id,
                               .far_limit = row->sequence->far_limit,
                               .document = document.rows});
  if (first.told) group.listeners = first.sequence->prompt_listeners();
  Step step = {.sequences = group.sequences,
               .phase = first.phase,
               .selectors = {},
               .dense = {},
               .listeners = group.listeners,
               .hooks = hooks_of(group),
               .given = {},
               .rows = first.rows,
               .rope = &document.parts().rope,
               .by_id = first.sequence->by_id,
               .choosing = &document.choosing,
               .work = group.work,
               .distributed = document.distributed.get()};
  if (method != nullptr) {
    step.selectors = method->selectors;
    if (first.audit != nullptr) step.selectors = first.audit->without_fallen(step.selectors);
    step.dense = method->spec.dense;
  }
  return step;
}

std::exception_ptr not_finite() {
  return std::make_exception_ptr(
      RunError("the model gave a logit that is not a finite number: weights or cached keys are damaged or "
               "overflow"));
}

/// Why a step failed, in a catch block.
std::exception_ptr reason_of(const BatchRow& row) {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return std::make_exception_ptr(RunError(fmt::format(
        "out of memory in a step of {} tokens behind {}: fewer or shorter questions at once need less",
        row.tokens.size(), row.sequence->tokens())));
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

BatchRunner::BatchRunner(std::shared_ptr<const Model> model, std::int64_t tail_bytes, Unison* unison)
    : model_(std::move(model)),
      llama_(model_->config(), model_->impl().weights, model_->pool()),
      tail_bytes_(tail_bytes),
      unison_(unison) {}

void BatchRunner::run(std::span<BatchRow> rows) {
  std::vector<BatchRow*> on_cpu, on_gpu;
  for (BatchRow& row : rows) (row.sequence->on_gpu() ? on_gpu : on_cpu).push_back(&row);
  apart_.clear();
  if (!on_gpu.empty()) run_or_find_fault(on_gpu, gpu_logits_, [this](auto some) { run_on_gpu(some); });
  if (!on_cpu.empty()) run_or_find_fault(on_cpu, logits_, [this](auto some) { run_together(some); });
}

/// Alone each gives the same bits, so that the one at fault is found without harm to the others.
void BatchRunner::run_or_find_fault(std::span<BatchRow* const> rows, std::vector<float>& logits,
                                    const std::function<void(std::span<BatchRow* const>)>& step) {
  try {
    return step(rows);
  } catch (const Interrupted&) {
    throw;
  } catch (const RankLost&) {
    throw;
  } catch (...) {
    if (rows.size() == 1) rows.front()->error = reason_of(*rows.front());
  }
  for (std::size_t i = 0; rows.size() > 1 && i < rows.size(); ++i) {
    try {
      if (rows[i]->again) rows[i]->again();
      step(rows.subspan(i, 1));
      if (!rows[i]->logits.empty()) {
        apart_.push_back(std::move(logits));
        rows[i]->logits = apart_.back();
        logits = {};
      }
    } catch (const Interrupted&) {
      throw;
    } catch (const RankLost&) {
      throw;
    } catch (...) {
      rows[i]->error = reason_of(*rows[i]);
    }
  }
}

void run_in_place(BatchRow& row) {
  Sequence& sequence = *row.sequence;
  Context::Impl& context = sequence.context();
  row.work = {};
  row.token = -1;
  row.logits = {};
  // An audit looks at what attends sparsely alone.
  const bool looked_at =
      row.hooks != nullptr && (row.hooks->mass || (row.sparse && sequence.method() != nullptr));
  try {
    // One token's logits are those of all.
    const LogitRows rows =
        row.tokens.size() == 1 && row.rows == LogitRows::all ? LogitRows::last_of_each : row.rows;
    row.work = context.step(row.tokens, {.method = row.sparse ? sequence.method_id() : kDense,
                                         .phase = row.phase,
                                         .rows = rows,
                                         .hooks = looked_at ? row.hooks : nullptr,
                                         .audit = row.audit,
                                         .told = row.told ? sequence.method_id() : kDense});
    if (context.gpu != nullptr) row.tiers = context.gpu->take_tier_work();
    if (rows != LogitRows::none) row.logits = context.logits;
  } catch (const Interrupted&) {
    throw;
  } catch (...) {
    row.error = reason_of(row);
  }
}

void BatchRunner::run_together(std::span<BatchRow* const> rows) {
  std::vector<Group> groups;
  std::vector<BatchRow*> order;
  try {
    run_alike(unison_, [&] {
      std::vector<Step> steps;
      groups = groups_of(rows);
      for (Group& group : groups) {
        steps.push_back(step_of(group));
        order.insert(order.end(), group.rows.begin(), group.rows.end());
      }
      llama_.forward(steps, logits_);
    });
  } catch (...) {  // selectors may have seen tokens that do not count
    for (BatchRow* const row : rows) row->sequence->roll_back(row->sequence->tokens());
    throw;
  }
  for (Group& group : groups)
    for (std::size_t i = 0; i < group.rows.size(); ++i) group.rows[i]->work = group.work[i];
  finish(order, logits_);
}

namespace {

std::shared_ptr<const GpuModel> gpu_model_of(const Context::Impl& context) {
  return context.model->impl().gpu_model(context.options.gpu_memory, gpu_group(context.options));
}

}  // namespace

bool asked_together(const Context::Impl& document, MethodId method) {
  if (document.gpu == nullptr) return true;
  if (document.gpu->keys_on_host() ||
      !why_no_gpu_batch(*gpu_model_of(document), document.options.kv_type).empty())
    return false;
  if (method == kDense) return true;
  const AttachedMethod& attached = document.methods.at(static_cast<std::size_t>(method));
  return !goes_by_mass(attached.selectors) && !chooses_by_prompt(attached);
}

ModelOnGpu put_on_gpu(const Model& model, DType kv_type) {
  ModelOnGpu there = {.model = model.impl().gpu_model(0)};
  const std::int64_t before = gpu_info().free_bytes;
  const auto batch = make_gpu_batch(model.config(), there.model, {.kv_type = kv_type, .tail_tokens = 1});
  there.step_bytes = std::max<std::int64_t>(0, before - gpu_info().free_bytes);
  return there;
}

GpuBatch& BatchRunner::gpu_batch(const Sequence& sequence) {
  const Context::Impl& document = sequence.document().parts();
  std::unique_ptr<GpuBatch>& batch = gpu_[document.options.kv_type];
  if (batch == nullptr) {
    const std::int64_t bytes = tail_bytes_ > 0 ? tail_bytes_ : gpu_info().free_bytes / 2;
    batch = make_gpu_batch(
        model_->config(), gpu_model_of(document),
        {.kv_type = document.options.kv_type, .tail_tokens = bytes / document.kv.shape().token_bytes()});
  }
  return *batch;
}

bool BatchRunner::reserve(Sequence& sequence) {
  if (sequence.on_gpu() && sequence.gpu_tail == nullptr)
    sequence.gpu_tail = gpu_batch(sequence).branch(*sequence.document().parts().gpu, sequence.room);
  return !sequence.on_gpu() || sequence.gpu_tail != nullptr;
}

/// Rows of one type of keys and values take their step together.
void BatchRunner::run_on_gpu(std::span<BatchRow* const> rows) {
  std::map<DType, std::vector<GpuBatchRow>> steps;
  std::map<DType, std::vector<BatchRow*>> of_type;
  std::vector<std::unique_lock<std::mutex>> choosing;
  std::set<std::mutex*> held;
  for (BatchRow* const row : rows) {
    Sequence& sequence = *row->sequence;
    const Document::Impl& document = sequence.document();
    GpuContext& context = *document.parts().gpu;
    if (row->audit != nullptr)
      throw InputError("questions asked together on a GPU: expected none that is audited");
    LODE_ASSERT(row->hooks == nullptr || (row->phase == Phase::question && !row->sparse));
    if (!reserve(sequence))
      throw RunError(
          fmt::format("expected room on the GPU for {} tokens of a question and answer, found it taken by "
                      "other sequences",
                      sequence.room));
    held.insert(&document.choosing);
    const AttachedMethod* const method = method_of(*row);
    const bool on_host = method != nullptr && sequence.host_chooses();
    row->work = {};
    row->token = -1;
    const DType type = document.parts().options.kv_type;
    of_type[type].push_back(row);
    steps[type].push_back({.document = &context,
                           .tail = sequence.gpu_tail.get(),
                           .earlier = std::ssize(sequence.ids),
                           .tokens = row->tokens,
                           .phase = row->phase,
                           .selectors = method != nullptr ? method->selectors : std::span<Selector* const>{},
                           .dense = method != nullptr ? method->spec.dense : LocalWindow{},
                           .far_limit = sequence.far_limit,
                           .kv = on_host ? &document.parts().kv : nullptr,
                           .id = sequence.id,
                           .by_id = sequence.by_id,
                           .rows = row->rows,
                           .rope = &document.parts().rope,
                           .work = &row->work,
                           .hooks = row->hooks,
                           .largest = row->largest ? &row->token : nullptr});
  }
  for (std::mutex* const mutex : held)
    choosing.emplace_back(*mutex);  // by address: two runners never wait for each other
  gpu_logits_.clear();
  std::vector<BatchRow*> order;
  std::vector<float> logits;
  for (const auto& [type, step] : steps) {
    try {
      gpu_batch(*of_type[type].front()->sequence).forward(step, logits);
    } catch (...) {  // selectors may have seen tokens that do not count
      choosing.clear();
      for (BatchRow* const row : rows)
        if (row->sequence->host_chooses()) row->sequence->roll_back(row->sequence->tokens());
      throw;
    }
    gpu_logits_.empty()
        ? gpu_logits_.swap(logits)
        : static_cast<void>(gpu_logits_.insert(gpu_logits_.end(), logits.begin(), logits.end()));
    order.insert(order.end(), of_type[type].begin(), of_type[type].end());
  }
  choosing.clear();  // a sequence whose logits are not numbers is cut back, which takes its document's lock
  finish(order, gpu_logits_);
}

/// Hands out logits in the order of the steps, and lets the tokens count.
void BatchRunner::finish(std::span<BatchRow* const> rows, std::vector<float>& logits) {
  const auto vocab = static_cast<std::size_t>(model_->config().vocab);
  std::size_t at = 0;
  for (BatchRow* const row : rows) {
    const std::size_t count = row->rows == LogitRows::none || row->token >= 0 ? 0
                              : row->rows == LogitRows::all                   ? row->tokens.size()
                                                                              : 1;
    row->logits = std::span(logits).subspan(at, count * vocab);
    at += count * vocab;
    Sequence& sequence = *row->sequence;
    if (!all_finite(row->logits)) {
      row->error = not_finite();
      row->logits = {};
      sequence.roll_back(sequence.tokens());
      continue;
    }
    if (!sequence.on_gpu()) sequence.tail->commit(std::ssize(row->tokens));
    sequence.ids.insert(sequence.ids.end(), row->tokens.begin(), row->tokens.end());
  }
}

}  // namespace lode
