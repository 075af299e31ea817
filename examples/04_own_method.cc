// SPDX-License-Identifier: Apache-2.0
// An attention method of one's own: every n-th far key. It is registered under a name, attached by a spec,
// and asked beside full attention like any other.
// usage: example_04_own_method [MODEL_DIR], by default models/pocket of the working directory
#include <lodestone/lodestone.h>

#include <cstdio>
#include <string>

namespace {

/// Positions that are multiples of `every`; needs no index.
class Strided final : public lode::Selector {
 public:
  Strided(const lode::LayerGeometry& geometry, std::int64_t every) : geometry_(geometry), every_(every) {}

  void select(std::span<const lode::QueryBlock> blocks, lode::Selection& out) override {
    for (const lode::QueryBlock& block : blocks)
      for (std::int64_t t = 0; t < block.tokens; ++t)
        for (int head = 0; head < geometry_.kv_heads; ++head) {
          const auto token = static_cast<std::int32_t>(t);
          out.add_set({block.sequence, head, lode::all_heads(geometry_.group()), token, token + 1});
          for (std::int64_t row = (block.far_begin + every_ - 1) / every_ * every_;
               row < block.far_end(t, geometry_.dense); row += every_)
            out.add_row(static_cast<lode::Position>(row));
        }
  }

  void build(std::int32_t, lode::KvLayer) override {}
  void append(std::int32_t, lode::KvLayer, lode::Position) override {}
  void roll_back(std::int32_t, std::int64_t) override {}
  void save(std::int32_t, lode::SectionWriter&) const override {}
  void load(std::int32_t, lode::SectionReader&, lode::KvLayer) override {}
  std::int64_t index_bytes() const override { return 0; }

 private:
  lode::LayerGeometry geometry_;
  std::int64_t every_;
};

std::int64_t every_of(const lode::Spec& spec) {
  return spec.integer("every", 8, 1, 1 << 20);
}

std::string long_text() {
  std::string text = "The secret code of Mira is 48213.\n";
  for (int day = 1; day <= 80; ++day)
    text += "On day " + std::to_string(day) + " the sea was calm and nothing happened.\n";
  return text;
}

}  // namespace

int main(int argc, char** argv) try {
  lode::MethodInfo info;
  info.name = "strided";
  info.source = "an example";
  info.keys = {{"every", "attends each far key whose position this divides", "8"}};
  info.make = [](const lode::Spec& spec, const lode::LayerGeometry& geometry, std::string_view) {
    return std::make_unique<Strided>(geometry, every_of(spec));
  };
  info.validate = [](const lode::Spec& spec) { static_cast<void>(every_of(spec)); };
  lode::register_method(info);

  const auto model = lode::Model::load(argc > 1 ? argv[1] : "models/pocket");
  const lode::Tokenizer& words = model->tokenizer();
  lode::DocumentOptions options;
  options.specs = {lode::parse_spec("strided:every=4,window=64")};
  const auto document = lode::Document::read(
      model, words.encode(long_text(), lode::Tokenizer::Bos::as_template), long_text(), options);

  lode::Scheduler scheduler(model);
  for (const lode::Spec& spec : {lode::parse_spec("full"), options.specs.front()}) {
    lode::Request request;
    request.document = document;
    request.prompt =
        words.encode("\n\nQuestion: What is the secret code of Mira?\nAnswer:", lode::Tokenizer::Bos::none);
    request.attention = spec;
    request.options.max_new_tokens = 16;
    request.options.stop = {"\n"};
    const lode::Answer answer = scheduler.submit(request).result.get();
    std::printf("%s:%s (read %.0f %% of the KV bytes)\n", spec.str().c_str(), answer.generation.text.c_str(),
                100 * answer.generation.work.density());
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
