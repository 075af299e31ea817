// SPDX-License-Identifier: Apache-2.0
// Models: loading, tokens, and what a document would take.
#include <filesystem>

#include "engine/model.h"
#include "lab/bench/estimate.h"
#include "lodestone/automatic.h"
#include "lodestone/error.h"
#include "model.h"
#include "model/config.h"

namespace lode::python {

namespace {

Estimate estimate(const PyModel& model, std::int64_t tokens, const std::vector<std::string>& specs,
                  std::int64_t question, const std::string& kv_type, const std::string& folder) {
  model.process.check("Model");
  std::error_code error;
  const auto room = std::filesystem::space(folder, error);
  if (error)
    throw InputError("estimate: expected a folder that is there, found '" + folder + "': " + error.message());
  const EstimateOptions options = {.tokens = tokens,
                                   .question = question,
                                   .kv_type = parse_dtype(kv_type),
                                   .device = model.device,
                                   .free_disk = static_cast<std::int64_t>(room.available)};
  const std::vector<Spec> asked = parse_specs(specs);
  const nb::gil_scoped_release release;
  return estimate_document(model.model, options, asked, [](std::string_view) {});
}

void bind_estimate(nb::module_& m) {
  nb::class_<MethodEstimate>(m, "MethodEstimate", "What a method would take for a document.")
      .def_ro("attention", &MethodEstimate::attention, "The spec.")
      .def_ro("index_seconds", &MethodEstimate::index_seconds, "Seconds to index the document.")
      .def_ro("first_token_seconds", &MethodEstimate::first_token_seconds,
              "Seconds from a question to the answer's first token.")
      .def_ro("ms_token", &MethodEstimate::ms_token, "Milliseconds of each further token.");
  nb::class_<Estimate>(m, "Estimate",
                       "What a document of so many tokens would take, measured on this machine.")
      .def_ro("fits", &Estimate::fits, "Whether memory and disk hold it.")
      .def_ro("recommended", &Estimate::recommended, "A spec.")
      .def_ro("why", &Estimate::why, "One sentence: what fits and what pays.")
      .def_ro("host_bytes", &Estimate::host_bytes, "Bytes of memory.")
      .def_ro("gpu_bytes", &Estimate::gpu_bytes, "Bytes of GPU memory.")
      .def_ro("file_bytes", &Estimate::file_bytes, "Bytes of the .lode file.")
      .def_ro("prefill_seconds", &Estimate::prefill_seconds, "Seconds to read the document.")
      .def_ro("methods", &Estimate::methods, "Of each method; `full` first.");
}

Device device_of(const std::string& name) {
  if (name == "cpu") return Device::cpu;
  if (name != "cuda") throw InputError("Model: expected device 'cpu' or 'cuda', found '" + name + "'");
  const GpuInfo gpu = gpu_info();
  if (!gpu.ok) throw InputError("Model: expected a GPU for device 'cuda', found none to use: " + gpu.why);
  return Device::cuda;
}

}  // namespace

std::shared_ptr<PyModel> PyModel::load(const std::string& path, const std::string& device, int threads) {
  if (threads < 0) throw InputError("Model: expected threads of 0 or more, found " + std::to_string(threads));
  const nb::gil_scoped_release release;
  auto loaded = std::make_shared<PyModel>();
  loaded->device = device_of(device);
  loaded->model = Model::load(path, threads);
  // Its weights go there before the scheduler asks how much memory is free.
  if (loaded->device == Device::cuda) loaded->on_gpu = put_on_gpu(*loaded->model, DType::f16).model;
  loaded->scheduler = std::make_shared<Scheduler>(loaded->model, SchedulerOptions{.device = loaded->device});
  return loaded;
}

PyModel::~PyModel() {
  if (!process.here()) {  // its threads are the parent's: nobody would answer when they are asked to end
    new std::shared_ptr<Scheduler>(std::move(scheduler));
    new std::shared_ptr<const GpuModel>(std::move(on_gpu));
    new std::shared_ptr<const Model>(std::move(model));
    return;
  }
  end();  // the GIL is held: every share of a model is one of the Python object, which nanobind destroys
}

void PyModel::end() {
  std::shared_ptr<Scheduler> last = process.here() ? std::move(scheduler) : nullptr;
  if (last == nullptr) return;
  const nb::gil_scoped_release release;
  last.reset();
}

PyDocument::~PyDocument() {
  if (!owner->process.here()) new std::shared_ptr<const Document>(std::move(document));
}

std::vector<Spec> parse_specs(const std::vector<std::string>& texts) {
  std::vector<Spec> specs;
  for (const std::string& text : texts) specs.push_back(parse_spec(text));
  return specs;
}

Spec attention_of(const Document& document, const std::optional<std::string>& attention) {
  if (!attention) return usual_attention(document).front().spec;
  if (const auto automatic = parse_auto(*attention)) return choose_attention(*automatic, document).spec;
  return parse_spec(*attention);
}

ChatUse chat_use(const std::optional<bool>& chat) {
  if (!chat) return ChatUse::automatic;
  return *chat ? ChatUse::on : ChatUse::off;
}

const ChatNames kArguments = {.on = "chat=True",
                              .off = "chat=False",
                              .system = "system",
                              .document_role = "document_role",
                              .think = "think",
                              .question_template = "template"};

void bind_models(nb::module_& m) {
  bind_estimate(m);
  nb::class_<PyModel>(m, "_Model", nb::is_weak_referenceable())
      .def_static("load", &PyModel::load, nb::arg("path"), nb::arg("device"), nb::arg("threads"))
      .def("estimate", &estimate, nb::arg("tokens"), nb::arg("specs"), nb::arg("question"),
           nb::arg("kv_type"), nb::arg("folder"))
      .def("end", &PyModel::end)
      .def(
          "encode",
          [](const PyModel& self, const std::string& text, bool bos) {
            return self.model->tokenizer().encode(text,
                                                  bos ? Tokenizer::Bos::as_template : Tokenizer::Bos::none);
          },
          nb::arg("text"), nb::arg("bos"))
      .def(
          "decode",
          [](const PyModel& self, const std::vector<TokenId>& tokens) {
            return self.model->tokenizer().decode(tokens);
          },
          nb::arg("tokens"))
      .def_prop_ro("device", [](const PyModel& self) { return std::string(name_of(self.device)); })
      .def_prop_ro("fingerprint", [](const PyModel& self) { return self.model->fingerprint(); })
      .def_prop_ro("weight_bytes", [](const PyModel& self) { return self.model->weight_bytes(); })
      .def_prop_ro("eos", [](const PyModel& self) { return self.model->config().eos; })
      .def_prop_ro("vocab", [](const PyModel& self) { return self.model->config().vocab; })
      .def_prop_ro("layers", [](const PyModel& self) { return self.model->config().layers; })
      .def_prop_ro("query_heads", [](const PyModel& self) { return self.model->config().query_heads; })
      .def_prop_ro("kv_heads", [](const PyModel& self) { return self.model->config().kv_heads; })
      .def_prop_ro("head_dim", [](const PyModel& self) { return self.model->config().head_dim; })
      .def_prop_ro("max_positions", [](const PyModel& self) { return self.model->config().max_positions; });
  m.def(
      "methods",
      [] {
        std::vector<std::string> names;
        for (const MethodInfo& info : methods()) names.push_back(info.name);
        return names;
      },
      "The names of all attention methods.");
}

}  // namespace lode::python
