// SPDX-License-Identifier: Apache-2.0
// The three kinds of chart, laid out so that nothing overlaps: names of lines stand in a column at the right,
// pushed apart; maps are as wide as their labels need.
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "base/text.h"
#include "lab/report/svg_draw.h"

namespace lode {

namespace {

constexpr double kPlotWidth = 470, kTop = 40, kLabelGap = 16;

/// The first words of a title that fit; SVG does not break lines.
std::string fitted(std::string_view text, double width, double size) {
  if (text_width(text, size) <= width) return std::string(text);
  std::string cut(text);
  while (!cut.empty() && text_width(cut + "…", size) > width) {
    do cut.pop_back();
    while (!cut.empty() && (static_cast<unsigned char>(cut.back()) & 0xc0) == 0x80);
    if (!cut.empty() && static_cast<unsigned char>(cut.back()) >= 0xc0) cut.pop_back();
  }
  return cut + "…";
}

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  void add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

bool drawable(const Axis& axis, double value) {
  return std::isfinite(value) && (!axis.log || value > 0);
}

/// To what the axis asks for, and to more than one value.
void widen(const Axis& axis, Range& range) {
  if (range.empty()) range = {axis.log ? 0.1 : 0.0, 1.0};
  if (axis.low) range.low = std::min(range.low, *axis.low);
  if (axis.high) range.high = std::max(range.high, *axis.high);
  if (range.low == range.high) {
    range.low = axis.log ? range.low / 1.5 : range.low - 0.5 * std::max(std::abs(range.low), 1e-9);
    range.high = axis.log ? range.high * 1.5 : range.high + 0.5 * std::max(std::abs(range.high), 1e-9);
  }
}

bool drawable(const LineChart& chart, const ChartPoint& p) {
  return drawable(chart.x, p.x) && drawable(chart.y, p.y);
}

/// The ranges of what is drawn.
void ranges(const LineChart& chart, Range& x, Range& y) {
  for (const Series& s : chart.series) {
    for (const ChartPoint& p : s.points) {
      if (!drawable(chart, p)) continue;
      x.add(p.x);
      y.add(p.y);
    }
  }
  for (const LineChart::Rule& rule : chart.rules) {
    if (drawable(chart.y, rule.y)) y.add(rule.y);
  }
  widen(chart.x, x);
  widen(chart.y, y);
}

void draw_axes(SvgCanvas& canvas, const LineChart& chart, const Scale& x, const Scale& y, double left,
               double bottom) {
  for (const double tick : y.ticks()) {
    canvas.line(left, y(tick), left + kPlotWidth, y(tick), "grid");
    canvas.text(left - 8, y(tick) + 4, y.label(tick), "tick", "end");
  }
  double free_from = 0;
  for (const double tick : x.ticks()) {
    canvas.line(x(tick), kTop, x(tick), bottom, "grid");
    const double half = text_width(x.label(tick)) / 2;
    if (x(tick) - half < free_from) continue;
    canvas.text(x(tick), bottom + 18, x.label(tick), "tick", "middle");
    free_from = x(tick) + half + 6;
  }
  canvas.line(left, bottom, left + kPlotWidth, bottom, "axis");
  canvas.line(left, kTop, left, bottom, "axis");
  canvas.text(left + kPlotWidth / 2, bottom + 40, chart.x.title, "name", "middle");
  canvas.vertical_text(16, (kTop + bottom) / 2, chart.y.title, "name");
}

/// Series of one method have its colour, and each another dash and marker, as long as there are some.
std::vector<Series> told_apart(std::vector<Series> all) {
  constexpr int kColours = 8, kKinds = 4 * kColours;
  std::set<int> used;
  std::vector<Series*> again;
  for (Series& s : all)
    if (!used.insert(s.style).second) again.push_back(&s);
  for (Series* const s : again) {
    int style = s->style;
    for (int tries = 0; tries < 4 && used.contains(style); ++tries) style = (style + kColours) % kKinds;
    for (int tries = 0; tries < kKinds && used.contains(style); ++tries) style = (style + 1) % kKinds;
    used.insert(s->style = style);
  }
  return all;
}

void draw_series(SvgCanvas& canvas, const Series& series, bool joined, const Scale& x, const Scale& y) {
  std::string d;
  for (const ChartPoint& p : series.points) {
    if (!joined || !x.holds(p.x) || !y.holds(p.y)) continue;
    d += fmt::format("{}{:.1f} {:.1f}", d.empty() ? "M" : "L", x(p.x), y(p.y));
  }
  if (d.find('L') != std::string::npos) canvas.path(d, series.style);
  for (const ChartPoint& p : series.points) {
    if (!x.holds(p.x) || !y.holds(p.y)) continue;
    if (p.low && p.high && y.holds(*p.low) && y.holds(*p.high))
      canvas.line(x(p.x), y(*p.low), x(p.x), y(*p.high), "interval");
    const std::string tip = p.tip.empty() ? series.label : p.tip;
    canvas.marker(x(p.x), y(p.y), series.style, tip, series.large ? 2.0 : 1.0);
  }
}

/// The share of the way from white to dark blue as a colour; luminance falls evenly, so that it prints in
/// grey.
std::string ramp(double share) {
  static constexpr double kStops[][3] = {
      {247, 251, 255}, {198, 219, 239}, {107, 174, 214}, {33, 113, 181}, {8, 48, 107}};
  const double at = std::clamp(share, 0.0, 1.0) * 4;
  const auto i = std::min(3, static_cast<int>(at));
  const double t = at - i;
  int rgb[3];
  for (int c = 0; c < 3; ++c)
    rgb[c] = static_cast<int>(std::lround(kStops[i][c] + t * (kStops[i + 1][c] - kStops[i][c])));
  return fmt::format("#{:02x}{:02x}{:02x}", rgb[0], rgb[1], rgb[2]);
}

double widest(const std::vector<std::string>& labels, double size) {
  double width = 0;
  for (const std::string& label : labels) width = std::max(width, text_width(label, size));
  return width;
}

constexpr double kCellHeight = 24, kSmall = 11;

double cell_width(const HeatMaps::Panel& panel) {
  return std::max(38.0, widest(panel.columns, kSmall) + 8);
}

/// A title in lines that are about `width` wide at most, broken behind the colons and commas of a spec; a
/// piece that is wider by itself stays whole.
std::vector<std::string> wrapped(std::string_view title, double width) {
  std::vector<std::string> lines;
  for (std::size_t at = 0; at < title.size();) {
    const std::size_t end = std::min(title.find_first_of(":,", at), title.size() - 1) + 1;
    const std::string piece(title.substr(at, end - at));
    const bool fits = !lines.empty() && text_width(lines.back() + piece) <= width;
    fits ? lines.back() += piece : lines.emplace_back(piece);
    at = end;
  }
  return lines;
}

constexpr double kLine = 15;

struct PanelSize {
  std::vector<std::string> title;  // its lines
  double left = 0, width = 0, cells_height = 0;
};

PanelSize size_of(const HeatMaps& maps, const HeatMaps::Panel& panel) {
  constexpr double kTitleWidth = 150;
  PanelSize size;
  size.left = 22 + widest(panel.rows, kSmall) + 8;
  const double cells = cell_width(panel) * static_cast<double>(panel.columns.size());
  size.title = wrapped(panel.title, std::max(cells, kTitleWidth));
  size.width =
      size.left + std::max({cells, widest(size.title, kFont), text_width(maps.x_title, kSmall)}) + 18;
  size.cells_height = kCellHeight * static_cast<double>(panel.rows.size()) + 44;
  return size;
}

/// `titles`: lines that the longest title of the maps takes.
void draw_panel(SvgCanvas& canvas, const HeatMaps& maps, const HeatMaps::Panel& panel, const PanelSize& size,
                std::size_t titles, double x0, double y0) {
  const double w = cell_width(panel), left = x0 + size.left;
  const double top = y0 + 7 + kLine * static_cast<double>(titles);
  for (std::size_t i = 0; i < size.title.size(); ++i)  // the last line stands right above the cells
    canvas.text(left, top - 8 - kLine * static_cast<double>(size.title.size() - 1 - i), size.title[i],
                "name");
  for (std::size_t r = 0; r < panel.rows.size(); ++r) {
    const double y = top + kCellHeight * static_cast<double>(r);
    canvas.text(left - 6, y + 16, panel.rows[r], "tick", "end", kSmall);
    for (std::size_t c = 0; c < panel.columns.size(); ++c) {
      const double x = left + w * static_cast<double>(c);
      const auto& value = panel.cells[r][c];
      const std::string where =
          fmt::format("{} {}, {} {}: ", maps.x_title, panel.columns[c], maps.y_title, panel.rows[r]);
      if (!value) {
        canvas.rect(x, y, w - 1, kCellHeight - 1, "missing", where + "not measured");
        continue;
      }
      const double share = (*value - maps.low) / (maps.high - maps.low);
      const std::string number =
          maps.percent ? fmt::format("{:.0f}", 100 * *value) : fmt::format("{:.3g}", *value);
      canvas.cell(x, y, w - 1, kCellHeight - 1, ramp(share), where + number);
      canvas.text(x + w / 2 - 0.5, y + 16, number, share > 0.55 ? "on-dark" : "on-light", "middle", kSmall);
    }
  }
  const double bottom = top + kCellHeight * static_cast<double>(panel.rows.size());
  for (std::size_t c = 0; c < panel.columns.size(); ++c)
    canvas.text(left + w * (static_cast<double>(c) + 0.5), bottom + 14, panel.columns[c], "tick", "middle",
                kSmall);
  canvas.text(left, bottom + 31, maps.x_title, "tick", "start", kSmall);
  canvas.vertical_text(x0 + 12, (top + bottom) / 2, maps.y_title, "tick");
}

void draw_colour_scale(SvgCanvas& canvas, const HeatMaps& maps, double x, double y) {
  constexpr int kSteps = 40;
  for (int i = 0; i < kSteps; ++i) canvas.cell(x + 4.0 * i, y, 4.2, 12, ramp((i + 0.5) / kSteps), "");
  const auto label = [&](double value) {
    return maps.percent ? fmt::format("{:.0f} %", 100 * value) : fmt::format("{:.3g}", value);
  };
  canvas.text(x - 6, y + 10, label(maps.low), "tick", "end", kSmall);
  canvas.text(x + 4.0 * kSteps + 6, y + 10, label(maps.high) + "  " + maps.scale_title, "tick", "start",
              kSmall);
}

}  // namespace

bool has_points(const LineChart& chart) {
  return std::any_of(chart.series.begin(), chart.series.end(), [&](const Series& s) {
    return std::any_of(s.points.begin(), s.points.end(),
                       [&](const ChartPoint& p) { return drawable(chart, p); });
  });
}

std::string svg_of(const LineChart& given) {
  LineChart chart = given;
  chart.series = told_apart(given.series);
  Range xs, ys;
  ranges(chart, xs, ys);
  std::size_t names = chart.rules.size();
  std::vector<std::string> labels;
  for (const Series& s : chart.series) {
    labels.push_back(s.label);
    names += 1;
  }
  for (const LineChart::Rule& r : chart.rules) labels.push_back(r.label);
  const double height = std::max(320.0, kLabelGap * static_cast<double>(names) + 10);
  const double bottom = kTop + height;
  const Scale y(chart.y, ys.low, ys.high, bottom, kTop);
  std::vector<std::string> ticks;
  for (const double t : y.ticks()) ticks.push_back(y.label(t));
  const double left = 34 + widest(ticks, kFont);
  const Scale x(chart.x, xs.low, xs.high, left, left + kPlotWidth);
  const double right = left + kPlotWidth + 34;
  const double width = std::max(right + widest(labels, kFont) + 24, left + text_width(chart.title, 14) + 10);
  SvgCanvas canvas(width, bottom + 52, chart.title);
  canvas.text(left, 22, chart.title, "title", "start", 14);
  draw_axes(canvas, chart, x, y, left, bottom);

  struct End {
    double x, y;
    int style;  // -1 = a rule
    std::string label;
  };
  std::vector<End> ends;
  for (const LineChart::Rule& rule : chart.rules) {
    if (!y.holds(rule.y)) continue;
    canvas.line(left, y(rule.y), left + kPlotWidth, y(rule.y), "rule");
    if (!rule.label.empty()) ends.push_back({left + kPlotWidth, y(rule.y), -1, rule.label});
  }
  for (const Series& s : chart.series) {
    draw_series(canvas, s, chart.joined, x, y);
    const auto last = std::find_if(s.points.rbegin(), s.points.rend(),
                                   [&](const ChartPoint& p) { return x.holds(p.x) && y.holds(p.y); });
    if (last != s.points.rend()) ends.push_back({x(last->x), y(last->y), s.style, s.label});
  }
  // Clouds have no end that a name could stand at: theirs are a legend, in the order of the series.
  if (!chart.joined)
    for (End& e : ends) e.y = kTop;
  // Names of lines that end at one height are in the order in which their leaders do not cross: pushed down
  // from the upper half, the line that ends first has the lowest name; pushed up, the highest.
  std::stable_sort(ends.begin(), ends.end(), [&](const End& a, const End& b) {
    if (!chart.joined) return false;
    if (std::abs(a.y - b.y) > 0.5) return a.y < b.y;
    return a.y < kTop + height / 2 ? a.x > b.x : a.x < b.x;
  });
  std::vector<double> wanted;
  for (const End& e : ends) wanted.push_back(e.y);
  const std::vector<double> at = spread(wanted, kLabelGap, kTop + 4, bottom - 2);
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const End& e = ends[i];
    if (chart.joined) canvas.line(std::max(e.x + 7, left), e.y, right - 8, at[i], "leader");
    if (e.style >= 0) canvas.marker(right, at[i], e.style);
    canvas.text(right + 10, at[i] + 4, e.label, "label");
  }
  return std::move(canvas).finish();
}

std::string svg_of(const HeatMaps& maps) {
  constexpr double kWidest = 940;
  std::vector<PanelSize> sizes;
  double cell_w = 0, cell_h = 0;
  std::size_t titles = 1;
  for (const auto& panel : maps.panels) {
    sizes.push_back(size_of(maps, panel));
    cell_w = std::max(cell_w, sizes.back().width);
    cell_h = std::max(cell_h, sizes.back().cells_height);
    titles = std::max(titles, sizes.back().title.size());
  }
  cell_h += 7 + kLine * static_cast<double>(titles);
  const std::size_t columns =
      std::max<std::size_t>(1, static_cast<std::size_t>(kWidest / std::max(cell_w, 1.0)));
  const std::size_t used = std::max<std::size_t>(1, std::min(columns, maps.panels.size()));
  const std::size_t rows = (maps.panels.size() + used - 1) / used;
  const double width = std::max({cell_w * static_cast<double>(used), text_width(maps.title, 14) + 30,
                                 240 + text_width(maps.scale_title, kSmall) + 60});
  SvgCanvas canvas(width, 66 + cell_h * static_cast<double>(rows), maps.title);
  canvas.text(12, 22, maps.title, "title", "start", 14);
  draw_colour_scale(canvas, maps, 60, 36);
  for (std::size_t i = 0; i < maps.panels.size(); ++i) {
    draw_panel(canvas, maps, maps.panels[i], sizes[i], titles, cell_w * static_cast<double>(i % used),
               62 + cell_h * static_cast<double>(i / used));
  }
  return std::move(canvas).finish();
}

std::vector<std::string> in_words(const BarChart& chart) {
  std::vector<std::string> lines;
  for (const BarChart::Bar& bar : chart.bars) {
    std::vector<std::string> parts;
    const std::vector<double>& told = bar.told.empty() ? bar.lengths : bar.told;
    for (std::size_t p = 0; p < told.size(); ++p)
      if (told[p] > 0 && std::isfinite(told[p]))
        parts.push_back((p < chart.parts.size() ? chart.parts[p] + " " : "") +
                        with_unit(told[p], chart.x.unit));
    if (bar.mark) parts.push_back(chart.mark_title + " " + with_unit(*bar.mark, chart.x.unit));
    std::string line = bar.label;
    if (!bar.note.empty()) line += ", " + bar.note;
    if (!parts.empty()) line += (bar.note.empty() ? ": " : "; ") + join(parts);
    lines.push_back(std::move(line));
  }
  return lines;
}

std::string svg_of(const BarChart& chart) {
  constexpr double kBar = 16, kStep = 26;
  std::vector<std::string> labels, notes;
  double most = 0;
  for (const BarChart::Bar& bar : chart.bars) {
    labels.push_back(bar.label);
    notes.push_back(bar.note);
    double sum = 0;
    for (const double length : bar.lengths) sum += std::isfinite(length) ? length : 0;
    most = std::max({most, sum, bar.mark.value_or(0)});
  }
  const double left = 16 + widest(labels, kFont) + 10;
  const double top = 64, bottom = top + kStep * static_cast<double>(chart.bars.size());
  const double width =
      std::max(left + kPlotWidth + 16 + widest(notes, kSmall) + 16, text_width(chart.title, 14) + 30);
  SvgCanvas canvas(width, bottom + 52, chart.title, join(in_words(chart), "\n"));
  canvas.text(12, 22, chart.title, "title", "start", 14);
  double legend = left;
  for (std::size_t p = 0; p < chart.parts.size(); ++p) {
    canvas.rect(legend, 38, 12, 12, fmt::format("p{}", p % 4));
    canvas.text(legend + 17, 48, chart.parts[p], "label");
    legend += 17 + text_width(chart.parts[p]) + 22;
  }
  if (!chart.mark_title.empty()) {
    canvas.line(legend + 5, 36, legend + 5, 52, "limit");
    canvas.text(legend + 14, 48, chart.mark_title, "label");
  }
  const Scale x(chart.x, 0, most > 0 ? most : 1, left, left + kPlotWidth);
  for (const double tick : x.ticks()) {
    canvas.line(x(tick), top, x(tick), bottom, "grid");
    canvas.text(x(tick), bottom + 18, x.label(tick), "tick", "middle");
  }
  for (std::size_t i = 0; i < chart.bars.size(); ++i) {
    const BarChart::Bar& bar = chart.bars[i];
    const double y = top + kStep * static_cast<double>(i) + (kStep - kBar) / 2;
    canvas.text(left - 8, y + 12, bar.label, "label", "end");
    double sum = 0;
    for (std::size_t p = 0; p < bar.lengths.size(); ++p) {
      if (!(bar.lengths[p] > 0) || !std::isfinite(bar.lengths[p])) continue;
      canvas.rect(x(sum), y, std::max(0.5, x(sum + bar.lengths[p]) - x(sum)), kBar, fmt::format("p{}", p % 4),
                  fmt::format("{}: {} {}", bar.label, p < chart.parts.size() ? chart.parts[p] : "",
                              with_unit((bar.told.empty() ? bar.lengths : bar.told)[p], chart.x.unit)));
      sum += bar.lengths[p];
    }
    if (bar.mark) canvas.line(x(*bar.mark), y - 3, x(*bar.mark), y + kBar + 3, "limit");
    canvas.text(std::max(x(sum), x(bar.mark.value_or(0))) + 8, y + 12, fitted(bar.note, 400, kSmall), "tick",
                "start", kSmall);
  }
  canvas.line(left, top, left, bottom, "axis");
  canvas.text(left + kPlotWidth / 2, bottom + 40, chart.x.title, "name", "middle");
  return std::move(canvas).finish();
}

std::string svg_of(const DotChart& chart) {
  constexpr double kStep = 30;
  std::vector<std::string> labels;
  Range range;
  for (const DotChart::Row& row : chart.rows) {
    labels.push_back(row.label);
    for (const auto& dots : row.dots)
      for (const double x : dots)
        if (drawable(chart.x, x)) range.add(x);
  }
  widen(chart.x, range);
  const double left = 16 + widest(labels, kFont) + 10;
  const double top = 64, bottom = top + kStep * static_cast<double>(chart.rows.size());
  SvgCanvas canvas(std::max(left + kPlotWidth + 40, text_width(chart.title, 14) + 30), bottom + 52,
                   chart.title);
  canvas.text(12, 22, chart.title, "title", "start", 14);
  double legend = left;
  for (std::size_t k = 0; k < chart.kinds.size(); ++k) {
    canvas.marker(legend + 6, 44, static_cast<int>(k));
    canvas.text(legend + 17, 48, chart.kinds[k], "label");
    legend += 17 + text_width(chart.kinds[k]) + 22;
  }
  const Scale x(chart.x, range.low, range.high, left, left + kPlotWidth);
  for (const double tick : x.ticks()) {
    canvas.line(x(tick), top, x(tick), bottom, "grid");
    canvas.text(x(tick), bottom + 18, x.label(tick), "tick", "middle");
  }
  for (std::size_t r = 0; r < chart.rows.size(); ++r) {
    const DotChart::Row& row = chart.rows[r];
    const double y = top + kStep * (static_cast<double>(r) + 0.5);
    canvas.text(left - 8, y + 4, row.label, "label", "end");
    for (std::size_t k = 0; k < row.dots.size(); ++k) {  // one kind above the other
      const double at = y + 10 * (static_cast<double>(k) + 0.5 - 0.5 * static_cast<double>(row.dots.size()));
      for (const double value : row.dots[k])
        if (x.holds(value))
          canvas.marker(x(value), at, static_cast<int>(k),
                        fmt::format("{}: {}", k < chart.kinds.size() ? chart.kinds[k] : "",
                                    with_unit(value, chart.x.unit)));
    }
  }
  canvas.line(left, top, left, bottom, "axis");
  canvas.text(left + kPlotWidth / 2, bottom + 40, chart.x.title, "name", "middle");
  return std::move(canvas).finish();
}

std::string_view chart_css() {
  // Okabe and Ito's palette, its yellow darkened for white paper.
  static const std::string css = [] {
    static constexpr std::string_view kLight[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                  "#b8860b", "#56b4e9", "#444444", "#8b3fbf"};
    static constexpr std::string_view kDark[] = {"#56a8e8", "#ff8a3d", "#2fd3a3", "#eaa3cb",
                                                 "#e6c34a", "#9fd8ff", "#c8c8c8", "#c58bf0"};
    static constexpr std::string_view kParts[] = {"#2171b5", "#9ecae1", "#fdae6b", "#969696"};
    const auto colours = [](std::span<const std::string_view> list, std::string_view paper) {
      std::string rules;
      for (std::size_t i = 0; i < list.size(); ++i)
        rules += fmt::format(
            ".s{0}{{stroke:{1}}}.f{0}{{fill:{1};stroke:{2}}}.h{0}{{fill:{2};stroke:{1};stroke-width:1.6}}\n",
            i, list[i], paper);
      return rules;
    };
    std::string rules =
        ".paper{fill:#ffffff}.title{fill:#111;font-weight:bold}.name,.label{fill:#222}.tick{fill:#444}\n"
        ".grid{stroke:#e2e2e2}.axis{stroke:#555}.rule{stroke:#333;stroke-dasharray:6 "
        "4}.leader{stroke:#bbb;stroke-width:.7}\n"
        ".interval{stroke:#999}.limit{stroke:#c00000;stroke-width:2.5}.line{fill:none;stroke-width:1.8}.mark{"
        "stroke-width:.8}\n"
        ".missing{fill:#eee;stroke:#bbb;stroke-dasharray:2 2}.on-dark{fill:#fff}.on-light{fill:#111}\n" +
        colours(kLight, "#ffffff");
    for (std::size_t i = 0; i < 4; ++i) rules += fmt::format(".p{}{{fill:{}}}", i, kParts[i]);
    return rules +
           "\n@media screen and (prefers-color-scheme:dark){\n"
           ".paper{fill:#16181c}.title{fill:#f2f2f2}.name,.label{fill:#ddd}.tick{fill:#b4b4b4}\n"
           ".grid{stroke:#33363c}.axis{stroke:#999}.rule{stroke:#ccc}.leader{stroke:#666}.interval{stroke:#"
           "888}\n"
           ".limit{stroke:#ff6b6b}.missing{fill:#2a2d33;stroke:#666}\n" +
           colours(kDark, "#16181c") + "}\n";
  }();
  return css;
}

std::string svg_file(std::string_view svg) {
  const std::size_t at = svg.find('>') + 1;
  return fmt::format("{}\n<style>\n{}</style>{}", svg.substr(0, at), chart_css(), svg.substr(at));
}

}  // namespace lode
