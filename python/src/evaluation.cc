// SPDX-License-Identifier: Apache-2.0
// Samples and scores of `lodestone eval`, for models that other libraries run (evaluate.py).
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "lab/eval/fit_samples.h"
#include "lab/eval/records.h"
#include "lab/eval/scoring.h"
#include "lab/eval/settings.h"
#include "lab/eval/statistics.h"
#include "lab/tasks/datasets.h"
#include "lodestone/error.h"
#include "lodestone/spec.h"
#include "module.h"

namespace lode::python {

namespace {

/// How many tokens a text has, as Python tells it.
using PyTokenCount = std::function<std::int64_t(std::string)>;

TokenCount count_by(const PyTokenCount& tokens_of) {
  return [&](std::string_view text) { return tokens_of(std::string(text)); };
}

/// With remarks on samples of a published data set that cannot be asked.
std::tuple<std::vector<Sample>, std::vector<std::string>> read(const std::string& path,
                                                               const std::string& format, std::int64_t limit,
                                                               const std::string& prompts,
                                                               const std::optional<PyTokenCount>& tokens_of) {
  if (limit < 0) throw InputError("samples: expected a limit of 0 or more, found " + std::to_string(limit));
  Dataset dataset = read_dataset(path, parse_dataset_format(format), limit, prompts,
                                 tokens_of ? count_by(*tokens_of) : TokenCount());
  std::vector<std::string> remarks;
  for (const UnreadSample& bad : dataset.unread) remarks.push_back(remark_of(bad));
  return {std::move(dataset.samples), std::move(remarks)};
}

std::tuple<double, std::optional<double>, std::optional<double>> interval_of(
    const std::vector<double>& values, const std::vector<std::int64_t>& documents) {
  if (values.empty() || values.size() != documents.size())
    throw InputError("expected as many documents as values, and one at least, found " +
                     std::to_string(documents.size()) + " and " + std::to_string(values.size()));
  const Interval interval = difference_by_document(values, documents);
  return {interval.mean, interval.low, interval.high};
}

/// Tokens, score and seconds of an answer that is known.
using Known = std::tuple<std::vector<TokenId>, double, double>;

std::optional<Known> find(const Records& records, const Sample& sample, const std::string& attention,
                          const std::string& files) {
  const AnswerRecord* const answer = records.find(sample, attention, files);
  if (answer == nullptr) return std::nullopt;
  return Known(answer->tokens, answer->score, answer->seconds);
}

void bind_records(nb::module_& m) {
  nb::class_<Records>(m, "_Records")
      .def(
          "__init__",
          [](Records* self, const std::string& path, const std::string& settings) {
            new (self) Records(path, Json::parse(settings));
          },
          nb::arg("path"), nb::arg("settings"))
      .def("find", &find, nb::arg("sample"), nb::arg("attention"), nb::arg("files"))
      .def(
          "add",
          [](Records& self, const Sample& sample, const std::string& attention, const std::string& text,
             const std::vector<TokenId>& tokens, double seconds, const std::string& files) {
            AnswerRecord answer = {.text = text, .tokens = tokens, .seconds = seconds};
            answer.score = score(text, sample);
            self.add(sample, attention, std::move(answer), files);
          },
          nb::arg("sample"), nb::arg("attention"), nb::arg("text"), nb::arg("tokens"), nb::arg("seconds"),
          nb::arg("files"));
  m.def(
      "_files_hash", [](const std::string& spec) { return files_hash(parse_spec(spec), {}); },
      nb::arg("spec"), "Of what the files hold that a spec names; empty: it names none.");
}

}  // namespace

void bind_evaluation(nb::module_& m) {
  bind_records(m);
  nb::class_<Sample>(m, "_Sample")
      .def_ro("id", &Sample::id)
      .def_ro("task", &Sample::task)
      .def_ro("tokens", &Sample::tokens, "The length that was asked for; 0: not known.")
      .def_prop_ro("context", [](const Sample& sample) { return *sample.context; })
      .def_prop_ro(
          "context_key",
          [](const Sample& sample) { return reinterpret_cast<std::uintptr_t>(sample.context.get()); },
          "Equal for samples that share a context.")
      .def_ro("question", &Sample::question)
      .def_ro("max_new", &Sample::max_new, "Tokens to generate; 0 = as many as the answers need.")
      .def(
          "most_new",
          [](const Sample& sample, const PyTokenCount& tokens_of) {
            return most_new_tokens(count_by(tokens_of), sample);
          },
          nb::arg("tokens_of"), "Tokens that the answer may take.");
  m.def("_read_samples", &read, nb::arg("path"), nb::arg("format"), nb::arg("limit"), nb::arg("prompts"),
        nb::arg("tokens_of").none());
  m.def("_interval", &interval_of, nb::arg("values"), nb::arg("documents"));
}

}  // namespace lode::python
