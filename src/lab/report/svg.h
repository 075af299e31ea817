// SPDX-License-Identifier: Apache-2.0
// Charts as SVG text: written out as numbers and shapes, so that a page needs no script, no font file and no
// network. Colours are classes with a light and a dark value; every series also has its own marker and dash,
// so that a chart reads in grey.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lode {

/// For text and attribute values of XML and HTML. Bytes that are not UTF-8, and control characters, become
/// '?'.
std::string xml_escape(std::string_view text);

struct Axis {
  enum class Unit { plain, percent, seconds, microseconds, tokens };
  std::string title;
  Unit unit = Unit::plain;  ///< how ticks are written: percent takes fractions of one, seconds and
                            ///< microseconds choose their own unit
  bool log = false;
  std::optional<double> low, high;  ///< else what the points need
};

struct ChartPoint {
  double x = 0, y = 0;
  std::optional<double> low, high;  ///< an interval of y
  std::string tip;                  ///< shown when the pointer rests on it
};

struct Series {
  std::string label;
  int style = 0;  ///< colour, marker and dash; the same number looks the same in all charts
  std::vector<ChartPoint> points;
  bool large = false;  ///< its markers, twice
};

/// Lines through points, each named at its right end; points that are not finite, or not positive on a
/// logarithmic axis, are left out.
struct LineChart {
  std::string title;
  Axis x, y;
  std::vector<Series> series;
  struct Rule {
    std::string label;
    double y = 0;
  };
  std::vector<Rule> rules;  ///< dashed horizontal lines, such as full attention's score
  bool joined = true;       ///< else markers alone, with a legend
};
std::string svg_of(const LineChart& chart);
bool has_points(const LineChart& chart);  ///< whether any can be drawn

/// Small multiples of maps on one colour scale.
struct HeatMaps {
  std::string title, x_title, y_title, scale_title;
  double low = 0, high = 1;
  bool percent = false;  ///< values are fractions that are written in percent
  struct Panel {
    std::string title;
    std::vector<std::string> columns, rows;                 ///< labels
    std::vector<std::vector<std::optional<double>>> cells;  ///< [rows][columns]; nothing = not measured
  };
  std::vector<Panel> panels;
};
std::string svg_of(const HeatMaps& maps);

/// Stacked horizontal bars, each with a mark.
struct BarChart {
  std::string title, mark_title;
  Axis x;
  std::vector<std::string> parts;  ///< legend
  struct Bar {
    std::string label, note;      ///< the note stands at the bar's end
    std::vector<double> lengths;  ///< one a part
    std::optional<double> mark;
    std::vector<double> told;  ///< what tooltips say of the parts; empty: their lengths
  };
  std::vector<Bar> bars;
};
std::string svg_of(const BarChart& chart);
/// What the bars show, a line each, for those who cannot see them or want to copy it.
std::vector<std::string> in_words(const BarChart& chart);

/// Rows of dots on one axis, a few kinds of dots a row.
struct DotChart {
  std::string title;
  Axis x;
  std::vector<std::string> kinds;  ///< legend
  struct Row {
    std::string label;
    std::vector<std::vector<double>> dots;  ///< [kinds]
  };
  std::vector<Row> rows;
};
std::string svg_of(const DotChart& chart);

/// The rules that colour charts; a page has them once.
std::string_view chart_css();
/// A chart as a file of its own, with its colours.
std::string svg_file(std::string_view svg);

/// Round numbers from at most `low` to at least `high`, about `count` of them.
std::vector<double> nice_ticks(double low, double high, int count);
/// Likewise, 1, 2 and 5 times powers of ten.
std::vector<double> log_ticks(double low, double high);
/// Pushes labels apart so that neighbours are at least `gap` away from each other, within [low, high] where
/// they fit; order is kept.
std::vector<double> spread(std::vector<double> wanted, double gap, double low, double high);

}  // namespace lode
