// SPDX-License-Identifier: Apache-2.0
// What the charts draw with: text of about known width, shapes, scales, markers.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "lab/report/svg.h"

namespace lode {

inline constexpr double kFont = 12;  ///< pixels

/// About how wide a sans-serif text of `size` pixels is.
double text_width(std::string_view text, double size = kFont);

/// Collects elements and knows how large the picture is.
class SvgCanvas {
 public:
  /// `description`: for screen readers, to whom the picture's own text is one image.
  SvgCanvas(double width, double height, std::string_view title, std::string_view description = {});
  double width() const { return width_; }

  void line(double x1, double y1, double x2, double y2, std::string_view css_class);
  void rect(double x, double y, double w, double h, std::string_view css_class, std::string_view tip = {});
  /// A rectangle of one colour in light and dark alike.
  void cell(double x, double y, double w, double h, std::string_view fill, std::string_view tip);
  /// anchor: start, middle or end.
  void text(double x, double y, std::string_view text, std::string_view css_class,
            std::string_view anchor = "start", double size = kFont);
  void vertical_text(double x, double y, std::string_view text, std::string_view css_class);
  void path(std::string_view d, int style);
  void marker(double x, double y, int style, std::string_view tip = {}, double size = 1);
  std::string finish() &&;

 private:
  double width_;
  std::string out_;
};

/// Maps values of an axis to pixels.
class Scale {
 public:
  Scale(const Axis& axis, double low, double high, double from, double to);
  double operator()(double value) const;
  bool holds(double value) const;  ///< finite, and positive when logarithmic
  const std::vector<double>& ticks() const { return ticks_; }
  std::string label(double value) const;

 private:
  Axis axis_;
  double low_, high_, from_, to_;
  std::vector<double> ticks_;
};

/// "3.2 ms", "45 %", "16k", by unit.
std::string with_unit(double value, Axis::Unit unit);

}  // namespace lode
