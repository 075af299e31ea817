// SPDX-License-Identifier: Apache-2.0
#include "engine/automatic.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>

#include "base/json.h"
#include "base/text.h"
#include "engine/context.h"
#include "engine/document.h"
#include "kv/placement.h"
#include "lodestone/error.h"
#include "select/artefacts.h"

namespace lode {

namespace {

constexpr int kVersion = 1;
constexpr std::int64_t kLong = 8192;  // tokens: shorter texts full attention reads as fast
constexpr std::int64_t kPassages = 12, kCue = 24, kRecited = 12;  // tokens of each
constexpr double kLeastAgreement = 0.97;                          // of recited tokens with full attention's
constexpr double kMostDensity = 0.6;                              // above it nothing is gained
// Bytes of a layer that a GPU reads while it chooses: some 20 us. Where less is saved, full attention is as fast.
constexpr double kGpuChoiceBytes = 64.0 * 1024 * 1024;

/// What was measured of a method.
struct Measured {
  std::string spec;
  double error = 0, agreement = 0, density = 1;
  std::int64_t index_bytes = 0;
};

/// Recites passages of the context under one method.
class Reciter {
 public:
  explicit Reciter(Context& context) : context_(context), c_(context.impl()), indexed_(c_.indexed) {
    c_.audit.set_rate(1);
  }
  ~Reciter() {
    context_.roll_back(indexed_);
    c_.audit.set_rate(c_.options.audit);
  }
  Reciter(const Reciter&) = delete;
  Reciter& operator=(const Reciter&) = delete;

  /// For each token of all passages behind their cues whether it is the likeliest one; work of those tokens.
  std::vector<bool> recite(MethodId method, WorkReport& work) {
    std::vector<bool> right;
    for (std::int64_t i = 0; i < kPassages; ++i) {
      context_.roll_back(indexed_);
      const auto passage = passage_of(i);
      c_.run(passage.first(kCue), method, Phase::question, LogitRows::last_of_each);
      for (const TokenId& token : passage.subspan(kCue)) {
        right.push_back(likeliest() == token);
        work += c_.run({&token, 1}, method, Phase::generation, LogitRows::last_of_each);
      }
    }
    return right;
  }

 private:
  /// They lie evenly over the text, but not at its end, which every method attends to.
  std::span<const TokenId> passage_of(std::int64_t i) {
    const std::int64_t far = std::max<std::int64_t>(kCue + kRecited, indexed_ * 3 / 4);
    const std::int64_t begin = (far - kCue - kRecited) * (2 * i + 1) / (2 * kPassages);
    const auto first = c_.ids.begin() + begin;
    passage_.assign(first, first + kCue + kRecited);
    return passage_;
  }
  TokenId likeliest() const {
    return static_cast<TokenId>(std::max_element(c_.logits.begin(), c_.logits.end()) - c_.logits.begin());
  }

  Context& context_;
  Context::Impl& c_;
  const std::int64_t indexed_;
  std::vector<TokenId> passage_;
};

std::int64_t index_bytes(const AttachedMethod& method) {
  std::int64_t bytes = 0;
  for (const Selector* selector : method.selectors)
    bytes += selector != nullptr ? selector->index_bytes() : 0;
  return bytes;
}

Measured measure(const Context::Impl& c, Reciter& reciter, MethodId id, const std::vector<bool>& expected) {
  WorkReport work;
  const std::vector<bool> right = reciter.recite(id, work);
  std::int64_t same = 0, all = 0;  // of what full attention recites
  for (std::size_t i = 0; i < right.size(); ++i) {
    all += expected[i] ? 1 : 0;
    same += expected[i] && right[i] ? 1 : 0;
  }
  const AttachedMethod& method = c.methods[static_cast<std::size_t>(id)];
  return {.spec = method.spec.str(),
          .error = work.audited == 0 ? 0.0 : work.audit_error_sum / static_cast<double>(work.audited),
          .agreement = all == 0 ? 1.0 : static_cast<double>(same) / static_cast<double>(all),
          .density = work.density(),
          .index_bytes = index_bytes(method)};
}

std::vector<Measured> read_measured(const std::string& text) {
  const std::string where = "attachment 'auto'";
  const Json json = parse_json(text, where);
  json_int(json, "version", where, kVersion, kVersion);
  const Json& list = json_member(json, "methods");
  if (!list.is_array()) throw InputError(where + ": expected a list 'methods', found none");
  std::vector<Measured> all;
  for (const Json& one : list)
    all.push_back({.spec = json_string(one, "attention", where),
                   .error = json_number(one, "error", where, 0, 1e9),
                   .agreement = json_number(one, "agreement", where, 0, 1),
                   .density = json_number(one, "density", where, 0, 1e9)});
  return all;
}

}  // namespace

std::optional<AutoSpec> parse_auto(std::string_view text) {
  const std::size_t colon = text.find(':');
  if (text.substr(0, colon) != "auto") return std::nullopt;
  Spec given;
  given.name = "auto";
  std::string_view rest = colon == text.npos ? std::string_view() : text.substr(colon + 1);
  while (!rest.empty()) {
    const std::string_view one = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    const std::size_t equals = one.find('=');
    const std::string key(one.substr(0, equals));
    if (equals == one.npos || (key != "error" && key != "share"))
      throw InputError(
          fmt::format("attention spec 'auto': expected error=E or share=on|off, found '{}'", excerpt(one)));
    given.given[key] = one.substr(equals + 1);
  }
  constexpr std::array<std::string_view, 2> kShare = {"off", "on"};
  AutoSpec spec = {.share = given.choice("share", kShare[0], kShare) == "on"};
  if (given.text("error")) spec.error = given.number("error", 0, 1e-6, 10);
  return spec;
}

std::vector<Spec> automatic_methods(const Model& model, std::int64_t tokens) {
  if (tokens < kLong) return {};
  // Clusters of keys before RoPE, kmeans' default, find next to nothing at 128k tokens (docs/results/quality.md).
  std::vector<Spec> specs = {parse_spec("squeezed:sparsity=0.7"), parse_spec("squeezed:sparsity=0.9"),
                             parse_spec("kmeans:rope=on")};
  if (artefact_of("hash", model.path(), model.fingerprint())) specs.push_back(parse_spec("hash"));
  return specs;
}

std::string measure_automatic(Context& context) {
  const Context::Impl& c = context.impl();
  Json list = Json::array();
  if (c.indexed >= kLong) {
    Reciter reciter(context);
    WorkReport dense;
    const std::vector<bool> expected = reciter.recite(kDense, dense);
    for (std::size_t id = 0; id < c.methods.size(); ++id) {
      if (c.methods[id].dense()) continue;
      const Measured m = measure(c, reciter, static_cast<MethodId>(id), expected);
      list.push_back({{"attention", m.spec},
                      {"error", m.error},
                      {"agreement", m.agreement},
                      {"density", m.density},
                      {"index_bytes", m.index_bytes}});
    }
  }
  return Json({{"version", kVersion}, {"tokens", c.indexed}, {"methods", list}}).dump();
}

AutoPlace auto_place(const Context& context) {
  const Context::Impl& c = context.impl();
  const bool gpu = c.gpu != nullptr && !c.gpu->keys_on_host();
  KvShape shape = c.kv.shape();
  std::int64_t layers = 0;
  for (int i = 0; i < shape.layers; ++i) layers += shape.has_rows(i) ? 1 : 0;
  if (gpu) shape.type = type_on_gpu(shape.type);
  const std::int64_t sharing = gpu ? std::max<std::int64_t>(1, std::ssize(c.options.gpus)) : 1;
  return {
      .gpu = gpu,
      .layer_bytes = context.tokens() * shape.token_bytes() / std::max<std::int64_t>(1, layers) / sharing};
}

AutoChoice choose_attention(const AutoSpec& wanted, const Document& document) {
  return choose_attention(wanted, document.attachments(), document.methods(),
                          auto_place(document.impl().context));
}

std::vector<AutoChoice> usual_attention(const Document& document) {
  return usual_attention(document.attachments(), document.methods(), auto_place(document.impl().context));
}

std::vector<AutoChoice> usual_attention(const Attachments& attachments, std::span<const Spec> methods,
                                        const AutoPlace& place) {
  if (attachments.contains(kAutoAttachment)) return {choose_attention({}, attachments, methods, place)};
  std::vector<AutoChoice> choices;
  for (const Spec& spec : methods) choices.push_back({.spec = spec, .why = {}});
  if (choices.empty()) choices.push_back({.spec = parse_spec("full"), .why = {}});
  return choices;
}

AutoChoice choose_attention(const AutoSpec& wanted, const Attachments& attachments,
                            std::span<const Spec> methods, const AutoPlace& place) {
  AutoChoice choice = {.spec = parse_spec("full"), .why = {}};
  const auto found = attachments.find(kAutoAttachment);
  if (found == attachments.end()) {
    choice.why = "nothing was measured when the text was indexed; `lodestone index -a auto` does";
    return choice;
  }
  const std::vector<Measured> measured = read_measured(found->second.text);
  if (measured.empty()) {
    choice.why = fmt::format("a text of fewer than {} tokens is read as fast in full", kLong);
    return choice;
  }
  const double most = wanted.error.value_or(kAutoError);
  double least = HUGE_VAL;
  for (const Measured& m : measured) {
    const auto known =
        std::find_if(methods.begin(), methods.end(), [&](const Spec& s) { return s.str() == m.spec; });
    if (known == methods.end()) continue;
    least = std::min(least, m.error);
    const bool good = m.error <= most && (wanted.error || m.agreement >= kLeastAgreement);
    if (!good || m.density > kMostDensity || m.density >= choice.density) continue;
    choice.spec = *known;
    choice.density = m.density;
    choice.why = fmt::format(
        "the cheapest of {} whose error was measured on this text: {:.3f} (limit {:.3g}), {:.1f} % of what "
        "full attention recites, {:.1f} % of its bytes",
        measured.size(), m.error, most, 100 * m.agreement, 100 * m.density);
  }
  if (choice.density == 1)
    choice.why = fmt::format(
        "no index is within an error of {:.3g} on this text and reads less (least: {:.3f})", most, least);
  const double saved = (1 - choice.density) * static_cast<double>(place.layer_bytes);
  if (place.gpu && choice.density < 1 && saved < kGpuChoiceBytes)
    choice = {.spec = parse_spec("full"),
              .why = fmt::format("{} would save {:.0f} MB a layer, which a GPU reads in the time of a choice",
                                 choice.spec.str(), saved / 1e6)};
  if (wanted.share && choice.density < 1)
    choice.full_beside = static_cast<int>(std::ceil(1 / choice.density));
  return choice;
}

}  // namespace lode
