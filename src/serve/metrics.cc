// SPDX-License-Identifier: Apache-2.0
#include "serve/metrics.h"

#include <fmt/format.h>

#include <algorithm>

namespace lode::serve {

namespace {

void print_head(std::string& out, const char* name, const char* type, const char* help) {
  out += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
}

template <class Number>
void print_one(std::string& out, const char* name, const char* type, const char* help, Number value) {
  print_head(out, name, type, help);
  out += fmt::format("{} {}\n", name, value);
}

}  // namespace

void Histogram::add(double seconds) {
  const auto at = std::lower_bound(kBounds.begin(), kBounds.end(), seconds) - kBounds.begin();
  ++counts_[static_cast<std::size_t>(at)];
  sum_ += seconds;
}

void Histogram::print(std::string& out, const char* name, const char* help) const {
  print_head(out, name, "histogram", help);
  std::uint64_t below = 0;
  for (std::size_t i = 0; i < kBounds.size(); ++i) {
    below += counts_[i];
    out += fmt::format("{}_bucket{{le=\"{:g}\"}} {}\n", name, kBounds[i], below);
  }
  below += counts_.back();
  out += fmt::format("{0}_bucket{{le=\"+Inf\"}} {1}\n{0}_sum {2:.6f}\n{0}_count {1}\n", name, below, sum_);
}

void Metrics::add_request(const std::string& route, int status, double seconds) {
  const std::lock_guard lock(mutex_);
  ++requests_[{route, status}];
  http_seconds_.add(seconds);
}

void Metrics::add_answer(const Answer& a) {
  const std::lock_guard lock(mutex_);
  ++endings_[a.ending];
  prompt_tokens_ += static_cast<std::uint64_t>(a.prompt_tokens);
  cached_tokens_ += static_cast<std::uint64_t>(a.cached_tokens);
  answer_tokens_ += static_cast<std::uint64_t>(a.answer_tokens);
  read_bytes_ += static_cast<std::uint64_t>(a.read_bytes);
  full_bytes_ += static_cast<std::uint64_t>(a.full_bytes);
  with_document_ += a.context.empty() ? 0 : 1;
  queued_.add(a.queued_seconds);
  first_token_.add(a.queued_seconds + a.first_token_seconds);
  whole_.add(a.seconds);
  if (a.answer_tokens > 1)
    each_token_.add((a.seconds - a.queued_seconds - a.first_token_seconds) /
                    static_cast<double>(a.answer_tokens - 1));
}

std::string Metrics::print(const BackendStats& stats, int connections) const {
  const std::lock_guard lock(mutex_);
  std::string out;
  print_one(out, "vllm:num_requests_running", "gauge", "Questions being answered.", stats.running);
  print_one(out, "vllm:num_requests_waiting", "gauge", "Questions that wait.", stats.queued);
  print_one(
      out, "vllm:kv_cache_usage_perc", "gauge",
      "Share of the memory for questions' own keys and values in use.",
      stats.memory > 0 ? static_cast<double>(stats.memory_used) / static_cast<double>(stats.memory) : 0.0);
  print_one(out, "vllm:prompt_tokens_total", "counter", "Tokens of prompts, documents included.",
            prompt_tokens_);
  print_one(out, "vllm:generation_tokens_total", "counter", "Tokens of answers.", answer_tokens_);
  print_one(out, "vllm:prefix_cache_queries_total", "counter",
            "Tokens of prompts that a stored document could hold.", prompt_tokens_);
  print_one(out, "vllm:prefix_cache_hits_total", "counter", "Tokens of prompts that a stored document held.",
            cached_tokens_);
  print_head(out, "vllm:request_success_total", "counter", "Answers by what ended them.");
  for (const auto& [ending, count] : endings_)
    out += fmt::format("vllm:request_success_total{{finished_reason=\"{}\"}} {}\n", ending, count);
  first_token_.print(out, "vllm:time_to_first_token_seconds",
                     "From a question's arrival to its first token.");
  each_token_.print(out, "vllm:time_per_output_token_seconds", "Between tokens of an answer, on average.");
  whole_.print(out, "vllm:e2e_request_latency_seconds",
               "From a question's arrival to the end of its answer.");
  queued_.print(out, "vllm:request_queue_time_seconds", "That a question waited for its first step.");
  print_one(out, "lodestone:kv_bytes_read_total", "counter",
            "Bytes of keys, values and indexes that answers read.", read_bytes_);
  print_one(out, "lodestone:kv_bytes_full_total", "counter",
            "Bytes that full attention would have read for them.", full_bytes_);
  print_one(out, "lodestone:answers_with_document_total", "counter", "Answers that reused a stored document.",
            with_document_);
  print_one(out, "lodestone:documents", "gauge", "Stored documents.", stats.documents);
  print_one(out, "lodestone:documents_in_memory", "gauge", "Stored documents that are open.",
            stats.documents_in_memory);
  print_one(out, "lodestone:documents_reading", "gauge", "Documents that are being read or wait for it.",
            stats.reading);
  print_one(out, "lodestone:document_bytes", "gauge", "Keys, values and indexes of open documents.",
            stats.document_bytes);
  print_one(out, "lodestone:document_room_bytes", "gauge", "Memory for open documents.", stats.document_room);
  print_one(out, "lodestone:connections", "gauge", "Open connections.", connections);
  print_head(out, "lodestone:http_requests_total", "counter", "Requests by route and status.");
  for (const auto& [key, count] : requests_)
    out += fmt::format("lodestone:http_requests_total{{route=\"{}\",status=\"{}\"}} {}\n", key.first,
                       key.second, count);
  http_seconds_.print(out, "lodestone:http_request_seconds",
                      "From a request's head to the end of its response.");
  return out;
}

}  // namespace lode::serve
