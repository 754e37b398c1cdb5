// SPDX-License-Identifier: Apache-2.0
#include "doctor/scale_fit.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "numeric/e2m1.h"
#include "numeric/e4m3.h"
#include "numeric/nvfp4.h"
#include "tensor/scale_layout.h"

namespace tessera::doctor {

namespace {

constexpr int64_t kMinBlocks = 512, kMinGroups = 4, kMaxRows = 2048;
// Healthy matrices measure -0.5 to -0.75, scales of other codes -0.1 to 0.1.
constexpr double kFits = -0.3, kFitsNot = -0.2, kAdvantage = 0.25;
constexpr std::array kOthers = {ScaleOrder::kSwizzled, ScaleOrder::kColumnLater, ScaleOrder::kColumnEarlier,
                                ScaleOrder::kRowLater, ScaleOrder::kRowEarlier};

// Covariance sums of two values that are centred within their rows.
class RowCorrelation {
 public:
  void add_row(const std::vector<double>& a, const std::vector<double>& b) {
    const double n = static_cast<double>(a.size());
    count_ += n;
    double mean_a = 0, mean_b = 0;
    for (size_t i = 0; i < a.size(); ++i) mean_a += a[i] / n, mean_b += b[i] / n;
    for (size_t i = 0; i < a.size(); ++i) {
      const double da = a[i] - mean_a, db = b[i] - mean_b;
      aa_ += da * da, bb_ += db * db, ab_ += da * db;
    }
  }
  // Whether there was anything to correlate: constant scales (a uniform matrix in MXFP4) fit any order.
  bool varies() const { return aa_ > 1e-9 && bb_ > 1e-2 * count_; }
  // 0 where one of them does not vary.
  double value() const { return aa_ > 1e-9 && bb_ > 1e-9 ? ab_ / std::sqrt(aa_ * bb_) : 0; }

 private:
  double aa_ = 0, bb_ = 0, ab_ = 0, count_ = 0;
};

double code_spread(const uint8_t* codes) {
  double sum = 0;
  for (int i = 0; i < numeric::kNvfp4Block / 2; ++i) {
    const numeric::E2m1Pair& pair = numeric::kE2m1Pairs[codes[i]];
    sum += static_cast<double>(pair.low) * pair.low + static_cast<double>(pair.high) * pair.high;
  }
  return 0.5 * std::log(sum / numeric::kNvfp4Block + 1e-4);
}

double scale_size(uint8_t scale) {
  return std::log(static_cast<double>(numeric::kE4m3Values[scale & 0x7F]) + 1e-4);
}

}  // namespace

std::string_view describe(ScaleOrder order) {
  switch (order) {
    case ScaleOrder::kLinear:
      return "row by row";
    case ScaleOrder::kSwizzled:
      return "swizzled in tiles of 128x4 (the layout of Blackwell's tensor cores)";
    case ScaleOrder::kColumnLater:
      return "one block too late along the row";
    case ScaleOrder::kColumnEarlier:
      return "one block too early along the row";
    case ScaleOrder::kRowLater:
      return "one row too late";
    case ScaleOrder::kRowEarlier:
      return "one row too early";
  }
  return "?";
}

int64_t scale_index(ScaleOrder order, int64_t row, int64_t group, int64_t rows, int64_t groups) {
  switch (order) {
    case ScaleOrder::kLinear:
      break;
    case ScaleOrder::kSwizzled:
      return sf128x4_offset(row, group, groups);
    case ScaleOrder::kColumnLater:
      return row * groups + (group + 1) % groups;
    case ScaleOrder::kColumnEarlier:
      return row * groups + (group + groups - 1) % groups;
    case ScaleOrder::kRowLater:
      return (row + 1) % rows * groups + group;
    case ScaleOrder::kRowEarlier:
      return (row + rows - 1) % rows * groups + group;
  }
  return row * groups + group;
}

ScaleFit fit_scales(const ops::WeightView& weight) {
  ScaleFit fit;
  if (weight.format != ops::WeightFormat::kNvfp4) return fit;
  const int64_t groups = weight.cols / numeric::kNvfp4Block;
  if (groups < kMinGroups || weight.rows * groups < kMinBlocks) return fit;
  const uint8_t* codes = static_cast<const uint8_t*>(weight.data);
  const uint8_t* scales = static_cast<const uint8_t*>(weight.block_scales);
  const bool can_swizzle = weight.rows % kSfTileRows == 0 && groups % kSfTileGroups == 0;
  const int64_t step = weight.rows / std::min(weight.rows, kMaxRows);
  RowCorrelation linear;
  std::array<RowCorrelation, kOthers.size()> others;
  std::vector<double> spread(static_cast<size_t>(groups)), size(spread);
  for (int64_t row = 0; row < weight.rows; row += step) {
    for (int64_t g = 0; g < groups; ++g) {
      spread[static_cast<size_t>(g)] = code_spread(codes + (row * groups + g) * (numeric::kNvfp4Block / 2));
    }
    const auto add = [&](ScaleOrder order, RowCorrelation& correlation) {
      for (int64_t g = 0; g < groups; ++g) {
        size[static_cast<size_t>(g)] = scale_size(scales[scale_index(order, row, g, weight.rows, groups)]);
      }
      correlation.add_row(spread, size);
    };
    add(ScaleOrder::kLinear, linear);
    for (size_t i = 0; i < kOthers.size(); ++i) {
      if (kOthers[i] != ScaleOrder::kSwizzled || can_swizzle) add(kOthers[i], others[i]);
    }
  }
  fit.as_stored = linear.value();
  for (size_t i = 0; i < kOthers.size(); ++i) {
    if (others[i].value() < fit.best_other) fit.best_other = others[i].value(), fit.best_order = kOthers[i];
  }
  fit.can_judge = fit.as_stored < kFits || fit.best_other < kFits;
  fit.is_wrong = fit.as_stored > kFitsNot && fit.best_other < kFits && fit.best_other < fit.as_stored - kAdvantage;
  fit.fits_no_order = linear.varies() && fit.as_stored > kFitsNot && !fit.is_wrong;
  return fit;
}

}  // namespace tessera::doctor
