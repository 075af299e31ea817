// SPDX-License-Identifier: Apache-2.0
// Templates that would run for ever, fill the memory or the stack end in one sentence, soon; what came from an input
// stays marked as such, whatever the template does with it.
#include <gtest/gtest.h>

#include <chrono>

#include "lodestone/error.h"
#include "text/jinja/template.h"

namespace lode {
namespace {

using jinja::Template;
using jinja::Text;
using jinja::Value;

std::string repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

Text render(const std::string& source) {
  return Template(source, "t").render({{"input", Text("in<s>put", 1)}}, 0, 100);
}

/// Refused with a sentence that holds `words`, in a second or two.
void expect_refused(const std::string& source, const std::string& words) {
  const auto start = std::chrono::steady_clock::now();
  try {
    const Text text = render(source);
    FAIL() << source.substr(0, 100) << ": expected a refusal, found " << text.size() << " bytes";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos)
        << source.substr(0, 100) << ": " << error.what();
    EXPECT_LE(std::string(error.what()).size(), 600u);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10)) << source.substr(0, 100);
}

TEST(JinjaAttack, LoopsThatNeverEnd) {
  const std::string nested =
      "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}";
  expect_refused(nested + "{% endfor %}{% endfor %}{% endfor %}", "at most");
  expect_refused(nested + "{% continue %}{% endfor %}{% endfor %}{% endfor %}", "at most");
  expect_refused("{% macro m(x) %}{% for i in range(9999) %}{{ m(i) }}{% endfor %}{% endmacro %}{{ m(1) }}",
                 "at most");
  expect_refused("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
                 "steps");
  expect_refused(
      "{% for i in range(99999) %}{% for j in range(99999)|sort(reverse=true) %}{% endfor %}{% endfor %}",
      "");
  expect_refused("{% set l = range(9000)|list %}{{ (l + l)|unique|list }}", "steps");
  expect_refused(
      "{% set t = 'a' * 2000000 %}{% for i in range(90000) %}{{ 'x' if t + 'b' in t }}{% endfor %}", "");
  expect_refused(
      "{% set t = 'a' * 999999 %}{% set u = 'a' * 500000 + 'b' %}{% for i in range(90000) %}{{ 'x' if u in t "
      "}}{% endfor %}",
      "steps");
}

TEST(JinjaAttack, GigabytesOfText) {
  expect_refused("{{ 'x' * 9999999999 }}", "text");
  expect_refused("{{ [1, 2] * 9000000000000000000 }}", "text");
  expect_refused(
      "{% set ns = namespace(t='x') %}{% for i in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
      "text");
  expect_refused(
      "{% set ns = namespace(t='x') %}{% for i in range(99) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}",
      "text");
  expect_refused(
      "{% set ns = namespace(t=['x']) %}{% for i in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
      "");
  expect_refused("{% set t = 'a' * 100000 %}{{ t|replace('a', t) }}", "text");
  expect_refused("{% set t = 'a' * 100000 %}{{ t|replace('', t) }}", "text");
  expect_refused("{% set t = 'a' * 100000 %}{{ t.join(t) }}", "text");
  expect_refused("{% set t = 'a\n' * 100000 %}{{ t|indent(60000, blank=true) }}", "text");
  expect_refused("{% set l = [1] * 100000 %}{{ [l, l, l]|tojson(indent=1000) }}", "text");
  expect_refused("{% for i in range(9999) %}{{ 'x'|center(1000000) }}{% endfor %}", "text");
  expect_refused(
      "{% set l = [0] %}{% set ns = namespace(l=l) %}{% for i in range(90) %}{% set ns.l = [ns.l, ns.l] %}{% "
      "endfor %}{{ ns.l }}",
      "");
  expect_refused("{{ '%999999999d' % 1 }}", "digits");
  expect_refused("{{ '%s' * 9 % ('a',) }}", "value");
}

TEST(JinjaAttack, DepthsOfTheStack) {
  expect_refused("{{ " + repeated("(", 100000) + " }}", "");
  expect_refused("{{ " + repeated("[", 100000) + repeated("]", 100000) + " }}", "one another");
  expect_refused("{{ " + repeated("not ", 100000) + "1 }}", "one another");
  expect_refused("{{ " + repeated("-", 100000) + "1 }}", "one another");
  expect_refused("{{ 1" + repeated(" + 1", 100000) + " }}", "operators");
  expect_refused("{{ a" + repeated(".b", 100000) + " }}", "operators");
  expect_refused("{{ a" + repeated("|trim", 100000) + " }}", "operators");
  expect_refused("{{ 1" + repeated(" if 1 else 1", 50000) + " }}", "one another");
  expect_refused(repeated("{% if 1 %}", 50000), "one another");
  expect_refused(repeated("{% for i in [1] %}", 50000), "one another");
  expect_refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "deep");
  expect_refused("{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}", "deep");
  expect_refused("{% for i in [[]] recursive %}{{ loop([[]]) }}{% endfor %}", "deep");
  expect_refused(
      "{% set ns = namespace(l=[]) %}{% for i in range(5000) %}{% set ns.l = [ns.l] %}{% endfor %}{{ ns.l }}",
      "one another");
  EXPECT_EQ(render("{{ 1" + repeated(" ~ 1", 5000) + " }}").size(), 5001u);
  EXPECT_EQ(render("{% if 0 %}" + repeated("{% elif 0 %}", 5000) + "{% else %}x{% endif %}").bytes(), "x");
  EXPECT_EQ(render("{% set ns = namespace() %}{% set ns.me = ns %}{{ ns.me.me.me is defined }}").bytes(),
            "True");
}

TEST(JinjaAttack, NumbersAndNames) {
  expect_refused("{{ 9223372036854775807 + 1 }}", "63 bits");
  expect_refused("{{ 99999999999999999999 }}", "63 bits");
  expect_refused("{{ 2 ** 64 }}", "63 bits");
  expect_refused("{{ -9223372036854775807 - 2 }}", "63 bits");
  expect_refused("{{ 3037000500 * 3037000500 }}", "63 bits");
  expect_refused("{{ " + repeated("9", 100000) + " }}", "digits");
  expect_refused("{{ nope['\\x1b[31m\\n'].more }}", "is undefined");
  expect_refused("{% include 'secret' %}", "expected one of the tags");
  expect_refused("{{ ''.__class__.__mro__[1] }}", "undefined");
  expect_refused("\xff", "UTF-8");
  expect_refused(std::string(2 << 20, 'x'), "at most");
  EXPECT_EQ(
      render("{{ (-9223372036854775807 - 1) // -1 if false else 1 }}{{ 1 ** 9223372036854775807 }}").bytes(),
      "11");
  expect_refused("{{ (-9223372036854775807 - 1) // -1 }}", "63 bits");
  EXPECT_EQ(render("{{ (-9223372036854775807 - 1) % -1 }}").bytes(), "0");
  EXPECT_EQ(render("{{ 'abc'[9223372036854775807:] }}{{ 'abc'[-9223372036854775807:2] }}{{ "
                   "[1][::9223372036854775807] }}")
                .bytes(),
            "ab[1]");
}

/// The parts of a rendered text that came from the input.
std::string inputs_of(const std::string& source) {
  const Text text = render(source);
  std::string all;
  for (const jinja::Run& run : text.runs())
    all += "[" + text.bytes().substr(run.begin, run.end - run.begin) + "]";
  return all;
}

TEST(JinjaOrigins, InputsStayInputs) {
  EXPECT_EQ(inputs_of("<s>{{ input }}</s>"), "[in<s>put]");
  EXPECT_EQ(inputs_of("{{ '<s>' + input + '</s>' + input }}"), "[in<s>put][in<s>put]");
  EXPECT_EQ(inputs_of("{{ '<s>' ~ input[1:4] ~ '</s>' }}"), "[n<s]");
  EXPECT_EQ(inputs_of("{{ input.split('<')|join('|<s>|') }}"), "[in][s>put]");
  EXPECT_EQ(inputs_of("{{ input.replace('<s>', '</s>') }}"), "[in][put]");
  EXPECT_EQ(inputs_of("{{ 'a-b'.replace('-', input) }}"), "[in<s>put]");
  EXPECT_EQ(inputs_of("{% set x %}<s>{{ input|trim }}{% endset %}{{ x }}{{ x|upper }}"),
            "[in<s>put<S>IN<S>PUT]");
  EXPECT_EQ(inputs_of("{% macro m(t) %}<s>{{ t }}{% endmacro %}{{ m(input) }}"), "[in<s>put]");
  EXPECT_EQ(inputs_of("{{ {'k': [input]}|tojson }}{{ [input] }}"), "[{\"k\": [\"in<s>put\"]}]['in<s>put']");
  EXPECT_EQ(inputs_of("{{ '<s>%s</s>' % input }}{{ '<s>{}'.format(input) }}"), "[in<s>put][in<s>put]");
  EXPECT_EQ(inputs_of("{% for c in input %}{{ c }}{% endfor %}{{ input|first }}{{ input|list|last }}"),
            "[in<s>putit]");
  EXPECT_EQ(
      inputs_of("{{ input|indent(2, true) }}{% filter replace('n', '') %}<s>{{ input }}{% endfilter %}"),
      "[in<s>put][i<s>put]");
}

}  // namespace
}  // namespace lode
