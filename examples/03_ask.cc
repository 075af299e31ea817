// SPDX-License-Identifier: Apache-2.0
// Reads a text once, then asks two questions of it, under full attention and under a sparse method.
// usage: example_03_ask [MODEL_DIR], by default models/pocket of the working directory
#include <lodestone/lodestone.h>

#include <cstdio>
#include <string>

int main(int argc, char** argv) try {
  const auto model = lode::Model::load(argc > 1 ? argv[1] : "models/pocket");
  const lode::Tokenizer& words = model->tokenizer();
  std::string text;
  for (int day = 1; day <= 40; ++day)
    text += "On day " + std::to_string(day) + " the sea was calm and nothing happened.\n";
  text += "The secret code of Mira is 48213.\n";
  for (int day = 41; day <= 80; ++day)
    text += "On day " + std::to_string(day) + " it rained and nobody went out.\n";

  lode::Context context(model, {.max_tokens = 8192});
  const lode::MethodId sparse = context.attach(lode::parse_spec("kmeans:clusters=64,probes=16,window=128"));
  context.prefill(words.encode(text, lode::Tokenizer::Bos::as_template));
  context.build_indexes();

  for (const char* question : {"What is the secret code of Mira?", "How was the sea on day 7?"}) {
    const auto prompt = words.encode("\n\nNow answer the questions about the text above.\n\nQuestion: " +
                                         std::string(question) + "\nAnswer:",
                                     lode::Tokenizer::Bos::none);
    for (const lode::MethodId method : {lode::kDense, sparse}) {
      const lode::Generation answer =
          context.generate(prompt, method, {.max_new_tokens = 16, .stop = {"\n"}});
      context.roll_back(context.indexed_tokens());  // the next question finds the text as it was
      std::printf("%s%s (read %.0f %% of the KV bytes)\n", question, answer.text.c_str(),
                  100 * answer.work.density());
    }
  }
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
