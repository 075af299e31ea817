// SPDX-License-Identifier: Apache-2.0
#include "lab/report/svg_draw.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "base/text.h"

namespace lode {

namespace {

constexpr int kStyles = 8;

/// A number with few digits and no needless zeros.
std::string short_number(double value) {
  std::string text = fmt::format("{:.4g}", value);
  return text == "-0" ? "0" : text;
}

/// The eight markers, about r pixels from their middle to their edge.
std::string marker_path(double x, double y, int shape, double r) {
  const auto polygon = [&](std::initializer_list<std::array<double, 2>> corners) {
    std::string d;
    for (const auto& [dx, dy] : corners)
      d += fmt::format("{}{:.1f} {:.1f}", d.empty() ? "M" : "L", x + r * dx, y + r * dy);
    return d + "Z";
  };
  switch (shape) {
    case 1:
      return polygon({{-0.9, -0.9}, {0.9, -0.9}, {0.9, 0.9}, {-0.9, 0.9}});
    case 2:
      return polygon({{0, -1.1}, {1.05, 0.9}, {-1.05, 0.9}});
    case 3:
      return polygon({{0, -1.25}, {1.25, 0}, {0, 1.25}, {-1.25, 0}});
    case 4:
      return polygon({{0, 1.1}, {1.05, -0.9}, {-1.05, -0.9}});
    case 5:
      return polygon({{-0.4, -1.1},
                      {0.4, -1.1},
                      {0.4, -0.4},
                      {1.1, -0.4},
                      {1.1, 0.4},
                      {0.4, 0.4},
                      {0.4, 1.1},
                      {-0.4, 1.1},
                      {-0.4, 0.4},
                      {-1.1, 0.4},
                      {-1.1, -0.4},
                      {-0.4, -0.4}});
    case 6:
      return polygon({{-1.1, 0}, {0.9, -1.05}, {0.9, 1.05}});
    case 7:
      return polygon({{1.1, 0}, {-0.9, -1.05}, {-0.9, 1.05}});
    default:
      return fmt::format("M{:.1f} {:.1f}a{r} {r} 0 1 0 {w} 0a{r} {r} 0 1 0 -{w} 0Z", x - r, y,
                         fmt::arg("r", r), fmt::arg("w", 2 * r));
  }
}

}  // namespace

std::string xml_escape(std::string_view text) {
  std::string out;
  const bool valid = invalid_utf8(text) == std::string::npos;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += (byte < 0x20 && c != '\n' && c != '\t') || (byte >= 0x80 && !valid) ? '?' : c;
    }
  }
  return out;
}

/// As wide as DejaVu Sans, the widest of the fonts that are asked for.
double text_width(std::string_view text, double size) {
  double em = 0;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte & 0xc0) == 0x80) continue;  // the middle of a character
    if (std::string_view("iljtfr.,:;'|!()[]/ -").find(c) != std::string_view::npos) {
      em += 0.38;
    } else if (std::string_view("mwMW%@=+").find(c) != std::string_view::npos) {
      em += 0.9;
    } else {
      em += byte >= 'A' && byte <= 'Z' ? 0.71 : 0.62;
    }
  }
  return em * size;
}

SvgCanvas::SvgCanvas(double width, double height, std::string_view title, std::string_view description)
    : width_(width) {
  out_ = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" "
      "height=\"{1:.0f}\" role=\"img\" font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\" "
      "font-size=\"{2}\">\n<title>{3}</title>\n{4}<rect class=\"paper\" width=\"100%\" height=\"100%\"/>\n",
      width, height, kFont, xml_escape(title),
      description.empty() ? std::string() : fmt::format("<desc>{}</desc>\n", xml_escape(description)));
}

void SvgCanvas::line(double x1, double y1, double x2, double y2, std::string_view css_class) {
  out_ += fmt::format("<line class=\"{}\" x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\"/>\n",
                      css_class, x1, y1, x2, y2);
}

void SvgCanvas::rect(double x, double y, double w, double h, std::string_view css_class,
                     std::string_view tip) {
  out_ += fmt::format("<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\">",
                      css_class, x, y, w, h);
  if (!tip.empty()) out_ += fmt::format("<title>{}</title>", xml_escape(tip));
  out_ += "</rect>\n";
}

void SvgCanvas::cell(double x, double y, double w, double h, std::string_view fill, std::string_view tip) {
  out_ += fmt::format(
      "<rect fill=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\"><title>{}</title>"
      "</rect>\n",
      fill, x, y, w, h, xml_escape(tip));
}

void SvgCanvas::text(double x, double y, std::string_view text, std::string_view css_class,
                     std::string_view anchor, double size) {
  out_ += fmt::format(
      "<text class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\" font-size=\"{}\">{}</text>\n",
      css_class, x, y, anchor, size, xml_escape(text));
}

void SvgCanvas::vertical_text(double x, double y, std::string_view text, std::string_view css_class) {
  out_ += fmt::format(
      "<text class=\"{}\" transform=\"translate({:.1f} {:.1f}) rotate(-90)\" "
      "text-anchor=\"middle\">{}</text>\n",
      css_class, x, y, xml_escape(text));
}

void SvgCanvas::path(std::string_view d, int style) {
  static constexpr std::string_view kDashes[] = {"", "7 3", "2 3", "9 3 2 3"};
  out_ += fmt::format("<path class=\"line s{}\" stroke-dasharray=\"{}\" d=\"{}\"/>\n", style % kStyles,
                      kDashes[style / kStyles % 4], d);
}

void SvgCanvas::marker(double x, double y, int style, std::string_view tip, double size) {
  constexpr double kRadius = 4;
  // A second round of the eight colours has hollow markers, a third other shapes.
  const int shape = (style + 3 * (style / (2 * kStyles))) % kStyles;
  out_ += fmt::format("<path class=\"mark {}{}\" d=\"{}\">", style / kStyles % 2 == 0 ? "f" : "h",
                      style % kStyles, marker_path(x, y, shape, size * kRadius));
  if (!tip.empty()) out_ += fmt::format("<title>{}</title>", xml_escape(tip));
  out_ += "</path>\n";
}

std::string SvgCanvas::finish() && {
  return std::move(out_) + "</svg>\n";
}

Scale::Scale(const Axis& axis, double low, double high, double from, double to)
    : axis_(axis), from_(from), to_(to) {
  if (axis.log) {
    ticks_ = axis.unit == Axis::Unit::tokens ? std::vector<double>() : log_ticks(low, high);
    if (axis.unit == Axis::Unit::tokens) {  // lengths are powers of two
      for (double x = std::exp2(std::floor(std::log2(low))); x < high * 1.001 || ticks_.size() < 2; x *= 2)
        ticks_.push_back(x);
    }
  } else {
    ticks_ = nice_ticks(low, high, 6);
  }
  low_ = axis.low.value_or(std::min(low, ticks_.front()));
  high_ = axis.high.value_or(std::max(high, ticks_.back()));
  std::erase_if(ticks_, [&](double t) {
    const double slack = 1e-9 * (std::abs(low_) + std::abs(high_));
    return t < low_ - slack || t > high_ + slack;
  });
}

bool Scale::holds(double value) const {
  return std::isfinite(value) && (!axis_.log || value > 0);
}

double Scale::operator()(double value) const {
  const auto at = [this](double x) { return axis_.log ? std::log(x) : x; };
  const double share = (at(value) - at(low_)) / (at(high_) - at(low_));
  return from_ + (to_ - from_) * std::clamp(share, -0.02, 1.02);
}

std::string Scale::label(double value) const {
  return with_unit(value, axis_.unit);
}

std::string with_unit(double value, Axis::Unit unit) {
  switch (unit) {
    case Axis::Unit::percent:
      return short_number(100 * value) + " %";
    case Axis::Unit::microseconds:
      return value == 0     ? "0"
             : value >= 1e6 ? short_number(value / 1e6) + " s"
             : value >= 1e3 ? short_number(value / 1e3) + " ms"
                            : short_number(value) + " µs";
    case Axis::Unit::seconds:
      return value == 0 ? "0" : with_unit(1e6 * value, Axis::Unit::microseconds);
    case Axis::Unit::tokens:
      return value >= 1024 && std::fmod(value, 1024) == 0 ? short_number(value / 1024) + "k"
                                                          : short_number(value);
    default:
      return short_number(value);
  }
}

std::vector<double> nice_ticks(double low, double high, int count) {
  if (!(high > low)) high = low + (low == 0 ? 1 : std::abs(low));
  const double rough = (high - low) / count;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (const double s : {1.0, 2.0, 5.0}) {
    if (s * power >= rough * (1 - 1e-9)) {
      step = s * power;
      break;
    }
  }
  std::vector<double> ticks;
  const double first = std::floor(low / step + 1e-9);
  for (double i = first; ticks.size() < 2 || ticks.back() < high * (1 - 1e-12) - 1e-12 * step; ++i)
    ticks.push_back(i * step);
  return ticks;
}

std::vector<double> log_ticks(double low, double high) {
  const double first = std::floor(std::log10(low));
  const bool wide = std::log10(high) - std::log10(low) > 3.5;
  std::vector<double> ticks;
  for (double e = first;; ++e) {
    for (const double s : {1.0, 2.0, 5.0}) {
      if (wide && s != 1.0) continue;
      const double tick = s * std::pow(10.0, e);
      if (tick * (wide ? 10 : 2.5) <= low * 1.0001 || (!ticks.empty() && ticks.back() >= high * 0.9999))
        continue;
      ticks.push_back(tick);
    }
    if (!ticks.empty() && ticks.back() >= high * 0.9999) break;
  }
  // What lies wholly below the points says nothing.
  while (ticks.size() > 2 && ticks[1] <= low) ticks.erase(ticks.begin());
  return ticks;
}

std::vector<double> spread(std::vector<double> wanted, double gap, double low, double high) {
  // Blocks of labels that touch sit around the mean of what they want (pool adjacent violators).
  struct Block {
    double sum = 0;
    std::size_t count = 0;
    double first(double g) const {
      return sum / static_cast<double>(count) - g * (static_cast<double>(count) - 1) / 2;
    }
    double last(double g) const { return first(g) + g * (static_cast<double>(count) - 1); }
  };
  const double room = high - low - gap * (static_cast<double>(wanted.size()) - 1);
  std::vector<std::size_t> order(wanted.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return wanted[a] < wanted[b]; });
  std::vector<Block> blocks;
  for (const std::size_t i : order) {
    blocks.push_back({std::clamp(wanted[i], low, std::max(low, high)), 1});
    while (blocks.size() > 1 && blocks.back().first(gap) < blocks[blocks.size() - 2].last(gap) + gap) {
      Block& before = blocks[blocks.size() - 2];
      before.sum += blocks.back().sum;
      before.count += blocks.back().count;
      blocks.pop_back();
    }
  }
  std::vector<double> at;
  for (const Block& b : blocks) {
    for (std::size_t i = 0; i < b.count; ++i) at.push_back(b.first(gap) + gap * static_cast<double>(i));
  }
  // Into the room, from both ends.
  for (std::size_t i = 0; i < at.size(); ++i) at[i] = std::max(at[i], low + gap * static_cast<double>(i));
  if (room >= 0) {
    for (std::size_t i = at.size(); i-- > 0;)
      at[i] = std::min(at[i], high - gap * static_cast<double>(at.size() - 1 - i));
  }
  std::vector<double> result(wanted.size());
  for (std::size_t i = 0; i < order.size(); ++i) result[order[i]] = at[i];
  return result;
}

}  // namespace lode
