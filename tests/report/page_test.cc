// SPDX-License-Identifier: Apache-2.0
// The page's two forms: folds and links in HTML, plain text in Markdown.
#include "lab/report/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lode {
namespace {

using testing::HasSubstr;
using testing::Not;

Page example() {
  Page page("A page");
  page.paragraph("Look at " + link_to("the `first`", "a b") + " & at " + link_to("others", "Second one") +
                 ".");
  page.heading(2, "First", "a b");
  page.heading(3, "Inside");
  page.paragraph("One.");
  page.heading(2, "Second one");
  page.list({link_to("back", "a b")});
  return page;
}

TEST(Page, EachSectionIsAFoldAndTheFirstIsOpen) {
  const std::string html = example().html();
  EXPECT_THAT(html,
              HasSubstr("<details open=\"open\"><summary><h2>First</h2>\n</summary>\n"
                        "<div class=\"fold\" id=\"a-b\">\n<h3>Inside</h3>\n<p>One.</p>\n</div></details>\n"
                        "<details><summary><h2>Second one</h2>\n</summary>\n"
                        "<div class=\"fold\" id=\"Second-one\">\n"));
  EXPECT_THAT(html, HasSubstr("<nav><ul>\n<li><a href=\"#a-b\">First</a></li>\n"
                              "<li><a href=\"#Second-one\">Second one</a></li>\n</ul></nav>\n<details"));
  EXPECT_LT(html.find("Look at"), html.find("<nav>")) << "what came out stands first";
  EXPECT_THAT(html, HasSubstr("@media print{details::details-content{content-visibility:visible"));
  EXPECT_THAT(html, Not(HasSubstr("<script")));
}

TEST(Page, LinksLeadIntoFolds) {
  EXPECT_THAT(example().html(), HasSubstr("<p>Look at <a href=\"#a-b\">the <code>first</code></a> &amp; at "
                                          "<a href=\"#Second-one\">others</a>.</p>"));
  EXPECT_THAT(example().html(), HasSubstr("<li><a href=\"#a-b\">back</a></li>"));
}

TEST(Page, MarkdownStaysPlain) {
  EXPECT_EQ(
      example().markdown(),
      "# A page\n\nLook at the `first` & at others.\n\n## First\n\n### Inside\n\nOne.\n\n## Second one\n\n- "
      "back\n");
}

TEST(Page, APictureCanBeReadInWords) {
  Page page("A page");
  page.figure("bars", "Bars.", "<svg></svg>", {"`a`: 3 ms", "b: 4 ms"});
  page.figure("plain", "Plain.", "<svg></svg>");
  EXPECT_THAT(page.html(),
              HasSubstr("<figcaption>Bars.<details><summary>The picture in words</summary>\n<ul>\n"
                        "<li><code>a</code>: 3 ms</li>\n<li>b: 4 ms</li>\n</ul>\n</details></figcaption>"));
  EXPECT_THAT(page.html(), HasSubstr("<figcaption>Plain.</figcaption>"));
  EXPECT_THAT(page.markdown(), HasSubstr("\n\nBars.\n\n- `a`: 3 ms\n- b: 4 ms\n\n![Plain.]"));
}

TEST(Page, BracketsThatAreNoLinkStay) {
  Page page("A [page]");
  page.paragraph("a[1](#");
  page.paragraph("[x] (#y)");
  EXPECT_THAT(page.markdown(), HasSubstr("# A [page]\n\na[1](#\n\n[x] (#y)\n"));
  EXPECT_THAT(page.html(), HasSubstr("<p>a[1](#</p>\n<p>[x] (#y)</p>"));
  EXPECT_THAT(page.html(), Not(HasSubstr("<nav>"))) << "of a page without sections";
}

}  // namespace
}  // namespace lode
