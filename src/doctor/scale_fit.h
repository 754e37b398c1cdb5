// SPDX-License-Identifier: Apache-2.0
#pragma once
// Do these block scales belong to these codes? A quantiser sets a block's scale from its largest value. Blocks of one
// row have about the same spread, so where chance makes the largest value large, the scale is large and the codes,
// which are divided by it, are small: within a row the logarithms of scale and of the codes' RMS are correlated near
// -0.6. Scales that belong to other codes (swizzled, shifted by a block) show a correlation near 0, and the right
// arrangement of the same bytes shows the negative one again.
#include <string>
#include <vector>

#include "ops/weight_view.h"

namespace tessera::doctor {

// One way in which the scales may lie: that of the checkpoint format, or a known mistake.
enum class ScaleOrder { kLinear, kSwizzled, kColumnLater, kColumnEarlier, kRowLater, kRowEarlier };

std::string_view describe(ScaleOrder order);  // "swizzled in tiles of 128x4", "shifted by one block along the row", ...

struct ScaleFit {
  bool can_judge = false;  // enough blocks, and scales that differ
  double as_stored = 0;    // correlation in the checkpoint's order
  double best_other = 0;   // the most negative one of the other orders
  ScaleOrder best_order = ScaleOrder::kLinear;
  bool is_wrong = false;       // another order fits, the stored one does not
  bool fits_no_order = false;  // the stored one does not fit, and no known one does either
};

// `weight` in kNvfp4, in the checkpoint's layout; other formats can't be judged (an FP8 matrix has too few blocks).
ScaleFit fit_scales(const ops::WeightView& weight);

// Where the scale of block (row, group) lies in `rows` x `groups` scales that are stored in `order`.
int64_t scale_index(ScaleOrder order, int64_t row, int64_t group, int64_t rows, int64_t groups);

}  // namespace tessera::doctor
