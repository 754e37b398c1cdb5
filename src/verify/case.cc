// SPDX-License-Identifier: Apache-2.0
#include "verify/case.h"

#include <algorithm>
#include <cmath>

#include "base/integer_math.h"
#include "numeric/nvfp4.h"
#include "verify/fills.h"

namespace tessera::verify {

std::vector<float> filled(Rng& rng, Fill fill, int64_t rows, int64_t cols) {
  if (fill == Fill::kMixed) return adversarial(rng, rows, cols);
  std::vector<float> x = normal_values(rng, rows, cols);
  for (float& value : x) {
    if (fill == Fill::kZero) value = std::copysign(0.0f, value);
    if (fill == Fill::kDenormal) value = std::ldexp(value, -130);
  }
  return x;
}

void* Arrays::bytes(const void* values, size_t count) {
  device::Buffer& buffer = buffers_.emplace_back(std::max<size_t>(count, 1));
  if (count > 0) std::memcpy(buffer.data(), values, count);
  return buffer.data();
}

TensorView Arrays::tensor(const std::vector<float>& values, DType dtype, const Shape& shape) {
  const device::Tensor rounded = as_tensor(values, dtype, shape);
  TensorView view = rounded.view();
  view.data = bytes(rounded.view().data, static_cast<size_t>(view.num_bytes()));
  return view;
}

ops::WeightView Arrays::weight(Rng& rng, ops::WeightFormat format, int64_t rows, int64_t cols) {
  RandomWeight weight = random_weight(rng, format, rows, cols);
  buffers_.push_back(std::move(weight.data));
  buffers_.push_back(std::move(weight.scales));
  return weight.view;
}

ops::WeightView Arrays::picking_weight(Rng& rng, int64_t rows, int64_t cols, uint8_t least, uint8_t most) {
  const ops::WeightView weight = this->weight(rng, ops::WeightFormat::kNvfp4, rows, cols);
  auto* codes = static_cast<uint8_t*>(const_cast<void*>(weight.data));
  auto* scales = static_cast<uint8_t*>(const_cast<void*>(weight.block_scales));
  std::memset(codes, 0, static_cast<size_t>(weight.data_bytes()));
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * cols + row % cols;
    codes[at / 2] = static_cast<uint8_t>((1 + rng.below(7)) << 4 * (at % 2));
    scales[at / numeric::kNvfp4Block] = static_cast<uint8_t>(least + rng.below(uint64_t{most} - least + 1));
  }
  return weight;
}

uint8_t* Arrays::entries(Rng& rng, Fill fill, const ops::EntryLayout& layout, int64_t count) {
  const std::vector<float> values = filled(rng, fill, count, layout.width);
  std::vector<uint8_t> encoded(static_cast<size_t>(count * layout.entry_bytes()));
  for (int64_t i = 0; i < count; ++i) {
    ops::encode_entry(layout, values.data() + i * layout.width, encoded.data() + i * layout.entry_bytes());
  }
  return array(encoded);
}

ops::PagedEntries<uint8_t> Arrays::paged_entries(Rng& rng, Fill fill, const ops::EntryLayout& layout, int64_t count,
                                                 int64_t num_rows, int shift, std::vector<TensorView>* pages) {
  constexpr int64_t kUnit = 16;  // what a cache's first byte in a page is a multiple of
  const int64_t per_page = int64_t{1} << shift, num_pages = ceil_div(count, per_page);
  const int64_t entry_bytes = layout.entry_bytes(), bytes = per_page * entry_bytes;
  const int64_t before = kUnit * static_cast<int64_t>(rng.below(4)), behind = kUnit;
  const uint8_t* all = entries(rng, fill, layout, count);
  // Any place of the table, any order of the pages in memory.
  const int64_t stride = num_pages + static_cast<int64_t>(rng.below(3)), num_places = 3;
  const int32_t place = static_cast<int32_t>(rng.below(static_cast<uint64_t>(num_places)));
  std::vector<int64_t> order(static_cast<size_t>(num_pages));
  for (size_t n = 0; n < order.size(); ++n) order[n] = static_cast<int64_t>(n);
  for (size_t n = 0; n < order.size(); ++n) std::swap(order[n], order[n + rng.below(order.size() - n)]);
  std::vector<uint8_t*> table(static_cast<size_t>(num_places * stride));
  for (const int64_t page : order) {
    std::vector<uint8_t> image(static_cast<size_t>(before + bytes + behind), 0xFF);
    const int64_t first = page * per_page, held = std::min(per_page, count - first);
    std::memcpy(image.data() + before, all + first * entry_bytes, static_cast<size_t>(held * entry_bytes));
    const TensorView view{array(image), DType::kU8, {static_cast<int64_t>(image.size())}};
    table[static_cast<size_t>(place * stride + page)] = view.as<uint8_t>();
    if (pages != nullptr) pages->push_back(view);
  }
  const std::vector<int32_t> places(static_cast<size_t>(num_rows), place);
  return {array(table), stride, array(places), before, shift};
}

TensorView Arrays::output(const char* name, DType dtype, const Shape& shape, Rule rule, double bound) {
  TensorView view{nullptr, dtype, shape};
  const std::vector<uint8_t> poison(static_cast<size_t>(view.num_bytes()), 0xFF);  // a NaN in FP32 and BF16
  view.data = array(poison);
  updates(name, view, rule, bound);
  return view;
}

void Arrays::updates(const char* name, const TensorView& view, Rule rule, double bound) {
  if (rule != Rule::kBits && bound == 0) bound = view.dtype == DType::kF32 ? kF32Bound : kBf16Bound;
  const auto* begin = view.as<unsigned char>();
  outputs_.push_back({name, view, rule, bound, true, {begin, begin + view.num_bytes()}});
}

void Arrays::clobbers(const char* name, const TensorView& view) {
  updates(name, view, Rule::kBits);
  outputs_.back().is_compared = false;
}

}  // namespace tessera::verify
