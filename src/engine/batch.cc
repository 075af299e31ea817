// SPDX-License-Identifier: Apache-2.0
#include "engine/batch.h"

#include <algorithm>
#include <cmath>

#include "lodestone/error.h"

namespace lode {

namespace {

/// Rows that attend the same way.
struct Group {
  std::vector<BatchRow*> rows;
  std::vector<SequenceTokens> sequences;
  std::vector<ForwardWork> work;
};

const AttachedMethod* method_of(const BatchRow& row) {
  return row.sparse ? row.sequence->method() : nullptr;
}

/// Whether two rows can be in one step. Rows without a document, or that are looked into, have their own.
bool attend_alike(const BatchRow& a, const BatchRow& b) {
  return !a.sequence->document().rows.empty() && a.hooks == nullptr && b.hooks == nullptr &&
         &a.sequence->document() == &b.sequence->document() && method_of(a) == method_of(b) &&
         a.phase == b.phase && a.rows == b.rows;
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

Step step_of(Group& group) {
  const BatchRow& first = *group.rows.front();
  const AttachedMethod* const method = method_of(first);
  const Document::Impl& document = first.sequence->document();
  group.work.resize(group.rows.size());
  for (BatchRow* const row : group.rows)
    group.sequences.push_back({.tokens = row->tokens,
                               .kv = &row->sequence->tail,
                               .id = row->sequence->id,
                               .far_limit = row->sequence->far_limit,
                               .document = document.rows});
  Step step = {.sequences = group.sequences,
               .phase = first.phase,
               .selectors = {},
               .dense = {},
               .listeners = {},
               .hooks = first.hooks,
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

}  // namespace

BatchRunner::BatchRunner(std::shared_ptr<const Model> model)
    : model_(std::move(model)), llama_(model_->config(), model_->impl().weights, model_->pool()) {}

void BatchRunner::run(std::span<BatchRow> rows) {
  std::vector<BatchRow*> all;
  for (BatchRow& row : rows) all.push_back(&row);
  apart_.clear();
  try {
    return run_together(all);
  } catch (const Interrupted&) {
    throw;
  } catch (...) {
    if (rows.size() == 1) rows.front().error = std::current_exception();
  }
  // Alone each gives the same bits, so that the one at fault is found without harm to the others.
  for (std::size_t i = 0; rows.size() > 1 && i < rows.size(); ++i) {
    try {
      run_together({&all[i], 1});
      if (!rows[i].logits.empty()) {
        apart_.push_back(std::move(logits_));
        rows[i].logits = apart_.back();
        logits_ = {};
      }
    } catch (const Interrupted&) {
      throw;
    } catch (...) {
      rows[i].error = std::current_exception();
    }
  }
}

void BatchRunner::run_together(std::span<BatchRow* const> rows) {
  std::vector<Group> groups = groups_of(rows);
  std::vector<Step> steps;
  std::vector<BatchRow*> order;
  for (Group& group : groups) {
    steps.push_back(step_of(group));
    order.insert(order.end(), group.rows.begin(), group.rows.end());
  }
  try {
    llama_.forward(steps, logits_);
  } catch (...) {  // selectors may have seen tokens that do not count
    for (BatchRow* const row : rows) row->sequence->roll_back(row->sequence->tokens());
    throw;
  }
  for (Group& group : groups)
    for (std::size_t i = 0; i < group.rows.size(); ++i) group.rows[i]->work = group.work[i];
  finish(order, logits_);
}

/// Hands out logits in the order of the steps, and lets the tokens count.
void BatchRunner::finish(std::span<BatchRow* const> rows, std::vector<float>& logits) {
  const auto vocab = static_cast<std::size_t>(model_->config().vocab);
  std::size_t at = 0;
  for (BatchRow* const row : rows) {
    const std::size_t count = row->rows == LogitRows::none  ? 0
                              : row->rows == LogitRows::all ? row->tokens.size()
                                                            : 1;
    row->logits = std::span(logits).subspan(at, count * vocab);
    at += count * vocab;
    Sequence& sequence = *row->sequence;
    if (!std::all_of(row->logits.begin(), row->logits.end(), [](float x) { return std::isfinite(x); })) {
      row->error = not_finite();
      row->logits = {};
      sequence.roll_back(sequence.tokens());
      continue;
    }
    sequence.tail.commit(std::ssize(row->tokens));
    sequence.ids.insert(sequence.ids.end(), row->tokens.begin(), row->tokens.end());
  }
}

}  // namespace lode
