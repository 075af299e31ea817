// SPDX-License-Identifier: Apache-2.0
// Charts and pages: whatever is drawn, what comes out is one well-formed document that asks for nothing else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stack>

#include "lab/report/ladders.h"
#include "lab/report/page.h"
#include "lab/report/report.h"
#include "lab/report/svg.h"
#include "lab/report/svg_draw.h"
#include "model/config.h"

namespace lode {
namespace {

using testing::HasSubstr;
using testing::Not;

/// Why a text is not well-formed XML, by its tags, attributes and references alone; empty when it is.
std::string xml_fault(std::string_view text) {
  std::stack<std::string> open;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '&') {
      const std::size_t end = text.find(';', at);
      if (end == std::string_view::npos || end - at > 6) return "a bare ampersand";
    }
    if (text[at] == '>') return "a bare '>'";
    if (text[at] != '<') continue;
    const std::size_t end = text.find('>', at);
    if (end == std::string_view::npos) return "a tag without an end";
    std::string tag(text.substr(at + 1, end - at - 1));
    at = end;
    if (tag.empty() || tag[0] == '!') continue;
    if (std::count(tag.begin(), tag.end(), '"') % 2 != 0 || tag.find('<') != std::string::npos)
      return "tag " + tag;
    const std::string name = tag.substr(tag[0] == '/', tag.find_first_of(" /", 1) - (tag[0] == '/'));
    if (tag[0] == '/') {
      if (open.empty() || open.top() != name) return "</" + name + "> out of place";
      open.pop();
    } else if (tag.back() != '/') {
      // HTML's only void element here is none: meta is closed.
      open.push(name);
    }
    if (name == "style" && tag[0] != '/') {  // rules hold no markup
      at = text.find("</style>", at);
      if (at == std::string_view::npos) return "a style without an end";
      --at;
    }
  }
  return open.empty() ? "" : "<" + open.top() + "> is open";
}

LineChart nasty_chart() {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  const Axis x = {.title = "x", .unit = Axis::Unit::percent, .log = true};
  const Axis y = {.title = "y", .low = 0, .high = 100};
  return {.title = "a < b & \"c\" \x01",
          .x = x,
          .y = y,
          .series = {{"one", 0, {{0.1, 5, {}, {}, ""}, {0.2, 105, 1.0, 9.0, "tip <"}}},
                     {"empty", 1, {}},
                     {"none drawable", 9, {{0, 1, {}, {}, ""}, {nan, 1, {}, {}, ""}, {1, inf, {}, {}, ""}}},
                     {"broken \xff utf", 17, {{1, 0, {}, {}, ""}}}},
          .rules = {{"full", 99}, {"no number", nan}}};
}

TEST(Charts, AreWellFormedWhateverIsDrawn) {
  HeatMaps maps = {.title = "m", .x_title = "x", .y_title = "y", .scale_title = "s", .percent = true};
  EXPECT_EQ(xml_fault(svg_of(maps)), "") << "without panels";
  maps.panels.push_back(
      {.title = "p&p", .columns = {"1", "2"}, .rows = {"<"}, .cells = {{0.5, std::nullopt}}});
  BarChart bars;
  bars.parts = {"one"};
  EXPECT_EQ(xml_fault(svg_of(bars)), "") << "without bars";
  bars.bars.push_back({"l", "n", {std::nan("")}, 3.0});
  bars.bars.push_back({"l", "n", {1.0, 2.0}, std::nullopt});
  DotChart dots;
  EXPECT_EQ(xml_fault(svg_of(dots)), "") << "without rows";
  dots.title = "<";
  dots.x.log = true;
  dots.kinds = {"&"};
  dots.rows = {{"r", {{0.0, std::nan(""), 1.0}}}};
  for (const std::string& svg :
       {svg_of(nasty_chart()), svg_of(LineChart{}), svg_of(maps), svg_of(bars), svg_of(dots)}) {
    EXPECT_EQ(xml_fault(svg), "") << svg;
    EXPECT_EQ(xml_fault(svg_file(svg)), "");
    EXPECT_THAT(svg, Not(HasSubstr("nan")));
    EXPECT_THAT(svg, Not(HasSubstr("inf\"")));
  }
}

/// Attribute `name` of a tag.
std::string attribute(const std::string& tag, const std::string& name) {
  const std::size_t at = tag.find(" " + name + "=\"");
  if (at == std::string::npos) return "";
  const std::size_t begin = at + name.size() + 3;
  return tag.substr(begin, tag.find('"', begin) - begin);
}

/// Texts of a chart that reach beyond its edges; empty when none does.
std::string texts_outside(const std::string& svg) {
  const double width = std::stod(attribute(svg.substr(0, svg.find('>')), "width"));
  for (std::size_t at = svg.find("<text"); at != std::string::npos; at = svg.find("<text", at + 1)) {
    const std::size_t end = svg.find('>', at);
    const std::string tag = svg.substr(at, end - at),
                      text = svg.substr(end + 1, svg.find('<', end) - end - 1);
    if (attribute(tag, "x").empty()) continue;  // turned
    const double x = std::stod(attribute(tag, "x")),
                 wide = text_width(text, std::stod(attribute(tag, "font-size")));
    const std::string anchor = attribute(tag, "text-anchor");
    const double left = anchor == "end" ? x - wide : anchor == "middle" ? x - wide / 2 : x;
    if (left < -0.5 || left + wide > width + 0.5) return text;
  }
  return "";
}

TEST(Charts, NoTextIsCutAtTheEdges) {
  const std::string spec = "squeezed:sparsity=0.95,levels=2,tail=on,window=2048,sink=128";
  HeatMaps maps = {.title = "Needles", .x_title = "tokens", .y_title = "depth", .scale_title = "score"};
  for (const std::string& title : {std::string("full"), std::string("snapkv:max_capacity_prompt=2048"), spec,
                                   std::string("a_word_that_has_no_place_to_break_at_all_and_goes_on")})
    maps.panels.push_back({.title = title, .columns = {"4k"}, .rows = {"0-20 %"}, .cells = {{0.5}}});
  EXPECT_EQ(texts_outside(svg_of(maps)), "");
  for (std::size_t at = 0; at < spec.size();) {  // broken, not shortened
    const std::size_t end = std::min(spec.find_first_of(":,", at), spec.size() - 1) + 1;
    EXPECT_THAT(svg_of(maps), HasSubstr(spec.substr(at, end - at)));
    at = end;
  }
  LineChart lines;
  lines.series = {{spec, 0, {{1, 2}}}};
  EXPECT_EQ(texts_outside(svg_of(lines)), "");
  lines.joined = false;
  EXPECT_EQ(texts_outside(svg_of(lines)), "");
  BarChart bars;
  bars.parts = {"one"};
  bars.bars = {{spec, spec, {1.0}, 2.0}};
  EXPECT_EQ(texts_outside(svg_of(bars)), "");
  DotChart dots;
  dots.kinds = {"a", "b"};
  dots.rows = {{spec, {{1, 2}, {3}}}};
  EXPECT_EQ(texts_outside(svg_of(dots)), "");
}

TEST(Charts, BarsCanBeReadInWords) {
  BarChart bars;
  bars.mark_title = "plain read";
  bars.x.unit = Axis::Unit::microseconds;
  bars.parts = {"select", "attend"};
  bars.bars = {{"full", "2 ms: 1.00x", {0.0, 2000.0}, 1500.0, {0.0, 1900.0}},
               {"topk", "", {1.0, 2.0}, std::nullopt}};
  EXPECT_THAT(in_words(bars), testing::ElementsAre("full, 2 ms: 1.00x; attend 1.9 ms, plain read 1.5 ms",
                                                   "topk: select 1 µs, attend 2 µs"));
  EXPECT_THAT(svg_of(bars),
              HasSubstr("<desc>full, 2 ms: 1.00x; attend 1.9 ms, plain read 1.5 ms\ntopk: select"));
}

TEST(Page, IsOneFileThatAsksForNothingElse) {
  Page page("A & B");
  page.heading(2, "Part `one`");
  page.paragraph("text with `code` and a lone ` and <b>");
  page.code("lodestone report <x>");
  page.list({"one", "two"});
  page.table("caption", {"name", "a|b"}, {{"`x`", "1"}});
  page.figure("f", "a figure", svg_of(nasty_chart()));
  const std::string html = page.html();
  EXPECT_EQ(xml_fault(html), "");
  for (const char* outside : {"http:", "https:", "src=", "<script", "@import", "url(", "<link"}) {
    std::string rest = html;
    // The name of SVG's own vocabulary is no address.
    for (std::size_t at; (at = rest.find("xmlns=\"http://www.w3.org/2000/svg\"")) != std::string::npos;)
      rest.erase(at, 34);
    EXPECT_THAT(rest, Not(HasSubstr(outside)));
  }
  EXPECT_THAT(html, HasSubstr("<code>code</code>"));
  EXPECT_THAT(page.markdown(), HasSubstr("![a figure](figures/f.svg)"));
  EXPECT_THAT(page.markdown(), HasSubstr("| name | a\\|b |"));
}

TEST(Page, TablesThatPaperDoesNotHoldAreSetSmaller) {
  Page page("t");
  page.table("narrow", {"attention", "mean"}, {{"`double-sparsity:budget=128,channels=8`", "1.0"}});
  EXPECT_THAT(page.html(), Not(HasSubstr("class=\"wide many\"")));
  page.table("wide", std::vector<std::string>(17, "recovered gap"), {std::vector<std::string>(17, "0.948")});
  EXPECT_THAT(page.html(), HasSubstr("class=\"wide many\""));
}

TEST(Ticks, CoverTheRangeWithRoundNumbers) {
  EXPECT_THAT(nice_ticks(0, 100, 5), testing::ElementsAre(0, 20, 40, 60, 80, 100));
  for (const auto& [low, high] : {std::pair{0.013, 0.97}, {1e-9, 1e9}, {3.0, 3.1}, {0.5, 0.5001}}) {
    const auto ticks = log_ticks(low, high);
    ASSERT_GE(ticks.size(), 2u);
    EXPECT_LE(ticks.front(), low * 1.0001);
    EXPECT_GE(ticks.back(), high * 0.999);
    EXPECT_LT(ticks.size(), 30u);
  }
}

TEST(Spread, KeepsLabelsApartInsideAndInOrder) {
  const auto at = spread({10, 10, 10, 90, 200, -5}, 12, 0, 100);
  std::vector<double> sorted = at;
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 1; i < sorted.size(); ++i) EXPECT_GE(sorted[i] - sorted[i - 1], 12 - 1e-9);
  EXPECT_GE(sorted.front(), -1e-9);
  EXPECT_LE(sorted.back(), 100 + 1e-9);
  EXPECT_LE(at[0], at[1]);
  EXPECT_LT(at[5], at[0]);
  EXPECT_TRUE(spread({}, 12, 0, 100).empty());
}

TEST(Series, AreNamedWithoutTheirBudget) {
  EXPECT_EQ(series_of("topk:k=64"), "topk");
  EXPECT_EQ(series_of("squeezed:sparsity=0.9,levels=2"), "squeezed:levels=2");
  EXPECT_EQ(series_of("full"), "full");
  EXPECT_EQ(budget_of("saap:probes=32,window=9"), 32.0);
  EXPECT_FALSE(budget_of("topk:k=1%").has_value()) << "a share";
  EXPECT_FALSE(budget_of("full").has_value());
  EXPECT_NE(style_of("squeezed:sparsity=0.9,levels=2"), style_of("squeezed:sparsity=0.9"));
}

TEST(ValueAt, InterpolatesBetweenMeasuredPointsAlone) {
  const std::vector<std::pair<double, double>> points = {{0.04, 1.0}, {0.01, 0.0}, {0.16, 2.0}};
  EXPECT_NEAR(*value_at(points, 0.02, true), 0.5, 1e-12);
  EXPECT_NEAR(*value_at(points, 0.08, true), 1.5, 1e-12);
  EXPECT_EQ(*value_at(points, 0.16, true), 2.0);
  EXPECT_FALSE(value_at(points, 0.009, true));
  EXPECT_FALSE(value_at(points, 0.17, true));
  EXPECT_FALSE(value_at({}, 0.1, true));
  EXPECT_EQ(*value_at({{0.1, 1.0}, {0.1, 3.0}}, 0.1, true), 3.0);
  EXPECT_EQ(*value_at({{0.1, 1.0}, {0.1, 3.0}}, 0.1, false), 1.0);
}

TEST(IndexShares, QueriesThatAreKeptAreHeldButNotWrittenForEveryKey) {
  const ModelConfig config = {.layers = 6, .query_heads = 8, .kv_heads = 2, .head_dim = 64};
  constexpr std::int64_t kTokens = 16384, kRow = 256;  // bytes of a key and its value
  const auto shares = [&](const char* spec) {
    return index_shares(parse_spec(spec), config, kTokens, 6 * 2 * kTokens * kRow);
  };
  // A sum of weights for each key, a position for each of the tenth that is kept.
  EXPECT_NEAR(shares("h2o").update * kTokens * kRow, 4.4, 0.01);
  EXPECT_GT(shares("h2o").held * kRow, 4.4 + 2048.0 * 8 * 64 * 2 / kTokens / 2);
  EXPECT_NEAR(shares("double-sparsity").update * kTokens * kRow, 4.0, 0.01);
  EXPECT_EQ(shares("ideal").update, 0.0);
  EXPECT_GT(shares("ideal").held, 0.0);
  EXPECT_EQ(shares("streaming").held, 0.0);
}

}  // namespace
}  // namespace lode
