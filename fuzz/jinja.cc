// SPDX-License-Identifier: Apache-2.0
// Any text as a chat template: refused, or rendered within its limits, inputs marked where they are.
#include "fuzz/target.h"
#include "text/jinja/template.h"

LODE_FUZZ_TARGET(jinja) {
  namespace jinja = lode::jinja;
  const jinja::Template parsed(input, "fuzz");
  const auto messages = jinja::OrderedJson::parse(
      R"([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Größe?", "n": 2, "more": [1.5, null, true]}])");
  const jinja::Text text = parsed.render({{"messages", jinja::Value::of(messages, 1)},
                                          {"bos_token", jinja::Text("<s>")},
                                          {"add_generation_prompt", true}},
                                         0, 0);
  LODE_ASSERT(lode::invalid_utf8(text.bytes()) == std::string::npos);
  std::size_t end = 0;
  for (const jinja::Run& run : text.runs()) {
    LODE_ASSERT(run.begin >= end && run.begin < run.end && run.end <= text.size());
    end = run.end;
  }
}
